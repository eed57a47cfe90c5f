"""Keep the finished files of a conversion over an interruption, and publish the whole at once.

While a conversion to ``dst`` runs, its files lie in the folder ``.NAME.converting`` beside it, and
``.NAME.converting.jsonl`` is a journal of the finished ones, with size and SHA-256, that depends on
the request and the source. A later call of the same takes over the files that still match.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Mapping
from typing import Any

from qtensor.checkpoints.containers.safetensors import sync_folder
from qtensor.checkpoints.errors import CheckpointError, Place, refuse
from qtensor.checkpoints.publishing import exchange
from qtensor.core.journal import Journal

_LIBRARY_FILES = (
    ".safetensors",
    ".json",
    ".txt",
    ".model",
    ".jinja",
    ".py",
    ".md",
    ".gguf",
    ".bin",
    ".pt",
    ".pth",
)
"""Ends of the names of files that a folder of a checkpoint holds."""


class WorkFolder:
    """Hold the work folder of one conversion, and the journal of what is finished in it."""

    def __init__(self, dst: str, about: Mapping[str, Any], resume: bool) -> None:
        """Take over the finished files of an interrupted call, or start again.

        ``about`` decides the bytes of the result: with another value, the call starts again.
        """
        self.dst = os.path.abspath(dst)
        parent, name = os.path.split(self.dst)
        self.folder = os.path.join(parent, f".{name}.converting")
        self._path = f"{self.folder}.jsonl"
        self._journal = Journal(self._path, {"about": about})
        self.files: dict[str, dict[str, Any]] = self._journal.entries
        """Name -> {"bytes", "sha256", "tensors"}; ``finished`` checks entries of earlier calls."""
        if resume:
            with contextlib.suppress(OSError, ValueError):
                self._journal.read()
        try:
            os.makedirs(parent, exist_ok=True)
            self.abandon()
            os.makedirs(self.folder, exist_ok=True)
            for unfinished in os.listdir(self.folder):
                if unfinished not in self.files:
                    os.unlink(os.path.join(self.folder, unfinished))
            self._journal.begin()
        except OSError as error:
            refuse(Place(self.dst), "the folder must be writable", error, "Check the path", error)

    def finished(self, name: str) -> dict[str, Any] | None:
        """Return the entry of a file that an earlier call finished, or None.

        Its size and digest are compared; a file that differs is removed.
        """
        entry, path = self.files.get(name), os.path.join(self.folder, name)
        if entry is None:
            return None
        try:
            if os.path.getsize(path) == entry["bytes"] and digest(path) == entry["sha256"]:
                return entry
            os.unlink(path)
        except (OSError, KeyError, TypeError):
            pass
        return None

    def add(self, name: str, sha256: str, tensors: list[dict[str, Any]]) -> None:
        """Record a file that was written, synced and renamed in the work folder."""
        size = os.path.getsize(os.path.join(self.folder, name))
        try:
            self._journal.add(name, {"bytes": size, "sha256": sha256, "tensors": tensors})
        except OSError as error:
            fix = "Free space on the disk"
            refuse(Place(self._path), "the file must be writable", error, fix, error)

    def abandon(self) -> None:
        """Remove everything if there is no finished file for the next call to take over."""
        if not self.files:
            self.discard()

    def discard(self) -> None:
        """Remove the work folder and the journal."""
        with contextlib.suppress(OSError):
            os.chmod(self.folder, 0o700)  # it may be the old result, which was not writable
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    # ---- publishing

    def publish_file(self) -> None:
        """Give the only file of the work folder the name of the result."""
        (name,) = os.listdir(self.folder)
        self._rename(os.path.join(self.folder, name), self.dst)
        self.discard()

    def publish_folder(self) -> None:
        """Give the work folder the name of the result, in place of an older folder."""
        sync_folder(self.folder)
        if os.path.isdir(self.dst) and os.listdir(self.dst):
            check_replaceable(self.dst)
            if not exchange(self.folder, self.dst):
                old = f"{self.folder}.old"
                self._rename(self.dst, old)
                self._rename(self.folder, self.dst)
                shutil.rmtree(old, ignore_errors=True)
            sync_folder(os.path.dirname(self.dst))
        else:
            self._rename(self.folder, self.dst)
        self.discard()

    def _rename(self, old: str, new: str) -> None:
        try:
            os.replace(old, new)
            sync_folder(os.path.dirname(new))
        except OSError as error:
            fix = f"The result is complete in {self.folder!r}; rename it, or run again"
            refuse(Place(self.dst), "the result must be renamed", error, fix, error)


def check_replaceable(folder: str) -> None:
    """Refuse to replace a folder that holds more than the files of a checkpoint."""
    if os.path.islink(folder) or not os.path.isdir(folder):
        got = "a link" if os.path.islink(folder) else "a file"
        refuse(Place(folder), "a folder replaces a folder", got, "Choose another path")
    for name in sorted(os.listdir(folder)):
        if not name.endswith(_LIBRARY_FILES) or os.path.isdir(os.path.join(folder, name)):
            rule = "overwrite=True replaces a folder that holds a checkpoint alone"
            refuse(Place(folder), rule, repr(name), "Move that, or choose another path")


def digest(path: str) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def source_identity(paths: list[str]) -> list[list[Any]]:
    """Return name, size and time of change of each file of the source, for the journal."""
    found = []
    for path in sorted(paths):
        try:
            about = os.stat(path)
        except OSError as error:
            raise CheckpointError(f"checkpoint {path!r}: {error}", path) from error
        found.append([path, about.st_size, about.st_mtime_ns])
    return found
