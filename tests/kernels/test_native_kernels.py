"""The native CPU kernels write the bytes of the reference arithmetic: every format, option, usage,
dtype and kind of input.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from adversarial import mixed
from formats import (
    BY_NAME,
    DTYPES,
    FORMATS,
    USAGES,
    FormatCase,
    assert_same_bytes,
    assert_same_tensor,
    dtypes,
    formats,
    layouts,
    rand,
    usages,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from native_cases import (
    EDGES,
    INPUTS,
    SHAPES,
    WIDE,
    assert_same_buffers,
    assert_same_values,
    by_kernels,
    by_reference,
    call_of,
    check,
    check_random,
    data,
    dirty,
    threads,
)

import qtensor
from qtensor.core import quantizer_registry as codecs
from qtensor.kernels import table
from qtensor.kernels.cpu import native, structs
from qtensor.library.native_ops import left_to_python
from qtensor.quantizers.mx import MXQuantizer
from tests.quantizers.test_quantize_hypothesis import EXAMPLES, FEW, exact, options_of, tensors

# ---- what is served ----------------------------------------------------------------------------


def test_every_format_has_kernels() -> None:
    assert set(structs.FORMATS) == set(BY_NAME)


@formats
@dtypes
def test_every_format_and_dtype_is_served(case: FormatCase, dtype: torch.dtype) -> None:
    """The whole list; a kernel that is taken out of service has to be taken out here."""
    codec = case.quantizer(columnwise=True)
    assert native.supports(codec, dtype) is None
    assert table.explain(codec, dtype, "cpu") == f"{case.name} from {dtype} on cpu: native"


def test_what_is_not_served_says_why() -> None:
    codec = qtensor.quantizer("mxfp8")
    assert "reference (torch.float64 has no native" in table.explain(codec, torch.float64, "cpu")
    assert "reference (no kernels for meta)" in table.explain(codec, torch.float32, "meta")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """What the kernels answered to each call of an op."""
    answers: list[bool] = []

    def watched(kernel: Any) -> Any:
        def call(*args: Any) -> Any:
            result = kernel(*args)
            answers.append(result is not None and result is not False)
            return result

        return call

    for name in ("quantize_", "dequantize_"):
        monkeypatch.setattr(table, name, watched(getattr(table, name)))
    return answers


@formats
@dtypes
def test_the_ops_ask_the_kernels(case: FormatCase, dtype: torch.dtype, served: list[bool]) -> None:
    # In C++, an op asks no table.
    with left_to_python():
        q = case.quantize(rand(64, 64, dtype=dtype))
        q.dequantize()
        row = case.quantize(rand(1, 64, dtype=dtype))
        qtensor.gemm(row, q, "TN", backend="few_rows")  # decodes the row alone
    assert served.count(True) == 4
    assert served[-1]


@pytest.fixture
def outside() -> Iterator[type]:
    """A format that the kernels do not know, though its spec is one of theirs: other factors, so
    other bytes.
    """
    kept = dict(codecs._CLASSES)

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Outside(type(qtensor.quantizer("mxfp8"))):
        format = "outside"

        def encode_(self, out: Any, x: Any, scale: Any, amax: Any, seed: Any) -> None:
            super().encode_(out, x * 2, scale, amax, seed)

    yield Outside
    codecs._CLASSES.clear()
    codecs._CLASSES.update(kept)
    codecs.parse.cache_clear()


def test_a_format_outside_the_list_falls_to_the_reference(
    outside: type[MXQuantizer], served: list[bool]
) -> None:
    x, codec = rand(33, 50), outside()
    assert native.supports(codec, x.dtype) == "outside has no native kernel"
    q = codec.quantize(x)
    assert served == [False]
    twice = BY_NAME["mxfp8"].quantize(x * 2)
    assert_same_bytes(q._rowwise_data, twice._rowwise_data)
    assert_same_bytes(q._rowwise_scale_inv, twice._rowwise_scale_inv)
    served.clear()
    values = q.dequantize()
    assert served == [False]
    assert_same_bytes(values, twice.dequantize())


def test_a_refused_quantizer_falls_to_the_reference(
    monkeypatch: pytest.MonkeyPatch, served: list[bool]
) -> None:
    """The ops in C++ and the kernels ask one function; nobody has asked for this text yet."""
    monkeypatch.setattr(structs, "FORMATS", ())
    codec = qtensor.quantizer("fp8", amax_epsilon=0.1875)
    assert native.supports(codec, torch.float32) == "fp8 has no native kernel"
    q = codec.quantize(rand(33, 50))
    assert served == [False]
    q.dequantize()
    assert served == [False, False]


def test_nothing_is_written_where_the_reference_has_to() -> None:
    codec = qtensor.quantizer("mxfp8")
    for x in (torch.zeros(0, 32), torch.zeros(3, 0), rand(3, 32).double()):
        buffers = dirty(codec, x.shape)
        before = [b.clone() for b in buffers]
        assert table.quantize_(codec, buffers, x, None, None, None) is False
        for a, b in zip(buffers, before, strict=True):
            assert_same_bytes(a, b)


# ---- options, shapes, inputs -------------------------------------------------------------------

ALIKE = pytest.mark.nightly(reason="a format whose rows and columns are written alike is by day")


@formats
@usages
def test_every_combination_of_options(case: FormatCase, rowwise: bool, columnwise: bool) -> None:
    """On an input that has every kind of value in it, of a dtype that takes turns."""
    inputs = [mixed((37, 83), dtype, finite=False) for dtype in DTYPES]
    inputs += [mixed((37, 83), dtype) for dtype in DTYPES]
    for turn, options in enumerate(case.every_option()):
        codec = case.quantizer(rowwise=rowwise, columnwise=columnwise, **options)
        for x in (inputs[turn % 3], inputs[3 + (turn + 1) % 3]):
            check(codec, x, **call_of(case, options))


@formats
@dtypes
@usages
def test_each_option_and_shape(
    case: FormatCase, dtype: torch.dtype, rowwise: bool, columnwise: bool
) -> None:
    for options in case.each_option():
        codec = case.quantizer(rowwise=rowwise, columnwise=columnwise, **options)
        for shape in SHAPES:
            check(codec, data("randn", shape, dtype), **call_of(case, options))


@layouts
@usages
def test_edges_of_tiles(
    case: FormatCase, options: dict[str, Any], rowwise: bool, columnwise: bool
) -> None:
    """Tiles of 256 rows or columns and of 1024 columns, one more and one less."""
    codec = case.quantizer(rowwise=rowwise, columnwise=columnwise, **options)
    shapes = [(m, k) for m in EDGES for k in EDGES]
    shapes += [(33, n) for n in WIDE] + [(n, 33) for n in WIDE]
    for turn, shape in enumerate(shapes):
        check(codec, data("randn", shape, DTYPES[turn % 3]), **call_of(case, options))


@layouts
@dtypes
@usages
def test_more_than_one_tall_tile(
    case: FormatCase, options: dict[str, Any], dtype: torch.dtype, rowwise: bool, columnwise: bool
) -> None:
    """Finite values in tiles of 512 rows and what is left below and beside them, with some blocks
    of zeros.
    """
    codec = case.quantizer(rowwise=rowwise, columnwise=columnwise, **options)
    x = rand(1072, 577, dtype=dtype)
    x[160:192], x[:, 256:288] = 0, 0
    check(codec, x, **call_of(case, options))


@pytest.mark.parametrize(
    ("name", "rowwise", "columnwise"),
    [
        pytest.param(name, *usage, marks=() if (name, usage) == ("mxfp4", (True, True)) else ALIKE)
        for name in ("fp8_blockwise", "mxfp4", "nvfp4")
        for usage in USAGES
    ],
)
def test_codes_that_go_around_the_cache(name: str, rowwise: bool, columnwise: bool) -> None:
    """More elements than ``STREAMED`` of quantize.cpp; rows and columns are whole lines of
    memory.
    """
    x = rand((8 << 20) // 2048 + 128, 2048, dtype=torch.bfloat16)
    check(qtensor.quantizer(name, rowwise=rowwise, columnwise=columnwise), x)


@formats
@dtypes
@usages
def test_few_values_that_are_not_finite_in_a_tall_tile(
    case: FormatCase, dtype: torch.dtype, rowwise: bool, columnwise: bool
) -> None:
    """What a kernel meets late, having quantized the rows before; more rows than any tile of the
    way that it goes then.
    """
    x = rand(520, 200, dtype=dtype)
    x[300, 7], x[10, 190] = float("nan"), float("inf")
    for options in case.each_option():
        codec = case.quantizer(rowwise=rowwise, columnwise=columnwise, **options)
        check(codec, x, **call_of(case, options))


@formats
@dtypes
@pytest.mark.parametrize("kind", INPUTS)
def test_each_kind_of_input(case: FormatCase, dtype: torch.dtype, kind: str) -> None:
    """One kind in the whole tensor, where it decides the tensor's own factor too."""
    x = data(kind, (49, 144), dtype)
    for options in case.each_option():
        check(case.quantizer(columnwise=True, **options), x, **call_of(case, options))


