"""A linear layer is one op to Dynamo, and none to the program that runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from training import RECIPES, WIDTH, assert_same, build, region, step, twins

import qtensor
from qtensor import recipes
from qtensor.core import version
from qtensor.functional.linear.one_op import LINEAR

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
WITH = {"delayed": {"delayed_begin_", "record_amax_"}, "nvfp4": {"draw_seeds_"}}
"""Ops of state and seeds that stand beside the one of the layer."""


class Graphs:
    """What Dynamo hands over, and what is compiled of it."""

    def __init__(self) -> None:
        self.traced: list[Any] = []
        self.run: list[Any] = []

    def backend(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.traced += [node.target for node in graph.graph.nodes if node.op == "call_function"]

        def note(program: torch.fx.GraphModule, _: Any) -> Any:
            self.run += [n.target for n in program.graph.nodes if n.op == "call_function"]
            return make_boxed_func(program.forward)

        return aot_autograd(fw_compiler=note)(graph, inputs)

    def names(self) -> set[str]:
        ours = [op for op in self.run if getattr(op, "namespace", "").startswith("qtensor")]
        return {op._schema.name for op in ours}


def one_op_steps(module: str, recipe: str, x: torch.Tensor, **options: Any) -> Graphs:
    """The bytes of eager code, and the graphs of the compiled one."""
    eager, traced = twins(module, **options)
    graphs, chosen = Graphs(), RECIPES[recipe]()
    call = torch.compile(traced, backend=graphs.backend, fullgraph=True)
    expected = step(eager, eager, x, chosen)
    assert_same(step(call, traced, x, chosen), expected)
    return graphs


@pytest.mark.parametrize(
    "recipe", ["high_precision", "current", "blockwise", "mxfp8", "custom", "delayed", "nvfp4"]
)
def test_one_op_in_and_none_out(recipe):
    graphs = one_op_steps("linear", recipe, torch.randn(40, WIDTH))
    assert graphs.traced.count(LINEAR) == 1
    others = {
        op._schema.name.removeprefix("qtensor::")
        for op in graphs.traced
        if getattr(op, "namespace", "") == "qtensor"
    }
    assert others - {"advance_step_"} == WITH.get(recipe, set())
    assert LINEAR not in graphs.run
    if recipe == "current":
        names = {"qtensor::linear_forward", "qtensor::linear_backward"}
        assert graphs.names() == names


def test_both_layers_of_an_mlp():
    graphs = one_op_steps("layernorm_mlp", "current", torch.randn(40, WIDTH))
    assert graphs.traced.count(LINEAR) == 2


@pytest.mark.parametrize("option", ["save_original_input", "delay_wgrad_compute"])
def test_options_are_followed(option):
    assert (
        LINEAR
        not in one_op_steps("linear", "current", torch.randn(40, WIDTH), **{option: True}).traced
    )


def test_microbatches_and_quantized_outputs_are_followed():
    module, graphs = build("linear"), Graphs()
    call = torch.compile(module, backend=graphs.backend, fullgraph=True)
    x = torch.randn(32, WIDTH)
    with region(recipes.MXFP8BlockScaling()):
        call(x, is_first_microbatch=True)
        call(x, quantized_output=True)
    assert graphs.traced
    assert LINEAR not in graphs.traced


def test_what_changes_is_seen():
    """Recipe, gradients wanted, and the weight's kind: each makes another program, with the bytes
    of eager code.
    """
    eager, traced = twins("linear", recipe=recipes.Float8CurrentScaling())
    call = torch.compile(traced, backend="aot_eager", fullgraph=True)
    x = torch.randn(32, WIDTH)

    def same() -> None:
        assert_same(step(call, traced, x, None), step(eager, eager, x, None))

    same()
    for module in (eager, traced):
        module.recipe = recipes.MXFP8BlockScaling()
    same()
    for module in (eager, traced):
        module.recipe.overrides = {"weight": None}
    same()
    for module in (eager, traced):
        module.weight.requires_grad_(False)
    same()
    for module in (eager, traced):
        module.recipe = recipes.MXFP8BlockScaling()
        stored = qtensor.quantize(module.weight.detach(), "mxfp8", columnwise=True)
        module.weight = torch.nn.Parameter(stored, requires_grad=False)
    same()
    with torch.no_grad():
        assert torch.equal(call(x), eager(x))


def test_a_wrong_input_is_refused_as_ever():
    call = torch.compile(build("linear", recipe=recipes.MXFP8BlockScaling()), backend="eager")
    with pytest.raises(qtensor.QTensorError, match="last dim must be in_features, 64"):
        call(torch.randn(8, 32))
    narrow = qtensor.Linear(40, 64, recipe=recipes.MXFP8BlockScaling())
    with pytest.raises(qtensor.QTensorError, match="must be multiples of 32"):
        torch.compile(narrow, backend="eager")(torch.randn(8, 40))


def test_an_exported_program_holds_the_ops_of_the_layer():
    module = build("linear", recipe=recipes.Float8CurrentScaling()).eval()
    for strict in (False, True):
        with torch.no_grad():
            program = torch.export.export(module, (torch.randn(32, WIDTH),), strict=strict)
        assert "qtensor_composite" not in program.graph_module.code
        assert "qtensor.linear_forward" in program.graph_module.code


SCRIPT = """
import torch, qtensor
from qtensor import recipes
from torch._dynamo.utils import counters
def first(role): return {first!r}
torch.manual_seed(0)
layer = qtensor.Linear(64, 64, recipe=recipes.CustomRecipe(factory=first))
x = torch.randn(32, 64, requires_grad=True)
y = torch.compile(layer, fullgraph=True)(x)
assert torch.equal(y, layer(x))
y.sum().backward()
print(counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.nightly(reason="three processes that compile")
@pytest.mark.slow
def test_programs_are_cached_by_what_they_compute(tmp_path):
    """Across processes: equal plans are found again, and functions of one name and number that
    differ are not mixed up.
    """
    hits = []
    for text in ("mxfp8", "mxfp4", "mxfp8"):
        environment = {
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
            "PYTHONPATH": str(Path(qtensor.__file__).parents[1]),
        }
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", SCRIPT.format(first=text)],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        hits.append(int(done.stdout))
    assert hits == [0, 0, 1]


def test_the_fingerprint_of_cached_programs_covers_all_sources(monkeypatch: pytest.MonkeyPatch):
    """A change in any package makes another fingerprint, not only one beside ``version.py``."""
    read: set[Path] = set()
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.add(path) or b"")
    version.fingerprint.__wrapped__()
    assert read == set(Path(qtensor.__file__).parent.rglob("*.py"))
