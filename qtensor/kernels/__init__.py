"""Register fast kernels with the bytes of ``reference/``: native, Triton and CUTLASS."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from qtensor.core.errors import BuildError as BuildError
from qtensor.core.errors import check


def build(isa: str | None = None) -> Path:
    """Compile the CPU kernels that neither the package nor the cache has.

    Call this when an image is built, or before the first step.

    The C++ ops, which call the kernels, and the kernels of attention are compiled in the same way.

    Args:
        isa: "avx512", "avx2" or "baseline"; None is ``QTENSOR_CPU_ISA``, else the best that this
            CPU has. One that it lacks can be built for another machine that shares the cache.

    Returns:
        The library of the kernels, without those of attention.

    Raises:
        QTensorError: no such instruction set.
        BuildError: no compiler runs, it fails, or the cache cannot be written.
    """
    # Only those who build need compilers and the cache.
    from qtensor.build.compilers import stop_all  # noqa: PLC0415
    from qtensor.kernels.cpu import prebuilt, sources  # noqa: PLC0415

    chosen = sources.choose_isa() if isa is None else isa
    known = ", ".join(sources.ISAS)
    rule = f"isa must be one of {known}"
    check(chosen in sources.ISAS, "kernels.build", rule, repr(isa), "Choose one of them")
    # All at once: the last compilers of one library would leave processors idle.
    with ThreadPoolExecutor(2) as pool:
        pool.submit(prebuilt.provide_ops)
        attention = pool.submit(prebuilt.provide_one, sources.attention_build_spec(chosen))
        try:
            library = prebuilt.provide(chosen)
            attention.result()
        except BaseException:
            stop_all()
            raise
    return library


def build_gemms(
    arch: str | None = None,
    recipe: str | None = None,
    *,
    jobs: int | None = None,
    progress: Any = None,
) -> list[Path]:
    """Compile the GEMMs of GPUs, where the cache does not have them yet.

    Needs ``torch-qtensor[cutlass-build]``, and no GPU.

    Args:
        arch: "sm_90a" (Hopper), "sm_100f" (Blackwell) or "sm_120f" (RTX); None is that of the
            current GPU.
        recipe: "fp8", "fp8_blockwise", "mxfp8", "mxfp4" or "nvfp4"; None is all that the
            architecture has.
        jobs: compilers at once; by default as many as processors and free memory (6 GiB each)
            allow.
        progress: called with the spec and the path (or the error) of each that ends.

    Returns:
        The libraries.

    Raises:
        QTensorError: no such architecture or recipe, or no GPU and no ``arch``.
        BuildError: no nvcc or no CUTLASS, or it fails.
    """
    from qtensor.cutlass_gemm import library, tuning  # noqa: PLC0415 - as in build

    chosen = tuning.select(arch or _current_arch(), recipe)
    return library.build_all(chosen, jobs=jobs, progress=progress)


def _current_arch() -> str:
    rule = "without an architecture there must be a GPU to build for"
    fix = 'Pass an architecture, for example arch="sm_90a"'
    check(torch.cuda.is_available(), "kernels.build_gemms", rule, "no CUDA device", fix)
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}a"


def autotune(
    sizes: Sequence[tuple[int, int, int]], arch: str | None = None, recipe: str | None = None
) -> list[Any]:
    """Time the compiled GEMMs for products of these sizes and use the fastest from now on.

    Nothing is compiled. The choices are kept in the cache, for this device and these libraries.

    Args:
        sizes: (M, N, K) of each product.
        arch: as for ``build_gemms``.
        recipe: as for ``build_gemms``.

    Returns:
        A ``Choice`` for each kind of product and size: the kernels and their microseconds.

    Raises:
        QTensorError: no GPU, or no kernel is built.
    """
    from qtensor.cutlass_gemm import autotune as tuner  # noqa: PLC0415 - as in build
    from qtensor.cutlass_gemm import tuning  # noqa: PLC0415

    chosen = tuning.select(arch or _current_arch(), recipe)
    wanted = dict.fromkeys(tuning.want_of(spec) for spec in chosen)
    device = torch.device("cuda", torch.cuda.current_device())
    return tuner.autotune(wanted, sizes, device, name=torch.cuda.get_device_name(device))


def explain(quantizer: Any, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> str:
    """Return which kernels quantize tensors of ``dtype`` on a device type, and why no faster ones.

    This function starts to build the kernels if they are not built yet.

    Args:
        quantizer: a quantizer: ``qtensor.quantizer("mxfp8")``.
        dtype: of the input.
        device: "cpu", "cuda", ...

    Returns:
        "mxfp8 from torch.bfloat16 on cpu: native", or "...: reference (why)".
    """
    from qtensor.kernels import table  # noqa: PLC0415 - it imports this

    return table.explain(quantizer, dtype, device)
