"""Generate the C++ source of a kernel from its ``KernelSpec``, with ``nvidia-cutlass``."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from qtensor.core.errors import BuildError, fail
from qtensor.core.version import install_command
from qtensor.cutlass_gemm.spec import KernelSpec

FOLDER = Path(__file__).parent
HEADERS = tuple(FOLDER / f"qt_gemm_{name}.h" for name in ("abi", "driver", "epilogue", "errors"))
_FIX = f"Run: {install_command('cutlass-build')}"

_SCHEDULES = {
    ("fp8", "sm_90a", "cooperative"): "TmaWarpSpecializedCooperative",
    ("fp8", "sm_90a", "pingpong"): "TmaWarpSpecializedPingpong",
    ("fp8_blockwise", "sm_90a", "cooperative"): "BlockwiseTmaWarpSpecializedCooperative",
    ("fp8_blockwise", "sm_90a", "pingpong"): "BlockwiseTmaWarpSpecializedPingpong",
    ("fp8", "sm_100f", "1sm"): "TmaWarpSpecialized1SmSm100",
    ("fp8", "sm_100f", "2sm"): "TmaWarpSpecialized2SmSm100",
    ("fp8_blockwise", "sm_100f", "1sm"): "BlockwiseTmaWarpSpecialized1SmSm100",
    ("fp8_blockwise", "sm_100f", "2sm"): "BlockwiseTmaWarpSpecialized2SmSm100",
    ("mxfp8", "sm_100f", "1sm"): "Mxf8f6f4TmaWarpSpecialized1SmSm100",
    ("mxfp8", "sm_100f", "2sm"): "Mxf8f6f4TmaWarpSpecialized2SmSm100",
    ("mxfp4", "sm_100f", "1sm"): "Mxf4TmaWarpSpecialized1SmSm100",
    ("mxfp4", "sm_100f", "2sm"): "Mxf4TmaWarpSpecialized2SmSm100",
    ("nvfp4", "sm_100f", "1sm"): "Nvf4TmaWarpSpecialized1SmSm100",
    ("nvfp4", "sm_100f", "2sm"): "Nvf4TmaWarpSpecialized2SmSm100",
    ("mxfp8", "sm_120f", "cooperative"): "Mxf8f6f4TmaWarpSpecializedCooperativeSm120",
    ("mxfp8", "sm_120f", "pingpong"): "Mxf8f6f4TmaWarpSpecializedPingpongSm120",
    ("nvfp4", "sm_120f", "cooperative"): "Nvf4TmaWarpSpecializedCooperativeSm120",
    ("nvfp4", "sm_120f", "pingpong"): "Nvf4TmaWarpSpecializedPingpongSm120",
}
"""(recipe, arch, schedule) -> the name of CUTLASS's kernel schedule."""

_EPILOGUES = {
    "cooperative": "TmaWarpSpecializedCooperative",
    "pingpong": "TmaWarpSpecialized",
    "1sm": "TmaWarpSpecialized1Sm",
    "2sm": "TmaWarpSpecialized2Sm",
}
_FACTOR_ELEMENTS = {"mxfp8": "ue8m0", "mxfp4": "ue8m0", "nvfp4": "ue4m3"}
_MMA_K = {"mxfp4": 64, "nvfp4": 64}


@functools.cache
def cutlass() -> Any:
    """Import and return the package ``cutlass_library``.

    It comes from ``QTENSOR_CUTLASS_PATH`` (a checkout's ``python`` folder) if that is set,
    otherwise from the installed packages.
    """
    own = os.environ.get("QTENSOR_CUTLASS_PATH")
    if own:
        sys.path.insert(0, own)
    try:
        return importlib.import_module("cutlass_library")
    except ImportError as error:
        rule = "the package nvidia-cutlass 4.2 must be importable, to generate kernels"
        fail("cutlass", rule, error, _FIX, BuildError)
    finally:
        if own:
            sys.path.remove(own)


@functools.cache
def version() -> str:
    """Return the version of the CUTLASS headers that kernels are compiled with."""
    try:
        header = (source_folder() / "include/cutlass/version.h").read_text()
        numbers = [header.split(f"#define CUTLASS_{part} ")[1].split()[0] for part in _PARTS]
    except (OSError, IndexError) as error:
        fail("cutlass", "its headers must define a version", error, _FIX, BuildError)
    return ".".join(numbers)


_PARTS = ("MAJOR", "MINOR", "PATCH")


def source_folder() -> Path:
    """Return the folder that holds CUTLASS's ``include`` and ``tools``."""
    return Path(cutlass().source_path)


def digest() -> str:
    """Return eight hex digits that identify the code that generates kernels.

    The digest is part of each library's name, so a new release does not load an old library.
    """
    return _digest(*(path.read_bytes() for path in (Path(__file__), *HEADERS)))


@functools.cache
def _digest(*texts: bytes) -> str:
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:8]


def emit(spec: KernelSpec) -> str:
    """Return the C++ source of a kernel: its types from CUTLASS's emitter, then our driver."""
    operation = _operation(spec)
    emitter = cutlass().gemm_operation.EmitGemmUniversal3xInstance()
    # CUTLASS's emitter only writes linear combinations, but takes the epilogue's name from here.
    emitter.builtin_epilogue_functor_template = "QtEpilogue"
    name = operation.procedural_name()
    body = emitter.emit(operation)
    if spec.block:
        body = _with_factor_majors(spec, body)
    includes = "".join(f'#include "{path}"\n' for path in emitter.includes)
    return (
        f"// {spec.name}: CUTLASS {version()}\n"
        f'#include "qt_gemm_errors.h"\n{includes}'
        '#include "qt_gemm_epilogue.h"\n\n'
        f"{_epilogue_types(spec)}\n{body}\n"
        f"using QtKernel = {name};\n{_factor_macros(spec, name)}"
        f"#define QT_ACCUMULATES {int(spec.accumulates)}\n"
        f"#define QT_NAME {json.dumps(spec.name)}\n"
        f"#define QT_SPEC {json.dumps(spec.json())}\n"
        '#include "qt_gemm_driver.h"\n'
    )


