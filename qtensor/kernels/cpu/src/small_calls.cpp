// Answers calls of ops whose program is known, without Python. For every other call the op's Python kernel runs, and a call
// that comes for the second time is planned there (kernels/cpu/small_calls/). This file is compiled against torch's headers,
// in a library of its own: the other kernels do not need them.
#include <ATen/EmptyTensor.h>
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

constexpr size_t MOST = 4096;       // descriptions that an op remembers
constexpr i64 LARGEST = 1 << 19;    // elements of a first tensor above which a call is not described
constexpr uintptr_t ALIGNED = 16;
using Run = int (*)(const void* program, const void* addresses);

// ---- what answers.py hands over
// The source of an address of a program: `offset` bytes behind a tensor of the call, or behind output -1 - tensor.
struct Address {
    i64 tensor, offset;
};
struct Lesson {
    const void* program;
    std::vector<Address> addresses;
    i64 cleared;  // bit i: output i starts as zeros
};

// ---- what is remembered of a call
struct Output {
    std::vector<i64> size, stride;
    at::ScalarType dtype;
};
struct Known {
    Lesson lesson;
    std::vector<Output> outputs;
    bool alone;  // the op returns a tensor, not a list
};

struct Op {
    std::string name;
    Run run;
    bool packs_first;  // a first tensor that is not contiguous is made contiguous
    std::shared_mutex mutex;
    std::unordered_map<std::string, std::unique_ptr<Known>> known;  // null: no program takes such a call
    std::unordered_set<size_t> met;                                 // hashes of descriptions that came once
};

// A call that waits for the lesson of its Python kernel.
struct Question {
    const Op& op;
    std::optional<Lesson> lesson;
};

std::atomic<bool> serving{true};
thread_local Question* asked = nullptr;  // by the innermost call whose Python kernel runs in this thread

// The description of a call (everything that its program depends on) and the addresses of its tensors in order. An address is
// that of the tensor's first element, whatever storage it lies in, and is read anew at each call.
struct Call {
    std::string key;
    std::vector<const void*> at;
    at::Tensor packed;

    Call() { key.reserve(384), at.reserve(12); }

    void word(i64 value) { key.append((const char*)&value, sizeof value); }
    bool tensor(const at::Tensor& t, bool pack) {
        if (!t.defined()) return nothing();
        if (!t.is_cpu() || t.layout() != at::kStrided || t.is_neg() || t.is_conj()) return false;
        const at::Tensor* source = &t;
        if (!t.is_contiguous()) {
            if (!pack) return false;
            packed = t.contiguous();
            source = &packed;
        }
        key.push_back('t');
        key.push_back(char(t.scalar_type()));
        key.push_back(char(t.dim()));
        for (i64 size : t.sizes()) word(size);
        // A program may read numbers of four bytes within a tensor of bytes: another alignment is another description.
        const void* address = source->const_data_ptr();
        key.push_back(char(reinterpret_cast<uintptr_t>(address) % ALIGNED));
        at.push_back(address);
        return true;
    }
    bool nothing() {
        key.push_back('n');
        at.push_back(nullptr);
        return true;
    }
    bool argument(const IValue& v, bool pack) {
        if (v.isTensor()) return tensor(v.toTensor(), pack);
        if (v.isNone()) return nothing();
        if (v.isString()) {
            const std::string& text = v.toStringRef();
            key.push_back('s');
            word(i64(text.size()));
            key.append(text);
        } else if (v.isInt()) {
            key.push_back('i');
            word(v.toInt());
        } else if (v.isBool()) {
            key.push_back(v.toBool() ? '1' : '0');
        } else if (v.isIntList()) {
            key.push_back('I');
            const auto list = v.toIntList();
            word(i64(list.size()));
            for (const i64 value : list) word(value);
        } else if (v.isTensorList()) {
            key.push_back('T');
            const auto list = v.toTensorList();
            word(i64(list.size()));
            for (size_t i = 0; i < list.size(); i++)
                if (!tensor(list.get(i), false)) return false;
        } else {
            return false;
        }
        return true;
    }
    bool describe(at::ArrayRef<IValue> arguments, bool packs_first) {
        if (arguments[0].isTensor() && arguments[0].toTensor().numel() > LARGEST) return false;
        for (size_t i = 0; i < arguments.size(); i++)
            if (!argument(arguments[i], packs_first && i == 0)) return false;
        return true;
    }
};

