"""The portable kernels on another machine: aarch64 in an emulator has the bytes of the oracle."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from emulator import MARKS, Emulated, compile_server
from few_rows_cases import WEIGHTS, check_tails
from native_cases import loaded

from qtensor.kernels.cpu import native, sources
from qtensor.kernels.cpu.buffers import SHARED, buffer_layout
from qtensor.kernels.cpu.structs import CQuantizer
from qtensor.library.native_ops import left_to_python

pytestmark = MARKS


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernel for aarch64 behind stdin and stdout."""
    units = [unit for unit in sources.units("baseline") if unit.name == "few_rows"]
    return compile_server("linear_server", units, tmp_path_factory.mktemp("aarch64"))


class Remote(Emulated):
    """The function `qt_linear` of a library of CPU kernels, in the emulator."""

    known: dict[int, int]
    """Bytes of the weight's buffers, by word."""

    def linear(self, packed: bytes) -> int:
        """Compute one call, whose words are those of `native.linear_` (`LinearArguments`)."""
        words = native.LINEAR.unpack(packed)
        dtype, stride, rows, cols, count = words[4:9]
        item = (4, 2, 2)
        sizes = {0: ctypes.sizeof(CQuantizer), 3: ((rows - 1) * stride + cols) * item[dtype]}
        sizes |= {**self.known, 14: 4 * (rows if words[15] else 1), 16: 4 * count}
        held = [(8 * i, ctypes.string_at(words[i], size)) for i, size in sizes.items() if words[i]]
        held.append((8 * 17, bytes(rows * count * item[words[18]])))
        ctypes.memmove(words[17], self.call(packed, held)[-1], len(held[-1][1]))
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
                found.known[10 + read.index(position)] = weight.buffers[slot].nbytes
        return linear_(weight, *rest, **options)

    monkeypatch.setattr(native, "linear_", sized)
    with loaded(here), left_to_python(), pytest.MonkeyPatch.context() as patch:
        # C++ takes the address of the function, so the patch comes after it.
        patch.setattr(here.handle, "qt_linear", found.linear)
        yield found
    found.close()


@pytest.mark.parametrize(("fmt", "options"), WEIGHTS, ids=str)
def test_every_kind_of_tail(remote: Remote, fmt: str, options: dict[str, Any]):
    torch.manual_seed(0)
    check_tails(fmt, options)
    assert remote.calls > 80
