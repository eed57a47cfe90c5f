"""The cache of compiled kernels: a library is built once, under a name made of all that it depends on.

A result lies in ``<cache>/libraries/<name>-<key>/`` with a manifest beside it. That folder is made under another
name and renamed, so it is there whole or not at all, and other processes need no lock to use it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from qtensor.compilers import Command, Compiler, parallel_jobs, run_all
from qtensor.errors import BuildError, check, fail

BUILD_ABI = 1
"""Part of every key. Raise it when this file builds in another way, so that older results are not found."""

_STALE = 24 * 60 * 60.0
_WORK = ".making-"
_LOCK = ".lock"
_MANIFEST = "manifest.json"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_ENTRY = re.compile(r".+-[0-9a-f]{32}")
_MAGIC = {"linux": b"\x7fELF"}


@dataclass(frozen=True)
class Unit:
    """One compile to an object. The same source may be in several units, with other flags.

    Attributes:
        source: the file to compile.
        flags: all flags but ``-c``, ``-o`` and those for position-independent code. No ``-march=native``: homes,
            and so caches, are shared by machines with different processors.
        name: unique in its recipe; names the object file.
        include: folders for ``-I`` whose paths do not count, such as those of an installed package; what their contents
            depend on is in ``flags`` or in the recipe's headers.
    """

    source: Path
    flags: tuple[str, ...]
    name: str
    include: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """How a shared library is made, and all that its bytes depend on.

    What is not a file here, such as the version of a library that the headers belong to, goes into a ``-D`` flag.

    Attributes:
        name: of the library; part of its path.
        units: at least one.
        compiler: compiles and links.
        headers: files that the sources include; only their contents count, ``-I`` is up to the flags.
        link_flags: what follows the objects when linking.
        title: what is compiled, as the notice says it: ``CPU kernels``.
        effort: seconds that one free processor takes, for the notice; 0 where nobody measured it.

    Raises:
        QTensorError: no unit, a name that is no plain file name, or two units of one name.
    """

    name: str
    units: tuple[Unit, ...]
    compiler: Compiler
    headers: tuple[Path, ...] = ()
    link_flags: tuple[str, ...] = ()
    title: str = "native code"
    effort: float = 0.0

    def __post_init__(self) -> None:
        names = [unit.name for unit in self.units]
        op = f"recipe {self.name!r}"
        check(bool(names), op, "a library has at least one unit", "none", "Add a Unit")
        plain = all(_NAME.fullmatch(name) for name in (self.name, *names))
        rule = "names are letters, digits and _ . + -"
        check(plain, op, rule, f"units {names}", "Choose other names")
        distinct = len(set(names)) == len(names)
        check(distinct, op, "each unit has its own name", f"units {names}", "Rename one of them")


@dataclass(frozen=True)
class Built:
    """A library in the cache: name, key, path, size in bytes, and when it was made (seconds since 1970)."""

    name: str
    key: str
    path: Path
    size: int
    time: float


# ------------------------------------------------------------------------------------------- folders


def cache_dir() -> Path:
    """The cache: ``$QTENSOR_CACHE_DIR``, else ``$XDG_CACHE_HOME/qtensor``, else ``~/.cache/qtensor``.

    Raises:
        BuildError: no variable is set and the user has no home.
    """
    try:
        if own := os.environ.get("QTENSOR_CACHE_DIR"):
            return Path(own).expanduser().absolute()
        base = os.environ.get("XDG_CACHE_HOME", "")
        # The specification has a relative path ignored.
        return Path(base if os.path.isabs(base) else Path.home() / ".cache") / "qtensor"
    except RuntimeError as error:
        fail("cache", "a user has a home folder", error, "Set QTENSOR_CACHE_DIR", BuildError)


def _libraries() -> Path:
    return cache_dir() / "libraries"


def _private_dir() -> Path:
    return Path(tempfile.gettempdir()) / f"qtensor-{os.geteuid()}"


def _distrust(folder: Path) -> str | None:
    """Why a library in that folder of a shared place may be another user's, or None."""
    try:
        status = folder.lstat()
    except OSError as error:
        return str(error)
    if not stat.S_ISDIR(status.st_mode):
        return f"{folder}, which is no folder"
    if status.st_uid != os.geteuid():
        return f"{folder}, which belongs to user {status.st_uid}"
    if status.st_mode & 0o077:
        return f"{folder} with mode {stat.S_IMODE(status.st_mode):o}, open to other users"
    return None


