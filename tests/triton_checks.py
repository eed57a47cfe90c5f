"""Triton kernels beside the reference, in a process of their own.

``TRITON_INTERPRET`` has to be set before triton is imported, for all kernels of a process. A pytest worker imports
triton for other tests, so the checks run in a child that is told first.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import importlib.util
import multiprocessing
import os
from typing import Any

import pytest
import torch
from adversarial import SEED, make, mixed
from formats import DTYPES, USAGES, assert_same_bytes
from torch import Tensor

import qtensor

INSTALLED = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(
    not INSTALLED, reason="triton is not installed: pip install 'qtensor[triton]'"
)


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


def child() -> concurrent.futures.ProcessPoolExecutor:
    """A process whose kernels run in the interpreter; on a machine with a GPU, on that."""
    return concurrent.futures.ProcessPoolExecutor(
        1,
        multiprocessing.get_context("spawn"),
        initializer=None if torch.cuda.is_available() else _interpret,
    )


def backend() -> Any:
    """The kernels' entry points, imported here so that no pytest worker does."""
    return importlib.import_module("qtensor.kernels.triton_backend")


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def inputs(shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """All kinds of values in bands of rows, then those that leave no band alone, as one tensor each."""
    whole = [make(kind, shape, dtype) for kind in ("subnormal", "max_finite", "powers_of_two")]
    return [mixed(shape, dtype), mixed(shape, dtype, finite=False), *whole]


def call_of(codec: Any, x: Tensor) -> dict[str, Any]:
    """The tensors beside the input that a call brings."""
    scale = torch.tensor([0.37], device=x.device) if codec.needs_scale else None
    seed = torch.tensor([SEED], device=x.device) if codec.stochastic_rounding else None
    return {"scale": scale, "amax": None, "seed": seed}


def compare_quantize(codec: Any, x: Tensor, **call: Any) -> None:
    """Every buffer that the kernels write, byte for byte."""
    call = call_of(codec, x) | call
    want, got = codec.alloc_tensors(x.shape), codec.alloc_tensors(x.shape, device=x.device)
    codec.encode_(want, x.cpu(), **{name: _to_cpu(value) for name, value in call.items()})
    backend().quantize_(codec, got, x, **call)
    for name in want:
        assert_same_bytes(got[name].cpu(), want[name], f"{codec.canonical} {x.dtype} {name}")


def _to_cpu(value: Any) -> Any:
    if isinstance(value, list):
        return [_to_cpu(item) for item in value]
    return value.cpu() if isinstance(value, Tensor) else value


def compare_dequantize(codec: Any, x: Tensor, dtype: torch.dtype) -> None:
    """The decoded values, bit for bit but for the payload of a NaN."""
    call = call_of(codec, x.cpu())
    buffers = codec.alloc_tensors(x.shape)
    codec.encode_(buffers, x.cpu(), **call)
    want = torch.empty(x.shape, dtype=dtype).copy_(codec.decode(buffers, tuple(x.shape)))
    got = torch.empty(x.shape, dtype=dtype, device=x.device)
    backend().dequantize_(codec, {n: b.to(x.device) for n, b in buffers.items()}, got)
    name = f"{codec.canonical} to {dtype}"
    got = got.cpu()
    assert torch.equal(got.isnan(), want.isnan()), f"{name}: NaN where there is none, or none"
    assert_same_bytes(got.nan_to_num(nan=0.0), want.nan_to_num(nan=0.0), name)


def check_quantize(name: str, shape: tuple[int, int], options: dict[str, Any]) -> None:
    """All usages; every dtype; all kinds of values."""
    torch.manual_seed(0)
    for rowwise, columnwise in USAGES:
        codec = qtensor.quantizer(name, rowwise=rowwise, columnwise=columnwise, **options)
        dtypes = DTYPES if rowwise and columnwise else DTYPES[:1]
        for dtype in dtypes:
            for x in inputs(shape, dtype) if rowwise and columnwise else [mixed(shape, dtype)]:
                compare_quantize(codec, x.to(device()))


def check_shapes(name: str, shapes: list[tuple[int, ...]], options: dict[str, Any]) -> None:
    """Other shapes, with both usages."""
    torch.manual_seed(1)
    codec = qtensor.quantizer(name, rowwise=True, columnwise=True, **options)
    for shape in shapes:
        compare_quantize(codec, torch.randn(shape, device=device()).bfloat16())


def check_strides(name: str) -> None:
    """Inputs that are not contiguous."""
    torch.manual_seed(2)
    codec = qtensor.quantizer(name, rowwise=True, columnwise=True)
    base = torch.randn(40, 50, 6, device=device())
    for x in (base[:, :, 1], base[:, :, 2].t(), base[::2, 3:], base.transpose(0, 1), base[0, 0, 0]):
        compare_quantize(codec, x)


def check_dequantize(name: str, shape: tuple[int, int], options: dict[str, Any]) -> None:
    """Either direction to each dtype."""
    torch.manual_seed(3)
    for rowwise, columnwise in USAGES[:2]:
        codec = qtensor.quantizer(name, rowwise=rowwise, columnwise=columnwise, **options)
        for dtype in DTYPES:
            for x in (mixed(shape, torch.float32, finite=False), make("subnormal", shape, dtype)):
                compare_dequantize(codec, x.to(device()), dtype)
