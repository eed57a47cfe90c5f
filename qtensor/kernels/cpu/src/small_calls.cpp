// Answers small calls of ops without entering Python, with programs that Python planned for the same
// description of a call. Every other call runs the op's Python kernel; when a description comes for the
// second time, Python plans a program for it (kernels/cpu/small_calls/). This file is compiled against
// torch's headers into a library of its own, so that the other kernels do not need those headers.
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

using c10::IValue;
using i64 = int64_t;

namespace {

constexpr size_t MAX_DESCRIPTIONS = 16384;  // of each op
constexpr i64 MAX_ELEMENTS = 1 << 19;       // of the first tensor; a call with a larger one is not described
constexpr uintptr_t ALIGNMENT = 16;
using RunProgram = int (*)(const void* program, const void* addresses);

// ---- what answers.py passes
// Where an address of a program comes from: `offset` bytes after the start of tensor number `tensor` of the
// call, or of output number -1 - `tensor`.
struct AddressSource {
    i64 tensor, offset;
};
struct CallProgram {
    const void* program;
    std::vector<AddressSource> addresses;
    i64 cleared_outputs;  // bit i: output i starts as zeros
};

// ---- what is remembered for a description
struct Output {
    std::vector<i64> size, stride;
    at::ScalarType dtype;
};
struct Answer {
    CallProgram call;
    std::vector<Output> outputs;
    enum { Tensor, List, Nothing } returns;
};

struct Op {
    std::string name;
    RunProgram run;
    bool packs_first;  // a first tensor that is not contiguous is copied
    std::shared_mutex mutex;
    std::unordered_map<std::string, std::unique_ptr<Answer>> answers;  // null: no program serves such a call
    std::unordered_set<size_t> seen_once;                              // hashes of descriptions
};

// A call whose Python kernel may pass a program.
struct ProgramRequest {
    const Op& op;
    std::optional<CallProgram> received;
};

std::atomic<bool> enabled{true};
// The request of the innermost call whose Python kernel runs in this thread, or null.
thread_local ProgramRequest* current_request = nullptr;

// The description of a call, which is everything that its program depends on, and the addresses of its
// tensors in order. An address is that of the tensor's first element, wherever its storage begins; it is read
// again at each call.
struct CallDescription {
    std::string key;
    std::vector<const void*> addresses;
    at::Tensor packed;  // the contiguous copy of the first tensor, if there is one

    CallDescription() {
        key.reserve(384);
        addresses.reserve(12);
    }

