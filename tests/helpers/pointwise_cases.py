"""Inputs of the small ops of sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from formats import FormatCase

Sample = tuple[tuple[Any, ...], dict[str, Any]]


def pointwise(name: str) -> Callable[[FormatCase], Iterator[Sample]]:
    """Yield calls of the small ops of sequences."""

    def samples(case: FormatCase) -> Iterator[Sample]:
        for x in (torch.randn(6, 40).half(), torch.randn(3, 2, 5), torch.randn(0, 4)):
            y = torch.randn_like(x)
            _, rnorm = torch.ops.qtensor.l2_norm(x, 1e-6)
            seed = torch.tensor([3])
            yield (
                {
                    "add": (x, y),
                    "scale": (x, 0.3),
                    "scale_add": (x, 0.3, y),
                    "bias_add": (x, torch.randn(x.shape[-1]), torch.bfloat16),
                    "dropout": (x, 0.5, seed),
                    "l2_norm": (x, 1e-6),
                    "l2_norm_backward": (y, x, rnorm, 1e-6),
                }[name],
                {},
            )

    return samples


POINTWISE = ("add", "scale", "scale_add", "bias_add", "dropout", "l2_norm", "l2_norm_backward")
