"""Benchmark of attention over a cache of keys and values on a CPU.

``python -m benchmarks.attention [--quick] [--threads 1] [--sizes 8192x32x8x128] [--output DIR]``
measures the op ``attention`` for one query (decoding) and for as many queries as tokens (prefill),
by the format of the cache, beside torch's formulations in bfloat16 and beside reading the same
memory. A size is tokens x heads of queries x heads of keys x head size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import qtensor
from benchmarks import bandwidth, cases, floor, machine, suite
from benchmarks.report import Column, Report, Row
from benchmarks.settings import Settings, parser
from benchmarks.settings import settings as settings_of
from benchmarks.timer import measure

TITLE = "Attention over a cache of keys and values on a CPU"
TEXT = (
    "`qtensor.attention(q, k, v, causal=True)` with q in bfloat16, and torch in bfloat16: "
    "*gqa*: `scaled_dot_product_attention(enable_gqa=True)`; *rows*: the same of the queries that "
    "share a head of keys, as rows of it; *matmul*: these rows by two matmuls and a softmax; "
    "*expanded*: with keys and values repeated for each head. Each call takes the next of several "
    "caches, together {megabytes} MB or more. *least us*: the shortest of many bursts, in turns; "
    "*share*: of reading codes and factors at the bandwidth of a loop that adds up their words. "
    "*x best*: the time of torch's fastest formulation / that of the row."
)
FORMATS = ("fp8_rowwise", "mxfp8", "mxfp6", "mxfp4", "nvfp4", "bfloat16")
SIZES = {
    False: (
        (512, 32, 8, 128),
        (2048, 32, 8, 128),
        (8192, 32, 8, 128),
        (32768, 32, 8, 128),
        (8192, 8, 8, 128),
        (8192, 64, 8, 64),
    ),
    True: ((256, 8, 2, 64),),
}
"""(tokens, heads of queries, heads of keys, head size), by whether the run is quick."""
MOST_PREFILL = 4096
"""Tokens up to which as many queries are measured, too."""
COPIES_BYTES = {False: 256 << 20, True: 1 << 20}
SECONDS = {False: 1.0, True: 0.02}
Size = tuple[int, int, int, int]


@dataclass(frozen=True)
class Way:
    """A way to compute attention: its name, the bytes that it reads, and a call."""

    name: str
    nbytes: int
    call: Callable[[], Any]


def caches(name: str, size: Size, count: int) -> list[tuple[Any, Any]]:
    """Return keys and values in a format, (1, H, S, D)."""
    tokens, _, heads, width = size
    dense = cases.random_input((heads * tokens, width), torch.bfloat16).view(1, heads, tokens, -1)
    if name == "bfloat16":
        return [(dense.clone(), dense.clone()) for _ in range(count)]
    return [(qtensor.quantize(dense, name), qtensor.quantize(dense, name)) for _ in range(count)]


def memory(t: Any) -> list[Tensor]:
    """Return the buffers of keys or values."""
    return [t] if type(t) is Tensor else list(t.buffers())


def ways(size: Size, queries: int, settings: Settings) -> Iterator[Way]:
    """Yield our formats, the reading of each, and torch's formulations."""
    _, q_heads, heads, width = size
    q = cases.random_input((q_heads * queries, width), torch.bfloat16)
    q = q.view(1, q_heads, queries, width)
    for name in FORMATS:
        first = caches(name, size, 1)
        nbytes = sum(b.nbytes for side in first[0] for b in memory(side))
        count = max(1, COPIES_BYTES[settings.quick] // nbytes) if queries == 1 else 1
        pairs = [*first, *caches(name, size, count - 1)]
        run = [partial(qtensor.attention, q, k, v, causal=True) for k, v in pairs]
        yield Way(name, nbytes, bandwidth.in_turn(list(run)))
        buffers = [b for pair in pairs for side in pair for b in memory(side)[:1]]
        yield Way(f"read {name}", buffers[0].nbytes, bandwidth.read_call(buffers))
        if name == "bfloat16":
            for other, call in torch_ways(q, q_heads // heads).items():
                calls = [partial(call, k, v) for k, v in pairs]
                yield Way(f"torch {other}", nbytes, bandwidth.in_turn(list(calls)))


def torch_ways(q: Tensor, groups: int) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Return torch's formulations of attention of one query, or of as many as tokens."""
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
    if causal:
        return found
    rows = q.view(batch, heads // groups, groups, width)

    def matmul(k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(rows, k.mT).float() * width**-0.5
        return torch.matmul(torch.softmax(scores, -1).bfloat16(), v)

    return {**found, "rows": lambda k, v: sdpa(rows, k, v), "matmul": matmul}


def measure_table(size: Size, queries: int, threads: int, settings: Settings) -> list[Row]:
    """Measure all ways in turns and return their rows."""
    found = list(ways(size, queries, settings))
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
            "size": "x".join(str(n) for n in size),
            "threads": f"{threads} thread{'s' * (threads > 1)}",
            "queries": "decode" if queries == 1 else "prefill",
            "case": way.name,
            "us": timing.median_us,
            "least_us": timing.least_us,
            "bytes": way.nbytes,
            "best": best / timing.least_us,
        }
        if read is not None and queries == 1:
            shown |= {"read_gbs": read, "share": floor.share(way.nbytes, timing.least_us, read)}
        rows.append(shown)
    return rows


COLUMNS = (
    Column("case", "cache"),
    Column("us", "us", 0),
    Column("least_us", "least us", 0),
    Column("read_gbs", "read GB/s", 1),
    Column("share", "share", 0, percent=True),
    Column("best", "x best", 2),
)


def collect(settings: Settings) -> list[Row]:
    """Measure all sizes, with one thread and with all."""
    rows = []
    for size in SIZES[settings.quick]:
        if settings.sizes and "x".join(str(n) for n in size) not in settings.sizes:
            continue
        for threads in dict.fromkeys((1, settings.threads)):
            for queries in (1, size[0]) if size[0] <= MOST_PREFILL else (1,):
                if not settings.out_of_time():
                    rows += measure_table(size, queries, threads, settings)
    return rows


def document(rows: list[Row], settings: Settings) -> Report:
    """Return the report of measured rows."""
    mode = " Quick run: few repeats, for orientation only." if settings.quick else ""
    text = TEXT.format(megabytes=COPIES_BYTES[settings.quick] >> 20) + mode
    environment = machine.environment(settings.threads, {})
    groups = ("size", "threads", "queries")
    return Report("attention", TITLE, text, environment, COLUMNS, groups, tuple(rows))


def main(arguments: list[str] | None = None) -> int:
    """Measure and write the results."""
    run = settings_of(parser("attention", __doc__).parse_args(arguments))
    return suite.finish(document(collect(run), run), run)


if __name__ == "__main__":
    sys.exit(main())
