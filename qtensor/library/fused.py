"""The ops ``norm_quantize`` and ``activation_quantize``: the bytes of the two ops, without the tensor between them."""

from __future__ import annotations

import torch
from torch import Tensor

from qtensor.kernels import table
from qtensor.kernels.cpu.floats import Target
from qtensor.library.activation import activated_shape, check_kind
from qtensor.library.codec import alloc_slots, parse
from qtensor.library.define import FILLS, leaf_op
from qtensor.library.norm import alloc_stats, check_norm


def _alloc_quantized(shape: tuple[int, ...], quantizer: str, device: torch.device) -> list[Tensor]:
    """Buffers in slot order, and the amax of delayed scaling."""
    codec = parse(quantizer)
    outputs = alloc_slots(codec.slots, shape, device)
    if codec.returns_amax:
        outputs.append(torch.empty(1, dtype=torch.float32, device=device))
    return outputs


def _norm_quantize_alloc(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    eps: float,
    zero_centered_gamma: bool,
    dtype: torch.dtype,
    quantizer: str,
    scale: Tensor | None = None,
    amax: list[Tensor] | None = None,
    seed: Tensor | None = None,
    keep: bool = False,
) -> list[Tensor]:
    check_norm("norm_quantize", x, weight, bias, kind, dtype)
    outputs = [*_alloc_quantized(tuple(x.shape), quantizer, x.device), *alloc_stats(x, kind)]
    if keep:
        outputs.append(torch.empty(x.shape, dtype=dtype, device=x.device))
    return outputs


def _norm_quantize_fill(
    outputs: list[Tensor],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    eps: float,
    zero_centered_gamma: bool,
    dtype: torch.dtype,
    quantizer: str,
    scale: Tensor | None = None,
    amax: list[Tensor] | None = None,
    seed: Tensor | None = None,
    keep: bool = False,
) -> None:
    count = len(outputs) - 2 - keep
    buffers, (mean, rstd) = outputs[:count], outputs[count : count + 2]
    y = outputs[-1] if keep else None
    target = Target(parse(quantizer), dtype, (scale, amax, seed))
    settings = (kind, eps, zero_centered_gamma)
    arguments = ((y, mean, rstd), buffers, x, (weight, bias), settings, target)
    if table.floats_("norm_quantize", x.device.type, *arguments):
        return
    y = torch.empty(x.shape, dtype=dtype, device=x.device) if y is None else y
    FILLS["norm"]((y, mean, rstd), x, weight, bias, *settings, dtype)
    FILLS["quantize"](buffers, y, quantizer, scale, amax, seed)


NORM_QUANTIZE = leaf_op(
    "norm_quantize(Tensor x, Tensor? weight, Tensor? bias, str kind, float eps, bool zero_centered_gamma, "
    "ScalarType dtype, str quantizer, Tensor? scale=None, Tensor[]? amax=None, Tensor? seed=None, "
    "bool keep=False) -> Tensor[]",
    _norm_quantize_alloc,
    _norm_quantize_fill,
)
"""``quantize`` of the y of ``norm``, which is rounded to ``dtype`` first: what ``quantize`` returns, mean, rstd, and y
where ``keep`` asks for it."""


def _activation_quantize_alloc(
    x: Tensor,
    kind: str,
    quantizer: str,
    scale: Tensor | None = None,
    amax: list[Tensor] | None = None,
    seed: Tensor | None = None,
    keep: bool = False,
) -> list[Tensor]:
    shape = activated_shape("activation_quantize", x, kind)
    outputs = _alloc_quantized(shape, quantizer, x.device)
    if keep:
        outputs.append(torch.empty(shape, dtype=x.dtype, device=x.device))
    return outputs


def _activation_quantize_fill(
    outputs: list[Tensor],
    x: Tensor,
    kind: str,
    quantizer: str,
    scale: Tensor | None = None,
    amax: list[Tensor] | None = None,
    seed: Tensor | None = None,
    keep: bool = False,
) -> None:
    buffers, y = (outputs[:-1], outputs[-1]) if keep else (outputs, None)
    target = Target(parse(quantizer), x.dtype, (scale, amax, seed))
    name, clamp = check_kind("activation_quantize", kind)
    if table.floats_("activation_quantize", x.device.type, y, buffers, x, name, target, clamp):
        return
    if y is None:
        y = x.new_empty(activated_shape("activation_quantize", x, kind))
    FILLS["activation"](y, x, kind)
    FILLS["quantize"](buffers, y, quantizer, scale, amax, seed)


ACTIVATION_QUANTIZE = leaf_op(
    "activation_quantize(Tensor x, str kind, str quantizer, Tensor? scale=None, Tensor[]? amax=None, "
    "Tensor? seed=None, bool keep=False) -> Tensor[]",
    _activation_quantize_alloc,
    _activation_quantize_fill,
)
"""``quantize`` of ``activation``: what ``quantize`` returns, and the activation where ``keep`` asks for it."""
