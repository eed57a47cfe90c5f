"""Weights for products of few rows, and products of the kernel itself beside the oracle."""

from __future__ import annotations

from typing import Any

import few_rows_oracle as oracle
import torch
from torch import Tensor

import qtensor
from qtensor.kernels.cpu import native
from qtensor.kernels.cpu.native import MOST_ROWS, Rows
from qtensor.storage.ops.products import operand_of

WEIGHTS: list[tuple[str, dict[str, Any]]] = [
    ("mxfp4", {}),
    ("nvfp4", {}),
    ("fp8", {}),
    ("fp8", {"dtype": "e5m2"}),
    ("fp8_rowwise", {}),
    ("fp8_rowwise", {"dtype": "e5m2"}),
    ("fp8_blockwise", {"block_scaling_dim": 1}),
    ("fp8_blockwise", {"block_scaling_dim": 1, "dtype": "e5m2"}),
    ("fp8_blockwise", {"block_scaling_dim": 2, "force_pow_2_scales": False}),
    ("mxfp8", {}),
    ("mxfp8", {"dtype": "e5m2", "swizzled": True}),
    ("mxfp8", {"with_2d_quantization": True}),
    ("mxfp6", {}),
    ("mxfp6", {"dtype": "e3m2"}),
    ("mxfp6", {"packed": True}),
    ("mxfp6", {"packed": True, "dtype": "e3m2"}),
    ("mxfp4", {"swizzled": True}),
    ("nvfp4", {"swizzled": True}),
    ("nvfp4", {"row_scaled": True}),
    ("nvfp4", {"with_2d_quantization": True}),
    ("nvfp4", {"use_4over6": True}),
    ("nvfp4", {"with_global_scale_inv": True}),
    ("nvfp4", {"e4m3_max": 256}),
]
TAILS = (1, 2, 15, 16, 31, 33, 64, 127, 128, 129, 255, 512, 513, 640, 1536)
"""Sizes of K around parts, blocks, spans and stages."""


def quantized(n: int, k: int, fmt: str, options: dict[str, Any], spread: float = 3.0) -> Any:
    """A weight whose blocks and rows have factors of many sizes."""
    w = (
        torch.randn(n, k)
        * torch.exp2(torch.randn(n, k // 16 + 1) * spread).repeat_interleave(16, 1)[:, :k]
    )
    return qtensor.quantize(w, fmt, **options)


def same_bits(a: Tensor, b: Tensor) -> None:
    whole = {4: torch.int32, 2: torch.int16}[a.element_size()]
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    different = (a.view(whole) != b.view(whole)).nonzero()
    assert not len(different), f"{len(different)} of {a.numel()}, first {different[0].tolist()}"


def check_tails(fmt: str, options: dict[str, Any]) -> None:
    """Compare small products with the oracle for each K of `TAILS`, alone and among 64 rows."""
    for k in TAILS:
        w, x = quantized(9, k, fmt, options), torch.randn(MOST_ROWS, k)
        weight = operand_of(w)
        for dtype in (torch.bfloat16, torch.float32):
            rows = x.to(dtype)
            want = oracle.product(rows[-6:], w)
            for count in (1, 4, 6, MOST_ROWS):
                out = torch.full((count, 9), torch.nan)
                assert native.linear_(
                    weight, Rows(rows[-count:]), None, out, kernel=native.FEW_ROWS
                )
                same_bits(out[-6:], want[-count:])