    // Returns whether a matrix is the transpose of a contiguous one.
    static bool is_transposed(const at::Tensor& t) {
        return t.dim() == 2 && t.stride(0) == 1 && t.stride(1) == t.size(0);
    }
    void add_number(i64 value) { key.append((const char*)&value, sizeof value); }
    void add_absent_tensor() {
        key.push_back('n');
        addresses.push_back(nullptr);
    }
    bool add_tensor(const at::Tensor& t, bool pack) {
        if (!t.defined()) {
            add_absent_tensor();
            return true;
        }
        if (!t.is_cpu() || t.layout() != at::kStrided || t.is_neg() || t.is_conj()) return false;
        const at::Tensor* source = &t;
        char kind = 't';
        if (!t.is_contiguous()) {
            if (pack) {
                packed = t.contiguous();
                source = &packed;
            } else if (is_transposed(t)) {
                kind = 'v';
            } else {
                return false;
            }
        }
        key.push_back(kind);
        key.push_back(char(t.scalar_type()));
        key.push_back(char(t.dim()));
        for (const i64 size : t.sizes()) add_number(size);
        const void* address = source->const_data_ptr();
        // Memory that the caller has freed has no address. An absent tensor has none either: Python tells
        // them apart.
        if (!address) return false;
        // A program may read four-byte numbers in a tensor of bytes, so the alignment belongs to the
        // description.
        key.push_back(char(reinterpret_cast<uintptr_t>(address) % ALIGNMENT));
        addresses.push_back(address);
        return true;
    }
    bool add_argument(const IValue& value, bool pack) {
        if (value.isTensor()) return add_tensor(value.toTensor(), pack);
        if (value.isNone()) {
            add_absent_tensor();
        } else if (value.isString()) {
            const std::string& text = value.toStringRef();
            key.push_back('s');
            add_number(i64(text.size()));
            key.append(text);
        } else if (value.isInt()) {
            key.push_back('i');
            add_number(value.toInt());
        } else if (value.isBool()) {
            key.push_back(value.toBool() ? '1' : '0');
        } else if (value.isIntList()) {
            const auto numbers = value.toIntList();
            key.push_back('I');
            add_number(i64(numbers.size()));
            for (const i64 number : numbers) add_number(number);
        } else if (value.isTensorList()) {
            const auto tensors = value.toTensorList();
            key.push_back('T');
            add_number(i64(tensors.size()));
            for (size_t i = 0; i < tensors.size(); i++) {
                if (!add_tensor(tensors.get(i), false)) return false;
            }
        } else {
            return false;
        }
        return true;
    }
    // Returns false for a call that no program serves.
    bool add_arguments(at::ArrayRef<IValue> arguments, bool packs_first) {
        if (arguments[0].isTensor() && arguments[0].toTensor().numel() > MAX_ELEMENTS) return false;
        for (size_t i = 0; i < arguments.size(); i++) {
            if (!add_argument(arguments[i], packs_first && i == 0)) return false;
        }
        return true;
    }
};

// Allocates the outputs and runs the program. Returns false if the program has no kernel or no memory.
bool compute(const Op& op, const Answer& answer, const CallDescription& description,
             std::vector<at::Tensor>& outputs) {
    const CallProgram& call = answer.call;
    std::vector<const char*> output_addresses;
    output_addresses.reserve(answer.outputs.size());
    outputs.reserve(answer.outputs.size());
    for (const Output& output : answer.outputs) {
        at::Tensor t(at::detail::empty_strided_cpu(output.size, output.stride, output.dtype));
        void* data = t.mutable_data_ptr();
        if (call.cleared_outputs >> outputs.size() & 1) memset(data, 0, t.nbytes());
        output_addresses.push_back((const char*)data);
        outputs.push_back(std::move(t));
    }
    std::vector<const void*> addresses;
    addresses.reserve(call.addresses.size());
    for (const AddressSource& source : call.addresses) {
        const char* start = source.tensor < 0 ? output_addresses[size_t(-1 - source.tensor)]
                                              : (const char*)description.addresses[size_t(source.tensor)];
        addresses.push_back(start ? start + source.offset : nullptr);
    }
    at::get_num_threads();  // tells OpenMP, in a thread that has not asked yet
    return op.run(call.program, addresses.data()) == 0;
}

// Returns a program together with the shapes of the outputs that the Python kernel has returned; null for an
// op that returns nothing.
std::unique_ptr<Answer> new_answer(CallProgram call, const IValue* outputs) {
    auto answer = std::make_unique<Answer>(Answer{std::move(call), {}, Answer::Nothing});
    if (!outputs) return answer;
    answer->returns = outputs->isTensor() ? Answer::Tensor : Answer::List;
    const auto tensors = outputs->isTensor() ? std::vector{outputs->toTensor()} : outputs->toTensorVector();
    for (const at::Tensor& t : tensors) {
        answer->outputs.push_back({t.sizes().vec(), t.strides().vec(), t.scalar_type()});
    }
    return answer;
}

// Sets `current_request` while a Python kernel runs. A null request keeps an inner call from answering the
// request of an outer call.
struct RequestScope {
    ProgramRequest* const outer = current_request;
    explicit RequestScope(ProgramRequest* request) { current_request = request; }
    ~RequestScope() { current_request = outer; }
};

class SmallCallKernel : public c10::OperatorKernel {
    Op& op_;

public:
    explicit SmallCallKernel(Op& op) : op_(op) {}
    void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet, torch::jit::Stack* stack) {
        const size_t count = handle.schema().arguments().size();
        CallDescription description;
        const auto arguments = torch::jit::last(*stack, count);
        if (!enabled || !description.add_arguments(arguments, op_.packs_first)) {
            return run_python_kernel(handle, *stack, nullptr);
        }
        const Answer* answer = nullptr;
        bool wants_program = false;  // the description has no entry yet, and came before
        {
            std::shared_lock lock(op_.mutex);
            const auto entry = op_.answers.find(description.key);
            if (entry != op_.answers.end()) {
                answer = entry->second.get();  // entries are never removed
            } else {
                wants_program = op_.answers.size() < MAX_DESCRIPTIONS && came_before(description.key);
            }
        }
        if (answer) {
            std::vector<at::Tensor> outputs;
            if (compute(op_, *answer, description, outputs)) {
                torch::jit::drop(*stack, count);
                if (answer->returns == Answer::Tensor) torch::jit::push(*stack, std::move(outputs[0]));
                if (answer->returns == Answer::List) torch::jit::push(*stack, std::move(outputs));
                return;
            }
        }
        ProgramRequest request{op_, {}};
        run_python_kernel(handle, *stack, wants_program ? &request : nullptr);
        if (!wants_program) return;
        const IValue* results = handle.schema().returns().empty() ? nullptr : &stack->back();
        auto fresh = request.received ? new_answer(std::move(*request.received), results) : nullptr;
        std::unique_lock lock(op_.mutex);
        op_.answers.emplace(std::move(description.key), std::move(fresh));
    }

private:
    static void run_python_kernel(const c10::OperatorHandle& handle, torch::jit::Stack& stack,
                                  ProgramRequest* request) {
        const RequestScope scope(request);
        handle.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, stack);
    }
    // Returns whether a description is at least the second of its kind: one that comes once is not worth a
    // program.
    bool came_before(const std::string& key) {
        static std::mutex mutex;
        std::scoped_lock lock(mutex);
        if (op_.seen_once.size() >= MAX_DESCRIPTIONS) op_.seen_once.clear();
        return !op_.seen_once.insert(std::hash<std::string>{}(key)).second;
    }
};

}  // namespace

