"""Tensor parallelism: parallel styles, and the options of the layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel

import qtensor
import qtensor.distributed
from distributed_cells.base import ROWS, SIZE, Cell, K, mesh, part, same, values, whole
from distributed_cells.training import frozen, layers, same_training, train, train_alone
from qtensor import QuantizedTensor


def compare(cell: Cell, recipe: Any, made: Any, splits_rows: bool = False) -> None:
    """Compare with one process that computes the parts of both ranks and adds them.

    Args:
        made: two layers of qtensor over the ranks, with an activation between them.
        splits_rows: a rank has half of the rows of the input and of the output.
    """
    torch_ = layers()
    half, bias = ROWS // SIZE, torch_[2].bias.detach()
    x, dy = values(256, 128), values(256, ROWS)
    place = Shard(0) if splits_rows else Replicate()
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
    inputs, wanted = [t.clone().requires_grad_() for t in (part(x, place), x)]
    want = own[0](wanted) + own[1](wanted) + bias
    want.backward(dy)
    summing = qtensor.Linear(half, ROWS, recipe=recipe)
    summing(torch.zeros(256, half)).backward(dy)
    y = cell.compile_(made)(inputs)
    y.backward(part(dy, place))
    same(y.detach().clone(), part(want.detach(), place), "output")
    same(inputs.grad, part(wanted.grad, place), "gradient of the input")
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


def styles_of(kinds: Any, splits_rows: bool = False) -> Callable[[Cell], None]:
    """Return the cell of ``ColwiseParallel`` and ``RowwiseParallel`` of torch or of qtensor."""

    def run(cell: Cell) -> None:
        recipe = cell.recipe(random=False)
        made = styled(recipe, mesh(), kinds, splits_rows)
        compare(cell, recipe, made, splits_rows)

    return run


def styled(recipe: Any, over: Any, kinds: Any = qtensor.distributed, splits: bool = False) -> Any:
    """Return the two layers, split over a mesh."""
    made = layers()
    qtensor.convert_(made, recipe)
    rows = Shard(0) if splits else Replicate()
    plan = {
        "0": kinds.ColwiseParallel(input_layouts=rows),
        "2": kinds.RowwiseParallel(output_layouts=rows),
    }
    return parallel.parallelize_module(made, over, plan)


def sharded_styles(shape: tuple[int, int], gathers_codes: bool) -> Callable[[Cell], None]:
    """Return the cell of the styles on the last dim of a mesh, and ``fully_shard`` on the first."""

    def run(cell: Cell) -> None:
        recipe = cell.recipe(random=False)
        over = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        made = styled(recipe, over["tp"])
        if gathers_codes:
            qtensor.distributed.quantized_all_gather(made)
        if shape[0] == 1:
            compare(cell, recipe, fully_shard(made, mesh=over["dp"]))
            return
        ours = nn.Sequential(cell.compile_(made))
        fully_shard(ours, mesh=over["dp"])

        def alone() -> nn.Module:
            one = layers()
            qtensor.convert_(one, recipe)
            return nn.Sequential(cell.compile_(one))

        same_training(train(ours), train_alone(alone))

    return run


def prepared(gives_rows: bool) -> Callable[[Cell], None]:
    """Return the cell of a layer that computes all rows on each rank, of which a rank has a part.

    Args:
        gives_rows: the output is split again.
    """

    def run(cell: Cell) -> None:
        x, dy, recipe = values(256, K), values(256, ROWS), cell.recipe(random=False)
        results = []
        for split in (True, False):
            torch.manual_seed(0)
            layer = qtensor.Linear(K, ROWS, recipe=recipe)
            given_, ends = (Shard(0) if split and of else Replicate() for of in (True, gives_rows))
            inputs = {"input_layouts": given_, "desired_input_layouts": Replicate()}
            outputs = {"output_layouts": Replicate(), "desired_output_layouts": ends}
            if split and gives_rows:
                style: Any = parallel.PrepareModuleInputOutput(
                    **inputs, **outputs, use_local_input=True
                )
                parallel.parallelize_module(layer, mesh(), style)
            elif split:
                style = parallel.PrepareModuleInput(**inputs, use_local_output=True)
                parallel.parallelize_module(layer, mesh(), style)
            given = part(x, given_).clone().requires_grad_()
            y = cell.compile_(layer)(given)
            y.backward(part(dy, ends))
            found = [y.detach().clone(), given.grad]
            if not split:
                found = [
                    part(found[0], Shard(0)) if gives_rows else found[0],
                    part(found[1], Shard(0)),
                ]
            results.append([*found, *(p.grad for p in layer.parameters())])
        for i, (got, want) in enumerate(zip(*results, strict=True)):
            same(got, want, f"result {i}")

    return run


def sequence(cell: Cell) -> None:
    """torch's ``SequenceParallel``: replicated parameters, and a rank's own rows."""
    x, dy, recipe = values(256, K), values(256, ROWS), cell.recipe(random=False)
    torch.manual_seed(0)
    made = qtensor.Linear(K, ROWS, recipe=recipe)
    ones = [copy.deepcopy(made) for _ in range(SIZE)]
    style = parallel.SequenceParallel(sequence_dim=0, use_local_output=True)
    parallel.parallelize_module(made, mesh(), style)
    given = part(x, Shard(0)).clone().requires_grad_()
    y = cell.compile_(made)(given)
    y.backward(part(dy, Shard(0)))
    found = []
    for number, one in enumerate(ones):
        own = x.chunk(SIZE)[number].clone().requires_grad_()
        out = cell.compile_(one)(own)
        out.backward(dy.chunk(SIZE)[number])
        found.append([out.detach(), own.grad, *(p.grad for p in one.parameters())])
    rank = dist.get_rank()
    same(y.detach().clone(), found[rank][0], "output")
    same(given.grad, found[rank][1], "gradient of the input")
    for (name, p), a, b in zip(made.named_parameters(), found[0][2:], found[1][2:], strict=True):
        same(whole(p.grad), a + b, f"gradient of {name}")


def loss(cell: Cell) -> None:
    """torch's ``loss_parallel`` over a classifier whose classes are split.

    The oracle computes the logits of both halves and follows the order of torch's sums: over the
    classes of a rank, then over ranks.
    """
    recipe, half = cell.recipe(random=False), ROWS // SIZE
    x, target = values(256, K), torch.arange(256) * 7 % ROWS
    torch.manual_seed(0)
    made = qtensor.Linear(K, ROWS, recipe=recipe)
    ones = []
    for rank in range(SIZE):
        one = qtensor.Linear(K, half, recipe=recipe)
        rows = slice(rank * half, (rank + 1) * half)
        one.load_state_dict({n: p.detach()[rows] for n, p in made.named_parameters()})
        ones.append(one)
    style = qtensor.distributed.ColwiseParallel(use_local_output=False)
    parallel.parallelize_module(made, mesh(), style)
    given = x.clone().requires_grad_()
    with parallel.loss_parallel():
        found = nn.functional.cross_entropy(cell.compile_(made)(given), target)
        found.backward()
    inputs = [x.clone().requires_grad_() for _ in ones]
    logits = [cell.compile_(one)(own) for one, own in zip(ones, inputs, strict=True)]
    parts = [t.detach() for t in logits]
    top = torch.maximum(*[t.amax(1, keepdim=True) for t in parts])
    shifted = [t - top for t in parts]
    sums = [t.exp().sum(1, keepdim=True) for t in shifted]
    logs = torch.cat([t - (sums[0] + sums[1]).log() for t in shifted], 1)
    same(whole(found), -logs.gather(1, target[:, None])[:, 0].sum() / 256, "loss")
    hits = torch.zeros_like(logs).scatter_(1, target[:, None], -1.0)
    gradient = (hits + logs.exp()) * torch.tensor(1 / 256)
    for own, piece in zip(logits, gradient.chunk(SIZE, 1), strict=True):
        own.backward(piece.contiguous())
    same(given.grad, inputs[0].grad + inputs[1].grad, "gradient of the input")
    for name, p in made.named_parameters():
        want = ones[dist.get_rank()].get_parameter(name).grad
        same(p.grad.to_local(), want, f"gradient of {name}")


def norm_and_layer(cell: Cell) -> None:
    """Compare the output and the gradients of the parts with a layer of the part's weights."""
    recipe, half = cell.recipe(random=False), ROWS // SIZE
    x, dy = values(256, K), values(256, ROWS)
    torch.manual_seed(0)
    made = qtensor.LayerNormLinear(K, ROWS, recipe=recipe)
    one = qtensor.LayerNormLinear(K, half, recipe=recipe)
    one.load_state_dict({
        **made.state_dict(),
        **{n: part(made.get_parameter(n).detach(), Shard(0)) for n in ("weight", "bias")},
    })
    parallel.parallelize_module(made, mesh(), qtensor.distributed.ColwiseParallel())
    results = []
    for layer in (made, one):
        given = x.clone().requires_grad_()
        y = cell.compile_(layer)(given)
        y.backward(part(dy, Shard(1)))
        grads = [getattr(layer, name).grad for name in ("weight", "bias")]
        grads = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
        results.append([y.detach().clone(), *grads])
    for what, got, want in zip(("output", "weight", "bias"), *results, strict=True):
        same(got, want, what)


