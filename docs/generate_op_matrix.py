"""Writes docs/op_matrix.md: what each aten op does with each format.

The class of an op comes from the dispatch tables; every cell is then run once and checked against the same
call on the dequantized tensor. ``--check`` writes nothing and fails when the document is not what this
script would write. An op of a table without a sample call below fails the script.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import qtensor
from qtensor import QTensorError, QuantizedTensor
from qtensor.storage.compute import COMPUTE
from qtensor.storage.fallback import DEQUANTIZE_OPS, IN_PLACE_OPS
from qtensor.storage.preserve import PRESERVE

DOCUMENT = Path(__file__).parent / "op_matrix.md"
ROWS, COLS = 128, 256
"""Whole blocks of every format, so that slices and views below are at block bounds."""
A = torch.ops.aten


@dataclass
class Operands:
    """What a sample call works on: all quantized, or all plain with the same values."""

    matrix: Any
    """(128, 256)"""
    vector: Any
    """(256,)"""
    scalar: Any
    """()"""
    other: Any
    """(128, 256), other values under the same quantizer."""
    square: Any
    """(256, 256)"""
    batch: Any
    """(2, 128, 256)"""
    mask: Tensor = field(default_factory=lambda: (torch.arange(ROWS * COLS) % 3 == 0).view(ROWS, COLS))
    rows: Tensor = field(default_factory=lambda: torch.tensor([5, 0, 77]))


Sample = Callable[[Operands], Any]

# --------------------------------------------------------------------------------------------- sample calls


def _each(names: str, make: Callable[[str], Sample]) -> dict[str, Sample]:
    return {name: make(name) for name in names.split()}


def _in_place(call: Callable[[Any, Operands], Any]) -> Sample:
    """A call on a copy of the matrix, which is the result."""

    def sample(o: Operands) -> Any:
        target = o.matrix.clone()
        call(target, o)
        return target

    return sample


def _foreach_in_place(call: Callable[[list[Any], Operands], Any]) -> Sample:
    def sample(o: Operands) -> Any:
        targets = [o.matrix.clone(), o.other.clone()]
        call(targets, o)
        return targets

    return sample


PRESERVED: dict[str, Sample] = {
    **_each("detach alias lift_fresh clone contiguous t squeeze", lambda n: lambda o: getattr(A, n)(o.matrix)),
    "_to_copy": lambda o: A._to_copy(o.matrix, dtype=torch.bfloat16),
    "copy_": _in_place(lambda t, o: A.copy_(t, o.other)),
    "empty_like": lambda o: A.empty_like(o.matrix),
    "new_empty": lambda o: A.new_empty(o.matrix, [64, COLS]),
    "new_empty_strided": lambda o: A.new_empty_strided(o.matrix, [64, COLS], [COLS, 1]),
    "zeros_like": lambda o: A.zeros_like(o.matrix),
    "new_zeros": lambda o: A.new_zeros(o.matrix, [64, COLS]),
    "slice": lambda o: A.slice(o.matrix, 1, 0, 128),
    "select": lambda o: A.select(o.batch, 0, 1),
    "split": lambda o: A.split(o.square, 128),
    "split_with_sizes": lambda o: A.split_with_sizes(o.square, [128, 128]),
    "unbind": lambda o: A.unbind(o.batch),
    "view": lambda o: A.view(o.matrix, [4, 32, COLS]),
    "_unsafe_view": lambda o: A._unsafe_view(o.matrix, [4, 32, COLS]),
    "reshape": lambda o: A.reshape(o.matrix, [4, -1, COLS]),
    "unsqueeze": lambda o: A.unsqueeze(o.matrix, 0),
    "transpose": lambda o: A.transpose(o.matrix, 0, 1),
    "permute": lambda o: A.permute(o.matrix, [1, 0]),
    "cat": lambda o: A.cat([o.matrix, o.matrix]),
    "index_select": lambda o: A.index_select(o.matrix, 0, o.rows),
    "_pin_memory": lambda o: A._pin_memory(o.matrix),
    "is_pinned": lambda o: A.is_pinned(o.matrix),
    "is_same_size": lambda o: A.is_same_size(o.matrix, o.other),
}

COMPUTED: dict[str, Sample] = {
    "mm": lambda o: A.mm(o.matrix, _plain(o.square)),
    "bmm": lambda o: A.bmm(o.batch, _plain(o.batch).mT.contiguous()),
    "addmm": lambda o: A.addmm(_plain(o.vector), o.matrix, _plain(o.square)),
    "baddbmm": lambda o: A.baddbmm(torch.ones(1), o.batch, _plain(o.batch).mT.contiguous()),
    "linear": lambda o: A.linear(o.matrix, o.square, _plain(o.vector)),
    "embedding": lambda o: A.embedding(o.matrix, o.rows),
}

_ALONE = """abs neg sign sqrt rsqrt exp exp2 log log2 log1p expm1 reciprocal square sin cos tanh sigmoid erf floor ceil round
trunc relu gelu silu hardtanh leaky_relu elu softplus mish hardswish hardsigmoid logical_not isnan isinf isfinite isposinf
isneginf nan_to_num signbit frac sum mean amax amin max min aminmax norm linalg_vector_norm std var std_mean var_mean prod any
all argmax argmin median count_nonzero nonzero sort histc ones_like rand_like randn_like"""
_WITH_ANOTHER = """add sub rsub mul div pow maximum minimum fmod remainder floor_divide true_divide atan2 eq ne lt le gt ge isclose
logical_and logical_or equal allclose"""
_WITH_A_BOUND = "clamp_min clamp_max full_like"
_LISTS = "_foreach_neg _foreach_sqrt _foreach_abs _foreach_norm _foreach_reciprocal _foreach_max"
_TWO_LISTS = "_foreach_add _foreach_sub _foreach_mul _foreach_div _foreach_maximum"
_THREE_LISTS = "_foreach_addcmul _foreach_addcdiv"

DEQUANTIZED: dict[str, Sample] = {
    **_each(_ALONE, lambda n: lambda o: getattr(A, n)(o.matrix)),
    **_each(_WITH_ANOTHER, lambda n: lambda o: getattr(A, n)(o.matrix, o.other)),
    **_each(_WITH_A_BOUND, lambda n: lambda o: getattr(A, n)(o.matrix, 0.25)),
    **_each("_softmax _log_softmax", lambda n: lambda o: getattr(A, n)(o.matrix, 1, False)),
    **_each("dot vdot", lambda n: lambda o: getattr(A, n)(o.vector, o.vector)),
    **_each("_local_scalar_dense item is_nonzero", lambda n: lambda o: getattr(A, n)(o.scalar)),
    **_each("addcmul addcdiv", lambda n: lambda o: getattr(A, n)(o.matrix, o.other, o.matrix, value=0.5)),
    **_each(_LISTS, lambda n: lambda o: getattr(A, n)([o.matrix, o.other])),
    **_each(_TWO_LISTS, lambda n: lambda o: getattr(A, n)([o.matrix, o.other], [o.other, o.matrix])),
    **_each(_THREE_LISTS, lambda n: lambda o: getattr(A, n)([o.matrix], [o.other], [o.other])),
    "lerp": lambda o: A.lerp(o.matrix, o.other, 0.25),
    "where": lambda o: A.where(o.mask, o.matrix, o.other),
    "clamp": lambda o: A.clamp(o.matrix, -1, 1),
    "masked_fill": lambda o: A.masked_fill(o.matrix, o.mask, 0.5),
    "quantile": lambda o: A.quantile(o.vector, 0.25),
    "logsumexp": lambda o: A.logsumexp(o.matrix, [1]),
    "cumsum": lambda o: A.cumsum(o.matrix, 1),
    "mv": lambda o: A.mv(o.matrix, o.vector),
    "native_layer_norm": lambda o: A.native_layer_norm(o.matrix, [COLS], o.vector, o.vector, 1e-5),
    "native_dropout": lambda o: A.native_dropout(o.matrix, 0.5, True),
    "topk": lambda o: A.topk(o.matrix, 3),
    "bincount": lambda o: A.bincount(torch.arange(COLS) % 7, o.vector),
    "new_ones": lambda o: A.new_ones(o.matrix, [3]),
    "new_full": lambda o: A.new_full(o.matrix, [3], 0.5),
    "_foreach_lerp": lambda o: A._foreach_lerp([o.matrix], [o.other], 0.25),
    "_foreach_pow": lambda o: A._foreach_pow([o.matrix], 2),
}

_ALONE_ = """neg_ abs_ sqrt_ zero_ normal_ uniform_ random_ trunc_ round_ sign_ relu_ nan_to_num_ reciprocal_ exp_ log_ erfinv_
bernoulli_"""
_LISTS_ = "_foreach_neg_ _foreach_sqrt_ _foreach_zero_ _foreach_reciprocal_"
_TWO_LISTS_ = "_foreach_add_ _foreach_sub_ _foreach_mul_ _foreach_div_ _foreach_copy_ _foreach_maximum_"

IN_PLACE: dict[str, Sample] = {
    **_each(_ALONE_, lambda n: _in_place(lambda t, o: getattr(A, n)(t))),
    **_each("add_ sub_ mul_ div_", lambda n: _in_place(lambda t, o: getattr(A, n)(t, o.other))),
    **_each("pow_ clamp_min_ clamp_max_ fill_", lambda n: _in_place(lambda t, o: getattr(A, n)(t, 2))),
    **_each("addcmul_ addcdiv_", lambda n: _in_place(lambda t, o: getattr(A, n)(t, o.other, o.other))),
    **_each(_LISTS_, lambda n: _foreach_in_place(lambda ts, o: getattr(A, n)(ts))),
    **_each(_TWO_LISTS_, lambda n: _foreach_in_place(lambda ts, o: getattr(A, n)(ts, [o.other, o.matrix]))),
    **_each(
        "_foreach_addcmul_ _foreach_addcdiv_",
        lambda n: _foreach_in_place(lambda ts, o: getattr(A, n)(ts, [o.other, o.other], [o.other, o.other])),
    ),
    **_each(
        "_foreach_clamp_max_ _foreach_clamp_min_",
        lambda n: _foreach_in_place(lambda ts, o: getattr(A, n)(ts, 0.5)),
    ),
    "clamp_": _in_place(lambda t, o: A.clamp_(t, -1, 1)),
    "lerp_": _in_place(lambda t, o: A.lerp_(t, o.other, 0.25)),
    "masked_fill_": _in_place(lambda t, o: A.masked_fill_(t, o.mask, 0.5)),
    "_foreach_lerp_": _foreach_in_place(lambda ts, o: A._foreach_lerp_(ts, [o.other, o.matrix], 0.25)),
}

REFUSED: dict[str, Sample] = {
    "expand": lambda o: A.expand(o.matrix, [2, ROWS, COLS]),
    "as_strided": lambda o: A.as_strided(o.matrix, [4, 4], [COLS, 1]),
    "diagonal": lambda o: A.diagonal(o.matrix),
    "unfold": lambda o: A.unfold(o.matrix, 0, 32, 32),
    "index": lambda o: A.index(o.matrix, [o.rows]),
    "index_put_": lambda o: A.index_put_(o.matrix.clone(), [o.rows], torch.zeros(())),
    "gather": lambda o: A.gather(o.matrix, 1, o.mask.long()),
    "scatter_": lambda o: A.scatter_(o.matrix.clone(), 1, o.mask.long(), 0.0),
    "masked_select": lambda o: A.masked_select(o.matrix, o.mask),
    "flip": lambda o: A.flip(o.matrix, [0]),
    "roll": lambda o: A.roll(o.matrix, [1], [0]),
    "repeat": lambda o: A.repeat(o.matrix, [2, 1]),
    "constant_pad_nd": lambda o: A.constant_pad_nd(o.matrix, [0, 1]),
    "tril": lambda o: A.tril(o.matrix),
    "cumprod": lambda o: A.cumprod(o.matrix, 0),
    "convolution": lambda o: A.convolution(
        o.batch, _plain(o.batch)[:, :, :3], None, [1], [0], [1], False, [0], 1
    ),
    "_scaled_dot_product_flash_attention_for_cpu": lambda o: A._scaled_dot_product_flash_attention_for_cpu(
        *[o.batch.unsqueeze(0)] * 3
    ),
    "linalg_svd": lambda o: A.linalg_svd(o.matrix),
    "bitwise_and": lambda o: A.bitwise_and(o.matrix, o.other),
    "set_": lambda o: A.set_(o.matrix.detach(), o.other),
    "resize_": lambda o: A.resize_(o.matrix.detach(), [4, 4]),
}
"""Ops outside all tables, picked for being common; every op that is not in a table raises as these do."""

# -------------------------------------------------------------------------------------------------- probing


@dataclass(frozen=True)
class OpClass:
    """One part of the document."""

    name: str
    title: str
    meaning: str
    table: Iterable[str]
    samples: dict[str, Sample]


CLASSES = (
    OpClass(
        "exact",
        "Exact: the result is quantized and holds the same codes",
        "No value is rounded again: dequantizing the result equals the op on the dequantized tensor, bit for bit. "
        "`empty_like`, `new_empty` and `new_empty_strided` have no values to compare; class, shape and quantizer are checked.",
        PRESERVE,
        PRESERVED,
    ),
    OpClass(
        "computes",
        "Computes: one op on the codes, a plain result",
        "Products decode their operands inside one op, accumulate in float32 and round once; checked against the "
        "float32 op on the dequantized operands within the accumulation bound. An embedding decodes only the rows asked for.",
        COMPUTE,
        COMPUTED,
    ),
    OpClass(
        "dequantizes",
        "Dequantizes: a plain result",
        "The operands are dequantized to their nominal dtype, then torch's own op runs; equal to it bit for bit.",
        DEQUANTIZE_OPS,
        DEQUANTIZED,
    ),
    OpClass(
        "in place",
        "In place: dequantizes, then writes back through the tensor's own quantizer",
        "Equal, byte for byte, to quantizing torch's own result again. The tensor keeps its class, quantizer and buffers.",
        IN_PLACE_OPS,
        IN_PLACE,
    ),
    OpClass(
        "raises",
        "Raises: not in a table",
        "`UnsupportedError` names the op and the way out. Every op that is not listed above raises; these are examples.",
        REFUSED,
        REFUSED,
    ),
)

WITHOUT_VALUES = ("empty_like", "new_empty", "new_empty_strided")


class ProbeError(AssertionError):
    """A cell that does not do what its table says."""


def _plain(t: Any) -> Any:
    return t.dequantize() if isinstance(t, QuantizedTensor) else t


def operands(quantizer: qtensor.Quantizer) -> Operands:
    """Quantized operands with fixed values."""
    seed = torch.Generator().manual_seed(0)
    call = {"scale": torch.full((1,), 64.0)} if quantizer.needs_scale else {}

    def make(*shape: int) -> Any:
        return quantizer(torch.randn(shape, generator=seed), **call)

    return Operands(
        make(ROWS, COLS), make(COLS), make(), make(ROWS, COLS), make(COLS, COLS), make(2, ROWS, COLS)
    )


def dequantized(o: Operands) -> Operands:
    """The same operands, plain."""
    names = ("matrix", "vector", "scalar", "other", "square", "batch")
    return Operands(*(_plain(getattr(o, name)) for name in names))


def _run(sample: Sample, o: Operands) -> Any:
    torch.manual_seed(0)
    return sample(o)


def probe(kind: str, name: str, sample: Sample, o: Operands) -> str:
    """Run one cell; what it did, checked.

    Raises:
        ProbeError: it did something else than its class says, or raised something else than a QTensorError.
    """
    try:
        expected = _run(sample, dequantized(o))
    except RuntimeError:
        # Torch itself refuses (pinning memory without a GPU): the cell is what the table says.
        if kind != "raises":
            return kind
        expected = None
    except NotImplementedError:
        expected = None
    try:
        result = _run(sample, o)
    except QTensorError as error:
        if kind in ("exact", "raises"):
            return "raises"
        raise ProbeError(f"{name}: {kind} by its table, but it raised {error}") from error
    except Exception as error:
        raise ProbeError(f"{name}: raised {type(error).__name__}, not a QTensorError: {error}") from error
    if kind == "raises":
        raise ProbeError(f"{name}: in no table, but it returned {type(result).__name__}")
    _verify(kind, name, result, expected, o)
    return kind


def _verify(kind: str, name: str, result: Any, expected: Any, o: Operands) -> None:
    found, wanted = pytree.tree_leaves(result), pytree.tree_leaves(expected)
    if len(found) != len(wanted):
        raise ProbeError(f"{name}: {len(found)} results, torch gives {len(wanted)}")
    for one, value in zip(found, wanted, strict=True):
        quantized = isinstance(one, QuantizedTensor)
        if isinstance(value, Tensor) and quantized != (kind in ("exact", "in place")):
            raise ProbeError(f"{name}: the result is {type(one).__name__}, but the op is {kind}")
        if quantized and (tuple(one.shape), one.dtype) != (tuple(value.shape), value.dtype):
            raise ProbeError(f"{name}: {tuple(one.shape)} {one.dtype}, torch gives {tuple(value.shape)} {value.dtype}")
        if name not in WITHOUT_VALUES and not _same(kind, one, value, o):
            raise ProbeError(f"{name}: other values than torch on the dequantized tensor")


def _same(kind: str, one: Any, value: Any, o: Operands) -> bool:
    if not isinstance(value, Tensor):
        return bool(one == value) or (one != one and value != value)
    if kind == "in place":
        again = o.matrix.clone().quantize_(value)
        return all(torch.equal(a, b) for a, b in zip(one.buffers(), again.buffers(), strict=True))
    if kind == "computes":
        # Both sum COLS products in float32, in any order: the error is below COLS * eps of the sum of magnitudes.
        scale = value.abs().max() + COLS
        return bool(((one - value).abs() <= COLS * torch.finfo(torch.float32).eps * scale).all())
    return torch.equal(_plain(one).nan_to_num(nan=12345.0), value.nan_to_num(nan=12345.0))


# ------------------------------------------------------------------------------------------------- document


def check_samples() -> None:
    """Every op of a table has a sample, and every sample an op.

    Raises:
        ProbeError: with the names.
    """
    for part in CLASSES:
        missing, left = set(part.table) - set(part.samples), set(part.samples) - set(part.table)
        if missing or left:
            raise ProbeError(f"{part.name}: no sample for {sorted(missing)}; no table entry for {sorted(left)}")


def cells(**options: Any) -> dict[str, dict[str, dict[str, str]]]:
    """Class name -> op -> format -> what the cell does."""
    result: dict[str, dict[str, dict[str, str]]] = {p.name: {op: {} for op in p.table} for p in CLASSES}
    for fmt in qtensor.formats():
        o = operands(qtensor.quantizer(fmt, **options))
        for part in CLASSES:
            for op in part.table:
                try:
                    result[part.name][op][fmt] = probe(part.name, op, part.samples[op], o)
                except ProbeError as error:
                    raise ProbeError(f"{fmt}{options or ''}: {error}") from error
    return result


def render(default: dict[str, Any], both: dict[str, Any]) -> str:
    """The document."""
    formats = qtensor.formats()
    lines = [
        "# Op matrix",
        "",
        "What an aten op does with a quantized operand. Written by `python docs/generate_op_matrix.py`, which runs every "
        "cell and checks it; `make docs-check` fails when this file is stale. Do not edit it.",
        "",
        f"Cells: one call on {ROWS} x {COLS} float32 values, slices and views at block bounds, rowwise data, default "
        "options. The words are explained in [concepts](concepts.md#what-an-op-does).",
        "",
    ]
    for part in CLASSES:
        lines += [f"## {part.title}", "", part.meaning, ""]
        lines += _table(default[part.name], formats) if part.name == "exact" else _list(default[part.name], part.name)
    lines += ["## With columnwise data, too", "", *_differences(default, both), ""]
    lines += ["## Count", "", *_count(default), ""]
    return "\n".join(lines)


def _table(ops: dict[str, dict[str, str]], formats: tuple[str, ...]) -> list[str]:
    lines = [f"| op | {' | '.join(formats)} |", f"|---|{'---|' * len(formats)}"]
    lines += [f"| `{op}` | {' | '.join(row[f] for f in formats)} |" for op, row in sorted(ops.items())]
    return [*lines, ""]


def _list(ops: dict[str, dict[str, str]], kind: str) -> list[str]:
    """Ops that do the same for all formats, as they do outside of the first class."""
    for op, row in ops.items():
        if set(row.values()) != {kind}:
            raise ProbeError(f"{op}: not the same for all formats: {row}")
    return [f"All formats: {', '.join(f'`{op}`' for op in sorted(ops))}.", ""]


def _differences(default: dict[str, Any], both: dict[str, Any]) -> list[str]:
    lines = [
        f"| `{op}` | {fmt} | {cell} | {both[kind][op][fmt]} |"
        for kind, ops in default.items()
        for op, row in sorted(ops.items())
        for fmt, cell in row.items()
        if both[kind][op][fmt] != cell
    ]
    if not lines:
        return ["The same calls on tensors with both usages do the same."]
    head = ["The same calls on tensors with both usages (`columnwise=True`) do the same, but for:", ""]
    return [*head, "| op | format | rowwise | both |", "|---|---|---|---|", *lines]


def _count(default: dict[str, Any]) -> list[str]:
    found = Counter(cell for ops in default.values() for row in ops.values() for cell in row.values())
    names = Counter(part.name for part in CLASSES for _ in part.table)
    lines = ["| class | ops | cells |", "|---|---:|---:|"]
    lines += [f"| {part.name} | {names[part.name]} | {found[part.name]} |" for part in CLASSES]
    return [*lines, f"| all | {names.total()} | {found.total()} |"]


def document() -> str:
    """Probe everything, write it down."""
    check_samples()
    return render(cells(), cells(columnwise=True))


def main() -> int:
    """Write the document, or with ``--check`` compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the file is stale")
    check = parser.parse_args().check
    try:
        text = document()
    except ProbeError as error:
        print(f"docs/op_matrix.md: {error}", file=sys.stderr)
        return 1
    if not check:
        DOCUMENT.write_text(text)
    elif not DOCUMENT.exists() or DOCUMENT.read_text() != text:
        print("docs/op_matrix.md is stale. Run: python docs/generate_op_matrix.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
