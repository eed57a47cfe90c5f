// The ops on the state of delayed scaling (library/delayed.py). The kernels in delayed_scaling.cpp trust
// every size, so each op checks all of them first.
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstdlib>

#include "steps.h"

namespace ops {

namespace {

constexpr i64 LARGEST_MARGIN = 1000;

// Adds the maxima of a list of vectors. Returns the number of their elements, or -1 if one is not a vector.
i64 add_maxima(Arguments& call, int i, std::vector<Maxima>& pieces) {
    std::vector<Tensor> amax;
    if (!call.tensors(i, amax)) return -1;
    i64 count = 0;
    for (const Tensor& t : amax) {
        if (!t.is(FLOAT32) || t.shape.dim != 1) return -1;
        pieces.push_back({(const float*)t.data, t.shape.size[0]});
        count += t.shape.size[0];
    }
    return count;
}

// Lets autograd notice that a tensor has changed: torch has no other function for it that C can call. It
// fails for tensors of inference mode, which have no version.
void bump_version(const Tensor& t) { (void)torch.aoti_torch_copy_(t.handle, t.handle, 0); }

}  // namespace

bool delayed_begin(Arguments& call, Tensors& results) {
    enum {
        SCALE,
        HISTORY,
        STEPS,
        CELL,
        CELL_STEP,
        STEP,
        ADVANCE,
        LENGTH,
        ALGORITHM,
        MARGIN,
        LARGEST,
        ROWS_GIVEN
    };
    enum { NEW_SCALE = ROWS_GIVEN + 1, REPORT, KEPT };
    Tensor scale, history, steps, cell, cell_step, step;
    if (call.has(ROWS_GIVEN) || call.has(NEW_SCALE)) return false;  // of a recipe of the user
    if (!call.tensor(SCALE, scale) || !scale.is(FLOAT32) || scale.shape.dim != 1) return false;
    if (!call.tensor(HISTORY, history) || !history.is(FLOAT32) || history.shape.dim != 2) return false;
    if (!call.tensor(CELL, cell) || !cell.is(FLOAT32) || cell.shape.dim != 1) return false;
    if (!call.tensor(STEPS, steps) || !steps.is_vector(INT64, 2)) return false;
    if (!call.tensor(CELL_STEP, cell_step) || !cell_step.is_vector(INT64, 1)) return false;
    if (!call.tensor(STEP, step) || !step.is_vector(INT64, 1)) return false;
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
        if (!(std::fabs(value) <= FLT_MAX)) return false;
        largest.push_back(float(value));
    }
    if (i64(largest.size()) != columns) return false;

    bool begins = call.flag(ADVANCE) && *(const i64*)step.data != *(const i64*)steps.data;
    if (begins || call.has(REPORT)) {
        const i32 now = situation();
        // A checkpoint that computes the call again gets the results of its first run. Python finds them.
        if (call.has(REPORT) && (call.flag(KEPT) || now)) return false;
        begins = begins && !(now & IN_BACKWARD);
    }
    BeginArguments a{};
    a.scale = (float*)scale.writable(), a.history = (float*)history.writable(),
    a.steps = (i64*)steps.writable();
    if (!a.scale || !a.history || !a.steps) return false;
    a.cell = (const float*)cell.data, a.cell_step = (const i64*)cell_step.data,
    a.step = (const i64*)step.data;
    a.scales_out = (float*)results.add(scale.shape, FLOAT32);
    a.steps_out = (i64*)results.add(steps.shape, INT64);
    a.advance = begins, a.length = length, a.columns = columns, a.gradients = gradients;
    a.most_recent = algorithm == "most_recent";
    a.divisor = std::ldexp(1.0, int(margin));
    kernels.begin(&a, largest.data());
    if (begins) bump_version(scale);
    return true;
}

bool record_amax(Arguments& call, Tensors&) {
    Tensor history;
    std::vector<Maxima> pieces;
    const i64 first = call.word(2), count = add_maxima(call, 1, pieces);
    if (count < 0 || !call.tensor(0, history) || !history.is(FLOAT32) || history.shape.dim != 2) return false;
    if (history.shape.size[0] < 1 || first < 0 || first > history.shape.size[1] - count) return false;
    if (situation() & IN_BACKWARD) return true;  // a checkpoint calls the layer again
    auto* row = (float*)history.writable();
    if (!row) return false;
    kernels.record(row + first, pieces.data(), i64(pieces.size()));
    return true;
}

bool record_gradient_amax(Arguments& call, Tensors&) {
    Tensor cell, cell_step, ticket;
    std::vector<Maxima> pieces;
    if (!call.tensor(1, cell_step) || !cell_step.is_vector(INT64, 1)) return false;
    if (!call.tensor(3, ticket) || !ticket.is_vector(INT64, 2)) return false;
    const i64 count = add_maxima(call, 2, pieces);
    if (count < 1 || !call.tensor(0, cell) || !cell.is_vector(FLOAT32, count)) return false;
    auto* values = (float*)cell.writable();
    auto* number = (i64*)cell_step.writable();
    if (!values || !number) return false;
    kernels.record_gradient(values, number, (const i64*)ticket.data, pieces.data(), i64(pieces.size()));
    return true;
}

bool advance_step(Arguments& call, Tensors&) {
    Tensor step, counter;
    if (!call.tensor(0, step) || !step.is_vector(INT64, 1)) return false;
    if (call.has(2) && (!call.tensor(2, counter) || !counter.is_vector(INT64, 1))) return false;
    // A checkpoint calls the layer again during a backward pass.
    if (call.flag(1) && situation() & IN_BACKWARD) return true;
    auto* number = (i64*)step.writable();
    auto* shared = call.has(2) ? (i64*)counter.writable() : nullptr;
    if (!number || (call.has(2) && !shared)) return false;
    // No two steps of a shared counter get one number.
    *number = shared ? __atomic_add_fetch(shared, 1, __ATOMIC_SEQ_CST) : *number + 1;
    return true;
}

}  // namespace ops
