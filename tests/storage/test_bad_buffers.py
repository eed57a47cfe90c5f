"""Shapes and buffers that do not make a tensor are refused, by message: ``make_empty``,
``TensorProto``, ``assemble``.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from formats import FormatCase, assert_same_tensor, formats, layouts, rand, usages

import qtensor


def refused(error: type[Exception], message: str) -> Any:
    """The error, with exactly this text in its message."""
    return pytest.raises(error, match=re.escape(message))


SHAPES = [
    (
        "ab",
        "a shape is a sequence of sizes, or one size; got 'ab'. Pass a tuple such as (rows, "
        "columns).",
    ),
    (3.0, "a shape is a sequence of sizes, or one size; got 3.0. Pass"),
    (None, "a shape is a sequence of sizes, or one size; got None. Pass"),
    ((2, 1.5), "a shape is a sequence of sizes, or one size; got (2, 1.5). Pass"),
    ((2, -1), "sizes must not be negative; got (2, -1). Fix the shape."),
    (-4, "sizes must not be negative; got -4. Fix the shape."),
]


@pytest.mark.parametrize(("shape", "message"), SHAPES, ids=lambda v: repr(v)[:20])
@formats
def test_wrong_shape(case: FormatCase, shape: Any, message: str) -> None:
    q = case.quantizer()
    with refused(qtensor.QTensorError, f"make_empty[{case.name}]: {message}"):
        q.make_empty(shape)
    with refused(qtensor.QTensorError, f"TensorProto: {message}"):
        qtensor.TensorProto(shape, torch.float32, q)
    with refused(qtensor.QTensorError, f"assemble[{case.name}]: {message}"):
        q.assemble(q.make_empty(3).buffers(), shape, torch.float32)


@formats
def test_one_size_is_a_shape(case: FormatCase) -> None:
    """As ``torch.empty(3)`` has it; NumPy's integers count too."""
    q = case.quantizer(columnwise=True)
    want = q.make_empty((3,))
    for size in (3, torch.tensor(3), torch.Size([3]), [3], np.int64(3), (np.int64(3),)):
        tensors = [q.make_empty(size), qtensor.TensorProto(size, torch.float32, q).create_tensor()]
        tensors.append(q.assemble(want.buffers(), size, torch.float32))
        for made in tensors:
            assert made.shape == (3,)
            assert made.__tensor_flatten__() == want.__tensor_flatten__()
            assert [b.shape for b in made.buffers()] == [b.shape for b in want.buffers()]


@pytest.mark.parametrize("dtype", ["float32", None, torch.int32], ids=repr)
@formats
def test_wrong_nominal_dtype(case: FormatCase, dtype: Any) -> None:
    q = case.quantizer()
    got = dtype if isinstance(dtype, torch.dtype) else repr(dtype)
    legal = "float32, bfloat16, float16, float64"
    message = f"the nominal dtype must be floating: one of {legal}; got {got}. Pass one of them"
    with refused(qtensor.DtypeError, f"make_empty[{case.name}]: {message}"):
        q.make_empty(3, dtype=dtype)
    with refused(qtensor.DtypeError, f"assemble[{case.name}]: {message}"):
        q.assemble(q.make_empty(3).buffers(), (3,), dtype)


@formats
def test_a_proto_reads_a_format(case: FormatCase) -> None:
    """A format's id or a quantizer's text stands for the quantizer."""
    both = case.quantizer(columnwise=True)
    for given, want in ((case.name, case.quantizer()), (both.canonical, both), (both, both)):
        proto = qtensor.TensorProto((4, 32), torch.bfloat16, given)
        assert proto.quantizer == want
        assert proto == qtensor.TensorProto((4, 32), torch.bfloat16, want)
        assert proto.create_tensor().quantizer == want
        assert proto.is_quantized


def test_a_proto_of_something_else() -> None:
    with refused(qtensor.QTensorError, "the format must be a registered one; got 'mx'. Choose"):
        qtensor.TensorProto((4, 32), torch.float32, "mx")
    for given in (3, qtensor.MXFP8Quantizer, torch.float8_e4m3fn):
        message = f"TensorProto: the quantizer is a quantizer, a format's id or None; got {given!r}"
        with refused(qtensor.ArgumentTypeError, message):
            qtensor.TensorProto((4, 32), torch.float32, given)
    rule = "TensorProto: the dtype must be a torch.dtype; got 'float32'"
    with refused(qtensor.ArgumentTypeError, rule):
        qtensor.TensorProto((4, 32), "float32", "mxfp8")


# ---- assemble -----------------------------------------------------------------------------------


