"""Triton kernels for norms, activations and bias gradients: the bytes of the reference, in the interpreter or on a GPU."""

import pytest
import triton_checks
import triton_float_checks as checks
from float_cases import ACTIVATIONS, GATED
from triton_checks import needs_triton

pytestmark = needs_triton


@pytest.fixture(scope="module")
def run():
    """Call a check in the child; what it raises is raised here."""
    with triton_checks.child() as executor:
        yield lambda check, *args: executor.submit(check, *args).result(timeout=300)


@pytest.mark.parametrize("kind", [*ACTIVATIONS, *GATED])
def test_activations(run, kind):
    run(checks.check_activation, kind)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norms(run, kind, seed):
    run(checks.check_norm, kind, seed)
