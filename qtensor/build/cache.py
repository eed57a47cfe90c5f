"""The cache of compiled kernels: each library is built once, in a folder named after its key.

The key is a digest of the sources and flags.

A library lies in `<cache>/libraries/<name>-<key>/` beside a manifest with its size and SHA-256. The
folder is filled under a temporary name and then renamed: other processes see all of it or none of
it, and need no lock.

The key does not depend on the compiler. A cache that was filled in one image serves in another one
that has no compiler or a newer one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from qtensor.build.compilers import Command, Compiler, parallel_jobs, run_all
from qtensor.build.folders import (
    cache_dir,
    libraries_folder,
    make_folder,
    readable_roots,
    untrusted,
    writable_root,
)
from qtensor.core.errors import BuildError, CompilerNotFound, check, fail

__all__ = [
    "BUILD_ABI",
    "BuildSpec",
    "Built",
    "Unit",
    "build",
    "cache_dir",
    "clean",
    "is_built",
    "is_intact",
    "library_path",
    "list_built",
    "only_process",
    "rebuild",
    "remove",
    "seconds",
    "source_key",
]

BUILD_ABI = 2
"""Part of every key. Raise it when this module builds differently."""

_STALE = 24 * 60 * 60.0
_WORK = ".making-"
_LOCK = ".lock"
_MANIFEST = "manifest.json"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_ENTRY = re.compile(r".+-[0-9a-f]{32}")
_MAGIC = {"linux": b"\x7fELF"}


@dataclass(frozen=True)
class Unit:
    """One compilation of a source. A source may be in several units with different flags.

    Attributes:
        source: the file to compile.
        flags: all flags except `-c`, `-o` and those for position-independent code. Never
            `-march=native`: home folders, and so caches, are shared by machines with different
            processors.
        name: unique in its `BuildSpec`; names the object file.
        include: folders for `-I` whose paths are not part of the key, such as those of an installed
            package. Their version belongs into `flags`, or their files into the spec's `headers`.
    """

    source: Path
    flags: tuple[str, ...]
    name: str
    include: tuple[Path, ...] = ()


@dataclass(frozen=True)
class BuildSpec:
    """How to make a shared library, and everything that its behaviour depends on.

    A fact that is not a file here, such as the version of a library that the headers belong to,
    goes into a `-D` flag.

    Attributes:
        name: name of the library; part of its path.
        units: at least one.
        compiler: compiles and links; or a function that finds it, which runs only if there is
            something to compile.
        headers: files that the sources include. Only their contents are part of the key; `-I`
            belongs into the flags.
        link_flags: flags after the objects when linking.
        title: what the notice says is compiled, for example "CPU kernels".
        effort: seconds that the build takes on one free processor, for the notice; 0 if unknown.

    Raises:
        QTensorError: there is no unit, a name is not a plain file name, or two units have the same
            name.
    """

    name: str
    units: tuple[Unit, ...]
    compiler: Compiler | Callable[[], Compiler]
    headers: tuple[Path, ...] = ()
    link_flags: tuple[str, ...] = ()
    title: str = "native code"
    effort: float = 0.0

    def __post_init__(self) -> None:
        names = [unit.name for unit in self.units]
        op = f"build {self.name!r}"
        check(bool(names), op, "a library has at least one unit", "none", "Add a Unit")
        plain = all(_NAME.fullmatch(name) for name in (self.name, *names))
        rule = "names are letters, digits and _ . + -"
        check(plain, op, rule, f"units {names}", "Choose other names")
        distinct = len(set(names)) == len(names)
        check(distinct, op, "each unit has its own name", f"units {names}", "Rename one of them")

    def find_compiler(self) -> Compiler:
        """Return the compiler."""
        return self.compiler if isinstance(self.compiler, Compiler) else self.compiler()


@dataclass(frozen=True)
class Built:
    """A library in the cache.

    Attributes:
        name: name of the library.
        key: key of the sources and flags that it was built from.
        path: the shared library.
        size: its size in bytes.
        time: when it was built, in seconds since 1970.
        compiler: version of the compiler that built it; "" if the manifest does not say.
        digest: SHA-256 of the library when it was built; "" if the manifest does not say.
    """

    name: str
    key: str
    path: Path
    size: int
    time: float
    compiler: str = ""
    digest: str = ""


# -------------------------------------------------------------------------------------------
# look-up


def library_path(spec: BuildSpec) -> Path:
    """Return where the library is or, if it is not built, where a build puts it in the cache."""
    key = source_key(spec)
    built = _find(spec, key)
    if built is not None:
        return built.path
    return _library(libraries_folder() / f"{spec.name}-{key}", spec.name)


def is_built(spec: BuildSpec) -> bool:
    """Return whether `build` would return at once."""
    return _find(spec, source_key(spec)) is not None


def list_built() -> tuple[Built, ...]:
    """Return every library in the cache and in the folder that replaces it, by name and time.

    Libraries that other users could have written are left out. This function does not read the
    libraries themselves: check each one with `is_intact` before you load it.
    """
    roots = [root for root in readable_roots() if root.is_dir()]
    folders = (path for root in roots for path in root.iterdir() if _ENTRY.fullmatch(path.name))
    entries = [entry for folder in folders if (entry := _entry(folder)) is not None]
    return tuple(sorted(entries, key=lambda entry: (entry.name, entry.time)))


def clean() -> tuple[Built, ...]:
    """Remove every library, lock and forgotten temporary folder, and return the libraries.

    Builds in progress continue, and a process that has loaded a library keeps it.
    """
    removed = list_built()
    for root in readable_roots():
        if root.is_dir():
            _remove_stale(root)
    remove("")
    return tuple(entry for entry in removed if not entry.path.exists())


def remove(start: str) -> None:
    """Remove the libraries whose names begin with `start`, and their locks."""
    for root in readable_roots():
        for path in root.glob(f"{start}*"):
            if _ENTRY.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.endswith(_LOCK):
                with contextlib.suppress(OSError):
                    path.unlink()


def source_key(spec: BuildSpec) -> str:
    """Return the digest of a library's sources, headers and flags and of the kind of machine."""
    facts = {
        "abi": BUILD_ABI,
        "machine": [sys.platform, platform.machine()],
        "units": [[u.name, u.source.name, _file_digest(u.source), *u.flags] for u in spec.units],
        "headers": sorted([p.name, _file_digest(p)] for p in spec.headers),
        "link": spec.link_flags,
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _file_digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        own = path.is_relative_to(Path(__file__).parents[1])
        fix = "Install qtensor again" if own else "Make the file readable"
        fail("build", "sources and headers must be readable", error, fix, BuildError)


def _library(folder: Path, name: str) -> Path:
    return folder / f"{name}.so"


def _find(spec: BuildSpec, key: str) -> Built | None:
    """Return the library of `spec` if the cache has it, unchanged since it was built."""
    entries = (_intact_entry(root / f"{spec.name}-{key}") for root in readable_roots())
    return next((entry for entry in entries if entry is not None), None)


def _intact_entry(folder: Path) -> Built | None:
    entry = _entry(folder)
    return entry if entry is not None and is_intact(entry) else None


def _entry(folder: Path) -> Built | None:
    """Return the library in a folder of the cache.

    None if there is none, if it was cut short (a full disk, a crash) or if another user could have
    written it.
    """
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        name, compiler, digest = (str(manifest.get(k, "")) for k in ("name", "compiler", "sha256"))
        library = _library(folder, name)
        if library.stat().st_size != manifest["size"]:
            return None
        if any(untrusted(file, folder.parent) for file in (library, folder / _MANIFEST)):
            return None
        key, size, built_at = manifest["key"], manifest["size"], manifest["time"]
        return Built(name, key, library, size, built_at, compiler, digest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def is_intact(entry: Built) -> bool:
    """Return whether a library has the bytes that the compiler wrote, by its SHA-256.

    `build` and `is_built` make this check themselves.
    """
    try:
        return hashlib.sha256(entry.path.read_bytes()).hexdigest() == entry.digest
    except OSError:
        return False


# -------------------------------------------------------------------------------------------
# building


def build(spec: BuildSpec, *, notice: Callable[[str], None] | None = None) -> Path:
    """Return the library of `spec`; compile and link it first if the cache does not have it.

    Processes that ask for the same library at the same time build it once. ``notice`` receives one
    line before this function compiles or waits; by default the line goes to stderr.

    Raises:
        CompilerNotFound: the library is not built and this machine has no compiler.
        BuildError: a file cannot be read or written, or the compiler fails, hangs or makes no
            library.
    """
    key = source_key(spec)
    built = _find(spec, key)
    return _build(spec, key, notice or _to_stderr) if built is None else built.path


def rebuild(spec: BuildSpec, *, notice: Callable[[str], None] | None = None) -> Path | None:
    """Replace a library that the system cannot load, if another compiler built it.

    Such a library comes from a machine with a newer C or C++ runtime. The same compiler would only
    make the same library again; then this function returns None, and else the new path.

    Raises:
        BuildError: as `build`.
    """
    key = source_key(spec)
    built = _find(spec, key)
    if built is not None:
        if built.compiler == spec.find_compiler().version:
            return None
        shutil.rmtree(built.path.parent, ignore_errors=True)
    return _build(spec, key, notice or _to_stderr)


def _build(spec: BuildSpec, key: str, tell: Callable[[str], None]) -> Path:
    compiler = _compiler(spec)
    root = writable_root()
    folder = root / f"{spec.name}-{key}"
    try:
        with _locked(root / f"{folder.name}{_LOCK}", spec, tell):
            if _intact_entry(folder) is None:
                _remove_stale(root)
                _make(spec, key, folder, compiler, tell)
    except OSError as error:
        fix = "Make room there, or set QTENSOR_CACHE_DIR to another folder"
        rule = "the cache must be writable"
        raise BuildError(f"build[{spec.name}]: {rule}; got {error}. {fix}.") from error
    return _library(folder, spec.name)


def seconds(spec: BuildSpec) -> str:
    """Return how long a build takes on the processors of this machine: "40 to 80 s"."""
    least = max(1, round(spec.effort / parallel_jobs(len(spec.units))))
    # A slow processor, or one with other work, takes about twice as long.
    return f"{least} to {2 * least} s"


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _locked(path: Path, spec: BuildSpec, tell: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of one library. The system releases it when the process ends or is killed."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        tell(f"qtensor: waiting for another process that compiles its {spec.title}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def only_process(task: str) -> Iterator[bool]:
    """Hold the lock of a task of that name; yield False at once if another process holds it."""
    lock = FileLock(writable_root() / f"{task}{_LOCK}")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _remove_stale(root: Path) -> None:
    """Remove folders that killed builds left; younger ones may be in use."""
    for path in root.glob(f"{_WORK}*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _STALE:
                shutil.rmtree(path, ignore_errors=True)


def _compiler(spec: BuildSpec) -> Compiler:
    """Return the compiler; the error also names a cache that exists but is not trusted."""
    try:
        return spec.find_compiler()
    except CompilerNotFound as error:
        root = libraries_folder()
        reason = untrusted(root) if root.exists() else None
        if reason is None:
            raise
        raise CompilerNotFound(f"{error} The cache {root} is not trusted: {reason}.") from None


def _make(
    spec: BuildSpec, key: str, folder: Path, compiler: Compiler, tell: Callable[[str], None]
) -> None:
    op = f"build[{spec.name}]"
    jobs = parallel_jobs(len(spec.units))
    time_needed = f"{seconds(spec)}; " if spec.effort else ""
    tell(f"qtensor: compiling its {spec.title} (once, {time_needed}cached in {folder.parent})")
    work = Path(tempfile.mkdtemp(prefix=_WORK, dir=folder.parent))
    try:
        made = work / "made"  # not the work folder itself, which mkdtemp closes to other users
        make_folder(made)
        library = _library(made, spec.name)
        _compile(op, spec, compiler, library, jobs)
        _check_library(op, library, compiler)
        if source_key(spec) != key:
            got = "other contents than at the start"
            fix = "Run it again"
            fail(op, "sources must not change while they compile", got, fix, BuildError)
        _write_manifest(made, spec, key, compiler)
        _install(made, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _compile(op: str, spec: BuildSpec, compiler: Compiler, library: Path, jobs: int) -> None:
    work = library.parent.parent
    units, objects = [], []
    for unit in spec.units:
        objects.append(work / f"{unit.name}.o")
        source = str(unit.source.absolute())
        include = [f"-I{folder}" for folder in unit.include]
        output = ("-c", source, "-o", str(objects[-1]))
        arguments = (*compiler.pic, *unit.flags, *include, *output)
        title = f"unit {unit.name!r} of {unit.source.name}"
        units.append(Command(title, compiler, arguments, objects[-1]))
    run_all(op, units, jobs, work)
    arguments = ("-shared", "-o", str(library), *map(str, objects), *spec.link_flags)
    run_all(op, [Command("the library", compiler, arguments, library)], 1, work)


def _check_library(op: str, library: Path, compiler: Compiler) -> None:
    """Refuse a file that later processes could not load as a library, and write it to the disk."""
    with library.open("rb") as file:
        magic = _MAGIC.get(sys.platform, b"")
        head = file.read(len(magic))
        fix = f"Set {compiler.variable} to a compiler that makes libraries for this machine"
        rule = f"{' '.join(compiler.command)} must make a shared library"
        check(head == magic, op, rule, f"a file that begins with {head!r}", fix, BuildError)
        os.fsync(file.fileno())


def _write_manifest(made: Path, spec: BuildSpec, key: str, compiler: Compiler) -> None:
    library, path = _library(made, spec.name), made / _MANIFEST
    facts = {
        "name": spec.name,
        "key": key,
        "size": library.stat().st_size,
        "sha256": _file_digest(library),
        "time": time.time(),
        "compiler": compiler.version,
    }
    path.write_text(json.dumps(facts, indent=1) + "\n")
    for file in (library, path):
        # Under a umask of 002 or 000 other users could write to them, and no process would trust
        # them.
        file.chmod(file.stat().st_mode & ~0o022)


def _install(made: Path, folder: Path) -> None:
    """Rename `made` to `folder`, replacing a damaged library there.

    An intact library there is as good: it appears if somebody removed the lock of this build.
    """
    try:
        made.rename(folder)
    except OSError:
        if _intact_entry(folder) is None:
            if not folder.exists():
                raise
            shutil.rmtree(folder)
            made.rename(folder)
