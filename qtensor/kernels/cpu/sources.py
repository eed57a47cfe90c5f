"""Which C++ files the CPU kernels consist of, and the flags of each instruction set."""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
from pathlib import Path
from typing import NamedTuple

import torch

from qtensor.build.cache import BuildSpec, Unit
from qtensor.build.compilers import find_cxx
from qtensor.core.errors import check

FOLDER = Path(__file__).parent / "src"
_OPS = FOLDER / "ops"
ISAS = ("avx512", "avx2", "baseline")
"""Instruction sets, the best first. "baseline" is the one that the compiler assumes by default."""
_FLAGS = {
    "avx512": (
        "-DQT_ISA=512",
        *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vbmi", "vbmi2", "vnni")),
        "-mf16c",
    ),
    "avx2": ("-DQT_ISA=2", "-mavx2", "-mfma", "-mf16c"),
    "baseline": ("-DQT_ISA=0",),
}
_NEEDS = {
    "avx512": tuple(f"avx512_{part}" for part in ("f", "bw", "dq", "vl", "vbmi", "vbmi2", "vnni")),
    "avx2": ("avx2", "fma3", "f16c"),
    "baseline": (),
}
_COMMON = (
    "-std=c++17",
    "-O3",
    # A contracted a * b + c would round once where the reference rounds twice.
    "-ffp-contract=off",
    # Kernels access the same memory as floats and as integers.
    "-fno-strict-aliasing",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    # GCC reports its own AVX-512 intrinsics that leave a register undefined on purpose (GCC bug
    # 105593).
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
    # Loops over the rest of a row run for less than a vector; GCC warns about 2^62 rounds.
    "-Wno-aggressive-loop-optimizations",
)
_BY_DTYPE = ("-fno-gcse", "-fno-schedule-insns2", "-fno-tree-vrp")
"""Flags of the kernels that are compiled for each dtype: these passes of GCC take a seventh of the
compilation and do not make the kernels faster. Clang has no such passes, and warns."""
_WIDENED = {"quantize": "quantize_float16", "dequantize": "dequantize_float16"}
"""Sources of float16 that call the kernels of float32: kernels of its own would take a quarter of
the whole compilation."""
_OPENMP = ("-fopenmp",) if platform.system() == "Linux" else ()


@functools.cache
def capabilities() -> dict[str, bool]:
    """Return what the CPU can do, under the names of `torch.cpu.get_capabilities`."""
    probe = getattr(torch.cpu, "get_capabilities", None)  # torch 2.12 and later
    if probe is not None:
        return {name: bool(value) for name, value in probe().items() if isinstance(value, bool)}
    try:
        flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n", 1)[0].split()
    except (OSError, IndexError):
        return {}
    names = {name.replace("avx512", "avx512_", 1).replace("__", "_"): True for name in flags}
    return names | {"fma3": "fma" in flags}


def usable_isas() -> tuple[str, ...]:
    """Return the instruction sets of this CPU, the best first."""
    found = capabilities()
    return tuple(isa for isa in ISAS if all(found.get(part) for part in _NEEDS[isa]))


def choose_isa() -> str:
    """Return the instruction set to use: `QTENSOR_CPU_ISA`, else the best of this CPU.

    Raises:
        QTensorError: the variable does not name an instruction set of this CPU.
    """
    usable = usable_isas()
    requested = os.environ.get("QTENSOR_CPU_ISA")
    if requested is None:
        return usable[0]
    check(
        requested in usable,
        "QTENSOR_CPU_ISA",
        f"it must name an instruction set of this CPU: {', '.join(usable)}",
        repr(requested),
        "Unset it to take the best",
    )
    return requested


def _unit(isa: str, source: str, dtype: str = "", *more: str) -> Unit:
    """Return one compilation; ``dtype`` is "" for sources that serve all dtypes."""
    flags = (*_COMMON, *_OPENMP, *_FLAGS[isa], f"-DQT_NAMESPACE=qt_{isa}")
    if source == "few_rows_bfloat16":
        flags += ("-mavx512bf16",)  # its functions are called on CPUs that have these instructions
    if dtype:
        flags += (*_BY_DTYPE, f"-DQT_DTYPE={dtype}")
    name = f"{source}_{dtype}" if dtype else source
    return Unit(FOLDER / f"{source}.cpp", (*flags, *more), name)


def units(isa: str) -> tuple[Unit, ...]:
    """Return the compilations of an instruction set, those that take longest first."""
    quantizers = [_unit(isa, "quantize", dtype) for dtype in ("Bfloat16", "Float32")]
    others = [_unit(isa, "by_dtype", dtype) for dtype in ("Bfloat16", "Float32", "Float16")]
    names = ["few_rows", *(["few_rows_bfloat16"] if isa == "avx512" else [])]
    names += ["integer_products", "any_dtype"]
    return (*quantizers, *others, *(_unit(isa, name) for name in names))


