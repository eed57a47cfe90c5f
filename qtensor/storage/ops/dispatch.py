"""Choose the handler of an aten op: keep codes, compute, dequantize, or refuse."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from qtensor.core.errors import QTensorError, UnsupportedError
from qtensor.core.torch_state import is_composite
from qtensor.library.linear import forward_of_quantized
from qtensor.storage.base import is_quantized

# These fill the tables.
from qtensor.storage.ops import (  # noqa: F401
    exact,
    fused_layers,
    grouped,
    indexing,
    layer_weights,
    padding,
    products,
    views,
)
from qtensor.storage.ops.decoded import DEQUANTIZE_OPS, IN_PLACE_OPS, dequantized
from qtensor.storage.ops.lazy_view import view_op
from qtensor.storage.ops.table import (
    COMPUTE,
    FILLED_LATE,
    LIBRARY,
    OTHERS,
    PRESERVE,
    Args,
    Handler,
    Kwargs,
    Op,
    implements,
)
from qtensor.storage.ops.write import copy_into, plain


@implements(LIBRARY, "dequantize_tensor")
def _dequantize_tensor(func: Op, args: Args, kwargs: Kwargs) -> Any:
    t = args[0]
    dtype = args[1] if len(args) > 1 else kwargs.get("dtype")
    return plain(t, dtype)


@implements(LIBRARY, "quantize")
def _quantize(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Handle ``qtensor::quantize`` of a quantized tensor.

    If the tensor already has the requested quantizer, return its own buffers; otherwise quantize
    its values again.
    """
    t, canonical = args[:2]
    if is_quantized(t):
        own = t._quantizer
        if own.canonical == canonical and own.is_requantization_safe():
            # Copy the buffers of a part: a write to the result must not change shared factors.
            answer = torch.Tensor.detach if not t._origin.is_part else torch.clone
            return [answer(buffer) for buffer in t.buffers()]
        return func(plain(t), *args[1:], **kwargs)
    raise QTensorError(
        "quantize: scale, amax and seed must be plain tensors; got a quantized one. Dequantize it."
    )


@implements(LIBRARY, "linear_forward")
def _linear_forward(func: Op, args: Args, kwargs: Kwargs) -> Any:
    return forward_of_quantized(*args, **kwargs)


def _refuse(func: Op, args: Args, kwargs: Kwargs) -> Any:
    raise UnsupportedError(
        f"{func}: not defined for quantized tensors; got {_formats(args, kwargs)}. "
        "Call .dequantize() on the operands first, or use an op of docs/op_matrix.md."
    )


def _formats(args: Args, kwargs: Kwargs) -> str:
    flat = torch.utils._pytree.tree_leaves((args, kwargs))
    return ", ".join(sorted({t._quantizer.canonical for t in flat if is_quantized(t)}))


_HANDLERS: dict[Op, Handler] = {}
"""Handlers by op; an op is added at its first call."""


def classify(func: Op) -> str:
    """Return the class of an aten op in docs/op_matrix.md.

    It is ``"exact"``, ``"computes"``, ``"dequantizes"``, ``"in place"`` or ``"raises"``.
    """
    namespace, _, name = func._schema.name.partition("::")
    if namespace != "aten":
        return "raises"
    if name in PRESERVE:
        return "exact"
    if name in COMPUTE:
        return "computes"
    if name in IN_PLACE_OPS:
        return "in place"
    return "dequantizes" if name in DEQUANTIZE_OPS else "raises"


def _resolve(func: Op) -> Handler:
    namespace, _, name = func._schema.name.partition("::")
    if namespace == "qtensor":
        # The other ops read values, for example to compute a norm. grouped_quantize does so too,
        # because each group gets separate factors.
        return LIBRARY.get(name, dequantized)
    if namespace in FILLED_LATE:
        importlib.import_module(FILLED_LATE[namespace])
    if (own := OTHERS.get(namespace, {}).get(name)) is not None:
        return own
    kind = classify(func)
    if kind in ("exact", "computes"):
        handler = PRESERVE[name] if kind == "exact" else COMPUTE[name]
        if any(
            a.kwarg_only and a.alias_info is not None and a.alias_info.is_write
            for a in func._schema.arguments
        ):
            return _with_out(handler)
        return _view_handler(handler) if is_view(func) else handler
    if kind in ("in place", "dequantizes"):
        return dequantized
    if is_composite(func):
        # In inference mode torch does not decompose composite ops before dispatch.
        return _decomposed
    return _refuse


@functools.cache
def is_view(func: Op) -> bool:
    """Return whether an op returns views of its first argument.

    The schema of ``_unsafe_view`` hides that it does. Compiled graphs call it for their outputs.
    """
    returned = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
    is_hidden = func._schema.name == "aten::_unsafe_view"
    return is_hidden or (bool(returned) and not returned[0].is_write)


def _decomposed(func: Op, args: Args, kwargs: Kwargs) -> Any:
    return func.decompose(*args, **kwargs)


def _with_out(handler: Handler) -> Handler:
    """Return a handler for the ``out=`` overload of an op, which copies the result into ``out``."""

    def run(func: Op, args: Args, kwargs: Kwargs) -> Any:
        out = kwargs["out"]
        rest = {k: v for k, v in kwargs.items() if k != "out"}
        operands = torch.utils._pytree.tree_leaves((args, rest))
        if any(is_quantized(t) for t in operands):
            result = handler(func, args, rest)
        else:  # only `out` is quantized
            result = func.overloadpacket(*args, **rest)
        if tuple(out.shape) != tuple(result.shape):
            rule = f"{func}: out must have the shape of the result"
            raise QTensorError(
                f"{rule}; got {tuple(out.shape)} for {tuple(result.shape)}. Fix its shape."
            )
        return copy_into(out, result) if is_quantized(result) else out.copy_(result)

    return run


def _view_handler(handler: Handler) -> Handler:
    """Return the handler of a view op.

    It leaves inference mode for views of normal tensors. A view without buffers answers itself.
    """

    def view(func: Op, args: Args, kwargs: Kwargs) -> Any:
        t = args[0]
        if getattr(t, "_parts", ()):
            return view_op(func, t, positional(func, args[1:], kwargs))
        return handler(func, args, kwargs)

    def run(func: Op, args: Args, kwargs: Kwargs) -> Any:
        if torch.is_inference_mode_enabled() and not args[0].is_inference():
            with torch.inference_mode(False):
                return view(func, args, kwargs)
        return view(func, args, kwargs)

    return run


def positional(func: Op, args: Args, kwargs: Kwargs) -> Args:
    """Return the arguments after the first one of a call, by their places."""
    names = [argument.name for argument in func._schema.arguments[1 + len(args) :]]
    named = [kwargs.get(name) for name in names]
    while named and named[-1] is None:
        named.pop()
    return (*args, *named)


def dispatch(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Run the handler of ``func``; ``__torch_dispatch__`` calls this."""
    handler = _HANDLERS.get(func)
    if handler is None:
        handler = _HANDLERS[func] = _resolve(func)
    return handler(func, args, kwargs)
