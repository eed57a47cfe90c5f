// Answers calls of qt_quantize and qt_dequantize: a word that is 0 or 1, then the words of the function.
#undef QT_DTYPE  // It serves all dtypes.
#define QT_PIECE
#define QT_QUANTIZE
#define QT_DEQUANTIZE
#include "c_interface.cpp"
#include "dequantize_float16.cpp"
#include "quantize_float16.cpp"
#include "server.h"

struct Arguments {
    i64 decodes;
    union {
        QuantizeArguments quantize;
        DequantizeArguments dequantize;
    };
};

int main() {
    return serve<Arguments>([](const Arguments& a) {
        return (a.decodes ? qt_dequantize(&a.dequantize) : qt_quantize(&a.quantize)) == DONE;
    });
}
