"""Arguments of the ops of learned factors, for opcheck and for the fuzz of raw ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

FORMATS = ("fp8", "nvfp4", "nvfp4(with_2d_quantization=True)")


def learned_factor(case: object) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield arguments, and keywords, of ``learned_factor``."""
    yield (torch.tensor([0.5]), "nvfp4"), {}
    yield (torch.tensor(-3.0), "fp8"), {}


def learned_factor_backward(case: object) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield arguments, and keywords, of ``learned_factor_backward``."""
    for text in FORMATS:
        x, log2_amax = torch.randn(5, 40), torch.tensor([0.5])
        yield (torch.randn(5, 40).bfloat16(), x, log2_amax, text, 40), {}
        yield (torch.randn(40), torch.randn(40).half(), log2_amax, text, 40), {}
        yield (x[:0], x[:0], log2_amax, text, 40), {}


SAMPLES = {
    "qtensor::learned_factor": learned_factor,
    "qtensor::learned_factor_backward": learned_factor_backward,
}


def _one(make: Any) -> dict[str, Any]:
    log2_amax = make.floats(1, dtype=torch.float32)
    return {"log2_amax": log2_amax, "quantizer": make.random.choice(FORMATS)}


def _backward(make: Any) -> dict[str, Any]:
    grad, x = (make.floats(make.rows, make.columns) for _ in range(2))
    return {"grad": grad, "x": x, **_one(make), "count": make.columns}


MAKERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "learned_factor": _one,
    "learned_factor_backward": _backward,
}
