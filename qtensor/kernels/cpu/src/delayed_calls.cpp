// Answers the ops on the state of delayed scaling (library/delayed.py) without entering Python. The kernels
// in delayed_scaling.cpp trust every size, so each op checks all of them first. A call that fails a check
// runs the op's Python kernel, which refuses it or serves it in another way.
#include "small_calls.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <atomic>
#include <cfloat>
#include <cmath>

using c10::IValue;
using small_calls::i64;
using Arguments = at::ArrayRef<IValue>;

namespace {

constexpr i64 LARGEST_MARGIN = 1000;

// ---- the kernels in delayed_scaling.cpp, which has the same structs
struct BeginArguments {
    void *scale, *history, *steps;
    const void *cell, *cell_step, *step;
    void *scales_out, *steps_out;
    i64 advance, length, columns, gradients, most_recent;
    double divisor;
};
struct Maxima {
    const void* values;
    i64 count;
};
using Begin = void (*)(const BeginArguments*, const float* largest_codes);
using RecordMaxima = void (*)(float* row, const Maxima* pieces, i64 count);
using RecordGradientMaxima = void (*)(void* cell, void* cell_step, const void* ticket, const Maxima* pieces,
                                      i64 count);

// Returns whether a kernel can access the elements of `t` as an array.
bool is_plain(const at::Tensor& t, at::ScalarType dtype) {
    if (!t.defined() || !t.is_cpu() || t.layout() != at::kStrided || t.scalar_type() != dtype) return false;
    if (!t.is_contiguous() || t.is_neg() || t._is_zerotensor() || !t.has_storage()) return false;
    const auto end = size_t(t.storage_offset() + t.numel()) * t.itemsize();
    return t.storage().nbytes() >= end && t.const_data_ptr();
}
bool is_plain(const IValue& value, at::ScalarType dtype) {
    return value.isTensor() && is_plain(value.toTensor(), dtype);
}
// Returns whether a kernel can access a vector of `count` elements.
bool is_plain(const IValue& value, at::ScalarType dtype, i64 count) {
    return is_plain(value, dtype) && value.toTensor().dim() == 1 && value.toTensor().numel() == count;
}
// The address of a tensor, which a kernel writes without a change of the tensor's version.
void* address(const IValue& value) { return const_cast<void*>(value.toTensor().const_data_ptr()); }

// Appends the addresses of `amax`, and returns the number of their elements; -1 if one is not plain.
i64 add_maxima(const IValue& amax, std::vector<Maxima>& pieces) {
    if (!amax.isTensorList()) return -1;
    i64 count = 0;
    const auto tensors = amax.toTensorList();
    for (size_t i = 0; i < tensors.size(); i++) {
        const at::Tensor t = tensors.get(i);
        if (!is_plain(t, at::kFloat) || t.dim() != 1) return -1;
        pieces.push_back({t.const_data_ptr(), t.numel()});
        count += t.numel();
    }
    return count;
}

bool is_in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }
// Returns whether a checkpoint may compute a call again, or does so now. Python finds out which one
// (library/recomputation.py).
bool is_in_checkpoint() { return is_in_backward() || at::SavedTensorDefaultHooks::get_hooks(true); }

// ---- the ops. Each function takes the arguments of the op's schema, and adds its results to `results`. It
// returns false, with nothing written, if a check fails.

bool begin_step(void* kernel, Arguments arguments, torch::jit::Stack& results) {
    const IValue &scale = arguments[0], &history = arguments[1], &cell = arguments[3];
    if (arguments[13].isTensor() && (arguments[14].toBool() || is_in_checkpoint())) return false;
    const bool is_by_recipe = arguments[11].isNone() && arguments[12].isNone();
    if (!is_by_recipe || !is_plain(scale, at::kFloat) || !is_plain(history, at::kFloat)) return false;
    const i64 columns = scale.toTensor().numel(), length = arguments[7].toInt(),
              margin = arguments[9].toInt();
    const auto sizes = history.toTensor().sizes();
    if (scale.toTensor().dim() != 1 || sizes.size() != 2 || sizes[1] != columns) return false;
    if (length < 1 || length > sizes[0] || std::abs(margin) > LARGEST_MARGIN) return false;
    if (!is_plain(cell, at::kFloat) || cell.toTensor().dim() != 1) return false;
    if (cell.toTensor().numel() > columns) return false;
    if (!is_plain(arguments[2], at::kLong, 2)) return false;
    if (!is_plain(arguments[4], at::kLong, 1) || !is_plain(arguments[5], at::kLong, 1)) return false;
    const std::string& algorithm = arguments[8].toStringRef();
    if (algorithm != "max" && algorithm != "most_recent") return false;
    std::vector<float> largest_codes;
    for (const double value : arguments[10].toDoubleList()) {
        if (!(std::fabs(value) <= FLT_MAX)) return false;
        largest_codes.push_back(float(value));
    }
    if (i64(largest_codes.size()) != columns) return false;
    at::Tensor scales(at::detail::empty_cpu({columns}, at::kFloat));
    at::Tensor ticket(at::detail::empty_cpu({2}, at::kLong));
    const BeginArguments packed{
        address(scale),
        address(history),
        address(arguments[2]),
        address(cell),
        address(arguments[4]),
        address(arguments[5]),
        scales.mutable_data_ptr(),
        ticket.mutable_data_ptr(),
        arguments[6].toBool() && !is_in_backward(),
        length,
        columns,
        cell.toTensor().numel(),
        algorithm == "most_recent",
        std::ldexp(1.0, int(margin)),
    };
    const bool begins = packed.advance && *(const i64*)packed.step != *(const i64*)packed.steps;
    ((Begin)kernel)(&packed, largest_codes.data());
    if (begins && !scale.toTensor().is_inference()) scale.toTensor().unsafeGetTensorImpl()->bump_version();
    torch::jit::push(results, std::move(scales), std::move(ticket));
    return true;
}

