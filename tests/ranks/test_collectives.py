"""Collectives move codes and scales, or refuse; a rank that fails alone is named, and no other rank
waits without end.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from collective_cases import (
    FUNCTIONAL,
    coalesced_of_both,
    plain_beside_quantized,
    run,
    run_functional,
    write_before_padding,
    write_to_a_part_of_a_gather,
    write_to_parts,
)
from formats import FormatCase, layouts
from rank_failure_cases import CASES, destroyed_group, fail_alone
from ranks import Ranks

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
columnwise = pytest.mark.parametrize("columnwise", [False, True], ids=["row", "both"])


@layouts
@columnwise
@pytest.mark.parametrize("wait", [False, True], ids=["sync", "async"])
def test_collectives_move_the_bytes(
    ranks: Ranks, wait: bool, columnwise: bool, case: FormatCase, options: dict[str, Any]
) -> None:
    ranks.run(run, case.name, {**options, "columnwise": columnwise}, wait)


@layouts
@columnwise
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "aot_eager"])
def test_functional_collectives_move_the_bytes(
    ranks: Ranks, compiled: bool, columnwise: bool, case: FormatCase, options: dict[str, Any]
) -> None:
    # Dynamo of torch 2.11 cannot trace a gather along dim 1, of plain tensors either.
    along = ["gather0"] if TORCH < (2, 12) else ["gather0", "gather1"]
    names = [*along, "all_to_all"] if compiled else list(FUNCTIONAL)
    for name in names:
        ranks.run(run_functional, name, case.name, {**options, "columnwise": columnwise}, compiled)


def test_lists_of_plain_and_quantized_tensors_are_refused(ranks: Ranks) -> None:
    """On every rank, before anything travels; the message names the rank."""
    for rank, errors in enumerate(ranks.run(plain_beside_quantized)):
        for name, message in errors.items():
            wanted = f"[mxfp8] (rank {rank} of 2): all tensors of the call must be mxfp8"
            assert wanted in message, (name, message)
            assert "got a plain tensor" in message, name


def test_a_coalesced_gather_takes_both(ranks: Ranks) -> None:
    ranks.run(coalesced_of_both)


@layouts
@columnwise
def test_a_write_to_a_part_of_a_result_arrives(
    ranks: Ranks, columnwise: bool, case: FormatCase, options: dict[str, Any]
) -> None:
    ranks.run(write_to_parts, case.name, {**options, "columnwise": columnwise})


@pytest.mark.parametrize("name", ["fp8", "fp8_rowwise", "mxfp8", "mxfp6", "mxfp4", "nvfp4"])
@columnwise
def test_a_write_before_padding(ranks: Ranks, columnwise: bool, name: str) -> None:
    ranks.run(write_before_padding, name, {"columnwise": columnwise})


@pytest.mark.parametrize("name", ["fp8", "mxfp8", "nvfp4"])
def test_a_write_to_a_part_of_a_gather(ranks: Ranks, name: str) -> None:
    ranks.run(write_to_a_part_of_a_gather, name)


# ---- a rank that fails alone

QUICK = ("reduce_amaxes", "quantized all-gather", "dcp.load")
CELLS = [
    pytest.param(
        kind,
        marks=()
        if kind in QUICK
        else pytest.mark.nightly(reason="each waits for a time limit; three are in `make test`"),
    )
    for kind in CASES
]


@pytest.mark.parametrize("kind", CELLS)
def test_the_other_rank_does_not_wait_without_end(ranks: Ranks, kind: str) -> None:
    """``Ranks.run`` raises if a rank does not answer."""
    waited, wrong = ranks.run(fail_alone, kind)
    assert "rank 1 of 2" in wrong
    if kind == "dcp.load":
        assert "rank 1 of 2" in waited
        assert "w: distributed checkpoint[mxfp8]" in waited
    else:
        assert "Error" in wrong.partition(":")[0]
        assert waited.startswith("RuntimeError")


def test_a_destroyed_group_is_refused(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.run(destroyed_group)):
        operations = ["state_dict[fp8_delayed]", "delayed scaling", "quantize", "tensor parallel"]
        for message, operation in zip(found, operations, strict=True):
            assert message.startswith(f"QTensorError: {operation}"), message
            assert f"(rank {rank} of 2): the process group must exist" in message
