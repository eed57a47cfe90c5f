"""Serve ops on a CPU in C++, from the first call on (kernels/cpu/src/ops).

Schema, fake and the Python kernel of an op are those of ``leaf_op``. C++ adds a kernel for tensors
on the CPU: it checks the arguments, allocates the outputs and calls the CPU kernels, without
Python. C++ asks this module what a canonical text means, what a plan of a linear layer means, and
who computes a product. Each thread asks once and remembers the answer.

For a call that C++ does not serve, such as one with a user's own format or with wrong arguments,
it calls the Python kernel, as the op of the same name in the namespace ``qtensor_python``. A C++
kernel cannot pass on a Python exception. Therefore the Python kernel keeps its exception, and the
op that was called raises it again.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import platform
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from qtensor.core.errors import QTensorError
from qtensor.core.linear_plans import backward_plan, forward_plan
from qtensor.core.quantizer_registry import parse, readable_part, slots_within, usage_part
from qtensor.core.row_format import row_format
from qtensor.core.torch_state import in_backward, without_modes
from qtensor.kernels.cpu import attention, loading
from qtensor.kernels.cpu.descriptions import (
    DTYPES,
    CBackwardPlan,
    CDescription,
    CForwardPlan,
    CPlannedOperand,
    CProblem,
    CRowFormat,
    CTwin,
    describe,
    describe_rows,
    describe_twin,
)
from qtensor.library.define import BODIES, SCHEMAS
from qtensor.library.gemm import LAYOUTS, check_operands
from qtensor.library.recomputation import may_run_again

_MOST_TEXTS = 16384
"""Texts that are described; C++ holds their descriptions as long as the process lives."""
_MADE: dict[tuple[Callable[[str], Any], str], Any] = {}
"""Descriptions, twins and plans by the function that makes them and the text."""
_CPU = torch.device("cpu")
_FEW_ROWS = 1
_BITS = {"reference": 2, "integer": 4, "dot_products": 8, "amx": 16}
"""Bits of `enum Choice` by backend, but for few rows, which another one may follow."""


# ---- what C++ asks


def _made(make: Callable[[str], Any], text: str) -> int:
    """Return the address of what a function makes of a text.

    Raises:
        QTensorError: nothing has this text, C++ does not serve it, or there are too many.
    """
    key = make, text
    if key not in _MADE:
        if len(_MADE) >= _MOST_TEXTS:
            raise QTensorError(text)
        _MADE.setdefault(key, make(text))
    return ctypes.addressof(_MADE[key])


def _description(canonical: str) -> CDescription:
    description = describe(parse(canonical))
    if description is None:
        raise QTensorError(canonical)
    return description


def _address(canonical: str) -> int | None:
    """Return the address of the description of a canonical text; None for ""."""
    return _made(_description, canonical) if canonical else None


def _twin(canonical: str) -> CTwin:
    quantizer = parse(canonical)
    return describe_twin(quantizer, _made(_description, quantizer.transpose_plan[0].canonical))


def _planned(canonical: str, kept: str) -> CPlannedOperand:
    slots_within(canonical, kept)
    _, part = usage_part(canonical, "rowwise")
    if not part:
        raise QTensorError(canonical)
    return CPlannedOperand(_address(canonical), _address(part), _address(kept))


def _forward_plan(text: str) -> CForwardPlan:
    plan = forward_plan(text)
    x = _planned(plan.x_quantizer, plan.x_kept)
    return CForwardPlan(
        x, _planned(plan.weight_quantizer, plan.weight_kept), DTYPES.index(plan.dtype)
    )


def _backward_plan(text: str) -> CBackwardPlan:
    plan = backward_plan(text)
    canonical, quantizer = plan.quantizer, parse(plan.quantizer)
    rows, columns = (
        usage_part(canonical, "rowwise")[1],
        readable_part(canonical, "columnwise")[1],
    )
    if quantizer.rowwise and quantizer.spec.transpose_shares_bytes:
        # Both directions hold the same codes: one of them serves both products.
        canonical = columns = rows
    if plan.weight_kept and not rows:
        raise QTensorError(text)
    dtypes = DTYPES.index(plan.dtype), DTYPES.index(plan.weight_dtype)
    texts = (canonical, rows, columns, plan.x_kept, plan.weight_kept)
    return CBackwardPlan(*map(_address, texts), *dtypes, plan.bias)


def _row_format(text: str) -> CRowFormat:
    form = row_format(text)
    return describe_rows(form, None if form.element is None else _address(text))


_KINDS = _description, _twin, _forward_plan, _backward_plan, _row_format
"""Functions that make what a text means, in the order of `enum Kind` of register.cpp."""


@contextlib.contextmanager
def _no_exception() -> Iterator[None]:
    """Let no exception leave a function that C++ calls: it would read a result that is not set.

    C++ then leaves the call to the Python kernel, which raises the error.
    """
    try:
        yield
    except Exception:  # noqa: BLE001
        pass
    except BaseException as interrupt:  # noqa: BLE001 - the Python kernel raises it
        _KEPT.interrupt = interrupt


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p)
def _tell(kind: int, text: bytes) -> int | None:
    with _no_exception():
        return _made(_KINDS[kind], text.decode())
    return None


@ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(CProblem))
def _choose(problem: Any) -> int:
    with _no_exception():
        return _choice_of(problem.contents)
    return 0


def _text_at(address: int | None) -> str:
    return "" if address is None else CDescription.from_address(address).text.decode()


def _choice_of(problem: CProblem) -> int:
    """Return the backends with which C++ computes a product, as bits of `enum Choice`.

    If two bits are set, few rows are tried first. 0 leaves the product to Python.
    """
    # Only a product needs the backends.
    from qtensor.kernels.products import choice  # noqa: PLC0415

    a_shape, b_shape = (problem.a_rows, problem.a_cols), (problem.b_rows, problem.b_cols)
    texts, layout = (_text_at(problem.a), _text_at(problem.b)), LAYOUTS[problem.layout]
    left, right = (parse(text) if text else None for text in texts)
    check_operands(left, a_shape, right, b_shape, layout)
    n = b_shape[0] if layout == "TN" else b_shape[1]
    bias = None if problem.bias_dtype < 0 else ((n,), DTYPES[problem.bias_dtype])
    a = texts[0], a_shape, DTYPES[problem.a_dtype]
    b = texts[1], b_shape, DTYPES[problem.b_dtype]
    call = choice.ProductCall(a, b, layout, DTYPES[problem.dtype], _CPU, False, bias)
    first, *others = choice.choice_of(call).runners
    if not isinstance(first, choice.FewRows):
        return _BITS.get(first.name, 0)
    return 0 if first.mirrored is not None else _FEW_ROWS | _BITS.get(others[0].name, 0)


@functools.cache
def _attention_functions() -> Any:
    """Return the addresses of the functions of attention, or None if it has no library."""
    handle = attention.library()
    return None if handle is None else _addresses((handle.qt_attention, handle.qt_cache_append))


@ctypes.CFUNCTYPE(ctypes.c_void_p)
def _attention_kernels() -> int | None:
    with _no_exception():
        functions = _attention_functions()
        return None if functions is None else ctypes.addressof(functions)
    return None


_in_backward, _may_run_again = map(ctypes.CFUNCTYPE(ctypes.c_int32), (in_backward, may_run_again))


# ---- errors of the Python kernels


class _Kept(threading.local):
    """Exceptions of this thread that C++ cannot pass on.

    Attributes:
        error: the exception of the last Python kernel, and the text that C++ raises for it.
        interrupt: the exception, such as KeyboardInterrupt, that ended a function that C++ called.
    """

    error: tuple[BaseException, str] | None = None
    interrupt: BaseException | None = None


_KEPT = _Kept()


def _keeping(handle: Any, body: Callable[..., Any], nothing: Any) -> Callable[..., Any]:
    """Return a Python kernel that keeps its exception and returns `nothing` then."""

    def call(*args: Any) -> Any:
        try:
            if _KEPT.interrupt is not None:
                interrupt, _KEPT.interrupt = _KEPT.interrupt, None
                raise interrupt
            return body(*args)
        except BaseException as error:  # noqa: BLE001 - `_raising` raises it
            text = ascii(f"{type(error).__name__}: {error}")[1:-1]
            _KEPT.error = error, text
            handle.qtensor_ops_fail(text.encode())
            return nothing

    return call


def _raising(op: Callable[..., Any]) -> Callable[..., Any]:
    """Return an op that raises the exception of its Python kernel instead of C++'s."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return op(*args, **kwargs)
        except RuntimeError as raised:
            kept, _KEPT.error = _KEPT.error, None
            if kept is None or kept[1] not in str(raised):
                raise
            error = kept[0]
            del kept
        try:
            raise error
        finally:
            del error  # Its traceback holds this frame.

    return call


