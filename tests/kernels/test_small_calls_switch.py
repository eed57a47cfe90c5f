"""QTENSOR_SMALL_CALLS=0 turns the C++ answers off: small calls give the same bytes."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_process
from places import PYTHONPATH

import qtensor
from qtensor.library import native_ops
from qtensor.kernels.products import choice
from qtensor.library.define import OBSERVERS

ROOT = Path(__file__).parents[2]
PROGRAM = """
import hashlib, sys
import torch
import qtensor
from formats import FORMATS
from qtensor import recipes
from qtensor.library import native_ops
from qtensor.library.define import OBSERVERS

def note(name, tensors):
    digest = hashlib.sha256()
    for t in tensors:
        digest.update(repr((t.dtype, tuple(t.shape), t.stride())).encode())
        digest.update(t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    print(name, digest.hexdigest())

torch.manual_seed(0)
x, y = torch.randn(33, 64), torch.randn(16, 64)
for case in FORMATS:
    q = case.quantizer(columnwise=True)
    scale = {"scale": torch.tensor([0.5])} if q.needs_scale else {}
    for round in range(4):
        for dtype in (torch.float32, torch.bfloat16):
            source = x.to(dtype)
            made = torch.ops.qtensor.quantize(source, q.canonical, **scale)
            buffers = made[: len(q.slots)]
            value = torch.ops.qtensor.dequantize(buffers, q.canonical, x.shape, dtype)
            operands = ([y], "", y.shape, buffers, q.canonical, x.shape)
            product = torch.ops.qtensor.gemm(*operands, "TN", dtype, torch.ones(33))
            linear = torch.ops.qtensor.weight_gemm(y.to(dtype), buffers, q.canonical, 33)
            note(f"{q.canonical} {dtype} {round}", [*made, value, product, linear])
for recipe in (
    None,
    recipes.Float8CurrentScaling(),
    recipes.DelayedScaling(),
    recipes.Float8BlockScaling(),
    recipes.MXFP8BlockScaling(),
    recipes.NVFP4BlockScaling(),
):
    torch.manual_seed(1)
    layer = qtensor.Linear(64, 32, recipe=recipe)
    calls = {"eager": layer}
    # One recipe with state and one without: compiling takes most of the time.
    if isinstance(recipe, (recipes.DelayedScaling, recipes.MXFP8BlockScaling)):
        calls["compiled"] = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for name, call in calls.items():
        for round in range(4):
            layer.zero_grad()
            source = y.clone().requires_grad_()
            out = call(source)
            (out * out).sum().backward()
            gradients = [source.grad, layer.weight.grad, layer.bias.grad]
            note(f"{type(recipe).__name__} {name} {round}", [out, *gradients])
print("programs", len(answers._OWNED), "observers", len(OBSERVERS), file=sys.stderr)
"""


def run(switch: str) -> tuple[str, str]:
    """Return what the sample of small calls prints: digests, and how many programs were planned."""
    environment = os.environ | {
        "QTENSOR_SMALL_CALLS": switch,
        "PYTHONPATH": PYTHONPATH,
        "OMP_WAIT_POLICY": "passive",
    }
    done = torch_process.run(PROGRAM, environment=environment, compiles=True)
    return done.stdout, done.stderr.strip().splitlines()[-1]


def test_the_same_bytes_without_small_calls() -> None:
    (on, planned), (off, left_out) = run("1"), run("0")
    assert on == off
    assert len(on.splitlines()) > 90
    assert left_out == "programs 0 observers 0"
    if native_ops.library() is None:
        pytest.skip(reason="no compiler, or a torch without its headers")
    _, programs, _, observers = planned.split()
    assert int(programs) > 50
    assert int(observers) == 11


def explain(m: int) -> choice.Explanation:
    x = torch.randn(m, 64)
    return qtensor.explain(x, qtensor.quantize(torch.randn(16, 64), "mxfp8"))


def test_explain_names_the_small_calls() -> None:
    if native_ops.library() is None:
        pytest.skip(reason="no compiler, or a torch without its headers")
    small, large = explain(80), explain(1 << 13)
    assert small.backend == "small_calls"
    assert dict(small.reasons)["small_calls"] == "chosen, from the third equal call on"
    assert large.backend != "small_calls"
    assert "a matrix has more than 65536 elements" in dict(large.reasons)["small_calls"]
    few = explain(8)
    assert few.backend == "few_rows"
    assert dict(few.reasons)["small_calls"] == "its programs run the kernel of few_rows"


def test_explain_tells_that_small_calls_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QTENSOR_SMALL_CALLS", "0")
    off = explain(8)
    assert off.backend in choice.BACKENDS
    assert dict(off.reasons)["small_calls"] == "switched off by QTENSOR_SMALL_CALLS=0"


@pytest.mark.parametrize(
    "options", [{"backend": "reference"}, {"fast_accumulation": True}], ids=str
)
def test_a_caller_who_chooses_is_obeyed(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, observe = [], OBSERVERS["gemm"]
    monkeypatch.setitem(OBSERVERS, "gemm", lambda *call: (seen.append(call), observe(*call))[1])
    x = torch.randn(11, 64)
    weight = qtensor.quantize(torch.randn(16, 64), "mxfp8")
    for _ in range(5):
        qtensor.gemm(x, weight, "TN", **options)
    assert len(seen) == 5


def times_in_python(rows: int, calls: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many of some equal calls of `quantize` on (rows, 1024) reach the Python kernel."""
    seen = []
    observe = OBSERVERS["quantize"]

    def count(outputs: Any, args: Any) -> None:
        seen.append(args)
        observe(outputs, args)

    monkeypatch.setitem(OBSERVERS, "quantize", count)
    x = torch.randn(rows, 1024)
    for _ in range(calls):
        torch.ops.qtensor.quantize(x, "mxfp6(packed=True)")
    return len(seen)


def test_kernels_explain_tells_which_calls_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    if native_ops.library() is None:
        pytest.skip(reason="no compiler, or a torch without its headers")
    mxfp6 = qtensor.quantizer("mxfp6", packed=True)
    text = qtensor.kernels.explain(mxfp6, torch.float32)
    assert text.startswith("mxfp6 from torch.float32 on cpu: native\n  small_calls: ")
    told = re.search(r"on up to (\d+) elements .* from the third equal call on$", text)
    assert told is not None, text
    rows = int(told[1]) // 1024
    assert times_in_python(rows, 5, monkeypatch) == 2
    assert times_in_python(rows + 1, 5, monkeypatch) == 5


def test_kernels_explain_tells_why_no_call_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    mxfp6 = qtensor.quantizer("mxfp6", packed=True)
    assert "small_calls" not in qtensor.kernels.explain(mxfp6, torch.float32, "meta")
    assert "small_calls" not in qtensor.kernels.explain(mxfp6, torch.float64)
    with monkeypatch.context() as patch:
        patch.setattr(answers, "library", lambda: None)
        text = qtensor.kernels.explain(mxfp6)
        assert text.endswith("\n  small_calls: not built; run: qtensor kernels build")
    monkeypatch.setenv("QTENSOR_SMALL_CALLS", "0")
    text = qtensor.kernels.explain(mxfp6)
    assert text.endswith("\n  small_calls: switched off by QTENSOR_SMALL_CALLS=0")
