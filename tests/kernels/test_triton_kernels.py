"""The Triton kernels write the bytes of the reference: in the interpreter, or on a GPU where there
is one.
"""

import pytest
import triton_checks as checks
from formats import FORMATS
from triton_checks import needs_triton

pytestmark = needs_triton
SHAPES = [(0, 5), (5, 0), (0,), (), (1,), (7,), (2, 3, 33), (129, 1), (1, 130), (130, 65)]
COMBINED = [
    ("fp8_rowwise", {"axis": 0, "force_pow_2_scales": True}),
    ("fp8_blockwise", {"block_scaling_dim": 2, "force_pow_2_scales": False}),
    ("mxfp8", {"with_2d_quantization": True, "swizzled": True}),
    ("mxfp6", {"with_2d_quantization": True, "swizzled": True, "packed": True}),
    ("mxfp4", {"with_2d_quantization": True, "swizzled": True}),
    ("nvfp4", {"with_2d_quantization": True, "swizzled": True, "stochastic_rounding": True}),
    ("nvfp4", {"with_2d_quantization": True, "use_4over6": True, "err_mode": "mse"}),
    ("nvfp4", {"with_rht": True, "swizzled": True, "stochastic_rounding": True}),
    ("nvfp4", {"with_rht": True, "rht_side": "rowwise", "use_4over6": True}),
    ("nvfp4", {"with_rht": True, "with_random_sign_mask": False}),
    ("nvfp4", {"row_scaled": True, "swizzled": True, "use_4over6": True, "e4m3_max": 448.0}),
]


@pytest.fixture(scope="module")
def run():
    """Call a check in the child; what it raises is raised here."""
    with checks.child() as executor:
        yield lambda check, *args: executor.submit(check, *args).result(timeout=300)


def named(cases):
    return [pytest.param(n, o, id="-".join([n, *map(str, o.items())])) for n, o in cases]


def shape_of(name):
    """More than a block along each axis, and ragged."""
    return (130, 140) if name == "fp8_blockwise" else (40, 70)


each_option = pytest.mark.parametrize(
    ("name", "options"), named((c.name, o) for c in FORMATS for o in c.each_option())
)
each_combination = pytest.mark.parametrize(("name", "options"), named(COMBINED))
each_format = pytest.mark.parametrize("name", [case.name for case in FORMATS])


@each_option
def test_quantize(run, name, options):
    run(checks.check_quantize, name, shape_of(name), options)


ENCODING = {"amax_epsilon", "force_pow_2_scales", "scale_mode", "stochastic_rounding", "err_mode"}
"""Options that no decoder sees."""
WIDE = pytest.mark.nightly(reason="the bytes are decoded as those without the option")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(*row.values, id=row.id, marks=WIDE if ENCODING & set(row.values[1]) else ())
        for row in named((c.name, o) for c in FORMATS for o in c.each_option())
    ],
)
def test_dequantize(run, name, options):
    run(checks.check_dequantize, name, shape_of(name), options)


@each_combination
def test_combined_options(run, name, options):
    """Ragged lines, and lines of whole groups."""
    run(checks.check_shapes, name, [shape_of(name), (32, 48)], options)


@each_format
def test_table(run, name):
    run(checks.check_table, name)


@each_format
def test_shapes(run, name):
    run(checks.check_shapes, name, SHAPES, {})


@each_format
def test_strides(run, name):
    run(checks.check_strides, name)


@pytest.mark.parametrize(
    ("name", "options"),
    named([
        ("fp8_rowwise", {"force_pow_2_scales": True}),
        ("fp8_blockwise", {}),
        *(("mxfp8", {"scale_mode": mode}) for mode in ("rceil", "floor", "ceil", "even")),
        ("mxfp4", {"scale_mode": "even"}),
        ("nvfp4", {}),
        ("nvfp4", {"e4m3_max": 256.0}),
        ("nvfp4", {"use_4over6": True, "e4m3_max": 448.0}),
    ]),
)
def test_factors_at_edges(run, name, options):
    run(checks.check_factor_edges, name, options)


@pytest.mark.parametrize(
    ("name", "options"),
    named([
        ("fp8", {}),
        ("fp8_delayed", {}),
        ("fp8_rowwise", {}),
        ("fp8_rowwise", {"axis": 0}),
        ("nvfp4", {}),
        ("nvfp4", {"with_2d_quantization": True}),
        ("nvfp4", {"with_rht": True}),
        ("nvfp4", {"row_scaled": True}),
        ("nvfp4", {"stochastic_rounding": True}),
        ("nvfp4", {"use_4over6": True}),
    ]),
)
def test_given_factors(run, name, options):
    run(checks.check_given_factors, name, options)


def test_what_is_not_served_has_a_reason(run):
    run(checks.check_reasons)


def test_amax_of_many_tiles(run):
    run(checks.check_amax_of_many_tiles)


def test_a_seed_of_the_cpu_is_not_captured(run):
    run(checks.check_captured_seeds)


def test_the_checks_see_a_wrong_byte(run):
    with pytest.raises(AssertionError, match="bytes differ"):
        run(checks.check_sabotaged)
