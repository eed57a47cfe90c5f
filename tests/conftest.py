"""Fixtures of every test."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Every test starts from the same random state."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """A test that compiles starts without cached graphs and leaves none."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
