"""Valid arguments of the op ``scaled_grouped_gemm``, for ``raw_op_cases.py``."""

from __future__ import annotations

from typing import Any

import torch

import qtensor


def scaled_grouped_gemm(make: Any) -> dict[str, Any]:
    """Groups of rows times a stack, or groups along K of two matrices."""
    quantizer = qtensor.quantizer(make.random.choice(("fp8_rowwise", "mxfp8", "mxfp4", "nvfp4")))
    if quantizer.format != "fp8_rowwise":
        quantizer = qtensor.quantizer(quantizer, swizzled=True)
    if quantizer.format == "nvfp4":
        quantizer = qtensor.quantizer(quantizer, with_global_scale_inv=True)
    along_k = make.random.random() < 0.5
    rows, k, groups = make.rows, 128, make.groups
    offs = torch.arange(1, groups + 1, dtype=torch.int32) * (k // groups if along_k else 0)
    offs[-1] = k if along_k else rows
    made = {}
    for name, shape in (("a", (rows, k)), ("b", (48, k) if along_k else (groups, 48, k))):
        t = quantizer(make.floats(*shape, dtype=torch.float32))
        where = offs if len(shape) == 2 else None
        given = t.scaled_grouped_mm_args("a", offs=where, along_k=along_k, codes=True)
        scale, *wide = given["scale_a"]
        buffers = [given["mat_a"].view(torch.uint8), scale, *wide, *wide]
        if scale.dtype != torch.float32:
            buffers[1] = scale.view(torch.uint8)
        made |= {name: buffers, f"{name}_quantizer": quantizer.canonical, f"{name}_shape": shape}
    return {**made, "offs": offs, "dtype": make.dtype}
