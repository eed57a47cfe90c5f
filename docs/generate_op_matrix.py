"""Write docs/op_matrix.md, which tells how each aten op treats each format.

The dispatch tables give the class of an op. The script then runs every cell once and compares the
result with the same call on the dequantized tensor. It fails if an op of a table has no sample
call. ``--check`` writes nothing and fails if the document is out of date.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from op_matrix_samples import (
    COLS,
    COMPUTED,
    DEQUANTIZED,
    ELSEWHERE,
    IN_PLACE,
    PRESERVED,
    REFUSED,
    ROWS,
    Operands,
    Sample,
    plain,
)
from torch import Tensor
from torch.utils import _pytree as pytree

import qtensor
from qtensor import QTensorError, QuantizedTensor
from qtensor.storage.ops.decoded import DEQUANTIZE_OPS, IN_PLACE_OPS
from qtensor.storage.ops.part_values import PartValues
from qtensor.storage.ops.table import COMPUTE, PRESERVE

DOCUMENT = Path(__file__).parent / "op_matrix.md"
# ---- probing


@dataclass(frozen=True)
class OpClass:
    """Describe a class of ops, which is a section of the document."""

    name: str
    title: str
    meaning: str
    table: Iterable[str]
    samples: dict[str, Sample]


CLASSES = (
    OpClass(
        "exact",
        "Exact: the result is quantized and holds the same codes",
        "No value is rounded again: dequantizing the result equals the op on the dequantized "
        "tensor, bit for bit. `empty_like`, `new_empty` and `new_empty_strided` have no values to "
        "compare; class, shape and dtype are checked.",
        PRESERVE,
        PRESERVED,
    ),
    OpClass(
        "computes",
        "Computes: one op on the codes, a plain result",
        "A product decodes its operands inside one op, accumulates in float32 and rounds once. It "
        "agrees with the float32 op on the dequantized operands within the accumulation bound. An "
        "embedding decodes only the requested rows, an embedding bag each of them once. A "
        "convolution decodes a tile of output channels at a time, its backward pass and a layer "
        "of an LSTM the weights of the layer, for torch's own op. A product raises if an operand "
        "lacks the usage that it reads. The `scaled` ones raise where torch has no recipe for the "
        "format.",
        COMPUTE,
        COMPUTED,
    ),
    OpClass(
        "dequantizes",
        "Dequantizes: a plain result",
        "The operands are dequantized to their nominal dtype, then torch's own op runs. The "
        "results are equal bit for bit.",
        DEQUANTIZE_OPS,
        DEQUANTIZED,
    ),
    OpClass(
        "in place",
        "In place: dequantizes, then writes back through the tensor's own quantizer",
        "The bytes equal those of quantizing torch's own result again. The tensor keeps its "
        "class, quantizer and buffers.",
        IN_PLACE_OPS,
        IN_PLACE,
    ),
    OpClass(
        "raises",
        "Raises: not in a table",
        "`UnsupportedError` names the op and the way out. Every op that is not listed above "
        "raises; these are examples.",
        REFUSED,
        REFUSED,
    ),
)

BOUNDS = OpClass(
    "exact",
    "Exact or an error: calls that depend on where blocks lie",
    "A part cannot be cut out if it shares a factor, or a byte of codes, with its neighbours. The "
    "call then raises a `QTensorError` that names the rule and the multiple. It never rounds "
    "again. Single elements, masks and an `expand` to more rows give plain values. So do Python "
    "indices (integers, slices, `None`, `...`) that cut blocks, if they name one row, one column "
    "or a piece of it, or at most 256 values: the values are a copy, and in-place ops on it "
    "raise, as an assignment to such an index does; compiled code raises at once. `linear` and "
    "`matmul` never repeat one matrix for a batch.",
    ELSEWHERE,
    ELSEWHERE,
)

WITHOUT_VALUES = ("empty_like", "new_empty", "new_empty_strided")
GIVES_VALUES = (
    "repeated to more rows: `t.expand(2, 128, 256)`",
    "one element: `t[3, 5]`",
    "by a mask: `t[mask]`",
    "elements by number: `t[[3, 4], [5, 6]]`",
)
"""Calls of an exact op that give plain values instead of raising."""


class ProbeError(AssertionError):
    """Signal a cell that differs from its dispatch table."""


def operands(quantizer: qtensor.Quantizer) -> Operands:
    """Return quantized operands with fixed values."""
    seed = torch.Generator().manual_seed(0)
    call = {"scale": torch.full((1,), 64.0)} if quantizer.needs_scale else {}

    def make(*shape: int) -> Any:
        return quantizer(torch.randn(shape, generator=seed), **call)

    return Operands(
        make(ROWS, COLS),
        make(COLS),
        make(),
        make(ROWS, COLS),
        make(COLS, COLS),
        make(2, ROWS, COLS),
    )


def dequantized(o: Operands) -> Operands:
    """Return plain operands with the dequantized values of ``o``."""
    names = ("matrix", "vector", "scalar", "other", "square", "batch")
    return Operands(*(plain(getattr(o, name)) for name in names))


def _run(sample: Sample, o: Operands) -> Any:
    torch.manual_seed(0)
    return sample(o)


def probe(kind: str, name: str, sample: Sample, o: Operands) -> str:
    """Run one cell, check the result and return the class of its behaviour.

    Raises:
        ProbeError: the behaviour differs from that of the op's class, or the op raised an error
            that is not a QTensorError.
    """
    try:
        expected = _run(sample, dequantized(o))
    except RuntimeError:
        # Torch itself refuses, for example to pin memory without a GPU. The table decides the cell.
        if kind != "raises":
            return kind
        expected = None
    except NotImplementedError:
        expected = None
    try:
        result = _run(sample, o)
    except QTensorError as error:
        if kind in ("exact", "computes", "raises"):
            return "raises"
        raise ProbeError(f"{name}: {kind} by its table, but it raised {error}") from error
    except Exception as error:
        raise ProbeError(
            f"{name}: raised {type(error).__name__}, not a QTensorError: {error}"
        ) from error
    if kind == "raises":
        raise ProbeError(f"{name}: in no table, but it returned {type(result).__name__}")
    if name in GIVES_VALUES or isinstance(result, PartValues):
        kind = "dequantizes"
    _verify(kind, name, result, expected, o)
    return kind


def _verify(kind: str, name: str, result: Any, expected: Any, o: Operands) -> None:
    results, wanted = pytree.tree_leaves(result), pytree.tree_leaves(expected)
    if len(results) != len(wanted):
        raise ProbeError(f"{name}: {len(results)} results, torch gives {len(wanted)}")
    for one, value in zip(results, wanted, strict=True):
        quantized = isinstance(one, QuantizedTensor)
        if isinstance(value, Tensor) and quantized != (kind in ("exact", "in place")):
            raise ProbeError(f"{name}: the result is {type(one).__name__}, but the op is {kind}")
        if quantized and (tuple(one.shape), one.dtype) != (tuple(value.shape), value.dtype):
            raise ProbeError(
                f"{name}: {tuple(one.shape)} {one.dtype}, torch gives {tuple(value.shape)} "
                f"{value.dtype}"
            )
        if name not in WITHOUT_VALUES and not _same(kind, one, value, o):
            raise ProbeError(f"{name}: other values than torch on the dequantized tensor")


def _same(kind: str, one: Any, value: Any, o: Operands) -> bool:
    if not isinstance(value, Tensor):
        return bool(one == value) or (one != one and value != value)
    if kind == "in place":
        again = o.matrix.clone().quantize_(value)
        return all(torch.equal(a, b) for a, b in zip(one.buffers(), again.buffers(), strict=True))
    if kind == "computes":
        # Both sum COLS products in float32, in any order: the error is below COLS * eps of the sum
        # of magnitudes.
        scale = value.abs().max() + COLS
        return bool(((one - value).abs() <= COLS * torch.finfo(torch.float32).eps * scale).all())
    return torch.equal(plain(one).nan_to_num(nan=12345.0), value.nan_to_num(nan=12345.0))


# ---- document


def check_samples() -> None:
    """Check that every op of a table has a sample, and every sample an op.

    Raises:
        ProbeError: one is missing; the message lists the names.
    """
    for op_class in CLASSES:
        missing, extra = (
            set(op_class.table) - set(op_class.samples),
            set(op_class.samples) - set(op_class.table),
        )
        if op_class.name == "raises":
            extra = {name for other in CLASSES[:-1] for name in other.table} & set(op_class.samples)
        if missing or extra:
            raise ProbeError(
                f"{op_class.name}: no sample for {sorted(missing)}; not a table op: {sorted(extra)}"
            )


def cells(**options: Any) -> dict[str, Any]:
    """Return the class of every cell: title of the section -> op -> format -> class."""
    result: dict[str, Any] = {op_class.title: {} for op_class in (*CLASSES, BOUNDS)}
    for fmt in qtensor.formats():
        o = operands(qtensor.quantizer(fmt, **options))
        for op_class in (*CLASSES, BOUNDS):
            for op in op_class.table if op_class is BOUNDS else sorted(op_class.table):
                try:
                    result[op_class.title].setdefault(op, {})[fmt] = probe(
                        op_class.name, op, op_class.samples[op], o
                    )
                except ProbeError as error:
                    raise ProbeError(f"{fmt}{options or ''}: {error}") from error
    return result


def render(default: dict[str, Any], others: dict[str, Any]) -> str:
    """Return the document.

    Args:
        default: the cells of quantizers with default options.
        others: the cells of other usages, by the name of the usages; only differences are shown.
    """
    lines = [
        "# Op matrix",
        "",
        "This page tells how each aten op treats a quantized operand. `python "
        "docs/generate_op_matrix.py` writes it after running and checking every cell; `make "
        "docs-check` fails if it is out of date. Do not edit it.",
        "",
        f"Cells: one call on {ROWS} x {COLS} float32 values, slices and views at block bounds, "
        "rowwise data, default options. The words are explained in "
        "[concepts](concepts.md#what-an-op-does).",
        "",
    ]
    for op_class in (CLASSES[0], BOUNDS, *CLASSES[1:]):
        lines += [f"## {op_class.title}", "", op_class.meaning, ""]
        ops = default[op_class.title]
        lines += _alike(ops) if op_class is BOUNDS else _list(ops, op_class.name)
    lines += ["## With other usages", "", *_differences(default, others), ""]
    lines += ["## Count", "", *_count(default), ""]
    return "\n".join(lines)


def _table(ops: dict[str, dict[str, str]], formats: tuple[str, ...]) -> list[str]:
    lines = [f"| op | {' | '.join(formats)} |", f"|---|{'---|' * len(formats)}"]
    lines += [
        f"| {_label(op)} | {' | '.join(row[f] for f in formats)} |" for op, row in ops.items()
    ]
    return [*lines, ""]


def _label(op: str) -> str:
    return op if " " in op or "`" in op else f"`{op}`"


def _list(ops: dict[str, dict[str, str]], kind: str) -> list[str]:
    """Return a line of the ops that behave the same for all formats, and a table of the others."""
    same = sorted(op for op, row in ops.items() if set(row.values()) == {kind})
    differ = {op: row for op, row in ops.items() if op not in same}
    lines = [f"All formats: {', '.join(f'`{op}`' for op in same)}.", ""]
    return [*lines, *_table(differ, tuple(next(iter(differ.values()))))] if differ else lines


def _alike(calls: dict[str, dict[str, str]]) -> list[str]:
    """Return lists of the calls that are alike for all formats, and a table of the others."""
    lines = []
    for word in ("exact", "dequantizes", "raises"):
        same = [call for call, row in calls.items() if set(row.values()) == {word}]
        lines += [f"All formats, {word}:", "", *(f"- {call}" for call in same), ""]
    differ = {call: row for call, row in calls.items() if len(set(row.values())) > 1}
    return [*lines, *_table(differ, tuple(next(iter(differ.values()))))]


def _differences(default: dict[str, Any], others: dict[str, Any]) -> list[str]:
    lines = []
    for title, ops in default.items():
        for op, row in ops.items():
            words = [_changes(row, variant[title][op]) for variant in others.values()]
            if any(words):
                lines.append(f"| {_label(op)} | {' | '.join(words)} |")
    if not lines:
        return ["The same calls on tensors with other usages behave the same."]
    head = ["The same calls on tensors with other usages behave the same, except:", ""]
    return [*head, f"| op | {' | '.join(others)} |", f"|---|{'---|' * len(others)}", *lines]


def _changes(row: dict[str, str], other: dict[str, str]) -> str:
    """Return the formats whose class differs, for example "raises: fp8, mxfp8".

    Args:
        row: format -> class with default options.
        other: format -> class with other usages.
    """
    changed = {
        cell: [f for f in row if other[f] == cell != row[f]] for cell in sorted(set(other.values()))
    }
    words = {
        cell: "all" if len(names) == len(row) else ", ".join(names)
        for cell, names in changed.items()
    }
    return "; ".join(f"{cell}: {names}" for cell, names in words.items() if names)


def _count(default: dict[str, Any]) -> list[str]:
    results = Counter(
        cell for ops in default.values() for row in ops.values() for cell in row.values()
    )
    names = Counter(op_class.name for op_class in (*CLASSES, BOUNDS) for _ in op_class.table)
    lines = ["| class | calls | cells |", "|---|---:|---:|"]
    lines += [f"| {name} | {names[name] or ''} | {count} |" for name, count in results.items()]
    return [*lines, f"| all | {names.total()} | {results.total()} |"]


def document() -> str:
    """Run every cell and return the document."""
    check_samples()
    others = {
        "rowwise and columnwise": cells(columnwise=True),
        "columnwise alone": cells(rowwise=False, columnwise=True),
    }
    return render(cells(), others)


def main() -> int:
    """Write the document, or compare it with ``--check``, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if the file is out of date"
    )
    check = parser.parse_args().check
    try:
        content = document()
    except ProbeError as error:
        print(f"docs/op_matrix.md: {error}", file=sys.stderr)
        return 1
    if not check:
        DOCUMENT.write_text(content)
    elif not DOCUMENT.exists() or DOCUMENT.read_text() != content:
        print(
            "docs/op_matrix.md is out of date. Run: python docs/generate_op_matrix.py",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
