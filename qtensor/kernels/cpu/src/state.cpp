// The state of delayed scaling (library/delayed.py): a few numbers, which torch would move in some twenty calls.
#include <cfloat>
#include <cmath>
#include <cstring>

#include "denormals.h"
#include "plan.h"

namespace QT_NAMESPACE {

// As torch.maximum: a NaN stays.
static inline float larger(float a, float b) { return a != a || a > b ? a : b; }

// As native code packs them: 8 bytes each, at any address.
struct BeginArguments {
    float *scale, *history;           // (n), (length or more, n)
    i64* steps;                       // (2)
    const float* cell;                // (gradients)
    const i64 *cell_step, *step;
    float* scales_out;                // (n)
    i64* steps_out;
    i64 advance, length, n, gradients, most_recent;
    double divisor;                   // 2^margin
};

static void begin(const BeginArguments& a, const float* largest) {
    if (a.advance && *a.step != a.steps[0]) {
        if (*a.cell_step > a.steps[1]) {
            float* row = a.history + a.n - a.gradients;
            for (i64 i = 0; i < a.gradients; i++) row[i] = larger(row[i], a.cell[i]);
        }
        for (i64 i = 0; i < a.n; i++) {
            float amax = a.history[i];
            for (i64 r = 1; r < a.length && !a.most_recent; r++) amax = larger(amax, a.history[r * a.n + i]);
            float scale = ((1.0f / amax) * largest[i]) / float(a.divisor);
            if (std::isinf(scale)) scale = FLT_MAX;
            if (amax > 0 && std::isfinite(amax)) a.scale[i] = scale;
        }
        // Rows move up by one, the first to the end; a new, empty one begins.
        const size_t row = sizeof(float) * size_t(a.n);
        if (a.length > 1) {
            float* last = a.history + (a.length - 1) * a.n;
            float* first = new float[size_t(a.n)];
            memcpy(first, a.history, row);
            memmove(a.history, a.history + a.n, row * size_t(a.length - 1));
            memcpy(last, first, row);
            delete[] first;
        }
        memset(a.history, 0, row);
        a.steps[1] = *a.cell_step > a.steps[1] ? *a.cell_step : a.steps[1];
        a.steps[0] = *a.step;
    }
    memcpy(a.scales_out, a.scale, sizeof(float) * size_t(a.n));
    memcpy(a.steps_out, a.steps, 2 * sizeof(i64));
}

struct Found {
    const float* p;
    i64 count;
};
// `found`, one behind the other, to `target`; the larger of both where `keep`.
static void fold(float* target, bool keep, const void* found, i64 pieces) {
    for (i64 i = 0; i < pieces; i++) {
        Found piece;
        memcpy(&piece, (const u8*)found + sizeof(Found) * size_t(i), sizeof piece);
        for (i64 j = 0; j < piece.count; j++, target++) *target = keep ? larger(*target, piece.p[j]) : piece.p[j];
    }
}

}  // namespace QT_NAMESPACE
using namespace QT_NAMESPACE;

extern "C" {

// `delayed_begin_`.
void qt_delayed_begin(const void* packed, const void* largest) {
    const KeepDenormals scope;
    BeginArguments a;
    memcpy(&a, packed, sizeof a);
    float* values = new float[size_t(a.n)];
    memcpy(values, largest, sizeof(float) * size_t(a.n));
    begin(a, values);
    delete[] values;
}

// `record_amax_`: row is where the maxima belong.
void qt_record_amax(float* row, const void* found, i64 pieces) {
    const KeepDenormals scope;
    fold(row, true, found, pieces);
}

// `record_gradient_amax_`.
void qt_record_gradient_amax(float* cell, i64* cell_step, const i64* ticket, const void* found, i64 pieces) {
    const KeepDenormals scope;
    fold(cell, *cell_step > ticket[1], found, pieces);
    if (ticket[0] > *cell_step) *cell_step = ticket[0];
}
}
