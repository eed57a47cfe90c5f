"""Kernels that are compiled for aarch64 and run in an emulator."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from places import HELPERS

from qtensor.build.cache import Unit
from qtensor.kernels.cpu import sources

CXX, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
MARKS = [
    pytest.mark.nightly(reason="it compiles for another machine and runs in an emulator"),
    pytest.mark.skipif(
        shutil.which(CXX) is None or shutil.which(EMULATOR) is None,
        reason=f"this machine has no {CXX} or no {EMULATOR}",
    ),
]


def compile_server(name: str, units: Sequence[Unit], folder: Path) -> Path:
    """Return the program of a server (server.h) and of the kernels that it calls."""
    program = folder / name
    paths = [str(HELPERS / f"{name}.cpp"), *(str(unit.source) for unit in units)]
    (flags,) = {unit.flags for unit in units}
    command = [CXX, *flags, "-Werror", "-static", *paths, f"-I{sources.FOLDER}", "-o", str(program)]
    subprocess.run(command, check=True)
    return program


class Emulated:
    """A server in the emulator.

    Attributes:
        calls: the number of calls that it has answered.
    """

    def __init__(self, program: Path) -> None:
        command = [EMULATOR, str(program)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.calls = 0

    def call(self, arguments: bytes, buffers: Sequence[tuple[int, bytes]]) -> bytes:
        """Return the new contents of the last buffer.

        Args:
            arguments: of the kernel.
            buffers: the offset in `arguments` of each address, and the contents there.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(arguments + struct.pack("=q", len(buffers)))
        for offset, contents in buffers:
            stdin.write(struct.pack("=2q", offset, len(contents)) + contents)
        stdin.flush()
        size = len(buffers[-1][1])
        answer = stdout.read(size)
        assert len(answer) == size, "the kernel refuses the call, or crashed"
        self.calls += 1
        return answer

    def close(self) -> None:
        """End the server, which must not have crashed."""
        self._process.communicate(timeout=60)
        assert self._process.returncode == 0
