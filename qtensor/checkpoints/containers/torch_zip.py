"""Read the files of ``torch.save``, memory-mapped, without executing anything that they name.

Such a file is a zip with one folder: ``data.pkl`` is a pickle of a state dict, and ``data/<key>``
holds the bytes of each storage. inert_pickle.py reads the pickle. Tensors share the memory of the
mapped entries. A tensor subclass is a ``Call`` in ``extra["records"]``, in which each tensor is the
``TensorInfo`` of a stored tensor; its name is that of the weight, a dot, and the index of the
argument or the name of the attribute.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from qtensor.checkpoints.containers.base import STORED_NAMES, TensorInfo
from qtensor.checkpoints.containers.inert_pickle import MAX_PICKLE, InertUnpickler, load_legacy
from qtensor.checkpoints.containers.safetensors import map_file, release_pages
from qtensor.checkpoints.containers.torch_records import (
    BYTES_IO,
    Budget,
    Call,
    StorageRecord,
    TensorRecord,
)
from qtensor.checkpoints.containers.zip_entries import Entry, entry_bytes, zip_entries
from qtensor.checkpoints.errors import Place, refuse

LEGACY_START = b"\x80\x02\x8a\nl\xfc\x9cF"
"""First bytes of the streams that torch.save wrote before 1.6."""
ZIP_START = b"PK\x03\x04"
MAX_NAME = 4096
MAX_NESTING = 32
MAX_VALUES = 1_000_000
"""Most values of a state dict."""
_AGAIN = "Save the state dict again"


class _Stored(NamedTuple):
    """Hold a stored tensor: its record, or the bytes of an ``_extra_state``."""

    info: TensorInfo
    record: TensorRecord | bytes


class StateDict:
    """Flatten the value of a pickle into named tensors.

    Names of nested dicts are joined by dots. Values that are neither tensors nor records, such as
    the number of a step, are left out.
    """

    def __init__(self, value: Any, path: str, entries: Mapping[str, Entry]) -> None:
        """Walk over a value.

        Args:
            value: the value of the pickle; a dict.
            path: path of the file, for errors and infos.
            entries: entry of each storage by its key; empty for legacy streams.

        Raises:
            CheckpointError: it is no dict, a name occurs twice, or there are too many values.
        """
        self._path, self._entries = path, entries
        self.stored: dict[str, _Stored] = {}
        self.records: dict[str, Call] = {}
        if type(value) is not dict:
            refuse(Place(path), "a torch file holds a state dict", type(value).__name__, _AGAIN)
        for name, leaf in self._leaves(value):
            self._add(name, leaf)

    def _leaves(self, root: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
        """Yield (name, value) for each value that is no dict, list or tuple, in order."""
        waiting: list[tuple[str, Any, int]] = [("", root, 0)]
        count = 0
        while waiting:
            name, value, depth = waiting.pop()
            if type(value) not in (dict, list, tuple):
                yield name, value
                continue
            items = list(value.items() if type(value) is dict else enumerate(value))
            count += len(items)
            if count > MAX_VALUES or depth > MAX_NESTING:
                rule = f"a state dict has {MAX_VALUES:,} values and {MAX_NESTING} levels at most"
                refuse(Place(self._path), rule, "more", _AGAIN)
            for key, child in reversed(items):
                full = f"{name}.{key}" if name else str(key)
                if len(full) > MAX_NAME:
                    rule = f"a name has at most {MAX_NAME} characters"
                    refuse(Place(self._path), rule, f"{len(full)}", _AGAIN)
                waiting.append((full, child, depth + 1))

    def _add(self, name: str, leaf: Any) -> None:
        if isinstance(leaf, TensorRecord):
            self._store(name, leaf)
        elif type(leaf) is Call and leaf.function == BYTES_IO:
            held = leaf.state[0] if type(leaf.state) is tuple and leaf.state else b""
            held = leaf.args[0] if leaf.args else held
            self._store(name, held if type(held) is bytes else b"")
        elif type(leaf) is bytes and name.endswith("_extra_state"):
            self._store(name, leaf)
        elif type(leaf) is Call:
            if name in self.records:
                refuse(Place(self._path, name), "each name occurs once", "two of them", _AGAIN)
            args = tuple(self._inner(f"{name}.{i}", arg) for i, arg in enumerate(leaf.args))
            state = leaf.state
            if type(state) is dict:
                state = {str(k): self._inner(f"{name}.{k}", v) for k, v in state.items()}
            self.records[name] = Call(leaf.function, args, state)

    def _inner(self, name: str, value: Any) -> Any:
        """Return the info of a tensor inside a record, or another value as it is."""
        return self._store(name, value) if isinstance(value, TensorRecord) else value

    def _store(self, name: str, record: TensorRecord | bytes) -> TensorInfo:
        if name in self.stored:
            refuse(Place(self._path, name), "each name occurs once", "two of them", _AGAIN)
        if isinstance(record, bytes):
            info = TensorInfo(name, "U8", (len(record),), self._path, 0, len(record))
        else:
            info = self._info(name, record)
        self.stored[name] = _Stored(info, record)
        return info

    def _info(self, name: str, record: TensorRecord) -> TensorInfo:
        start = record.offset * record.dtype.itemsize
        if record.storage.data is None:
            start += self._entry(name, record.storage).start
        shape = record.shape
        if record.dtype == torch.float4_e2m1fn_x2 and shape:
            shape = (*shape[:-1], 2 * shape[-1])
        count = 1
        for n in record.shape:
            count *= n
        nbytes = count * record.dtype.itemsize
        return TensorInfo(name, STORED_NAMES[record.dtype], shape, self._path, start, nbytes)

    def _entry(self, name: str, storage: StorageRecord) -> Entry:
        """Return the entry of a storage after checking its size."""
        entry = self._entries.get(storage.key)
        if entry is None or entry.size != storage.nbytes:
            rule = f"storage {storage.key!r} has an entry of {storage.nbytes} bytes"
            got = "none" if entry is None else f"one of {entry.size} bytes"
            refuse(Place(self._path, name), rule, got, "Download or save the file again")
        return entry

    @property
    def strides(self) -> dict[str, tuple[int, ...]]:
        """Return the strides of the tensors that are not contiguous, by name."""
        return {
            name: record.strides
            for name, (_, record) in self.stored.items()
            if isinstance(record, TensorRecord) and not _is_contiguous(record)
        }


def _is_contiguous(record: TensorRecord) -> bool:
    expected = 1
    for size, stride in zip(reversed(record.shape), reversed(record.strides), strict=True):
        if size == 0:
            return True
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class TorchZip:
    """Read one file of ``torch.save``; the container of layouts torchao and Transformer Engine.

    Opening reads the directory of the zip and the pickle. The map is private, as that of a
    safetensors file. ``TensorInfo.start`` of a tensor in a compressed entry is that of the entry,
    and of an ``_extra_state`` in the pickle 0.
    """

    kind = "torch"

    def __init__(self, file: str | os.PathLike[str] | IO[bytes]) -> None:
        """Open a file.

        Args:
            file: a path, or an open binary file, which is read from its beginning.

        Raises:
            CheckpointError: the file is damaged, or its pickle names anything but tensors.
        """
        self.headers: tuple[Mapping[str, str], ...] = ()
        self.folder: str | None = None
        if isinstance(file, (str, os.PathLike)):
            self.path = os.fspath(file)
            self.folder = os.path.dirname(os.path.abspath(self.path))
        else:
            self.path = str(getattr(file, "name", "an open file"))
        place = Place(self.path)
        self._map: Any = map_file(file, place)
        entries = zip_entries(self._map, self.path)
        root = self._root(entries)
        self._check_order(entries.get(f"{root}/byteorder"))
        pickled = entries[f"{root}/data.pkl"]
        if pickled.size > MAX_PICKLE:
            refuse(place, f"a pickle has at most {MAX_PICKLE:,} bytes", pickled.size, _AGAIN)
        data = memoryview(entry_bytes(self._map, pickled, self.path))
        start = f"{root}/data/"
        self._entries = {k[len(start) :]: e for k, e in entries.items() if k.startswith(start)}
        value = InertUnpickler(data, place, Budget(len(data))).load()
        state = StateDict(value, self.path, self._entries)
        self._stored = state.stored
        self.infos: Mapping[str, TensorInfo] = {n: s.info for n, s in state.stored.items()}
        self.extra: Mapping[str, Any] = {"records": state.records, "strides": state.strides}
        self._inflated: tuple[str, bytearray] = ("", bytearray())

    def _root(self, entries: Mapping[str, Entry]) -> str:
        """Return the folder that holds everything."""
        roots = [name[: -len("/data.pkl")] for name in entries if name.endswith("/data.pkl")]
        if len(roots) != 1 or "/" in roots[0]:
            rule = "a zip of torch.save has one */data.pkl"
            refuse(Place(self.path), rule, f"{len(roots)} of them in {len(entries)} files", _AGAIN)
        return roots[0]

    def _check_order(self, entry: Entry | None) -> None:
        if entry is not None and entry.size < 100:
            order = entry_bytes(self._map, entry, self.path)
            if order.strip() != b"little":
                rule = "the numbers of a torch file are little-endian"
                refuse(Place(self.path), rule, repr(order), "Save it on a little-endian machine")

    def read(self, name: str) -> Tensor:
        """Return a tensor, which shares the memory of the map where its entry is not compressed.

        Raises:
            CheckpointError: no such tensor, the file is closed, or a compressed entry is damaged.
        """
        if self._map is None:
            refuse(Place(self.path, name), "the file is open", "a closed file", "Open it again")
        if name not in self._stored:
            place = Place(self.path, name)
            refuse(place, "the file has a tensor of this name", "none", "Choose one of .infos")
        record = self._stored[name].record
        if isinstance(record, bytes):
            return _of_bytes(record)
        entry = self._entries[record.storage.key]
        if not entry.compressed:
            return _tensor(record, self._map, entry.start)
        if self._inflated[0] != entry.name:
            self._inflated = (entry.name, bytearray(entry_bytes(self._map, entry, self.path)))
        return _tensor(record, self._inflated[1], 0)

    def release(self, name: str) -> None:
        """Give the memory of a tensor's storage back; writes to tensors of the storage are lost."""
        record = self._stored[name].record
        if isinstance(record, bytes):
            return
        entry = self._entries[record.storage.key]
        release_pages(self._map, entry.start, entry.stored)
        if self._inflated[0] == entry.name:
            self._inflated = ("", bytearray())

    def close(self) -> None:
        """Release the map; tensors that were read stay valid."""
        self._map = None


