"""Layers that share an input: its codes are gathered once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_cells.base import RECIPES, ROWS, K, mesh, values
from distributed_cells.styles import Projections
from ranks import Ranks
from torch.distributed.tensor import Shard, parallel

import qtensor
import qtensor.distributed
from qtensor.distributed import Traffic

BITS = {
    "Float8CurrentScaling": 8.0,
    "MXFP8BlockScaling": 2 * (8 + 8 / 32),
    "NVFP4BlockScaling": 2 * (4 + 8 / 16),
}
"""Bits a value of both directions of an input; per-tensor FP8 sends shared codes."""


def run_bytes(name: str, once: bool) -> int:
    """Return the bytes of this rank's part of an input that collectives gather in a step."""
    recipe: Any = RECIPES[name]()
    made: Any = Projections(recipe)
    kind: Any = qtensor.distributed
    each = kind.ColwiseParallel() if once else kind.ColwiseParallel(input_layouts=Shard(0))
    plan: dict[str, Any] = dict.fromkeys("qkv", each)
    if once:
        plan[""] = kind.PrepareModuleInput(recipe=recipe, input_layouts=Shard(0))
    parallel.parallelize_module(made, mesh(), plan)
    x = values(ROWS, K).chunk(2)[dist.get_rank()].clone().bfloat16().requires_grad_()
    with Traffic() as traffic:
        outputs = made(x)
        torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    assert x.grad is not None
    return traffic.gathered


@pytest.mark.parametrize("name", BITS)
def test_an_input_is_gathered_once(ranks: Ranks, name: str) -> None:
    """The factors of the tensor, and the description of the codes, take a few bytes more."""
    wanted = BITS[name] / 8 * ROWS // 2 * K
    for found in ranks.run(run_bytes, name, True):
        assert wanted <= found <= wanted + 64


def test_each_layer_gathers_for_itself_without_it(ranks: Ranks) -> None:
    for found in ranks.run(run_bytes, "Float8CurrentScaling", False):
        assert found >= 3 * ROWS // 2 * K


def test_recipes_that_layers_cannot_share_are_refused() -> None:
    style = qtensor.distributed.PrepareModuleInput
    for recipe in (
        qtensor.recipes.DelayedScaling(),
        qtensor.recipes.MXFP8BlockScaling(overrides={"input": None}),
    ):
        with pytest.raises(qtensor.UnsupportedError, match="share a quantizer of their input"):
            style(recipe=recipe, input_layouts=Shard(0))


def errors_of_calls() -> list[str]:
    """Return the errors of calls whose input is not a positional tensor."""
    recipe: Any = RECIPES["Float8CurrentScaling"]()
    made: Any = Projections(recipe)
    kind: Any = qtensor.distributed
    prepare = kind.PrepareModuleInput(recipe=recipe, input_layouts=Shard(0))
    plan = {"": prepare, **dict.fromkeys("qkv", kind.ColwiseParallel())}
    parallel.parallelize_module(made, mesh(), plan)
    x, errors = values(ROWS // 2, K), []
    for call in (lambda: made(x=x), lambda: made(None), lambda: made.q(input=x)):
        with pytest.raises(qtensor.QTensorError) as caught:
            call()
        errors.append(str(caught.value))
    return errors


def test_an_input_by_name_is_refused(ranks: Ranks) -> None:
    """Hooks of torch do not see keyword arguments here, so that the codes could not be gathered."""
    for by_name, none, layer in ranks.run(errors_of_calls):
        assert by_name.startswith("PrepareModuleInput of Projections (rank")
        assert "got no positional argument. Call module(x), not module(name=x)" in by_name
        assert "got a NoneType" in none
        assert layer.startswith("ColwiseParallel of Linear (rank")
