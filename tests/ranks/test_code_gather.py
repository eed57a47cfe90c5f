"""Inputs and gradients that are split over ranks are gathered as codes, with those of the whole."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from formats import assert_same_bytes
from parallel_cases import SIZE, K, N
from ranks import RankError, Ranks
from torch import Tensor
from torch.distributed.tensor import Shard, parallel

import qtensor
import qtensor.distributed
from qtensor.distributed import Traffic
from qtensor.functional.operands import Quantized
from qtensor.functional.ranks.code_gather import gather_rows
from qtensor.functional.ranks.parallel import Parallel

BOTH = {"columnwise": True}
COLUMN = {"rowwise": False, "columnwise": True}
RHT = {"with_rht": True, "columnwise": True}
QUANTIZERS: dict[str, tuple[str, dict[str, Any], int]] = {
    "fp8": ("fp8", {}, 1),
    "fp8-both": ("fp8", BOTH, 1),
    "fp8-column": ("fp8", COLUMN, 1),
    "fp8-e5m2": ("fp8", {"dtype": "e5m2", **BOTH}, 1),
    "fp8-pow2": ("fp8", {"force_pow_2_scales": True}, 1),
    "delayed": ("fp8_delayed", {}, 1),
    "delayed-both": ("fp8_delayed", BOTH, 1),
    "delayed-column": ("fp8_delayed", COLUMN, 1),
    "rowwise": ("fp8_rowwise", {}, 1),
    "rowwise-both": ("fp8_rowwise", BOTH, 1),
    "rowwise-axis0": ("fp8_rowwise", {"axis": 0, **BOTH}, 1),
    "blockwise": ("fp8_blockwise", {}, 1),
    "blockwise-both": ("fp8_blockwise", BOTH, 128),
    "blockwise-2d": ("fp8_blockwise", {"block_scaling_dim": 2, **BOTH}, 128),
    "mxfp8": ("mxfp8", {}, 1),
    "mxfp8-both": ("mxfp8", BOTH, 32),
    "mxfp8-column": ("mxfp8", COLUMN, 32),
    "mxfp8-2d": ("mxfp8", {"with_2d_quantization": True, **BOTH}, 32),
    "mxfp6": ("mxfp6", {}, 1),
    "mxfp6-packed": ("mxfp6", {"packed": True, **BOTH}, 32),
    "mxfp4": ("mxfp4", {}, 1),
    "mxfp4-both": ("mxfp4", BOTH, 32),
    "nvfp4": ("nvfp4", {}, 1),
    "nvfp4-both": ("nvfp4", BOTH, 16),
    "nvfp4-column": ("nvfp4", COLUMN, 16),
    "nvfp4-rht": ("nvfp4", RHT, 16),
    "nvfp4-2d": ("nvfp4", {"with_2d_quantization": True, **BOTH}, 16),
    "nvfp4-factor": ("nvfp4", {"with_global_scale_inv": True, **BOTH}, 16),
}
"""Format, options, and the number of rows that must stay together."""

SHAPES = [((1, 72), 0), ((48, 72), 0), ((32, 3, 96), 0), ((3, 128, 96), 1), ((2, 16, 4, 80), 1)]
"""Shape of a rank's part, and the dim that is split."""


