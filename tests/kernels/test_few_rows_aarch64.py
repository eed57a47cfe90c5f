"""The portable kernels on another machine: aarch64 in an emulator has the bytes of the oracle."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from few_rows_cases import WEIGHTS, check_tails
from native_cases import loaded
from places import HELPERS

from qtensor.kernels.cpu import native, sources
from qtensor.kernels.cpu.buffers import SHARED, buffer_layout
from qtensor.kernels.cpu.structs import CQuantizer
from qtensor.library.native_ops import left_to_python

CXX, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
pytestmark = [
    pytest.mark.nightly(reason="it compiles for another machine and runs in an emulator"),
    pytest.mark.skipif(
        shutil.which(CXX) is None or shutil.which(EMULATOR) is None,
        reason=f"this machine has no {CXX} or no {EMULATOR}",
    ),
]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernel for aarch64 behind stdin and stdout."""
    program = tmp_path_factory.mktemp("aarch64") / "linear_server"
    (unit,) = [unit for unit in sources.units("baseline") if unit.name == "few_rows"]
    paths = [str(HELPERS / "linear_server.cpp"), str(unit.source), f"-I{sources.FOLDER}"]
    subprocess.run([CXX, *unit.flags, "-Werror", "-static", *paths, "-o", str(program)], check=True)
    return program


class Remote:
    """The function `qt_linear` of a library of CPU kernels, in the emulator."""

    def __init__(self, program: Path) -> None:
        command = [EMULATOR, str(program)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.calls = 0
        self.known: dict[int, int] = {}
        """Bytes of the weight's buffers, by word."""

    def linear(self, packed: bytes) -> int:
        """Compute one call, whose 18 words are those of `native.linear_`."""
        words = struct.unpack("=18q", packed)
        dtype, stride, rows, cols, count = words[2:7]
        item = (4, 2, 2)
        sizes = {0: ctypes.sizeof(CQuantizer), 1: ((rows - 1) * stride + cols) * item[dtype]}
        sizes |= {**self.known, 12: 4 * (rows if words[13] else 1), 14: 4 * count}
        held = [(i, ctypes.string_at(words[i], size)) for i, size in sizes.items() if words[i]]
        held.append((15, bytes(rows * count * item[words[16]])))
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(packed + struct.pack("=q", len(held)))
        for index, contents in held:
            stdin.write(struct.pack("=2q", index, len(contents)) + contents)
        stdin.flush()
        answer = stdout.read(len(held[-1][1]))
        assert len(answer) == len(held[-1][1]), "the kernel refuses the call, or crashed"
        ctypes.memmove(words[15], answer, len(answer))
        self.calls += 1
        return 0


@pytest.fixture
def remote(server: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    here = native.library()
    assert not isinstance(here, str)
    found = Remote(server)
    linear_ = native.linear_

    def sized(weight: Any, *rest: Any, **options: Any) -> bool:
        found.known = {}
        layout = buffer_layout(weight.quantizer, torch.Size(weight.shape))
        assert layout is not None
        read = (*layout.read_positions(columnwise=False), SHARED)
        for slot, position, _, _ in layout.slots:
            if position in read:
                found.known[8 + read.index(position)] = weight.buffers[slot].nbytes
        return linear_(weight, *rest, **options)

    monkeypatch.setattr(native, "linear_", sized)
    monkeypatch.setattr(here, "linear", found.linear)
    with loaded(here), left_to_python():
        yield found
    found.process.communicate(timeout=60)
    assert found.process.returncode == 0


@pytest.mark.parametrize(("fmt", "options"), WEIGHTS, ids=str)
def test_every_kind_of_tail(remote: Remote, fmt: str, options: dict[str, Any]):
    torch.manual_seed(0)
    check_tails(fmt, options)
    assert remote.calls > 80
