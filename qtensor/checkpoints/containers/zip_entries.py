"""List the entries of a zip, with every offset checked; nothing is extracted to the disk.

The module zipfile is not used: it does not check that entries lie apart, and it reads a directory
of any size.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, NamedTuple, NoReturn

from qtensor.checkpoints.errors import Place, refuse

STORED, DEFLATED = 0, 8
MAX_ENTRIES = 1_000_000
MAX_GROWTH = 100
"""A compressed entry grows to at most this many times its size, or to ``FREE`` bytes."""
FREE = 16_000_000
_END, _END64, _LOCATOR64 = b"PK\5\6", b"PK\6\6", b"PK\6\7"
_DIRECTORY, _LOCAL = b"PK\1\2", b"PK\3\4"
_AGAIN = "Download or save the file again"


class Entry(NamedTuple):
    """Describe an entry of a zip.

    Attributes:
        name: its full name.
        start: offset of its first stored byte in the file.
        stored: number of bytes in the file.
        size: number of bytes after decompression; equal to ``stored`` if it is not compressed.
        compressed: True if the bytes are deflated.
    """

    name: str
    start: int
    stored: int
    size: int
    compressed: bool


class _Zip:
    """Read the directory of one zip."""

    def __init__(self, data: Any, path: str) -> None:
        self.data, self.path, self.size = data, path, len(data)

    def refuse(self, rule: str, got: object, name: str = "") -> NoReturn:
        refuse(Place(self.path, name), rule, got, _AGAIN)

    def unpack(self, form: str, at: int, magic: bytes = b"") -> tuple[Any, ...]:
        """Return the numbers behind ``magic`` at an offset."""
        end = at + len(magic) + struct.calcsize(form)
        if at < 0 or end > self.size or self.data[at : at + len(magic)] != magic:
            rule = "a zip has its directory and headers where it says"
            self.refuse(rule, f"no {magic!r} at {at} of {self.size} bytes")
        return struct.unpack(form, self.data[at + len(magic) : end])

    def directory(self) -> tuple[int, int, int]:
        """Return offset, size and number of entries of the directory."""
        least = max(0, self.size - 22 - 65535)
        tail = bytes(self.data[least:])
        at = tail.rfind(_END)
        # A comment may follow, and may hold the same bytes.
        while at >= 0 and at + 22 + int.from_bytes(tail[at + 20 : at + 22], "little") != len(tail):
            at = tail.rfind(_END, 0, at)
        if at < 0:
            self.refuse("a zip ends with its directory", f"a file of {self.size} bytes without")
        at += least
        disk, first, here, count, size, start, _ = self.unpack("<4H2IH", at, _END)
        if disk or first or here != count:
            self.refuse("a zip is one file", "a part of several")
        if 0xFFFF in (count,) or 0xFFFFFFFF in (size, start):
            _, where, _ = self.unpack("<IQI", at - 20, _LOCATOR64)
            found = self.unpack("<Q2H2I4Q", where, _END64)
            count, size, start = found[6:9]
        if count > MAX_ENTRIES or start + size > self.size:
            rule = f"the directory of a zip lies inside the file and has at most {MAX_ENTRIES:,}"
            self.refuse(f"{rule} entries", f"{count} entries, {size} bytes at {start}")
        return start, size, count

    def entries(self) -> dict[str, Entry]:
        at, size, count = self.directory()
        end, found = at + size, {}
        for _ in range(count):
            numbers = self.unpack("<6H3I5H2I", at, _DIRECTORY)
            flags, method, stored, grown = numbers[2], numbers[3], numbers[7], numbers[8]
            lengths, local = numbers[9:12], numbers[15]
            raw = bytes(self.data[at + 46 : at + 46 + lengths[0]])
            extra = bytes(self.data[at + 46 + lengths[0] : at + 46 + lengths[0] + lengths[1]])
            at += 46 + sum(lengths)
            if at > end:
                self.refuse("the directory of a zip has the size that it says", "a longer one")
            name = self.name(raw)
            if name in found:
                self.refuse("each name of a zip occurs once", "two of them", name)
            if flags & 1 or method not in (STORED, DEFLATED):
                got = "an encrypted one" if flags & 1 else f"compression method {method}"
                self.refuse("entries are stored or deflated", got, name)
            grown, stored, local = self.wide(extra, (grown, stored, local), name)
            found[name] = self.entry(name, raw, (local, stored, grown), method)
        self.apart(found)
        return found

    def name(self, raw: bytes) -> str:
        """Return the name of an entry: a relative path without "..", in UTF-8."""
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self.refuse("the names of a zip are UTF-8", error)
        parts = name.removesuffix("/").split("/")
        if "\\" in name or "\0" in name or ":" in name or not {"", ".", ".."}.isdisjoint(parts):
            self.refuse("the names of a zip are plain paths inside it", repr(name))
        return name

    def wide(self, extra: bytes, numbers: tuple[int, ...], name: str) -> tuple[int, ...]:
        """Return the numbers with those of 64 bits, which lie in the extra field."""
        at, wide = 0, b""
        while at + 4 <= len(extra):
            kind, length = struct.unpack("<2H", extra[at : at + 4])
            if kind == 1:
                wide = extra[at + 4 : at + 4 + length]
            at += 4 + length
        found = []
        for number in numbers:
            if number == 0xFFFFFFFF:
                if len(wide) < 8:
                    self.refuse("a large entry has its sizes in 64 bits", "none", name)
                number, wide = struct.unpack("<Q", wide[:8])[0], wide[8:]
            found.append(number)
        return tuple(found)

    def entry(self, name: str, raw: bytes, numbers: tuple[int, ...], method: int) -> Entry:
        """Return an entry after checking its local header."""
        local, stored, grown = numbers
        header = self.unpack("<5H3I2H", local, _LOCAL)
        start = local + 30 + header[8] + header[9]
        if self.data[local + 30 : local + 30 + header[8]] != raw or header[2] != method:
            self.refuse("an entry has one name and method", "a local header with others", name)
        if start + stored > self.size:
            rule = "an entry lies inside the file"
            self.refuse(rule, f"{stored} bytes at {start} of {self.size}", name)
        compressed = method == DEFLATED
        if not compressed and stored != grown:
            self.refuse("a stored entry has one size", f"{stored} and {grown}", name)
        if grown > max(FREE, MAX_GROWTH * stored):
            rule = f"an entry grows to {FREE:,} bytes or {MAX_GROWTH} times its size at most"
            self.refuse(rule, f"{grown:,} bytes from {stored:,}", name)
        return Entry(name, start, stored, grown, compressed)

    def apart(self, entries: dict[str, Entry]) -> None:
        """Refuse entries that overlap."""
        end = 0
        for entry in sorted(entries.values(), key=lambda entry: entry.start):
            if entry.start < end:
                self.refuse("the entries of a zip lie apart", "an overlap", entry.name)
            end = entry.start + entry.stored


def zip_entries(data: Any, path: str) -> dict[str, Entry]:
    """Return the entries of a zip by name.

    Args:
        data: the bytes of the file, a map or bytes.
        path: path of the file, for errors.

    Raises:
        CheckpointError: the zip is damaged, a name leaves it, an entry is encrypted, overlaps
            another one or grows too much, or there are more than a million entries.
    """
    return _Zip(data, path).entries()


def entry_bytes(data: Any, entry: Entry, path: str) -> bytes:
    """Return the bytes of an entry, decompressed.

    Raises:
        CheckpointError: the compressed bytes are damaged or of another size.
    """
    raw = bytes(data[entry.start : entry.start + entry.stored])
    if not entry.compressed:
        return raw
    place, rule = Place(path, entry.name), "an entry decompresses to the size that it says"
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        grown = inflater.decompress(raw, entry.size + 1)
    except zlib.error as error:
        refuse(place, rule, error, _AGAIN, error)
    if len(grown) != entry.size or not inflater.eof:
        refuse(place, rule, f"{len(grown)} bytes, not {entry.size}", _AGAIN)
    return grown