def part_of(shape: tuple[int, ...], rank: int, special: float | None) -> Tensor:
    """Return values of a rank; those of the second rank are larger."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(rank)) * 5**rank
    x.view(-1)[3] = -0.0
    if special is not None and rank == 1:
        x.view(-1)[5] = special
    return x


def compare_gathers(name: str, dtype: torch.dtype, special: float | None) -> None:
    """Assert the buffers of the whole for all shapes whose blocks are not cut."""
    kind, options, rows = QUANTIZERS[name]
    quantizer = qtensor.quantizer(kind, **options)
    scale = torch.tensor([3.0]) if quantizer.needs_scale else None
    for shape, dim in SHAPES:
        parts = [part_of(shape, rank, special).to(dtype) for rank in range(SIZE)]
        whole = torch.cat(parts, dim)
        p = Parallel(dist.group.WORLD.group_name, SIZE, "column", True, dim)
        found = gather_rows(parts[dist.get_rank()], quantizer.canonical, scale, p)
        cut = whole[0].numel() // whole.shape[-1] if dim else 0
        cut = (cut // SIZE if dim else shape_rows(shape)) % rows
        what = f"{name}, {shape}"
        assert isinstance(found, Quantized) == (not cut), what
        if cut:
            assert_same_bytes(found, whole, what)
            continue
        assert found.shape == whole.shape
        assert found.operand.shape == (whole.numel() // shape[-1], shape[-1])
        want = torch.ops.qtensor.quantize(whole.view(-1, shape[-1]), quantizer.canonical, scale)
        if scale is not None:
            assert_same_bytes(found.amax, want.pop(), f"{what}: amax")
        for i, (a, b) in enumerate(zip(found.operand.buffers, want, strict=True)):
            assert a.is_contiguous(), what
            assert_same_bytes(a, b, f"{what}: {quantizer.slots[i].name}")


def shape_rows(shape: tuple[int, ...]) -> int:
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows


@pytest.mark.parametrize("special", [None, torch.inf, torch.nan], ids=["finite", "inf", "nan"])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_buffers_of_the_whole(ranks: Ranks, name: str, special: float | None) -> None:
    """Float32, so that codes take fewer bytes than values in every format."""
    ranks.run(compare_gathers, name, torch.float32, special)


VALUES = {
    "stochastic": ("nvfp4(stochastic_rounding=True)", torch.float32),
    "swizzled": ("mxfp8(swizzled=True)", torch.float32),
    "16.5 bits": ("mxfp8(columnwise=True)", torch.bfloat16),
    "none": ("", torch.bfloat16),
}


def gathers_values(canonical: str, dtype: torch.dtype) -> bool:
    x = torch.randn(64, 96, dtype=dtype)
    p = Parallel(dist.group.WORLD.group_name, SIZE, "column", True)
    found = gather_rows(x, canonical, None, p)
    assert isinstance(found, Quantized) or found.shape == (128, 96)
    return not isinstance(found, Quantized)


@pytest.mark.parametrize("name", VALUES)
def test_values_are_gathered(ranks: Ranks, name: str) -> None:
    canonical, dtype = VALUES[name]
    assert ranks.run(gathers_values, canonical, dtype) == [True] * SIZE


def test_no_rows(ranks: Ranks) -> None:
    assert ranks.run(no_rows) == [(0, 96)] * SIZE


def no_rows() -> tuple[int, ...]:
    p = Parallel(dist.group.WORLD.group_name, SIZE, "column", True)
    return tuple(gather_rows(torch.empty(0, 96), "fp8", None, p).shape)


def differing_factors() -> None:
    p = Parallel(dist.group.WORLD.group_name, SIZE, "column", True)
    scale = torch.tensor([1.0 + dist.get_rank()])
    gather_rows(torch.randn(64, 96), "fp8_delayed", scale, p)


def test_differing_factors_of_delayed_scaling_are_refused(ranks: Ranks) -> None:
    message = "must have one factor of delayed scaling for it; got another one"
    with pytest.raises(RankError, match=f"(?s)rank 0.*{re.escape(message)}"):
        ranks.run(differing_factors)


# ---- bytes that travel ---------------------------------------------------------------------------

ROWS = 128
RECIPES = {
    "current": (qtensor.recipes.Float8CurrentScaling(), 8.0, 4),
    "delayed": (qtensor.recipes.DelayedScaling(), 8.0, 0),
    "mxfp8": (qtensor.recipes.MXFP8BlockScaling(), 8.25, 0),
    "blockwise": (qtensor.recipes.Float8BlockScaling(), 8.25, 0),
    "nvfp4": (qtensor.recipes.NVFP4BlockScaling(), 4.5, 4),
}
"""Recipe, bits a value of rowwise data, and bytes of the maxima that are reduced."""


def layer_of(recipe: Any, mode: str, styled: bool, dim: int) -> Any:
    split = {"parallel_mode": mode, "tp_group": dist.group.WORLD, "sequence_parallel": True}
    torch.manual_seed(2)
    layer = qtensor.Linear(
        K, N, bias=False, recipe=recipe, params_dtype=torch.bfloat16, **({} if styled else split)
    )
    if styled:
        mesh = dist.init_device_mesh("cpu", (SIZE,))
        column = qtensor.distributed.ColwiseParallel(input_layouts=Shard(dim))
        row = qtensor.distributed.RowwiseParallel(output_layouts=Shard(dim))
        parallel.parallelize_module(layer, mesh, column if mode == "column" else row)
    return layer


def count(name: str, mode: str, styled: bool, dim: int, training: bool) -> dict[str, int]:
    """Return the bytes that a rank sends in a pass, for activations in bfloat16."""
    layer = layer_of(RECIPES[name][0], mode, styled, dim)
    shape = [2, ROWS, K] if dim else [ROWS, 2, K]
    if mode == "row":
        shape[dim], shape[-1] = shape[dim] * SIZE, shape[-1] // SIZE
    x = torch.randn(shape, dtype=torch.bfloat16, requires_grad=training)
    if not training:
        layer.requires_grad_(False)
    with Traffic() as traffic:
        y = layer(x)
        if training:
            y.sum().backward()
    return dict(traffic.sent)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("styled", [False, True], ids=["module", "style"])
@pytest.mark.parametrize("name", RECIPES)
def test_bytes_of_an_input(ranks: Ranks, name: str, styled: bool, dim: int) -> None:
    """Without a weight gradient only rowwise codes travel."""
    if dim and not styled:
        dim = 0
    _, bits, maxima = RECIPES[name]
    delayed = 8 if name == "delayed" else 0  # the factor and the maximum
    for sent in ranks.run(count, name, "column", styled, dim, False):
        assert sent.pop("all_gather_into_tensor") == 2 * ROWS * K * bits / 8 + delayed
        assert sent.pop("all_reduce", 0) == maxima
        assert not sent


@pytest.mark.parametrize("mode", ["column", "row"])
@pytest.mark.parametrize("styled", [False, True], ids=["module", "style"])
@pytest.mark.parametrize("name", RECIPES)
def test_bytes_of_a_step(ranks: Ranks, name: str, styled: bool, mode: str) -> None:
    """A weight gradient reads columnwise codes too, which FP8 without blocks has for nothing.

    MXFP8 and FP8 with 1-D blocks would send 16.5 bits for both, so that bfloat16 travels; the
    gradient of NVFP4 is rounded at random.
    """
    values = 2 * ROWS * (K if mode == "column" else N)
    bits = {"current": 8.0, "delayed": 8.0}.get(name, 16.0)
    if name == "nvfp4" and mode == "column":
        bits = 9.0
    delayed = 8 if name == "delayed" else 0
    for sent in ranks.run(count, name, mode, styled, 0, True):
        assert sent.pop("all_gather_into_tensor") == values * bits / 8 + delayed
        assert sent.pop("reduce_scatter_tensor") == 2 * values * SIZE
        reduced = {"current": 4, "nvfp4": 8 if mode == "column" else 0}.get(name, 0)
        assert sent.pop("all_reduce", 0) == reduced
        assert not sent
