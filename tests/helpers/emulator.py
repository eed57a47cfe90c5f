"""Kernels that are compiled for aarch64 and run in an emulator."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Mapping, Sequence
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
    """Return the program of a server (server.h) and of the kernels that it calls.

    Args:
        name: of the source of the server, which has the flags of the first unit.
        units: the kernels.
        folder: for the program.
    """
    server = Unit(HELPERS / f"{name}.cpp", units[0].flags, name)
    for unit in (*units, server):
        command = [CXX, *unit.flags, "-Werror", f"-I{sources.FOLDER}", "-c", str(unit.source)]
        subprocess.run([*command, "-o", f"{unit.name}.o"], check=True, cwd=folder)
    objects = [f"{unit.name}.o" for unit in (*units, server)]
    subprocess.run([CXX, "-static", "-fopenmp", *objects, "-o", name], check=True, cwd=folder)
    return folder / name


class Emulated:
    """A server in the emulator.

    Attributes:
        calls: the number of calls that it has answered.
    """

    def __init__(self, program: Path) -> None:
        command = [EMULATOR, str(program)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.calls = 0

    def call(self, arguments: bytes, buffers: Sequence[tuple[int, bytes]]) -> list[bytes]:
        """Return the new contents of the buffers.

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
        sizes = [len(contents) for _, contents in buffers]
        answers = [stdout.read(size) for size in sizes]
        assert list(map(len, answers)) == sizes, "the kernel refuses the call, or crashed"
        self.calls += 1
        return answers

    def call_in_place(self, arguments: bytes, sizes: Mapping[int, int], before: bytes = b"") -> int:
        """Replace the contents of memory as a kernel here would, and return its status.

        Args:
            arguments: of the kernel, words of 8 bytes.
            sizes: of the memory at each address among the words, in bytes.
            before: arguments of the server before those of the kernel.
        """
        words = struct.unpack(f"={len(arguments) // 8}q", arguments)
        held = [(i, word) for i, word in enumerate(words) if word in sizes]
        buffers = [(len(before) + 8 * i, ctypes.string_at(at, sizes[at])) for i, at in held]
        for (_, at), contents in zip(held, self.call(before + arguments, buffers), strict=True):
            ctypes.memmove(at, contents, sizes[at])
        return 0

    def close(self) -> None:
        """End the server, which must not have crashed."""
        self._process.communicate(timeout=60)
        assert self._process.returncode == 0
