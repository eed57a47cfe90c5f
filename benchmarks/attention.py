"""Benchmark of attention over a cache of keys and values on a CPU.

``python -m benchmarks.attention [--quick] [--threads 2] [--sizes 1x8192x32x8x128] [--output DIR]``
measures the op ``attention`` for one query (decoding) and for as many queries as tokens (prefill),
by the format of the cache, with one thread and with all, beside torch's formulations in bfloat16,
other libraries (``benchmarks/attention_peers.py``) and reading the same memory. A size is
sequences x tokens x heads of queries x heads of keys x head size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import qtensor
from benchmarks import attention_peers, bandwidth, cases, floor, machine, suite
from benchmarks.report import Column, Report, Row
from benchmarks.settings import Settings, parser
from benchmarks.settings import settings as settings_of
from benchmarks.timer import measure

TITLE = "Attention over a cache of keys and values on a CPU"
TEXT = (
    "`qtensor.attention(q, k, v, causal=True)` with q in bfloat16, and torch in bfloat16: "
    "*gqa*: `scaled_dot_product_attention(enable_gqa=True)`; *rows*: the same of the queries that "
    "share a head of keys, as rows of it; *matmul*: these rows by two matmuls and a softmax; "
    "*expanded*: with keys and values repeated for each head; *flex*: compiled `flex_attention`. "
    "Sizes are sequences x tokens x heads of queries x heads of keys x head size. Each call takes "
    "the next of several caches, together {megabytes} MB or more. *least us*: the shortest of many "
    "bursts, in turns; *MB*: of keys and values; *share*: of reading codes and factors at the "
    "bandwidth of a loop that adds up their words. *x best*: the time of torch's fastest "
    "formulation / that of the row.{peers}"
)
FORMATS = ("fp8_rowwise", "mxfp8", "mxfp6", "mxfp4", "nvfp4", "bfloat16")
SIZES = {
    False: (
        *((batch, tokens, 32, 8, 128) for batch in (1, 8) for tokens in (512, 2048, 8192, 32768)),
        (1, 4096, 32, 8, 128),
        (1, 8192, 8, 8, 128),
        (1, 8192, 64, 8, 64),
    ),
    True: ((1, 256, 8, 2, 64), (2, 64, 8, 2, 64)),
}
"""(sequences, tokens, heads of queries, heads of keys, head size), by whether the run is quick."""
MOST_PREFILL = 4096
"""Tokens of all sequences up to which as many queries are measured, too."""
COPIES_BYTES = {False: 256 << 20, True: 1 << 20}
SECONDS = {False: 1.0, True: 0.02}
Size = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Way:
    """A way to compute attention: its name, the bytes that it reads, and a call."""

    name: str
    nbytes: int
    call: Callable[[], Any]


def tokens_of(size: Size) -> Tensor:
    """Return keys, or values, in bfloat16, (B, H, S, D)."""
    batch, tokens, _, heads, width = size
    dense = cases.random_input((batch * heads * tokens, width), torch.bfloat16)
    return dense.view(batch, heads, tokens, width)


def caches(name: str, dense: Tensor, count: int) -> list[tuple[Any, Any]]:
    """Return keys and values in a format, with memory of their own."""
    if name == "bfloat16":
        return [(dense.clone(), dense.clone()) for _ in range(count)]
    return [(qtensor.quantize(dense, name), qtensor.quantize(dense, name)) for _ in range(count)]


def memory(t: Any) -> list[Tensor]:
    """Return the buffers of keys or values."""
    return [t] if type(t) is Tensor else list(t.buffers())


def name_of(size: Size) -> str:
    """Return a size as the command line takes it."""
    return "x".join(str(n) for n in size)


def ways(size: Size, queries: int, threads: int, settings: Settings) -> Iterator[Way]:
    """Yield our formats, the reading of each, torch's formulations and those of other libraries."""
    batch, _, q_heads, heads, width = size
    q = cases.random_input((batch * q_heads * queries, width), torch.bfloat16)
    q, dense = q.view(batch, q_heads, queries, width), tokens_of(size)

    def copies(nbytes: int) -> int:
        return max(1, COPIES_BYTES[settings.quick] // nbytes) if queries == 1 else 1

    for name in FORMATS:
        first = caches(name, dense, 1)
        nbytes = sum(b.nbytes for side in first[0] for b in memory(side))
        pairs = [*first, *caches(name, dense, copies(nbytes) - 1)]
        run = [partial(qtensor.attention, q, k, v, causal=True) for k, v in pairs]
        yield Way(name, nbytes, bandwidth.in_turn(list(run)))
        buffers = [b for pair in pairs for side in pair for b in memory(side)[:1]]
        yield Way(f"read {name}", buffers[0].nbytes, bandwidth.read_call(buffers))
        if name == "bfloat16":
            for other, call in torch_ways(q, q_heads // heads, settings.quick).items():
                calls = [partial(call, k, v) for k, v in pairs]
                yield Way(f"torch {other}", nbytes, bandwidth.in_turn(list(calls)))
    for peer in found_peers()[0] if queries == 1 else ():
        nbytes, made = peer.make(q, dense, dense, threads)
        more = [peer.make(q, dense, dense, threads)[1] for _ in range(copies(nbytes) - 1)]
        yield Way(peer.name, nbytes, bandwidth.in_turn([made, *more]))


@cache
def found_peers() -> tuple[list[attention_peers.Peer], dict[str, str], dict[str, str]]:
    """Return the other libraries, their versions, and those that are missing."""
    return attention_peers.peers()


def torch_ways(
    q: Tensor, groups: int, quick: bool = True
) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Return torch's formulations of attention of one query, or of as many as tokens.

    Args:
        q: (B, Hq, M, D).
        groups: heads of queries for each head of keys.
        quick: leave out what takes a compiler.
    """
    batch, heads, queries, width = q.shape
    causal = queries > 1
    sdpa = F.scaled_dot_product_attention

    def expanded(k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
        return sdpa(q, k, v, is_causal=causal)

    found = {
        "gqa": lambda k, v: sdpa(q, k, v, is_causal=causal, enable_gqa=True),
        "expanded": expanded,
    }
    if not quick:
        found["flex"] = attention_peers.flex(q, causal)
    if causal:
        return found
    rows = q.view(batch, heads // groups, groups, width)

    def matmul(k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(rows, k.mT).float() * width**-0.5
        return torch.matmul(torch.softmax(scores, -1).bfloat16(), v)

    return {**found, "rows": lambda k, v: sdpa(rows, k, v), "matmul": matmul}


def measure_table(size: Size, queries: int, threads: int, settings: Settings) -> list[Row]:
    """Measure all ways in turns and return their rows."""
    suite.forget_compiled()
    torch.set_num_threads(threads)  # Compiled code keeps them.
    found = list(ways(size, queries, threads, settings))
    with suite.silent(), torch.no_grad():
        timings = measure(
            {way.name: way.call for way in found},
            threads=threads,
            seconds=SECONDS[settings.quick],
        )
    best = min(timings[w.name].least_us for w in found if w.name.startswith("torch"))
    reads = {w.name: floor.gbs(w.nbytes, timings[w.name].least_us) for w in found}
    rows = []
    for way in found:
        if way.name.startswith("read "):
            continue
        timing, read = timings[way.name], reads.get(f"read {way.name}")
        shown = {
            "size": name_of(size),
            "threads": f"{threads} thread{'s' * (threads > 1)}",
            "queries": "decode" if queries == 1 else "prefill",
            "case": way.name,
            "us": timing.median_us,
            "least_us": timing.least_us,
            "bytes": way.nbytes,
            "mb": way.nbytes / 1e6,
            "best": best / timing.least_us,
        }
        if read is not None and queries == 1:
            shown |= {"read_gbs": read, "share": floor.share(way.nbytes, timing.least_us, read)}
        rows.append(shown)
    return rows


COLUMNS = (
    Column("case", "cache"),
    Column("mb", "MB", 1),
    Column("us", "us", 0),
    Column("least_us", "least us", 0),
    Column("read_gbs", "read GB/s", 1),
    Column("share", "share", 0, percent=True),
    Column("best", "x best", 2),
)


def collect(settings: Settings) -> tuple[list[Row], list[str]]:
    """Return the rows of all sizes, with one thread and with all, and a line for each left out."""
    rows, absent = [], []
    for size in SIZES[settings.quick]:
        if settings.sizes and name_of(size) not in settings.sizes:
            continue
        for threads in dict.fromkeys((1, settings.threads)):
            for queries in (1, size[1]) if size[0] * size[1] <= MOST_PREFILL else (1,):
                if settings.out_of_time():
                    kind = "decode" if queries == 1 else "prefill"
                    absent.append(f"{name_of(size)}, threads: {threads}, {kind}: out of time")
                else:
                    rows += measure_table(size, queries, threads, settings)
    return rows, absent


def document(rows: list[Row], absent: list[str], settings: Settings) -> Report:
    """Return the report of measured rows, and of tables that are missing."""
    mode = " Quick run: few repeats, for orientation only." if settings.quick else ""
    found, versions, missing = found_peers()
    peers = "".join(f" *{peer.name}*: {peer.text}." for peer in found)
    text = TEXT.format(megabytes=COPIES_BYTES[settings.quick] >> 20, peers=peers) + mode
    absent = [*absent, *(f"{name}: {reason}" for name, reason in missing.items())]
    if settings.quick:
        absent.append("torch flex: is left out of a quick run, because it is compiled")
    environment = machine.environment(settings.threads, versions)
    groups = ("size", "threads", "queries")
    return Report("attention", TITLE, text, environment, COLUMNS, groups, tuple(rows), (*absent,))


def main(arguments: list[str] | None = None) -> int:
    """Measure and write the results."""
    command = parser("attention", __doc__)
    command.set_defaults(peers="none")
    run = settings_of(command.parse_args(arguments))
    return suite.finish(document(*collect(run), run), run)


if __name__ == "__main__":
    sys.exit(main())
