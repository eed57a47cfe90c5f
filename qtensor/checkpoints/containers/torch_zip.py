"""Read the files of ``torch.save``, memory-mapped, without executing anything that they name.

Such a file is a zip with one folder: ``data.pkl`` is a pickle of a state dict, and ``data/<key>``
holds the bytes of each storage. torch_pickle.py reads the pickle. Tensors share the memory of the
mapped entries. A tensor subclass is a ``Call`` in ``extra["records"]``, in which each tensor is the
``TensorInfo`` of a stored tensor; its name is that of the weight, a dot, and the index of the
argument or the name of the attribute.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtensor.checkpoints.containers.base import STORED_NAMES, Mapped, Path, TensorInfo
from qtensor.checkpoints.containers.safetensors import SafetensorsFile, elements, release_pages
from qtensor.checkpoints.containers.torch_pickle import (
    BYTES_IO,
    MAX_PICKLE,
    Call,
    InertUnpickler,
    StorageRecord,
    TensorRecord,
    load_legacy,
)
from qtensor.checkpoints.errors import CheckpointError, Place, refuse

LEGACY_START = b"\x80\x02\x8a\nl\xfc\x9cF"
"""First bytes of the streams that torch.save wrote before 1.6."""
ZIP_START = b"PK\x03\x04"
MAX_NAME = 4096
MAX_NESTING = 32
MAX_VALUES = 1_000_000
"""Most values of a state dict."""
_AGAIN = "Save the state dict again"
_DOWNLOAD = "Download the file again, or save it again with torch.save"


class Entry(NamedTuple):
    """Say where the bytes of an entry of a zip lie in the file."""

    start: int
    size: int


def zip_entries(file: Path, data: Mapped, path: str) -> dict[str, Entry]:
    """Return the entries of a zip by name; nothing is extracted."""
    found: dict[str, Entry] = {}
    try:
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                archive.open(info).close()  # compares the entry with the header before its bytes
                lengths = struct.unpack_from("<2H", data, info.header_offset + 26)
                start, size = info.header_offset + 30 + sum(lengths), info.file_size
                parts = info.filename.removesuffix("/").split("/")
                rules = {
                    "the names of a zip are plain paths inside it": (
                        {"", ".", ".."}.isdisjoint(parts) and {"\\", ":"}.isdisjoint(info.filename)
                    ),
                    "each name of a zip occurs once": info.filename not in found,
                    "the entries of a torch file are not compressed": info.compress_type == 0,
                    "an entry has one size and lies inside the file": (
                        info.compress_size == size and start + size <= len(data)
                    ),
                }
                for rule, holds in rules.items():
                    if not holds:
                        refuse(Place(path, info.filename), rule, info, _DOWNLOAD)
                found[info.filename] = Entry(start, size)
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001 a damaged zip can raise any of them
        refuse(Place(path), "a zip of torch.save is sound", error, _DOWNLOAD, error)
    return found


def _leaves(root: object, place: Place) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for each value that is not a dict, list or tuple, in order.

    Names of nested dicts are joined by dots.
    """
    if type(root) is not dict:
        refuse(place, "a torch file holds a state dict", type(root).__name__, _AGAIN)
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
            refuse(place, rule, "more", _AGAIN)
        for key, child in reversed(items):
            full = f"{name}.{key}" if name else str(key)
            if len(full) > MAX_NAME:
                rule = f"a name has at most {MAX_NAME} characters"
                refuse(place, rule, f"{len(full)}", _AGAIN)
            waiting.append((full, child, depth + 1))


class StateDict:
    """Hold the tensors of a state dict by name, and what the pickle records of subclasses.

    Values that are neither tensors nor records, such as the number of a step, are left out.
    """

    def __init__(self, value: object, path: str, entries: Mapping[str, Entry]) -> None:
        """Walk over a value.

        ``entries`` has the entry of each storage by its key; it is empty for legacy streams.
        """
        self._path, self._entries = path, entries
        self.infos: dict[str, TensorInfo] = {}
        self.tensors: dict[str, TensorRecord] = {}
        self.bytes: dict[str, bytes] = {}
        """The extra states, which lie in the pickle."""
        self.records: dict[str, Call] = {}
        for name, leaf in _leaves(value, Place(path)):
            self._add(name, leaf)

    def _add(self, name: str, leaf: object) -> None:
        if type(leaf) is TensorRecord:
            self._tensor(name, leaf)
        elif type(leaf) is bytes and name.endswith("_extra_state"):
            self._extra(name, leaf)
        elif type(leaf) is Call and leaf.function == BYTES_IO:
            held = leaf.args or (leaf.state if type(leaf.state) is tuple else ())
            self._extra(name, held[0] if held and type(held[0]) is bytes else b"")
        elif type(leaf) is Call:
            if name in self.records:
                self._refuse_second(name)
            args = tuple(self._inner(f"{name}.{i}", arg) for i, arg in enumerate(leaf.args))
            state = leaf.state
            if type(state) is dict:
                state = {str(k): self._inner(f"{name}.{k}", v) for k, v in state.items()}
            self.records[name] = Call(leaf.function, args, state)

    def _inner(self, name: str, value: object) -> Any:
        """Return the info of a tensor inside a record, or another value as it is."""
        return self._tensor(name, value) if type(value) is TensorRecord else value

    def _extra(self, name: str, data: bytes) -> None:
        self._store(TensorInfo(name, "U8", (len(data),), self._path, 0, len(data)))
        self.bytes[name] = data

    def _tensor(self, name: str, record: TensorRecord) -> TensorInfo:
        start = record.offset * record.dtype.itemsize
        if record.storage.stream is None:
            start += self._entry(name, record.storage).start
        shape = record.shape
        if record.dtype == torch.float4_e2m1fn_x2 and shape:
            shape = (*shape[:-1], 2 * shape[-1])
        nbytes = math.prod(record.shape) * record.dtype.itemsize
        info = TensorInfo(name, STORED_NAMES[record.dtype], shape, self._path, start, nbytes)
        self.tensors[name] = record
        return self._store(info)

    def _store(self, info: TensorInfo) -> TensorInfo:
        if info.name in self.infos:
            self._refuse_second(info.name)
        self.infos[info.name] = info
        return info

    def _refuse_second(self, name: str) -> None:
        refuse(Place(self._path, name), "each name occurs once", "two of them", _AGAIN)

    def _entry(self, name: str, storage: StorageRecord) -> Entry:
        """Return the entry of a storage after checking its size."""
        entry = self._entries.get(storage.key)
        if entry is None or entry.size != storage.nbytes:
            rule = f"storage {storage.key!r} has an entry of {storage.nbytes} bytes"
            got = "none" if entry is None else f"one of {entry.size} bytes"
            refuse(Place(self._path, name), rule, got, _DOWNLOAD)
        return entry

    @property
    def strides(self) -> dict[str, tuple[int, ...]]:
        """Return the strides of the tensors that are not contiguous, by name."""
        return {
            name: record.strides
            for name, record in self.tensors.items()
            if not torch.empty_strided(
                record.shape, record.strides, dtype=record.dtype, device="meta"
            ).is_contiguous()
        }


