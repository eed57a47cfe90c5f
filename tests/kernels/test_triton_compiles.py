"""Every Triton kernel compiles for Hopper and Blackwell, on any machine, to instructions that round
as written.
"""

import pytest
import torch
import torch_process
import triton_compiler
from triton_checks import needs_triton

pytestmark = needs_triton
BOTH = {"columnwise": True}
CASES = [
    ("fp8", BOTH),
    ("fp8", {"force_pow_2_scales": True, "dtype": "e5m2"}),
    ("fp8_delayed", BOTH),
    ("fp8_rowwise", {}),
    ("fp8_rowwise", BOTH),
    ("fp8_rowwise", {"axis": 0}),
    ("fp8_blockwise", BOTH),
    ("fp8_blockwise", {"block_scaling_dim": 2, **BOTH}),
    ("mxfp8", {}),
    ("mxfp8", {"swizzled": True, **BOTH}),
    ("mxfp8", {"with_2d_quantization": True, "dtype": "e5m2", **BOTH}),
    ("mxfp6", {"packed": True, **BOTH}),
    ("mxfp4", {"scale_mode": "even", **BOTH}),
    ("mxfp4", {"rowwise": False, **BOTH}),
    ("nvfp4", BOTH),
    ("nvfp4", {"with_rht": True, "columnwise_value": True, **BOTH}),
    ("nvfp4", {"with_2d_quantization": True, "stochastic_rounding": True, **BOTH}),
    ("nvfp4", {"with_2d_quantization": True, "use_4over6": True, "err_mode": "mse"}),
    ("nvfp4", {"row_scaled": True, "use_4over6": True}),
]
WIDE = pytest.mark.nightly(reason="the compiler takes seconds; another cell is like it")
each_target = pytest.mark.parametrize("target", triton_compiler.TARGETS)
IDS = ["-".join([name, *map(str, options.items())]) for name, options in CASES]
DEFAULT = [("mxfp6", {"packed": True, **BOTH}), ("nvfp4", BOTH)]
"""Factors of blocks of 32 and of two levels."""
ROWS = [
    pytest.param(*case, id=id, marks=[] if case in DEFAULT else WIDE)
    for case, id in zip(CASES, IDS, strict=True)
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Call a function in a process whose kernels compile."""
    folder = str(tmp_path_factory.mktemp("triton"))
    with torch_process.pool(triton_compiler.compile_only, folder) as executor:
        yield lambda function, *args: executor.submit(function, *args).result(timeout=300)


@each_target
@pytest.mark.parametrize(("name", "options"), ROWS)
def test_a_round_trip_compiles(run, name, options, target):
    assert run(triton_compiler.check, name, options, torch.bfloat16, (256, 512), target) >= 2


@pytest.mark.parametrize("target", [90, pytest.param(100, marks=WIDE)])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("mxfp8", torch.float32, id="mxfp8-f32"),
        pytest.param("fp8", torch.float16, id="fp8-f16", marks=WIDE),
        pytest.param("nvfp4", torch.float32, id="nvfp4-f32", marks=WIDE),
    ],
)
def test_other_dtypes_and_ragged_sizes_compile(run, name, dtype, target):
    assert run(triton_compiler.check, name, {}, dtype, (33, 70), target) >= 2


@pytest.mark.parametrize(
    "target", [120, *(pytest.param(target, marks=WIDE) for target in (103, 121))]
)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("mxfp8", BOTH, id="mxfp8"),
        pytest.param("fp8_blockwise", BOTH, id="fp8_blockwise", marks=WIDE),
        pytest.param("nvfp4", {"with_rht": True, **BOTH}, id="nvfp4", marks=WIDE),
    ],
)
def test_other_gpus_of_these_families_compile(run, name, options, target):
    assert run(triton_compiler.check, name, options, torch.bfloat16, (256, 512), target) >= 2


def test_every_kernel_is_compiled(run):
    assert run(triton_compiler.unused, CASES) == set()
