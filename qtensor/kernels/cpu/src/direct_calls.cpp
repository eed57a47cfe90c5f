// Calls of an op from Python that C++ answers without torch's dispatcher. `OpOverload.__call__` calls the
// function that torch made for the op; direct.py puts a DirectOp in its place. A DirectOp passes a call on to
// that function if the dispatcher could do more than run the op's CPU kernel, or if no program is known. This
// file is a library of its own: it needs the headers of Python, and serves one version of Python.
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Size.h>
#include <torch/csrc/autograd/python_variable.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <atomic>

#include "small_calls.h"

using namespace small_calls;

namespace {

// The tensors of lists: another thread may change a list while a program runs.
using Held = std::vector<at::Tensor>;

struct DirectOp {
    PyObject_HEAD Op* op;
    const std::atomic<bool>* enabled;  // whether C++ may answer calls
    PyObject* dispatched;              // what torch calls
    PyObject* names;                   // of the arguments
    PyObject* defaults;                // of the arguments; Ellipsis where there is none
};

// Returns whether nothing in this thread watches or changes what an op does: modes, transforms of functions,
// tracing and the profiler.
bool nothing_watches() {
    const auto included = c10::impl::tls_local_dispatch_key_set().included_;
    return (included - c10::default_included_set).empty() && !at::hasCallbacks() &&
           !at::impl::torch_function_mode_enabled();
}
// Returns whether the dispatcher would take a tensor to the CPU kernel, without a gradient.
bool is_plain(const at::Tensor& t) {
    constexpr c10::DispatchKeySet plain({c10::DispatchKey::CPU, c10::DispatchKey::BackendSelect,
                                         c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::AutogradCPU,
                                         c10::DispatchKey::AutocastCPU});
    return (t.key_set().raw_repr() & ~plain.raw_repr()) == 0 &&
           !(t.requires_grad() && at::GradMode::is_enabled());
}
bool add_tensor(CallDescription& d, PyObject* value, bool pack) {
    const at::Tensor& t = THPVariable_Unpack(value);
    return is_plain(t) && d.add_tensor(t, pack);
}
bool add_integer(PyObject* value, i64& to) {
    if (!PyLong_CheckExact(value)) return false;
    int overflow = 0;
    to = PyLong_AsLongLongAndOverflow(value, &overflow);
    return overflow == 0;
}
bool add_list(CallDescription& d, PyObject* list, Held& held) {
    PyObject** items = PySequence_Fast_ITEMS(list);
    const auto count = size_t(PySequence_Fast_GET_SIZE(list));
    if (count == 0) return false;  // It does not tell whether it holds tensors or integers.
    if (THPVariable_CheckExact(items[0])) {
        d.begin_tensors(count);
        for (size_t i = 0; i < count; i++)
            if (!THPVariable_CheckExact(items[i]) || !add_tensor(d, items[i], false)) return false;
        for (size_t i = 0; i < count; i++) held.push_back(THPVariable_Unpack(items[i]));
        return true;
    }
    d.begin_integers(count);
    for (size_t i = 0; i < count; i++) {
        i64 number;
        if (!add_integer(items[i], number)) return false;
        d.add_number(number);
    }
    return true;
}
// Describes an argument as CallDescription::add_argument does. Returns false for an argument whose
// description could differ from that.
bool add_argument(CallDescription& d, PyObject* value, bool pack, Held& held) {
    if (THPVariable_CheckExact(value)) return add_tensor(d, value, pack);
    if (value == Py_None) {
        d.add_absent_tensor();
    } else if (PyUnicode_Check(value)) {
        Py_ssize_t size;
        const char* text = PyUnicode_AsUTF8AndSize(value, &size);
        if (!text) {
            PyErr_Clear();
            return false;
        }
        d.add_text({text, size_t(size)});
    } else if (PyBool_Check(value)) {
        d.add_bool(value == Py_True);
    } else if (THPDtype_Check(value)) {
        d.add_integer(i64(reinterpret_cast<THPDtype*>(value)->scalar_type));
    } else if (PyList_CheckExact(value) || PyTuple_CheckExact(value) || THPSize_Check(value)) {
        return add_list(d, value, held);
    } else {
        i64 number;
        if (!add_integer(value, number)) return false;
        d.add_integer(number);
    }
    return true;
}
// Describes all arguments of a call. Arguments that it leaves out are the defaults.
bool describe(CallDescription& d, const DirectOp& direct, PyObject* args, PyObject* kwargs, Held& held) {
    const Py_ssize_t given = PyTuple_GET_SIZE(args), count = PyTuple_GET_SIZE(direct.defaults);
    Py_ssize_t by_name = kwargs ? PyDict_GET_SIZE(kwargs) : 0;
    if (given > count) return false;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject* value = nullptr;
        if (i < given) {
            value = PyTuple_GET_ITEM(args, i);
        } else if (by_name > 0 && (value = PyDict_GetItem(kwargs, PyTuple_GET_ITEM(direct.names, i)))) {
            by_name--;
        } else {
            value = PyTuple_GET_ITEM(direct.defaults, i);
        }
        if (i == 0 && THPVariable_CheckExact(value) && !CallDescription::is_small(THPVariable_Unpack(value)))
            return false;
        if (!add_argument(d, value, direct.op->packs_first && i == 0, held)) return false;
    }
    return by_name == 0;  // Names that are left over are unknown, or repeat a positional argument.
}
// Returns the result, or null with an exception set.
PyObject* to_python(const Answer& answer, std::vector<at::Tensor>& outputs) {
    if (answer.returns == Answer::Tensor) return THPVariable_Wrap(std::move(outputs[0]));
    PyObject* list = PyList_New(Py_ssize_t(outputs.size()));
    for (size_t i = 0; list && i < outputs.size(); i++) {
        PyObject* item = THPVariable_Wrap(std::move(outputs[i]));
        if (!item)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, Py_ssize_t(i), item);
    }
    return list;
}
// Returns whether a program has answered the call. Then `result` is the result, or null with an exception
// set.
bool answered(const DirectOp& direct, PyObject* args, PyObject* kwargs, PyObject*& result) try {
    if (!*direct.enabled || !nothing_watches()) return false;
    CallDescription description;
    Held held;
    if (!describe(description, direct, args, kwargs, held)) return false;
    const Answer* answer = direct.op->answer_to(description.key);
    if (!answer || answer->returns == Answer::Nothing) return false;
    std::vector<at::Tensor> outputs;
    PyThreadState* state = PyEval_SaveThread();
    bool done = false;
    try {
        done = compute(*direct.op, *answer, description, outputs);
    } catch (const std::exception&) {  // Out of memory: the op raises the error.
    }
    PyEval_RestoreThread(state);
    if (done) result = to_python(*answer, outputs);
    return done;
} catch (const std::exception&) {
    PyErr_Clear();
    return false;
}

