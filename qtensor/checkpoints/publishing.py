"""Replace a folder by a finished one in one step: either the old or the new one is there."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from collections.abc import Iterable

from qtensor.checkpoints.containers.safetensors import sync_folder
from qtensor.checkpoints.errors import Place, refuse

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def exchange(one: str, other: str) -> bool:
    """Exchange two paths in one step; False where the system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    paths = [ctypes.c_char_p(os.fsencode(path)) for path in (one, other)]
    return rename(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0


def restore(folder: str) -> None:
    """Undo the first half of an interrupted swap, on systems that cannot exchange folders."""
    folder = os.path.realpath(folder)
    old = f"{_work_of(folder)}.old"
    if not os.path.lexists(folder) and os.path.isdir(old):
        os.rename(old, folder)


def _work_of(folder: str) -> str:
    parent, name = os.path.split(folder)
    return os.path.join(parent, f".{name}.saving")


def _entries(folder: str) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)


class FolderSwap:
    """Hold a work folder beside a folder whose checkpoint it replaces.

    The new checkpoint is written into ``work``. ``publish`` puts hard links to the other files of
    the folder beside it, exchanges the two folders in one step, and then moves the subfolders.
    After an interruption the next swap of the same folder clears up.
    """

    def __init__(self, folder: str) -> None:
        """Make the work folder.

        Raises:
            OSError: the folder above is not writable, or the disk is full.
        """
        self.folder = os.path.realpath(folder)
        self.work = _work_of(self.folder)
        self._old = f"{self.work}.old"
        self._published = False
        for left in (self._old, self.work):
            if os.path.isdir(left) and not os.path.islink(left):
                self._remove(left)
        os.mkdir(self.work)
        shutil.copymode(self.folder, self.work)

    def publish(self, dropped: Iterable[str]) -> None:
        """Give the work folder the name of the folder.

        ``dropped`` names the files of the old checkpoint that the new one does not have.

        Raises:
            CheckpointError: the disk is full, or the folder cannot be renamed; it stays as it was.
        """
        try:
            self._link_others(set(dropped))
            sync_folder(self.work)
            old = self.work
            if not exchange(self.work, self.folder):
                old = self._old
                os.rename(self.folder, old)
                os.rename(self.work, self.folder)
            self._published = True
            sync_folder(os.path.dirname(self.folder))
            self._remove(old)
        except OSError as error:
            fix = "Free space on the disk, or save to another folder"
            refuse(Place(self.folder), "the folder must be replaceable", error, fix, error)

    def _link_others(self, dropped: set[str]) -> None:
        for entry in _entries(self.folder):
            new = os.path.join(self.work, entry.name)
            if entry.name in dropped or os.path.lexists(new):
                continue
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), new)
            elif not entry.is_dir():
                try:
                    os.link(entry.path, new)
                except OSError:  # a file system without hard links
                    shutil.copy2(entry.path, new)

    def _remove(self, old: str) -> None:
        """Remove an old folder after giving its subfolders back; none of them is ever removed."""
        folders = [e.name for e in _entries(old) if e.is_dir(follow_symlinks=False)]
        for name in folders:
            os.rename(os.path.join(old, name), os.path.join(self.folder, name))
        shutil.rmtree(old)

    def discard(self) -> None:
        """Remove the work folder, unless it was published; the folder stays as it was."""
        if self._published:
            return
        with contextlib.suppress(OSError):
            restore(self.folder)
            shutil.rmtree(self.work)
