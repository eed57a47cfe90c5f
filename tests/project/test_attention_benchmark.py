"""benchmarks.attention: every format and formulation has a row. No time is asserted."""

import json

import pytest
import torch

from benchmarks import attention

pytestmark = pytest.mark.project


def test_a_quick_run_writes_every_row(tmp_path):
    assert attention.main(["--quick", "--threads", "1", "--output", str(tmp_path)]) == 0
    (path,) = tmp_path.rglob("*.json")
    rows = json.loads(path.read_text())["rows"]
    decode = [row for row in rows if row["queries"] == "decode"]
    torch_ways = {f"torch {way}" for way in ("gqa", "expanded", "rows", "matmul")}
    assert {row["case"] for row in decode} == {*attention.FORMATS, *torch_ways}
    assert all("share" in row for row in decode if not row["case"].startswith("torch"))
    assert {row["queries"] for row in rows} == {"decode", "prefill"}


def test_the_formulations_of_torch_are_one():
    q, k, v = (torch.randn(1, n, m, 16).bfloat16() for n, m in ((4, 1), (2, 9), (2, 9)))
    results = [way(k, v).flatten() for way in attention.torch_ways(q, 2).values()]
    for other in results[1:]:
        assert (other.float() - results[0].float()).abs().max() < 0.05
