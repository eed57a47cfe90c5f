"""The measurements of a search in a file of JSON lines, so that a search can go on later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qtensor.errors import fail


class Journal:
    """Measured errors by key, in memory and, with a path, in a file.

    The first line of the file says which search it belongs to; each other line holds one
    measurement. A last line that was cut off is ignored and written again.
    """

    def __init__(self, path: str | None, identity: dict[str, Any]) -> None:
        """Read the measurements of ``path``, if it exists.

        Args:
            path: the file; None keeps the measurements in memory only.
            identity: what the measurements depend on: JSON values.

        Raises:
            QTensorError: the file belongs to another search, or is not such a file.
        """
        self._path = None if path is None else Path(path)
        self._errors: dict[str, float] = {}
        if self._path is None:
            return
        lines = self._path.read_text().splitlines(keepends=True) if self._path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]
        if whole:
            self._read(whole, identity)
        text = "".join(whole) or json.dumps(identity) + "\n"
        self._path.write_text(text)

    def _read(self, lines: list[str], identity: dict[str, Any]) -> None:
        try:
            first = json.loads(lines[0])
            rows = [json.loads(line) for line in lines[1:]]
            self._errors = {row["key"]: float(row["error"]) for row in rows}
        except (ValueError, KeyError, TypeError):
            rule = "resume is a file that an earlier search wrote"
            fail("search", rule, str(self._path), "Pass the path of a new file")
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
