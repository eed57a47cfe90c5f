"""The measurements of a search in a file of JSON lines, so that a search can go on later."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

from qtensor.errors import ArgumentTypeError, fail


class Journal:
    """Measured errors by key, in memory and, with a path, in a file.

    The first line of the file says which search it belongs to; each other line holds one
    measurement. A last line that was cut off is ignored and written again.
    """

    def __init__(self, path: str | PathLike[str] | None, identity: dict[str, Any]) -> None:
        """Read the measurements of ``path``, if it exists.

        Args:
            path: the file; None keeps the measurements in memory only.
            identity: what the measurements depend on: JSON values.

        Raises:
            QTensorError: the file belongs to another search, is not such a file, or cannot be read
                or written.
        """
        if not (path is None or isinstance(path, str | PathLike)):
            rule, fix = "resume is the path of a file", 'Pass for example "search.jsonl"'
            fail("search", rule, repr(path), fix, ArgumentTypeError)
        self._path = None if path is None else Path(path)
        self._errors: dict[str, float] = {}
        if self._path is None:
            return
        first = json.dumps(identity) + "\n"
        try:
            text = self._path.read_text() if self._path.exists() else ""
            whole = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
            if whole:
                self._read(whole, identity)
            elif not first.startswith(text):
                self._refuse()
            self._path.write_text("".join(whole) or first)
        except UnicodeDecodeError:
            self._refuse()
        except OSError as error:
            rule = "resume is the path of a file that can be read and written"
            fix = "Create its folder, or pass another path"
            fail("search", rule, f"{path!r} ({error.strerror})", fix)

    def _refuse(self) -> NoReturn:
        rule = "resume is a file that an earlier search wrote"
        fail("search", rule, str(self._path), "Pass the path of a new file")

    def _read(self, lines: list[str], identity: dict[str, Any]) -> None:
        try:
            first = json.loads(lines[0])
            rows = [json.loads(line) for line in lines[1:]]
            self._errors = {row["key"]: float(row["error"]) for row in rows}
        except (ValueError, KeyError, TypeError):
            self._refuse()
        for name, value in identity.items():
            if not isinstance(first, dict) or first.get(name) != value:
                rule = f"resume belongs to a search with the same {name}"
                fix = "Delete it, or pass the path of a new file"
                fail("search", rule, f"{self._path}, which differs", fix)

    def get(self, key: str) -> float | None:
        """Return the error that was measured for a key, or None."""
        return self._errors.get(key)

    def add(self, key: str, error: float) -> None:
        """Keep an error, and append it to the file."""
        self._errors[key] = error
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"key": key, "error": error}) + "\n")