@formats
@usages
@pytest.mark.parametrize("bare", [False, True], ids=["tensor", "bare"])
def test_wrong_number_of_buffers(
    case: FormatCase, rowwise: bool, columnwise: bool, bare: bool
) -> None:
    q = case.quantize(rand(40, 64), rowwise=rowwise, columnwise=columnwise)
    made, names = q.buffers(), ", ".join(slot.name for slot in q.quantizer.slots)
    for buffers in ([], made[:-1], [*made, made[-1]]):
        message = (
            f"assemble[{case.name}]: {q.quantizer.canonical} needs {len(made)} buffers: {names}; "
            f"got {len(buffers)}. Pass the list that buffers() returns"
        )
        with refused(qtensor.QTensorError, message):
            q.quantizer.assemble(buffers, q.shape, q.dtype, bare=bare)


@layouts
@usages
def test_wrong_shape_of_a_buffer(
    case: FormatCase, options: dict[str, Any], rowwise: bool, columnwise: bool
) -> None:
    """Another logical shape is refused where any buffer tells it; so is each buffer with one entry
    too many.
    """
    q = case.quantize(rand(40, 64), rowwise=rowwise, columnwise=columnwise, **options)
    made, name = q.buffers(), f"assemble[{case.name}]"
    for shape in ((41, 64), (40, 65), (40, 640), (400, 64), (2, 20, 65), (40,), ()):
        if q.quantizer._describe_buffers(shape) == q.quantizer._describe_buffers(q.shape):
            continue  # rows that only fill a group of 16 up
        with refused(qtensor.QTensorError, f"of a tensor of shape {shape} must have shape ("):
            q.quantizer.assemble(made, shape, q.dtype)
    for index, slot in enumerate(q.quantizer.slots):
        for dim in range(made[index].ndim):
            sizes = list(made[index].shape)
            sizes[dim] += 1
            buffers = [*made[:index], made[index].new_zeros(sizes), *made[index + 1 :]]
            message = (
                f"{name}: {slot.name} of a tensor of shape (40, 64) must have shape "
                f"{tuple(made[index].shape)}; got {tuple(sizes)}. Pass the buffers of that tensor"
            )
            with refused(qtensor.QTensorError, message):
                q.quantizer.assemble(buffers, q.shape, q.dtype)


@formats
def test_wrong_dtype_or_device_of_a_buffer(case: FormatCase) -> None:
    q = case.quantize(rand(40, 64))
    made, slot, name = q.buffers(), q.quantizer.slots[0], f"assemble[{case.name}]"
    for other, got in ((made[0].float(), "torch.float32"), (made[0].tolist(), "list"), (None, "N")):
        message = f"{name}: {slot.name} must be a torch.uint8 tensor; got {got}"
        with refused(qtensor.DtypeError, message):
            q.quantizer.assemble([other, *made[1:]], q.shape, q.dtype)
    second = q.quantizer.slots[1].name
    message = f"{name}: buffers must be on one device; got {second} on cpu, {slot.name} on meta. M"
    with refused(qtensor.QTensorError, message):
        q.quantizer.assemble([made[0].to("meta"), *made[1:]], q.shape, q.dtype)


@layouts
@usages
def test_every_part_is_assembled(
    case: FormatCase, options: dict[str, Any], rowwise: bool, columnwise: bool
) -> None:
    """Scales of a part lack padding, which is no mistake; the shape that the whole had still is
    one.
    """
    q = case.quantize(rand(384, 512), rowwise=rowwise, columnwise=columnwise, **options)
    for part in (q, q[128:256], q[:, :128], q[:, 384:], q[128:].t(), q[0:0], q.view(2, 192, 512)):
        for bare in (False, True):
            again = q.quantizer.__class__.assemble(
                part.quantizer, part.buffers(), part.shape, part.dtype, bare
            )
            assert torch.equal(again.dequantize(), part.dequantize())
        if part.shape[0] == 128:
            with refused(qtensor.QTensorError, "must have shape"):
                part.quantizer.assemble(part.buffers(), q.shape, q.dtype)


def test_what_quantize_makes_is_assembled() -> None:
    """Quantizing checks nothing twice, so its own result has to pass the public check: ragged,
    empty and 0-d ones.
    """
    for name in qtensor.formats():
        call = {"scale": torch.ones(1)} if qtensor.quantizer(name).needs_scale else {}
        for shape in ((), (0,), (7,), (3, 0), (0, 5), (33, 50), (2, 3, 40)):
            q = qtensor.quantize(rand(*shape), name, columnwise=True, **call)
            assert_same_tensor(q.quantizer.assemble(q.buffers(), q.shape, q.dtype), q)
