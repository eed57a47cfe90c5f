"""Distributed checkpoints give quantized tensors back, byte for byte, or refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dcp_cases
import dcp_tools_cases
import pytest
from formats import FormatCase, layouts
from ranks import Ranks

columnwise = pytest.mark.parametrize("columnwise", [False, True], ids=["row", "both"])
PLACES = ("rows", "columns", "whole")
SHAPE = (512, 512)


@layouts
@columnwise
@pytest.mark.parametrize("saved", PLACES)
@pytest.mark.parametrize("wanted", PLACES)
def test_two_ranks_change_the_sharding(
    ranks: Ranks,
    tmp_path: Path,
    wanted: str,
    saved: str,
    columnwise: bool,
    case: FormatCase,
    options: dict[str, Any],
) -> None:
    given = {**options, "columnwise": columnwise}
    args = (case.name, given, SHAPE, (2, saved), (2, wanted))
    ranks.run(dcp_cases.reshard, str(tmp_path / "checkpoint"), *args)


@layouts
@columnwise
@pytest.mark.parametrize("function", [dcp_cases.whole_tensors, dcp_cases.alone])
def test_whole_tensors_and_shards_are_interchangeable(
    ranks: Ranks,
    tmp_path: Path,
    function: Any,
    columnwise: bool,
    case: FormatCase,
    options: dict[str, Any],
) -> None:
    given = {**options, "columnwise": columnwise}
    ranks.run(function, str(tmp_path / "checkpoint"), case.name, given, SHAPE)


@layouts
def test_async_save_writes_the_values_of_its_call(
    ranks: Ranks, tmp_path: Path, case: FormatCase, options: dict[str, Any]
) -> None:
    ranks.run(dcp_cases.asynchronous, str(tmp_path / "checkpoint"), case.name, options, SHAPE)


@pytest.mark.parametrize("whole", [True, False], ids=["tensor", "DTensor"])
@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_a_load_that_stopped_leaves_nothing(
    ranks: Ranks, tmp_path: Path, name: str, whole: bool
) -> None:
    ranks.run(dcp_cases.after_a_load_that_stopped, str(tmp_path), name, {}, whole)


def test_inexact_loads_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    for messages in ranks.run(dcp_cases.refusals, str(tmp_path)):
        assert "layer.w: distributed checkpoint[nvfp4]" in messages["format"]
        assert "got nvfp4 for mxfp8" in messages["format"]
        assert "a plain tensor of shape" in messages["plain"]
        assert "the saved shards of one tensor must have the same _scale_inv" in messages["factors"]
        assert "cannot decide one factor" in messages["values"]
        assert "shards are cut at a multiple of 32 rows" in messages["blocks"]


@pytest.mark.nightly(reason="four processes; two ranks in test_two_ranks_change_the_sharding")
@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        ((3, "rows"), (2, "columns")),
        ((4, "columns"), (3, "rows")),
        ((2, "columns"), (4, "columns")),
        ((3, "columns"), (1, "whole")),
        ((4, "whole"), (3, "columns")),
        ((1, "rows"), (4, "columns")),
    ],
)
@layouts
def test_other_numbers_of_ranks_and_shardings(
    four_ranks: Ranks,
    tmp_path: Path,
    case: FormatCase,
    options: dict[str, Any],
    saved: tuple[int, str],
    wanted: tuple[int, str],
) -> None:
    args = (case.name, {**options, "columnwise": True}, (1536, 1536), saved, wanted)
    four_ranks.run(dcp_cases.reshard, str(tmp_path / "checkpoint"), *args)


@pytest.mark.nightly(reason="four processes; test_quantized_optimizer_state resumes on two")
@pytest.mark.parametrize("stored", [False, True], ids=["plain", "quantized_params"])
@pytest.mark.parametrize(("saved", "wanted"), [(2, 1), (1, 4), (4, 2), (3, 4), (4, 3)])
def test_a_training_goes_on_with_other_numbers_of_ranks(
    four_ranks: Ranks, tmp_path: Path, saved: int, wanted: int, stored: bool
) -> None:
    four_ranks.run(dcp_tools_cases.resume_on, str(tmp_path / "checkpoint"), saved, wanted, stored)


def test_a_training_of_two_ranks_goes_on_with_one(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(dcp_tools_cases.resume_on, str(tmp_path / "checkpoint"), 2, 1, True)


@pytest.mark.nightly(reason="four processes; two ranks in test_two_ranks_change_the_sharding")
@pytest.mark.parametrize("saved", [1, 2, 3, 4])
@pytest.mark.parametrize("wanted", [1, 2, 3, 4])
@layouts
def test_other_numbers_of_ranks(
    four_ranks: Ranks,
    tmp_path: Path,
    case: FormatCase,
    options: dict[str, Any],
    wanted: int,
    saved: int,
) -> None:
    """1536 is 3 * 512: whole tiles for 3 and 4 ranks."""
    given = {**options, "columnwise": True}
    args = (case.name, given, (1536, 512), (saved, "rows"), (wanted, "rows"))
    four_ranks.run(dcp_cases.reshard, str(tmp_path / "checkpoint"), *args)
