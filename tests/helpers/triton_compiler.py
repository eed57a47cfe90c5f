"""Compile the kernels that host code launches, for targets that need not be present."""

from __future__ import annotations

import importlib
import os
import re
from typing import Any

import torch
from torch import Tensor

import qtensor

MODULES = ("amax", "dequantize", "float8", "mx", "nvfp4")
TARGETS = (90, 100)
_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.int16: "*i16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
FORBIDDEN = {
    r"\bfma\.": "a product and a sum in one rounding",
    r"\bdiv\.(full|approx)": "a division that is not IEEE",
    r"\b(rcp|sqrt|rsqrt|ex2|lg2|tanh)\.approx": "an approximation",
    r"\.ftz\b": "subnormals flushed to zero",
    # Stochastic rounding takes NaN for the largest E2M1 value, 6.0, as `min` with it does.
    r"\b(min|max)\.f32(?!.*0f40C00000)": "a minimum or maximum that drops NaN",
    r"\batom\.\S*(acq|rel\b|acq_rel)": "an atomic that orders all other memory",
}


def compile_only(folder: str) -> None:
    """Let kernels compile, in any environment of the parent."""
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_CACHE_DIR"] = folder
    torch.set_num_threads(1)


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _is_fixed(value: Any) -> bool:
    """Return whether a value is a constant to Triton: None, 1, a constexpr or a function."""
    kind = type(value).__name__
    return value is None or kind in ("constexpr", "JITFunction") or (kind == "int" and value == 1)


def _is_aligned(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.data_ptr() % 16 == 0
    return isinstance(value, int) and value % 16 == 0


def _like(group: tuple[Any, ...], items: list[str]) -> tuple[Any, ...]:
    """Return items as a tuple of the class of another: the names of its fields are its types'."""
    return type(group)(*items) if hasattr(group, "_fields") else tuple(items)


def compiled(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any], target: int) -> str:
    """Return the PTX for a target such as 90, specialised as a launch does."""
    return str(forms(kernel, args, constants, target)["ptx"])


def forms(
    kernel: Any, args: tuple[Any, ...], constants: dict[str, Any], target: int
) -> dict[str, Any]:
    """Return a compiled kernel by the names of its forms, "llir" and "ptx" among them.

    "shared" is the size of its shared memory in bytes.
    """
    triton = importlib.import_module("triton")
    source_of = importlib.import_module("triton.compiler").ASTSource
    target_of = importlib.import_module("triton.backends.compiler").GPUTarget
    common = importlib.import_module("qtensor.kernels.triton.common")
    warps = constants.pop("num_warps", 4)
    args = tuple(a.arguments if isinstance(a, common.LazyMatrix) else a for a in args)
    values = dict(zip(kernel.arg_names, args, strict=False)) | constants
    # An argument by its place; what is inside a tuple by the place there too.
    leaves: dict[tuple[int, ...], Any] = {}
    for index, name in enumerate(kernel.arg_names):
        value = values[name]
        inside = enumerate(value) if isinstance(value, tuple) else ()
        leaves |= {(index, i): v for i, v in inside} or {(index,): value}
    names = {(i,) for i, name in enumerate(kernel.arg_names) if name in constants}
    fixed = {place for place, v in leaves.items() if place in names or _is_fixed(v)}
    types = {p: "constexpr" if p in fixed else _type(v) for p, v in leaves.items()}
    signature = {
        name: types.get((i,)) or _like(values[name], [t for p, t in types.items() if p[0] == i])
        for i, name in enumerate(kernel.arg_names)
    }
    source = source_of(
        kernel,
        signature=signature,
        constexprs={place: getattr(leaves[place], "value", leaves[place]) for place in fixed},
        attrs={
            place: [["tt.divisibility", 16]]
            for place, value in leaves.items()
            if place not in fixed and _is_aligned(value)
        },
    )
    options = {"enable_fp_fusion": False, "num_warps": warps}
    built = triton.compile(source, target=target_of("cuda", target, 32), options=options)
    assert len(built.asm["cubin"]) > 1000
    assert f".target sm_{target}" in built.asm["ptx"]
    return {**built.asm, "shared": built.metadata.shared}


def _round_trip(
    launch: Any, name: str, options: dict[str, Any], dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """Quantize and dequantize with ``launch`` in place of the real one."""
    for module in MODULES:
        importlib.import_module(f"qtensor.kernels.triton.{module}").launch = launch
    backend = importlib.import_module("qtensor.kernels.triton.backend")
    codec = qtensor.quantizer(name, **options)
    x = torch.zeros(shape, dtype=dtype)
    buffers = codec.alloc_tensors(shape)
    if codec.needs_scale:
        backend.quantize_with_amax_(codec, buffers, x, torch.ones(1), torch.ones(1))
    else:
        backend.quantize_(codec, buffers, x, None, None, torch.zeros(1, dtype=torch.int64))
    backend.dequantize_(codec, buffers, x)


def check(
    name: str, options: dict[str, Any], dtype: torch.dtype, shape: tuple[int, int], target: int
) -> int:
    """Compile all kernels of a round trip and return the number of PTX files."""
    texts: list[str] = []
    _round_trip(
        lambda kernel, programs, *args, **constants: texts.append(
            compiled(kernel, args, constants, target)
        ),
        name,
        options,
        dtype,
        shape,
    )
    for text in texts:
        for pattern, meaning in FORBIDDEN.items():
            found = re.search(rf".*{pattern}.*", text)
            assert found is None, f"{name} {options}: {meaning}: {found and found.group(0)}"
    return len(texts)


def unused(cases: list[tuple[str, dict[str, Any]]]) -> set[str]:
    """Return the kernels that no round trip of ``cases`` launches."""
    used: set[str] = set()

    def record(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
        used.add(kernel.__name__)

    for name, options in cases:
        _round_trip(record, name, options, torch.bfloat16, (256, 512))
    every: set[str] = set()
    for module in (*MODULES, "nvfp4_kernels"):
        names = vars(importlib.import_module(f"qtensor.kernels.triton.{module}"))
        every |= {name for name in names if name.endswith("_kernel")}
    assert len(every) >= 10
    return every - used