class Projections(nn.Module):
    """Three layers that read one input."""

    def __init__(self, recipe: Any, rows: int = ROWS) -> None:
        super().__init__()
        for name in "qkv":
            self.add_module(name, qtensor.Linear(K, rows, bias=False, recipe=recipe))

    def forward(self, x: Any) -> tuple[Any, ...]:
        return tuple(layer(x) for layer in self.children())


def shared_input(cell: Cell) -> None:
    """qtensor's ``PrepareModuleInput``: rows are quantized and gathered once for three layers."""
    recipe, half = cell.recipe(random=False), ROWS // SIZE
    x, dys = values(256, K), [values(256, ROWS) * n for n in (1, 2, 3)]
    torch.manual_seed(0)
    made: Any = Projections(recipe)
    ones = []
    for rank in range(SIZE):
        one = Projections(recipe, half)
        rows = slice(rank * half, (rank + 1) * half)
        one.load_state_dict({n: p.detach()[rows] for n, p in made.named_parameters()})
        ones.append(one)
    plan: dict[str, Any] = dict.fromkeys("qkv", qtensor.distributed.ColwiseParallel())
    plan[""] = qtensor.distributed.PrepareModuleInput(recipe=recipe, input_layouts=Shard(0))
    parallel.parallelize_module(made, mesh(), plan)
    given = part(x, Shard(0)).clone().requires_grad_()
    outputs = cell.compile_(made)(given)
    torch.autograd.backward(outputs, [part(dy, Shard(1)) for dy in dys])
    inputs, wanted = [], []
    for number, one in enumerate(ones):
        own = x.clone().requires_grad_()
        wanted.append(cell.compile_(one)(own))
        pieces = [dy.chunk(SIZE, 1)[number].contiguous() for dy in dys]
        torch.autograd.backward(wanted[-1], pieces)
        inputs.append(own.grad)
    for i, (got, want) in enumerate(zip(outputs, wanted[dist.get_rank()], strict=True)):
        same(got.detach().clone(), want.detach(), f"output {i}")
    same(given.grad, part(inputs[0] + inputs[1], Shard(0)), "gradient of the input")
    for name, p in made.named_parameters():
        want = ones[dist.get_rank()].get_parameter(name).grad
        same(p.grad.to_local(), want, f"gradient of {name}")


