"""Find the compilers of this machine, and run several of them at once with a time limit."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from qtensor.core.errors import BuildError, CompilerNotFound, fail

TIME_LIMIT = 600.0
"""Seconds after which a compiler that still runs is stopped."""

_VERSION_TIME_LIMIT = 60.0
_POLL = 0.01
_GIB = 1 << 30
_ERROR_LINES = 20
_ERROR_WIDTH = 400
_LOG_BYTES = 1 << 20
_ERROR = re.compile(r"\berror\b|undefined reference|cannot find", re.IGNORECASE)
_CXX_NAMES = ("c++", "g++", "clang++")
_CXX_VARIABLES = ("QTENSOR_CXX", "CXX")


@dataclass(frozen=True)
class Compiler:
    """A compiler that answered `--version`.

    Attributes:
        path: absolute path of the program.
        version: the first line of its answer.
        arguments: the first arguments of every call, such as the real compiler after `ccache`.
        pic: flags for position-independent code; other compilers may spell them differently.
        variable: the environment variable with which a user chooses another compiler.
    """

    path: str
    version: str
    arguments: tuple[str, ...] = ()
    pic: tuple[str, ...] = ("-fPIC",)
    variable: str = "QTENSOR_CXX"

    @property
    def command(self) -> tuple[str, ...]:
        """Return the program and the first arguments of every call."""
        return (self.path, *self.arguments)


@dataclass(frozen=True)
class Command:
    """One run of a compiler.

    Attributes:
        title: the name of the result in messages, for example "unit 'avx2' of gemm.cpp".
        compiler: the compiler to run.
        arguments: its arguments; paths are absolute.
        output: the file that it must write.
    """

    title: str
    compiler: Compiler
    arguments: tuple[str, ...]
    output: Path

    @property
    def line(self) -> tuple[str, ...]:
        """Return the program and all of its arguments."""
        return (*self.compiler.command, *self.arguments)


def find_cxx() -> Compiler:
    """Return the C++ compiler of this machine.

    `$QTENSOR_CXX`, else `$CXX`, else the first of c++, g++ and clang++ on PATH that runs. Both
    variables may contain arguments: `CXX="ccache g++"`. If a variable is set, no other compiler is
    tried.
    """
    for variable in _CXX_VARIABLES:
        if value := os.environ.get(variable, "").strip():
            result = _probe(_words(value))
            if isinstance(result, Compiler):
                return result
            _not_found(f"{variable}={value!r}: {result}")
    tried = []
    for name in _CXX_NAMES:
        result = _probe((name,))
        if isinstance(result, Compiler):
            return result
        tried.append(f"{name}: {result}")
    _not_found("; ".join(tried))


def _not_found(got: str) -> NoReturn:
    rule = "a compiler must be on PATH or in QTENSOR_CXX, and answer --version"
    fix = "Install one (Debian, Ubuntu: apt install g++; conda: conda install gxx), or set "
    fail("C++ compiler", rule, got, f"{fix}QTENSOR_CXX to one", CompilerNotFound)


def _words(value: str) -> tuple[str, ...]:
    """Split a command into words; the path of an existing file is one word, spaces included."""
    if os.path.isfile(value):
        return (value,)
    try:
        return tuple(shlex.split(value))
    except ValueError:  # a quote that is not closed
        return (value,)


def _probe(words: tuple[str, ...]) -> Compiler | str:
    """Return the compiler that a command runs, or the reason why it is not usable."""
    path = shutil.which(words[0])
    if path is None:
        return "no program of that name that may be run"
    path = os.path.abspath(path)
    found = version_lines((path, *words[1:]))
    if isinstance(found, str):
        return found
    status, lines = found
    if status != 0:
        return f"--version ended with status {status}"
    if not lines or not re.search(r"\d\.\d", lines[0]):
        return "--version names no version"
    return Compiler(path, lines[0], words[1:])


def version_lines(words: tuple[str, ...]) -> tuple[int, list[str]] | str:
    """Return the status and the lines of `--version`, or the reason why there are none."""
    try:
        done = subprocess.run(
            (*words, "--version"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"LC_ALL": "C"},
            timeout=_VERSION_TIME_LIMIT,
            check=False,
        )
    except OSError as error:
        return f"does not start ({error.strerror or error})"
    except subprocess.TimeoutExpired:
        return f"gave no version within {_VERSION_TIME_LIMIT:g} s"
    return done.returncode, _readable(done.stdout)


def parallel_jobs(runs: int, memory: int = _GIB) -> int:
    """Return how many of `runs` compilers to run at once.

    At most one for each processor, and one for each `memory` bytes of free memory.
    """
    free = _free_memory()
    room = runs if free is None else free // memory
    return max(1, min(runs, _processors(), room))


def _processors() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


def _free_memory() -> int | None:
    """Return the free bytes of the machine or, if fewer, of the container; None if unknown."""
    free = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        free.append(_fields("/proc/meminfo")["MemAvailable"] * 1024)
    with contextlib.suppress(OSError, ValueError, KeyError):
        # memory.current would count the page cache, which the system can take back.
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        free.append(limit - _fields("/sys/fs/cgroup/memory.stat")["anon"])
    return min(free, default=None)


def _fields(path: str) -> dict[str, int]:
    """Return the numbers in a file with lines such as `MemAvailable:  1024 kB`, by name."""
    rows = (line.split() for line in Path(path).read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) for row in rows}


@dataclass
class _Run:
    command: Command
    process: subprocess.Popen[bytes]
    log: Path
    deadline: float


_PROCESSES: set[subprocess.Popen[bytes]] = set()
"""Compilers that are running, of all threads."""


def stop_all() -> None:
    """Stop every compiler of this process, to give up its builds; other threads' builds fail."""
    for process in tuple(_PROCESSES):
        _kill(process)


