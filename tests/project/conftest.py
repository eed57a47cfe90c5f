"""Fixtures of the tests of examples and benchmarks."""

import pytest
import torch

from examples import small_gpt


@pytest.fixture
def text(monkeypatch):
    """A corpus that is quick to read: periodic bytes, which a model can learn."""
    data = torch.arange(4096).remainder(16).add(65).to(torch.uint8)
    monkeypatch.setattr(small_gpt, "corpus", lambda: (data[:3000], data[3000:]))
    return data
