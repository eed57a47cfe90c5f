"""Quantize a tensor: check the arguments, find seed and maxima, run the op, wrap its buffers.

``quantize_call`` runs a call without ``out=`` from end to end; its helpers follow in the order of a
call. Eager, compiled and fake calls run the same functions. A compiled call has
``QuantizerConstants`` in place of the quantizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from qtensor.core.buffer_shapes import Shape
from qtensor.core.compile_constants import compile_constant
from qtensor.core.devices import check_not_captured
from qtensor.core.dtensors import is_dtensor
from qtensor.core.errors import ArgumentTypeError, DtypeError, UnsupportedError, fail
from qtensor.core.quantizer_registry import QuantizerLike, parse
from qtensor.core.torch_state import in_forward_mode, in_transform
from qtensor.library.learned import encode_arguments
from qtensor.library.quantize import QUANTIZE, RANDOM_SEED, maxima_of
from qtensor.quantizers.dtensor_parts import check_parts, maxima_over_mesh, whole_of
from qtensor.storage.base import QuantizedTensorStorage
from qtensor.storage.origin import FRESH
from qtensor.storage.process_groups import Group, reduce_max
from qtensor.storage.rebuild import wrap
from qtensor.storage.tensor import QuantizedTensor
from qtensor.storage.usages import check_usages

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

RandomSource = torch.Generator | Tensor
"""Where the random bytes of a call come from: a generator, or the seed as an int64 tensor (1,)."""


_FACTORS = ("scale_inv", "rowwise_global_scale_inv")
"""Keywords of the slots that hold the decode factor of a tensor."""


class QuantizerConstants(NamedTuple):
    """Hold the properties of a quantizer that a call reads, under the same names.

    Dynamo guards every name that traced code reads, and checks the guards at each call. Reading a
    quantizer's options, slots and class attributes adds 180 guards, which cost more than quantizing
    a small tensor. Reading only the canonical string adds one.
    """

    canonical: str
    format: str
    needs_scale: bool
    stochastic_rounding: bool
    keywords: tuple[str, ...]
    tensor_cls: type[QuantizedTensor]


@compile_constant
def constants_of(canonical: str) -> QuantizerConstants:
    """Return the properties of the quantizer with a canonical string."""
    quantizer = parse(canonical)
    return QuantizerConstants(*[getattr(quantizer, name) for name in QuantizerConstants._fields])


Called = QuantizerLike | QuantizerConstants
"""What a call reads of its quantizer: the quantizer, or its constants in a compiled region."""


def quantize_call(
    quantizer: Called,
    x: Tensor,
    scale: Tensor | None = None,
    generator: RandomSource | None = None,
    group: Group | None = None,
    noop_flag: Tensor | None = None,
) -> tuple[QuantizedTensor, Tensor | None]:
    """Return the quantized tensor of a call without ``out``, and the amax (1,) of delayed scaling.

    Args:
        quantizer: the quantizer; its ``constants_of`` in a compiled region.
        x: any shape; float32, bfloat16 or float16; plain, quantized, or a DTensor.
        scale: as in ``Quantizer.quantize``.
        generator: as in ``Quantizer.quantize``.
        group: the ``amax_reduction_group`` of ``Quantizer.quantize``.
        noop_flag: must be None, because there is no ``out``.

    Raises:
        QTensorError: an argument is missing, has a wrong type or value, or does not apply.
    """
    check_arguments(quantizer, x, scale, noop_flag, has_out=False)
    if not is_compiling():
        _refuse_transforms(quantizer, x)
    whole = seed = amax = None
    if is_dtensor(x):
        # Each rank quantizes its part, with the codes and factors that it has in the whole.
        whole = check_parts(quantizer, x)
        x = whole.to_local()
        amax = maxima_over_mesh(quantizer, whole, x.detach(), group)
        group = group if amax is None else None
    if quantizer.stochastic_rounding or generator is not None:
        seed = find_seed(quantizer, x, generator)
    if group is not None:
        amax = find_maxima(quantizer, x.detach(), group)
    tensor, maximum = _with_gradient(x, quantizer, scale, amax, seed, None)
    return (tensor, maximum) if whole is None else whole_of(whole, tensor, maximum)


def quantize_by_maxima(quantizer: QuantizerLike, x: Tensor, amax: list[Tensor]) -> QuantizedTensor:
    """Return a tensor whose tensor-wide factors come from other maxima than its own.

    Args:
        quantizer: rounds to nearest, without delayed scaling.
        x: any shape; float32, bfloat16 or float16; plain.
        amax: maxima as ``Quantizer.amax`` returns them.
    """
    called = constants_of(quantizer.canonical) if is_compiling() else quantizer
    return _with_gradient(x, called, None, amax, None, None)[0]


def quantize_with_factor(
    quantizer: Called, x: Tensor, amax: Tensor, scale_inv: Tensor
) -> QuantizedTensor:
    """Return a tensor with a tensor-wide factor of the caller, whatever the maximum of ``x`` is.

    Values beyond ``amax`` saturate. "fp8" and "nvfp4(with_global_scale_inv=True)" store the decode
    factor in their last slot.

    Args:
        quantizer: the quantizer; its ``constants_of`` in a compiled region.
        x: any shape; float32, bfloat16 or float16; plain, or quantized otherwise.
        amax: float32 (1,), the largest magnitude that is encoded; NVFP4 encodes with it.
        scale_inv: float32 (1,), the factor that decodes; FP8 encodes with its reciprocal.
    """
    check_arguments(quantizer, x, None, None, has_out=False)
    if not is_compiling():
        _refuse_transforms(quantizer, x)
    scale, maxima = encode_arguments(quantizer.format, amax, scale_inv)
    # NVFP4 computes the factor from the amax if it does not store one.
    stored = scale_inv if quantizer.keywords[-1] in _FACTORS else None
    return _with_gradient(x, quantizer, scale, maxima, None, stored)[0]


# ---- the arguments


def check_arguments(
    quantizer: Called,
    x: Tensor,
    scale: Tensor | None,
    noop_flag: Tensor | None,
    has_out: bool,
) -> None:
    """Refuse arguments that a call of ``quantizer`` cannot use.

    Raises:
        QTensorError: an argument is missing, has a wrong type, or does not apply.
    """
    if (
        scale is None
        and noop_flag is None
        and not quantizer.needs_scale
        and isinstance(x, Tensor)
        and not x.is_nested
    ):
        return
    op = f"quantize[{quantizer.format}]"
    if not isinstance(x, Tensor):
        fix = "Convert it with torch.as_tensor"
        fail(op, "the input must be a torch.Tensor", type(x).__name__, fix, ArgumentTypeError)
    if x.is_nested:
        fix = "Pad it, or quantize its parts"
        fail(op, "the input must be a dense tensor", "a nested one", fix, DtypeError)
    if noop_flag is not None and not has_out:
        fail(op, "noop_flag keeps bytes that exist", "no out=", "Pass out= as well")
    if scale is not None and not quantizer.needs_scale:
        fail(op, "only delayed scaling takes scale=", "one", "Drop scale=, or use fp8_delayed")
    if scale is None and quantizer.needs_scale and not has_out:
        fail(op, "delayed scaling needs scale=", "none", "Pass scale=, float32 of shape (1,)")
    if scale is None:
        return
    if not isinstance(scale, Tensor) or scale.dtype != torch.float32 or scale.numel() != 1:
        rule = "scale must be a float32 tensor of shape (1,)"
        fail(op, rule, repr(scale), "Pass the stored factor as a tensor")
    if scale.device != x.device:
        fail(op, f"scale must be on the device of x, {x.device}", scale.device, "Move it there")


def check_destination(
    quantizer: QuantizerLike, src: Tensor, dst: QuantizedTensorStorage, noop_flag: Tensor | None
) -> None:
    """Refuse to quantize ``src`` into the buffers of ``dst``.

    Raises:
        QTensorError: ``dst`` has another shape or quantizer, or is a part of a tensor.
    """
    op = f"update_quantized[{quantizer.format}]"
    own = getattr(dst, "_quantizer", None)
    if own != quantizer:
        rule = "the destination must hold this quantizer's buffers"
        got = getattr(own, "canonical", type(dst).__name__)
        fail(op, rule, got, "Pass a tensor that this quantizer made, or drop out=")
    if dst._origin.is_part or dst._parts:
        got = "a part of one, or a view without buffers"
        fail(op, "the destination must be a whole tensor", got, "Write into it with copy_(values)")
    check_usages(dst, "update_quantized")
    if tuple(src.shape) != tuple(dst.shape):
        got = f"{tuple(src.shape)} into {tuple(dst.shape)}"
        fail(op, "shapes must be equal", got, "Quantize into a new tensor")
    if noop_flag is not None and (not isinstance(noop_flag, Tensor) or noop_flag.numel() != 1):
        rule = "noop_flag must be a tensor of one element"
        fail(op, rule, repr(noop_flag), "Pass torch.tensor([0.0])")


def refuse_gradient(op: str, x: Tensor | QuantizedTensorStorage) -> None:
    """Refuse an input of ``out=`` whose gradient would be lost, as torch's own ``out=`` does.

    Raises:
        QTensorError: the input requires grad, and grad mode is on.
    """
    if getattr(x, "requires_grad", False) and torch.is_grad_enabled():
        fail(
            op,
            "out= does not support automatic differentiation",
            "an input that requires grad",
            "Pass x.detach(), call under torch.no_grad(), or drop out=",
        )


def _refuse_transforms(quantizer: Called, x: Tensor) -> None:
    """Refuse to run inside a transform of ``torch.func``, or with a forward-mode derivative.

    Raises:
        UnsupportedError: the transform cannot follow the buffers, and would lose the derivative.
    """
    if in_transform() or (in_forward_mode() and forward_ad.unpack_dual(x).tangent is not None):
        fail(
            f"quantize[{quantizer.format}]",
            "transforms of torch.func and forward-mode derivatives cannot follow quantized tensors",
            f"an input {tuple(x.shape)} inside of one",
            "Use torch.autograd, or quantize outside of the transformed function",
            UnsupportedError,
        )


# ---- seed and maxima


def find_seed(quantizer: Called, x: Tensor, generator: RandomSource | None) -> Tensor | None:
    """Return the seed of a call, int64 (1,); None for a quantizer that rounds to nearest.

    Raises:
        QTensorError: there is a generator although the quantizer rounds to nearest, or the
            generator has a wrong type or device.
    """
    op = f"quantize[{quantizer.format}]"
    if not quantizer.stochastic_rounding:
        if generator is not None:
            rule = "generator= needs a quantizer that rounds at random"
            fail(op, rule, quantizer.canonical, "Drop it, or set stochastic_rounding=True")
        return None
    if generator is None:
        return RANDOM_SEED(x)
    if isinstance(generator, torch.Generator):
        if generator.device != x.device:
            rule = f"in a CUDA graph the generator must be on {x.device}"
            fix = "Pass a generator of the device that is registered with the graph, or a seed"
            check_not_captured(x.device, op, rule, fix)
        seed = torch.empty(1, dtype=torch.int64, device=generator.device)
        return seed.random_(generator=generator).to(x.device)
    fix = "Pass torch.tensor([seed])"
    if not isinstance(generator, Tensor):
        rule = "generator must be a torch.Generator or an int64 tensor"
        fail(op, rule, type(generator).__name__, fix, ArgumentTypeError)
    if generator.dtype != torch.int64 or generator.numel() != 1:
        got = f"{tuple(generator.shape)} {generator.dtype}"
        fail(op, "a seed tensor is one int64", got, fix)
    if generator.device != x.device:
        rule = f"the seed must be on the device of x, {x.device}"
        fail(op, rule, generator.device, "Move it there")
    return generator.reshape(1)


def find_maxima(quantizer: Called, x: Tensor, group: Group) -> list[Tensor]:
    """Return the maxima that decide the tensor-wide factors, reduced over a group.

    Raises:
        QTensorError: delayed scaling, whose factor is an argument; or there is no such group.
    """
    if quantizer.needs_scale:
        rule = "delayed scaling takes its factor from scale="
        fix = "Reduce the amax that quantize_with_amax returns"
        fail(f"quantize[{quantizer.format}]", rule, "amax_reduction_group", fix)
    return [reduce_max(maximum, group) for maximum in maxima_of(x, quantizer.canonical)]


# ---- the op


def _with_gradient(
    x: Tensor,
    quantizer: Called,
    scale: Tensor | None,
    amax: list[Tensor] | None,
    seed: Tensor | None,
    factor: Tensor | None,
) -> tuple[QuantizedTensor, Tensor | None]:
    """Return the result of ``_run``, whose gradient is that of ``x`` if one is needed."""
    if x.requires_grad and torch.is_grad_enabled():
        return QuantizeFunction.apply(x, quantizer, scale, amax, seed, factor)
    return _run(x, quantizer, scale, amax, seed, factor)


def _run(
    x: Tensor,
    quantizer: Called,
    scale: Tensor | None,
    amax: list[Tensor] | None,
    seed: Tensor | None,
    factor: Tensor | None,
) -> tuple[QuantizedTensor, Tensor | None]:
    """Run the op and wrap its buffers.

    Args:
        x: any shape; float32, bfloat16 or float16.
        quantizer: the quantizer, or its constants.
        scale: (1,) float32 encode factor of delayed scaling, or None.
        amax: maxima that ``Quantizer.amax`` returned, reduced over a group, or None.
        seed: (1,) int64 seed of stochastic rounding, or None.
        factor: (1,) float32 decode factor that replaces the last buffer, or None.

    Returns:
        The quantized tensor, and the amax (1,) of delayed scaling, or None.
    """
    buffers = QUANTIZE(x, quantizer.canonical, scale, amax, seed)
    if factor is not None:
        buffers = [*buffers[:-1], factor.clone()]
    tensor = assembled(quantizer, buffers, x.shape, x.dtype)
    return tensor, buffers[-1] if len(buffers) > len(quantizer.keywords) else None


class QuantizeFunction(torch.autograd.Function):
    """Quantize in forward; pass the gradient unchanged in backward."""

    forward = staticmethod(_run)

    @staticmethod
    def setup_context(
        ctx: FunctionCtx, inputs: object, output: tuple[QuantizedTensor, Tensor | None]
    ) -> None:
        """Mark the amax as not differentiable."""
        if output[1] is not None:
            ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(
        ctx: FunctionCtx, grad: Tensor, _: Tensor | None
    ) -> tuple[Tensor, None, None, None, None, None]:
        """Return ``grad``, of the shape of the tensor, as the gradient of ``x``."""
        return grad, None, None, None, None, None


def assembled(
    quantizer: Called, buffers: Sequence[Tensor], shape: Shape, dtype: torch.dtype
) -> QuantizedTensor:
    """Return a quantized tensor with buffers that an op has allocated, without checks.

    Args:
        quantizer: describes the buffers.
        buffers: inner buffers in slot order; the amax of delayed scaling may follow.
        shape: the logical shape.
        dtype: the nominal dtype.
    """
    if not is_compiling():
        return wrap(quantizer.tensor_cls, shape, dtype, quantizer, buffers, FRESH)  # type: ignore[arg-type]
    named: dict[str, Any] = {keyword: buffers[i] for i, keyword in enumerate(quantizer.keywords)}
    # Pass the string: Dynamo would rebuild a quantizer from its fields, some as symbolic floats.
    return quantizer.tensor_cls(shape, dtype, quantizer.canonical, **named)
