"""Tensor parallelism: parallel styles, and the options of the layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, parallel

import qtensor
import qtensor.distributed
from distributed_cells.base import ROWS, SIZE, Cell, K, mesh, part, same, values, whole
from distributed_cells.training import frozen, layers
from qtensor import QuantizedTensor


def compare(cell: Cell, recipe: Any, made: Any) -> None:
    """Compare with one process that computes the parts of both ranks and adds them.

    Args:
        made: two layers of qtensor over the ranks, with an activation between them.
    """
    torch_ = layers()
    half, bias = ROWS // SIZE, torch_[2].bias.detach()
    x, dy = values(64, 128), values(64, ROWS)
    own = []
    for rank in range(SIZE):
        rows = slice(rank * half, (rank + 1) * half)
        one = nn.Sequential(
            qtensor.Linear(128, half, recipe=recipe),
            nn.ReLU(),
            qtensor.Linear(half, ROWS, bias=False, recipe=recipe),
        )
        one.load_state_dict(parts_of(torch_, rows))
        own.append(cell.compile_(one))
    inputs, wanted = [x.clone().requires_grad_() for _ in range(2)]
    want = own[0](wanted) + own[1](wanted) + bias
    want.backward(dy)
    summing = qtensor.Linear(half, ROWS, recipe=recipe)
    summing(torch.zeros(64, half)).backward(dy)
    y = cell.compile_(made)(inputs)
    y.backward(dy)
    same(y.detach().clone(), want.detach(), "output")
    same(inputs.grad, wanted.grad, "gradient of the input")
    gradients = {n: p.grad for n, p in own[dist.get_rank()].named_parameters()}
    for name, grad in {**gradients, "2.bias": summing.bias.grad}.items():
        ours = made.get_parameter(name).grad
        same(ours.to_local() if isinstance(ours, DTensor) else ours, grad, f"gradient of {name}")


def parts_of(whole_: Any, rows: slice) -> dict[str, Any]:
    return {
        "0.weight": whole_[0].weight[rows],
        "0.bias": whole_[0].bias[rows],
        "2.weight": whole_[2].weight[:, rows],
    }


def styles_of_torch(cell: Cell) -> None:
    run_styles(cell, parallel)


def styles_of_qtensor(cell: Cell) -> None:
    run_styles(cell, qtensor.distributed)


def run_styles(cell: Cell, styles: Any) -> None:
    made, recipe = layers(), cell.recipe(random=False)
    qtensor.convert_(made, recipe)
    plan = {"0": styles.ColwiseParallel(), "2": styles.RowwiseParallel()}
    parallel.parallelize_module(made, mesh(), plan)
    compare(cell, recipe, made)


def tp_of_modules(cell: Cell) -> None:
    whole_, recipe = layers(), cell.recipe(random=False)
    options = {"recipe": recipe, "tp_group": dist.group.WORLD}
    made = nn.Sequential(
        qtensor.Linear(128, ROWS, parallel_mode="column", **options),
        nn.ReLU(),
        qtensor.Linear(ROWS, ROWS, parallel_mode="row", **options),
    )
    start = dist.get_rank() * ROWS // SIZE
    parts = parts_of(whole_, slice(start, start + ROWS // SIZE))
    made.load_state_dict({**parts, "2.bias": whole_[2].bias})
    compare(cell, recipe, made)


def styles_of_weights(cell: Cell) -> None:
    """nn.Linear with a quantized weight: the parts have the factors of the whole.

    torch adds half of the bias on each of two ranks.
    """
    x, w = values(64, K), cell.weight()
    outputs = []
    for style in (parallel.ColwiseParallel, parallel.RowwiseParallel):
        made = nn.Sequential(frozen(cell))
        extra = {"use_local_output": False} if style is parallel.ColwiseParallel else {}
        parallel.parallelize_module(made, mesh(), {"0": style(**extra)})
        assert isinstance(made[0].weight.to_local(), QuantizedTensor)
        given = x if style is parallel.ColwiseParallel else part(x, Shard(1))
        with torch.no_grad():
            outputs.append(whole(cell.compile_(made)(given)))
    bias = torch.full((ROWS,), 0.5)
    with torch.no_grad():
        same(outputs[0], nn.functional.linear(x, w, bias), "ColwiseParallel")
        pairs = zip(x.chunk(2, 1), w.chunk(2, 1), strict=True)
        a, b = [nn.functional.linear(p, q, bias / 2) for p, q in pairs]
    same(outputs[1], a + b, "RowwiseParallel")
