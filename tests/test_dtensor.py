"""DTensors of quantized tensors have the bytes of the tensor that was distributed."""

from __future__ import annotations

from typing import Any

import pytest
from dtensor_cases import all_to_all_of_a_mesh, round_trips
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