# ---- registration

_PYTHON = torch.library.Library("qtensor_python", "DEF")
_FUNCTIONS = (
    "qt_quantize",
    "qt_dequantize",
    "qt_linear",
    "qt_linear_all",
    "qt_integer_products",
    "qt_sum_rows",
    "qt_finish",
    "qt_widen",
)
"""Functions of the kernels that C++ calls, in the order of `struct Kernels` of description.h."""


@functools.cache
def library() -> Any:
    """Return the C++ library, or None if it is not built, does not load, or runs elsewhere.

    It runs on Linux only.
    """
    if platform.system() != "Linux":
        return None
    try:
        # Only a process that computes needs the compiler cache.
        from qtensor.kernels.cpu import prebuilt, sources  # noqa: PLC0415

        path = prebuilt.find_compiled(sources.ops_build_spec())
        if path is None:
            return None
        handle = ctypes.CDLL(str(path))
        handle.qtensor_ops_register.argtypes = (ctypes.c_void_p,) * 3
        handle.qtensor_ops_register.restype = ctypes.c_char_p
        handle.qtensor_ops_kinds.restype = ctypes.c_char_p
    except (QTensorError, OSError, AttributeError):
        # The Python kernels give the same bytes.
        return None
    return handle


def _addresses(functions: Iterable[Any]) -> Any:
    pointers = [ctypes.cast(function, ctypes.c_void_p) for function in functions]
    return (ctypes.c_void_p * len(pointers))(*pointers)


