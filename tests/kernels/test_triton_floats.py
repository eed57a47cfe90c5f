"""Triton kernels for norms, activations and bias gradients: the bytes of the reference, in the
interpreter or on a GPU.
"""

import pytest
import torch
import torch_process
import triton_checks
import triton_compiler
import triton_float_checks as checks
import triton_float_compiler as compiler
from float_cases import ACTIVATIONS, GATED
from formats import FORMATS
from triton_checks import needs_triton

pytestmark = needs_triton
WIDE = pytest.mark.nightly(reason="the compiler takes seconds; other cells compile the same code")
BLACKWELL = [pytest.param(90, marks=WIDE), 100]
HOPPER = [90, pytest.param(100, marks=WIDE)]


@pytest.fixture(scope="module")
def run():
    """Call a check in the child; what it raises is raised here."""
    with triton_checks.child() as executor:
        yield lambda check, *args: executor.submit(check, *args).result(timeout=300)


@pytest.mark.parametrize("kind", [*ACTIVATIONS, *GATED])
def test_activations(run, kind):
    run(checks.check_activation, kind, 61)


@pytest.mark.nightly(reason="every value of 16 bits in the interpreter; a sample is above")
@pytest.mark.parametrize("kind", [*ACTIVATIONS, *GATED])
def test_activations_of_every_value(run, kind):
    run(checks.check_activation, kind, 1)


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=WIDE)])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norms(run, kind, seed):
    run(checks.check_norm, kind, seed)


@pytest.mark.parametrize("seed", range(6))
def test_the_end_of_products(run, seed):
    run(checks.check_finish, seed)


FUSED = [
    *((case.name, {}) for case in FORMATS),
    ("fp8_rowwise", {"axis": 0}),
    ("fp8_blockwise", {"block_scaling_dim": 2}),
    ("mxfp8", {"with_2d_quantization": True, "swizzled": True}),
    ("mxfp6", {"packed": True}),
    ("nvfp4", {"with_2d_quantization": True, "stochastic_rounding": True}),
    ("nvfp4", {"row_scaled": True, "use_4over6": True}),
]
WITH_OPTIONS = {name for name, options in FUSED if options}
"""Of these formats the default tier takes the rows with options."""
fused = pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(n, o, id="-".join([n, *map(str, o.items())]), marks=marks)
        for n, o in FUSED
        for marks in [(WIDE,) if n in WITH_OPTIONS and not o else ()]
    ],
)


@fused
def test_fused(run, name, options):
    run(checks.check_fused, name, options)


def test_what_is_not_fused(run):
    run(checks.check_left_to_the_pair)


@pytest.fixture(scope="module")
def compile_run(tmp_path_factory):
    """Call a function in a process whose kernels compile."""
    folder = str(tmp_path_factory.mktemp("triton"))
    with torch_process.pool(triton_compiler.compile_only, folder) as executor:
        yield lambda function, *args: executor.submit(function, *args).result(timeout=600)


@pytest.mark.parametrize("target", BLACKWELL)
@pytest.mark.parametrize(
    ("dtype", "kinds", "shape"),
    [
        pytest.param(
            torch.bfloat16,
            ("gelu", "qgeglu", "sreglu", "swiglu", "glu"),
            (256, 512),
            id="bfloat16",
            marks=WIDE,
        ),
        pytest.param(torch.float16, ("silu", "relu", "glu"), (33, 70), id="float16", marks=WIDE),
        pytest.param(
            torch.float32,
            ("reglu", "geglu", "clamped_swiglu"),
            (7, 1000),
            id="float32",
            marks=WIDE,
        ),
    ],
)
def test_they_compile_to_instructions_that_round_as_written(
    compile_run, dtype, kinds, shape, target
):
    assert compile_run(compiler.check, dtype, kinds, shape, target) >= 2 * len(kinds) + 9


@pytest.mark.parametrize("target", HOPPER)
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=WIDE) for name in ("fp8", "fp8_delayed", "fp8_blockwise")),
        "mxfp8",
        pytest.param("nvfp4", marks=WIDE),
    ],
)
def test_fused_kernels_compile(compile_run, name, target):
    assert compile_run(compiler.check_fused, name, target) >= 2


def test_every_kernel_is_compiled(compile_run):
    assert compile_run(compiler.unused) == set()