PyObject* call(PyObject* self, PyObject* args, PyObject* kwargs) {
    const auto& direct = *reinterpret_cast<DirectOp*>(self);
    PyObject* result = nullptr;
    if (answered(direct, args, kwargs, result)) return result;
    return PyObject_Call(direct.dispatched, args, kwargs);
}
// The tables of torch in which an op is a key use the hash of the op's function.
Py_hash_t hash(PyObject* self) { return PyObject_Hash(reinterpret_cast<DirectOp*>(self)->dispatched); }
PyObject* get_attribute(PyObject* self, PyObject* name) {
    return PyObject_GetAttr(reinterpret_cast<DirectOp*>(self)->dispatched, name);
}

void deallocate(PyObject* self) {
    auto& direct = *reinterpret_cast<DirectOp*>(self);
    PyTypeObject* type = Py_TYPE(self);
    Py_XDECREF(direct.dispatched);
    Py_XDECREF(direct.names);
    Py_XDECREF(direct.defaults);
    type->tp_free(self);
    Py_DECREF(type);
}

}  // namespace

extern "C" {

// Returns the function to call in place of `dispatched`, or `dispatched` itself if there is none.
// op, enabled: of qt_registered_op and qt_enabled; the op writes none of its arguments.
// names, defaults: tuples with an entry for each argument; Ellipsis is no default.
PyObject* qt_direct_op(void* op, const void* enabled, PyObject* dispatched, PyObject* names,
                       PyObject* defaults) {
    static PyType_Slot slots[] = {{Py_tp_call, (void*)call},
                                  {Py_tp_hash, (void*)hash},
                                  {Py_tp_getattro, (void*)get_attribute},
                                  {Py_tp_dealloc, (void*)deallocate},
                                  {0, nullptr}};
    static PyType_Spec spec = {"qtensor.DirectOp", sizeof(DirectOp), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
    static PyObject* type = PyType_FromSpec(&spec);
    if (!type) return nullptr;
    bool serves = op && (PyObject*)Py_TYPE(dispatched) != type;
#ifdef Py_GIL_DISABLED
    serves = false;  // Arguments are read without locks.
#endif
    if (!serves) return Py_NewRef(dispatched);
    auto* direct = PyObject_New(DirectOp, reinterpret_cast<PyTypeObject*>(type));
    if (!direct) return nullptr;
    direct->op = static_cast<Op*>(op);
    direct->enabled = static_cast<const std::atomic<bool>*>(enabled);
    direct->dispatched = Py_NewRef(dispatched);
    direct->names = Py_NewRef(names);
    direct->defaults = Py_NewRef(defaults);
    return reinterpret_cast<PyObject*>(direct);
}
}
