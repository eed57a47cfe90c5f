"""The same jobs in torchao 0.18 through its public functions; notes list what a CPU cannot run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torchao
from torch import Tensor
from torch.nn import functional as F
from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8
from torchao.float8.float8_utils import tensor_to_amax
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor, to_dtype
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.quantization import PerRow, PerTensor
from torchao.quantization.granularity import PerBlock
from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor

from benchmarks import cases
from benchmarks.peer import Job, Peer

NOT_ON_CPU = (
    "blockwise FP8 of torchao.prototype.blockwise_fp8_training: its module imports triton; the "
    "peer here is Float8Tensor with PerBlock, whose factors are plain float32, not powers of two",
    "delayed scaling: torchao has none any more; the peer is its cast by a given scale and its "
    "amax, the two "
    "results that delayed scaling needs",
    "MXTensor has no weight-only F.linear (it asserts act_quant_kwargs); the peer here is "
    "F.linear(x, q.dequantize(x.dtype)), which a user would write",
    "the MX and NVFP4 quantizers of torchao in Triton and CUDA (mslk); the peers here are its "
    "torch ones",
    "columnwise MX casts (dim0) in one pass: CUDA only",
)
"""Functions of torchao that could not be timed, and their substitutes."""
COMPILED_MX = (
    "compiled MX: inductor has no float8_e8m0fnu on a CPU, so the compiled functions pass the "
    "factors as "
    "uint8 views; where a factor of that type remains inside, compiling fails"
)
MX = {
    "mxfp8": (torch.float8_e4m3fn, ScaleCalculationMode.RCEIL),
    "mxfp8(scale_mode=floor)": (torch.float8_e4m3fn, ScaleCalculationMode.FLOOR),
    "mxfp6": ("fp6_e2m3", ScaleCalculationMode.FLOOR),
    "mxfp6(dtype=e3m2)": ("fp6_e3m2", ScaleCalculationMode.FLOOR),
    "mxfp4": (torch.float4_e2m1fn_x2, ScaleCalculationMode.FLOOR),
}
"""Case -> element and rounding of the factors."""
MX_BLOCK = 32


def quantizers() -> dict[str, Callable[[Tensor], Any]]:
    """Return case name (our canonical string) -> torchao's function for that format."""
    delayed = torch.tensor(cases.DELAYED_SCALE)
    return {
        "fp8": lambda x: Float8Tensor.from_hp(x, granularity=PerTensor()),
        "fp8_delayed": lambda x: (
            hp_tensor_and_scale_to_float8(x, delayed, torch.float8_e4m3fn),
            tensor_to_amax(x),
        ),
        "fp8_rowwise": lambda x: Float8Tensor.from_hp(x, granularity=PerRow()),
        "fp8_blockwise": lambda x: Float8Tensor.from_hp(x, granularity=PerBlock([1, 128])),
        "fp8_blockwise(block_scaling_dim=2)": lambda x: Float8Tensor.from_hp(
            x, granularity=PerBlock([128, 128])
        ),
        **{name: _mx(*chosen) for name, chosen in MX.items()},
        "nvfp4": lambda x: NVFP4Tensor.to_nvfp4(
            x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().amax())
        ),
    }


def construct(q: MXTensor) -> Callable[[], Any]:
    """Return a call that builds the wrapper around existing buffers."""
    arguments = (q.elem_dtype, q.block_size, q.orig_dtype, q.kernel_preference, q.act_quant_kwargs)
    data, scale, swizzled = q.qdata, q.scale, q.is_swizzled_scales
    return lambda: MXTensor(data, scale, *arguments, swizzled)


def linear(x: Tensor, q: Any) -> Tensor:
    """Return a weight-only ``F.linear``; MX needs an explicit dequantize."""
    return F.linear(x, q.dequantize(x.dtype) if isinstance(q, MXTensor) else q)


def _mx(element: Any, mode: ScaleCalculationMode) -> Callable[[Tensor], MXTensor]:
    return lambda x: MXTensor.to_mx(x, element, MX_BLOCK, mode)


def _dequantize(q: Any, dtype: torch.dtype) -> Tensor:
    return q.dequantize(dtype)


def _compiled_mx(element: Any, mode: ScaleCalculationMode) -> Job:
    """Return codes and factors as plain tensors, the factors as bytes."""

    def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
        q = MXTensor.to_mx(x, element, MX_BLOCK, mode)
        return q.qdata, q.scale.view(torch.uint8)

    def dequantize(q: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
        data, scale = q
        return to_dtype(data, scale.view(torch.float8_e8m0fnu), element, MX_BLOCK, dtype)

    return Job(quantize, dequantize, lambda x, q: F.linear(x, dequantize(q, x.dtype)))


def _jobs() -> dict[str, Job]:
    jobs = {name: Job(function, _dequantize, linear) for name, function in quantizers().items()}
    jobs["fp8_delayed"] = Job(jobs["fp8_delayed"].quantize)
    return jobs


PEER = Peer(
    "torchao",
    torchao.__version__,
    _jobs(),
    {name: _compiled_mx(*chosen) for name, chosen in MX.items()},
    construct,
    (*NOT_ON_CPU, COMPILED_MX),
)