// The outputs; false where the program has no kernel.
bool answer(const Op& op, const Known& known, const Call& call, std::vector<at::Tensor>& outputs) {
    const Lesson& lesson = known.lesson;
    std::vector<const char*> made;
    made.reserve(known.outputs.size()), outputs.reserve(known.outputs.size());
    for (const Output& o : known.outputs) {
        at::Tensor t = at::Tensor(at::detail::empty_strided_cpu(o.size, o.stride, o.dtype));
        void* data = t.mutable_data_ptr();
        if (lesson.cleared >> outputs.size() & 1) memset(data, 0, t.nbytes());
        made.push_back((const char*)data);
        outputs.push_back(std::move(t));
    }
    std::vector<const void*> addresses;
    addresses.reserve(lesson.addresses.size());
    for (const Address& a : lesson.addresses) {
        const char* at = a.tensor < 0 ? made[size_t(-1 - a.tensor)] : (const char*)call.at[size_t(a.tensor)];
        addresses.push_back(at ? at + a.offset : nullptr);
    }
    return op.run(lesson.program, addresses.data()) == 0;
}

// A lesson and the outputs that the Python kernel has made.
std::unique_ptr<Known> learned(Lesson lesson, const IValue& outputs) {
    auto known = std::make_unique<Known>(Known{std::move(lesson), {}, outputs.isTensor()});
    const auto list = known->alone ? std::vector{outputs.toTensor()} : outputs.toTensorVector();
    for (const at::Tensor& t : list) known->outputs.push_back({t.sizes().vec(), t.strides().vec(), t.scalar_type()});
    return known;
}

// Sets `asked` while a Python kernel runs; a null question keeps an inner call from answering that of an outer one.
struct Asking {
    Question* before = asked;
    explicit Asking(Question* question) { asked = question; }
    ~Asking() { asked = before; }
};

class Kernel : public c10::OperatorKernel {
    Op& op_;

   public:
    explicit Kernel(Op& op) : op_(op) {}
    void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet, torch::jit::Stack* stack) {
        const size_t count = handle.schema().arguments().size();
        Call call;
        const bool described = serving && call.describe(torch::jit::last(*stack, count), op_.packs_first);
        if (!described) return by_python(handle, *stack, nullptr);
        const Known* known = nullptr;
        bool wanted = false;  // the description is neither known nor refused, and came before
        {
            std::shared_lock lock(op_.mutex);
            const auto entry = op_.known.find(call.key);
            if (entry != op_.known.end())
                known = entry->second.get();
            else
                wanted = op_.known.size() < MOST && came_before(call.key);
        }
        if (known) {
            std::vector<at::Tensor> outputs;
            if (answer(op_, *known, call, outputs)) {
                torch::jit::drop(*stack, count);
                torch::jit::push(*stack, known->alone ? IValue(std::move(outputs[0])) : IValue(std::move(outputs)));
                return;
            }
        }
        Question question{op_, {}};
        by_python(handle, *stack, wanted ? &question : nullptr);
        if (!wanted) return;
        auto fresh = question.lesson ? learned(std::move(*question.lesson), stack->back()) : nullptr;
        std::unique_lock lock(op_.mutex);
        op_.known.emplace(std::move(call.key), std::move(fresh));
    }

   private:
    static void by_python(const c10::OperatorHandle& handle, torch::jit::Stack& stack, Question* question) {
        const Asking asking(question);
        handle.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, stack);
    }
    // A shape that never comes again is not worth a program.
    bool came_before(const std::string& key) {
        static std::mutex mutex;
        std::scoped_lock lock(mutex);
        if (op_.met.size() >= MOST) op_.met.clear();
        return !op_.met.insert(std::hash<std::string>{}(key)).second;
    }
};

}  // namespace

extern "C" {

// Calls of an op of qtensor on a CPU come here first from now on.
void qt_take(const char* name, const void* run, int packs_first) {
    static std::mutex mutex;
    static auto* taken = new std::unordered_map<std::string, Op>;  // never freed: calls may come at the end of the process
    std::scoped_lock lock(mutex);
    const auto [entry, fresh] = taken->try_emplace(name);
    if (!fresh) return;
    Op& op = entry->second;
    op.name = name;
    op.run = (Run)run;
    op.packs_first = packs_first != 0;
    auto* library = new torch::Library(torch::Library::IMPL, "qtensor", c10::DispatchKey::CPU, __FILE__, __LINE__);
    library->impl(name, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(op)));
}

// Whether the call whose Python kernel runs is one of this op, and wants a program.
int qt_wants(const char* name) {
    return asked && asked->op.name == name;
}

// Hands over the program of the call whose Python kernel runs. The program stays where it is. 0: it is remembered.
int qt_learn(const char* name, const void* program, const void* addresses, i64 count, i64 cleared) {
    if (!qt_wants(name)) return 1;
    const Address* address = (const Address*)addresses;
    asked->lesson = Lesson{program, {address, address + count}, cleared};
    return 0;
}

// Whether remembered programs serve; if not, every call goes to the Python kernels. Returns what was set before.
int qt_serve(int on) {
    return serving.exchange(on != 0);
}
}
