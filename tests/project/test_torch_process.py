"""Processes that are forks of a server have the variables of the process that asks for them."""

import os

import pytest
import torch_process

pytestmark = pytest.mark.project


def test_a_pool_has_the_variables_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_process.run("")  # the server runs from here on, without the variable
    monkeypatch.setenv("QTENSOR_TEST_VARIABLE", "new")
    with torch_process.pool() as pool:
        assert pool.submit(os.getenv, "QTENSOR_TEST_VARIABLE").result(timeout=60) == "new"


@pytest.mark.parametrize("compiles", [False, True])
def test_what_a_program_starts_with(compiles: bool) -> None:
    code = "import sys; print([n in sys.modules for n in ('torch', 'torch._inductor', 'qtensor')])"
    done = torch_process.run(code, compiles=compiles)
    assert done.stdout.strip() == str([True, compiles, False])
