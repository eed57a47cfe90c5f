"""Describe a checkpoint, or one tensor of it down to its blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from qtensor.api import quantizer_of
from qtensor.checkpoints.activation_factors import factor_problem
from qtensor.checkpoints.checkpoint import Checkpoint, Row, open_checkpoint, open_with_factors
from qtensor.checkpoints.containers.base import Path, TensorInfo
from qtensor.checkpoints.conversion.conversion_report import json_number
from qtensor.checkpoints.conversion.rows import (
    Values,
    origin_values,
    our_values,
    plain_values,
)
from qtensor.checkpoints.errors import Place, refuse
from qtensor.checkpoints.modes import in_memory
from qtensor.core.buffer_shapes import rows_cols
from qtensor.core.operand import ROW_STEP, decodes_in_rows, row_parts
from qtensor.debug.viewer import Region, View, show
from qtensor.storage.numbers import factors_of_elements
from qtensor.storage.rebuild import tensor_of
from qtensor.storage.tensor import QuantizedTensor

BLOCKS = 2
"""Blocks of a weight that are shown."""
SHOWN = 32
"""Most values of a block that are shown."""
_NARROW = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F4")


@dataclass(frozen=True)
class KindCount:
    """Count the tensors of one kind."""

    kind: str
    """A format id, or ``"plain"``, ``"dense"`` or ``"unreadable"``."""
    note: str
    """The layout's own name of the format, or the dtype."""
    tensors: int
    values: int
    nbytes: int

    @property
    def bits_per_value(self) -> float:
        """Return the stored bits of a value, factors included; NaN without values."""
        return 8 * self.nbytes / self.values if self.values else math.nan


