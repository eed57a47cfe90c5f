// Calls of an op from Python that C++ answers without torch's dispatcher. `OpOverload.__call__` calls the
// function that torch made for the op; direct_calls.py puts a DirectOp in its place. Its call passes
// arguments on to that function wherever the dispatcher could do more than run the op's CPU kernel, and where
// no program is known.
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "small_calls.h"

using namespace small_calls;

namespace {

struct DirectOp {
    PyObject_HEAD Op* op;
    PyObject* dispatched;  // what torch calls
    PyObject* names;       // of the arguments
    PyObject* defaults;    // of the arguments; Ellipsis where there is none
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
bool add_list(CallDescription& d, PyObject* list) {
    PyObject** items = PySequence_Fast_ITEMS(list);
    const auto count = size_t(PySequence_Fast_GET_SIZE(list));
    if (count == 0) return false;  // of tensors or of integers
    if (THPVariable_CheckExact(items[0])) {
        d.begin_tensors(count);
        for (size_t i = 0; i < count; i++)
            if (!THPVariable_CheckExact(items[i]) || !add_tensor(d, items[i], false)) return false;
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
// Describes an argument as CallDescription::add_argument does. Returns false for one that it may not describe
// alike.
bool add_argument(CallDescription& d, PyObject* value, bool pack) {
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
    } else if (PyList_CheckExact(value) || PyTuple_CheckExact(value)) {
        return add_list(d, value);
    } else {
        i64 number;
        if (!add_integer(value, number)) return false;
        d.add_integer(number);
    }
    return true;
}
// Describes all arguments of a call. Arguments that it leaves out are the defaults.
bool describe(CallDescription& d, const DirectOp& direct, PyObject* args, PyObject* kwargs) {
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
        if (!add_argument(d, value, direct.op->packs_first && i == 0)) return false;
    }
    return by_name == 0;  // the other names are not those of arguments, or of arguments given already
}
PyObject* to_python(const Answer& answer, std::vector<at::Tensor>& outputs) {
    if (answer.returns == Answer::Tensor) return THPVariable_Wrap(std::move(outputs[0]));
    PyObject* list = PyList_New(Py_ssize_t(outputs.size()));
    for (size_t i = 0; list && i < outputs.size(); i++)
        PyList_SET_ITEM(list, Py_ssize_t(i), THPVariable_Wrap(std::move(outputs[i])));
    return list;
}
// Returns whether a program has answered the call. Then `result` is the result, or null with an exception
// set.
bool answered(const DirectOp& direct, PyObject* args, PyObject* kwargs, PyObject*& result) try {
    if (!answers_calls() || !nothing_watches()) return false;
    CallDescription description;
    if (!describe(description, direct, args, kwargs)) return false;
    const Answer* answer = direct.op->answer_to(description.key);
    if (!answer || answer->returns == Answer::Nothing) return false;
    std::vector<at::Tensor> outputs;
    PyThreadState* state = PyEval_SaveThread();
    bool done = false;
    try {
        done = compute(*direct.op, *answer, description, outputs);
    } catch (const std::exception&) {  // no memory; the op says so
    }
    PyEval_RestoreThread(state);
    if (done) result = to_python(*answer, outputs);
    return done;
} catch (const std::exception&) {
    return false;
}

PyObject* call(PyObject* self, PyObject* args, PyObject* kwargs) {
    const auto& direct = *reinterpret_cast<DirectOp*>(self);
    PyObject* result = nullptr;
    if (answered(direct, args, kwargs, result)) return result;
    return PyObject_Call(direct.dispatched, args, kwargs);
}
// torch finds ops in dicts by the hash of the function.
Py_hash_t hash(PyObject* self) { return PyObject_Hash(reinterpret_cast<DirectOp*>(self)->dispatched); }
PyObject* get_attribute(PyObject* self, PyObject* name) {
    return PyObject_GetAttr(reinterpret_cast<DirectOp*>(self)->dispatched, name);
}

}  // namespace

extern "C" {

// Returns the function to call in place of `dispatched` for a registered op that writes none of its
// arguments. names, defaults: tuples with an entry for each argument; Ellipsis is no default.
PyObject* qt_direct_op(const char* name, PyObject* dispatched, PyObject* names, PyObject* defaults) {
    static PyType_Slot slots[] = {{Py_tp_call, (void*)call},
                                  {Py_tp_hash, (void*)hash},
                                  {Py_tp_getattro, (void*)get_attribute},
                                  {0, nullptr}};
    static PyType_Spec spec = {"qtensor.DirectOp", sizeof(DirectOp), 0, Py_TPFLAGS_DEFAULT, slots};
    static PyObject* type = PyType_FromSpec(&spec);
    Op* op = registered_op(name);
    if (!type || !op) return type ? Py_NewRef(dispatched) : nullptr;
    auto* direct = PyObject_New(DirectOp, reinterpret_cast<PyTypeObject*>(type));
    if (!direct) return nullptr;
    direct->op = op;
    direct->dispatched = Py_NewRef(dispatched);
    direct->names = Py_NewRef(names);
    direct->defaults = Py_NewRef(defaults);
    return reinterpret_cast<PyObject*>(direct);
}
}
