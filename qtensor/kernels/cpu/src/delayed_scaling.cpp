// The state of delayed scaling (library/delayed.py): few numbers, for which torch would need about twenty
// calls. state.py checks every size before it calls these functions.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "denormals.h"
#include "structs.h"

namespace QT_NAMESPACE {

// As torch.maximum: a NaN stays.
static inline float larger(float a, float b) { return a != a || a > b ? a : b; }

// `largest_codes` holds `columns` floats, at any address.
static void begin(const BeginArguments& a, const void* largest_codes) {
    const size_t row_bytes = sizeof(float) * size_t(a.columns);
    if (a.advance && *a.step != a.steps[0]) {
        if (*a.cell_step > a.steps[1]) {
            float* gradients = a.history + a.columns - a.gradients;
            for (i64 i = 0; i < a.gradients; i++) gradients[i] = larger(gradients[i], a.cell[i]);
        }
        const i64 rows = a.most_recent ? 1 : a.length;
        for (i64 i = 0; i < a.columns; i++) {
            float amax = a.history[i];
            for (i64 r = 1; r < rows; r++) amax = larger(amax, a.history[r * a.columns + i]);
            float largest;
            memcpy(&largest, (const char*)largest_codes + sizeof(float) * size_t(i), sizeof largest);
            float scale = ((1.0f / amax) * largest) / float(a.divisor);
            if (std::isinf(scale)) scale = FLT_MAX;
            if (amax > 0 && std::isfinite(amax)) a.scale[i] = scale;
        }
        // The rows move up by one, the first to the end. Then row 0 becomes empty: a new step begins.
        std::rotate(a.history, a.history + a.columns, a.history + a.length * a.columns);
        memset(a.history, 0, row_bytes);
        if (*a.cell_step > a.steps[1]) a.steps[1] = *a.cell_step;
        a.steps[0] = *a.step;
    }
    memcpy(a.scales_out, a.scale, row_bytes);
    memcpy(a.steps_out, a.steps, 2 * sizeof(i64));
}

// Writes `pieces` runs of maxima (packed as Maxima, at any address) one after the other to `target`; with
// `keep_larger` the larger of each maximum and the number that is there.
static void fold(float* target, bool keep_larger, const void* packed, i64 pieces) {
    for (i64 i = 0; i < pieces; i++) {
        Maxima piece;
        memcpy(&piece, (const u8*)packed + sizeof(Maxima) * size_t(i), sizeof piece);
        for (i64 j = 0; j < piece.count; j++, target++)
            *target = keep_larger ? larger(*target, piece.values[j]) : piece.values[j];
    }
}

}  // namespace QT_NAMESPACE
using namespace QT_NAMESPACE;

extern "C" {

// `delayed_begin_`.
void qt_delayed_begin(const void* packed, const void* largest_codes) {
    const KeepDenormals scope;
    BeginArguments arguments;
    memcpy(&arguments, packed, sizeof arguments);
    begin(arguments, largest_codes);
}

// `record_amax_`; `row` is where the first maximum belongs.
void qt_record_amax(float* row, const void* packed, i64 pieces) {
    const KeepDenormals scope;
    fold(row, true, packed, pieces);
}

// `record_gradient_amax_`.
void qt_record_gradient_amax(float* cell, i64* cell_step, const i64* ticket, const void* packed, i64 pieces) {
    const KeepDenormals scope;
    fold(cell, *cell_step > ticket[1], packed, pieces);
    if (ticket[0] > *cell_step) *cell_step = ticket[0];
}
}