def two_layers_in_one(cell: Cell) -> None:
    made = qtensor.LayerNormMLP(K, ROWS, recipe=cell.recipe())
    parallel.parallelize_module(made, mesh(), qtensor.distributed.ColwiseParallel())


def grouped(mode: str) -> Callable[[Cell], None]:
    """Return the cell of ``GroupedLinear``: both ranks compute all groups, with their parts."""

    def run(cell: Cell) -> None:
        recipe, column = cell.recipe(random=False), mode == "column"
        given, split = (Replicate(), Shard(1)) if column else (Shard(1), Replicate())
        x, dy = values(256, K), values(256, ROWS)
        torch.manual_seed(0)
        made = qtensor.GroupedLinear(2, K, ROWS, bias=False, recipe=recipe)
        weights = [p.detach().clone() for p in made.parameters()]
        ones = []
        for rank in range(SIZE):
            size = (K, ROWS // SIZE) if column else (K // SIZE, ROWS)
            one = qtensor.GroupedLinear(2, *size, bias=False, recipe=recipe)
            for i, w in enumerate(weights):
                setattr(one, f"weight{i}", nn.Parameter(w.chunk(SIZE, int(not column))[rank]))
            ones.append(one)
        kinds: Any = qtensor.distributed
        style = kinds.ColwiseParallel() if column else kinds.RowwiseParallel()
        parallel.parallelize_module(made, mesh(), style)

        def step(layer: Any, x: Any, dy: Any) -> list[Any]:
            x = x.clone().requires_grad_()
            # The styles are hooks of the layer, which torch.compile traces with what holds it.
            y = cell.run(lambda x, sizes: layer(x, sizes))(x, torch.tensor([128, 128]))
            y.backward(dy)
            grads = [p.grad for p in layer.parameters()]
            grads = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
            return [y.detach().clone(), x.grad, *grads]

        got = step(made, part(x, given), part(dy, split))
        parts = []
        for rank, one in enumerate(ones):
            own = [
                t.chunk(SIZE, 1)[rank].contiguous() if p.is_shard() else t
                for t, p in ((x, given), (dy, split))
            ]
            parts.append(step(one, *own))
        want = parts[dist.get_rank()]
        summed = 1 if column else 0
        want[summed] = parts[0][summed] + parts[1][summed]
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            same(a, b, f"result {i}")

    return run


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
