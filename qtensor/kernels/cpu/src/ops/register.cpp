// Registers the ops with torch's dispatcher, for tensors on the CPU, and asks Python for what it alone knows.
//
// An op that C++ does not serve goes on as the op of the same name in the namespace `qtensor_python`, which
// has only the Python kernel. No exception crosses the C functions of torch: older versions print it and lose
// its type. Python keeps its exception and tells `qtensor_ops_fail`; native_ops.py raises it again.
#include <atomic>
#include <string>
#include <unordered_map>

#include "../denormals.h"
#include "steps.h"

namespace ops {

const char* find_functions(Find find, void* library);
Kernels kernels;

namespace {

// Functions of native_ops.py. `describe` returns the address of what a text of a kind means, or null.
enum Kind { QUANTIZER, TWIN, FORWARD, BACKWARD, ROW_FORMAT, KINDS };
struct Python {
    const void* (*describe)(i32 kind, const char* text);
    i32 (*choose)(const Problem* problem);
    i32 (*in_backward)();
    i32 (*may_run_again)();
    const AttentionKernels* (*attention_kernels)();
};
Python python;
std::atomic<bool> enabled{true};

// ---- what this thread knows. Python keeps the descriptions for ever, so threads need no lock, and the child
// of a fork goes on with what its thread knows.

struct TextHash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
};
constexpr size_t MOST_TEXTS = 16384;
using Known = std::unordered_map<std::string, const void*, TextHash, std::equal_to<>>;
thread_local Known known[KINDS];

template <class T>
const T* meaning(Kind kind, std::string_view text) {
    const auto entry = known[kind].find(text);
    if (entry != known[kind].end()) return (const T*)entry->second;
    if (known[kind].size() >= MOST_TEXTS) known[kind].clear();
    const std::string copy(text);
    const bool is_c_string = copy.find('\0') == std::string::npos;
    const void* found = is_c_string ? python.describe(kind, copy.c_str()) : nullptr;
    return (const T*)known[kind].emplace(copy, found).first->second;
}

struct ProblemHash {
    size_t operator()(const Problem& p) const {
        return std::hash<std::string_view>{}({(const char*)&p, sizeof p});
    }
};
constexpr size_t MOST_CHOICES = 4096;
thread_local std::unordered_map<Problem, i32, ProblemHash> choices;
thread_local const AttentionKernels* of_attention = nullptr;

// What the Python kernel that this thread called last has raised.
thread_local bool has_failed = false;
thread_local std::string failure;

}  // namespace

const Description* quantizer_of(std::string_view text) { return meaning<Description>(QUANTIZER, text); }
const Twin* twin_of(const Description& d) { return meaning<Twin>(TWIN, d.text); }
const ForwardPlan* forward_plan_of(std::string_view text) { return meaning<ForwardPlan>(FORWARD, text); }
const BackwardPlan* backward_plan_of(std::string_view text) { return meaning<BackwardPlan>(BACKWARD, text); }
const RowFormat* row_format_of(std::string_view text) { return meaning<RowFormat>(ROW_FORMAT, text); }

i32 choose(const Problem& problem) {
    const auto entry = choices.find(problem);
    if (entry != choices.end()) return entry->second;
    if (choices.size() >= MOST_CHOICES) choices.clear();
    return choices[problem] = python.choose(&problem);
}

bool in_backward() { return python.in_backward(); }
bool may_run_again() { return python.may_run_again(); }
const AttentionKernels* attention_kernels() {
    if (!of_attention) of_attention = python.attention_kernels();
    return of_attention;
}

