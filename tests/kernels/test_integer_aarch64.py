"""Integer products on another machine: aarch64 in an emulator has the bytes of the oracle."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from emulator import MARKS, Emulated, compile_server
from integer_cases import PAIRS, check_ends_of_factors, check_largest_sums, check_layouts
from native_cases import loaded

from qtensor.core.buffer_shapes import ceil_div
from qtensor.kernels.cpu import integer_products, native, sources
from qtensor.kernels.cpu.structs import CQuantizer
from qtensor.library.native_ops import left_to_python

pytestmark = MARKS


@pytest.fixture(scope="session", params=[(), ("-march=armv8.2-a+dotprod",)], ids=["", "sdot"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernel for aarch64 behind stdin and stdout, also with dot products of bytes."""
    units = [unit for unit in sources.units("baseline") if unit.name == "integer_products"]
    units = [dataclasses.replace(unit, flags=(*unit.flags, *request.param)) for unit in units]
    return compile_server("integer_server", units, tmp_path_factory.mktemp("aarch64"))


def sizes_of(packed: bytes) -> dict[int, int]:
    """Return the bytes at each address of a call, whose words are `IntegerArguments`."""
    words = integer_products._ARGUMENTS.unpack(packed)
    m, k, n, _, bias, y, dtype = words[20:]
    sizes = {bias: 4 * n, y: m * n * (4, 2, 2)[dtype]}
    for quantizer, lines, count in ((words[0], words[2:11], m), (words[1], words[11:20], n)):
        facts = CQuantizer.from_address(quantizer)
        codes, across, along, scales, line, block, tiles, factors, step = lines
        length, blocks = ceil_div(k, facts.codes) * facts.bytes, ceil_div(k, facts.block)
        sizes[quantizer] = ctypes.sizeof(CQuantizer)
        sizes[codes] = (count - 1) * across + (length - 1) * along + 1
        sizes[scales] = (count - 1) * line + (blocks - 1) * block + 1
        if tiles:
            sizes[scales] = ceil_div(count, 128) * tiles * 512
        sizes[factors] = 4 * (count if step else 1)
    sizes.pop(0, None)  # the address of what a call does not have
    return sizes


@pytest.fixture
def emulated(server: Path) -> Iterator[Emulated]:
    here, found = native.library(), Emulated(server)
    assert not isinstance(here, str)

    def integer_products_(packed: bytes) -> int:
        return found.call_in_place(packed, sizes_of(packed))

    with loaded(here), left_to_python(), pytest.MonkeyPatch.context() as patch:
        # C++ takes the address of the function, so the patch comes after it.
        patch.setattr(here.handle, "qt_integer_products", integer_products_)
        yield found
    found.close()


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_formats_and_layouts(emulated: Emulated, pair: Any) -> None:
    torch.manual_seed(0)
    check_layouts(*pair)
    assert emulated.calls == 27


def test_factors_at_the_ends_of_their_range(emulated: Emulated) -> None:
    check_ends_of_factors()
    assert emulated.calls == 36


def test_largest_sums(emulated: Emulated) -> None:
    check_largest_sums()
    assert emulated.calls == 10
