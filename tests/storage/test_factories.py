"""T30: empty_like, new_empty, zeros_like, new_zeros keep the subclass where they should, on any
device, with legal buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from formats import FormatCase, assert_same_tensor, formats, layouts, rand, snapshot, usages
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import qtensor


def assert_described(
    t: Any, q: Any, shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    """``t`` has the class and quantizer of ``q`` and the buffers that the quantizer describes for
    ``shape``.
    """
    assert type(t) is type(q)
    assert t.quantizer == q.quantizer
    assert (tuple(t.shape), t.dtype, t.device.type) == (shape, dtype, device)
    described = q.quantizer._describe_buffers(shape)
    assert list(described) == t.__tensor_flatten__()[0]
    for name, (buffer_shape, buffer_dtype) in described.items():
        buffer = getattr(t, name)
        assert (tuple(buffer.shape), buffer.dtype, buffer.device.type) == (
            buffer_shape,
            buffer_dtype,
            device,
        )


EMPTY: dict[str, tuple[Callable[[Any], Any], tuple[int, ...], torch.dtype, str]] = {
    "empty_like": (lambda q: torch.empty_like(q), (33, 130), torch.float32, "cpu"),
    "empty_like-dtype": (
        lambda q: torch.empty_like(q, dtype=torch.bfloat16),
        (33, 130),
        torch.bfloat16,
        "cpu",
    ),
    "empty_like-meta": (
        lambda q: torch.empty_like(q, device="meta"),
        (33, 130),
        torch.float32,
        "meta",
    ),
    "new_empty": (lambda q: q.new_empty(5, 7), (5, 7), torch.float32, "cpu"),
    "new_empty-tuple": (lambda q: q.new_empty((2, 3, 40)), (2, 3, 40), torch.float32, "cpu"),
    "new_empty-0d": (lambda q: q.new_empty(()), (), torch.float32, "cpu"),
    "new_empty-none": (lambda q: q.new_empty(0, 4), (0, 4), torch.float32, "cpu"),
    "new_empty-meta": (lambda q: q.new_empty(5, 7, device="meta"), (5, 7), torch.float32, "meta"),
    "new_empty-dtype": (
        lambda q: q.new_empty(5, 7, dtype=torch.float16),
        (5, 7),
        torch.float16,
        "cpu",
    ),
    "new_empty_strided": (
        lambda q: q.new_empty_strided((5, 7), (7, 1)),
        (5, 7),
        torch.float32,
        "cpu",
    ),
    "new_zeros": (lambda q: q.new_zeros(5, 7), (5, 7), torch.float32, "cpu"),
    "new_zeros-dtype": (
        lambda q: q.new_zeros(5, 7, dtype=torch.bfloat16),
        (5, 7),
        torch.bfloat16,
        "cpu",
    ),
    "new_zeros-0d": (lambda q: q.new_zeros(()), (), torch.float32, "cpu"),
}


@layouts
@usages
def test_factories_keep_the_subclass(
    case: FormatCase, options: dict, rowwise: bool, columnwise: bool
) -> None:
    q = case.quantize(rand(33, 130), rowwise=rowwise, columnwise=columnwise, **options)
    before = snapshot(q)
    for name, (make, shape, dtype, device) in EMPTY.items():
        result = make(q)
        assert_described(result, q, shape, dtype, device)
        if "zeros" in name:
            assert torch.equal(result.dequantize(), torch.zeros(shape, dtype=dtype)), name
        assert_same_tensor(q, before)


@layouts
@usages
def test_empty_is_ready_to_be_filled(
    case: FormatCase, options: dict, rowwise: bool, columnwise: bool
) -> None:
    """Padding is zero from the start, so a fill gives the bytes of a fresh quantization."""
    q = case.quantize(rand(33, 130), rowwise=rowwise, columnwise=columnwise, **options)
    for make in (lambda: torch.empty_like(q), lambda: q.new_empty(33, 130)):
        target = make()
        target.copy_(q)
        assert_same_tensor(target, q)
        fresh = make()
        call = {"scale": torch.tensor([32.0])} if case.name == "fp8_delayed" else {}
        fresh.quantize_(rand(33, 130), **call)
        assert_same_tensor(fresh, q)


@formats
@usages
def test_zeros_like_are_zeros(case: FormatCase, rowwise: bool, columnwise: bool) -> None:
    """A plain tensor where an optimizer asks for state, else the subclass; zeros of the right kind
    in either case.
    """
    q = case.quantize(rand(33, 130), rowwise=rowwise, columnwise=columnwise)
    for result in (
        torch.zeros_like(q),
        torch.zeros_like(q, memory_format=torch.preserve_format),
        torch.zeros_like(q, dtype=torch.bfloat16),
    ):
        assert result.shape == q.shape
        values = result.dequantize() if isinstance(result, qtensor.QuantizedTensor) else result
        assert type(values) is torch.Tensor
        assert torch.equal(values, torch.zeros(33, 130, dtype=result.dtype))
        if isinstance(result, qtensor.QuantizedTensor):
            assert_described(result, q, (33, 130), result.dtype, "cpu")
    assert type(torch.zeros_like(q, memory_format=torch.preserve_format)) is torch.Tensor


@formats
def test_integer_factories_are_plain(case: FormatCase) -> None:
    q = case.quantize(rand(8, 64))
    for result in (torch.empty_like(q, dtype=torch.int64), q.new_empty(8, 64, dtype=torch.int64)):
        assert type(result) is torch.Tensor
        assert (result.shape, result.dtype) == (q.shape, torch.int64)
    for result in (torch.zeros_like(q, dtype=torch.bool), q.new_zeros(8, 64, dtype=torch.int32)):
        assert type(result) is torch.Tensor
        assert not result.any()


@formats
def test_random_and_constant_factories_are_plain(case: FormatCase) -> None:
    q = case.quantize(rand(8, 64))
    for result in (
        torch.rand_like(q),
        torch.randn_like(q),
        torch.ones_like(q),
        q.new_ones(3),
        q.new_full((3,), 2.0),
    ):
        assert type(result) is torch.Tensor
        assert result.dtype == q.dtype


@formats
def test_new_tensor_of_data(case: FormatCase) -> None:
    q = case.quantize(rand(8, 64))
    assert torch.equal(torch.tensor([1.0, 2.0], dtype=q.dtype), torch.tensor([1.0, 2.0]))
    assert torch.equal(torch.as_tensor(q).dequantize(), q.dequantize())


class Recorder(TorchDispatchMode):
    """Shapes and dtypes of what is allocated below the subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(a, qtensor.QuantizedTensor) for a in args):
            return NotImplemented  # let the subclass answer; what it calls comes by here again
        result = func(*args, **(kwargs or {}))
        if func._schema.name in (
            "aten::empty",
            "aten::zeros",
            "aten::new_empty",
            "aten::empty_like",
        ):
            self.made.append(result.dtype)
        return result


@formats
def test_empty_allocates_the_buffers_and_nothing_else(case: FormatCase) -> None:
    """No tensor of the nominal dtype: DCP and compiled autograd call these to stage copies."""
    q = case.quantize(rand(33, 130, dtype=torch.bfloat16), columnwise=True)
    for make in (lambda: torch.empty_like(q), lambda: q.new_empty(5, 7)):
        with Recorder() as recorder:
            made = make()
        inner = sorted(str(b.dtype) for b in made.buffers())
        assert sorted(str(d) for d in recorder.made) == inner
        assert made.dtype == torch.bfloat16


@formats
def test_factories_under_fake_mode(case: FormatCase) -> None:
    with FakeTensorMode():
        q = case.quantizer().make_empty((33, 130), dtype=torch.float32)
        for result in (torch.empty_like(q), q.new_empty(5, 7), q.new_zeros(5, 7)):
            assert type(result) is type(q)
            assert {type(b).__name__ for b in result.buffers()} == {"FakeTensor"}
