"""Which folders hold compiled kernels, and whether another user could have written to them.

A library runs with all rights of the process that loads it. A folder is therefore trusted only if
nobody but this user and root can change its contents.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from qtensor.core.errors import BuildError, fail

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_ROOT = 0


def cache_dir() -> Path:
    """Return the cache folder.

    `$QTENSOR_CACHE_DIR`, else `$XDG_CACHE_HOME/qtensor`, else `~/.cache/qtensor`.
    """
    try:
        if chosen := os.environ.get("QTENSOR_CACHE_DIR"):
            return Path(chosen).expanduser().absolute()
        base = os.environ.get("XDG_CACHE_HOME", "")
        # The XDG specification says that a relative path is ignored.
        return Path(base if os.path.isabs(base) else Path.home() / ".cache") / "qtensor"
    except RuntimeError as error:
        fail("cache", "a user has a home folder", error, "Set QTENSOR_CACHE_DIR", BuildError)


def libraries_folder() -> Path:
    """Return the folder in the cache that holds one folder for each library."""
    return cache_dir() / "libraries"


def private_folder() -> Path:
    """Return the folder that replaces the cache when the cache cannot be used."""
    return Path(tempfile.gettempdir()) / f"qtensor-{os.geteuid()}"


def make_folder(path: Path) -> None:
    """Create a folder and its parents; whatever the umask is, other users cannot write to them.

    Raises:
        OSError: a folder cannot be created, or a file has its name.
    """
    if not path.is_dir():
        make_folder(path.parent)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o755)
        if not path.is_dir():
            raise NotADirectoryError(20, "Not a directory", str(path))


# ------------------------------------------------------------------------------------------- trust


def untrusted(path: Path, sticky_below: Path | None = None) -> str | None:
    """Return why another user could have written `path` or could replace it, or None.

    Every folder on the way from the root of the file system counts, and so does every symbolic
    link, because the owner of a folder or link can exchange what it leads to. Parts of the path
    that do not exist yet are skipped.

    Args:
        path: absolute path of a file or folder.
        sticky_below: above this folder, a folder that others can write to is accepted if its sticky
            bit is set (as for `/tmp`): nobody can rename the folders of another user there. By
            default `path` itself.
    """
    strict = path if sticky_below is None else sticky_below
    try:
        for part in _chain(path):
            strict_part = part.is_relative_to(strict) or part.is_relative_to(strict.resolve())
            if reason := _part_untrusted(part, accept_sticky=not strict_part):
                return reason
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of symbolic links
        return str(error)
    return None


def _chain(path: Path) -> Iterator[Path]:
    """Yield `path` and its parents, then the path that its links lead to and its parents."""
    resolved = path.resolve()
    yield from (path, *path.parents)
    if resolved != path:
        yield from (resolved, *resolved.parents)


def _part_untrusted(part: Path, accept_sticky: bool) -> str | None:
    try:
        status = part.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if status.st_uid not in (os.geteuid(), _ROOT):
        return f"{part} belongs to user {status.st_uid}"
    if stat.S_ISLNK(status.st_mode) or not status.st_mode & _WRITABLE_BY_OTHERS:
        return None
    if accept_sticky and status.st_mode & stat.S_ISVTX:
        return None
    only_group = not status.st_mode & stat.S_IWOTH
    if only_group and _is_own_group(status.st_gid):
        return None
    return f"{part} has mode {stat.S_IMODE(status.st_mode):o}: other users can write to it"


def _is_own_group(group: int) -> bool:
    """Return whether this user is the only member of a group, as some systems arrange it."""
    if group != os.getegid():
        return False
    try:
        import grp  # noqa: PLC0415 - does not exist on Windows
        import pwd  # noqa: PLC0415

        entry, user = grp.getgrgid(group), pwd.getpwuid(os.geteuid())
    except (ImportError, KeyError):
        return False
    return entry.gr_name == user.pw_name and set(entry.gr_mem) <= {user.pw_name}


def _private_untrusted(folder: Path) -> str | None:
    """Return why the private folder may not be this user's alone, or None."""
    try:
        status = folder.lstat()
    except OSError as error:
        return str(error)
    if not stat.S_ISDIR(status.st_mode):
        return f"{folder}, which is not a folder"
    if status.st_uid != os.geteuid():
        return f"{folder}, which belongs to user {status.st_uid}"
    if status.st_mode & 0o077:
        return f"{folder} with mode {stat.S_IMODE(status.st_mode):o}, open to other users"
    return None


# ------------------------------------------------------------------------------------------- choice


def readable_roots() -> list[Path]:
    """Return the folders with libraries that may be loaded.

    The private folder counts only while the cache cannot be used.
    """
    root = libraries_folder()
    roots = [root] if untrusted(root) is None else []
    if roots and _seems_writable(root):
        return roots
    with contextlib.suppress(FileNotFoundError):  # no folder for temporary files
        if _private_untrusted(private_folder()) is None:
            roots.append(private_folder() / "libraries")
    return roots


def _seems_writable(root: Path) -> bool:
    """Return whether `root` could be created and written, without an attempt to do so."""
    existing = next(path for path in (root, *root.parents) if path.exists())
    return existing.is_dir() and os.access(existing, os.W_OK)


def _cannot_write(root: Path) -> str | None:
    """Return why nothing can be created in `root`, or None; creates the folder."""
    try:
        make_folder(root)
        with tempfile.TemporaryFile(dir=root):
            return None
    except OSError as error:
        return error.strerror or str(error)


_WARNED: set[Path] = set()
"""Folders that this process has warned about."""


def writable_root() -> Path:
    """Return the folder to build in: the cache or, after a warning, the private folder."""
    root = libraries_folder()
    problem = "does not trust"
    reason = untrusted(root)
    if reason is None:
        problem = "cannot write"
        reason = _cannot_write(root)
    if reason is None:
        return root
    op = f"cache {root}"
    fix = "Set QTENSOR_CACHE_DIR to a folder of yours that you can write to and other users cannot"
    private = private_folder()
    try:
        with contextlib.suppress(FileExistsError):
            private.mkdir(mode=0o700)
        private_reason = _private_untrusted(private) or _cannot_write(private / "libraries")
    except OSError as error:
        fail(op, "a folder must be writable", f"{reason}, and {error}", fix, BuildError)
    if private_reason is not None:
        rule = "the folder that replaces it must be yours alone"
        fail(f"{op} ({reason})", rule, private_reason, fix, BuildError)
    if root not in _WARNED:
        # One build may compile several libraries.
        _WARNED.add(root)
        warnings.warn(
            f"qtensor {problem} its cache {root} ({reason}). Compiled kernels go to {private}, "
            f"which may not outlive a restart. {fix}.",
            RuntimeWarning,
            stacklevel=3,
        )
    return private / "libraries"