def views(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    base = rand(70, 200, dtype=dtype)
    return {
        "columns": base[:, 3:99],
        "every second row": base[1::2],
        "every second column": base[:, ::2],
        "transposed": base.t(),
        "offset by one element": base.view(-1)[1:-199].view(69, 200)[:, :64],
        "expanded rows": base[:1].expand(40, -1),
        "expanded columns": base[:, :1].expand(-1, 40),
        "one column": base[:, 5:6],
        "one row": base[7:8],
        "a batch whose rows are apart": base.view(7, 10, 200)[:, 2:5, :150],
        "a permuted batch": base.view(7, 10, 200).permute(2, 0, 1),
        "a stride of one in a dim of one": base.as_strided((33, 1), (200, 7)),
        "rows that overlap": base.as_strided((20, 64), (5, 1)),
    }


@formats
@dtypes
def test_strides(case: FormatCase, dtype: torch.dtype) -> None:
    for options in case.each_option():
        codec = case.quantizer(columnwise=True, **options)
        for x in views(dtype).values():
            call = call_of(case, options)
            got, want = by_kernels(codec, x, **call), by_reference(codec, x.contiguous(), **call)
            assert_same_buffers(codec, got, want)


@formats
def test_lazily_negated_values(case: FormatCase) -> None:
    """Torch may say "negated" in a bit beside memory that is not."""
    x = rand(4, 64)
    assert_same_tensor(case.quantize(torch._neg_view(x)), case.quantize(-x))


# ---- arguments of a call -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp8", "fp8_delayed"])
@usages
def test_given_scale(name: str, rowwise: bool, columnwise: bool) -> None:
    """Positive and finite, as the contract has it, and 0."""
    for dtype in BY_NAME[name].options["dtype"]:
        codec = qtensor.quantizer(name, rowwise=rowwise, columnwise=columnwise, dtype=dtype)
        for scale in (1.0, 3.7, 1e30, 1e-30, 2.0**-149, 3e38, 0.0):
            for turn, kind in enumerate(("randn", "nan", "minus_inf", "max_finite", "subnormal")):
                x = data(kind, (33, 65), DTYPES[turn % 3])
                check(codec, x, scale=torch.tensor([scale]))


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("name", ["fp8", "fp8_delayed"])
def test_a_given_scale_that_is_out_of_contract(name: str, scale: float) -> None:
    for dtype in DTYPES:
        for kind in ("randn", "sparse_zeros"):
            x = data(kind, (33, 65), dtype)
            check(qtensor.quantizer(name), x, scale=torch.tensor([scale]))


@pytest.mark.parametrize("axis", [-1, 0])
@usages
def test_given_scales_of_rows(axis: int, rowwise: bool, columnwise: bool) -> None:
    codec = qtensor.quantizer("fp8_rowwise", axis=axis, rowwise=rowwise, columnwise=columnwise)
    for dtype in DTYPES:
        x = rand(33, 65, dtype=dtype)
        check(codec, x, scale=torch.rand(codec.amax_shapes(x.shape)[0]) * 64)


@formats
@usages
def test_given_maxima(case: FormatCase, rowwise: bool, columnwise: bool) -> None:
    """Of the tensor, of a larger one and of a smaller one, as a process group brings them."""
    for turn, options in enumerate(case.each_option()):
        codec = case.quantizer(rowwise=rowwise, columnwise=columnwise, **options)
        x = rand(33, 65, dtype=DTYPES[turn % 3])
        if not codec.amax_shapes(x.shape):
            continue
        for factor in (1.0, 3.0, 0.3, 0.0):
            amax = [a * factor for a in codec.amax(x)]
            check(codec, x, amax=amax, **call_of(case, options))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**32, 2**62 + 12345, -(2**63)])
