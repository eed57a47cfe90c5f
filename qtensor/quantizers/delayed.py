"""Update the state of delayed scaling between steps: plain tensors that the caller owns."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qtensor.core.errors import check
from qtensor.core.formats import E4M3, E5M2
from qtensor.quantizers.options import find_element
from qtensor.reference.float8 import delayed_scale, roll_history

AmaxAlgorithm = str | Callable[[Tensor], Tensor]


def delayed_scaling_state(
    length: int, count: int, *, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """Return the initial state of delayed scaling for ``count`` tensors.

    Args:
        length: number of steps in the amax history.
        count: number of tensors.
        device: device of the state; the default device if None.

    Returns:
        The amax history, zeros (length, count), and the scales, ones (count,); float32.

    Raises:
        QTensorError: ``length`` or ``count`` is below 1.
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
    """Return the state of delayed scaling for the next step (docs/numerics.md).

    Args:
        history: (length, n) float32; row 0 holds the maxima of the last step.
        scale: (n,) float32 encode factors of the last step.
        algorithm: "max" over the history, "most_recent" (row 0), or a callable (length, n) -> (n,).
        margin: the new factor is divided by ``2 ** margin``.
        dtype: the element, "e4m3" or "e5m2".

    Returns:
        The new history (length, n): the rows move up by one, the first one to the end, and then
        row 0 becomes zero. The new factors (n,): a factor stays the same if its amax is 0 or not
        finite. The inputs are unchanged.

    Raises:
        QTensorError: the algorithm is unknown, or the shapes do not fit.
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
    """Update row 0 of the history to ``max(history[0], amax)`` in place and return the history.

    Args:
        history: (length, n) float32.
        amax: (n,) float32 maxima of the current step.

    Raises:
        QTensorError: the shapes do not fit.
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
