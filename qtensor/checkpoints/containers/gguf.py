"""Read and write GGUF files, versions 2 and 3, little-endian.

The package ``gguf`` is not used. Its reader trusts the counts of the header: an array that claims
2^40 elements makes it loop and allocate without end, products of dims wrap around, and data that
end early give shorter arrays. Here a header is read in bounded time and memory, and each problem
is an error that names the file and the tensor. The tests compare with the package.

A file is: ``GGUF``, the version (U32), the number of tensors and of key-values (U64); key-values;
for each tensor its name, its dims with the fastest first, its type and the offset of its data;
padding to ``general.alignment``; the data.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

from qtensor.checkpoints.containers.base import Mapped, Path, TensorInfo, checked_shape, stored_size
from qtensor.checkpoints.containers.safetensors import (
    SafetensorsFile,
    SafetensorsWriter,
    TensorSpec,
)
from qtensor.checkpoints.errors import Place, refuse

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER = 200_000_000
"""Most bytes of a header. Those of large vocabularies have about 20 MB."""
MAX_ITEMS = 2_000_000
"""Most tensors, key-values and texts in arrays together."""
MAX_DIMS, MAX_NAME = 4, 63
"""Most dims, and most bytes of a tensor's name, that llama.cpp reads."""
ALIGNMENT = 32
MAX_PADDING = 65536
"""Most bytes between header and data that are looked at."""
_AGAIN = "Download or export the file again"
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class GGMLType(NamedTuple):
    """Describe a tensor type: elements and bytes of a block, and the dtype of plain types."""

    name: str
    block: int
    nbytes: int
    stored: str = ""


TYPES: dict[int, GGMLType] = {
    0: GGMLType("F32", 1, 4, "F32"),
    1: GGMLType("F16", 1, 2, "F16"),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    9: GGMLType("Q8_1", 32, 40),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    15: GGMLType("Q8_K", 256, 292),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: GGMLType("I8", 1, 1, "I8"),
    25: GGMLType("I16", 1, 2, "I16"),
    26: GGMLType("I32", 1, 4, "I32"),
    27: GGMLType("I64", 1, 8, "I64"),
    28: GGMLType("F64", 1, 8, "F64"),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2, "BF16"),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
    40: GGMLType("NVFP4", 64, 36),
    41: GGMLType("Q1_0", 128, 18),
}
"""Type numbers of ggml. A type that is not listed here has an unknown size."""
NUMBERS = {kind.name: number for number, kind in TYPES.items()}

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
"""Type of a key-value -> how it is packed."""
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64 = 4, 5, 6, 7, 8, 9, 10, 11


class GGUFValue(NamedTuple):
    """Hold a key-value as it is stored; ``decode`` gives the number, text or list."""

    type: int
    data: bytes

    def decode(self) -> Any:
        """Return the value: a number, a text (undecodable bytes are replaced), or a list."""
        return _decode(self.type, memoryview(self.data), 0)[0]


