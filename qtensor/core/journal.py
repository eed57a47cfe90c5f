"""Keep entries in a file of JSON lines, so that an interrupted call can go on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any


class Journal:
    """Entries by name, in memory and, with a path, in a file.

    The first line of the file says what the entries depend on; each other line holds one entry. A
    last line that was cut off does not count, and is written again.

    Attributes:
        entries: JSON values by name.
    """

    def __init__(self, path: str | os.PathLike[str] | None, about: Mapping[str, Any]) -> None:
        """Describe a journal; nothing is read or written yet.

        Args:
            path: the file; None keeps the entries in memory only.
            about: what the entries depend on: JSON values.
        """
        self._path, self._about = path, about
        self.entries: dict[str, Any] = {}
        self._whole = 0
        """Bytes of the lines that count."""

    def read(self) -> list[str]:
        """Read the entries of an earlier call, if there is a file.

        Returns:
            The names of ``about`` that have other values in the file; then no entries are read.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is not such a journal, or is damaged; ``entries`` has those before
                the damage.
        """
        if self._path is None or not os.path.exists(self._path):
            return []
        with open(self._path, "rb") as file:
            head = file.readline()
            if not head.endswith(b"\n"):
                if not _line(self._about).startswith(head):
                    raise ValueError("the first line belongs to another file")
                return []
            first = _object(head)
            if not self._about.keys() <= first.keys():
                raise ValueError("the first line belongs to another file")
            # Texts are compared: NaN is not equal to itself.
            different = [n for n, value in self._about.items() if _line(first[n]) != _line(value)]
            if different:
                return different
            self._whole = len(head)
            for line in file:
                if line.endswith(b"\n"):
                    self.entries.update(_object(line))
                    self._whole += len(line)
        return []

    def begin(self) -> None:
        """Write the first line, or cut off what follows the entries that were read.

        Raises:
            OSError: the file cannot be written.
        """
        if self._path is not None:
            with open(self._path, "ab") as file:
                file.truncate(self._whole if self.entries else 0)
                if not self.entries:
                    file.write(_line(self._about))

    def add(self, name: str, entry: object) -> None:
        """Keep an entry, a JSON value, and append it to the file.

        Raises:
            OSError: the file cannot be written.
        """
        self.entries[name] = entry
        if self._path is not None:
            with open(self._path, "ab") as file:
                file.write(_line({name: entry}))
                file.flush()
                os.fsync(file.fileno())


def _line(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode() + b"\n"


def _object(line: bytes) -> dict[str, Any]:
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError("a line of a journal is a JSON object")
    return value
