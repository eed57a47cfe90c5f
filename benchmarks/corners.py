"""Benchmark that looks for the slowest products of quantized operands, compared with bfloat16.

``python -m benchmarks.corners [--quick] [--sizes 256x256] [--kinds linear,both] [--output DIR]``
measures linear layers, ``x @ w``, grouped and batched products over rows, sizes and formats, with
one thread and with all, and reports the worst ratio of each format.
"""

from __future__ import annotations

import copy
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import qtensor
from benchmarks import bandwidth, cases, decode, machine, suite
from benchmarks.report import Column, Report, Row
from benchmarks.settings import Settings, parser, peer_names
from benchmarks.settings import settings as settings_of
from benchmarks.suite import Call
from benchmarks.timer import measure

TITLE = "The slowest products on a CPU"
TEXT = (
    "Time of a product with quantized operands / time with bfloat16 ones, activations and results "
    "bfloat16; above 1 ours is slower. The shortest of interleaved bursts counts on both sides. "
    "For each kind of product and format: the worst of all cells of up to 16 rows with weights "
    "above 1 MiB in bfloat16, of other cells of up to 64 rows, and of more rows; the median of "
    "all; and where each worst cell is: rows x N x K, threads. {kinds} Sizes: {sizes}; rows: "
    "{rows}. The weights of a call are others than those of the call before if they have more "
    "than 1 MiB."
)
KINDS = {
    "linear": "`F.linear(x, q)`",
    "x @ w": "`x @ q` with q (K, N) and blocks along N",
    "x @ w columnwise": "the same with blocks along K, or factors of columns (fp8_rowwise)",
    "both": "`F.linear(xq, q)`, both operands quantized already",
    "batched": "`qtensor.gemm(x, q, 'TN')` of 4 matrices",
    "both batched": "the same of quantized x",
    "grouped": "`F.grouped_mm` of 4 groups of these rows",
}
MODEL = "model"
"""The kind of the rows that measure whole steps of a model."""
SIZES = {
    False: (
        *((64, 64), (77, 333), (256, 256), (512, 512), (1536, 384), (1000, 600), (515, 1030)),
        *((256, 4096), (4096, 256), (1024, 1024), (2048, 2048), (4096, 4096)),
    ),
    True: ((64, 64), (77, 130)),
}
"""(N, K), by whether the run is quick."""
ROWS = {False: (1, 4, 16, 17, 64, 65, 128, 512), True: (2, 65)}
GROUPS = 4
"""Matrices of a batch, and groups."""
STACKS = ("batched", "both batched", "grouped")
MOST = 1 << 20
"""Elements of the largest matrix of a stack: the stacks of all formats are in memory at a time."""
ALIGNED = 8
"""Bfloat16 values in 16 bytes: what torch's ``grouped_mm`` takes for a row."""
MEBI = 1 << 20
COPIES_BYTES = {False: 64 << 20, True: 1}
"""Least bytes of all copies of a weight of more than a MiB together."""
SECONDS = {False: 0.06, True: 0.002}
"""For each function."""
BURSTS = {False: 30, True: 2}


@dataclass(frozen=True)
class Problem:
    """A product in every format."""

    kind: str
    shape: tuple[int, int]
    """(N, K)."""
    rows: int
    threads: int

    @property
    def where(self) -> str:
        """The place in the tables."""
        return f"{self.rows}x{cases.size_name(self.shape)}, {self.threads}"

    @property
    def range(self) -> str:
        """The column to which the cell belongs."""
        if self.rows > 64:
            return "many"
        is_large = 2 * self.shape[0] * self.shape[1] > MEBI
        return "few" if self.rows <= 16 and is_large else "some"


RANGES = ("few", "some", "many")


def quantizers(quick: bool) -> list[Any]:
    """Return the formats of weights."""
    return decode.quantizers(quick)