class GGUFFile(SafetensorsFile):
    """Read one GGUF file, memory-mapped.

    A quantized tensor is stored as U8 of shape (*leading, blocks, bytes of a block). ``extra`` has
    ``types`` and ``shapes``, the name of the type and the logical shape of each tensor, and
    ``key_values``, a ``GGUFValue`` for each key.
    """

    kind = "gguf"

    def _load(self, file: Path, data: Mapped) -> None:
        """Read the header of the mapped file."""
        header = _Header(data, self.path)
        count, pairs = header.counts()
        values = header.key_values(pairs)
        entries = [header.tensor() for _ in range(count)]
        alignment = _alignment(values, self.path)
        start = -(-header.at // alignment) * alignment
        _check_padding(bytes(data[max(header.at, start - MAX_PADDING) : start]), self.path)
        infos, types, shapes = {}, {}, {}
        for name, shape, number, offset in entries:
            place = Place(self.path, name)
            if name in infos:
                refuse(place, "each name occurs once", "the name twice", _AGAIN)
            if offset % alignment:
                refuse(place, f"offsets are multiples of {alignment}", offset, _AGAIN)
            infos[name] = _info(name, shape, number, self.path, start + offset)
            if infos[name].start + infos[name].nbytes > len(data):
                rule = f"the data lie inside the file of {len(data)} bytes"
                got = f"{infos[name].nbytes} bytes at {infos[name].start}"
                refuse(place, rule, got, "The file was cut off: download it again")
            types[name] = TYPES[number].name if number in TYPES else f"number {number}"
            shapes[name] = shape
        _check_overlap(infos)
        self.headers = ()
        self.infos = infos
        self.extra = {"types": types, "shapes": shapes, "key_values": values}


def _check_padding(padding: bytes, path: str) -> None:
    """Refuse other bytes than zeros between header and data.

    Where bytes of a header are lost, the data lie before the place that the header gives.
    """
    if any(padding):
        rule = "the bytes between the header and the data are zeros"
        refuse(Place(path), rule, repr(padding[:80]), _AGAIN)


class _Header:
    """Read the header of a file from its beginning; ``at`` is the offset of the next byte."""

    def __init__(self, data: Mapped, path: str) -> None:
        self._data, self._path = memoryview(data), path
        self._end = min(len(data), MAX_HEADER)
        self._items = 0
        self.at = 0

    def _fail(self, rule: str, got: object, name: str = "") -> None:
        refuse(Place(self._path, name), rule, got, _AGAIN)

    def _move(self, size: int) -> int:
        """Skip the next bytes and return the offset at which they begin."""
        at = self.at
        if size > self._end - at:
            rule = f"the header lies inside the file and has at most {MAX_HEADER} bytes"
            self._fail(rule, f"{size} bytes at {at} in a file of {len(self._data)} bytes")
        self.at = at + size
        return at

    def _take(self, size: int) -> bytes:
        at = self._move(size)
        return bytes(self._data[at : at + size])

    def _number(self, form: struct.Struct = _U64) -> Any:
        return form.unpack_from(self._data, self._move(form.size))[0]

    def _count(self, number: int, smallest: int, what: str) -> None:
        """Refuse a number of items that the rest of the header cannot hold."""
        self._items += number
        left = self._end - self.at
        if number * smallest > left or self._items > MAX_ITEMS:
            rule = f"the header has at most {MAX_ITEMS} items, which lie inside the file"
            self._fail(rule, f"{number} {what} in {left} bytes")

    def _text(self, what: str) -> str:
        size = self._number()
        data = self._take(size)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            refuse(Place(self._path), f"{what} is UTF-8", repr(data[:80]), _AGAIN, error)

    def counts(self) -> tuple[int, int]:
        """Return the numbers of tensors and of key-values."""
        if self._take(4) != MAGIC:
            self._fail("a GGUF file begins with GGUF", repr(bytes(self._data[:4])))
        version = self._number(_U32)
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            got = "a big-endian file" if swapped else f"version {version}"
            rule = "the files that are read have version 2 or 3 and are little-endian"
            refuse(
                Place(self._path), rule, got, "Convert it with llama.cpp's gguf_convert_endian.py"
            )
        tensors, pairs = self._number(), self._number()
        self._count(pairs, 13, "key-values")
        self._count(tensors, 24, "tensors")
        return tensors, pairs

    def key_values(self, count: int) -> dict[str, GGUFValue]:
        """Return the key-values; arrays stay bytes."""
        values: dict[str, GGUFValue] = {}
        for _ in range(count):
            key = self._text("a key")
            if key in values:
                self._fail("each key occurs once", f"{key!r} twice")
            kind = self._number(_U32)
            begin = self.at
            self._skip(kind, key, 0)
            values[key] = GGUFValue(kind, bytes(self._data[begin : self.at]))
        return values

    def _skip(self, kind: int, key: str, depth: int) -> None:
        """Skip a value."""
        if kind in _SCALARS:
            self._move(struct.calcsize(_SCALARS[kind]))
        elif kind == STRING:
            self._move(self._number())
        elif kind == ARRAY and depth < 4:
            inner, count = self._number(_U32), self._number()
            if inner in _SCALARS:
                self._move(count * struct.calcsize(_SCALARS[inner]))
                return
            self._count(count, 8, f"elements of {key!r}")
            for _ in range(count):
                self._skip(inner, key, depth + 1)
        else:
            self._fail(
                "key-values are of the types 0 to 12, arrays at most 4 deep", f"{key!r}: {kind}"
            )

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return name, shape, type number and offset of a tensor."""
        name = self._text("the name of a tensor")
        dims = self._number(_U32)
        if dims > MAX_DIMS:
            self._fail(f"a tensor has at most {MAX_DIMS} dims", dims, name)
        shape = [self._number() for _ in range(dims)][::-1]
        return name, checked_shape(shape, self._path, name), self._number(_U32), self._number()


def _alignment(values: Mapping[str, GGUFValue], path: str) -> int:
    value = values.get("general.alignment")
    if value is None:
        return ALIGNMENT
    number = value.decode() if value.type == UINT32 else 0
    if number < 1 or number & (number - 1):
        rule = "general.alignment is a power of two, of type UINT32"
        refuse(Place(path), rule, f"{value.decode()!r} of type {value.type}", _AGAIN)
    return int(number)


def _info(name: str, shape: tuple[int, ...], number: int, path: str, start: int) -> TensorInfo:
    """Return the stored tensor of an entry; a tensor of an unknown type has no bytes."""
    kind = TYPES.get(number)
    if kind is None:
        return TensorInfo(name, "U8", (0,), path, start, 0)
    if kind.stored:
        return TensorInfo(
            name, kind.stored, shape, path, start, stored_size(kind.stored, shape) // 8
        )
    if not shape or shape[-1] % kind.block:
        rule = f"rows of type {kind.name} are whole blocks of {kind.block}"
        refuse(Place(path, name), rule, list(shape), _AGAIN)
    stored = (*shape[:-1], shape[-1] // kind.block, kind.nbytes)
    return TensorInfo(name, "U8", stored, path, start, math.prod(stored))


def _check_overlap(infos: Mapping[str, TensorInfo]) -> None:
    end = 0
    for info in sorted(infos.values(), key=itemgetter(4, 5)):
        if info.start < end:
            rule = f"tensors do not overlap; byte {end} is the next free one"
            refuse(Place(info.file, info.name), rule, f"begin {info.start}", _AGAIN)
        end = info.start + info.nbytes


def _decode(kind: int, data: memoryview, at: int) -> tuple[Any, int]:
    """Return a value that ``_skip`` has checked, and the offset after it."""
    if kind in _SCALARS:
        return struct.unpack_from(_SCALARS[kind], data, at)[0], at + struct.calcsize(_SCALARS[kind])
    if kind == STRING:
        (size,) = struct.unpack_from("<Q", data, at)
        return bytes(data[at + 8 : at + 8 + size]).decode("utf-8", "replace"), at + 8 + size
    inner, count = struct.unpack_from("<IQ", data, at)
    at, values = at + 12, []
    for _ in range(count):
        value, at = _decode(inner, data, at)
        values.append(value)
    return values, at


# ---- writing


def gguf_value(value: object, place: Place) -> GGUFValue:
    """Return a Python value as it is stored.

    A bool becomes BOOL, an int UINT32 or else INT32, UINT64 or INT64, a float FLOAT32, a str
    STRING, and a list whose elements have one of these types ARRAY.
    """
    if isinstance(value, GGUFValue):
        return value
    if isinstance(value, bool):
        return GGUFValue(BOOL, struct.pack("<?", value))
    if isinstance(value, int) and -(2**63) <= value < 2**64:
        kind = _integer_type(value, value)
        return GGUFValue(kind, struct.pack(_SCALARS[kind], value))
    if isinstance(value, float):
        return GGUFValue(FLOAT32, struct.pack("<f", value))
    if isinstance(value, str):
        text = value.encode("utf-8")
        return GGUFValue(STRING, struct.pack("<Q", len(text)) + text)
    if isinstance(value, (list, tuple)) and value:
        return _array(list(value), place)
    rule = "key-values are bool, int, float, str, or a list of one of them that is not empty"
    refuse(place, rule, repr(value), "Leave the key out")


def _array(values: list[Any], place: Place) -> GGUFValue:
    """Return a list as ARRAY; integers have one type that holds all of them."""
    parts = [gguf_value(value, place) for value in values]
    kinds = {part.type for part in parts}
    if kinds <= {UINT32, INT32, UINT64, INT64} and len(kinds) > 1:
        kind = _integer_type(min(values), max(values))
        parts = [GGUFValue(kind, struct.pack(_SCALARS[kind], value)) for value in values]
        kinds = {kind}
    if len(kinds) != 1:
        refuse(place, "the elements of a list have one type", repr(values), "Leave the key out")
    head = struct.pack("<IQ", kinds.pop(), len(parts))
    return GGUFValue(ARRAY, head + b"".join(part.data for part in parts))


def _integer_type(low: int, high: int) -> int:
    if low >= 0:
        return UINT32 if high < 2**32 else UINT64
    return INT32 if low >= -(2**31) and high < 2**31 else INT64


class GGUFEntry(NamedTuple):
    """Describe a tensor of a file that is written: the name of its type and its logical shape."""

    type: str
    shape: tuple[int, ...]


class GGUFFileWriter(SafetensorsWriter):
    """Write a GGUF file of version 3, with the temporary name and the renaming of its base."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        specs: Iterable[TensorSpec],
        entries: Mapping[str, GGUFEntry],
        key_values: Mapping[str, GGUFValue],
    ) -> None:
        """Write the header to a temporary file beside ``path`` and reserve the space.

        The alignment is 32, which needs no key-value.
        """
        self._entries, self._values = entries, key_values
        super().__init__(path, specs)
        os.ftruncate(self._file, self._size)  # llama.cpp wants the padding of the last tensor too.

    def _plan(self, specs: list[TensorSpec], metadata: dict[str, str]) -> bytes:
        """Compute the offset of every tensor and return the header."""
        out = [MAGIC, struct.pack("<IQQ", VERSIONS[-1], len(specs), len(self._values))]
        for key, value in self._values.items():
            out += [_packed(key), struct.pack("<I", value.type), value.data]
        end, offsets = 0, {}
        for spec in specs:
            entry, name = self._entries[spec.name], spec.name.encode()
            place = Place(self.path, spec.name)
            if spec.name in offsets or len(name) > MAX_NAME or len(entry.shape) > MAX_DIMS:
                rule = f"names are unique and have at most {MAX_NAME} bytes; tensors have 4 dims"
                got = f"{len(name)} bytes, {len(entry.shape)} dims"
                refuse(place, rule, got, "Rename or reshape the tensor")
            out += [_packed(spec.name), struct.pack("<I", len(entry.shape))]
            out += [struct.pack("<Q", n) for n in reversed(entry.shape)]
            out += [struct.pack("<IQ", NUMBERS[entry.type], end)]
            offsets[spec.name] = end
            end += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
        text = b"".join(out)
        start = -(-len(text) // ALIGNMENT) * ALIGNMENT
        self._offsets = {spec.name: (start + offsets[spec.name], spec) for spec in specs}
        self._size = start + end
        return text


def _packed(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data
