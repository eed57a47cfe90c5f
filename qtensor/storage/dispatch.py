"""Choose the handler of an aten op: keep codes, compute, dequantize, or refuse."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from qtensor.dtensor import install_rules
from qtensor.errors import QTensorError, UnsupportedError
from qtensor.library.dequantize import DEQUANTIZE_TENSOR
from qtensor.library.gemm import GEMM_TENSOR
from qtensor.library.grouped import GROUPED_QUANTIZE
from qtensor.library.linear import LINEAR_FORWARD, forward_of_quantized
from qtensor.library.quantize import AMAX, QUANTIZE, QUANTIZE_, RANDOM_SEED
from qtensor.storage.base import QuantizedTensorStorage
from qtensor.storage.collectives import FUNCTIONAL
from qtensor.storage.compute import COMPUTE, gemm_tensor
from qtensor.storage.fallback import DEQUANTIZE_OPS, IN_PLACE_OPS, dequantized
from qtensor.storage.preserve import PRESERVE
from qtensor.storage.rebuild import Handler
from qtensor.storage.write import copy_into, plain


def _dequantize_tensor(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    t = args[0]
    dtype = args[1] if len(args) > 1 else kwargs.get("dtype")
    return plain(t, dtype)


def _quantize(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle ``qtensor::quantize`` of a quantized tensor.

    If the tensor already has the requested quantizer, return its own buffers; otherwise quantize
    its values again.
    """
    t, canonical = args[:2]
    if isinstance(t, QuantizedTensorStorage):
        own = t._quantizer
        if own.canonical == canonical and own.is_requantization_safe():
            # Copy the buffers of a part: a write to the result must not change shared factors.
            answer = torch.Tensor.detach if t._view_note is None else torch.clone
            return [answer(buffer) for buffer in t.buffers()]
        return func(plain(t), *args[1:], **kwargs)
    raise QTensorError(
        "quantize: scale, amax and seed must be plain tensors; got a quantized one. Dequantize it."
    )


def _linear_forward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return forward_of_quantized(*args, **kwargs)


def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise UnsupportedError(
        f"{func}: not defined for quantized tensors; got {_formats(args, kwargs)}. "
        "Call .dequantize() on the operands first, or use an op of docs/op_matrix.md."
    )


def _collective(namespace: str, name: str) -> Handler | None:
    """Return the handler of a collective, or None for any other op."""
    if namespace == "c10d":
        # Imported late: the module needs torch.distributed, which some builds of torch lack.
        return importlib.import_module("qtensor.storage.c10d").C10D.get(name)
    if namespace in ("_c10d_functional", "_c10d_functional_autograd", "_dtensor"):
        return FUNCTIONAL.get(name)
    return None


def _formats(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    flat = torch.utils._pytree.tree_leaves((args, kwargs))
    return ", ".join(
        sorted({t._quantizer.canonical for t in flat if isinstance(t, QuantizedTensorStorage)})
    )


_HANDLERS: dict[Any, Handler] = {
    DEQUANTIZE_TENSOR: _dequantize_tensor,
    GEMM_TENSOR: gemm_tensor,
    QUANTIZE: _quantize,
    QUANTIZE_: dequantized,
    AMAX: dequantized,
    RANDOM_SEED: dequantized,
    # The values are decoded, because each group gets separate factors.
    GROUPED_QUANTIZE: dequantized,
    LINEAR_FORWARD: _linear_forward,
}
"""Handlers by op; an op is added at its first call."""


def classify(func: Any) -> str:
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


def _resolve(func: Any) -> Handler:
    namespace, _, name = func._schema.name.partition("::")
    if namespace == "qtensor":
        # The library's other ops read values, for example to compute a norm.
        return dequantized
    if (collective := _collective(namespace, name)) is not None:
        return collective
    kind = classify(func)
    if kind in ("exact", "computes"):
        handler = PRESERVE[name] if kind == "exact" else COMPUTE[name]
        if any(
            a.kwarg_only and a.alias_info is not None and a.alias_info.is_write
            for a in func._schema.arguments
        ):
            return _with_out(handler)
        returned = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
        return _outside_inference(handler) if returned and not returned[0].is_write else handler
    if kind in ("in place", "dequantizes"):
        return dequantized
    if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        # In inference mode torch does not decompose composite ops before dispatch.
        return _decomposed
    return _refuse


def _decomposed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func.decompose(*args, **kwargs)


def _with_out(handler: Handler) -> Handler:
    """Return a handler for the ``out=`` overload of an op, which copies the result into ``out``."""

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = kwargs["out"]
        result = handler(func, args, {k: v for k, v in kwargs.items() if k != "out"})
        if tuple(out.shape) != tuple(result.shape):
            rule = f"{func}: out must have the shape of the result"
            raise QTensorError(
                f"{rule}; got {tuple(out.shape)} for {tuple(result.shape)}. Fix its shape."
            )
        return (
            copy_into(out, result)
            if isinstance(result, QuantizedTensorStorage)
            else out.copy_(result)
        )

    return run


def _outside_inference(handler: Handler) -> Handler:
    """Return a view handler that leaves inference mode for views of normal tensors."""

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_inference_mode_enabled() and not args[0].is_inference():
            with torch.inference_mode(False):
                return handler(func, args, kwargs)
        return handler(func, args, kwargs)

    return run


def dispatch(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the handler of ``func``; ``__torch_dispatch__`` calls this."""
    handler = _HANDLERS.get(func)
    if handler is None:
        handler = _HANDLERS[func] = _resolve(func)
    install_rules()
    return handler(func, args, kwargs)