def _of_bytes(data: bytes) -> Tensor:
    """Return uint8 (n,) with a copy of the bytes."""
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _tensor(record: TensorRecord, data: Any, start: int) -> Tensor:
    """Return the tensor of a record.

    Args:
        record: lies inside its storage.
        data: a writable buffer.
        start: offset of the storage in ``data``.
    """
    dtype, shape = record.dtype, record.shape
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, record.strides, strict=True))
    start += record.offset * dtype.itemsize
    if start % dtype.itemsize == 0:
        flat = torch.frombuffer(data, dtype=dtype, count=extent, offset=start)
    else:
        size = extent * dtype.itemsize
        raw = torch.frombuffer(data, dtype=torch.uint8, count=size, offset=start)
        flat = raw.clone().view(dtype)
    return flat.as_strided(shape, record.strides)


def pickled_tensors(data: bytes, place: Place) -> dict[str, Tensor]:
    """Return the tensors of a pickle that lies in a tensor, such as an ``_extra_state``.

    Args:
        data: a pickle, a legacy stream or a zip of torch.save; empty bytes hold nothing.
        place: file and tensor, for errors.

    Raises:
        CheckpointError: it is damaged, or names anything but tensors; nothing is executed.
    """
    if not data:
        return {}
    if data.startswith(ZIP_START):
        inner = TorchZip(io.BytesIO(data))
        return {name: inner.read(name).clone() for name in inner.infos}
    view, budget = memoryview(data), Budget(len(data))
    if data.startswith(LEGACY_START):
        value = load_legacy(view, place, budget)
    else:
        value = InertUnpickler(view, place, budget).load()
    stored = StateDict(value, place.file, {}).stored
    found = {}
    for name, (_, record) in stored.items():
        if isinstance(record, TensorRecord) and record.storage.data is not None:
            found[name] = _tensor(record, bytearray(record.storage.data), 0)
    return found