def test_seeds(seed: int) -> None:
    for options in ({}, {"with_rht": True}, {"with_2d_quantization": True}, {"swizzled": True}):
        chosen = {"stochastic_rounding": True, "columnwise": True}
        codec = qtensor.quantizer("nvfp4", **chosen, **options)
        check(codec, rand(35, 81), seed=torch.tensor([seed]))


@formats
@usages
def test_threads_of_small_tensors(case: FormatCase, rowwise: bool, columnwise: bool) -> None:
    """Two threads split what is smaller than a part, too."""
    for turn, options in enumerate(case.each_option()):
        codec = case.quantizer(rowwise=rowwise, columnwise=columnwise, **options)
        for shape in ((), (1, 300), (300, 1), (37, 83), (130, 260)):
            with threads(2):
                x = data("randn", shape, DTYPES[turn % 3])
                check(codec, x, **call_of(case, options))


@formats
def test_threads_of_a_large_tensor(case: FormatCase) -> None:
    """Over the size from which a second thread serves, with no setting changed."""
    shape = (520, 1040)
    assert shape[0] * shape[1] > native.ONE_THREAD
    before = torch.get_num_threads()
    x = mixed(shape, torch.bfloat16)
    for options in ({}, case.options.get("swizzled") and {"swizzled": True}):
        if options is not None:
            codec, call = case.quantizer(columnwise=True, **options), call_of(case, options)
            want = by_reference(codec, x, **call)
            for count in (1, 2, 3):
                try:
                    torch.set_num_threads(count)
                    assert_same_buffers(codec, by_kernels(codec, x, **call), want)
                    assert_same_values(codec, want[: len(codec.slots)], shape)
                finally:
                    torch.set_num_threads(before)


