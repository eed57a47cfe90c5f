"""Usages: dropping, building, refusing; stale copies stay absent; saving for backward out of
place.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from formats import (
    BY_NAME,
    FORMATS,
    FormatCase,
    assert_same_bytes,
    assert_same_tensor,
    formats,
    layouts,
    rand,
    snapshot,
)

import qtensor

DERIVABLE = [
    pytest.param(BY_NAME[name], options, id="-".join((name, *options)))
    for name, options in (
        ("fp8", {}),
        ("fp8_delayed", {}),
        ("fp8_rowwise", {}),
        ("fp8_rowwise", {"axis": 0}),
        ("fp8_blockwise", {"block_scaling_dim": 2}),
        ("mxfp8", {"with_2d_quantization": True}),
        ("mxfp8", {"with_2d_quantization": True, "swizzled": True}),
        ("mxfp6", {"with_2d_quantization": True}),
        ("mxfp6", {"with_2d_quantization": True, "packed": True}),
        ("mxfp4", {"with_2d_quantization": True}),
        ("nvfp4", {"with_2d_quantization": True}),
        ("nvfp4", {"with_2d_quantization": True, "swizzled": True}),
    )
]
INDEPENDENT = [
    pytest.param(case, options, id="-".join((case.name, *options)))
    for case in FORMATS[3:]
    for options in ({}, {"with_rht": True}, {"swizzled": True})
    if all(o in case.options for o in options)
]
SHAPES = [(), (5,), (33, 130), (2, 3, 40), (0, 64)]


def forms(q: Any) -> list[Any]:
    """The tensor and the bare storage of the same bytes."""
    bare = q.quantizer.assemble([b.clone() for b in q.buffers()], q.shape, q.dtype, bare=True)
    return [q, bare]


@layouts
def test_dropping_a_usage(case: FormatCase, options: dict) -> None:
    for keep, drop in (("rowwise", "columnwise"), ("columnwise", "rowwise")):
        for t in forms(case.quantize(rand(33, 130), columnwise=True, **options)):
            kept = {
                slot.name: getattr(t, slot.name)
                for slot in t.quantizer.slots
                if slot.usage in (keep, "both")
            }
            quantizer = t.quantizer
            t.update_usage(**{drop: False})
            assert t.get_usages() == {keep: True, drop: False}
            assert getattr(quantizer, drop)
            for attribute, _ in t._FLATTEN_TENSOR_BUFFERS:
                assert getattr(t, attribute) is kept.get(attribute)
            want = case.quantize(rand(33, 130), **{keep: True, drop: False}, **options)
            for attribute, buffer in kept.items():
                assert_same_bytes(buffer, getattr(want, attribute), attribute)
            assert_same_bytes(t.dequantize(), want.dequantize())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("case", "options"), DERIVABLE)
def test_building_a_usage_from_the_other(
    case: FormatCase, options: dict, shape: tuple[int, ...]
) -> None:
    """Where the bytes of one direction are those of the other, building it equals quantizing with
    it.
    """
    both = case.quantize(rand(*shape), columnwise=True, **options)
    for have, want in (("rowwise", "columnwise"), ("columnwise", "rowwise")):
        for t in forms(case.quantize(rand(*shape), **{have: True, want: False}, **options)):
            t.update_usage(**{want: True})
            assert t.get_usages() == {"rowwise": True, "columnwise": True}
            for a, b in zip(t.buffers(), both.buffers(), strict=True):
                assert_same_bytes(a, b)


@pytest.mark.parametrize(("case", "options"), INDEPENDENT)
def test_an_impossible_usage_is_refused(case: FormatCase, options: dict) -> None:
    for have, want in (("rowwise", "columnwise"), ("columnwise", "rowwise")):
        for t in forms(case.quantize(rand(64, 128), **{have: True, want: False}, **options)):
            before = t.__tensor_flatten__(), [b.clone() for b in t.buffers()]
            with pytest.raises(
                RuntimeError, match=rf"update_usage\[{case.name}\]: {want} data cannot.*{want}=True"
            ):
                t.update_usage(**{want: True})
            assert t.__tensor_flatten__() == before[0]
            for a, b in zip(t.buffers(), before[1], strict=True):
                assert_same_bytes(a, b)


@formats
def test_no_usage_left_is_refused(case: FormatCase) -> None:
    for t in forms(case.quantize(rand(8, 64))):
        with pytest.raises(qtensor.QTensorError, match="at least one usage"):
            t.update_usage(rowwise=False)
        assert t.get_usages() == {"rowwise": True, "columnwise": False}
        t.update_usage()
        t.update_usage(rowwise=True)
        assert t.get_usages() == {"rowwise": True, "columnwise": False}


@formats
def test_update_usage_does_not_touch_other_tensors(case: FormatCase) -> None:
    """Not the quantizer that made it, nor tensors that share it."""
    quantizer = case.quantizer(columnwise=True)
    q = quantizer.quantize(rand(8, 64), **case.call())
    alias, before = q.detach(), snapshot(q)
    q.update_usage(columnwise=False)
    assert quantizer.columnwise
    assert_same_tensor(alias, before)


def round_trips(t: Any) -> list[Any]:
    """The same tensor by every way that rebuilds one."""
    names, context = t.__tensor_flatten__()
    inner = {name: getattr(t, name) for name in names}
    saved, layout = t.prepare_for_saving()
    return [
        type(t).__tensor_unflatten__(inner, context, t.shape, t.stride()),
        type(t).restore_from_saved(layout, saved)[0],
        pickle.loads(pickle.dumps(t)),
        copy.deepcopy(t),
        *(
            [t.detach(), t.clone(), t.view(t.shape), t.to("cpu", copy=True)]
            if isinstance(t, torch.Tensor)
            else []
        ),
    ]


@formats
def test_a_dropped_transpose_stays_dropped(case: FormatCase) -> None:
    """T22: no way of copying revives the column-wise copy, even when the row-wise data change after
    the drop.
    """
    for t in forms(case.quantize(rand(64, 128), columnwise=True)):
        t.update_usage(columnwise=False)
        t.quantize_(
            rand(64, 128, seed=1),
            **({"scale": torch.tensor([8.0])} if case.name == "fp8_delayed" else {}),
        )
        columns = [b.name for b in t.spec.inner if b.usage == "columnwise"]
        for copied in round_trips(t):
            assert type(copied) is type(t)
            assert copied.get_usages() == {"rowwise": True, "columnwise": False}
            assert all(getattr(copied, name) is None for name in columns)
            for a, b in zip(copied.buffers(), t.buffers(), strict=True):
                assert_same_bytes(a, b)
            if case.name in ("fp8", "fp8_delayed", "fp8_rowwise"):
                copied.update_usage(columnwise=True)
                assert_same_bytes(copied._transpose, copied._data.t().contiguous())
            else:
                with pytest.raises(
                    qtensor.UnsupportedError, match="columnwise data cannot be derived"
                ):
                    copied.update_usage(columnwise=True)


@formats
def test_a_write_updates_both_directions(case: FormatCase) -> None:
    q = case.quantize(rand(64, 128), columnwise=True)
    q.copy_(rand(64, 128, seed=1))
    call = {"scale": torch.tensor([32.0])} if case.name == "fp8_delayed" else {}
    assert_same_tensor(q, case.quantizer(columnwise=True).quantize(rand(64, 128, seed=1), **call))


@pytest.mark.parametrize(
    "usage", [(True, False), (False, True), (True, True)], ids=["row", "col", "both"]
)
@layouts
def test_prepare_for_saving_is_out_of_place(
    case: FormatCase, options: dict, usage: tuple[bool, bool]
) -> None:
    q = case.quantize(rand(33, 130), rowwise=usage[0], columnwise=usage[1], **options)
    for t in forms(q):
        before = [getattr(t, a) for a, _ in t._FLATTEN_TENSOR_BUFFERS]
        tensors, layout = t.prepare_for_saving()
        after = [getattr(t, a) for a, _ in t._FLATTEN_TENSOR_BUFFERS]
        assert all(a is b for a, b in zip(after, before, strict=True))
        assert all(a is b for a, b in zip(tensors, before, strict=True))
        held = [slot.name for slot in t.quantizer.slots]
        absent = [a is None for a in tensors]
        assert absent == [name not in held for name, _ in t._FLATTEN_TENSOR_BUFFERS]
        assert not any(isinstance(v, torch.Tensor) for v in vars(layout).values())
        tail = [torch.ones(1), None]
        restored, rest = type(t).restore_from_saved(layout, [*tensors, *tail])
        assert rest[0] is tail[0]
        assert rest[1:] == [None]
        assert type(restored) is type(t)
        assert restored.quantizer == t.quantizer
        assert (restored.shape, restored.dtype) == (t.shape, t.dtype)
        assert all(getattr(restored, n) is getattr(t, n) for n, _ in t._FLATTEN_TENSOR_BUFFERS)


@formats
def test_two_storages_restore_from_one_list_in_order(case: FormatCase) -> None:
    a, b = case.quantize(rand(8, 64)), case.quantize(rand(4, 32, seed=1), columnwise=True)
    (ta, la), (tb, lb) = a.prepare_for_saving(), b.prepare_for_saving()
    first, rest = qtensor.QuantizedTensorStorage.restore_from_saved(la, [*ta, *tb])
    second, rest = qtensor.QuantizedTensorStorage.restore_from_saved(lb, rest)
    assert rest == []
    assert_same_tensor(first, a)
    assert_same_tensor(second, b)
    with pytest.raises(
        qtensor.QTensorError, match=r"restore_from_saved\[.*tensors or None are needed; got 1"
    ):
        qtensor.QuantizedTensorStorage.restore_from_saved(la, ta[:1])


@pytest.mark.parametrize(
    "usage", [(True, False), (False, True), (True, True)], ids=["row", "col", "both"]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@formats
def test_shape_facts_agree(
    case: FormatCase, shape: tuple[int, ...], usage: tuple[bool, bool]
) -> None:
    """T23: wrapper, bare storage and column-only tensors say the same of shape, size, numel,
    stride.
    """
    x = rand(*shape)
    tensor, bare = forms(case.quantize(x, rowwise=usage[0], columnwise=usage[1]))
    for t in (tensor, bare):
        assert t.shape == t.size() == x.shape
        assert (t.numel(), t.stride(), t.ndim) == (x.numel(), x.stride(), x.ndim)
        assert all(t.size(i) == n for i, n in enumerate(shape))
        assert (t.dtype, t.device) == (x.dtype, x.device)
        assert t.nbytes == sum(b.nbytes for b in t.buffers())
    assert_same_bytes(tensor.dequantize(), bare.dequantize())
