"""Triton kernels of attention: the bytes of the reference, in the interpreter or on a GPU."""

import pytest
import torch
import torch_process
import triton_attention_checks as checks
import triton_checks
import triton_compiler
from attention_cases import DTYPES, FORMATS
from triton_checks import needs_triton

pytestmark = needs_triton
WIDE = pytest.mark.nightly(reason="seconds; other cells run the same code")
LAST = len(FORMATS) - 1
PAIRS = [
    *((FORMATS[i], FORMATS[min(i + 1, LAST)], DTYPES[i // 2 % 3]) for i in range(0, LAST + 1, 2)),
    *(
        pytest.param(FORMATS[i], FORMATS[i * 5 % LAST], DTYPES[i // 2 % 3], marks=WIDE)
        for i in range(1, LAST + 1, 2)
    ),
]
"""Each format in the default tier, and each as that of the keys."""


@pytest.fixture(scope="module")
def run():
    """Call a check in the child; what it raises is raised here."""
    with triton_checks.child() as executor:
        yield lambda check, *args, **options: executor.submit(check, *args, **options).result(600)


@pytest.mark.parametrize(("k_format", "v_format", "dtype"), PAIRS)
def test_formats(run, k_format, v_format, dtype):
    run(checks.check_formats, k_format, v_format, dtype)


@pytest.mark.parametrize("name", checks.PROBLEMS)
def test_problems(run, name):
    run(checks.check_named, name)


OPTIONS = {
    "all": {"causal": False, "scale": -0.7},
    "bool": {"mask": torch.arange(23) % 3 > 0, "sinks": torch.tensor([0.5, -torch.inf])},
    "added": {
        "mask": torch.arange(-11.0, 12.0).bfloat16(),
        "first": torch.tensor([2, 9]),
        "scale": 0.0,
    },
    "positions": {
        "positions": torch.tensor([[3, 22, -1], [5, 0, 40]], dtype=torch.int32),
        "window": 4,
        "sinks": torch.linspace(-3, 3, 12).view(2, 2, 3),
        "soft_cap": 2.0,
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(run, name):
    options = dict(OPTIONS[name])
    if "mask" in options:
        options["mask"] = options["mask"].view(1, 1, 1, 23)
    run(checks.check_options, **options)


def test_small_numbers(run):
    run(checks.check_small_numbers)


def test_hidden_rows_are_not_read(run):
    run(checks.check_hidden_rows)


def test_illegal_indices_give_nan(run):
    run(checks.check_illegal_indices)


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("text", ["mxfp6(packed=True)", "fp8_rowwise", "bfloat16"])
def test_append(run, text, page):
    run(checks.check_append, text, page)


def test_append_outside_the_cache(run):
    run(checks.check_append_outside)


@pytest.mark.nightly(reason="random problems in the interpreter take minutes; samples are above")
@pytest.mark.parametrize("part", range(16))
def test_random_problems(run, part):
    run(checks.check_sampled, range(1000 + 20 * part, 1020 + 20 * part), 1000)
    run(checks.check_raw, range(5 * part, 5 * part + 5))


@pytest.fixture(scope="module")
def compile_run(tmp_path_factory):
    """Call a function in a process whose kernels compile."""
    folder = str(tmp_path_factory.mktemp("triton"))
    with torch_process.pool(triton_compiler.compile_only, folder) as executor:
        yield lambda function, *args: executor.submit(function, *args).result(timeout=600)


@pytest.mark.parametrize(
    ("k_format", "v_format", "options", "target"),
    [
        ("fp8_rowwise", "nvfp4", {"groups": 1}, 90),
        pytest.param("mxfp4", "bfloat16", {"groups": 1, "page": 16}, 100, marks=WIDE),
        pytest.param("mxfp8", "mxfp6(packed=True)", {"groups": 8}, 90, marks=WIDE),
        pytest.param("nvfp4", "fp8", {"options": {"window": 9, "soft_cap": 3.0}}, 90, marks=WIDE),
        pytest.param("float32", "float16", {"queries": 4, "page": 16}, 100, marks=WIDE),
        pytest.param("mxfp6(packed=True)", "mxfp4", {"groups": 8}, 100, marks=WIDE),
    ],
)
def test_they_compile_to_instructions_that_round_as_written(
    compile_run, k_format, v_format, options, target
):
    names = compile_run(checks.compile_all, k_format, v_format, options, target)
    assert names == {"weights_kernel", "values_kernel", "merge_kernel", "append_kernel"}
