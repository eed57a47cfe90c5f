"""Convert between the tensor factor of NVFP4 in files and what our tensors hold.

Files hold a factor G, or a divisor g. Our tensors hold an amax A and decode with fl(A / 6L), where
L is the largest block factor, 448 or 256; or, with ``with_global_scale_inv``, a factor of their
own. This module is the only place that knows the conversion.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from qtensor.checkpoints.buffers import Parts
from qtensor.quantizers import NVFP4Quantizer
from qtensor.reference.nvfp4 import find_amax, nearest_amax
from qtensor.storage.tensor import QuantizedTensor

_STEPS = 2
"""Neighbours on each side, in float32 units, that a search tries."""


class TensorFactor(NamedTuple):
    """Hold what an NVFP4 tensor needs to decode with the factor of a file.

    Attributes:
        quantizer: describes the buffers.
        amax: float32 (1,).
        factor: the stored decode factor, float32 (1,), or None if the amax gives it.
    """

    quantizer: NVFP4Quantizer
    amax: Tensor
    factor: Tensor | None = None


def from_factor(factor: Tensor) -> TensorFactor:
    """Return the amax that gives a factor exactly, or else the factor itself.

    The factor G is one float32, positive and finite.
    """
    factor = factor.reshape(1)
    for e4m3_max in (448.0, 256.0):
        amax = nearest_amax(factor, e4m3_max)
        if torch.equal(amax / (6 * e4m3_max), factor):
            return TensorFactor(NVFP4Quantizer(e4m3_max=e4m3_max), amax)
    quantizer = NVFP4Quantizer(with_global_scale_inv=True)
    return TensorFactor(quantizer, nearest_amax(factor, 448.0), factor)


def from_factors(factors: Tensor, rows: int) -> TensorFactor:
    """Return ``from_factor`` of one factor, or ``from_experts`` of several with ``rows`` each."""
    return from_factor(factors) if factors.numel() == 1 else from_experts(factors, rows)


def from_divisor(divisor: Tensor) -> TensorFactor | None:
    """Return an amax A with fl(2688 / A) equal to a divisor, or else the factor fl(1 / g).

    A bfloat16 amax is preferred, because it is the amax of every bfloat16 weight. Several divisors
    can have one reciprocal; the amax beside the factor is then chosen so that ``divisor_of`` gives
    the divisor back.

    Args:
        divisor: compressed-tensors' global scale g, one float32, positive and finite.

    Returns:
        The parts of the tensor, or None if the reciprocal is not a finite, normal number.
    """
    divisor = divisor.reshape(1)
    guess = _divided(2688.0, divisor)
    near = _neighbours(guess)
    candidates = torch.cat((guess.bfloat16().float(), near))
    hits = candidates[_divided(2688.0, candidates) == divisor]
    if len(hits):
        return TensorFactor(NVFP4Quantizer(), hits[:1])
    factor = _divided(1.0, divisor)
    if not bool(torch.isfinite(factor) & (factor >= torch.finfo(torch.float32).tiny)):
        return None
    quantizer = NVFP4Quantizer(with_global_scale_inv=True)
    for amax in near.split(1):
        if torch.equal(divisor_of(quantizer, amax, factor), divisor):
            return TensorFactor(quantizer, amax, factor)
    return None


def factor_in(tensor: QuantizedTensor, parts: Parts) -> Tensor:
    """Return ``factor_of`` an NVFP4 tensor with these parts."""
    quantizer = cast(NVFP4Quantizer, tensor.quantizer)
    return factor_of(quantizer, cast(Tensor, parts.amax), parts.factor)


def factor_of(quantizer: NVFP4Quantizer, amax: Tensor, factor: Tensor | None) -> Tensor:
    """Return G: the stored factor, or fl(A / 6L), float32 of the shape of ``amax``."""
    return amax / (6 * quantizer.e4m3_max) if factor is None else factor


def divisor_of(quantizer: NVFP4Quantizer, amax: Tensor, factor: Tensor | None) -> Tensor:
    """Return g = fl(6L / A); with a stored factor, the g with fl(1 / g) = G nearest to 6L / A."""
    top = 6 * quantizer.e4m3_max
    guess = _divided(top, amax)
    if factor is None or factor.is_meta:
        return guess
    near = _neighbours(_divided(1.0, factor))
    near = near[_divided(1.0, near) == factor]
    if not len(near):
        return guess
    distance = (top / near.double() - amax.double()).abs()
    return near[distance.argmin()].reshape(1)


def activation_divisor(amax: Tensor, factor: Tensor | None = None) -> Tensor:
    """Return the divisor that compressed-tensors stores for activations with this amax.

    Its ``generate_gparam`` computes ``2688 / amax`` as ``fl(fl(1 / amax) * 2688)``. With a decode
    factor that is not ``fl(1 / g)`` of this number, it is the g with ``fl(1 / g)`` equal to the
    factor that is next to it. All are float32 (1,).
    """
    guess = amax.reciprocal() * 2688
    if factor is None or torch.equal(_divided(1.0, guess), factor):
        return guess
    near = _neighbours(_divided(1.0, factor))
    near = near[_divided(1.0, near) == factor]
    if not len(near):
        return _divided(1.0, factor)
    return near[(near.double() - guess.double()).abs().argmin()].reshape(1)


def activation_amax(divisor: Tensor) -> Tensor:
    """Return an amax whose ``activation_divisor`` is g, or else ``fl(2688 / g)``; float32 (1,)."""
    guess = _divided(2688.0, divisor.reshape(1))
    candidates = torch.cat((guess.bfloat16().float(), _neighbours(guess)))
    hits = candidates[candidates.reciprocal() * 2688 == divisor]
    return hits[:1] if len(hits) else guess


def _divided(top: float, by: Tensor) -> Tensor:
    """Return fl(top / by); ``top / by`` of a number would multiply with a rounded reciprocal."""
    return torch.full_like(by, top) / by


def _neighbours(guess: Tensor) -> Tensor:
    """Return the finite, positive float32 numbers around ``guess``, the nearest first."""
    steps = torch.tensor(sorted(range(-_STEPS, _STEPS + 1), key=abs), dtype=torch.int32)
    near = (guess.view(torch.int32) + steps).view(torch.float32)
    return near[torch.isfinite(near) & (near > 0)]


def from_experts(factors: Tensor, rows: int) -> TensorFactor:
    """Return a row-scaled quantizer, and the amax and factor of each row of stacked experts.

    ``factors`` have G of each expert, float32 (E,), positive and finite. An expert has ``rows``.
    """
    factors = factors.reshape(-1)
    found = find_amax(factors)
    if found is not None:
        quantizer = NVFP4Quantizer(row_scaled=True, e4m3_max=found[1])
        return TensorFactor(quantizer, found[0].repeat_interleave(rows))
    quantizer = NVFP4Quantizer(row_scaled=True, with_global_scale_inv=True)
    amax = nearest_amax(factors, 448.0).repeat_interleave(rows)
    return TensorFactor(quantizer, amax, factors.repeat_interleave(rows))


def expert_factors(factors: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """Return the factor of each expert (E,) from the factors of its rows; None if they differ.

    ``factors`` are float32 (E * N,); on the meta device they count as equal. ``shape`` is
    (E, N, K); None is returned for two dims.
    """
    if len(shape) != 3:
        return None
    each = factors.reshape(shape[0], shape[1])
    first = each[:, :1]
    return first.reshape(-1) if each.is_meta or bool((each == first).all()) else None
