"""Pages that the caller assigns, as servers do: sequences come, go and share pages."""

from __future__ import annotations

import pytest
import torch
from compile_helpers import backends
from formats import assert_same_bytes, rand
from torch._dynamo.utils import counters

import qtensor

H, D, PAGE, PAGES = 2, 64, 16, 12


def pool(**options):
    return qtensor.KVCache(2, H, D, 64, **{"page_size": PAGE, "pages": PAGES, **options})


def tokens(count, heads=H, seed=0, batch=1):
    return rand(batch, heads, count, D, seed=seed).bfloat16()


def alone(text, q, k, v, window=0):
    """The attention of one sequence in a cache of its own."""
    cache = qtensor.KVCache(1, H, D, k.shape[2], k_format=text)
    cache.append(k, v)
    return cache.attention(q, window=window)


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("text", ["mxfp4", "fp8_rowwise", "mxfp8"])
def test_sequences_come_go_and_share_pages(text, window):
    cache = pool(k_format=text, window=window)
    prompt = [tokens(40, seed=1), tokens(40, seed=2)]
    free = torch.randperm(PAGES, generator=torch.Generator().manual_seed(0)).tolist()
    first = [free.pop() for _ in range(3)]
    cache.assign(torch.tensor([first]), torch.tensor([0]))
    cache.append(*prompt)

    # A second sequence shares the two whole pages of the prompt and continues with its own.
    second = [*first[:2], free.pop()]
    table = torch.tensor([first, second])
    cache.assign(table, torch.tensor([40, 32]))
    more = [tokens(8, seed=seed, batch=2) for seed in (3, 4)]
    cache.append(*more)
    q = tokens(3, 2 * H, seed=5, batch=2)
    got = cache.attention(q)
    for b, shared in enumerate((40, 32)):
        k, v = (
            torch.cat([p[:, :, :shared], m[b : b + 1]], 2)
            for p, m in zip(prompt, more, strict=True)
        )
        assert_same_bytes(got[b : b + 1], alone(text, q[b : b + 1], k, v, window))

    # The first one ends; a third one takes its last page, and a page that is added in place.
    cache.assign(torch.tensor([[*second, -1], [first[2], -1, -1, -1]]), torch.tensor([40, 0]))
    cache.block_table[1, 1] = free.pop()
    last = [tokens(8, seed=seed, batch=2) for seed in (6, 7)]
    k, v = last
    cache.append(k, v)
    got = cache.attention(q)
    wanted = [
        (torch.cat([p[:, :, :32], m[1:], t[:1]], 2))
        for p, m, t in zip(prompt, more, last, strict=True)
    ]
    assert_same_bytes(got[:1], alone(text, q[:1], *wanted, window))
    assert_same_bytes(got[1:], alone(text, q[1:], k[1:], v[1:], window))
    assert cache.lengths.tolist() == [48, 8]
    assert cache.nbytes == pool(k_format=text).nbytes


@backends
def test_one_graph_serves_sequences_that_come_and_go(backend):
    cache, eager = pool(), pool()
    torch._dynamo.reset()
    counters.clear()
    step = torch.compile(lambda q, k, v: cache.update(q, k, v), fullgraph=True, backend=backend)
    for i, pages in enumerate(([[0, 1], [2, 3]], [[0, 1], [5, 4]], [[7, 6], [5, 4]])):
        lengths = torch.tensor([i, 0])
        for each in (cache, eager):
            each.assign(torch.tensor(pages), lengths)
        for seed in range(3):
            args = [tokens(1, heads, 3 * seed + i, 2) for i, heads in enumerate((4, 2, 2))]
            assert_same_bytes(step(*args), eager.update(*args))
    assert counters["stats"]["unique_graphs"] == 1


def test_copies_and_states():
    cache, other = pool(k_format="nvfp4", k_global=3.0, v_global=3.0), pool(k_format="nvfp4")
    cache.assign(torch.tensor([[3, 1], [0, 2]]), torch.tensor([0, 0]))
    cache.append(tokens(20, batch=2), tokens(20, seed=1, batch=2))
    other.assign(torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    other.load_state_dict(cache.state_dict())
    q = tokens(2, 2 * H, batch=2)
    assert_same_bytes(other.attention(q), cache.attention(q))
    cache.crop(7)
    assert cache.lengths.tolist() == [7, 7]
    assert cache.to("meta").block_table.device.type == "meta"


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda: pool(grow=True), "exclude grow, residual and a k_mean of each sequence; got grow"),
        (lambda: pool(residual=8), "got residual"),
        (lambda: pool(k_mean="first"), "got k_mean of each sequence"),
        (lambda: pool(page_size=0), "pages need a page_size"),
        (lambda: pool().append(tokens(1, batch=2), tokens(1, batch=2)), r"must name one of the 12"),
        (lambda: pool().select(torch.tensor([0])), "the caller assigns the pages"),
        (
            lambda: qtensor.KVCache(1, H, D, 8, page_size=4).assign(
                torch.zeros(1, 1).long(), torch.zeros(1)
            ),
            "pages of its own",
        ),
        (
            lambda: pool().assign(torch.zeros(2, 1), torch.zeros(2)),
            r"\(sequences, pages\) int64 on",
        ),
        (lambda: pool().assign(torch.zeros(2, 1).long(), torch.zeros(3)), "lengths must be"),
    ],
)
def test_errors_name_the_rule(call, rule):
    with pytest.raises(qtensor.QTensorError, match=rule):
        call()


def test_a_page_behind_the_last_one_is_refused():
    cache = pool()
    cache.assign(torch.tensor([[0], [1]]), torch.tensor([15, 15]))
    cache.append(tokens(1, batch=2), tokens(1, batch=2))
    with pytest.raises(qtensor.QTensorError, match="positions must be below the 16 tokens"):
        cache.append(tokens(1, batch=2), tokens(1, batch=2))
    assert cache.lengths.tolist() == [16, 16]
