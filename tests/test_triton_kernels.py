"""The Triton kernels write the bytes of the reference: in the interpreter, or on a GPU where there is one."""

import pytest
from formats import FORMATS
from triton_checks import (
    check_dequantize,
    check_quantize,
    check_shapes,
    check_strides,
    child,
    needs_triton,
)

pytestmark = needs_triton
SERVED = FORMATS
SHAPES = [(0, 5), (5, 0), (), (1,), (7,), (2, 3, 33), (129, 1), (1, 130)]


@pytest.fixture(scope="module")
def run():
    """Call a check in the child; what it raises is raised here."""
    with child() as executor:
        yield lambda check, *args: executor.submit(check, *args).result(timeout=300)


def options_of(case):
    for options in case.each_option():
        yield pytest.param(case.name, options, id="-".join([case.name, *map(str, options.items())]))


each_option = pytest.mark.parametrize(
    ("name", "options"), [p for case in SERVED for p in options_of(case)]
)
each_format = pytest.mark.parametrize("name", [case.name for case in SERVED])


@each_option
def test_quantize(run, name, options):
    run(check_quantize, name, (70, 100), options)


@each_format
def test_shapes(run, name):
    run(check_shapes, name, SHAPES, {})


@each_format
def test_strides(run, name):
    run(check_strides, name)


@each_option
def test_dequantize(run, name, options):
    run(check_dequantize, name, (70, 100), options)
