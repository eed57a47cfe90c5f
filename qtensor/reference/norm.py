"""LayerNorm and RMSNorm over the last dim, forward and backward, in float32 with ordered sums."""

from __future__ import annotations

import torch
from torch import Tensor

from qtensor.reference.arithmetic import column_sums, row_sums, square_root, write_
from qtensor.reference.constants import table
from qtensor.reference.scaling import quotient

KINDS = ("layernorm", "rmsnorm")


def matrix(t: Tensor) -> Tensor:
    """Return the (M, K) view of a tensor as float32; K is the last dim."""
    return t.reshape(t.shape[:-1].numel(), t.shape[-1]).to(torch.float32)


def gain(weight: Tensor | None, zero_centered: bool) -> Tensor | None:
    """Return the factor of the normalized values, (K,) float32: ``weight``, or 1 + ``weight``."""
    if weight is None:
        return None
    weight = weight.to(torch.float32)
    return 1.0 + weight if zero_centered else weight


def _mean(values: Tensor) -> Tensor:
    """Return the mean of each row, (M, 1), of (M, K) float32 values."""
    return quotient(row_sums(values), table(float(values.shape[1]), values.device))


def norm_(
    outputs: tuple[Tensor, Tensor, Tensor],
    x: Tensor,
    gamma: Tensor | None,
    bias: Tensor | None,
    kind: str,
    eps: float,
) -> None:
    """Write y, mean and rstd.

    y = ((x - mean) * rstd) * gamma + bias, with rstd = 1 / sqrt(variance + eps).

    Args:
        outputs: y like ``x``; mean, float32 of the leading dims or (0,) for "rmsnorm"; rstd,
            float32 of the leading dims.
        x: (..., K) float32, bfloat16 or float16.
        gamma: (K,) float32 from ``gain``, or None.
        bias: (K,), or None.
        kind: one of ``KINDS``; "rmsnorm" uses 0 as the mean.
        eps: rounded to float32.
    """
    y, mean, rstd = outputs
    values = matrix(x)
    if kind == "layernorm":
        average = _mean(values)
        write_(mean, average.reshape(mean.shape))
        values = values - average
    variance = _mean(values * values)
    inverse = quotient(1.0, square_root(variance + table(eps, x.device)))
    write_(rstd, inverse.reshape(rstd.shape))
    values = values * inverse
    if gamma is not None:
        values = values * gamma
    if bias is not None:
        values = values + bias.to(torch.float32)
    write_(y, values.reshape(y.shape))


def norm_backward_(
    outputs: tuple[Tensor, Tensor, Tensor],
    dy: Tensor,
    x: Tensor,
    gamma: Tensor | None,
    stats: tuple[Tensor | None, Tensor],
) -> None:
    """Write dx, dweight and dbias; skip dweight and dbias if they are empty.

    Let n be the normalized values and g = dy * gamma. Then
    dx = (g - (n * mean(g * n) + mean(g))) * rstd, where mean() is over the row and mean(g) is left
    out for "rmsnorm". dweight is the sum of dy * n over the rows, and dbias the sum of dy.

    Args:
        outputs: dx like ``x``; dweight and dbias, (K,) or (0,).
        dy: (..., K) float32, bfloat16 or float16.
        x: (..., K) float32, bfloat16 or float16.
        gamma: (K,) float32 from ``gain``, or None.
        stats: mean (None for "rmsnorm") and rstd, float32 of the leading dims.
    """
    dx, dweight, dbias = outputs
    mean, rstd = stats
    grad, normalized = matrix(dy), matrix(x)
    if mean is not None:
        normalized = normalized - mean.reshape(-1, 1)
    inverse = rstd.reshape(-1, 1)
    normalized = normalized * inverse
    g = grad if gamma is None else grad * gamma
    projection = normalized * _mean(g * normalized)
    if mean is not None:
        projection = projection + _mean(g)
    write_(dx, ((g - projection) * inverse).reshape(dx.shape))
    if dweight.numel():
        write_(dweight, column_sums(grad * normalized))
    if dbias.numel():
        write_(dbias, column_sums(grad))