def _operation(spec: KernelSpec) -> Any:
    """Return the spec as CUTLASS's ``GemmOperation``."""
    lib = cutlass()
    elements, layouts = lib.DataType, lib.LayoutType
    factor = _FACTOR_ELEMENTS.get(spec.recipe)
    kind, opcode, extra = _kind(spec)
    shape = [*spec.tile[:2], _MMA_K.get(spec.recipe, 32)]
    math = lib.MathInstruction(
        shape,
        elements[spec.a],
        elements[spec.b],
        elements.f32,
        opcode,
        lib.MathOperation.multiply_add,
        elements[factor] if factor else None,
    )
    arch = spec.capabilities[0][0] * 10
    cluster = [*spec.cluster, 1]
    tile = lib.TileDescription(
        list(spec.tile), 0, [4, 1, 1], math, arch, arch, cluster, list(spec.block) or None
    )
    row_major, column_major = layouts.RowMajor, layouts.ColumnMajor
    major_a, major_b = spec.majors

    def matrix(element: str, layout: Any) -> Any:
        kind = elements[element]
        return lib.TensorDescription(kind, layout, 128 // lib.DataTypeSize[kind])

    schedule = _SCHEDULES[spec.recipe, spec.arch, spec.schedule]
    if spec.fast:
        schedule += "FP8FastAccum"
    epilogue = _EPILOGUES[spec.schedule] if spec.arch != "sm_120f" else "ScheduleAuto"
    source = matrix(spec.d, row_major)
    if not spec.accumulates:
        source = lib.TensorDescription(elements.void, row_major, source.alignment)
    return lib.gemm_operation.GemmOperation(
        kind,
        arch,
        tile,
        matrix(spec.a, row_major if major_a == "k" else column_major),
        matrix(spec.b, column_major if major_b == "k" else row_major),
        source,
        elements.f32,
        lib.EpilogueFunctor.LinearCombination,
        D=matrix(spec.d, row_major),
        kernel_schedule=lib.KernelScheduleType[schedule],
        epilogue_schedule=lib.EpilogueScheduleType[epilogue],
        tile_scheduler=lib.TileSchedulerType.Default,
        **extra,
    )


def _kind(spec: KernelSpec) -> tuple[Any, Any, dict[str, Any]]:
    """Return CUTLASS's kind of kernel, its kind of instruction, and the options of the factors."""
    lib = cutlass()
    kinds, opcodes = lib.GemmKind, lib.OpcodeClass
    if spec.block:
        names = [f"ScaleFactor{dim}VecSize" for dim in "MNK"]
        sizes = dict(zip(names, spec.block, strict=True))
        return kinds.BlockwiseUniversal3x, opcodes.TensorOp, sizes
    if not spec.factor_block:
        return kinds.Universal3x, opcodes.TensorOp, {}
    factor = lib.DataType[_FACTOR_ELEMENTS[spec.recipe]]
    none = lib.TensorDescription(lib.DataType.void, lib.LayoutType.RowMajor)
    extra = {
        "ScaleFactorA": factor,
        "ScaleFactorB": factor,
        "ScaleFactorD": {"tensor": none, "vector_size": None},
    }
    return kinds.BlockScaledUniversal3x, opcodes.BlockScaledTensorOp, extra


def _epilogue_types(spec: KernelSpec) -> str:
    lib = cutlass()
    element = lib.DataTypeTag[lib.DataType[spec.d]]
    m, n, k = spec.tile
    rows = m // 2 if spec.schedule == "2sm" else m  # each CTA of a pair computes half of the rows
    tile = f"cute::Shape<cute::_{rows}, cute::_{n}, cute::_{k}>"
    name = "AccumulatingEpilogue" if spec.accumulates else "Epilogue"
    elements = f"{element}, {element}" if spec.accumulates else element
    return f"using QtCtaTile = {tile};\nusing QtEpilogue = qt::{name}<QtCtaTile, {elements}>;\n"


def _factor_macros(spec: KernelSpec, name: str) -> str:
    if spec.block:
        return (
            f"using QtScaleConfig = {name}_ScaleConfig;\n#define QT_FACTORS 2\n"
            f"#define QT_SFB_K_MAJOR {int(spec.block[1] > 1)}\n"
        )
    if spec.factor_block:
        config = "QtKernel::CollectiveMainloop::Sm1xxBlkScaledConfig"
        return f"using QtScaleConfig = typename {config};\n#define QT_FACTORS 1\n"
    return "#define QT_FACTORS 0\n"


def _with_factor_majors(spec: KernelSpec, body: str) -> str:
    """Set the order of factors of 128x128 blocks of ``b`` in the emitted source.

    We store them by rows, (N / 128, K / 128); CUTLASS's default is by columns.
    """
    sizes = ", ".join(map(str, spec.block))
    plain = f"BlockwiseScaleConfig<{sizes}>"
    if spec.block[1] == 1:
        return body
    major = "cute::GMMA::Major" if spec.arch == "sm_90a" else "cute::UMMA::Major"
    return body.replace(plain, f"BlockwiseScaleConfig<{sizes}, {major}::MN, {major}::K>")
