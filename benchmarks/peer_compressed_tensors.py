"""The same jobs in compressed-tensors 0.20, by the functions that compress checkpoint weights.

In this library the caller (an observer of llm-compressor) computes maxima. ``quantize`` here
therefore consists of a minimum and maximum for each block, ``calculate_qparams`` and the compressor
of the format.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import Tensor
from torch.nn import functional as F

from benchmarks.peer import Job, Peer

MX = {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8": ("float-quantized", {"num_bits": 8, "strategy": "tensor"}),
    "fp8_rowwise": ("float-quantized", {"num_bits": 8, "strategy": "channel"}),
    "fp8_blockwise": (
        "float-quantized",
        {"num_bits": 8, "strategy": "group", "group_size": 128},
    ),
    "fp8_blockwise(block_scaling_dim=2)": (
        "float-quantized",
        {"num_bits": 8, "strategy": "block", "block_structure": [128, 128]},
    ),
    "mxfp8": ("mxfp8-quantized", {"num_bits": 8, **MX}),
    "mxfp6(packed=True)": ("mxfp6-pack-quantized", {"num_bits": 6, **MX}),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, **MX}),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {
            "num_bits": 4,
            "strategy": "tensor_group",
            "group_size": 16,
            "scale_dtype": torch.float8_e4m3fn,
        },
    ),
}
"""Case -> compressor and arguments."""
NOTES = (
    "factors are computed in the dtype of the input and MX factors rounded to the nearest power "
    "of two, so "
    "the bytes differ from ours; the amount of work does not",
    "it has no tensor type and no linear on compressed weights on a CPU; the peer here is "
    "F.linear(x, decompressed weight)",
    "decompressing gives the dtype of the factors, converted to the asked one if that differs",
)


def _limits(x: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """Return the minimum and maximum of each block."""
    if args.block_structure is not None:
        rows, cols = args.block_structure
        blocks = x.unflatten(1, (-1, cols)).unflatten(0, (-1, rows))
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    if args.group_size is not None:
        blocks = x.unflatten(1, (-1, args.group_size))
        return blocks.amin(-1), blocks.amax(-1)
    if args.strategy == "channel":
        return x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    low, high = torch.aminmax(x)
    return low, high


def _job(compressor_name: str, options: dict[str, Any]) -> Job:
    args = QuantizationArgs(type="float", symmetric=True, **options)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(compressor_name)
    two_levels = args.strategy == "tensor_group"

    def quantize(x: Tensor) -> dict[str, Tensor]:
        state = {"weight": x}
        if two_levels:
            state["weight_global_scale"] = generate_gparam(*torch.aminmax(x))
        limits = _limits(x, args)
        scale, _ = calculate_qparams(*limits, args, state.get("weight_global_scale"))
        return compressor.compress({**state, "weight_scale": scale}, scheme)

    def dequantize(q: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        return compressor.decompress(q, scheme)["weight"].to(dtype)

    return Job(quantize, dequantize, lambda x, q: F.linear(x, dequantize(q, x.dtype)))


PEER = Peer(
    "compressed-tensors",
    version("compressed-tensors"),
    {name: _job(*chosen) for name, chosen in FORMATS.items()},
    notes=NOTES,
)