def serve(kernels: loading.Library) -> None:
    """Let C++ serve ops with a library of kernels; do nothing if the C++ ops are not built."""
    handle = library()
    if handle is None:
        return
    with _LOCK:
        handle.qtensor_ops_use(_addresses(getattr(kernels.handle, name) for name in _FUNCTIONS))
        _register()


_LOCK = threading.Lock()


@functools.cache
def _register() -> None:
    """Register the C++ kernels, unless this version of torch lacks a function that they call."""
    handle = library()
    names = [name for name in BODIES if handle.qtensor_ops_kinds(name.encode())]
    with without_modes():
        nothing = torch.empty(0, device="cpu")
    results = {"Tensor": nothing, "Tensor[]": [], "()": None}
    for name in names:
        schema = SCHEMAS[name]
        failed = results.get(schema.rsplit(" -> ", 1)[1], (nothing, nothing))
        _PYTHON.define(schema)
        _PYTHON.impl(name, _keeping(handle, BODIES[name], failed), "CompositeExplicitAutograd")
        # Autograd has already handled the op that was called.
        _PYTHON.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    asked = _addresses((_tell, _choose, _in_backward, _may_run_again, _attention_kernels))
    find = ctypes.cast(ctypes.CDLL(None).dlsym, ctypes.c_void_p)
    if handle.qtensor_ops_register(find, torch_cpu._handle, asked):
        return
    for name in names:
        packet = getattr(torch.ops.qtensor, name)
        for op in (packet, packet.default):
            op._op = _raising(op._op)


@contextlib.contextmanager
def left_to_python() -> Iterator[None]:
    """Leave all calls in a region to Python, for tests and benchmarks that compare the two ways."""
    handle = library()
    before = 0 if handle is None else handle.qtensor_ops_enable(0)
    try:
        yield
    finally:
        if handle is not None:
            handle.qtensor_ops_enable(before)


loading.LISTENERS.append(serve)
