"""How the CPU kernels are compiled: which files, for which instruction set."""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

import torch

from qtensor.build import Recipe, Unit
from qtensor.compilers import find_cxx
from qtensor.errors import check

FOLDER = Path(__file__).parent / "src"
ISAS = ("avx512", "avx2", "baseline")
"""Instruction sets, the best first. "baseline" is whatever the compiler assumes of the machine."""
_FLAGS = {
    "avx512": (
        "-DQT_ISA=512",
        *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vbmi", "vbmi2")),
        "-mf16c",
    ),
    "avx2": ("-DQT_ISA=2", "-mavx2", "-mf16c"),
    "baseline": ("-DQT_ISA=0",),
}
_NEEDS = {
    "avx512": ("avx512_f", "avx512_bw", "avx512_dq", "avx512_vl", "avx512_vbmi", "avx512_vbmi2"),
    "avx2": ("avx2", "f16c"),
    "baseline": (),
}
_COMMON = (
    "-std=c++17",
    "-O3",
    # A contracted a * b + c would round once where the reference rounds twice.
    "-ffp-contract=off",
    "-Wno-psabi",
)
_OPENMP = ("-fopenmp",) if platform.system() == "Linux" else ()


@functools.cache
def _capabilities() -> dict[str, bool]:
    """What the CPU can do, in the names of ``torch.cpu.get_capabilities``."""
    probe = getattr(torch.cpu, "get_capabilities", None)  # torch 2.12 and later
    if probe is not None:
        return {name: bool(value) for name, value in probe().items() if isinstance(value, bool)}
    try:
        flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n", 1)[0].split()
    except (OSError, IndexError):
        return {}
    return {name.replace("avx512", "avx512_", 1).replace("__", "_"): True for name in flags}


def usable_isas() -> tuple[str, ...]:
    """The instruction sets that this CPU has, the best first."""
    have = _capabilities()
    return tuple(isa for isa in ISAS if all(have.get(part) for part in _NEEDS[isa]))


def choose_isa() -> str:
    """The instruction set to build for: ``QTENSOR_CPU_ISA``, else the best that this CPU has.

    Raises:
        QTensorError: the variable names no instruction set, or one that the CPU lacks.
    """
    usable = usable_isas()
    wanted = os.environ.get("QTENSOR_CPU_ISA")
    if wanted is None:
        return usable[0]
    check(
        wanted in usable,
        "QTENSOR_CPU_ISA",
        f"it must name an instruction set of this CPU: {', '.join(usable)}",
        repr(wanted),
        "Unset it to take the best",
    )
    return wanted


def units(isa: str) -> tuple[Unit, ...]:
    """What is compiled: each kernel for each dtype of its input, and the C interface."""
    flags = (*_COMMON, *_OPENMP, *_FLAGS[isa], f"-DQT_NAMESPACE=qt_{isa}")
    found = [
        Unit(FOLDER / f"{name}.cpp", flags, name)
        for name in ("entry", "linear", "program", "state")
    ]
    for source in ("quantize", "dequantize", "norm", "activation"):
        for dtype in ("Float32", "Bfloat16", "Float16"):
            dtype_flags = (*flags, f"-DQT_DTYPE={dtype}")
            found.append(Unit(FOLDER / f"{source}.cpp", dtype_flags, f"{source}_{dtype}"))
    return tuple(found)


def headers() -> tuple[Path, ...]:
    """What the sources include."""
    return tuple(sorted((*FOLDER.glob("*.h"), *FOLDER.glob("*.inc"))))


def recipe(isa: str) -> Recipe:
    """What ``qtensor.build`` compiles for an instruction set.

    Raises:
        CompilerNotFound: there is no C++ compiler.
    """
    return Recipe(
        f"cpu_{isa}",
        units(isa),
        find_cxx(),
        headers(),
        _OPENMP,
        title="native CPU kernels",
        effort=80.0,
    )


def calls_recipe() -> Recipe:
    """What ``qtensor.build`` compiles of small_calls.cpp, against the torch that is installed.

    Raises:
        CompilerNotFound: there is no C++ compiler.
    """
    root = Path(torch.__file__).parent
    flags = (
        "-std=c++20",
        "-O2",
        "-w",
        f"-DQT_TORCH={torch.__version__}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    )
    include = (root / "include", root / "include" / "torch" / "csrc" / "api" / "include")
    unit = Unit(FOLDER / "small_calls.cpp", flags, "small_calls", include)
    libraries = tuple(str(root / "lib" / f"lib{name}.so") for name in ("torch_cpu", "c10"))
    return Recipe("small_calls", (unit,), find_cxx(), (), libraries, "small CPU calls", 8.0)
