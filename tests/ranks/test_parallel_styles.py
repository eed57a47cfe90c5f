"""torch's parallel styles on layers of qtensor, against the same oracles as ``parallel_mode``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from compile_helpers import Compiled
from formats import assert_same_bytes
from parallel_cases import RECIPES, SIZE, K, N, Result, draws, mlp_layers, mlp_oracle
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, parallel

import qtensor
import qtensor.distributed


def mesh() -> Any:
    return dist.init_device_mesh("cpu", (SIZE,))


class Two(nn.Module):
    """Two layers with an activation between them."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(K, N, bias=bias), nn.Linear(K, N, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def model(bias: bool) -> Two:
    """Return a model with the whole parameters of the oracle."""
    made = Two(bias)
    for layer, t in zip((made.first, made.second), mlp_layers(False, bias)[1], strict=True):
        layer.load_state_dict({"weight": t.w} | ({} if t.b is None else {"bias": t.b}))
    return made


def parallelize(module: Two, sequence: bool, own: bool) -> Two:
    styles: Any = qtensor.distributed if own else parallel
    end = Shard(0) if sequence else Replicate()
    plan = {
        "first": styles.ColwiseParallel(input_layouts=end),
        "second": styles.RowwiseParallel(output_layouts=end),
    }
    return parallel.parallelize_module(module, mesh(), plan)


def run_two(
    recipe: Any, sequence: bool, bias: bool, own: bool, backend: str, before: bool
) -> Result:
    """Return this rank's results of a training step."""
    rank = dist.get_rank()
    module = model(bias)
    if before:
        qtensor.convert_(module, recipe)
    parallelize(module, sequence, own)
    if not before:
        done = qtensor.convert_(module, recipe)
        assert len(done.swapped) == 2, done
    run = module if backend == "eager" else Compiled(module, backend)
    layers, tensors = mlp_layers(sequence, bias)
    x = layers[0].inputs(tensors[0].x, rank).clone().requires_grad_()
    torch.manual_seed(100 + rank)
    y = run(x)
    y.backward(layers[1].outputs(tensors[1].dy, rank))
    if backend != "eager":
        run.check_graphs(1)
    grads = [p.grad.to_local() for p in module.parameters()]
    # A style returns a tensor that waits for its collective at the first operation.
    return Result(y.detach().clone(), x.grad.clone(), grads)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("own", [False, True], ids=["torch", "own"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("name", RECIPES)
def test_two_layers(
    ranks: Ranks, name: str, sequence: bool, bias: bool, own: bool, backend: str, before: bool
) -> None:
    recipe = RECIPES[name]
    if name == "nvfp4" and backend != "eager":
        recipe = qtensor.recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)
    seeds = [draws(recipe, rank, 2) for rank in range(SIZE)]
    turns = [[s[i] for s in seeds] for i in range(2)]
    want = mlp_oracle(sequence, bias, recipe, turns)
    got = ranks.run(run_two, recipe, sequence, bias, own, backend, before)
    for rank in range(SIZE):
        where = f"rank {rank}"
        assert_same_bytes(got[rank].y, want[rank].y, f"{where}: output")
        assert_same_bytes(got[rank].dx, want[rank].dx, f"{where}: gradient of the input")
        for i, (a, b) in enumerate(zip(got[rank].gradients, want[rank].gradients, strict=True)):
            assert_same_bytes(a, b, f"{where}: gradient {i}")


# ---- convert_ and revert_ after our styles -------------------------------------------------------

NORM_IN_ROWS = ("LayerNormLinear", "row")
KINDS: dict[str, Any] = {
    "Linear": lambda **o: qtensor.Linear(K, N, **o),
    "LayerNormLinear": lambda **o: qtensor.LayerNormLinear(K, N, **o),
    "GroupedLinear": lambda **o: qtensor.GroupedLinear(2, K, N, **o),
}


def run_converted(kind: str, mode: str, sequence: bool) -> None:
    """The recipe set by ``convert_`` gives the bytes of a layer that was built with it."""
    recipe, rank, results = RECIPES["mxfp8"], dist.get_rank(), []
    x, dy = (mlp_layers(False, False)[1][0].x, mlp_layers(False, False)[1][0].dy)
    splits = [[64, 64]] if kind == "GroupedLinear" else []
    if splits:
        x, dy = x.flatten(0, 1), dy.flatten(0, 1)
    rows, kinds = Shard(0) if sequence else Replicate(), qtensor.distributed
    for before in (True, False):
        torch.manual_seed(1)
        model = nn.ModuleDict({"one": KINDS[kind]()})
        if before:
            qtensor.convert_(model, recipe)
        style: Any = (
            kinds.ColwiseParallel(input_layouts=rows)
            if mode == "column"
            else kinds.RowwiseParallel(output_layouts=rows)
        )
        parallel.parallelize_module(model, mesh(), {"one": style})
        if not before:
            done = qtensor.convert_(model, recipe)
            assert [report.name for report in done.swapped] == ["one"], done
        place = rows if mode == "column" else Shard(x.ndim - 1)
        out = Shard(x.ndim - 1) if mode == "column" else rows
        given, grad = [
            (t if p.is_replicate() else t.chunk(SIZE, p.dim)[rank]).clone()
            for t, p in ((x, place), (dy, out))
        ]
        y = model["one"](given.requires_grad_(), *splits)
        y.backward(grad)
        grads = [p.grad.full_tensor() for p in model.parameters()]
        results.append([t.detach().clone() for t in (y, given.grad, *grads)])
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        assert_same_bytes(b, a, f"rank {rank}: result {i}")


@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize(
    ("kind", "mode"),
    [(kind, mode) for kind in KINDS for mode in ("column", "row") if (kind, mode) != NORM_IN_ROWS],
)
def test_a_recipe_after_our_style(ranks: Ranks, kind: str, mode: str, sequence: bool) -> None:
    ranks.run(run_converted, kind, mode, sequence)


def run_stored() -> str:
    model = nn.ModuleDict({"one": qtensor.Linear(K, N)})
    parallel.parallelize_module(model, mesh(), {"one": qtensor.distributed.ColwiseParallel()})
    done = qtensor.convert_(model, RECIPES["mxfp8"], quantized_params=True)
    assert type(model["one"].weight.to_local()) is Tensor
    return done.skipped[0].note


def test_split_weights_are_not_stored_quantized(ranks: Ranks) -> None:
    for note in ranks.run(run_stored):
        assert "convert with quantized_params before fully_shard and parallelize_module" in note


def run_reverted(sequence: bool) -> tuple[Tensor, Tensor]:
    """Return this rank's output of reverted layers, and of plain ones under torch's styles."""
    outputs = []
    for own in (True, False):
        module = model(True)
        if own:
            qtensor.convert_(module, RECIPES["mxfp8"])
        parallelize(module, sequence, own)
        if own:
            assert len(qtensor.revert_(module).swapped) == 2
            assert type(module.first) is nn.Linear
        layers, tensors = mlp_layers(sequence, True)
        with torch.no_grad():
            outputs.append(module(layers[0].inputs(tensors[0].x, dist.get_rank())).clone())
    return outputs[0], outputs[1]


@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "sp"])
def test_a_reverted_layer_keeps_our_style(ranks: Ranks, sequence: bool) -> None:
    for rank, (got, want) in enumerate(ranks.run(run_reverted, sequence)):
        assert_same_bytes(got, want, f"rank {rank}")