def _readable_roots() -> list[Path]:
    """Folders whose libraries may be loaded."""
    roots = [_libraries()]
    with contextlib.suppress(FileNotFoundError):  # no folder for temporary files
        if _distrust(_private_dir()) is None:
            roots.append(_private_dir() / "libraries")
    return roots


def _unusable(root: Path) -> str | None:
    """Why nothing can be made in ``root``, or None; makes the folder."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _writable_root() -> Path:
    """The folder to build in: the cache, or a private one, with a warning, where the cache cannot be written."""
    root = _libraries()
    reason = _unusable(root)
    if reason is None:
        return root
    op, fix = f"cache {root}", "Set QTENSOR_CACHE_DIR to a folder of yours that can be written"
    try:
        private = _private_dir()
        with contextlib.suppress(FileExistsError):
            private.mkdir(mode=0o700)
        why = _distrust(private) or _unusable(private / "libraries")
    except OSError as error:
        fail(op, "a folder must be writable", f"{reason}, and {error}", fix, BuildError)
    if why is not None:
        rule = "the folder in its place must be yours alone"
        fail(f"{op} ({reason})", rule, why, fix, BuildError)
    text = f"qtensor cannot write its cache {root} ({reason}). Compiled kernels go to {private}, "
    warnings.warn(f"{text}which may not outlive a restart. {fix}.", RuntimeWarning, stacklevel=3)
    return private / "libraries"


# ------------------------------------------------------------------------------------------- look-up


def library_path(recipe: Recipe) -> Path:
    """Where the library lies; if it is not built, where it goes when the cache can be written.

    Raises:
        BuildError: a source or header cannot be read.
    """
    key = _key(recipe)
    known = _find(recipe, key)
    return known.path if known else _library(_libraries() / f"{recipe.name}-{key}", recipe.name)


def is_built(recipe: Recipe) -> bool:
    """Whether ``build`` would return at once.

    Raises:
        BuildError: a source or header cannot be read.
    """
    return _find(recipe, _key(recipe)) is not None


def list_built() -> tuple[Built, ...]:
    """Every library in the cache, and in the private folder that stands in for it, by name and time."""
    folders = (p for root in _readable_roots() if root.is_dir() for p in root.iterdir())
    found = (_entry(p) for p in folders if _ENTRY.fullmatch(p.name))
    return tuple(sorted((e for e in found if e), key=lambda e: (e.name, e.time)))


def clean() -> tuple[Built, ...]:
    """Remove every library, lock and forgotten temporary folder; builds in progress go on.

    A process that has loaded a library keeps it.

    Returns:
        What was removed.
    """
    removed = list_built()
    for root in _readable_roots():
        if root.is_dir():
            _remove_stale(root)
            for path in root.iterdir():
                if _ENTRY.fullmatch(path.name):
                    shutil.rmtree(path, ignore_errors=True)
                elif path.name.endswith(_LOCK):
                    path.unlink(missing_ok=True)
    return tuple(entry for entry in removed if not entry.path.exists())


def _key(recipe: Recipe) -> str:
    """The digest of all that the library depends on."""
    compiler = recipe.compiler
    facts = {
        "abi": BUILD_ABI,
        "machine": [sys.platform, platform.machine()],
        "compiler": [*compiler.command, compiler.version, *compiler.pic],
        "units": [[u.name, u.source.name, _digest(u.source), *u.flags] for u in recipe.units],
        "headers": sorted([p.name, _digest(p)] for p in recipe.headers),
        "link": recipe.link_flags,
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        fix = "Install qtensor again" if path.is_relative_to(Path(__file__).parent) else "Mend it"
        fail("build", "sources and headers must be readable", error, fix, BuildError)


def _library(entry: Path, name: str) -> Path:
    return entry / f"{name}.so"


def _find(recipe: Recipe, key: str) -> Built | None:
    entries = (_entry(root / f"{recipe.name}-{key}") for root in _readable_roots())
    return next(filter(None, entries), None)


def _entry(folder: Path) -> Built | None:
    """What lies in a folder of the cache; None if it is not there or was cut short (a full disk, a crash)."""
    try:
        found = json.loads((folder / _MANIFEST).read_text())
        library = _library(folder, found["name"])
        if library.stat().st_size != found["size"]:
            return None
        return Built(found["name"], found["key"], library, found["size"], found["time"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


# ------------------------------------------------------------------------------------------- building


def build(recipe: Recipe, *, notice: Callable[[str], None] | None = None) -> Path:
    """The library of a recipe, compiled and linked if the cache has none.

    Processes that ask for the same library at the same time build it once.

    Args:
        recipe: what to build.
        notice: told in one line before it compiles or waits; by default, stderr is.

    Returns:
        Path of the shared library.

    Raises:
        BuildError: a file cannot be read or written, or the compiler fails, hangs or makes no library.
    """
    key = _key(recipe)
    known = _find(recipe, key)
    if known is not None:
        return known.path
    tell = notice or _to_stderr
    root = _writable_root()
    entry = root / f"{recipe.name}-{key}"
    try:
        with _locked(root / f"{entry.name}{_LOCK}", recipe, tell):
            if _entry(entry) is None:
                _remove_stale(root)
                _make(recipe, key, entry, tell)
    except OSError as error:
        fix = "Make room there, or set QTENSOR_CACHE_DIR to another folder"
        rule = "the cache must be writable"
        raise BuildError(f"build[{recipe.name}]: {rule}; got {error}. {fix}.") from error
    return _library(entry, recipe.name)


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _locked(path: Path, recipe: Recipe, tell: Callable[[str], None]) -> Iterator[None]:
    """Alone in building that library. The lock ends with its process, however it ends."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        tell(f"qtensor: waiting for another process that compiles its {recipe.title}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _remove_stale(root: Path) -> None:
    """Remove what killed builds left; younger folders may be in use."""
    for path in root.glob(f"{_WORK}*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _STALE:
                shutil.rmtree(path, ignore_errors=True)


def _make(recipe: Recipe, key: str, entry: Path, tell: Callable[[str], None]) -> None:
    op = f"build[{recipe.name}]"
    jobs = parallel_jobs(len(recipe.units))
    # Twice as long where other work goes on beside, or the processor is slow.
    least = max(1, round(recipe.effort / jobs))
    seconds = f"{least} to {2 * least} s; " if recipe.effort else ""
    tell(f"qtensor: compiling its {recipe.title} (once, {seconds}cached in {entry.parent})")
    work = Path(tempfile.mkdtemp(prefix=_WORK, dir=entry.parent))
    try:
        made = work / "made"  # not the work folder itself, which mkdtemp closes to other users
        made.mkdir()
        library = _library(made, recipe.name)
        _compile(op, recipe, library, jobs, work)
        _check_library(op, library, recipe.compiler)
        if _key(recipe) != key:
            got = "other contents than at the start"
            fix = "Run it again"
            fail(op, "sources must not change while they compile", got, fix, BuildError)
        _write_manifest(made, recipe, key, library)
        _install(made, entry)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _compile(op: str, recipe: Recipe, library: Path, jobs: int, work: Path) -> None:
    cxx = recipe.compiler
    units, objects = [], []
    for unit in recipe.units:
        objects.append(work / f"{unit.name}.o")
        source = str(unit.source.absolute())
        include = (f"-I{folder}" for folder in unit.include)
        arguments = (*cxx.pic, *unit.flags, *include, "-c", source, "-o", str(objects[-1]))
        what = f"unit {unit.name!r} of {unit.source.name}"
        units.append(Command(what, cxx, arguments, objects[-1]))
    run_all(op, units, jobs, work)
    arguments = ("-shared", "-o", str(library), *map(str, objects), *recipe.link_flags)
    run_all(op, [Command("the library", cxx, arguments, library)], 1, work)


def _check_library(op: str, library: Path, compiler: Compiler) -> None:
    """Refuse what is no library, which would fail at every load from now on, and see it on the disk."""
    with library.open("rb") as file:
        magic = _MAGIC.get(sys.platform, b"")
        head = file.read(len(magic))
        fix = f"Set {compiler.variable} to a compiler that makes libraries for this machine"
        rule = f"{' '.join(compiler.command)} must make a shared library"
        check(head == magic, op, rule, f"a file that begins with {head!r}", fix, BuildError)
        os.fsync(file.fileno())


def _write_manifest(made: Path, recipe: Recipe, key: str, library: Path) -> None:
    facts = {
        "name": recipe.name,
        "key": key,
        "size": library.stat().st_size,
        "time": time.time(),
        "compiler": recipe.compiler.version,
    }
    (made / _MANIFEST).write_text(json.dumps(facts, indent=1) + "\n")


def _install(made: Path, entry: Path) -> None:
    """Rename into place, over what is not whole. A whole one there is as good: someone removed our lock."""
    try:
        made.rename(entry)
    except OSError:
        if _entry(entry) is None:
            if not entry.exists():
                raise
            shutil.rmtree(entry)
            made.rename(entry)