namespace {

using Op = bool (*)(Arguments& call, Tensors& results);
enum Returns { NOTHING, TENSOR, LIST, PAIR };

void put_results(Value* stack, Returns returns, Tensors& results) {
    if (returns == LIST) stack[0] = results.take_list();
    if (returns == TENSOR || returns == PAIR) stack[0] = (Value)results.take(0);
    if (returns == PAIR) stack[1] = (Value)results.take(1);
}

// A frame that catches or destroys has a handler of this library's C++ runtime. torch may have another
// runtime, whose exception must not pass such a frame; so the kernels below, which torch's exception passes,
// stay free of them.
#define APART __attribute__((noinline))

// Returns whether C++ has served the call. If not, the stack still holds its arguments.
APART bool serve(Op op, const char* kinds, Returns returns, Value* stack) {
    Arguments call(stack, kinds);
    Tensors results;
    const KeepDenormals scope;
    try {
        if (enabled && op(call, results)) {
            Value values[2];
            put_results(values, returns, results);
            call.release();
            memcpy(stack, values, returns == PAIR ? 16 : returns == NOTHING ? 0 : 8);
            return true;
        }
    } catch (...) {
        // A function of torch failed, or memory ran out.
    }
    return false;
}

// Calls the Python kernel. Returns null, or what went wrong.
APART const char* leave_to_python(const char* name, Value* stack) {
    has_failed = false;
    if (torch.torch_call_dispatcher(name, "", stack, ABI_VERSION)) return "the op could not be called";
    if (!has_failed) return nullptr;
    has_failed = false;
    return failure.c_str();
}

// name, letters of the arguments (torch_abi.h), results, function
#define OPS(F)                                                      \
    F(quantize, "tsopo", LIST, quantize)                            \
    F(quantize_, "tslopoo", NOTHING, quantize_in_place)             \
    F(dequantize, "lsnw", TENSOR, dequantize)                       \
    F(dequantize_, "lsnt", NOTHING, dequantize_in_place)            \
    F(gemm, "lsnlsnswosw", TENSOR, gemm)                            \
    F(grouped_gemm, "lsnlsnnowswp", TENSOR, grouped_gemm)           \
    F(weight_gemm, "tlswos", TENSOR, weight_gemm)                   \
    F(linear_forward, "ttosooo", LIST, linear_forward)              \
    F(linear_backward, "tlwsoo", LIST, linear_backward)             \
    F(delayed_begin_, "ttttttwwswnooow", PAIR, delayed_begin)       \
    F(record_amax_, "tlw", NOTHING, record_amax)                    \
    F(record_gradient_amax_, "ttlt", NOTHING, record_gradient_amax) \
    F(advance_step_, "two", NOTHING, advance_step)                  \
    F(attention, "ttotosstwwwwooooooo", TENSOR, attention)          \
    F(cache_append_, "tottooossoooo", NOTHING, cache_append)

// The kernels as the dispatcher calls them. torch throws the error, from a frame without destructors.
#define KERNEL(name, kinds, returns, function)                                            \
    void kernel_##name(Value* stack, uint64_t, uint64_t) {                                \
        if (serve(function, kinds, returns, stack)) return;                               \
        const char* error = leave_to_python("qtensor_python::" #name, stack);             \
        if (error) torch.aoti_torch_check(false, "qtensor::" #name, "qtensor", 0, error); \
    }
OPS(KERNEL)
#undef KERNEL

struct Registered {
    const char *name, *kinds;
    Boxed kernel;
};
#define ENTRY(name, kinds, returns, function) {#name, kinds, kernel_##name},
constexpr Registered ALL[] = {OPS(ENTRY)};
#undef ENTRY

}  // namespace
}  // namespace ops

#define EXPORT extern "C" __attribute__((visibility("default")))

// Sets the kernels: addresses in the order of `Kernels`.
EXPORT void qtensor_ops_use(const void* table) { memcpy(&ops::kernels, table, sizeof ops::kernels); }

// Registers the ops. `find`: dlsym; `torch`: handle of libtorch_cpu; `functions`: addresses in the order of
// `Python`. Returns null, or what went wrong.
EXPORT const char* qtensor_ops_register(ops::Find find, void* torch, const void* functions) {
    memcpy(&ops::python, functions, sizeof ops::python);
    if (const char* missing = ops::find_functions(find, torch)) return missing;
    void* library;
    if (ops::torch.aoti_torch_library_init_impl("qtensor", "CPU", "qtensor", 0, &library)) return "a library";
    for (const ops::Registered& op : ops::ALL)
        if (ops::torch.torch_library_impl(library, op.name, op.kernel, ops::ABI_VERSION)) return op.name;
    return nullptr;
}

// The letters of an op's arguments, or null for an op that is not here.
EXPORT const char* qtensor_ops_kinds(const char* name) {
    for (const ops::Registered& op : ops::ALL)
        if (strcmp(op.name, name) == 0) return op.kinds;
    return nullptr;
}

// Called by a Python kernel that has kept an exception.
EXPORT void qtensor_ops_fail(const char* text) {
    ops::has_failed = true;
    ops::failure = text;
}

// Sets whether C++ serves calls. Returns the former setting.
EXPORT int qtensor_ops_enable(int on) { return ops::enabled.exchange(on != 0); }
