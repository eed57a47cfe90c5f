"""DTensors of quantized tensors have the bytes of the tensor that was distributed."""

from __future__ import annotations

from typing import Any

import pytest
from dtensor_cases import (
    all_to_all_of_a_mesh,
    cut_gathered,
    quantized_strided,
    redistributed,
    refusals,
    round_trips,
)
from formats import FormatCase, layouts
from ranks import Ranks

usages = pytest.mark.parametrize("usage", ["row", "col", "both"])
USAGES = {
    "row": {},
    "col": {"rowwise": False, "columnwise": True},
    "both": {"columnwise": True},
}


@layouts
@usages
def test_placements_keep_the_bytes(
    ranks: Ranks, usage: str, case: FormatCase, options: dict[str, Any]
) -> None:
    """512 columns and rows: whole tiles of swizzled scales on each rank."""
    ranks.run(round_trips, case.name, {**options, **USAGES[usage]}, (512, 512))


@layouts
@usages
def test_the_exchange_of_gpus(
    ranks: Ranks, usage: str, case: FormatCase, options: dict[str, Any]
) -> None:
    ranks.run(all_to_all_of_a_mesh, case.name, {**options, **USAGES[usage]}, (512, 512))


# ---- uneven shards -------------------------------------------------------------------------------

WIDE = pytest.mark.nightly(reason="three processes; two ranks are in the default tier")
LIKE = pytest.mark.nightly(reason="the default tier has factors of a grid and of two levels")
SMALL = ["fp8", "fp8_delayed", "fp8_rowwise", "mxfp8", "mxfp6", "mxfp4", "nvfp4"]


@layouts
@usages
def test_uneven_shards(ranks: Ranks, usage: str, case: FormatCase, options: dict[str, Any]) -> None:
    """The first rank has 256 rows or columns, and the second one 255: torch pads them for the
    exchange and drops the padding, which would cut a block of any other tensor.
    """
    ranks.run(round_trips, case.name, {**options, **USAGES[usage]}, (511, 511))


@WIDE
@layouts
@usages
def test_uneven_shards_of_three_ranks(
    three_ranks: Ranks, usage: str, case: FormatCase, options: dict[str, Any]
) -> None:
    """The last rank has 510 columns or 511 rows, and the others 512."""
    three_ranks.run(round_trips, case.name, {**options, **USAGES[usage]}, (1535, 1534))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", SMALL)
def test_rows_of_their_own_may_be_split_anywhere(ranks: Ranks, name: str, rows: int) -> None:
    """With one row, the second rank has none."""
    ranks.run(round_trips, name, {}, (rows, 64))


@WIDE
@pytest.mark.parametrize("rows", [1, 4, 5])
@pytest.mark.parametrize("name", SMALL)
def test_rows_over_three_ranks(three_ranks: Ranks, name: str, rows: int) -> None:
    """Four rows are 2, 2 and 0; five rows are 2, 2 and 1."""
    three_ranks.run(round_trips, name, {}, (rows, 96))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "name",
    ["fp8_blockwise", "nvfp4", *(pytest.param(name, marks=LIKE) for name in ("fp8", "mxfp8"))],
)
def test_uneven_shards_are_gathered_by_a_graph(ranks: Ranks, name: str, backend: str) -> None:
    compiled = backend != "eager"
    ranks.run(redistributed, name, {"columnwise": True}, (511, 511), compiled)


@pytest.mark.parametrize(
    ("name", "options", "shape", "dim", "multiple"),
    [
        ("mxfp8", {}, (64, 96), 1, 32),
        ("mxfp8", {"columnwise": True}, (96, 64), 0, 32),
        ("fp8_blockwise", {"block_scaling_dim": 2}, (384, 128), 0, 128),
        ("nvfp4", {"swizzled": True}, (128, 192), 1, 64),
    ],
)
def test_shards_that_cut_a_block(
    ranks: Ranks,
    name: str,
    options: dict[str, Any],
    shape: tuple[int, ...],
    dim: int,
    multiple: int,
) -> None:
    """Every rank raises, and the message names the rank, the placement and the sizes that work."""
    for rank, message in enumerate(ranks.run(refusals, name, options, shape, dim)):
        assert f"slice[{name}] (rank {rank} of 2): " in message
        rule = f"Shard({dim}) over n ranks needs a size whose n-th part, rounded up, is a multiple"
        assert f"{rule} of {multiple}." in message


@pytest.mark.parametrize("name", ["fp8", "mxfp8"])
def test_a_strided_shard_is_refused(ranks: Ranks, name: str) -> None:
    for message in ranks.run(quantized_strided, name):
        assert "a part of a DTensor must be one piece of the whole" in message


def test_a_gathered_tensor_is_cut_where_zeros_begin(ranks: Ranks) -> None:
    """Only padding may be dropped inside of a block."""
    ranks.run(cut_gathered)
