"""Codes, factors and buffers by name, as integers, floats, torch's own dtypes and ml_dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from compile_helpers import INDUCTOR_FORMATS
from formats import FORMATS, USAGES, FormatCase, formats, rand

import qtensor

ALIKE = pytest.mark.nightly(reason="each kind of layout is compiled by day")


def product(q: Any, usage: str) -> np.ndarray:
    """The values of one usage, computed by NumPy with the elements of ml_dtypes."""
    codes, factors, wide = q.to_ml_dtypes(usage)
    values = codes.astype(np.float32).reshape(-1, q.shape[-1] if q.ndim else 1)
    for axis in (0, 1):
        per = {1: values.shape[axis]}.get(factors.shape[axis])
        if factors.shape[axis] not in (1, values.shape[axis]):
            per = next(
                p for p in (16, 32, 128) if -(-values.shape[axis] // p) == factors.shape[axis]
            )
        factors = factors.repeat(per or 1, axis)[
            tuple([slice(None)] * axis + [slice(values.shape[axis])])
        ]
    with np.errstate(invalid="ignore", over="ignore"):
        return (values * factors.astype(np.float32) * wide).reshape(q.shape)


@formats
@pytest.mark.parametrize("shape", [(33,), (130, 72), (2, 3, 264)], ids=str)
def test_codes_times_factors_are_the_values(case: FormatCase, shape: tuple[int, ...]) -> None:
    """Bit for bit, for every option and usage, padded and swizzled or not."""
    x = rand(*shape)
    for options in case.each_option():
        for rowwise, columnwise in USAGES:
            q = case.quantize(x, rowwise=rowwise, columnwise=columnwise, **options)
            for usage in filter(q.get_usages().get, q.get_usages()):
                one = q.clone()
                one.update_usage(**{u: u == usage for u in ("rowwise", "columnwise")})
                if not one.quantizer.factors_are_local:
                    assert q.codes(usage).shape == q.shape
                    continue
                wanted = one.dequantize(torch.float32).numpy()
                assert product(q, usage).tobytes() == wanted.tobytes()
                values = torch.from_numpy(q.to_ml_dtypes(usage).codes.astype(np.float32))
                assert torch.equal(q.element_values(usage), values)
                floats = torch.from_numpy(q.to_ml_dtypes(usage).factors.astype(np.float32))
                assert torch.equal(q.factors(usage), floats)
            assert torch.equal(q.codes(), q.codes(q.quantizer.side()[1:]))


def test_shapes_of_factors() -> None:
    x = rand(48, 40)
    shapes = {
        ("fp8", ""): (1, 1),
        ("fp8_rowwise", ""): (48, 1),
        ("fp8_blockwise", ""): (48, 1),
        ("mxfp8", ""): (48, 2),
        ("mxfp8", "columnwise"): (2, 40),
        ("nvfp4", ""): (48, 3),
        ("nvfp4", "columnwise"): (3, 40),
    }
    for (name, usage), shape in shapes.items():
        q = qtensor.quantize(x, name, columnwise=bool(usage))
        assert q.factors(usage or None).shape == shape
        assert q.global_factors(usage or None).shape == (1, 1)
    rows = qtensor.quantize(x, "nvfp4", row_scaled=True, columnwise=True)
    assert rows.global_factors("rowwise").shape == (48, 1)
    assert rows.global_factors("columnwise").shape == (1, 40)


def test_wrong_usages_are_refused() -> None:
    q = qtensor.quantize(rand(4, 32), "mxfp8")
    with pytest.raises(qtensor.UnsupportedError, match="or quantize with columnwise=True"):
        q.codes("columnwise")
    with pytest.raises(qtensor.UnsupportedError, match=r"got 'rows'\. Leave usage out\.$"):
        q.codes("rows")  # type: ignore[arg-type]


@formats
def test_parts_and_bare_storages(case: FormatCase) -> None:
    q = case.quantize(rand(3, 64, 256))
    bare = q.quantizer.assemble(q.buffers(), q.shape, q.dtype, bare=True)
    for part, whole in ((q[1], q.codes()[1]), (q[1].t(), q.codes()[1].t()), (bare, q.codes())):
        assert torch.equal(part.codes(), whole)
        assert part.factors().dtype is torch.float32
    assert torch.equal(q[1].element_values(), q.element_values()[1])


@formats
def test_buffers_in_torchs_own_dtypes(case: FormatCase) -> None:
    q = case.quantize(rand(64, 128))
    views = q.buffer_views()
    slots = {slot.keyword: slot for slot in q.quantizer.slots}
    scales = {"e8m0": torch.float8_e8m0fnu, "e4m3": torch.float8_e4m3fn, "float32": torch.float32}
    codes = {"e4m3": torch.float8_e4m3fn, "e2m1": torch.float4_e2m1fn_x2, "e2m3": torch.uint8}
    assert list(views) == [*slots]
    for (name, view), buffer in zip(views.items(), q.buffers(), strict=True):
        assert view.data_ptr() == buffer.data_ptr()
        assert view.shape == buffer.shape
        wanted = {
            "codes": codes[q.quantizer.element.name],
            "factors": scales[q.quantizer.spec.scale],
            "other": torch.float32,
        }
        assert view.dtype is wanted[slots[name].holds], name


@formats
def test_buffers_go_by_dlpack(case: FormatCase) -> None:
    """Another library sees the same memory."""
    for buffer in case.quantize(rand(64, 128)).buffers():
        seen = np.from_dlpack(buffer)
        assert seen.__array_interface__["data"][0] == buffer.data_ptr()
        assert torch.from_dlpack(buffer).data_ptr() == buffer.data_ptr()


def test_ml_dtypes_of_each_element() -> None:
    wanted = {
        "fp8": (ml_dtypes.float8_e4m3fn, np.float32),
        "mxfp8": (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu),
        "mxfp6": (ml_dtypes.float6_e2m3fn, ml_dtypes.float8_e8m0fnu),
        "mxfp4": (ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu),
        "nvfp4": (ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn),
    }
    for name, (codes, factors) in wanted.items():
        arrays = qtensor.quantize(rand(4, 64), name).to_ml_dtypes()
        assert (arrays.codes.dtype, arrays.factors.dtype) == (codes, factors)


def test_a_missing_usage() -> None:
    q = qtensor.quantize(rand(4, 64), "nvfp4")
    for method in (q.codes, q.factors, q.global_factors, q.to_ml_dtypes):
        with pytest.raises(
            qtensor.UnsupportedError, match=r"one of this tensor, rowwise; .*columnwise=True"
        ):
            method("columnwise")
    with pytest.raises(qtensor.UnsupportedError, match="must be one of this tensor"):
        q.codes("rows")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name in INDUCTOR_FORMATS else ALIKE)
        for case in FORMATS
    ],
)
def test_compiled(case: FormatCase) -> None:
    q = case.quantize(rand(64, 128))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def numbers(t: Any) -> Any:
        return t.codes(), t.element_values(), t.factors(), t.global_factors()

    eager = q.codes(), q.element_values(), q.factors(), q.global_factors()
    assert all(map(torch.equal, numbers(q), eager))
