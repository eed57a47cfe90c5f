"""Enough programs of each Triton kernel run at once on a multiprocessor, and no register spills.

Kernels that only move bytes wait for memory; with few warps, too few loads are under way.
"""

import pytest
import torch_process
import triton_compiler
import triton_registers as registers
from triton_checks import needs_triton

pytestmark = needs_triton
WIDE = pytest.mark.nightly(reason="the compiler takes seconds; other formats are in this tier")
DEFAULT = ("fp8_blockwise", "mxfp8")
"""Formats whose kernels for both directions ran one or three programs at once."""
LEAST = 0.25
ROWS = [
    pytest.param(name, options, id="-".join([name, *map(str, options.items())]),
                 marks=[] if name in DEFAULT and options == registers.BOTH else WIDE)
    for name, options in registers.FORMATS
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Call a function in a process whose kernels compile."""
    folder = str(tmp_path_factory.mktemp("triton"))
    with torch_process.pool(triton_compiler.compile_only, folder) as executor:
        yield lambda function, *args: executor.submit(function, *args).result(timeout=600)


def check(usages):
    assert usages
    for usage in usages:
        assert usage.spilled == 0, usage
        assert usage.occupancy(90) >= LEAST, usage


@pytest.mark.parametrize(("name", "options"), ROWS)
def test_formats(run, name, options):
    check(run(registers.usages, name, options, 90))


@WIDE
def test_norms_and_activations(run):
    check(run(registers.float_usages, 90))


@WIDE
def test_attention(run):
    check(run(registers.attention_usages, 90))


def test_occupancy():
    """Registers are given in units of 256 a warp; a program takes 1 KiB of shared memory more."""
    usage = registers.Usage("k", warps=8, registers=186, spilled=0, shared=0)
    assert usage.occupancy(90) == 8 / 64
    assert usage._replace(registers=128).occupancy(90) == 16 / 64
    assert usage._replace(registers=32).occupancy(90) == 1.0
    assert usage._replace(registers=32, shared=100 << 10).occupancy(90) == 16 / 64
    assert usage._replace(registers=32).occupancy(120) == 1.0
