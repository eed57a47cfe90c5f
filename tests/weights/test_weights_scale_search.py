"""The factors with the least squared error, beside every factor that a block can have."""

import numpy as np
import pytest
import torch
from oracle.elements import ELEMENTS
from rounding_cases import block_of, named_buffers, stored_factors
from torch import nn

import qtensor

EXACT = (
    "nvfp4",
    "nvfp4(row_scaled=True)",
    "nvfp4(use_4over6=True)",
    "nvfp4(with_2d_quantization=True)",
    "mxfp4",
    "mxfp4(with_2d_quantization=True)",
    "mxfp4(scale_mode=rceil)",
    "mxfp6",
    "mxfp6(dtype=e3m2)",
    "mxfp8",
    "mxfp8(dtype=e5m2)",
)
OTHERS = ("fp8", "fp8_rowwise", "fp8_rowwise(axis=0)", "fp8_blockwise", "fp8(dtype=e5m2)")


def make_weight(kind):
    """Weights (6, 68): two rows of blocks are not whole."""
    torch.manual_seed(3)
    x = torch.randn(6, 68)
    if kind == "heavy":
        x = x.pow(3)
    elif kind == "outlier":
        x[1, 7], x[4, 40] = 60.0, -1e4
    elif kind == "small":
        x *= torch.tensor([1e-3, 1e-39, 1e-42, 0.0, 1e30, 1.0])[:, None]
    return x


def search(x, fmt, squares=None):
    """The weight with searched factors."""
    layer = nn.Linear(x.shape[1], x.shape[0], bias=False)
    layer.weight = nn.Parameter(x.clone())
    if squares is None:
        qtensor.quantize_(layer, fmt, rounding="mse")
    else:
        inputs = [torch.diag(squares.sqrt())]
        qtensor.quantize_(layer, fmt, rounding="weighted_mse", calibration=inputs)
    return layer.weight


def block_errors(weight, x, squares):
    """Squared error of each block, float64 (m, k)."""
    difference = (weight.dequantize().double() - x.double()).square() * squares.double()
    return sum_blocks(difference.numpy(), block_of(weight))


def sum_blocks(values, block):
    height, width = block
    rows, cols = values.shape
    padded = np.pad(values, ((0, -rows % height), (0, -cols % width)))
    shape = padded.shape[0] // height, height, padded.shape[1] // width, width
    return padded.reshape(shape).sum((1, 3))


def least_errors(weight, x, squares):
    """The least error of each block over every factor, and the nearest of all code values."""
    quantizer, block = weight._quantizer, block_of(weight)
    element = ELEMENTS[quantizer.element.name]
    signed = np.unique(np.concatenate([element.grid, -element.grid])).astype(np.float32)
    if quantizer.spec.scale == "e8m0":
        inner, outer = [np.float32(2.0 ** (code - 127)) for code in range(255)], np.float32(1)
    else:
        inner = ELEMENTS["e4m3"].grid.astype(np.float32)
        amax = named_buffers(weight)["_amax_rowwise"].numpy()
        outer = (amax / np.float32(6 * quantizer.e4m3_max))[:, None]
    values, least = x.numpy(), None
    for factor in inner:
        with np.errstate(over="ignore"):
            table = np.unique(signed * factor)
            table = np.broadcast_to(table, (len(values), len(table))) * outer
        error = np.empty(values.shape)
        for row, (line, own) in enumerate(zip(values, table, strict=True)):
            near = np.abs(line[:, None].astype(np.float64) - own[None].astype(np.float64))
            error[row] = near.min(1) ** 2
        total = sum_blocks(error * squares.double().numpy(), block)
        least = total if least is None else np.minimum(least, total)
    return least


@pytest.mark.parametrize("fmt", EXACT)
@pytest.mark.parametrize("kind", ["normal", "heavy", "outlier", "small"])
@pytest.mark.parametrize("weighted", [False, True])
def test_no_factor_is_better(fmt, kind, weighted):
    x = make_weight(kind)
    if kind == "small" and "row_scaled" in fmt:
        # The encode scale of a row below 1e-35 overflows, so that its codes are not the nearest.
        x = x[[0, 3, 4, 5]]
    squares = torch.rand(68) ** 4 if weighted else torch.ones(68)
    weight = search(x, fmt, squares if weighted else None)
    # The importance is a mean square that float32 inputs give: sqrt and square round twice.
    used = torch.diag(squares.sqrt()).double().square().sum(0) if weighted else squares
    found, least = block_errors(weight, x, used), least_errors(weight, x, used)
    # Encoding multiplies by a float32 reciprocal of the factor, which may take the neighbour of a
    # value next to the middle between two: (1 + 2^-22) of its error.
    np.testing.assert_allclose(found, least, rtol=1e-5, atol=1e-80)


@pytest.mark.parametrize("fmt", [*EXACT, *OTHERS])
@pytest.mark.parametrize("kind", ["normal", "heavy", "outlier", "small"])
def test_never_worse_than_nearest(fmt, kind):
    x = make_weight(kind)
    nearest = qtensor.quantize(
        x, fmt if "(" not in fmt else qtensor.core.quantizer_registry.parse(fmt)
    )
    ones = torch.ones(68)
    found, before = block_errors(search(x, fmt), x, ones), block_errors(nearest, x, ones)
    # The sums of a block are float64 in either order: n roundings of 2^-53 for n values.
    assert (found <= before * (1 + 1e-12)).all()
    unchanged = found == before
    assert unchanged.any() or (found < before).any()
    if block_of(nearest) == tuple(x.shape):
        return
    # A factor changes only where that lowers the error.
    same = (stored_factors(nearest) == stored_factors(search(x, fmt))).numpy()
    assert (found[~same] < before[~same]).all()
