"""A rank that fails alone: its error names it, and no other rank waits without end."""

from __future__ import annotations

import pytest
from rank_failure_cases import CASES, destroyed_group, fail_alone
from ranks import Ranks

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
