"""Compile the launches of the norm and activation kernels; runs in a child of triton_compiler."""

from __future__ import annotations

import importlib
import re
from typing import Any

import torch
from triton_compiler import FORBIDDEN, compiled

import qtensor

MODULES = ("activation", "epilogue", "norm")


def _calls(launch: Any, dtype: torch.dtype, kinds: tuple[str, ...], shape: tuple[int, int]) -> None:
    """Every kernel with ``launch`` in the place of the real one."""
    for module in MODULES:
        importlib.import_module(f"qtensor.kernels.triton.{module}").launch = launch
    backend = importlib.import_module("qtensor.kernels.triton.backend")
    rows, cols = shape
    x, weight = torch.zeros(shape, dtype=dtype), torch.zeros(cols)
    stats = torch.zeros(rows), torch.zeros(rows)
    for kind in kinds:
        gated = kind.endswith("glu")
        wide = torch.zeros(rows, 2 * cols if gated else cols, dtype=dtype)
        clamp = (1.702, 7.0, 1.0, 75.0) if kind == "clamped_swiglu" else None
        backend.activation_(x, wide, kind, None, clamp)
        backend.activation_(wide, wide, kind, x, clamp)
    for mean, bias in ((stats[0], weight), (None, None)):
        kind = "rmsnorm" if mean is None else "layernorm"
        backend.norm_((x, *stats), x, weight, bias, (kind, 1e-5, True))
        backend.norm_backward_((x, weight, weight), x, x, weight, (mean, stats[1]), True)
    backend.bias_grad_(weight, x)
    backend.finish_product_(x, torch.zeros(shape), stats[0], torch.ones(1), weight)


def check(dtype: torch.dtype, kinds: tuple[str, ...], shape: tuple[int, int], target: int) -> int:
    """Compile all kernels; returns how many PTX files there were."""
    texts: list[str] = []

    def compile_only(kernel: Any, _: int, *args: Any, **constants: Any) -> None:
        texts.append(compiled(kernel, args, constants, target))

    _calls(compile_only, dtype, kinds, shape)
    _check_rounding(texts, f"{dtype} {kinds}")
    return len(texts)


def check_fused(name: str, target: int) -> int:
    """Compile the kernels that quantize a norm and an activation; return how many PTX files."""
    texts: list[str] = []

    def compile_only(kernel: Any, _: int, *args: Any, **constants: Any) -> None:
        texts.append(compiled(kernel, args, constants, target))

    for module in (*MODULES, "amax", "float8", "mx", "nvfp4"):
        importlib.import_module(f"qtensor.kernels.triton.{module}").launch = compile_only
    backend = importlib.import_module("qtensor.kernels.triton.backend")
    codec = qtensor.quantizer(name)
    x, weight = torch.zeros(256, 512, dtype=torch.bfloat16), torch.zeros(512)
    stats = torch.zeros(256), torch.zeros(256)
    norm = backend.lazy_norm(stats, x, (weight, weight), ("layernorm", 1e-5, True), x.dtype)
    for made in (norm, backend.lazy_activation(torch.zeros(256, 1024).half(), "swiglu")):
        buffers = codec.alloc_tensors(made.shape)
        scale = torch.ones(1) if codec.needs_scale else None
        backend.quantize_(codec, buffers, made, scale, None, None)
    _check_rounding(texts, name)
    return len(texts)


def _check_rounding(texts: list[str], name: str) -> None:
    for text in texts:
        for pattern, meaning in FORBIDDEN.items():
            found = re.search(rf".*{pattern}.*", text)
            assert found is None, f"{name}: {meaning}: {found and found.group(0)}"


def unused() -> set[str]:
    """Kernels that ``check`` does not launch."""
    used: set[str] = set()
    _calls(
        lambda kernel, _, *args, **constants: used.add(kernel.__name__),
        torch.bfloat16,
        ("gelu",),
        (64, 128),
    )
    every = {
        name
        for module in MODULES
        for name in vars(importlib.import_module(f"qtensor.kernels.triton.{module}"))
        if name.endswith("_kernel")
    }
    assert len(every) >= 6
    return every - used
