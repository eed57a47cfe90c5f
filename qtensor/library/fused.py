"""Define ``norm_quantize`` and ``activation_quantize``, without a tensor between two ops."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.kernels import table
from qtensor.kernels.fusion import Target
from qtensor.library.activation import ActivationArgs, activated_shape, check_kind
from qtensor.library.checks import check_seed
from qtensor.library.codec import alloc_slots, parse
from qtensor.library.define import FILLS, leaf_op
from qtensor.library.norm import NormArgs, alloc_stats, check_norm
from qtensor.library.quantize import QuantizeArgs


def _alloc_quantized(
    op: str, shape: tuple[int, ...], quantizer: str, seed: Tensor | None, device: torch.device
) -> list[Tensor]:
    """Buffers in slot order, and the amax of delayed scaling."""
    codec = parse(quantizer)
    check_seed(op, codec, seed)
    outputs = alloc_slots(codec.slots, shape, device)
    if codec.returns_amax:
        outputs.append(torch.empty(1, dtype=torch.float32, device=device))
    return outputs


class NormQuantizeArgs(NamedTuple):
    """Arguments of the op ``norm_quantize``."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    kind: str
    eps: float
    zero_centered_gamma: bool
    dtype: torch.dtype
    quantizer: str
    scale: Tensor | None = None
    amax: list[Tensor] | None = None
    seed: Tensor | None = None
    keep: bool = False


def _norm_quantize_alloc(args: NormQuantizeArgs) -> list[Tensor]:
    check_norm("norm_quantize", args.x, args.weight, args.bias, args.kind, args.dtype)
    outputs = [
        *_alloc_quantized(
            "norm_quantize", tuple(args.x.shape), args.quantizer, args.seed, args.x.device
        ),
        *alloc_stats(args.x, args.kind),
    ]
    if args.keep:
        outputs.append(torch.empty(args.x.shape, dtype=args.dtype, device=args.x.device))
    return outputs


def _norm_quantize_fill(outputs: list[Tensor], args: NormQuantizeArgs) -> None:
    count = len(outputs) - 2 - args.keep
    buffers, (mean, rstd) = outputs[:count], outputs[count : count + 2]
    y = outputs[-1] if args.keep else None
    target = Target(parse(args.quantizer), args.dtype, (args.scale, args.amax, args.seed))
    settings = (args.kind, args.eps, args.zero_centered_gamma)
    arguments = ((y, mean, rstd), buffers, args.x, (args.weight, args.bias), settings, target)
    if table.floats_("norm_quantize", args.x.device.type, *arguments):
        return
    y = torch.empty(args.x.shape, dtype=args.dtype, device=args.x.device) if y is None else y
    FILLS["norm"]((y, mean, rstd), NormArgs(args.x, args.weight, args.bias, *settings, args.dtype))
    FILLS["quantize"](buffers, QuantizeArgs(y, args.quantizer, args.scale, args.amax, args.seed))


NORM_QUANTIZE = leaf_op(
    "norm_quantize(Tensor x, Tensor? weight, Tensor? bias, str kind, float eps, bool "
    "zero_centered_gamma, ScalarType dtype, str quantizer, Tensor? scale=None, Tensor[]? "
    "amax=None, Tensor? seed=None, bool keep=False) -> Tensor[]",
    NormQuantizeArgs,
    _norm_quantize_alloc,
    _norm_quantize_fill,
)
"""Quantize the y of ``norm``, which is rounded to ``dtype`` first.

The op returns the outputs of ``quantize``, then mean and rstd, then y if ``keep`` is True.
"""


class ActivationQuantizeArgs(NamedTuple):
    """Arguments of the op ``activation_quantize``."""

    x: Tensor
    kind: str
    quantizer: str
    scale: Tensor | None = None
    amax: list[Tensor] | None = None
    seed: Tensor | None = None
    keep: bool = False


def _activation_quantize_alloc(args: ActivationQuantizeArgs) -> list[Tensor]:
    shape = activated_shape("activation_quantize", args.x, args.kind)
    outputs = _alloc_quantized(
        "activation_quantize", shape, args.quantizer, args.seed, args.x.device
    )
    if args.keep:
        outputs.append(torch.empty(shape, dtype=args.x.dtype, device=args.x.device))
    return outputs


def _activation_quantize_fill(outputs: list[Tensor], args: ActivationQuantizeArgs) -> None:
    buffers, y = (outputs[:-1], outputs[-1]) if args.keep else (outputs, None)
    target = Target(parse(args.quantizer), args.x.dtype, (args.scale, args.amax, args.seed))
    name, clamp = check_kind("activation_quantize", args.kind)
    if table.floats_(
        "activation_quantize", args.x.device.type, y, buffers, args.x, name, target, clamp
    ):
        return
    if y is None:
        y = args.x.new_empty(activated_shape("activation_quantize", args.x, args.kind))
    FILLS["activation"](y, ActivationArgs(args.x, args.kind))
    FILLS["quantize"](buffers, QuantizeArgs(y, args.quantizer, args.scale, args.amax, args.seed))


ACTIVATION_QUANTIZE = leaf_op(
    "activation_quantize(Tensor x, str kind, str quantizer, Tensor? scale=None, Tensor[]? "
    "amax=None, Tensor? seed=None, bool keep=False) -> Tensor[]",
    ActivationQuantizeArgs,
    _activation_quantize_alloc,
    _activation_quantize_fill,
)
"""Quantize the result of ``activation``.

The op returns the outputs of ``quantize``, then the activation if ``keep`` is True.
"""