bool record_maxima(void* kernel, Arguments arguments, torch::jit::Stack&) {
    if (is_in_backward()) return true;  // a checkpoint calls the layer again
    if (!is_plain(arguments[0], at::kFloat)) return false;
    const auto sizes = arguments[0].toTensor().sizes();
    const i64 first = arguments[2].toInt();
    std::vector<Maxima> pieces;
    const i64 count = add_maxima(arguments[1], pieces);
    if (sizes.size() != 2 || sizes[0] < 1 || count < 0) return false;
    if (first < 0 || first > sizes[1] - count) return false;
    ((RecordMaxima)kernel)((float*)address(arguments[0]) + first, pieces.data(), i64(pieces.size()));
    return true;
}

bool record_gradient_maxima(void* kernel, Arguments arguments, torch::jit::Stack&) {
    if (!is_plain(arguments[1], at::kLong, 1) || !is_plain(arguments[3], at::kLong, 2)) return false;
    std::vector<Maxima> pieces;
    const i64 count = add_maxima(arguments[2], pieces);
    if (count < 0 || !is_plain(arguments[0], at::kFloat, count)) return false;
    ((RecordGradientMaxima)kernel)(address(arguments[0]), address(arguments[1]), address(arguments[3]),
                                   pieces.data(), i64(pieces.size()));
    return true;
}

bool advance_step(void*, Arguments arguments, torch::jit::Stack&) {
    if (!is_plain(arguments[0], at::kLong, 1)) return false;
    if (!arguments[2].isNone() && !is_plain(arguments[2], at::kLong, 1)) return false;
    // A checkpoint calls the layer again during a backward pass.
    if (arguments[1].toBool() && is_in_backward()) return true;
    auto* step = (i64*)address(arguments[0]);
    if (arguments[2].isNone()) {
        ++*step;
        return true;
    }
    // No two steps of a shared counter get one number.
    std::scoped_lock lock(small_calls::tables_mutex);
    *step = ++*(i64*)address(arguments[2]);
    return true;
}

using Answer = bool (*)(void* kernel, Arguments arguments, torch::jit::Stack& results);

class StateKernel : public c10::OperatorKernel {
    const Answer answer_;
    void* const kernel_;

public:
    StateKernel(Answer answer, void* kernel) : answer_(answer), kernel_(kernel) {}
    void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet, torch::jit::Stack* stack) {
        const size_t count = handle.schema().arguments().size();
        torch::jit::Stack results;
        if (small_calls::answers_calls() && answer_(kernel_, torch::jit::last(*stack, count), results)) {
            torch::jit::drop(*stack, count);
            for (IValue& result : results) stack->push_back(std::move(result));
            return;
        }
        handle.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, *stack);
    }
};

Answer answer_of(const std::string& name) {
    if (name == "delayed_begin_") return begin_step;
    if (name == "record_amax_") return record_maxima;
    if (name == "record_gradient_amax_") return record_gradient_maxima;
    return name == "advance_step_" ? advance_step : nullptr;
}

}  // namespace

// Registers the kernel of an op of qtensor on the CPU, which calls `kernel` of delayed_scaling.cpp. A second
// call for the same op has no effect. Returns 0 if the op is one of this file.
extern "C" int qt_register_state_op(const char* name, void* kernel) {
    static auto* names = new std::unordered_set<std::string>;
    const Answer answer = answer_of(name);
    if (!answer) return 1;
    std::scoped_lock lock(small_calls::tables_mutex);
    if (!names->insert(name).second) return 0;
    // Never freed: calls may come at the end of the process.
    auto* library =
        new torch::Library(torch::Library::IMPL, "qtensor", c10::DispatchKey::CPU, __FILE__, __LINE__);
    library->impl(name,
                  torch::CppFunction::makeFromBoxedFunctor(std::make_unique<StateKernel>(answer, kernel)));
    return 0;
}
