// Answers small calls of ops without entering Python, with programs that Python planned for the same
// description of a call. Every other call runs the op's Python kernel; when a description comes for the
// second time, Python plans a program for it (kernels/cpu/small_calls/). This file is compiled against
// torch's headers into a library of its own, so that the other kernels do not need those headers.
#include "small_calls.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <pthread.h>
#include <torch/library.h>

#include <array>
#include <atomic>

using namespace small_calls;

namespace {

// A call whose Python kernel may pass a program.
struct ProgramRequest {
    const Op& op;
    std::optional<CallProgram> received;
};

std::atomic<bool> enabled{true};
// The request of the innermost call whose Python kernel runs in this thread, or null.
thread_local ProgramRequest* current_request = nullptr;

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
            std::scoped_lock lock(tables_mutex);
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
        std::scoped_lock lock(tables_mutex);
        op_.answers.emplace(std::move(description.key), std::move(fresh));
    }

private:
    static void run_python_kernel(const c10::OperatorHandle& handle, torch::jit::Stack& stack,
                                  ProgramRequest* request) {
        const RequestScope scope(request);
        handle.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, stack);
    }
    // Returns whether a description is at least the second of its kind: one that comes once is not worth a
    // program. The caller holds `tables_mutex`.
    bool came_before(const std::string& key) {
        if (op_.seen_once.size() >= MAX_DESCRIPTIONS) op_.seen_once.clear();
        return !op_.seen_once.insert(std::hash<std::string>{}(key)).second;
    }
};

// Never freed: calls may come at the end of the process.
auto& ops = *new std::unordered_map<std::string, Op>;

}  // namespace

std::mutex small_calls::tables_mutex;
bool small_calls::answers_calls() { return enabled; }

namespace {

// The child of a fork has none of the other threads. If one of them held the mutex, it would stay locked
// there for ever, so fork() itself takes it.
void lock_tables() { tables_mutex.lock(); }
void unlock_tables() { tables_mutex.unlock(); }
[[maybe_unused]] const int fork_handlers = pthread_atfork(lock_tables, unlock_tables, unlock_tables);

}  // namespace

extern "C" {

// Registers the kernel of an op of qtensor on the CPU. A second call for the same op has no effect.
void qt_register_op(const char* name, const void* run, int packs_first) {
    std::scoped_lock lock(tables_mutex);
    const auto [entry, is_new] = ops.try_emplace(name);
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

// Computes c = a @ b for programs (program.cpp) by torch.mm, as the Python kernels of the ops do: so the sums
// have the same order under every setting of torch.
void qt_sgemm(float* a, i64 a_transposed, float* b, i64 b_transposed, float* c, i64 m, i64 n, i64 k) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto matrix = [](float* values, i64 rows, i64 cols, bool transposed) {
        const std::array<i64, 2> strides{transposed ? 1 : cols, transposed ? rows : 1};
        return at::from_blob(values, {rows, cols}, strides, at::kFloat);
    };
    at::Tensor out = matrix(c, m, n, false);
    at::mm_out(out, matrix(a, m, k, a_transposed), matrix(b, k, n, b_transposed));
}

// Sets whether remembered programs serve; if not, every call runs its Python kernel. Returns the former
// setting.
int qt_enable(int on) { return enabled.exchange(on != 0); }
}
