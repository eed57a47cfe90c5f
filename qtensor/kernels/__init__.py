"""Fast kernels beside ``reference/``, with the same bytes: native code for CPUs, Triton for GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from qtensor.errors import check


def build(isa: str | None = None) -> Path:
    """Compile the CPU kernels, where the cache does not have them yet: for an image, or before the first step.

    Args:
        isa: "avx512", "avx2" or "baseline"; None is ``QTENSOR_CPU_ISA``, else the best that this CPU has. One that it
            lacks can be built for another machine that shares the cache.

    Returns:
        The library.

    Raises:
        QTensorError: no such instruction set.
        BuildError: no compiler runs, it fails, or the cache cannot be written.
    """
    # Only those who build need compilers and the cache.
    from qtensor.build import build as build_library  # noqa: PLC0415
    from qtensor.kernels.cpu import sources  # noqa: PLC0415

    chosen = sources.choose_isa() if isa is None else isa
    known = ", ".join(sources.ISAS)
    rule = f"isa must be one of {known}"
    check(chosen in sources.ISAS, "kernels.build", rule, repr(isa), "Choose one of them")
    return build_library(sources.recipe(chosen))


def explain(quantizer: Any, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> str:
    """Who quantizes tensors of ``dtype`` on a device type, and why not something faster.

    Args:
        quantizer: a quantizer: ``qtensor.quantizer("mxfp8")``.
        dtype: of the input.
        device: "cpu", "cuda", ...

    Returns:
        "mxfp8 from torch.bfloat16 on cpu: native", or "...: reference (why)". Builds the kernels if nothing has yet.
    """
    from qtensor.kernels.table import explain as explain_kernels  # noqa: PLC0415 - it imports this

    return explain_kernels(quantizer, dtype, device)