// Returns whether C++ may answer calls. delayed_calls.cpp asks too.
bool answers_calls() { return enabled; }

extern "C" {

// Registers the kernel of an op of qtensor on the CPU. A second call for the same op has no effect.
void qt_register_op(const char* name, const void* run, int packs_first) {
    static std::mutex mutex;
    // Never freed: calls may come at the end of the process.
    static auto* ops = new std::unordered_map<std::string, Op>;
    std::scoped_lock lock(mutex);
    const auto [entry, is_new] = ops->try_emplace(name);
    if (!is_new) return;
    Op& op = entry->second;
    op.name = name;
    op.run = (RunProgram)run;
    op.packs_first = packs_first != 0;
    auto* library =
        new torch::Library(torch::Library::IMPL, "qtensor", c10::DispatchKey::CPU, __FILE__, __LINE__);
    library->impl(name, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<SmallCallKernel>(op)));
}

// Returns whether the call whose Python kernel runs is one of this op and needs a program.
int qt_wants_program(const char* name) { return current_request && current_request->op.name == name; }

// Remembers the program of the call whose Python kernel runs. The caller keeps the program's memory alive.
// Returns 0 if the program is remembered.
int qt_remember(const char* name, const void* program, const void* addresses, i64 count,
                i64 cleared_outputs) {
    if (!qt_wants_program(name)) return 1;
    const auto* first = (const AddressSource*)addresses;
    current_request->received = CallProgram{program, {first, first + count}, cleared_outputs};
    return 0;
}

// Sets whether remembered programs serve; if not, every call runs its Python kernel. Returns the former
// setting.
int qt_enable(int on) { return enabled.exchange(on != 0); }
}
