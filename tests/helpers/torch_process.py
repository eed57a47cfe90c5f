"""Programs in processes of their own that need not import torch again.

Importing torch takes two seconds. A server process imports it once, and each program starts as a
fork of the server: torch is there, but neither qtensor nor any state of a test. Start a Python of
its own instead (``subprocess``) where a program needs options of the interpreter, another PATH to
Python, or measures imports or memory.

The modules of torch that compile, and those of distributed training, take three seconds more. A
second server has them too (``compiles=True``, and the processes of `ranks`).
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.popen_forkserver
import multiprocessing.util
import os
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

SECONDS = 300
COLLECTION = (50_000, 20, 100)
"""Arguments of ``gc.set_threshold`` where tests run."""
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch"])
# The server's socket lies here. Tests change TMPDIR to folders whose names are too long for one.
multiprocessing.util.get_temp_dir()

_COMPILER_SERVER = multiprocessing.forkserver.ForkServer()
_COMPILER_SERVER.set_forkserver_preload([
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
])


def pool(initializer: Callable[..., None] | None = None, *arguments: Any) -> ProcessPoolExecutor:
    """Return one process with torch and the variables of this process; it runs the functions sent.

    It calls ``initializer(*arguments)`` first.
    """
    start = (dict(os.environ), initializer, *arguments)
    return ProcessPoolExecutor(1, SERVER, initializer=_begin, initargs=start)


def _begin(
    environment: dict[str, str], initializer: Callable[..., None] | None, *args: Any
) -> None:
    collect_rarely()
    os.environ.clear()  # of the server, which may have started while a test changed its own
    os.environ.update(environment)
    if initializer is not None:
        initializer(*args)


def collect_rarely() -> None:
    """Keep the garbage collector away from the server's modules, and let it run less often."""
    gc.freeze()
    gc.set_threshold(*COLLECTION)
    skip_guard_timing()
    skip_stacks_of_seeds()


def skip_guard_timing() -> None:
    """Keep Dynamo, if it is imported, from measuring how fast its guards are.

    It empties the caches of the processor first, which takes 20 ms a graph, for a log alone.
    """
    guards = sys.modules.get("torch._dynamo.guards")
    if guards is not None:
        guards.profile_guard_manager = lambda root, local_scope, iterations: 0.0


def skip_stacks_of_seeds() -> None:
    """Keep ``torch.manual_seed`` from writing down its callers.

    It keeps each seed for a GPU that starts later, with the text of the stack, for a message alone.
    That takes two milliseconds, and every test sets a seed.
    """
    for device in ("torch.cuda", "torch.mtia", "torch.xpu"):
        if device in sys.modules:
            sys.modules[device].traceback = types.SimpleNamespace(format_stack=list)


class _CompilerPopen(multiprocessing.popen_forkserver.Popen):
    def _launch(self, process_obj: Any) -> None:
        # multiprocessing itself has one server, which it asks through this name.
        connect = _COMPILER_SERVER.connect_to_new_process
        with mock.patch.object(multiprocessing.forkserver, "connect_to_new_process", connect):
            super()._launch(process_obj)


class CompilerProcess(SERVER.Process):  # type: ignore[name-defined, misc]
    """A ``multiprocessing.Process`` that starts with torch's compilers imported."""

    @staticmethod
    def _Popen(process_obj: Any) -> _CompilerPopen:
        return _CompilerPopen(process_obj)


def _run(code: str, argv: list[str], environment: dict[str, str], folder: str, output: str) -> None:
    """Run the program in the forked process."""
    collect_rarely()
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # which importing torch may have read from the server's variables
    os.chdir(folder)
    for descriptor, stream in ((1, "out"), (2, "err")):
        file = os.open(f"{output}/{stream}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    path = [part for part in environment.get("PYTHONPATH", "").split(":") if part]
    sys.path[:] = ["", *path, *(part for part in sys.path if part not in path)]
    sys.argv[:] = argv
    warnings.resetwarnings()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    main = types.ModuleType("__main__")
    main.__file__ = argv[0]
    sys.modules["__main__"] = main
    exec(compile(code, argv[0], "exec", dont_inherit=True), main.__dict__)


class TorchProcess:
    """A running program; its output goes to files, so that it never waits for a reader."""

    def __init__(
        self,
        code: str,
        *arguments: str,
        name: str = "<program>",
        environment: Mapping[str, str] | None = None,
        folder: str | os.PathLike[str] | None = None,
        compiles: bool = False,
    ) -> None:
        """Start ``code`` as ``__main__``.

        Args:
            code: the text of the program.
            arguments: ``sys.argv[1:]``.
            name: file name in tracebacks, and ``sys.argv[0]``.
            environment: all variables; None: those of this process.
            folder: working directory; None: that of this process.
            compiles: start with torch's compilers and distributed training imported.
        """
        self._output = tempfile.TemporaryDirectory(prefix="torch-process-")
        variables = dict(os.environ if environment is None else environment)
        where = os.fspath(folder or Path.cwd())
        kind = CompilerProcess if compiles else SERVER.Process
        self._process = kind(
            target=_run, args=(code, [name, *arguments], variables, where, self._output.name)
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def stdout(self) -> str:
        """Return all that the program has printed so far."""
        return self._read("out")

    def stderr(self) -> str:
        """Return all that the program has written to stderr so far."""
        return self._read("err")

    def _read(self, stream: str) -> str:
        path = Path(self._output.name, stream)
        return path.read_text() if path.exists() else ""

    def kill(self) -> None:
        self._process.kill()

    def finish(self, timeout: float = SECONDS) -> subprocess.CompletedProcess[str]:
        """Wait for the end; a program that takes longer than ``timeout`` seconds is killed."""
        self._process.join(timeout)
        late = self._process.exitcode is None
        if late:
            self._process.kill()
            self._process.join()
        code, out, err = self._process.exitcode, self.stdout(), self.stderr()
        self._output.cleanup()
        if late:
            raise TimeoutError(f"ran for {timeout} s; wrote {out!r} {err!r}")
        return subprocess.CompletedProcess([], code, out, err)


def run(
    code: str, *arguments: str, check: bool = True, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end (arguments as for `TorchProcess`).

    Raises:
        AssertionError: (check=True) the program failed; the message has what it wrote.
    """
    done = TorchProcess(code, *arguments, **options).finish()
    if check:
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr[-4000:]}"
    return done


def run_ranks(code: str, folder: Path, *arguments: str) -> list[subprocess.CompletedProcess[str]]:
    """Run a program to its end on two ranks, without a check.

    Its first arguments are the rank and the path of a file for ``init_process_group``.
    """
    store = str(folder / "store")
    running = [TorchProcess(code, str(r), store, *arguments, compiles=True) for r in range(2)]
    return [process.finish() for process in running]
