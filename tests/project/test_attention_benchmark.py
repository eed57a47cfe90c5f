"""benchmarks.attention: every format and formulation has a row. No time is asserted."""

import json

import pytest
import torch

from benchmarks import attention, attention_peers

pytestmark = pytest.mark.project


def run(folder, *arguments):
    """Run the benchmark quickly, and return its report."""
    common = ("--quick", "--threads", "1", "--output", str(folder))
    assert attention.main([*common, *arguments]) == 0
    (path,) = folder.rglob("*.json")
    return json.loads(path.read_text())


def test_a_quick_run_writes_every_row(tmp_path):
    data = run(tmp_path)
    rows = data["rows"]
    decode = [row for row in rows if row["queries"] == "decode"]
    torch_ways = {f"torch {way}" for way in ("gqa", "expanded", "rows", "matmul")}
    found = {peer.name for peer in attention.found_peers()[0]}
    assert {row["case"] for row in decode} == {*attention.FORMATS, *torch_ways, *found}
    assert all("share" in row for row in decode if row["case"] in attention.FORMATS)
    assert {row["queries"] for row in rows} == {"decode", "prefill"}
    assert {row["size"] for row in rows} == {"1x256x8x2x64", "2x64x8x2x64"}
    absent = {line.partition(":")[0] for line in data["absent"]}
    assert absent == {"torch flex", *({peer.name for peer in attention_peers.PEERS} - found)}


def test_tables_after_the_time_limit_are_named(tmp_path):
    data = run(tmp_path, "--sizes", "2x64x8x2x64", "--seconds", "0")
    assert data["rows"] == []
    kinds = [f"2x64x8x2x64, threads: 1, {kind}: out of time" for kind in ("decode", "prefill")]
    assert data["absent"][:2] == kinds


def test_a_peer_with_another_result_is_left_out(monkeypatch):
    def wrong(q, k, v, threads):
        return 0, lambda: torch.ones(q.shape[0], q.shape[1] * q.shape[3])

    monkeypatch.setattr(attention_peers, "PEERS", (attention_peers.Peer("wrong", wrong, ""),))
    found, versions, absent = attention_peers.peers()
    assert (found, versions) == ([], {})
    assert absent == {"wrong": "RuntimeError: another result than torch's"}


@pytest.mark.parametrize("queries", [1, 9])
def test_the_formulations_of_torch_are_one(queries):
    check_ways(queries, quick=True)


@pytest.mark.nightly(reason="inductor needs ten seconds for a graph")
@pytest.mark.parametrize("queries", [1, 40])
def test_the_compiled_formulation_is_one_with_them(queries):
    check_ways(queries, quick=False)


def check_ways(queries, quick):
    tokens = max(9, queries)
    q, k, v = (
        torch.randn(2, n, m, 16).bfloat16() for n, m in ((4, queries), (2, tokens), (2, tokens))
    )
    found = attention.torch_ways(q, 2, quick)
    assert ("flex" in found) == (not quick)
    results = [way(k, v).flatten() for way in found.values()]
    for other in results[1:]:
        assert (other.float() - results[0].float()).abs().max() < 0.05
