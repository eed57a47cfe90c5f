"""Ops that keep the subclass: same class, quantizer and absent buffers, exact bytes, inputs
untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from formats import (
    BY_NAME,
    FormatCase,
    assert_same_bytes,
    assert_same_tensor,
    formats,
    layouts,
    rand,
    refusal,
    shares_memory,
    snapshot,
    usages,
)

import qtensor

aten = torch.ops.aten
Op = Callable[[Any], Any]

SHARING: dict[str, Op] = {
    "detach": lambda q: q.detach(),
    "alias": lambda q: aten.alias(q),
    "lift_fresh": lambda q: aten.lift_fresh(q),
    "data": lambda q: q.data,
    "contiguous": lambda q: q.contiguous(),
    "to_same_dtype": lambda q: q.to(q.dtype),
    "to_same_device": lambda q: q.to("cpu"),
    "cpu": lambda q: q.cpu(),
    "view_same": lambda q: q.view(q.shape),
    "reshape_same": lambda q: q.reshape(q.shape),
    "full_slice": lambda q: q[:],
    "ellipsis": lambda q: q[...],
}
COPYING: dict[str, Op] = {
    "clone": lambda q: q.clone(),
    "clone_memory_format": lambda q: q.clone(memory_format=torch.contiguous_format),
    "to_copy": lambda q: q.to(q.dtype, copy=True),
    "to_device_copy": lambda q: q.to("cpu", copy=True),
    "to_dtype_layout": lambda q: aten.to.dtype_layout(
        q, dtype=q.dtype, layout=torch.strided, device="cpu", copy=True
    ),
}


def make(case: FormatCase, *shape: int, seed: int = 0, **options: Any) -> Any:
    return case.quantize(rand(*shape, seed=seed), **options)


@layouts
@usages
def test_sharing_ops(case: FormatCase, options: dict, rowwise: bool, columnwise: bool) -> None:
    q = make(case, 64, 128, rowwise=rowwise, columnwise=columnwise, **options)
    before = snapshot(q)
    absent = [name for name, _ in q._FLATTEN_TENSOR_BUFFERS if getattr(q, name) is None]
    for name, op in SHARING.items():
        result = op(q)
        assert_same_tensor(result, before)
        assert_same_tensor(q, before)
        pairs = zip(result.buffers(), q.buffers(), strict=True)
        assert all(shares_memory(a, b) for a, b in pairs), name
        assert all(getattr(result, buffer) is None for buffer in absent), name


@layouts
@usages
def test_copying_ops(case: FormatCase, options: dict, rowwise: bool, columnwise: bool) -> None:
    q = make(case, 64, 128, rowwise=rowwise, columnwise=columnwise, **options)
    before = snapshot(q)
    for name, op in COPYING.items():
        result = op(q)
        assert_same_tensor(result, before)
        pairs = zip(result.buffers(), q.buffers(), strict=True)
        assert not any(shares_memory(a, b) for a, b in pairs), name
        for buffer in result.buffers():
            buffer.zero_()
        assert_same_tensor(q, before)


SHAPES = [(), (1,), (5,), (0,), (0, 64), (3, 0), (33, 130), (2, 3, 40), (2, 1, 3, 36)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@formats
@usages
def test_every_shape(
    case: FormatCase, shape: tuple[int, ...], rowwise: bool, columnwise: bool
) -> None:
    """Ops that need no geometry hold for 0-d, empty and ragged tensors."""
    q = make(case, *shape, rowwise=rowwise, columnwise=columnwise)
    for op in (*SHARING.values(), *COPYING.values()):
        if op is SHARING["full_slice"] and not shape:
            continue
        assert_same_tensor(op(q), q)
    assert_same_tensor(q.unsqueeze(0).squeeze(0), q)


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@formats
@usages
def test_to_dtype_changes_the_nominal_dtype_only(
    case: FormatCase, rowwise: bool, columnwise: bool, target: torch.dtype
) -> None:
    q = make(case, 33, 130, rowwise=rowwise, columnwise=columnwise)
    before = snapshot(q)
    for result in (q.to(target), q.to(torch.zeros(1, dtype=target)), q.type(target)):
        assert type(result) is type(q)
        assert result.dtype == target
        assert result.quantizer == q.quantizer
        for name in q.__tensor_flatten__()[0]:
            assert_same_bytes(getattr(result, name), getattr(q, name), name)
        assert result.dequantize().dtype == target
        assert_same_bytes(result.dequantize(), q.dequantize(torch.float32).to(target))
        assert_same_tensor(result.to(torch.float32), q)
    assert_same_tensor(q, before)


@formats
def test_to_an_integer_dtype_gives_plain_values(case: FormatCase) -> None:
    q = case.quantize(rand(8, 32) * 10)
    for dtype in (torch.int32, torch.bool):
        result = q.to(dtype)
        assert type(result) is torch.Tensor
        assert torch.equal(result, q.dequantize().to(dtype))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float", torch.float32),
        ("half", torch.float16),
        ("bfloat16", torch.bfloat16),
        ("double", torch.float64),
    ],
)
@formats
def test_float_half_and_the_like_equal_to(case: FormatCase, name: str, dtype: torch.dtype) -> None:
    """They change the nominal dtype and keep the codes, as torch promises that they equal
    ``.to(dtype)``.
    """
    for q in (make(case, 33, 130), make(case, 33, 130).to(torch.bfloat16)):
        result = getattr(q, name)()
        assert_same_tensor(result, q.to(dtype))
        assert result.dtype == dtype
        for got, want in zip(result.buffers(), q.buffers(), strict=True):
            assert_same_bytes(got, want)


@formats
def test_a_dtype_that_cannot_be_nominal_is_refused(case: FormatCase) -> None:
    q = make(case, 8, 64)
    for dtype in (torch.float8_e4m3fn, torch.complex64):
        with pytest.raises(qtensor.DtypeError, match=rf"to\[{case.name}\]: .*float64; got torch"):
            q.to(dtype)


@formats
def test_channels_last_is_refused(case: FormatCase) -> None:
    q = make(case, 2, 8, 4, 32)
    calls: dict[str, Op] = {
        "contiguous": lambda f: q.contiguous(memory_format=f),
        "clone": lambda f: q.clone(memory_format=f),
        "to": lambda f: q.to(torch.bfloat16, memory_format=f),
        "empty_like": lambda f: torch.empty_like(q, memory_format=f),
    }
    for call in calls.values():
        with pytest.raises(
            qtensor.UnsupportedError, match=r"contiguous_format; got .*channels_last"
        ):
            call(torch.channels_last)
        for legal in (torch.contiguous_format, torch.preserve_format):
            if call is not calls["contiguous"]:
                assert call(legal).shape == q.shape


@formats
@usages
def test_meta(case: FormatCase, rowwise: bool, columnwise: bool) -> None:
    q = make(case, 33, 130, rowwise=rowwise, columnwise=columnwise)
    m = q.to("meta")
    assert type(m) is type(q)
    assert (m.shape, m.dtype, m.quantizer, m.device.type) == (q.shape, q.dtype, q.quantizer, "meta")
    for a, b in zip(m.buffers(), q.buffers(), strict=True):
        assert (a.device.type, a.shape, a.dtype) == ("meta", b.shape, b.dtype)
    assert m.clone().device.type == m.dequantize().device.type == (m + 1).device.type == "meta"
    assert type(m.clone()) is type(q)


@formats
@usages
def test_copy_between_equal_quantizers_copies_bytes(
    case: FormatCase, rowwise: bool, columnwise: bool
) -> None:
    q = make(case, 33, 130, rowwise=rowwise, columnwise=columnwise)
    other = make(case, 33, 130, seed=1, rowwise=rowwise, columnwise=columnwise)
    before, pointers = snapshot(other), [b.data_ptr() for b in q.buffers()]
    assert q.copy_(other) is q
    assert_same_tensor(q, before)
    assert_same_tensor(other, before)
    assert [b.data_ptr() for b in q.buffers()] == pointers


@pytest.mark.parametrize("dim", [0, -1])
@layouts
@usages
def test_cat_refuses_other_factors_and_quantizers(
    case: FormatCase, options: dict, rowwise: bool, columnwise: bool, dim: int
) -> None:
    """A factor that both parts share must be equal; where no factor is shared, any parts fit."""
    kwargs = {"rowwise": rowwise, "columnwise": columnwise, **options}
    a = case.quantize(rand(128, 128), **kwargs)
    b = case.quantize(rand(128, 128, seed=1) * 3, **kwargs)
    if case.name == "fp8_delayed":
        b = case.quantizer(**kwargs).quantize(rand(128, 128, seed=1), scale=torch.tensor([7.0]))
    before = snapshot(a), snapshot(b)
    refused = refusal(lambda: torch.cat([a, b], dim))
    if refused:
        shared = "must be equal in all parts" in refused
        assert shared or (options.get("swizzled") and "swizzled" in refused)
        assert refused.startswith(f"cat[{case.name}]")
    else:
        joined = torch.cat([a, b], dim)
        assert torch.equal(joined.dequantize(), torch.cat([a.dequantize(), b.dequantize()], dim))
        assert case.name not in ("fp8", "fp8_delayed")
    for q, old in zip((a, b), before, strict=True):
        assert_same_tensor(q, old)


@formats
def test_cat_of_a_plain_or_other_quantizer(case: FormatCase) -> None:
    q = make(case, 128, 128)
    with pytest.raises(
        qtensor.QTensorError, match=r"cat\[.*one quantizer and nominal dtype.*Dequantize"
    ):
        torch.cat([q, torch.ones(128, 128)])
    with pytest.raises(qtensor.QTensorError, match="one quantizer and nominal dtype"):
        torch.cat([q, make(case, 128, 128, columnwise=True)])
    with pytest.raises(qtensor.QTensorError, match="one quantizer and nominal dtype"):
        torch.cat([q, q.to(torch.bfloat16)])
    with pytest.raises(qtensor.QTensorError, match="must be equal"):
        torch.cat([q, make(case, 128, 256)], 0)


@formats
def test_cat_of_one_tensor_and_of_row_scaled(case: FormatCase) -> None:
    q = make(case, 128, 128)
    assert_same_tensor(torch.cat([q]), q)
    if case.name == "fp8_rowwise":
        other = make(case, 64, 128, seed=1)
        joined = torch.cat([q, other])
        assert_same_bytes(joined._scale_inv, torch.cat([q._scale_inv, other._scale_inv]))
        assert_same_bytes(joined._data, torch.cat([q._data, other._data]))


@formats
def test_index_select_rows(case: FormatCase) -> None:
    q = make(case, 33, 64)
    index = torch.tensor([4, 0, 32, 4])
    assert torch.equal(q.index_select(0, index).dequantize(), q.dequantize()[index])
    with pytest.raises(qtensor.UnsupportedError, match=r"index_select\[.*dequantize\(\)"):
        q.index_select(1, index)


@formats
def test_pad_appends_zeros(case: FormatCase) -> None:
    q = make(case, 33, 64)
    for sizes in ([0, 0, 0, 7], [0, 31], [0, 5, 0, 1]):
        padded = torch.nn.functional.pad(q, sizes)
        assert type(padded) is type(q)
        want = torch.nn.functional.pad(q.dequantize(), sizes)
        assert_same_bytes(padded.dequantize(), want)
    for sizes, value in (([1, 0], 0.0), ([0, -1], 0.0), ([0, 1], 2.0)):
        with pytest.raises(qtensor.UnsupportedError, match=r"pad\[.*only zeros.*dequantize\(\)"):
            torch.nn.functional.pad(q, sizes, value=value)


@formats
def test_is_pinned_and_same_size(case: FormatCase) -> None:
    q = make(case, 8, 64)
    assert q.is_pinned() is False
    assert q.is_same_size(torch.empty(8, 64))
    assert not q.is_same_size(torch.empty(64, 8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinning needs a CUDA device")
@formats
def test_pin_memory_pins_every_buffer(case: FormatCase) -> None:
    q = make(case, 8, 64)
    pinned = q.pin_memory()
    assert all(b.is_pinned() for b in pinned.buffers())
    assert pinned.is_pinned()
    assert_same_tensor(pinned, q)


INFERENCE: dict[str, Op] = (
    SHARING
    | COPYING
    | {
        "chunk": lambda q: q.chunk(2)[1],
        "narrow": lambda q: q.narrow(0, 128, 128),
        "slice": lambda q: q[128:],
        "split": lambda q: q.split(128)[1],
        "tensor_split": lambda q: q.tensor_split(2)[1],
        "flatten": lambda q: q.view(2, 128, 128).flatten(0, 1),
        "unflatten": lambda q: q.unflatten(0, (2, 128)),
        "view_as": lambda q: q.view_as(torch.empty(2, 128, 128)),
        "unsqueeze": lambda q: q.unsqueeze(0).squeeze(0),
        "T": lambda q: q.T,
        "mT": lambda q: q.mT,
        "t": lambda q: q.t(),
        "cat": lambda q: torch.cat(q.split(128)),
        "to_bfloat16": lambda q: q.to(torch.bfloat16),
        "type_as": lambda q: q.type_as(torch.empty(1, dtype=torch.bfloat16)),
        "meta": lambda q: q.to("meta"),
    }
)


@pytest.mark.parametrize("made_inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("name", INFERENCE)
@formats
def test_inference_mode_equals_grad_mode(case: FormatCase, name: str, made_inside: bool) -> None:
    """Composite ops are not decomposed for us there, and tensors from outside are legal inputs."""
    q = make(case, 256, 128)
    want = INFERENCE[name](q)
    with torch.inference_mode():
        source = make(case, 256, 128) if made_inside else q
        got = INFERENCE[name](source)
        assert type(got) is type(want)
        assert (got.shape, got.dtype, got.quantizer) == (want.shape, want.dtype, want.quantizer)
        if got.device.type != "meta":
            assert torch.equal(got.dequantize(), want.dequantize())


def test_shallow_copy_is_compatible_between_equal_classes_and_shapes() -> None:
    """What ``Module.to`` and ``swap_tensors`` ask (A37)."""
    q = make(BY_NAME["mxfp8"], 8, 64)
    assert torch._has_compatible_shallow_copy_type(q, q.clone())
    a, b = q.clone(), make(BY_NAME["nvfp4"], 8, 64)
    values = a.dequantize(), b.dequantize()
    torch.utils.swap_tensors(a, b)
    assert (type(a), type(b)) == (qtensor.NVFP4Tensor, qtensor.MXFP8Tensor)
    assert torch.equal(a.dequantize(), values[1])
    assert torch.equal(b.dequantize(), values[0])
