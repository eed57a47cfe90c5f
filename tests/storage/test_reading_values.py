"""Elements, masks, lists and arrays of quantized tensors are plain values; rows stay quantized
where that is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from compile_helpers import Compiled
from formats import FormatCase, assert_same_bytes, formats, layouts, rand, refusal, usages
from torch import nn

import qtensor


@layouts
@usages
def test_one_element(case: FormatCase, options: dict, rowwise: bool, columnwise: bool) -> None:
    q = case.quantize(rand(6, 130), rowwise=rowwise, columnwise=columnwise, **options)
    values = q.dequantize()
    for index in ((3, 5), (-1, -2), (np.int64(3), 129)):
        element = q[index]
        assert type(element) is torch.Tensor
        assert_same_bytes(element, values[index])
        assert element.item() == values[index].item()
    with pytest.raises(IndexError):
        q[6, 0]
    with pytest.raises(IndexError):
        q[0, 130]


@formats
def test_one_element_of_other_ranks(case: FormatCase) -> None:
    q = case.quantize(rand(2, 3, 64))
    assert_same_bytes(q[1, 2, 63], q.dequantize()[1, 2, 63])
    vector = case.quantize(rand(64))
    assert_same_bytes(vector[5], vector.dequantize()[5])
    scalar = case.quantize(rand())
    assert scalar.item() == scalar.tolist() == scalar.dequantize().item()


@formats
def test_a_gradient_reaches_the_element(case: FormatCase) -> None:
    parameter = nn.Parameter(case.quantize(rand(4, 64)))
    parameter[2, 7].backward()
    want = torch.zeros(4, 64)
    want[2, 7] = 1
    assert torch.equal(parameter.grad, want)


@formats
def test_an_assignment_to_an_element_is_not_lost(case: FormatCase) -> None:
    """It is refused where factors run along the last dim, and reaches the tensor elsewhere."""
    q = case.quantize(rand(4, 64))
    if case.name in ("fp8", "fp8_delayed"):
        q[2, 7] = 0.0
        assert q[2, 7].item() == 0.0
        return
    with pytest.raises(qtensor.UnsupportedError, match=r"select\["):
        q[2, 7] = 0.0


@layouts
@usages
def test_masks_and_pairs_of_numbers(
    case: FormatCase, options: dict, rowwise: bool, columnwise: bool
) -> None:
    q = case.quantize(rand(6, 130), rowwise=rowwise, columnwise=columnwise, **options)
    values = q.dequantize()
    for index in (values > 0, torch.arange(6) > 2, ([0, 3], [5, 6]), (slice(None), [7, 1])):
        picked = q[index]
        assert type(picked) is torch.Tensor
        assert_same_bytes(picked, values[index])
    assert_same_bytes(q[q > 0], values[values > 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@formats
def test_arrays_and_lists(case: FormatCase, dtype: torch.dtype) -> None:
    q = case.quantize(rand(3, 40)).to(dtype)
    want = q.dequantize()
    assert q.tolist() == want.tolist()
    for array in (q.numpy(), np.asarray(q), np.array(q), q.numpy(force=True)):
        assert array.dtype == want.numpy().dtype
        assert (array == want.numpy()).all()
    assert np.asarray(q, dtype=np.float64).dtype == np.float64
    q.numpy().fill(0)
    assert torch.equal(q.dequantize(), want)
    with pytest.raises(ValueError, match=r"numpy\[.*copy=False"):
        np.array(q, copy=False)


@formats
def test_arrays_refuse_what_torch_refuses(case: FormatCase) -> None:
    parameter = nn.Parameter(case.quantize(rand(3, 40)))
    with pytest.raises(RuntimeError, match="requires grad"):
        parameter.numpy()
    assert parameter.numpy(force=True).shape == (3, 40)
    with pytest.raises(TypeError, match="BFloat16"):
        case.quantize(rand(3, 40)).bfloat16().numpy()


ROWS: dict[str, Any] = {
    "tensor": torch.tensor([4, 0, 4]),
    "negative": torch.tensor([-1, 2]),
    "int32": torch.tensor([4, 0], dtype=torch.int32),
    "list": [5, 1],
    "array": np.array([5, 1]),
    "none": torch.tensor([], dtype=torch.int64),
    "2-D": torch.tensor([[0, 5], [3, 3]]),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("shape", [(6, 130), (6, 3, 64)], ids=str)
@formats
def test_rows_stay_quantized(case: FormatCase, shape: tuple[int, ...], name: str) -> None:
    q, rows = case.quantize(rand(*shape)), ROWS[name]
    picked = q[rows]
    want = q.dequantize()[torch.as_tensor(rows)]
    assert type(picked) is type(q)
    assert picked.shape == want.shape
    assert_same_bytes(picked.dequantize(), want)
    # The codes are the source's own, and so a copy of them decodes to the same values.
    assert_same_bytes(picked.clone().dequantize(), want)


@layouts
@usages
def test_rows_are_exact_or_refused(
    case: FormatCase, options: dict, rowwise: bool, columnwise: bool
) -> None:
    q = case.quantize(rand(256, 256), rowwise=rowwise, columnwise=columnwise, **options)
    rows = torch.tensor([130, 7])
    for call in (lambda: q[rows], lambda: q.index_select(0, rows)):
        refused = refusal(call)
        if refused:
            assert "no other row shares" in refused
            assert case.name not in ("fp8", "fp8_delayed")
        else:
            assert_same_bytes(call().dequantize(), q.dequantize()[rows])


@formats
def test_rows_outside_are_refused(case: FormatCase) -> None:
    q = case.quantize(rand(6, 64))
    for bad in ([6], [-7]):
        with pytest.raises(IndexError):
            q[bad]


@formats
def test_a_gradient_reaches_the_rows(case: FormatCase) -> None:
    parameter = nn.Parameter(case.quantize(rand(4, 64)))
    parameter[[2, 2, 0]].dequantize().sum().backward()
    assert parameter.grad.sum(1).tolist() == [64.0, 0.0, 128.0, 0.0]


WIDE = pytest.mark.nightly(reason="aot_eager reads the values of mxfp8 and nvfp4")


def test_a_quantized_index_is_refused() -> None:
    q = qtensor.quantize(rand(6, 64), "mxfp8")
    with pytest.raises((qtensor.UnsupportedError, IndexError)):
        torch.zeros(6, 64)[q]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=WIDE)])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", pytest.param("fp8", marks=WIDE)])
def test_compiled(name: str, backend: str) -> None:
    q = qtensor.quantize(rand(6, 128), name)
    rows = torch.tensor([4, 0, -1])

    def region(q: Any, rows: Any) -> Any:
        return q[3, 5], q[rows].dequantize(), q.half().dequantize(), q.float().buffers()

    compiled: Callable[..., Any] = Compiled(region, backend)
    for got, want in zip(compiled(q, rows)[:3], region(q, rows)[:3], strict=True):
        assert_same_bytes(got, want)
    for got, want in zip(compiled(q, rows)[3], q.buffers(), strict=True):
        assert_same_bytes(got, want)
