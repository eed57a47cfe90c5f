"""The update of delayed scaling between steps (docs/numerics.md, delayed scaling)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .elements import ELEMENTS
from .rounding import FLT_MAX


def delayed_update(
    history: np.ndarray,
    scale: np.ndarray,
    algo: str | Callable[[np.ndarray], np.ndarray] = "max",
    margin: int = 0,
    dtype: str = "e4m3",
) -> tuple[np.ndarray, np.ndarray]:
    """New (history, scale) from the amax history (length, n) and the scale (n,); the arguments are
    left alone.

    `algo`: "max" over the history, "most_recent" (row 0), or a callable from the history to the
    amax (n,).

    fp8_max / amax is (1 / amax) * fp8_max here, two roundings: only that gives the golden bytes
    (448 / 12 is 0x42155556, not 0x42155555), because the source computes `number / tensor` in
    torch, which multiplies by the reciprocal.
    """
    if callable(algo):
        amax = np.asarray(algo(history), np.float32)
    else:
        amax = {"max": history.max(axis=0), "most_recent": history[0]}[algo].astype(np.float32)
    with np.errstate(all="ignore"):
        new_scale = (np.float32(1) / amax) * ELEMENTS[dtype].max / np.float32(2.0**margin)
    new_scale = np.where(np.isposinf(new_scale), FLT_MAX, new_scale)
    new_scale = np.where((amax > 0) & np.isfinite(amax), new_scale, scale).astype(np.float32)
    rolled = np.concatenate([history[1:], history[:1]])
    rolled[0] = 0
    return rolled, new_scale
