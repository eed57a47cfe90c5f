"""The statistics of a tensor by their definitions, in float64, for every path of the code."""

from __future__ import annotations

import math

import pytest
import torch
from formats import FORMATS

from qtensor.debug import statistics
from qtensor.storage.numbers import factors_of_elements

ROWS, COLUMNS = 160, 256


def values(kind: str) -> torch.Tensor:
    """Return values of several sizes, with zeros."""
    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))
    x = x * torch.exp2(torch.arange(ROWS)[:, None] % 11 - 20.0)
    x[:, 7], x[:9] = 0, 0
    if kind == "nan":
        x[3, 5], x[40, 60], x[41, 61] = math.nan, math.inf, -math.inf
    return x.bfloat16() if kind == "bfloat16" else x


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "nan"])
@pytest.mark.parametrize("case", FORMATS, ids=lambda case: case.name)
def test_definitions(case, kind, monkeypatch):
    """Chunks are smaller than the tensor, so that their numbers are added up."""
    monkeypatch.setattr(statistics, "_CHUNK_ON_CPU", 64 * COLUMNS)
    x, quantizer = values(kind), case.quantizer()
    q = quantizer(x, **case.call())
    vector, _ = statistics.measure(x, quantizer, case.call().get("scale"))
    (found,) = statistics.totals_of([vector])
    high, decoded = x.double(), q.dequantize(torch.float32).double()
    both = high.isfinite() & decoded.isfinite()
    clean, error = high.where(both, 0), (high - decoded).where(both, 0)
    assert (found.nan, found.inf) == ((1, 2) if kind == "nan" else (0, 0))
    assert found.amax == high.where(high.isfinite(), 0).abs().max()
    assert found.signal == pytest.approx(clean.square().sum().item(), rel=1e-12)
    assert found.noise == pytest.approx(error.square().sum().item(), rel=1e-12)
    assert found.flushed == ((clean != 0) & (decoded == 0)).sum()
    factor = factors_of_elements(q).double()
    # The factor itself is rounded: a value within that rounding is not saturated.
    bound = factor * quantizer.element.max * (1 + 2.0**-20)
    assert found.saturated == (high.abs() > bound).sum()
    known = factor[factor.isfinite()]
    assert (found.scale_min, found.scale_max) == (known.min(), known.max())
    rows, cols = quantizer.value_block or (1, COLUMNS)
    whole = torch.nn.functional.pad(decoded, (0, -COLUMNS % cols, 0, -ROWS % rows))
    blocks = whole.reshape(whole.shape[0] // rows, rows, whole.shape[1] // cols, cols)
    assert found.blocks == blocks.shape[0] * blocks.shape[2]
    assert found.zero_blocks == (blocks == 0).all(3).all(1).sum()
    assert found.dead_columns == 1
