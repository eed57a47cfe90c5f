"""Each instruction set that this CPU has gives the same bytes. Each library is built once and stays
in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from formats import BY_NAME, DTYPES, FormatCase, formats, layouts
from native_cases import (
    INPUTS,
    ISAS,
    assert_same_values,
    call_of,
    check,
    check_random,
    data,
    dirty,
    library_of,
    loaded,
    spec_of,
    threads,
)

from qtensor.build.cache import build
from qtensor.kernels.cpu import native


@pytest.fixture(scope="session", params=ISAS)
def library(request: pytest.FixtureRequest) -> native.Library:
    """The kernels of one instruction set."""
    return library_of(request.param)


@pytest.fixture(autouse=True)
def _serves(library: native.Library) -> Iterator[None]:
    with loaded(library):
        yield


def test_the_library_is_that_of_the_instruction_set(
    library: native.Library, request: pytest.FixtureRequest
) -> None:
    parameter = request.node.callspec.params["library"]
    isa, path = parameter.partition(" ")[0], build(spec_of(parameter))
    assert path.name == f"cpu_{isa}.so"
    assert f"qt_{isa}".encode() in path.read_bytes(), "names carry the namespace"
    assert native.library() is library


@layouts
def test_each_layout(case: FormatCase, options: dict[str, Any]) -> None:
    codec = case.quantizer(columnwise=True, **options)
    for turn, shape in enumerate([(37, 83), (257, 33), (33, 1025), (128, 256), (2, 3, 40), ()]):
        check(codec, data("randn", shape, DTYPES[turn % 3]), **call_of(case, options))
        with threads(2):
            check(codec, data("ties", shape, DTYPES[turn % 3]), **call_of(case, options))


@formats
def test_each_option_and_kind_of_input(case: FormatCase) -> None:
    for options in case.each_option():
        codec = case.quantizer(columnwise=True, **options)
        for kind in INPUTS:
            for dtype in DTYPES:
                check(codec, data(kind, (17, 100), dtype), **call_of(case, options))


@formats
def test_any_byte_decodes_alike(case: FormatCase) -> None:
    for options in case.each_option():
        codec = case.quantizer(columnwise=True, **options)
        buffers = dirty(codec, (130, 257))[: len(codec.slots)]
        for slot, buffer in zip(codec.slots, buffers, strict=True):
            narrow = case.name == "mxfp6" and not codec.packed and slot.name.endswith("data")
            buffer.view(torch.uint8).random_(0, 64 if narrow else 256)
        assert_same_values(codec, buffers, (130, 257))


def test_random_cases() -> None:
    for seed in range(5000, 5600):
        check_random(seed)


def test_random_bytes_that_reach_the_next_code_only_by_rounding() -> None:
    """Encode factors are 1 here. The float32 sum of a value and its random part may round up to
    0.5.
    """
    steps = torch.arange(1, 256).repeat_interleave(3) / 512
    below = steps - torch.tensor([0.0, 1.0, 2.0]).repeat(255) * 2.0**-26
    x = below.repeat(512 * 512 // below.numel() + 1)[: 512 * 512].reshape(-1, 16)
    x *= torch.where(torch.arange(len(x)) % 2 == 0, 1.0, -1.0)[:, None]
    x[:, 0], x[0, 0] = 6.0, 6.0 * 448
    codec = BY_NAME["nvfp4"].quantizer(stochastic_rounding=True)
    for seed in range(4):
        check(codec, x.reshape(512, 512), seed=torch.tensor([seed]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotated_values_around_what_the_quick_ways_take(dtype: torch.dtype) -> None:
    """Whole tiles, with blocks that are tiny, zero or not finite in one place, and a maximum in the
    last block.
    """
    tiny = torch.finfo(dtype).tiny
    for side in ("rowwise", "columnwise"):
        codec = BY_NAME["nvfp4"].quantizer(
            rowwise=side == "rowwise",
            columnwise=side == "columnwise",
            with_rht=True,
            rht_side=side,
        )
        for place, value in [
            ((0, 0), float("nan")),
            ((100, 37), float("-inf")),
            ((255, 511), 1000.0),
            ((20, 64), tiny),
            ((20, 64), tiny / 4),
            ((5, 5), -0.0),
        ]:
            x = data("randn", (256, 512), dtype)
            x[place] = value
            check(codec, x)
        x[16:32] = 0
        x[:, 48:64] = tiny * 3
        check(codec, x)
