"""Open a checkpoint as a lazy mapping from names to quantized or plain tensors."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from qtensor.checkpoints.containers.base import (
    STORED_TYPES,
    Container,
    Path,
    TensorInfo,
    torch_shape,
)
from qtensor.checkpoints.containers.opening import open_container
from qtensor.checkpoints.containers.shard_files import path_inside, read_json
from qtensor.checkpoints.errors import CheckpointError, Place, refuse
from qtensor.checkpoints.input_transforms import ROTATION
from qtensor.checkpoints.layout_base import (
    DenseOnly,
    Group,
    Layout,
    Source,
    Unreadable,
    find_layout,
    recognise,
)
from qtensor.checkpoints.modes import in_memory
from qtensor.core.errors import QTensorError
from qtensor.core.texts import aligned
from qtensor.modules.input_transform import InputTransform
from qtensor.storage.tensor import QuantizedTensor

Rounding = Literal["origin"] | None
_JSON_FILES = ("hf_quant_config.json",)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes of layers that a quantized checkpoint holds as casts, without a factor."""


class Row(NamedTuple):
    """Describe one tensor of a checkpoint in a table.

    Attributes:
        name: the logical name.
        kind: a format id such as ``"nvfp4"``, ``"dense"``, ``"plain"`` or ``"unreadable"``.
        shape: the logical shape.
        dtype: the nominal dtype.
        nbytes: stored bytes, factors included.
        note: the stored format, or why the tensor is not a quantized one.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    note: str


@dataclass(frozen=True)
class Table:
    """List the tensors of a checkpoint; the repr is a table."""

    rows: tuple[Row, ...]

    def __repr__(self) -> str:
        head = ("name", "kind", "shape", "dtype", "bytes", "note")
        lines = [head] + [
            (
                row.name,
                row.kind,
                "x".join(map(str, row.shape)) or "()",
                str(row.dtype).removeprefix("torch."),
                f"{row.nbytes:,}",
                row.note,
            )
            for row in self.rows
        ]
        return "\n".join(aligned(lines))


class Checkpoint(Mapping[str, Tensor]):
    """Map the logical names of an open checkpoint to tensors, which are read at each access.

    A weight that the file stores quantized is a ``QuantizedTensor``, with the codes of the mapped
    file where the bytes allow; if no format of qtensor holds it, it is a plain tensor, decoded by
    the arithmetic of the origin. All other tensors are plain ones, as stored.

    Attributes:
        layout: name of the layout.
        config: config.json of the folder, or an empty dict.
        path: path of the file or index.
        folder: folder of the file, or None for an open file.
        unlisted: tensors that lie in a shard and not in the index.
        reader: the layout's instance, which decodes the groups.
        groups: the quantized weights by name.
    """

    def __init__(self, container: Container, layout: str | None = None, **options: object) -> None:
        """Find the layout and the groups of an open container.

        Raises:
            CheckpointError: no layout fits, or the header is not sound.
        """
        self._container = container
        self.path = container.path
        self.folder = container.folder
        self.unlisted: tuple[str, ...] = getattr(container, "unlisted", ())
        files = _json_files(container)
        self.config: Mapping[str, Any] = files.pop("config.json", {})
        self.source = Source(
            container.path,
            container.infos,
            container.headers,
            self.config,
            files,
            container.kind,
            container.extra,
            container.read,
        )
        cls = find_layout(layout) if layout is not None else recognise(self.source)
        self.layout = cls.name
        with _naming(Place(self.path, "", cls.name)):
            self.reader: Layout = cls(self.source, **options)
            self.groups: dict[str, Group] = {}
            for group in self.reader.groups():
                if group.name in self.groups:
                    self._refuse(group.name, "each name has one weight", "two of them")
                self.groups[group.name] = group
        if layout not in (None, "plain") and not self.groups and not cls.recognises(self.source):
            # Codes would else pass as plain tensors.
            self._refuse("", "a file of the layout that the caller names has its weights", "none")
        self._names = self._logical_names()

    def _logical_names(self) -> dict[str, None]:
        """Return the logical names in the order of the file."""
        owner = {
            info.name: group.name
            for group in self.groups.values()
            for info in group.roles.values()
            if group.listed
        }
        names: dict[str, None] = {}
        for stored in self._container.infos:
            name = owner.get(stored, stored)
            if stored not in owner and stored in self.groups:
                self._refuse(stored, "each name has one weight", "a plain tensor of that name")
            names[name] = None
        return names

    @functools.cached_property
    @in_memory
    def input_transforms(self) -> dict[str, InputTransform]:
        """Return what must happen to the inputs of layers, by module; see the layout's method."""
        return self.reader.input_transforms()

    @functools.cached_property
    def described(self) -> dict[str, Tensor]:
        """Return rotations that the config describes, by names that the mapping does not list."""
        blocks = {f"{m}.{ROTATION}": t.block for m, t in self.input_transforms.items() if t.block}
        return {n: torch.tensor([size]) for n, size in blocks.items() if n not in self._names}

    def _refuse(self, name: str, rule: str, got: str) -> None:
        fix = "Export the checkpoint again, or leave out layout="
        refuse(Place(self.path, name, self.layout), rule, got, fix)

    # ---- the mapping

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names or name in self.groups

    @in_memory
    def __getitem__(self, name: str) -> Tensor:
        group = self.groups.get(name)
        if group is None:
            return self._plain(name)
        with _naming(self._place(group)):
            self._check_readable(group)
            stored = self.stored(name)
            if not isinstance(group.target, DenseOnly):
                tensor = self.reader.read(group, stored)
                if not isinstance(tensor, DenseOnly):
                    return tensor
            return self.reader.decode(group, stored, group.dtype)

    def _plain(self, name: str) -> Tensor:
        if name in self._names:
            return self._container.read(name)
        if name.endswith(f".{ROTATION}") and name in self.described:
            return self.described[name]
        inner = self.reader.inner(name)
        if inner is None:
            raise KeyError(name)
        return inner

    def inner_names(self) -> tuple[str, ...]:
        """Return the names of tensors inside plain ones: ``fc._extra_state.scale_fwd``.

        ``checkpoint[name]`` reads them. They are not among the names of the mapping, because the
        plain tensor holds them.
        """
        return tuple(self.reader.inner_names())

    @in_memory
    def stored(self, name: str) -> dict[str, Tensor]:
        """Return the stored tensors of a weight by role; of a plain tensor, under the role ""."""
        group = self.groups.get(name)
        if group is None:
            return {"": self._plain(name)}
        return {role: self._container.read(info.name) for role, info in group.roles.items()}

    @in_memory
    def dense(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values of a tensor as the origin decodes them, to the last bit.

        Args:
            name: a logical name.
            dtype: bfloat16, float16, float32 or float64; by default the nominal dtype of a weight.
                A plain tensor is returned as stored, or converted if a dtype is given.

        Returns:
            A plain tensor of the logical shape.

        Raises:
            CheckpointError: the weight cannot be decoded, or the dtype is none of these.
            KeyError: no such name.
        """
        _check_dtype(dtype)
        group = self.groups.get(name)
        if group is None:
            tensor = self._plain(name)
            return tensor if dtype is None else tensor.to(dtype)
        return self.decode(group, self.stored(name), dtype or group.dtype)

    @in_memory
    def decode(self, group: Group, stored: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return the values of a group, or of some of its rows, as the origin decodes them.

        ``stored`` holds its stored tensors by role, or their rows.

        Raises:
            CheckpointError: the group cannot be decoded.
        """
        with _naming(self._place(group)):
            self._check_readable(group)
            return self.reader.decode(group, stored, dtype)

    def nbytes(self, name: str) -> int:
        """Return the stored bytes of a tensor, factors included."""
        return sum(info.nbytes for info in self._infos(name))

    def release(self, name: str) -> None:
        """Give the pages of a tensor back to the system; they are read again when needed.

        Writes to tensors that share the mapped memory are lost.
        """
        for info in self._infos(name):
            self._container.release(info.name)

    def _infos(self, name: str) -> Iterable[TensorInfo]:
        """Return the stored tensors of a name."""
        group = self.groups.get(name)
        if group is not None:
            return group.roles.values()
        if name in self._container.infos or name not in self.described:
            return (self._container.infos[name],)
        return ()

    @in_memory
    def why_dense(self, name: str) -> str | None:
        """Return why a weight is not a quantized tensor, or None for quantized and plain ones."""
        group = self.groups.get(name)
        if group is None:
            return None
        found: object = group.target
        if not isinstance(found, (DenseOnly, Unreadable)):
            with _naming(self._place(group)):
                found = self.reader.read(group, self.stored(name))
        return found.reason if isinstance(found, (DenseOnly, Unreadable)) else None

    def is_factor(self, name: str) -> bool:
        """Return True for plain tensors that are factors, such as ``input_scale``."""
        return name not in self.groups and name.rpartition(".")[2] in self.reader.factor_names

    def table(self) -> Table:
        """Return a value that lists every tensor; its repr is a table. No data are read."""
        return Table(tuple(self._row(name) for name in self._names))

    def _row(self, name: str) -> Row:
        group = self.groups.get(name)
        if group is None:
            info: TensorInfo = self._container.infos[name]
            dtype, shape = STORED_TYPES[info.dtype].torch_dtype, torch_shape(info.dtype, info.shape)
            return Row(name, "plain", shape, dtype, info.nbytes, info.dtype)
        nbytes = self.nbytes(name)
        kind, note = "dense", group.scheme
        if isinstance(group.target, (DenseOnly, Unreadable)):
            note = group.target.reason
            kind = "dense" if isinstance(group.target, DenseOnly) else "unreadable"
        else:
            kind = group.target.format
        return Row(name, kind, group.shape, group.dtype, nbytes, note)

    def _place(self, group: Group) -> Place:
        info = next(iter(group.roles.values()), None)
        return Place(info.file if info else self.path, group.name, self.layout)

    def _check_readable(self, group: Group) -> None:
        if isinstance(group.target, Unreadable):
            fix = "Leave the tensor out, or export it in another format"
            refuse(self._place(group), "the tensor must be readable", group.target.reason, fix)

    # ---- life time

    def close(self) -> None:
        """Release the files; tensors that were read stay valid."""
        self._container.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        count = f"{len(self)} tensors, {len(self.groups)} of them quantized"
        return f"Checkpoint({self.path!r}, layout={self.layout!r}, {count})"


@contextmanager
def _naming(place: Place) -> Iterator[None]:
    """Name the file, the tensor and the layout in errors that come from below."""
    try:
        yield
    except CheckpointError:
        raise
    except QTensorError as error:
        raise CheckpointError(f"{place}: {error}", *place) from error


def _json_files(container: Container) -> dict[str, Mapping[str, Any]]:
    """Return config.json and the other JSON files beside the container, by name."""
    files: dict[str, Mapping[str, Any]] = {}
    if container.folder is not None:
        for name in ("config.json", *_JSON_FILES):
            if os.path.lexists(os.path.join(container.folder, name)):
                path = path_inside(container.folder, name, container.path)
                files[name] = read_json(path)
    return files


def open_checkpoint(path: Path, layout: str | None = None, **options: object) -> Checkpoint:
    """Open a checkpoint; its tensors are read when they are asked for.

    Args:
        path: a file, a folder, an index of shards, or an open binary file.
        layout: name of the layout; by default it is recognised from the config and the names.
        **options: options of the layout; docs/checkpoints.md lists them.

    Returns:
        A lazy mapping from names to quantized or plain tensors; a context manager.

    Raises:
        CheckpointError: the checkpoint is not sound, or its layout is not read.
    """
    with _without_collections():
        container = open_container(path)
        try:
            return Checkpoint(container, layout, **options)
        except BaseException:
            container.close()
            raise


def open_with_factors(path: Path, layout: str | None = None, **options: object) -> Checkpoint:
    """Open a checkpoint so that each weight has all of its factors, as conversion needs it.

    Layouts differ from ``open_checkpoint`` where they store a factor that their own loader applies
    to the product, as GGUF does: here it is part of the weight.
    """
    checkpoint = open_checkpoint(path, layout, **options)
    needed = checkpoint.reader.conversion_options
    if not needed:
        return checkpoint
    checkpoint.close()
    return open_checkpoint(path, layout, **needed, **options)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Suspend Python's cyclic collector, which slows opening down.

    A header of 100,000 tensors is about a million new objects without a cycle, and the collector
    walks all of them again and again while they are made.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@in_memory
def load_state_dict(
    path: Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    rounding: Rounding = None,
    layout: str | None = None,
    **options: object,
) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint.

    Args:
        path: a file, a folder, an index of shards, or an open binary file.
        device: device of the tensors; by default they stay in the mapped file.
        dtype: nominal dtype of quantized weights, dtype of dense ones and of other plain
            floating-point tensors of 16 bits or more, except factors; with ``rounding="origin"``
            also of plain float8 tensors, which are casts. By default each keeps its own.
        rounding: None for quantized tensors, which decode by our arithmetic. ``"origin"`` for dense
            weights, decoded by the origin's own arithmetic to the last bit, and the tensors inside
            extra states of Transformer Engine.
        layout: name of the layout; by default it is recognised.
        **options: options of the layout, as ``open`` takes them.

    Raises:
        CheckpointError: the checkpoint is not sound, a tensor cannot be read, or torch has no such
            device.
    """
    check_rounding(rounding)
    _check_dtype(dtype)
    _check_device(device)
    state = {}
    with open_checkpoint(path, layout, **options) as checkpoint:
        for name in checkpoint:
            tensor = _load(checkpoint, name, dtype, rounding)
            state[name] = tensor if device is None else tensor.to(device)
        for name in checkpoint.inner_names() if rounding == "origin" else ():
            state[name] = checkpoint[name].to(device or "cpu")
    return state


def check_rounding(rounding: Rounding) -> None:
    """Refuse what is no rounding.

    Raises:
        CheckpointError: it is neither None nor "origin".
    """
    if rounding not in (None, "origin"):
        fix = 'Pass None or "origin"'
        refuse(Place(), "rounding is None or 'origin'", repr(rounding), fix)


def _check_dtype(dtype: object) -> None:
    legal = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    if dtype is not None and dtype not in legal:
        rule = f"dtype is None or one of {', '.join(map(str, legal))}"
        refuse(Place(), rule, repr(dtype), "Pass torch.bfloat16, for example")


def _check_device(device: torch.types.Device) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        refuse(Place(), "device is one that torch can use", repr(device), f"{error}", error)


def _load(
    checkpoint: Checkpoint, name: str, dtype: torch.dtype | None, rounding: Rounding
) -> Tensor:
    is_weight = name in checkpoint.groups
    if rounding == "origin" and is_weight:
        return checkpoint.dense(name, dtype)
    tensor = checkpoint[name]
    if dtype is None or checkpoint.is_factor(name):
        return tensor
    if isinstance(tensor, QuantizedTensor):
        return tensor.to(dtype)
    if is_weight:
        return checkpoint.dense(name, dtype)
    wide = tensor.is_floating_point() and tensor.dtype.itemsize > 1
    cast = rounding == "origin" and tensor.dtype in _FLOAT8
    return tensor.to(dtype) if wide or cast else tensor
