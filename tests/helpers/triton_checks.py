"""Triton kernels beside the reference, in a process of their own.

``TRITON_INTERPRET`` has to be set before triton is imported, for all kernels of a process. A pytest
worker imports triton for other tests, so the checks run in a child that is told first.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import importlib.util
import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch_process
from adversarial import SEED, make, mixed
from formats import BY_NAME, DTYPES, USAGES, assert_same_bytes
from oracle.attention import fma
from torch import Tensor

import qtensor
from qtensor.core.buffer_shapes import has_padding
from qtensor.kernels import table

INSTALLED = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(
    not INSTALLED, reason="triton is not installed: pip install 'torch-qtensor[triton]'"
)


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    patch_once_a_launch()
    round_once()


def round_once() -> None:
    """Let a fused multiply-add round once in Triton's interpreter, as it does on a GPU."""
    interpreter = importlib.import_module("triton.runtime.interpreter")

    def create_fma(_: object, x: Any, y: Any, z: Any) -> Any:
        return interpreter.TensorHandle(fma(x.data, y.data, z.data), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = create_fma


def patch_once_a_launch() -> None:
    """Let Triton's interpreter patch ``triton.language`` once for each module of a launch.

    It does so for each call of a device function, which takes two thirds of the time of a launch.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    real = interpreter._patch_lang
    patched: set[int] = set()

    def patch(function: Any) -> Any:
        names = id(function.__globals__)
        if names in patched:
            return interpreter._LangPatchScope()  # with nothing to restore
        patched.add(names)
        scope = real(function)
        restore = scope.restore

        def restore_all() -> None:
            patched.clear()
            restore()

        scope.restore = restore_all  # called at the end of the launch alone
        return scope

    interpreter._patch_lang = patch


def child() -> concurrent.futures.ProcessPoolExecutor:
    """Return a process whose kernels run in the interpreter, or on a GPU if there is one."""
    return torch_process.pool(None if torch.cuda.is_available() else _interpret)


def backend() -> Any:
    """Return the kernels' entry points; the import happens here so that no pytest worker does
    it."""
    return importlib.import_module("qtensor.kernels.triton.backend")


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def inputs(shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """All kinds of values in bands of rows; in float32 also those that leave no band alone, as one
    tensor each.
    """
    bands = [mixed(shape, dtype, finite=False)]
    if dtype != torch.float32:
        return bands
    whole = [make(kind, shape, dtype) for kind in ("subnormal", "max_finite")]
    return [*bands, mixed(shape, dtype), *whole]


def call_of(codec: Any, x: Tensor) -> dict[str, Any]:
    """Return the tensors beside the input that a call needs."""
    scale = torch.tensor([0.37], device=x.device) if codec.needs_scale else None
    seed = torch.tensor([SEED], device=x.device) if codec.stochastic_rounding else None
    return {"scale": scale, "amax": None, "seed": seed}


def compare_quantize(codec: Any, x: Tensor, **call: Any) -> None:
    """Compare every buffer that the kernels write byte for byte."""
    call = call_of(codec, x) | call
    want, got = codec.alloc_tensors(x.shape), codec.alloc_tensors(x.shape, device=x.device)
    codec.encode_(want, x.cpu(), **{name: _to_cpu(value) for name, value in call.items()})
    for slot in codec.slots:
        if not has_padding(slot, x.shape) and x.numel():
            got[slot.name].view(torch.uint8).fill_(0xA5)
    backend().quantize_(codec, got, x, **call)
    for name in want:
        assert_same_bytes(got[name].cpu(), want[name], f"{codec.canonical} {x.dtype} {name}")


def _to_cpu(value: Any) -> Any:
    if isinstance(value, list):
        return [_to_cpu(item) for item in value]
    return value.cpu() if isinstance(value, Tensor) else value


def compare_dequantize(codec: Any, x: Tensor, dtype: torch.dtype) -> None:
    """Compare decoded values bit for bit, payloads of NaN excepted."""
    call = call_of(codec, x.cpu())
    buffers = codec.alloc_tensors(x.shape)
    codec.encode_(buffers, x.cpu(), **call)
    for name, buffer in buffers.items():
        if name.endswith("_global_scale_inv"):
            buffer.mul_(1.37)  # no longer the factor of the amax
    want = torch.empty(x.shape, dtype=dtype).copy_(codec.decode(buffers, tuple(x.shape)))
    got = torch.empty(x.shape, dtype=dtype, device=x.device)
    backend().dequantize_(codec, {n: b.to(x.device) for n, b in buffers.items()}, got)
    name = f"{codec.canonical} to {dtype}"
    got = got.cpu()
    assert torch.equal(got.isnan(), want.isnan()), f"{name}: NaN where there is none, or none"
    assert_same_bytes(got.nan_to_num(nan=0.0), want.nan_to_num(nan=0.0), name)


def check_quantize(name: str, shape: tuple[int, int], options: dict[str, Any]) -> None:
    """Compare all kinds of values in every dtype, with each usage alone."""
    torch.manual_seed(0)
    codec = qtensor.quantizer(name, rowwise=True, columnwise=True, **options)
    for dtype in DTYPES:
        for x in inputs(shape, dtype):
            compare_quantize(codec, x.to(device()))
    for rowwise, columnwise in USAGES[:2]:
        alone = codec.with_usage(rowwise=rowwise, columnwise=columnwise)
        compare_quantize(alone, mixed(shape, torch.bfloat16).to(device()))


def check_shapes(name: str, shapes: list[tuple[int, ...]], options: dict[str, Any]) -> None:
    """Compare other shapes, with both usages."""
    torch.manual_seed(1)
    codec = qtensor.quantizer(name, rowwise=True, columnwise=True, **options)
    for shape in shapes:
        x = torch.randn(shape).bfloat16()
        compare_quantize(codec, x.to(device()))
        compare_dequantize(codec, x.to(device()), torch.bfloat16)


def check_factor_edges(name: str, options: dict[str, Any]) -> None:
    """Block maxima at the edges of the rules for factors, one a row: powers of two times the
    largest element, ties of E4M3.
    """
    codec = qtensor.quantizer(name, **options)
    powers = codec.element.max * torch.exp2(torch.arange(-150, 119).double())
    e4m3 = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    # With 4.2 as the maximum of the tensor (whose factor over 6 and times 1/6 differ) these ask for
    # a factor between two.
    ties = (e4m3[1:] + e4m3[:-1]) / 2 * 4.2 / getattr(codec, "e4m3_max", 1)
    edges = (ties if name == "nvfp4" else powers).float()
    values = torch.cat([
        edges,
        torch.nextafter(edges, edges * 2),
        torch.nextafter(edges, edges / 2),
    ])
    values = torch.cat([values[values.isfinite()], torch.tensor([4.2])])
    x = torch.zeros(len(values), codec.spec.block[1] if codec.spec.block else 1)
    x[:, 0] = values
    compare_quantize(codec, x.to(device()))


def check_given_factors(name: str, options: dict[str, Any]) -> None:
    """Compare maxima given by the caller, as from a process group, and maxima that the kernels
    find."""
    torch.manual_seed(4)
    codec = qtensor.quantizer(name, rowwise=True, columnwise=True, **options)
    for x in (mixed((40, 70), torch.float32), make("nan", (40, 70), torch.float32)):
        want = codec.amax(x)
        got = [torch.empty_like(a, device=device()) for a in want]
        backend().amax_(codec, got, x.to(device()))
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a.cpu().nan_to_num(nan=-1.0), b.nan_to_num(nan=-1.0)), codec
        for number in (float("inf"), float("nan")):
            given = [torch.full_like(a, number, device=device()) for a in want]
            compare_quantize(codec, x.to(device()), amax=given)
        doubled = [a.to(device()) * 2 for a in want]
        compare_quantize(codec, x.to(device()), amax=doubled)
        if codec.needs_scale:
            found = torch.full((1,), 9e9, device=device())
            buffers = codec.alloc_tensors(x.shape, device=device())
            backend().quantize_with_amax_(codec, buffers, x.to(device()), doubled[0], found)
            assert torch.equal(found.cpu().nan_to_num(nan=-1.0), want[0].nan_to_num(nan=-1.0))
            scaled = codec.alloc_tensors(x.shape)
            codec.encode_(scaled, x, want[0] * 2, None, None)
            for name in scaled:
                assert_same_bytes(buffers[name].cpu(), scaled[name], name)
        if codec.spec.block is None:
            compare_quantize(codec, x.to(device()), scale=doubled[0] / 3)


def check_strides(name: str) -> None:
    """Compare inputs that are not contiguous."""
    torch.manual_seed(2)
    codec = qtensor.quantizer(name, rowwise=True, columnwise=True)
    base = torch.randn(24, 34, 6, device=device())
    for x in (base[:, :, 1], base[:, :, 2].t(), base[::2, 3:], base.transpose(0, 1), base[0, 0, 0]):
        compare_quantize(codec, x)


def check_dequantize(name: str, shape: tuple[int, int], options: dict[str, Any]) -> None:
    """Compare either direction decoded to each dtype."""
    torch.manual_seed(3)
    for rowwise, columnwise in USAGES[:2]:
        codec = qtensor.quantizer(name, rowwise=rowwise, columnwise=columnwise, **options)
        for dtype in DTYPES:
            compare_dequantize(codec, mixed(shape, dtype, finite=False).to(device()), dtype)
        compare_dequantize(codec, make("subnormal", shape, dtype).to(device()), torch.float32)


def check_reasons() -> None:
    """Assert that kernels refuse formats of users and other dtypes with a sentence."""
    codec = qtensor.quantizer("mxfp8")
    assert all(backend().supports(codec, dtype) is None for dtype in DTYPES)
    assert "float64" in backend().supports(codec, torch.float64)
    unknown = type("Codec", (), {"format": "mine"})
    assert "mine" in backend().supports(unknown, torch.float32)
    delayed, x = qtensor.quantizer("fp8_delayed"), torch.ones(2, device=device())
    for scale in (None, torch.ones(2), torch.ones(1).double()):
        with pytest.raises(qtensor.QTensorError, match="scale must be one float32"):
            backend().quantize_(delayed, delayed.alloc_tensors((2,)), x, scale)


def check_amax_of_many_tiles() -> None:
    """A program takes the maximum of several tiles, wherever the largest number is."""
    torch.manual_seed(5)
    x = torch.rand(300, 300, device=device())
    for name in ("fp8", "nvfp4"):
        codec = qtensor.quantizer(name)
        for place in ((0, 0), (299, 299), (150, 10), (299, 0)):
            y = x.clone()
            y[place] = -7.5
            found = [torch.empty(1, device=device())]
            backend().amax_(codec, found, y)
            assert found[0].item() == 7.5, (name, place)


def check_captured_seeds() -> None:
    """A seed of another device is copied, but refused while a CUDA graph is captured."""
    codec = importlib.import_module("qtensor.kernels.triton.nvfp4")
    seed, place = torch.tensor([SEED]), torch.device("meta")
    assert codec._on_device(seed, place).device == place
    with mock.patch("qtensor.core.devices.captured", return_value=True):
        assert codec._on_device(seed, seed.device) is seed
        with pytest.raises(qtensor.QTensorError, match="the seed must be on meta; every replay"):
            codec._on_device(seed, place)


def check_sabotaged() -> None:
    """Assert that the comparison fails for a kernel that writes one wrong code."""
    real = backend()
    codec = qtensor.quantizer("mxfp8")

    class Wrong:
        @staticmethod
        def quantize_(codec: Any, out: dict[str, Tensor], x: Tensor, **call: Any) -> None:
            real.quantize_(codec, out, x, **call)
            out["_rowwise_data"].view(-1)[-1] ^= 1

    globals()["backend"] = lambda: Wrong
    try:
        compare_quantize(codec, torch.ones(3, 40, device=device()))
    finally:
        globals()["backend"] = lambda: real


def check_table(name: str) -> None:
    """The table's row for GPUs, given CPU tensors: public calls end in these kernels, with the
    reference's bytes.
    """
    case = BY_NAME[name]
    x = mixed((40, 70), torch.bfloat16)
    row = table.BACKENDS["cuda"]
    assert row.supports(case.quantizer(), torch.float64) is not None
    served: list[str] = []

    def watched(kind: str, kernel: Any) -> Any:
        def call(*args: Any) -> bool:
            done = kernel(*args)
            served.extend([kind] * done)
            return done

        return call

    nobody = table.Backend("nobody", row.supports, lambda *_: False, lambda *_: False)
    triton = table.Backend(
        "triton",
        row.supports,
        watched("q", row.quantize_),
        watched("d", row.dequantize_),
        watched("a", row.amax_),
    )
    results = []
    for backend_row in (nobody, triton):
        with mock.patch.dict(table.BACKENDS, {"cpu": backend_row}):
            q = case.quantize(x, columnwise=True)
            maxima = torch.ops.qtensor.amax(x, q._quantizer.canonical)
            results.append([*q.buffers(), q.dequantize(), *maxima])
    assert served == ["q", "a", "d"]
    for got, want in zip(results[1], results[0], strict=True):
        assert_same_bytes(got, want)