class TorchZip(SafetensorsFile):
    """Read one file of ``torch.save``; the container of layouts torchao and Transformer Engine.

    Opening reads the directory of the zip and the pickle. The map is private, as for
    safetensors files. ``TensorInfo.start`` of an ``_extra_state``, which lies in the pickle, is 0.
    """

    kind = "torch"

    def _load(self, file: Path, data: Mapped) -> None:
        """Read the directory of the zip and the pickle, which may name only tensors."""
        place = Place(self.path)
        entries = zip_entries(file, data, self.path)
        roots = [name.removesuffix("/data.pkl") for name in entries if name.endswith("/data.pkl")]
        if len(roots) != 1 or "/" in roots[0]:
            rule = "a zip of torch.save has one */data.pkl"
            refuse(place, rule, f"{len(roots)} of them in {len(entries)} files", _AGAIN)
        order = entries.get(f"{roots[0]}/byteorder")
        if order is not None and _contents(data, order).strip() != b"little":
            rule = "the numbers of a torch file are little-endian"
            refuse(place, rule, "others", "Save it on a little-endian machine")
        start = f"{roots[0]}/data/"
        self._entries = {k[len(start) :]: e for k, e in entries.items() if k.startswith(start)}
        pickled = _contents(data, entries[f"{roots[0]}/data.pkl"])
        self._state = StateDict(InertUnpickler(pickled, place).value(), self.path, self._entries)
        self.infos = self._state.infos
        self.extra = {"records": self._state.records, "strides": self._state.strides}

    def read(self, name: str) -> Tensor:
        """Return a tensor, which shares the memory of the map."""
        data, _ = self._bytes_of(name)
        if name in self._state.bytes:
            return _tensor_of_bytes(self._state.bytes[name])
        record = self._state.tensors[name]
        return _tensor(record, data, self._entries[record.storage.key].start)

    def release(self, name: str) -> None:
        """Give the memory of a tensor's storage back; writes to tensors of the storage are lost."""
        if name in self._state.tensors:
            release_pages(self._map, *self._entries[self._state.tensors[name].storage.key])


def _contents(data: Mapped, entry: Entry) -> bytes:
    return bytes(data[entry.start : entry.start + min(entry.size, MAX_PICKLE + 1)])


def _tensor_of_bytes(data: bytes) -> Tensor:
    """Return uint8 (n,) with a copy of the bytes."""
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _tensor(record: TensorRecord, data: Mapped, start: int) -> Tensor:
    """Return the tensor of a record.

    ``start`` is the offset of its storage in ``data``, a writable buffer.
    """
    dtype, shape = record.dtype, record.shape
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, record.strides, strict=True))
    flat = elements(data, dtype, extent, start + record.offset * dtype.itemsize)
    return flat.as_strided(shape, record.strides)


def pickled_tensors(data: bytes, place: Place) -> dict[str, Tensor]:
    """Return the tensors of a pickle that lies in a tensor, such as an ``_extra_state``.

    The pickle may be a legacy stream or a zip; empty bytes hold nothing.
    """
    if not data:
        return {}
    if data.startswith(ZIP_START):
        inner = TorchZip(io.BytesIO(data))
        return {name: inner.read(name).clone() for name in inner.infos}
    if data.startswith(LEGACY_START):
        value = load_legacy(data, place)
    else:
        value = InertUnpickler(data, place).value()
    tensors = StateDict(value, place.file, {}).tensors
    return {
        name: _tensor(record, bytearray(record.storage.stream[record.storage.key]), 0)
        for name, record in tensors.items()
        if record.storage.stream is not None
    }
