"""Say whether a stored factor of activations, keys or values is one."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from qtensor.checkpoints.checkpoint import Checkpoint
from qtensor.checkpoints.layout_base import layouts

WHY = "an expert that calibration never reached?"
_FACTORS = ("input_scale", "input_global_scale", "activation_scale", "qscale_act", "scale_input")
"""Last name parts, in any layout, of factors of activations that quantize to codes."""


def is_activation_factor(checkpoint: Checkpoint, name: str) -> bool:
    """Return True for the factor of a layer's inputs, or of the keys or values of attention."""
    last = name.rpartition(".")[2]
    if name in checkpoint.groups or last.endswith("_input_scale"):
        return name not in checkpoint.groups
    known = last in checkpoint.reader.input_factors or last in _FACTORS
    return known or any(kv_factor(name, which) is not None for which in range(2))


def kv_factor(name: str, which: int) -> str | None:
    """Return the end of a name that says "factor of the keys" (0) or "of the values" (1), or None.

    A layout that keeps names may hold names of every layout, so all of them are tried.
    """
    for end in _kv_ends(which):
        if name == end or name.endswith(f".{end}"):
            return end
    return None


@functools.cache
def _kv_ends(which: int) -> tuple[str, ...]:
    """Return the names in all layouts, the longest first: others are the ends of it."""
    ends = {layout.kv_factors[which] for layout in layouts().values()}
    return tuple(sorted(ends, key=len, reverse=True))


def wrong_factor(factor: Tensor) -> str:
    """Return the first value of a factor or divisor that is not positive and finite, or ""."""
    if factor.is_meta or not factor.is_floating_point():
        return ""
    values = factor.detach().float().flatten()
    bad = values[~(torch.isfinite(values) & (values > 0))]
    return str(bad[0].item()) if bad.numel() else ""


def factor_problem(checkpoint: Checkpoint, name: str) -> str:
    """Return what is wrong with a stored factor of activations, or "" for all other tensors."""
    if not is_activation_factor(checkpoint, name):
        return ""
    got = wrong_factor(checkpoint[name])
    return f"a factor of activations is positive and finite; got {got} ({WHY})" if got else ""
