"""Python indices that cut blocks give values, which are no view: writing to them raises."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from formats import FormatCase, assert_same_bytes, formats, layouts, rand, snapshot, usages
from torch import Tensor, nn

import qtensor
from qtensor.storage.ops.part_values import SMALL, PartValues

INDICES = [
    (0, slice(None, 4)),
    (slice(None), 3),
    (slice(257, 299), -1),
    (slice(2, 290, 3), 7),
    (-1, slice(1, 5)),
    (Ellipsis, -1),
    (slice(None, 4), slice(None, 4)),
    (None, 290, slice(1, 3)),
    (slice(5, 5), 3),
    (slice(None, None, 150),),
    5,
]


@layouts
@usages
def test_values_where_codes_cannot_be_cut(
    case: FormatCase, options: dict, rowwise: bool, columnwise: bool
) -> None:
    q = case.quantize(rand(300, 128), rowwise=rowwise, columnwise=columnwise, **options)
    before, values = snapshot(q), q.dequantize()
    for index in INDICES:
        part = q[index]
        kind = qtensor.QuantizedTensor if isinstance(part, qtensor.QuantizedTensor) else PartValues
        assert isinstance(part, kind)
        decoded = part.dequantize() if kind is not PartValues else part.clone()
        assert_same_bytes(decoded, values[index])
    for got, want in zip(q.buffers(), before.buffers(), strict=True):
        assert_same_bytes(got, want)


def test_the_kind_of_each_result() -> None:
    """Codes are cut where they can be; the rest is values if it is a line or small."""
    q = qtensor.quantize(rand(300, 128), "nvfp4")
    assert isinstance(q[5], qtensor.NVFP4Tensor)
    assert isinstance(q[:, 16:48], qtensor.NVFP4Tensor)
    for part in (q[0, :4], q[:, 3], q[:4, :4], q[:16, 3 : 3 + SMALL // 16]):
        assert type(part) is PartValues
    for large in (lambda: q[:, 3:5], lambda: q[::2], lambda: q[:, None, 3]):
        with pytest.raises(qtensor.UnsupportedError, match=r"slice|select"):
            large()
    stack = qtensor.quantize(rand(2, 40, 128), "mxfp8", columnwise=True)
    with pytest.raises(qtensor.UnsupportedError, match="Row slicing"):
        stack[1]  # a whole matrix


WRITES: dict[str, Callable[[Any], object]] = {
    "zero_": lambda v: v.zero_(),
    "+=": lambda v: v.__iadd__(1),
    "item": lambda v: v.__setitem__(0, 1.0),
    "out=": lambda v: torch.add(v, v, out=v),
    "slice": lambda v: v[:4].zero_(),
    "data": lambda v: v.data.zero_(),
    "detach": lambda v: v.detach().mul_(2),
    "init": lambda v: nn.init.zeros_(v),
    "split": lambda v: v.split(10)[0].fill_(2),
    "foreach": lambda v: torch._foreach_add_([v], 1.0),
    "copy_": lambda v: v.copy_(torch.zeros(64)),
    "view": lambda v: v.view(8, 8).t().zero_(),
    "function": lambda v: torch.relu_(v),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
def test_a_write_is_not_lost(write: Callable[[Any], object]) -> None:
    q = qtensor.quantize(rand(64, 128), "mxfp8")
    values = q[:, 3]
    wanted = values.clone()
    with pytest.raises(
        qtensor.UnsupportedError, match=r"would not reach the quantized tensor.*clone"
    ):
        write(values)
    assert torch.equal(values, wanted)
    with pytest.raises(qtensor.UnsupportedError, match=r"slice\[mxfp8\]"):
        q[0, :4] = 0.0


def test_they_have_no_codes() -> None:
    part = qtensor.quantize(rand(300, 128), "mxfp8")[:3, 1:5]
    for method in (part.scaled_mm_args, part.scaled_grouped_mm_args):
        with pytest.raises(qtensor.UnsupportedError, match=r"got values \(3, 4\) of a part. Slice"):
            method("b")


def test_results_are_plain_tensors() -> None:
    values = qtensor.quantize(rand(64, 128), "mxfp8")[:, 3]
    for result in (values + 1, values.clone(), values.sum(), torch.stack([values, values])):
        assert type(result) is Tensor
        result.zero_()
    for copied in (copy.deepcopy(values), pickle.loads(pickle.dumps(values))):
        assert type(copied) is Tensor
        assert torch.equal(copied, values)
    assert values.tolist() == values.numpy().tolist()
    assert torch.zeros(64).copy_(values).equal(values.clone())


@formats
def test_a_gradient_reaches_the_tensor(case: FormatCase) -> None:
    parameter = nn.Parameter(case.quantize(rand(300, 64)))
    part = parameter[290, 3:7]
    part = part.dequantize() if isinstance(part, qtensor.QuantizedTensor) else part
    (part * 2).sum().backward()
    want = torch.zeros(300, 64)
    want[290, 3:7] = 2
    assert torch.equal(parameter.grad, want)


def test_compiled_code_raises() -> None:
    """A traced write could not be refused, so the read is."""
    read = torch.compile(lambda t: t[0, :4] * 2, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"slice\[nvfp4\]: Column slicing"):
        read(qtensor.quantize(rand(64, 128), "nvfp4"))


def test_errors_speak_of_ranks_only_among_ranks() -> None:
    """tests/ranks/test_dtensor.py has the text for several ranks."""
    with pytest.raises(qtensor.UnsupportedError) as caught:
        qtensor.quantize(rand(64, 128), "nvfp4").narrow(1, 3, 20)
    assert "multiples of 16" in str(caught.value)
    assert "rank" not in str(caught.value)
    assert "Shard" not in str(caught.value)
