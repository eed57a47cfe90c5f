"""Read and write safetensors files.

The package ``safetensors`` is not used, for three reasons: checkpoints open with torch and numpy
alone; each problem of a file needs an error that names the file and the tensor; and a writer must
write tensors one by one, in bounded memory.

A file is: 8 bytes, the size n of the header as a little-endian integer; n bytes, a JSON object
(UTF-8, may end in spaces) of ``name: {"dtype", "shape", "data_offsets": [begin, end]}`` and
optionally ``"__metadata__": {text: text}``; the data. The offsets count from the end of the header,
and the tensors cover the data without gap or overlap.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import struct
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from qtensor.checkpoints.containers.base import (
    STORED_NAMES,
    STORED_TYPES,
    Mapped,
    Path,
    TensorInfo,
    checked_shape,
    stored_size,
    torch_shape,
)
from qtensor.checkpoints.errors import Place, refuse

MAX_HEADER = 100_000_000
"""Most bytes of a header, as in the package ``safetensors``."""
_AGAIN = "Download or export the file again"
_FIELDS = {"dtype", "shape", "data_offsets"}
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class SafetensorsFile:
    """Read one safetensors file, memory-mapped.

    Opening reads the header alone. A tensor shares the memory of the map, which is private: a write
    to the tensor does not change the file. The map lives as long as a tensor needs it.
    """

    kind = "safetensors"

    def __init__(self, file: Path) -> None:
        """Open a file.

        An open binary file is read from its beginning.
        """
        self.extra: Mapping[str, Any] = {}
        self.folder: str | None = None
        if isinstance(file, (str, os.PathLike)):
            self.path = os.fspath(file)
            self.folder = os.path.dirname(os.path.abspath(self.path))
        else:
            self.path = str(getattr(file, "name", "an open file"))
        self._map: Mapped | None = map_file(file, Place(self.path))
        self.headers: tuple[Mapping[str, str], ...] = ()
        self.infos: Mapping[str, TensorInfo] = {}
        self._load(file, self._map)

    def _load(self, file: Path, data: Mapped) -> None:
        """Read the header of the mapped file; containers with another header override it."""
        header, start = _header(data, self.path)
        self.headers = (_metadata(header.pop("__metadata__", {}), Place(self.path)),)
        self.infos = _infos(header, self.path, start, len(data))

    def _bytes_of(self, name: str) -> tuple[Mapped, TensorInfo]:
        """Return the mapped file and the info of a tensor in it, after checking that both exist."""
        place = Place(self.path, name)
        if self._map is None:
            refuse(place, "the file is open", "a closed file", "Open it again")
        if name not in self.infos:
            refuse(place, "the file has a tensor of this name", "none", "Choose one of .infos")
        return self._map, self.infos[name]

    def read(self, name: str) -> Tensor:
        """Return a tensor, which shares the memory of the map unless its bytes are not aligned."""
        data, info = self._bytes_of(name)
        dtype = STORED_TYPES[info.dtype].torch_dtype
        shape = torch_shape(info.dtype, info.shape)
        if info.nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        return elements(data, dtype, info.nbytes // dtype.itemsize, info.start).view(shape)

    def release(self, name: str) -> None:
        """Give the pages of a tensor back to the system; writes to the tensor are lost."""
        info = self.infos[name]
        release_pages(self._map, info.start, info.nbytes)

    def close(self) -> None:
        """Release the map; tensors that were read stay valid.

        The map is not unmapped here, because tensors may still use it: torch holds a reference to
        it, and Python unmaps it when the last tensor is gone.
        """
        self._map = None


def elements(data: Mapped, dtype: torch.dtype, count: int, start: int) -> Tensor:
    """Return elements of a mapped file, which share its memory unless they are not aligned."""
    if start % dtype.itemsize == 0:
        return torch.frombuffer(data, dtype=dtype, count=count, offset=start)
    size = count * dtype.itemsize
    return torch.frombuffer(data, dtype=torch.uint8, count=size, offset=start).clone().view(dtype)


def release_pages(data: Mapped | None, start: int, nbytes: int) -> None:
    """Give the whole pages of a part of a mapped file back to the system.

    Other memory than a map stays.
    """
    if not isinstance(data, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (start + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if size > 0:
        data.madvise(mmap.MADV_DONTNEED, first, size)


def map_file(file: Path, place: Place) -> Mapped:
    """Return the bytes of a file as a private, writable map, or as a bytearray without a map."""
    try:
        if isinstance(file, (str, os.PathLike)):
            with open(file, "rb") as opened:
                return _map_descriptor(opened.fileno())
        try:
            return _map_descriptor(file.fileno())
        except (AttributeError, OSError, ValueError):  # a file in memory
            file.seek(0)
            return bytearray(file.read())
    except (OSError, ValueError, AttributeError, TypeError) as error:
        refuse(place, "the file must be readable", error, "Check the path", error)


def _map_descriptor(descriptor: int) -> Mapped:
    if os.fstat(descriptor).st_size == 0:
        return bytearray()
    if hasattr(mmap, "MAP_PRIVATE"):
        # torch.frombuffer warns about read-only memory. Without MAP_NORESERVE, Linux refuses a
        # private map that is larger than the memory of the machine.
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        return mmap.mmap(descriptor, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)


def _header(data: Mapped, path: str) -> tuple[dict[str, Any], int]:
    """Return the header of a file and the offset of its data."""
    place = Place(path)
    if len(data) < 8:
        rule = "a safetensors file begins with the size of its header, 8 bytes"
        refuse(place, rule, f"a file of {len(data)} bytes", _AGAIN)
    (size,) = struct.unpack("<Q", data[:8])
    if size > min(MAX_HEADER, len(data) - 8):
        rule = f"the header has at most {MAX_HEADER} bytes and lies inside the file"
        refuse(place, rule, f"{size} bytes in a file of {len(data)} bytes", _AGAIN)
    text = bytes(data[8 : 8 + size])
    if not text.startswith(b"{"):
        refuse(place, "the header is a JSON object", repr(text[:20]), _AGAIN)
    header = parse_json(text, place)
    return header, 8 + size


def parse_json(text: bytes, place: Place, infinite: bool = False) -> dict[str, Any]:
    """Return a JSON object of a file; ``infinite`` also allows NaN and Infinity."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise ValueError(f"the name {twice!r} occurs twice")
        return values

    def refuse_constant(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    constant = None if infinite else refuse_constant
    try:
        value = json.loads(text.decode(), object_pairs_hook=unique, parse_constant=constant)
        if _SURROGATE.search(text):
            # An escape can stand for half a character, which is no text: no file has such a name.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        refuse(place, "the text is UTF-8 and JSON, and each name occurs once", error, _AGAIN, error)
    if not isinstance(value, dict):
        refuse(place, "the text is a JSON object", type(value).__name__, _AGAIN)
    return value


def _metadata(metadata: object, place: Place) -> dict[str, str]:
    if not isinstance(metadata, dict) or any(not isinstance(v, str) for v in metadata.values()):
        refuse(place, "__metadata__ maps texts to texts", repr(metadata), _AGAIN)
    return metadata


def _infos(header: dict[str, Any], path: str, start: int, size: int) -> dict[str, TensorInfo]:
    """Return the tensors of a header after checking that they cover the data exactly."""
    infos: dict[str, TensorInfo] = {}
    for name, entry in header.items():
        infos[name] = _info(name, entry, path, start, size)
    end = start
    for info in sorted(infos.values(), key=itemgetter(4, 5)):
        if info.start != end:
            rule = f"tensors follow each other without gap or overlap; byte {end - start} is next"
            refuse(Place(path, info.name), rule, f"begin {info.start - start}", _AGAIN)
        end += info.nbytes
    if end != size:
        rule = "the tensors end where the file ends"
        refuse(Place(path), rule, f"tensors of {end - start} bytes, data of {size - start}", _AGAIN)
    return infos


def _info(name: str, entry: object, path: str, start: int, size: int) -> TensorInfo:
    """Return the checked info of one entry of a header."""
    if type(entry) is not dict or entry.keys() != _FIELDS:
        got = sorted(entry) if isinstance(entry, dict) else repr(entry)
        refuse(Place(path, name), f"an entry has the keys {sorted(_FIELDS)}", got, _AGAIN)
    dtype, offsets = entry["dtype"], entry["data_offsets"]
    if type(dtype) is not str or dtype not in STORED_TYPES:
        rule = f"the dtype is one of {', '.join(STORED_TYPES)}"
        refuse(Place(path, name), rule, repr(dtype), "Convert the tensor where the file was made")
    sizes = checked_shape(entry["shape"], path, name)
    begin, end = offsets if type(offsets) is list and len(offsets) == 2 else (None, None)
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end <= size - start:
        rule = f"data_offsets are [begin, end] inside the data of {size - start} bytes"
        refuse(Place(path, name), rule, repr(offsets), _AGAIN)
    bits = stored_size(dtype, sizes)
    if bits != 8 * (end - begin) or (dtype == "F4" and (not sizes or sizes[-1] % 2)):
        rule = f"{dtype} of shape {list(sizes)} has {bits / 8:g} whole bytes"
        refuse(Place(path, name), rule, f"{end - begin} bytes", _AGAIN)
    return TensorInfo(name, dtype, sizes, path, start + begin, end - begin)


# ---- writing


class TensorSpec(NamedTuple):
    """Describe a tensor that will be written: name, torch dtype and torch shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return the number of bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class SafetensorsWriter:
    """Write a safetensors file: the header at once, then tensor by tensor in any order.

    The file has a temporary name until ``close``, which checks that every tensor was written, then
    syncs and renames the file. Used as a context manager, an exception removes the temporary file
    and leaves an older file of the same name as it was.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        specs: Iterable[TensorSpec],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Write the header to a temporary file beside ``path`` and reserve the space.

        The file holds wide dtypes first; every tensor is then aligned.
        """
        self.path = os.path.abspath(path)
        self._offsets: dict[str, tuple[int, TensorSpec]] = {}
        header = self._plan(list(specs), dict(metadata or {"format": "pt"}))
        self._missing = set(self._offsets)
        self._parts: dict[str, int] = {}
        """Name -> bytes that ``write_part`` wrote."""
        self._lock = threading.Lock()
        folder, name = os.path.split(self.path)
        try:
            self._file, self.temporary = tempfile.mkstemp(".tmp", f".{name}.", folder)
        except OSError as error:
            refuse(Place(self.path), "the folder must be writable", error, "Check it", error)
        with self._removing():
            self._put(header, 0)
            if self._size and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file, 0, self._size)

    def _plan(self, specs: list[TensorSpec], metadata: dict[str, str]) -> bytes:
        """Compute the offset of every tensor and return the header."""
        entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
        end, offsets = 0, {}
        for spec in sorted(specs, key=lambda spec: -spec.dtype.itemsize):
            place = Place(self.path, spec.name)
            if spec.name == "__metadata__":
                rule = "a safetensors header has its texts under this name"
                refuse(place, rule, "a tensor of the name", "Rename the tensor")
            if spec.name in entries:
                refuse(place, "names are unique", "the name twice", "Rename one of the tensors")
            if spec.dtype not in STORED_NAMES:
                rule = f"safetensors holds {', '.join(STORED_TYPES)}"
                refuse(place, rule, spec.dtype, "Convert the tensor")
            shape = list(spec.shape)
            if spec.dtype == torch.float4_e2m1fn_x2:
                shape[-1] *= 2
            entries[spec.name] = {
                "dtype": STORED_NAMES[spec.dtype],
                "shape": shape,
                "data_offsets": [end, end + spec.nbytes],
            }
            offsets[spec.name] = (end, spec)
            end += spec.nbytes
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > MAX_HEADER:
            rule = f"the header has at most {MAX_HEADER} bytes"
            refuse(Place(self.path), rule, len(text), "Write more, smaller shards")
        start = 8 + len(text)
        self._offsets = {name: (start + offset, spec) for name, (offset, spec) in offsets.items()}
        self._size = start + end
        return struct.pack("<Q", len(text)) + text

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor at its place."""
        place = Place(self.path, name)
        if name not in self._missing:
            refuse(place, "each tensor of the header is written once", name, "Fix the specs")
        offset, spec = self._offsets[name]
        if tensor.dtype != spec.dtype or tuple(tensor.shape) != tuple(spec.shape):
            rule = f"the header says {spec.dtype} of shape {tuple(spec.shape)}"
            refuse(place, rule, f"{tensor.dtype} of {tuple(tensor.shape)}", "Fix the specs")
        data = _raw(tensor.detach().cpu())
        self._store(data, offset)
        self._missing.discard(name)

    def write_part(self, name: str, first: int, part: Tensor) -> None:
        """Write some elements of a tensor; threads may write different parts at once.

        ``first`` is the index of the first element in memory; ``part`` has the dtype of the spec
        and any shape. The tensor is complete when parts of its size were written.
        """
        offset, spec = self._offsets[name]
        data = _raw(part.detach())
        begin = first * spec.dtype.itemsize
        with self._lock:
            done = self._parts[name] = self._parts.get(name, 0) + data.numel()
            fits = max(begin + data.numel(), done) <= spec.nbytes and name in self._missing
            if done == spec.nbytes:
                self._missing.discard(name)
        if part.dtype != spec.dtype or not fits:
            rule = f"the header says {spec.dtype} of shape {tuple(spec.shape)}"
            got = f"{part.numel()} elements of {part.dtype} at {first}"
            refuse(Place(self.path, name), rule, got, "Fix the specs")
        self._store(data, offset + begin)

    def _store(self, data: Tensor, offset: int) -> None:
        try:
            self._put(data.numpy().data, offset)
        except OSError as error:
            self._fail(error)

    def _put(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        while view:
            count = os.pwrite(self._file, view, offset)
            view, offset = view[count:], offset + count

    @contextmanager
    def _removing(self) -> Iterator[None]:
        """Remove the temporary file if the system refuses something."""
        try:
            yield
        except OSError as error:
            self.abort()
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        fix = "Free space on the disk, or choose another folder"
        refuse(Place(self.path), "the file must be writable", error, fix, error)

    def close(self) -> None:
        """Sync the file and give it its final name."""
        self.finish()
        self.publish()

    def finish(self) -> None:
        """Sync the file under its temporary name; ``publish`` renames it later."""
        if self._missing:
            got = f"{len(self._missing)} missing, for example {min(self._missing)!r}"
            self.abort()
            refuse(Place(self.path), "every tensor of the header is written", got, "Write them")
        with self._removing():
            os.fsync(self._file)
        os.close(self._file)
        self._file = -1

    def publish(self) -> None:
        """Rename the finished file to its final name, replacing an older file."""
        with self._removing():
            os.replace(self.temporary, self.path)
            sync_folder(os.path.dirname(self.path))

    def abort(self) -> None:
        """Remove the temporary file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if os.path.exists(self.temporary):
            os.unlink(self.temporary)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


def sync_folder(folder: str) -> None:
    """Make the names in a folder durable, where the system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _raw(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor in row-major order."""
    whole = tensor.contiguous()
    # A dim of size one may keep any stride, which view(dtype) refuses.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)
