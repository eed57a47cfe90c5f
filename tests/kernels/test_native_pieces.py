"""Pieces of the library of CPU kernels give the bytes of the reference and of the library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from formats import DTYPES, FORMATS, FormatCase, assert_same_bytes
from native_cases import (
    assert_same_buffers,
    assert_same_values,
    by_kernels,
    by_reference,
    call_of,
    data,
)
from torch import Tensor

import qtensor
from qtensor.kernels.cpu import native, pieces, sources, structs
from qtensor.kernels.cpu.pieces import Pieces
from qtensor.kernels.cpu.sources import Piece, piece_spec
from qtensor.library.native_ops import left_to_python

ops = torch.ops.qtensor
BEST = sources.usable_isas()[0]

pytestmark = pytest.mark.skipif(
    isinstance(native.library(), str), reason="no C++ compiler: no native kernels"
)


@pytest.fixture
def served(libraries: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pieces]:
    """Let pieces serve that are compiled in an empty cache, with no library to follow."""
    monkeypatch.setattr(pieces, "_start_build", lambda isa: None)
    made = Pieces(BEST)
    monkeypatch.setattr(native, "library", made.current)
    with left_to_python():
        yield made


def loaded(served: Pieces) -> set[Piece]:
    """Return the pieces that have been compiled."""
    return {piece for piece, _ in served._functions}


def test_a_piece_has_one_format_and_dtype(served: Pieces) -> None:
    codec, x = qtensor.quantizer("mxfp8"), data("randn", (33, 50), torch.bfloat16)
    assert_same_buffers(codec, by_kernels(codec, x), by_reference(codec, x))
    (piece,) = loaded(served)
    assert piece == Piece("quantize", "Bfloat16", 1032)
    assert served.current() is served


@pytest.mark.nightly(reason="each case compiles six pieces")
@pytest.mark.parametrize("case", FORMATS, ids=lambda case: case.name)
def test_each_format(served: Pieces, case: FormatCase) -> None:
    if structs.refusal(case.quantizer()) is not None:
        pytest.skip(reason=f"the kernels do not serve {case.name}")
    codec = case.quantizer(columnwise=True)
    for dtype in DTYPES:
        x = data("randn", (130, 65), dtype)
        want = by_reference(codec, x, **call_of(case, {}))
        assert_same_buffers(codec, by_kernels(codec, x, **call_of(case, {})), want)
        assert_same_values(codec, want[: len(codec.slots)], tuple(x.shape))
    assert len(loaded(served)) == 2 * len(DTYPES)


@pytest.mark.nightly(reason="it compiles four pieces")
@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda x, w: ops.norm(x, w, None, "rmsnorm", 1e-5, False, x.dtype)[0], 1),
        (lambda x, w: ops.bias_grad(x), 1),
        (lambda x, w: ops.activation(x, "silu"), 1),
        (lambda x, w: ops.activation_quantize(x, "silu", "mxfp8", None, None, None)[0], 2),
        (lambda x, w: qtensor.quantize(w.expand(8, 64), "mxfp4") @ x[0].float(), 2),
    ],
    ids=["norm", "sums", "activation", "fused", "product"],
)
def test_functions_over_plain_tensors(
    served: Pieces, function: Callable[..., Tensor], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = data("randn", (5, 64), torch.bfloat16), torch.linspace(-1, 1, 64)
    got = function(x, weight)
    assert len(loaded(served)) == count
    with monkeypatch.context() as patch:
        patch.setattr(native, "library", native._found)
        want = function(x, weight)
    assert_same_bytes(got, want, "result")


def test_the_number_of_a_format_is_that_of_its_kernels() -> None:
    """The flags of a piece name the format that C++ compiles, and only its functions' units."""
    spec = piece_spec("avx2", Piece("dequantize", "Bfloat16", 42016))
    assert [unit.name for unit in spec.units] == ["c_interface", "dequantize_Bfloat16"]
    assert all("-DQT_FORMAT=42016" in unit.flags for unit in spec.units)
    for function in ("dequantize", "quantize"):
        widened = piece_spec("avx2", Piece(function, "Float16", 42016))
        names = {unit.name for unit in widened.units}
        assert names == {"c_interface", f"{function}_float16", f"{function}_Float32"}
    assert {unit.name for unit in piece_spec("avx512", Piece("linear")).units} == {
        "c_interface",
        "linear",
        "few_rows",
        "few_rows_bfloat16",
        "dequantize_Bfloat16",  # decodes the weight of dot products
    }
    names = {unit.name for unit in piece_spec("avx512", Piece("integer_products")).units}
    assert names == {"c_interface", "integer_products"}
