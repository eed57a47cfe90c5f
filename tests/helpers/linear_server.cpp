// Answers calls of few_rows, whose arguments are the words of qt_linear.
#include "structs.h"

#include "server.h"

namespace qt_baseline {
bool few_rows(const CQuantizer& quantizer, const LinearCall& call);
}

struct Words {
    int64_t word[19];
};

int main() {
    return serve<Words>([](const Words& words) {
        const auto at = [&](int i) { return (void*)words.word[i]; };
        const auto number = [&](int i) { return words.word[i]; };
        const LinearCall call{at(1),
                              i32(number(2)),
                              number(3),
                              number(4),
                              number(5),
                              number(6),
                              {(u8*)at(8), at(9), (float*)at(10), nullptr},
                              (float*)at(11),
                              (float*)at(12),
                              number(13),
                              (float*)at(14),
                              at(15),
                              i32(number(16)),
                              1,
                              NO_SIDE};
        return qt_baseline::few_rows(*(const CQuantizer*)at(0), call);
    });
}