def run_all(op: str, commands: Sequence[Command], jobs: int, folder: Path) -> None:
    """Run the commands, `jobs` at a time, and stop all of them at the first failure or interrupt.

    Logs and temporary files lie in ``folder``, which the caller removes.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        try:
            # Only the main thread receives interrupts. If it started the processes, an interrupt
            # could come between the start of a process and its entry in the list, and nothing would
            # stop that process.
            pool.submit(_run_all, op, commands, jobs, folder, stop).result()
        finally:
            stop.set()


def _run_all(
    op: str, commands: Sequence[Command], jobs: int, folder: Path, stop: threading.Event
) -> None:
    waiting = list(reversed(commands))
    running: list[_Run] = []
    try:
        while (waiting or running) and not stop.wait(_POLL):
            while waiting and len(running) < jobs:
                running.append(_start(op, waiting.pop(), folder))
            for run in tuple(running):
                if _has_ended(op, run):
                    running.remove(run)
                    _PROCESSES.discard(run.process)
    finally:
        for run in running:
            _stop(run.process)
            _PROCESSES.discard(run.process)


def _start(op: str, command: Command, folder: Path) -> _Run:
    log = folder / f"{command.output.name}.log"
    # TMPDIR: the files of a killed compiler are removed with the folder. LC_ALL: the search for
    # errors needs English.
    environment = os.environ | {"LC_ALL": "C", "TMPDIR": str(folder)}
    try:
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command.line,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment,
                process_group=0,  # so that _kill reaches the programs that the compiler starts
            )
    except OSError as error:
        _failed(op, command, f"{type(error).__name__}: {error}", log)
    _PROCESSES.add(process)
    return _Run(command, process, log, time.monotonic() + TIME_LIMIT)


def _has_ended(op: str, run: _Run) -> bool:
    status = run.process.poll()
    if status is None:
        if time.monotonic() > run.deadline:
            _failed(op, run.command, f"no end within {TIME_LIMIT:g} s", run.log)
        return False
    if status < 0:
        _failed(op, run.command, f"an end by signal {-status}", run.log)
    if status > 0:
        _failed(op, run.command, f"exit status {status}", run.log)
    if not run.command.output.is_file() or not run.command.output.stat().st_size:
        _failed(op, run.command, "exit status 0 and no output file", run.log)
    return True


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        _kill(process)
        process.wait()


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _failed(op: str, command: Command, got: str, log: Path) -> NoReturn:
    shown = "".join(f"\n    {line}" for line in _first_errors(log)) or " none"
    raise BuildError(
        f"{op}: {command.title} must compile; got {got}. Fix the errors below, or set "
        f"{command.compiler.variable} to another compiler.\n"
        f"  Command: {shlex.join(command.line)}\n  Output:{shown}"
    )


def _first_errors(log: Path) -> list[str]:
    """Return some lines of a log from the first error on, without the notes before it."""
    try:
        with log.open("rb") as source:
            lines = _readable(source.read(_LOG_BYTES))
    except OSError:
        return []
    first = next((i for i, line in enumerate(lines) if _ERROR.search(line)), 0)
    return lines[first : first + _ERROR_LINES]


def _readable(output: bytes) -> list[str]:
    """Return the output of a program as lines that a terminal can show."""
    lines = output.decode(errors="replace").expandtabs(4).splitlines()
    shown = ("".join(c if c.isprintable() else "?" for c in line[:_ERROR_WIDTH]) for line in lines)
    return [line.rstrip() for line in shown if line.strip()]