def operands(kind: str, shape: tuple[int, int], quantizer: Any | None, total: int = 1) -> list[Any]:
    """Return copies of the weight of a kind, quantized, or in bfloat16 for None.

    Args:
        kind: one of ``KINDS``.
        shape: (N, K).
        quantizer: the format.
        total: least bytes of all copies of a weight of more than a MiB.
    """
    n, k = shape
    size = (k, n) if kind.startswith("x @ w") else shape
    if kind in STACKS:
        size = (GROUPS, *shape)
    dense = cases.random_input(size, torch.bfloat16)
    if quantizer is None:
        first, make = dense, dense.clone
    else:
        if kind.endswith("columnwise") and "axis" in quantizer.option_names():
            quantizer = qtensor.quantizer(quantizer, axis=0)
        elif kind.endswith("columnwise"):
            quantizer = quantizer.with_usage(rowwise=False, columnwise=True)
        first, make = quantizer(dense), lambda: quantizer(dense)
    count = decode.copies_count(first.nbytes, total) if dense.nbytes > MEBI else 1
    return [first, *(make() for _ in range(count - 1))]


def inputs(problem: Problem, quantizer: Any | None) -> Any:
    """Return the left operand; quantized for kinds with two quantized operands."""
    rows, k = problem.rows, problem.shape[1]
    size: tuple[int, ...] = (rows, k)
    if "batched" in problem.kind:
        size = (GROUPS, rows, k)
    if problem.kind == "grouped":
        size = (GROUPS * rows, k)
    x = cases.random_input(size, torch.bfloat16)
    if quantizer is None or not problem.kind.startswith("both"):
        return x
    square = {"block_scaling_dim": 1, "with_2d_quantization": False}
    own = {name: square[name] for name in square if name in quantizer.option_names()}
    return qtensor.quantizer(quantizer, **own)(x)


def bind(problem: Problem, quantizer: Any | None, weights: Sequence[Any]) -> Call:
    """Return the call that multiplies with the next weight each time."""
    x, multiply = inputs(problem, quantizer), _multiply(problem, quantizer is None)
    return bandwidth.in_turn([lambda w=w: multiply(x, w) for w in weights])


def _multiply(problem: Problem, is_plain: bool) -> Callable[[Any, Any], Tensor]:
    kind = problem.kind
    if kind == "grouped":
        ends = torch.arange(1, GROUPS + 1, dtype=torch.int32) * problem.rows
        return lambda x, w: F.grouped_mm(x, w.mT, offs=ends)
    if "batched" in kind:
        if is_plain:
            return lambda x, w: torch.bmm(x, w.mT)
        return lambda x, w: qtensor.gemm(x, w, "TN")
    if kind.startswith("x @ w"):
        return torch.matmul
    return F.linear


def refused(problem: Problem, quantizer: Any) -> str | None:
    """Return why a format has no such product, or None."""
    try:
        weights = operands(problem.kind, problem.shape, quantizer)
        with torch.no_grad():
            bind(problem, quantizer, weights)()
    except qtensor.QTensorError as error:
        return suite.first_line(error)
    return None


def collect(kind: str, settings: Settings, results: suite.Results) -> Iterator[Row]:
    """Yield the cells of a kind: a row for each problem and format."""
    chosen = quantizers(settings.quick)
    for shape in SIZES[settings.quick]:
        if settings.sizes and cases.size_name(shape) not in settings.sizes:
            continue
        if kind in STACKS and shape[0] * shape[1] > MOST:
            continue
        if kind == "grouped" and any(n % ALIGNED for n in shape):
            labels = {"case": "bfloat16", "size": cases.size_name(shape), "dtype": kind}
            results.note(f"torch groups rows of multiples of {ALIGNED} values", labels)
            continue
        if settings.out_of_time():
            results.note("out of time", {"case": kind, "size": cases.size_name(shape), "dtype": ""})
            continue
        print(f"{kind}, {cases.size_name(shape)}", file=sys.stderr)
        first = Problem(kind, shape, 2, 1)
        found = {}
        for quantizer in chosen:
            reason = refused(first, quantizer)
            if reason is None:
                found[quantizer.canonical] = quantizer
            else:
                labels = {"case": quantizer.canonical, "size": cases.size_name(shape)}
                results.note(reason, labels | {"dtype": kind})
        total = COPIES_BYTES[settings.quick]
        weights = {name: operands(kind, shape, q, total) for name, q in found.items()}
        plain = operands(kind, shape, None, total)
        threads = dict.fromkeys((1, settings.threads))
        for rows, count in itertools.product(ROWS[settings.quick], threads):
            problem = Problem(kind, shape, rows, count)
            calls = {"bf16": bind(problem, None, plain)}
            calls |= {name: bind(problem, q, weights[name]) for name, q in found.items()}
            yield from cells(problem, calls, settings.quick)