@dataclass(frozen=True)
class Summary:
    """Describe a checkpoint."""

    path: str
    layout: str
    container: str
    files: tuple[str, ...]
    kinds: tuple[KindCount, ...]
    odd: dict[str, str]
    """Tensor -> why it stands out."""
    rows: tuple[Row, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(kind.nbytes for kind in self.kinds)

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as a value that JSON holds; docs/checkpoints.md lists the keys."""
        kinds = [{**asdict(k), "bits_per_value": _bits(k)} for k in self.kinds]
        for kind in kinds:
            kind["bytes"] = kind.pop("nbytes")
        return {
            "path": self.path,
            "layout": self.layout,
            "container": self.container,
            "files": list(self.files),
            "bytes": self.nbytes,
            "kinds": kinds,
            "odd": self.odd,
            "tensors": [
                {
                    "name": row.name,
                    "kind": row.kind,
                    "shape": list(row.shape),
                    "dtype": str(row.dtype).removeprefix("torch."),
                    "bytes": row.nbytes,
                    "note": row.note,
                }
                for row in self.rows
            ],
        }


def _bits(kind: KindCount) -> float | None:
    return round(kind.bits_per_value, 4) if kind.values else None


def inspect(path: Path, layout: str | None = None) -> Summary:
    """Return a description of a checkpoint; headers and the factors of activations are read.

    Args:
        path: a file, a folder, an index or an open file.
        layout: name of the layout; by default it is recognised.

    Raises:
        CheckpointError: the checkpoint is not sound, or its layout is not read.
    """
    with open_checkpoint(path, layout, accept_rotated=True) as checkpoint:
        rows = checkpoint.table().rows
        counts: dict[tuple[str, str], list[int]] = {}
        for row in rows:
            count = counts.setdefault((row.kind, row.note), [0, 0, 0])
            for i, n in enumerate((1, math.prod(row.shape), row.nbytes)):
                count[i] += n
        kinds = [KindCount(*key, *count) for key, count in sorted(counts.items())]
        files = sorted({info.file for info in checkpoint.source.tensors.values()})
        return Summary(
            checkpoint.path,
            checkpoint.layout,
            checkpoint.source.kind,
            tuple(files) or (checkpoint.path,),
            tuple(kinds),
            dict(_odd(checkpoint)),
            rows,
        )


def _odd(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield the tensors that stand out, and why."""
    for row in checkpoint.table().rows:
        if row.kind in ("dense", "unreadable"):
            yield row.name, f"no quantized tensor: {row.note}"
        elif row.kind == "plain" and row.note in _NARROW:
            yield row.name, f"{row.note} without a factor"
        elif not math.prod(row.shape):
            yield row.name, "no values"
        elif row.kind == "plain" and (problem := factor_problem(checkpoint, row.name)):
            yield row.name, problem
    for name in checkpoint.unlisted:
        yield name, "lies in a shard and not in the index"


@dataclass(frozen=True)
class Block:
    """Show one block of a weight."""

    row: int
    col: int
    factor: float
    """Product of all its factors: the value of code 1.0."""
    codes: str
    """The stored bytes of its first values in hexadecimal, or "" if the tensor is plain."""
    values: tuple[float, ...]
    """Its first values, by our arithmetic."""


@dataclass(frozen=True)
class TensorSummary:
    """Describe one tensor."""

    name: str
    kind: str
    """The canonical text of the quantizer, or ``"plain"`` or ``"dense"``."""
    why_dense: str | None
    """Why the weight is not a quantized tensor."""
    shape: tuple[int, ...]
    dtype: str
    stored: dict[str, TensorInfo]
    """Role -> the stored tensor."""
    minimum: float
    maximum: float
    rms: float
    """Root mean square of the finite values."""
    zeros: int
    nans: int
    infinities: int
    blocks: tuple[Block, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the description as a value that JSON holds."""
        values = asdict(self)
        for key in ("minimum", "maximum", "rms"):
            values[key] = json_number(values[key])
        values["shape"] = list(self.shape)
        values["stored"] = {
            role: {
                "name": i.name,
                "dtype": i.dtype,
                "shape": list(i.shape),
                "file": i.file,
                "start": i.start,
                "bytes": i.nbytes,
            }
            for role, i in self.stored.items()
        }
        for block, shown in zip(self.blocks, values["blocks"], strict=True):
            shown["factor"] = json_number(block.factor)
            shown["values"] = [json_number(value) for value in block.values]
        return values


@in_memory
def inspect_tensor(path: Path, name: str, layout: str | None = None) -> TensorSummary:
    """Return a description of one tensor: where it lies, its range and its first blocks.

    A weight is shown with all of its factors, as a conversion reads it.

    Args:
        path: a file, a folder, an index or an open file.
        name: the logical name.
        layout: name of the layout; by default it is recognised.

    Raises:
        CheckpointError: there is no such tensor, or it cannot be read.
    """
    with _opened(path, name, layout) as checkpoint:
        tensor = checkpoint[name]
        group = checkpoint.groups.get(name)
        kind = "dense" if group else "plain"
        if isinstance(tensor, QuantizedTensor):
            kind = tensor.quantizer.canonical
        plain = {"": checkpoint.source.tensors[name]} if group is None else {}
        return TensorSummary(
            name=name,
            kind=kind,
            why_dense=checkpoint.why_dense(name),
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            stored=dict(group.roles) if group else plain,
            **_range(values_of(checkpoint, name, None)),
            blocks=tuple(_blocks(tensor)),
        )


@in_memory
def view_tensor(
    path: Path,
    name: str,
    region: tuple[Region, Region] = (None, None),
    bits: tuple[int, int] | bool = False,
    layout: str | None = None,
) -> View:
    """Return a view of a region of a quantized tensor, as ``qtensor.debug.show`` gives it."""
    with _opened(path, name, layout) as checkpoint:
        return show(checkpoint[name], *region, bits)


def _opened(path: Path, name: str, layout: str | None) -> Checkpoint:
    """Return an open checkpoint that has a tensor, with all factors of its weights."""
    checkpoint = open_with_factors(path, layout)
    if name not in checkpoint and checkpoint.reader.conversion_options:
        checkpoint.close()
        checkpoint = open_checkpoint(path, layout)  # a factor may have the name
    if name not in checkpoint:
        with checkpoint:
            close = [known for known in checkpoint if name in known][:3]
            fix = f"Similar ones: {', '.join(close)}" if close else "List them without --tensor"
            rule = "the checkpoint has a tensor of this name"
            refuse(Place(checkpoint.path, name, checkpoint.layout), rule, "none", fix)
    return checkpoint


def values_of(checkpoint: Checkpoint, name: str, dtype: torch.dtype | None) -> Values:
    """Return the values of a tensor in parts.

    With ``dtype`` None they are float32 by our arithmetic where a format of ours holds the weight;
    otherwise they are decoded as the origin does.
    """
    group = checkpoint.groups.get(name)
    if group is None:
        return plain_values(checkpoint[name])
    if dtype is None:
        tensor = checkpoint[name]
        if isinstance(tensor, QuantizedTensor):
            return our_values(tensor, torch.float32)
        return plain_values(tensor)
    return origin_values(checkpoint, name, dtype)


def _range(values: Values) -> dict[str, Any]:
    """Return minimum, maximum and counts of values."""
    low, high, squares, count = math.inf, -math.inf, 0.0, 0
    zeros = nans = infinities = 0
    for pair in values.bounds:
        x = values.read(*pair)
        x = (torch.view_as_real(x) if x.is_complex() else x).double()
        finite = x[x.isfinite()]
        nans += int(x.isnan().sum())
        infinities += int(x.isinf().sum())
        zeros += int((x == 0).sum())
        count += finite.numel()
        if finite.numel():
            low, high = min(low, finite.min().item()), max(high, finite.max().item())
            squares += finite.square().sum().item()
    return {
        "minimum": low if count else math.nan,
        "maximum": high if count else math.nan,
        "rms": math.sqrt(squares / count) if count else math.nan,
        "zeros": zeros,
        "nans": nans,
        "infinities": infinities,
    }


def _blocks(tensor: Tensor) -> Iterator[Block]:
    """Yield the first blocks of the first row of a quantized tensor."""
    if not isinstance(tensor, QuantizedTensor) or not tensor.numel():
        return
    tensor, quantizer = tensor_of(tensor), quantizer_of(tensor)
    if not decodes_in_rows(quantizer):
        return
    rows, cols = rows_cols(tensor.shape)
    some = (0, min(ROW_STEP, rows))
    parts = row_parts(quantizer, tensor.buffers(), tensor.shape, some)
    row = quantizer.assemble([part.contiguous() for part in parts], (some[1], cols), tensor.dtype)
    width = min((quantizer.value_block or (1, cols))[1], cols)
    values = row.dequantize(torch.float32)[0]
    factors = factors_of_elements(row).reshape(-1)
    data = parts[0][0]
    for start in range(0, min(BLOCKS * width, cols), width):
        stop = min(start + min(width, SHOWN), cols)
        first, end = (start * data.numel() // cols, stop * data.numel() // cols)
        codes = bytes(data[first:end].view(torch.uint8).tolist()).hex()
        shown = tuple(values[start:stop].tolist())
        yield Block(0, start, factors[start].item(), codes, shown)
