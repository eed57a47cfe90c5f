"""Prepare a call of a quantizer: check arguments, make the seed, reduce maxima."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from qtensor.core.errors import (
    ArgumentTypeError,
    DtypeError,
    QTensorError,
    UnsupportedError,
    check,
    fail,
)
from qtensor.core.torch_state import in_transform
from qtensor.library.quantize import AMAX, RANDOM_SEED
from qtensor.storage.process_groups import check_group


def check_call(
    quantizer: Any, x: Tensor, scale: Tensor | None, noop_flag: Tensor | None, out: Any
) -> None:
    """Refuse arguments that a call of ``quantizer`` cannot use.

    Raises:
        QTensorError: an argument is missing, has a wrong type, or does not apply.
    """
    if (
        scale is None
        and noop_flag is None
        and not quantizer.needs_scale
        and isinstance(x, torch.Tensor)
        and not x.is_nested
    ):
        return
    name = f"quantize[{quantizer.format}]"
    if not isinstance(x, torch.Tensor):
        fail(
            name,
            "the input must be a torch.Tensor",
            type(x).__name__,
            "Convert it with torch.as_tensor",
            ArgumentTypeError,
        )
    if x.is_nested:
        fail(
            name,
            "the input must be a dense tensor",
            "a nested one",
            "Pad it, or quantize its parts",
            DtypeError,
        )
    if noop_flag is not None and out is None:
        fail(name, "noop_flag keeps bytes that exist", "no out=", "Pass out= as well")
    if scale is not None and not quantizer.needs_scale:
        fail(name, "only delayed scaling takes scale=", "one", "Drop scale=, or use fp8_delayed")
    if scale is None and quantizer.needs_scale and out is None:
        fail(name, "delayed scaling needs scale=", "none", "Pass scale=, float32 of shape (1,)")
    if scale is not None and (
        not isinstance(scale, torch.Tensor) or scale.dtype != torch.float32 or scale.numel() != 1
    ):
        fail(
            name,
            "scale must be a float32 tensor of shape (1,)",
            repr(scale),
            "Pass the stored factor as a tensor",
        )
    if scale is not None and scale.device != x.device:
        fail(name, f"scale must be on the device of x, {x.device}", scale.device, "Move it there")


def refuse_gradient(op: str, x: Any) -> None:
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


def refuse_transforms(quantizer: Any, x: Tensor) -> None:
    """Refuse to run inside a transform of ``torch.func``, or with a forward-mode derivative.

    Raises:
        UnsupportedError: the transform cannot follow the buffers, and would lose the derivative.
    """
    if in_transform() or (
        forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None
    ):
        fail(
            f"quantize[{quantizer.format}]",
            "transforms of torch.func and forward-mode derivatives cannot follow quantized tensors",
            f"an input {tuple(x.shape)} inside of one",
            "Use torch.autograd, or quantize outside of the transformed function",
            UnsupportedError,
        )


def prepare(
    quantizer: Any, x: Tensor, generator: torch.Generator | Tensor | None, group: Any
) -> tuple[Tensor | None, list[Tensor] | None]:
    """Return the seed (1,) and the reduced maxima of a call; None for those that the op ignores."""
    seed = amax = None
    if quantizer.stochastic_rounding:
        seed = _seed(quantizer, x, generator)
    elif generator is not None:
        rule = "generator= needs a quantizer that rounds at random"
        fail(
            f"quantize[{quantizer.format}]",
            rule,
            quantizer.canonical,
            "Drop it, or set stochastic_rounding=True",
        )
    if group is not None and quantizer.needs_scale:
        rule = "delayed scaling takes its factor from scale="
        fix = "Reduce the amax that quantize_with_amax returns"
        fail(f"quantize[{quantizer.format}]", rule, "amax_reduction_group", fix)
    if seed is not None and seed.device != x.device:
        rule = f"the seed must be on the device of x, {x.device}"
        fail(f"quantize[{quantizer.format}]", rule, seed.device, "Move it there")
    if group is not None:
        amax = [reduce_max(a, group) for a in AMAX(x, quantizer.canonical)]
    return seed, amax


def _seed(quantizer: Any, x: Tensor, generator: torch.Generator | Tensor | None) -> Tensor:
    if generator is None:
        return RANDOM_SEED(x)
    if isinstance(generator, torch.Tensor):
        if generator.dtype != torch.int64 or generator.numel() != 1:
            got = f"{tuple(generator.shape)} {generator.dtype}"
            fail(
                f"quantize[{quantizer.format}]",
                "a seed tensor is one int64",
                got,
                "Pass torch.tensor([seed])",
            )
        return generator.reshape(1)
    if not isinstance(generator, torch.Generator):
        rule = "generator must be a torch.Generator or an int64 tensor"
        fail(
            f"quantize[{quantizer.format}]",
            rule,
            type(generator).__name__,
            "Pass torch.tensor([seed])",
            ArgumentTypeError,
        )
    seed = torch.empty(1, dtype=torch.int64, device=generator.device)
    return seed.random_(generator=generator).to(x.device)


def reduce_max(amax: Tensor, group: Any) -> Tensor:
    """Return the maximum of ``amax`` over a process group, of the same shape.

    The functional collective can be traced.
    """
    check(
        torch.distributed.is_available() and torch.distributed.is_initialized(),
        "quantize",
        "amax_reduction_group needs torch.distributed",
        "not initialised",
        "Call torch.distributed.init_process_group first",
        QTensorError,
    )
    if not torch.compiler.is_compiling():
        check_group(group, "quantize")
    # Imported here: torch.distributed's functional collectives take 0.1 s.
    from torch.distributed._functional_collectives import all_reduce  # noqa: PLC0415

    # A maximum over ranks may lose a NaN. An inf gives the same scale as a NaN.
    return all_reduce(amax.nan_to_num(nan=math.inf, posinf=math.inf), "max", group)