def cells(problem: Problem, calls: Mapping[str, Call], quick: bool) -> list[Row]:
    """Return the rows of a problem, measured in turns; ``bf16`` is one of the calls."""
    with suite.silent(), torch.no_grad():
        timings = measure(calls, BURSTS[quick], threads=problem.threads, seconds=SECONDS[quick])
    base = timings["bf16"].least_us
    return [
        {
            "kind": problem.kind,
            "case": name,
            "where": problem.where,
            "range": problem.range,
            "us": timing.least_us,
            "bf16_us": base,
            "ratio": timing.least_us / base,
        }
        for name, timing in timings.items()
        if name != "bf16"
    ]


def summary(found: Sequence[Row]) -> list[Row]:
    """Return a row for each kind and format, with its worst cells and all of its cells."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for cell in found:
        groups.setdefault((cell["kind"], cell["case"]), []).append(cell)
    rows = []
    for (kind, case), members in groups.items():
        row: Row = {"kind": kind, "case": case}
        for name in RANGES:
            inside = [cell for cell in members if cell["range"] == name]
            worst = max(inside, key=lambda cell: cell["ratio"], default=None)
            row[name] = worst and worst["ratio"]
            row[f"{name}_where"] = worst and worst["where"]
        row["median"] = statistics.median(cell["ratio"] for cell in members)
        row["cells"] = [
            [cell["where"], round(cell["us"], 2), round(cell["bf16_us"], 2)] for cell in members
        ]
        rows.append(row)
    return rows


COLUMNS = (
    Column("case", "format"),
    Column("few", "up to 16 rows, above 1 MiB", 2),
    Column("some", "others up to 64 rows", 2),
    Column("many", "more rows", 2),
    Column("median", "median", 2),
    *(Column(f"{name}_where", f"worst, {name}") for name in RANGES),
)


# ---- a model


def steps(settings: Settings) -> list[Row]:
    """Return the cells of one step of a small Llama-style model with 8 sequences."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    from examples import generate  # noqa: PLC0415 - transformers is an extra

    size = "tiny" if settings.quick else "small"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(generate.config(size), dtype=torch.bfloat16).eval()
    tokens = torch.randint(2, 60, (8, 1))

    def call(of: Any) -> Call:
        return lambda: of(tokens, use_cache=False)

    calls = {"bf16": call(model)}
    for quantizer in quantizers(settings.quick):
        quantized = copy.deepcopy(model)
        qtensor.quantize_(quantized, quantizer.canonical)
        calls[quantizer.canonical] = call(quantized)
    hidden, inner = (generate.SIZES[size][name] for name in ("hidden_size", "intermediate_size"))
    found = []
    for threads in dict.fromkeys((1, settings.threads)):
        problem = Problem(MODEL, (inner, hidden), 8, threads)
        found += cells(problem, calls, settings.quick)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure and write the results."""
    words = parser("corners", __doc__)
    words.add_argument(
        "--kinds", default=",".join((*KINDS, MODEL)), help="these alone: %(default)s"
    )
    words.set_defaults(peers="none")
    options = words.parse_args(arguments)
    settings = settings_of(options)
    results, found = suite.Results(), []
    for kind in peer_names(options.kinds):
        if kind == MODEL:
            found += steps(settings)
        else:
            found += collect(kind, settings, results)
    results.rows = summary(found)
    return suite.finish(document(results, settings), settings)


def document(results: suite.Results, settings: Settings) -> Report:
    """Return the report of summary rows."""
    named = "; ".join(f"*{kind}*: {text}" for kind, text in KINDS.items())
    sizes = ", ".join(settings.sizes or map(cases.size_name, SIZES[settings.quick]))
    rows = ", ".join(str(count) for count in ROWS[settings.quick])
    text = TEXT.format(
        kinds=f"{named}; *{MODEL}*: one step of 8 sequences through `examples/generate.py`'s "
        "small model, without context.",
        sizes=sizes,
        rows=rows,
    )
    here = machine.environment(settings.threads, {})
    absent = tuple(results.lines())
    return Report("corners", TITLE, text, here, COLUMNS, ("kind",), tuple(results.rows), absent)


if __name__ == "__main__":
    sys.exit(main())
