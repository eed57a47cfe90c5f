"""A small model and its inputs, for tests of searches."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def make_model(width: int = 64) -> nn.Sequential:
    """Three linear layers, the one in the middle with ``width`` inputs."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 32)
    )


def make_inputs() -> list[Tensor]:
    """Two batches of 16 rows."""
    torch.manual_seed(1)
    return [torch.randn(16, 64) for _ in range(2)]
