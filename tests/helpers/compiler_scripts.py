"""Small C++ sources, and stand-in compilers: shell scripts around the real one."""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import time
from pathlib import Path

from torch_process import TorchProcess

from qtensor.build.cache import BuildSpec, Unit
from qtensor.build.compilers import Compiler, find_cxx

SECONDS = 120
"""A wait that lasts this long has failed."""

PROCESS = """
import json, signal, sys
from pathlib import Path
from qtensor.build.cache import BuildSpec, Unit, build
from qtensor.build.compilers import Compiler

# A shell starts its background jobs with interrupts ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
source, compiler, told = sys.argv[1:]
recipe = BuildSpec("answer", (Unit(Path(source), (), "only"),), Compiler(compiler, "script 1.0"))
path = build(recipe, notice=lambda text: Path(told).open("a").write(text + "\\n"))
json.dump(str(path), sys.stdout)
"""
"""Builds ``recipe(source, compiler)`` in a process of its own."""


def write_source(folder: Path, text: str = 'extern "C" int answer() { return 42; }') -> Path:
    source = folder / "answer.cpp"
    source.write_text(text + "\n")
    return source


def recipe(source: Path, compiler: Compiler | Path, *flags: str, **more) -> BuildSpec:
    """Return the description of a library ``answer`` with one unit."""
    if isinstance(compiler, Path):
        compiler = Compiler(str(compiler), "script 1.0")
    return BuildSpec("answer", (Unit(source, flags, "only"),), compiler, **more)


def script(folder: Path, body: str = "", *, name: str = "cxx") -> Path:
    """Return a compiler that logs each run to ``runs``, does ``body`` and runs the real one."""
    path = folder / name
    real = shlex.join(find_cxx().command)
    path.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo "script 1.0"; exit; fi\n'
        f"here={shlex.quote(str(folder))}\n"
        'echo "$*" >>"$here/runs"\n'
        f'{body}\nexec {real} "$@"\n'
    )
    path.chmod(0o755)
    return path


def waiting(event: str) -> str:
    """Return lines of a script that wait until a file appears beside it."""
    return (
        f'n=0; while [ ! -e "$here/{event}" ] && [ $n -lt 6000 ]; do sleep 0.02; n=$((n + 1)); done'
    )


def runs(folder: Path) -> list[str]:
    """Return the arguments of each run of ``script(folder)``."""
    log = folder / "runs"
    return log.read_text().splitlines() if log.exists() else []


def answer(library: Path) -> int:
    """Return the result of the built function."""
    return ctypes.CDLL(str(library)).answer()


def entries(libraries: Path) -> list[str]:
    """Return the entries of the cache without the locks."""
    return sorted(p.name for p in libraries.iterdir() if p.suffix != ".lock")


def start(source: Path, compiler: Path, told: Path, before: str = "") -> TorchProcess:
    """Start ``PROCESS`` after the lines ``before``."""
    return TorchProcess(before + PROCESS, str(source), str(compiler), str(told))


def finish(process: TorchProcess) -> Path:
    done = process.finish()
    assert done.returncode == 0, done.stderr
    return Path(json.loads(done.stdout))


def wait_for(condition) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    try:
        return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
