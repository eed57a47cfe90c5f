"""Update the state of delayed scaling between steps: plain tensors that the caller owns."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qtensor.errors import check
from qtensor.formats import E4M3, E5M2
from qtensor.quantizers.options import find_element
from qtensor.reference.float8 import delayed_scale, roll_history

AmaxAlgorithm = str | Callable[[Tensor], Tensor]


def delayed_scaling_state(
    length: int, count: int, *, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """Return fresh state: amax history (length, count), zeros, and scale (count,), ones; float32.

    Raises:
        QTensorError: a length or count below 1.
    """
    check(
        length > 0 and count > 0,
        "delayed_scaling_state",
        "the history needs a positive length and number of tensors",
        (length, count),
        "Pass both >= 1",
    )
    history = torch.zeros(length, count, dtype=torch.float32, device=device)
    return history, torch.ones(count, dtype=torch.float32, device=device)


def delayed_scaling_update(
    history: Tensor,
    scale: Tensor,
    *,
    algorithm: AmaxAlgorithm = "max",
    margin: int = 0,
    dtype: str | torch.dtype = "e4m3",
) -> tuple[Tensor, Tensor]:
    """The step between iterations (docs/numerics.md, delayed scaling).

    Args:
        history: (length, n) float32; row 0 holds the maxima of the step just run.
        scale: (n,) float32 encode factors in use.
        algorithm: "max" over the history, "most_recent" (row 0), or a callable (length, n) -> (n,).
        margin: the new factor is divided by ``2 ** margin``.
        dtype: the element, "e4m3" or "e5m2".

    Returns:
        New history (rolled by -1, row 0 zero) and new factors: the old one where the amax is 0
        or not finite. The inputs are unchanged.

    Raises:
        QTensorError: unknown algorithm or shapes that do not fit.
    """
    check(
        history.ndim == 2 and scale.shape == history.shape[1:],
        "delayed_scaling_update",
        "history must be (length, n) and scale (n,)",
        f"{tuple(history.shape)} and {tuple(scale.shape)}",
        "Make them with delayed_scaling_state",
    )
    check(
        callable(algorithm) or algorithm in ("max", "most_recent"),
        "delayed_scaling_update",
        'algorithm must be "max", "most_recent" or a callable',
        repr(algorithm),
        "Choose one of them",
    )
    if callable(algorithm):
        amax = algorithm(history)
        check(
            isinstance(amax, Tensor) and amax.shape == scale.shape,
            "delayed_scaling_update",
            f"the algorithm must return a tensor of shape {tuple(scale.shape)}",
            tuple(amax.shape) if isinstance(amax, Tensor) else type(amax).__name__,
            "Reduce over dim 0",
        )
    else:
        amax = history.amax(0) if algorithm == "max" else history[0]
    element = find_element((E4M3, E5M2), dtype)
    return roll_history(history), delayed_scale(amax, scale, margin, element.max)


def record_amax_(history: Tensor, amax: Tensor) -> Tensor:
    """Compute ``history[0] = max(history[0], amax)`` in place; history (length, n), amax (n,).

    Raises:
        QTensorError: shapes that do not fit.
    """
    check(
        history.ndim == 2 and amax.shape == history.shape[1:],
        "record_amax_",
        "history must be (length, n) and amax (n,)",
        f"{tuple(history.shape)} and {tuple(amax.shape)}",
        "Concatenate the maxima of all tensors first",
    )
    history[0] = torch.maximum(history[0], amax)
    return history