def headers() -> tuple[Path, ...]:
    """Return the files that the units include: headers, and sources that are compiled together."""
    return tuple(sorted(path for path in FOLDER.glob("*.*") if path.suffix != ".md"))


def build_spec(isa: str) -> BuildSpec:
    """Return how to build the kernels of an instruction set; needs no compiler yet."""
    return BuildSpec(
        f"cpu_{isa}",
        units(isa),
        find_cxx,
        headers(),
        _OPENMP,
        title="native CPU kernels",
        # With the 3 seconds of the C++ ops, which are built with them.
        effort=65.0,
    )


class Piece(NamedTuple):
    """A piece of the library that can be compiled alone.

    Attributes:
        function: the function of c_interface.cpp: "quantize", "dequantize", "linear",
            "integer_products", "norm" (sums of rows too) or "activation".
        dtype: "Float32", "Bfloat16" or "Float16"; "" for all dtypes.
        format: `format_number` of structs.h; None for all formats.
    """

    function: str
    dtype: str = ""
    format: int | None = None


def piece_spec(isa: str, piece: Piece) -> BuildSpec:
    """Return how to build a piece of the library: fast to compile, with the bytes of the whole."""
    flags = ["-O1", "-DQT_PIECE", f"-DQT_{piece.function.upper()}"]
    flags += [f"-DQT_FORMAT={piece.format}"] * (piece.format is not None)
    interface = [f"-DQT_DTYPE={piece.dtype}"] if piece.dtype else []  # The kernels have their own.
    chosen = (
        _unit(isa, "c_interface", "", *flags, *interface),
        *(_unit(isa, source, dtype, *flags) for source, dtype in _kernels_of(isa, piece)),
    )
    words = [piece_name(isa), *(str(word) for word in piece if word)]
    return dataclasses.replace(build_spec(isa), name="_".join(words), units=chosen)


def _kernels_of(isa: str, piece: Piece) -> list[tuple[str, str]]:
    """Return the sources of a piece beside c_interface.cpp, each with its dtype."""
    if piece.function == "linear":
        dots = [("few_rows_bfloat16", "")] if isa == "avx512" else []
        return [("linear", ""), ("few_rows", ""), *dots, ("dequantize", "Bfloat16")]
    if piece.dtype == "Float16" and piece.function in _WIDENED:
        return [(_WIDENED[piece.function], ""), (piece.function, "Float32")]
    return [(piece.function, piece.dtype)]


def piece_name(isa: str) -> str:
    """Return how the names of all pieces of an instruction set begin."""
    return f"piece_{isa}"


def attention_build_spec(isa: str) -> BuildSpec:
    """Return how to build the kernels of attention for an instruction set."""
    folder = FOLDER / "attention"
    flags = (*_COMMON, *_OPENMP, *_FLAGS[isa], f"-DQT_NAMESPACE=qt_attention_{isa}")
    all_units = [Unit(folder / f"{name}.cpp", flags, name) for name in ("attention", "append")]
    if isa == "avx512":
        # Its functions are called on CPUs that have these instructions.
        all_units.append(Unit(folder / "dots.cpp", (*flags, "-mavx512bf16"), "dots"))
    names = ["structs", "simd", "fused", "element_codes", "memory", "threads", "denormals"]
    names.append("transpose_avx512")
    return BuildSpec(
        f"attention_{isa}",
        tuple(all_units),
        find_cxx,
        (*sorted(folder.glob("*.h")), *(FOLDER / f"{name}.h" for name in names)),
        _OPENMP,
        title="CPU kernels of attention",
        effort=10.0,
    )


def kernel_build_specs(isa: str) -> tuple[BuildSpec, BuildSpec]:
    """Return how to build both libraries of an instruction set; the second one is attention's."""
    return build_spec(isa), attention_build_spec(isa)


_OF_OPS = ("structs.h", "denormals.h", "memory.h", "attention/calls.h")
"""Headers of the kernels that the ops read."""


def ops_build_spec() -> BuildSpec:
    """Return how to build the C++ kernels of the ops, which serve every version of torch."""
    # With GCC's own model, loops over the factors of a weight would take one byte at a time.
    flags = (
        "-std=c++20",
        "-O2",
        "-fvect-cost-model=dynamic",
        "-ffp-contract=off",
        "-Wall",
        "-Wextra",
    )
    hidden = ("-fvisibility=hidden", "-DQT_NAMESPACE=ops")
    return BuildSpec(
        "ops",
        (Unit(_OPS / "all.cpp", (*flags, *hidden), "ops"),),
        find_cxx,
        (*sorted(_OPS.glob("*.*")), *(FOLDER / name for name in _OF_OPS)),
        title="C++ ops",
    )
