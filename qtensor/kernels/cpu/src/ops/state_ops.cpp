// The ops on the state of delayed scaling (library/delayed.py): few numbers, for which torch would need about
// twenty calls.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "steps.h"

namespace ops {

namespace {

constexpr i64 LARGEST_MARGIN = 1000;
constexpr float LARGEST_FLOAT = std::numeric_limits<float>::max();

// As torch.maximum: a NaN stays.
float larger(float a, float b) { return a != a || a > b ? a : b; }

// The state of a layer. Its columns are the tensors of the forward pass, then the gradients.
struct State {
    float *scale, *history;  // (columns), (length or more, columns)
    i64* steps;              // (2)
    const float* cell;       // (gradients)
    i64 cell_step, step;
    i64 length, columns, gradients;
};

// Moves the history up by one row, and computes new scales.
void begin_step(const State& s, bool most_recent, const float* largest, float divisor) {
    if (s.cell_step > s.steps[1]) {
        float* gradients = s.history + s.columns - s.gradients;
        for (i64 i = 0; i < s.gradients; i++) gradients[i] = larger(gradients[i], s.cell[i]);
    }
    for (i64 i = 0; i < s.columns; i++) {
        float amax = s.history[i];
        for (i64 r = 1; r < (most_recent ? 1 : s.length); r++)
            amax = larger(amax, s.history[r * s.columns + i]);
        float scale = ((1.0f / amax) * largest[i]) / divisor;
        if (std::isinf(scale)) scale = LARGEST_FLOAT;
        if (amax > 0 && std::isfinite(amax)) s.scale[i] = scale;
    }
    // The rows move up by one, the first to the end. Then row 0 becomes empty: a new step begins.
    std::rotate(s.history, s.history + s.columns, s.history + s.length * s.columns);
    std::fill(s.history, s.history + s.columns, 0.0f);
    s.steps[0] = s.step;
    s.steps[1] = std::max(s.steps[1], s.cell_step);
}

// Writes maxima one after the other to `target`; with `keep_larger` the larger of each maximum and the number
// that is there.
void fold(float* target, bool keep_larger, const std::vector<Tensor>& amax) {
    for (const Tensor& t : amax)
        for (i64 i = 0; i < t.shape.size[0]; i++, target++) {
            const float value = ((const float*)t.data)[i];
            *target = keep_larger ? larger(*target, value) : value;
        }
}

// Reads a list of vectors. Returns the number of their elements, or -1 if one is not a vector.
i64 read_maxima(Arguments& call, int i, std::vector<Tensor>& amax) {
    i64 count = 0;
    if (!call.tensors(i, amax)) return -1;
    for (const Tensor& t : amax) {
        if (!t.is(FLOAT32) || t.shape.dim != 1) return -1;
        count += t.shape.size[0];
    }
    return count;
}

// Lets autograd notice that a tensor has changed: torch has no other function for it that C can call. It
// fails for tensors of inference mode, which have no version.
void bump_version(const Tensor& t) { (void)torch.aoti_torch_copy_(t.handle, t.handle, 0); }

}  // namespace

bool delayed_begin(Arguments& call, Tensors& results) {
    enum { SCALE, HISTORY, STEPS, CELL, CELL_STEP, STEP, ADVANCE, LENGTH };
    enum { ALGORITHM = LENGTH + 1, MARGIN, LARGEST, ROWS_GIVEN, NEW_SCALE, REPORT, KEPT };
    Tensor scale, history, steps, cell, cell_step, step, report;
    if (call.has(ROWS_GIVEN) || call.has(NEW_SCALE)) return false;  // of a recipe of the user
    if (!call.tensor(SCALE, scale) || !scale.is(FLOAT32) || scale.shape.dim != 1) return false;
    if (!call.tensor(HISTORY, history) || !history.is(FLOAT32) || history.shape.dim != 2) return false;
    if (!call.tensor(CELL, cell) || !cell.is(FLOAT32) || cell.shape.dim != 1) return false;
    if (!call.tensor(STEPS, steps) || !steps.is_vector(INT64, 2)) return false;
    if (!call.tensor(CELL_STEP, cell_step) || !cell_step.is_vector(INT64, 1)) return false;
    if (!call.tensor(STEP, step) || !step.is_vector(INT64, 1)) return false;
    if (call.has(REPORT) && !(call.tensor(REPORT, report) && report.is_vector(INT64, 2))) return false;
    const i64 columns = scale.shape.size[0], gradients = cell.shape.size[0];
    const i64 length = call.word(LENGTH), margin = call.word(MARGIN);
    if (columns < 1 || history.shape.size[1] != columns || gradients > columns) return false;
    if (length < 1 || length > history.shape.size[0] || std::abs(margin) > LARGEST_MARGIN) return false;
    const std::string_view algorithm = call.text(ALGORITHM);
    if (algorithm != "max" && algorithm != "most_recent") return false;
    std::vector<float> largest;
    for (const Value word : call.numbers(LARGEST)) {
        double value;
        memcpy(&value, &word, sizeof value);
        if (!(std::fabs(value) <= LARGEST_FLOAT)) return false;
        largest.push_back(float(value));
    }
    if (i64(largest.size()) != columns) return false;

    // A checkpoint that computes the call again gets the results of its first run. Python finds them.
    if (call.has(REPORT) && (call.flag(KEPT) || may_run_again())) return false;
    const bool begins =
        call.flag(ADVANCE) && *(const i64*)step.data != *(const i64*)steps.data && !in_backward();
    const State state{(float*)scale.writable(),
                      (float*)history.writable(),
                      (i64*)steps.writable(),
                      (const float*)cell.data,
                      *(const i64*)cell_step.data,
                      *(const i64*)step.data,
                      length,
                      columns,
                      gradients};
    if (!state.scale || !state.history || !state.steps) return false;
    auto* scales = (float*)results.add(scale.shape, FLOAT32);
    auto* ticket = (i64*)results.add(steps.shape, INT64);
    if (begins) {
        begin_step(state, algorithm == "most_recent", largest.data(), float(std::ldexp(1.0, int(margin))));
        bump_version(scale);
    }
    std::copy(state.scale, state.scale + columns, scales);
    std::copy(state.steps, state.steps + 2, ticket);
    return true;
}

bool record_amax(Arguments& call, Tensors&) {
    Tensor history;
    std::vector<Tensor> amax;
    const i64 first = call.word(2), count = read_maxima(call, 1, amax);
    if (count < 0 || !call.tensor(0, history) || !history.is(FLOAT32) || history.shape.dim != 2) return false;
    if (history.shape.size[0] < 1 || first < 0 || first > history.shape.size[1] - count) return false;
    if (in_backward()) return true;  // a checkpoint calls the layer again
    auto* row = (float*)history.writable();
    if (row) fold(row + first, true, amax);
    return row;
}

bool record_gradient_amax(Arguments& call, Tensors&) {
    Tensor cell, cell_step, ticket;
    std::vector<Tensor> amax;
    if (!call.tensor(1, cell_step) || !cell_step.is_vector(INT64, 1)) return false;
    if (!call.tensor(3, ticket) || !ticket.is_vector(INT64, 2)) return false;
    const i64 count = read_maxima(call, 2, amax);
    if (count < 1 || !call.tensor(0, cell) || !cell.is_vector(FLOAT32, count)) return false;
    auto* values = (float*)cell.writable();
    auto* last = (i64*)cell_step.writable();
    const auto* given = (const i64*)ticket.data;
    if (!values || !last) return false;
    fold(values, *last > given[1], amax);
    *last = std::max(*last, given[0]);
    return true;
}

bool advance_step(Arguments& call, Tensors&) {
    Tensor step, counter;
    if (!call.tensor(0, step) || !step.is_vector(INT64, 1)) return false;
    if (call.has(2) && (!call.tensor(2, counter) || !counter.is_vector(INT64, 1))) return false;
    // A checkpoint calls the layer again during a backward pass.
    if (call.flag(1) && in_backward()) return true;
    auto* number = (i64*)step.writable();
    auto* shared = call.has(2) ? (i64*)counter.writable() : nullptr;
    if (!number || (call.has(2) && !shared)) return false;
    // No two steps of a shared counter get one number.
    *number = shared ? __atomic_add_fetch(shared, 1, __ATOMIC_SEQ_CST) : *number + 1;
    return true;
}

}  // namespace ops
