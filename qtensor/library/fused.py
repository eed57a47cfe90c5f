"""Define ``norm_quantize`` and ``activation_quantize``, without a tensor between two ops."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.core.quantizer_registry import alloc_slots, parse
from qtensor.kernels import table
from qtensor.kernels.fusion import Factors, Target
from qtensor.library.activation import ActivationArgs, activated_shape, check_kind
from qtensor.library.checks import check_seed
from qtensor.library.define import FILLS, empty, leaf_op
from qtensor.library.norm import NormArgs, alloc_stats, check_norm
from qtensor.library.quantize import QuantizeArgs, alloc_amax


def _alloc_quantized(
    op: str, shape: tuple[int, ...], quantizer: str, seed: Tensor | None, device: torch.device
) -> list[Tensor]:
    """Allocate buffers in slot order for a tensor of ``shape``, and the amax of delayed scaling."""
    described = parse(quantizer)
    check_seed(op, described, seed)
    return [*alloc_slots(described.slots, shape, device), *alloc_amax(described, device)]


class _NormQuantizeArgs(NamedTuple):
    norm: NormArgs
    quantizer: str
    factors: Factors
    keep: bool = False


def _norm_quantize_alloc(args: _NormQuantizeArgs) -> list[Tensor]:
    op, norm, x = "norm_quantize", args.norm, args.norm.x
    check_norm(op, x, norm.weight, norm.bias, norm.kind, norm.dtype)
    outputs = _alloc_quantized(op, tuple(x.shape), args.quantizer, args.factors.seed, x.device)
    kept = [empty(x, dtype=norm.dtype)] if args.keep else []
    return [*outputs, *alloc_stats(x, norm.kind), *kept]


def _norm_quantize_fill(outputs: list[Tensor], args: _NormQuantizeArgs) -> None:
    norm, count = args.norm, len(outputs) - 2 - args.keep
    buffers, (mean, rstd) = outputs[:count], outputs[count : count + 2]
    y = outputs[-1] if args.keep else None
    target = Target(parse(args.quantizer), norm.dtype, args.factors)
    settings = (norm.kind, norm.eps, norm.zero_centered_gamma)
    arguments = ((y, mean, rstd), buffers, norm.x, (norm.weight, norm.bias), settings, target)
    if table.floats_("norm_quantize", norm.x.device.type, *arguments):
        return
    y = empty(norm.x, dtype=norm.dtype) if y is None else y
    FILLS["norm"]((y, mean, rstd), norm)
    FILLS["quantize"](buffers, QuantizeArgs(y, args.quantizer, *args.factors))


NORM_QUANTIZE = leaf_op(
    "norm_quantize", _NormQuantizeArgs, "Tensor[]", _norm_quantize_alloc, _norm_quantize_fill
)
"""Quantize the y (..., K) of ``norm``, which is rounded to ``dtype`` first.

The op returns the outputs of ``quantize``, then mean and rstd, then y if ``keep`` is True.
"""


class _ActivationQuantizeArgs(NamedTuple):
    activation: ActivationArgs
    quantizer: str
    factors: Factors
    keep: bool = False


def _activation_quantize_alloc(args: _ActivationQuantizeArgs) -> list[Tensor]:
    op, (x, kind) = "activation_quantize", args.activation
    shape = activated_shape(op, x, kind)
    outputs = _alloc_quantized(op, shape, args.quantizer, args.factors.seed, x.device)
    return [*outputs, empty(x, shape)] if args.keep else outputs


def _activation_quantize_fill(outputs: list[Tensor], args: _ActivationQuantizeArgs) -> None:
    buffers, y = (outputs[:-1], outputs[-1]) if args.keep else (outputs, None)
    op, (x, kind) = "activation_quantize", args.activation
    target = Target(parse(args.quantizer), x.dtype, args.factors)
    name, clamp = check_kind(op, kind)
    if table.floats_(op, x.device.type, y, buffers, x, name, target, clamp):
        return
    y = empty(x, activated_shape(op, x, kind)) if y is None else y
    FILLS["activation"](y, args.activation)
    FILLS["quantize"](buffers, QuantizeArgs(y, args.quantizer, *args.factors))


ACTIVATION_QUANTIZE = leaf_op(
    "activation_quantize",
    _ActivationQuantizeArgs,
    "Tensor[]",
    _activation_quantize_alloc,
    _activation_quantize_fill,
)
"""Quantize the result of ``activation``.

The op returns the outputs of ``quantize``, then the activation if ``keep`` is True.
"""