@formats
@usages
def test_out_is_written_whole(case: FormatCase, rowwise: bool, columnwise: bool) -> None:
    """Buffers that held another tensor, and padding that stays zero."""
    for options in case.each_option():
        codec, call = (
            case.quantizer(rowwise=rowwise, columnwise=columnwise, **options),
            call_of(case, options),
        )
        out = by_kernels(codec, data("max_finite", (33, 50), torch.float32), **call)
        where = [b.data_ptr() for b in out]
        x = rand(33, 50)
        by_kernels(codec, x, out=out, **call)
        assert_same_buffers(codec, out, by_reference(codec, x, **call))
        assert [b.data_ptr() for b in out] == where


@formats
def test_noop_flag(case: FormatCase, served: list[bool]) -> None:
    x, y = rand(33, 50), rand(33, 50, seed=1)
    q = case.quantize(x, columnwise=True)
    kept = [b.clone() for b in q.buffers()]
    q.quantize_(y, noop_flag=torch.tensor([1.0]))
    assert_same_buffers(q.quantizer, _with_amax(q, q.buffers()), _with_amax(q, kept))
    q.quantize_(y, noop_flag=torch.tensor([0.0]))
    want = by_reference(q.quantizer, y, **call_of(case, {}))
    assert_same_buffers(q.quantizer, _with_amax(q, q.buffers()), _with_amax(q, want))
    # With the flag, Python quantizes to fresh buffers.
    assert served == [True, True]


def _with_amax(q: Any, buffers: list[torch.Tensor]) -> list[torch.Tensor]:
    """Only the tensor's own buffers count; a returned amax stands in for itself."""
    own = list(buffers[: len(q.quantizer.slots)])
    return [*own, torch.zeros(1)] if q.quantizer.returns_amax else own


# ---- drawn -------------------------------------------------------------------------------------


MORE = pytest.mark.nightly(reason="fewer cases are in the default tier")


@pytest.mark.parametrize("examples", [FEW, pytest.param(EXAMPLES, marks=MORE, id="all")])
@formats
def test_drawn_tensors_and_options(case: FormatCase, examples: int) -> None:
    @settings(exact, max_examples=examples)
    @given(tensors(), options_of(case), st.integers(-(2**63), 2**63 - 1))
    def run(x: torch.Tensor, options: dict[str, Any], seed: int) -> None:
        call = call_of(case, options)
        if "seed" in call:
            call["seed"] = torch.tensor([seed])
        if x.numel():
            check(case.quantizer(**options), x, **call)

    run()


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(n, marks=MORE) for n in range(100, 2000, 100))]
)
def test_random_cases(first: int) -> None:
    for seed in range(first, first + 100):
        check_random(seed)


# ---- the comparison itself ---------------------------------------------------------------------


@pytest.mark.parametrize("name", [c.name for c in FORMATS])
def test_the_comparison_sees_one_wrong_byte(name: str) -> None:
    codec, x = qtensor.quantizer(name, columnwise=True), rand(33, 50)
    want = by_reference(codec, x, **call_of(name, {}))
    for index in range(len(want)):
        got = [b.clone() for b in want]
        got[index].view(torch.uint8).view(-1)[-1] ^= 1
        with pytest.raises(AssertionError, match=r"1 of .* bytes differ"):
            assert_same_buffers(codec, got, want)


def test_the_usages_are_all_of_them() -> None:
    assert len(USAGES) == 3
