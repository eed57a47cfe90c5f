"""Raw ops survive random arguments without crashes, stray writes or stale memory."""

from __future__ import annotations

import os

import pytest
import torch
from places import HELPERS, PYTHONPATH
from raw_op_cases import MAKERS, RANDOM, Maker
from raw_op_fuzz import check_call
from torch_process import TorchProcess

from qtensor.library.define import FILLS
from qtensor.library.native_ops import left_to_python

FUZZ = HELPERS / "raw_op_fuzz.py"
PARTS = 8
PER_OP = 18
"""Calls of each op in each part: all parts together make more than 5000."""


def run(seed: int, count: int) -> str:
    """Return what the fuzz prints; fail if its process ends early, with the last call."""
    environment = os.environ | {
        "PYTHONPATH": PYTHONPATH,
        "OMP_WAIT_POLICY": "passive",
    }
    program = TorchProcess(
        FUZZ.read_text(), str(seed), str(count), name=str(FUZZ), environment=environment
    )
    done = program.finish(timeout=550)
    last = done.stdout.splitlines()[-1:]
    assert done.returncode == 0, f"exit {done.returncode}, last: {last}\n{done.stderr[-3000:]}"
    return done.stdout


def check(printed: str) -> None:
    """Assert that no call was a fault, and that every op answered and refused calls."""
    lines = printed.splitlines()
    faults = [line for line in lines if line.startswith("BAD")]
    assert not faults, "\n".join(faults)
    done = [line.split() for line in lines if line.startswith("DONE")]
    assert {name for _, name, *_ in done} == set(MAKERS)


def test_every_op_is_fuzzed() -> None:
    names = [schema.name.split("::") for schema in torch._C._jit_get_all_schemas()]
    assert {name for namespace, name in names if namespace == "qtensor"} == set(MAKERS)


@pytest.mark.parametrize("name", sorted(set(MAKERS) - RANDOM))
def test_the_calls_are_valid_before_they_are_spoiled(name: str) -> None:
    accepted = 0
    for seed in range(6):
        arguments = MAKERS[name](Maker(seed))
        try:
            getattr(torch.ops.qtensor, name)(**arguments)
        except NotImplementedError:
            continue  # A backend that is asked for by name.
        accepted += 1
    assert accepted


def test_five_random_calls_of_each_op() -> None:
    check(run(seed=0, count=5))


@pytest.mark.nightly(reason="thousands of calls; five of each op are in the default tier")
@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, PARTS + 1))
def test_thousands_of_random_calls(part: int) -> None:
    assert PARTS * PER_OP * len(MAKERS) >= 5000
    check(run(seed=part, count=PER_OP))


def test_the_fuzz_sees_a_write_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    def beyond(_: object, args: object) -> None:
        step = args.step  # type: ignore[attr-defined]
        step.as_strided((step.numel() + 1,), (1,)).zero_()

    monkeypatch.setitem(FILLS, "advance_step_", beyond)
    with left_to_python():  # C++ does not ask the fill
        outcomes = [check_call("advance_step_", seed) for seed in range(8)]
    assert any("writes outside step" in outcome for outcome in outcomes)
