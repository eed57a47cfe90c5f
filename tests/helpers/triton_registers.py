"""Registers, spills and occupancy of Triton kernels, compiled for a GPU that need not be there."""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

BOTH = {"columnwise": True}
SHAPE = (4096, 4096)
FORMATS: list[tuple[str, dict[str, Any]]] = [
    ("fp8", BOTH),
    ("fp8_delayed", BOTH),
    ("fp8_rowwise", {}),
    ("fp8_rowwise", BOTH),
    ("fp8_blockwise", {}),
    ("fp8_blockwise", BOTH),
    ("fp8_blockwise", {"block_scaling_dim": 2, **BOTH}),
    ("mxfp8", {}),
    ("mxfp8", BOTH),
    ("mxfp8", {"swizzled": True, **BOTH}),
    ("mxfp6", {"packed": True, **BOTH}),
    ("mxfp4", BOTH),
    ("nvfp4", BOTH),
    ("nvfp4", {"with_rht": True, "stochastic_rounding": True, **BOTH}),
    ("nvfp4", {"with_2d_quantization": True, **BOTH}),
]
REGISTERS, SHARED, BLOCKS = 65536, 227 << 10, 32
WARPS = {90: 64, 100: 64, 120: 48}
"""Target -> warps of a multiprocessor."""


class Usage(NamedTuple):
    """What a compiled kernel takes; sizes in bytes."""

    kernel: str
    warps: int
    registers: int
    spilled: int
    shared: int

    def occupancy(self, target: int) -> float:
        """Return the share of a multiprocessor's warps that can run at once."""
        # Registers are given to warps in units of 256.
        of_warp = -(-self.registers * 32 // 256) * 256
        blocks = min(
            WARPS[target] // self.warps,
            REGISTERS // of_warp // self.warps,
            SHARED // max(self.shared + 1024, 1),
            BLOCKS,
        )
        return blocks * self.warps / WARPS[target]


def usage_of(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any], target: int) -> Usage:
    """Compile a launch and return what its machine code takes."""
    compiler = importlib.import_module("triton_compiler")
    warps = constants.get("num_warps", 4)
    forms = compiler.forms(kernel, args, dict(constants), target)
    triton = importlib.import_module("triton")
    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(forms["cubin"])
        file.flush()
        done = subprocess.run(
            [program, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        )
    found = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", done.stdout))
    spilled = int(found["STACK"]) + int(found["LOCAL"])
    return Usage(kernel.__name__, warps, int(found["REG"]), spilled, forms["shared"])


def usages(name: str, options: dict[str, Any], target: int) -> list[Usage]:
    """Return the usage of each kernel of a round trip through a format."""
    compiler = importlib.import_module("triton_compiler")
    found: list[Usage] = []
    compiler._round_trip(
        lambda kernel, _, *args, **constants: found.append(
            usage_of(kernel, args, constants, target)
        ),
        name,
        options,
        torch.bfloat16,
        SHAPE,
    )
    return found


def float_usages(target: int) -> list[Usage]:
    """Return the usage of the kernels of norms and of an activation."""
    compiler = importlib.import_module("triton_float_compiler")
    found: list[Usage] = []

    def record(kernel: Any, _: int, *args: Any, **constants: Any) -> None:
        found.append(usage_of(kernel, args, constants, target))

    compiler._calls(record, torch.bfloat16, ("swiglu",), SHAPE)
    return found


def attention_usages(target: int) -> list[Usage]:
    """Return the usage of the kernels of attention over a cache in MXFP8."""
    compiler = importlib.import_module("triton_attention_checks")
    found: list[Usage] = []

    def record(kernel: Any, _: int, *args: Any, **constants: Any) -> None:
        found.append(usage_of(kernel, args, constants, target))

    compiler._compile_calls(record, "mxfp8", "mxfp8", {})
    return found
