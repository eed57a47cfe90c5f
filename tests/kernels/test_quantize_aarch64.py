"""Quantizing and decoding on another machine: aarch64 in an emulator has the bytes of the
reference."""

from __future__ import annotations

import ctypes
import dataclasses
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from adversarial import mixed
from emulator import MARKS, Emulated, compile_server
from formats import DTYPES, FormatCase, formats, layouts
from native_cases import INPUTS, call_of, check, data, loaded
from torch import Tensor

from qtensor.build.cache import Unit
from qtensor.kernels.cpu import native, sources
from qtensor.kernels.cpu.structs import CQuantizer
from qtensor.library.native_ops import left_to_python

pytestmark = MARKS
_LONGEST = native._QUANTIZE.size


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels for aarch64 behind stdin and stdout; those of float16 call those of float32."""
    units: list[Unit] = []
    for unit in sources.units("baseline"):
        if unit.name in ("quantize_Float32", "quantize_Bfloat16"):
            source = sources.FOLDER / "dequantize.cpp"
            units += [unit, dataclasses.replace(unit, source=source, name=f"de{unit.name}")]
    return compile_server("quantize_server", units, tmp_path_factory.mktemp("aarch64"))


@pytest.fixture
def emulated(server: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulated]:
    here, found = native.library(), Emulated(server)
    assert not isinstance(here, str)
    sizes: dict[int, int] = {}
    addresses = native.addresses

    def told(layout: Any, buffers: Sequence[Tensor], *rest: Any) -> Any:
        """Remember the bytes of the buffers of the next call."""
        sizes.clear()
        sizes[layout.address] = ctypes.sizeof(CQuantizer)
        sizes.update((buffer.data_ptr(), buffer.nbytes) for buffer in buffers if buffer.nbytes)
        return addresses(layout, buffers, *rest)

    def quantize(packed: bytes) -> int:
        words = native._QUANTIZE.unpack(packed)
        _, x, dtype, rows, cols, *_ = words
        scale = words[16]
        more = {x: rows * cols * (4, 2, 2)[dtype]} | ({scale: 4} if scale else {})
        return found.call_in_place(packed, sizes | more, struct.pack("=q", 0))

    def dequantize(packed: bytes) -> int:
        _, y, dtype, _, cols, _, count, *_ = native._DEQUANTIZE.unpack(packed)
        more = {y: count * cols * (4, 2, 2)[dtype]}
        padded = packed.ljust(_LONGEST, b"\0")
        return found.call_in_place(padded, sizes | more, struct.pack("=q", 1))

    monkeypatch.setattr(native, "addresses", told)
    with loaded(here), left_to_python(), pytest.MonkeyPatch.context() as patch:
        # C++ takes the addresses of the functions, so the patch comes after it.
        patch.setattr(here.handle, "qt_quantize", quantize)
        patch.setattr(here.handle, "qt_dequantize", dequantize)
        yield found
    found.close()


@layouts
def test_layouts(emulated: Emulated, case: FormatCase, options: dict[str, Any]) -> None:
    """Ragged sizes and whole tiles, both directions, each dtype."""
    codec = case.quantizer(columnwise=True, **options)
    for shape in ((37, 83), (130, 257), (128, 256)):
        for dtype in DTYPES:
            check(codec, data("randn", shape, dtype), **call_of(case, options))
    assert emulated.calls >= 9 * 4


@formats
def test_options_and_kinds_of_input(emulated: Emulated, case: FormatCase) -> None:
    for options in case.each_option():
        codec = case.quantizer(columnwise=True, **options)
        for turn, kind in enumerate(INPUTS):
            check(codec, data(kind, (17, 100), DTYPES[turn % 3]), **call_of(case, options))
        for dtype in DTYPES:
            check(codec, mixed((37, 83), dtype, finite=False), **call_of(case, options))
    assert emulated.calls > 4 * len(INPUTS)
