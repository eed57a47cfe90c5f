"""Tensor parallelism within FSDP2: meshes of data parallel and tensor parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from formats import assert_same_bytes
from parallel_cases import RECIPES, K, N
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, parallel

import qtensor
import qtensor.distributed

BATCH, STEPS = 64, 2
Results = list[Tensor]


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    made = Ranks(tmp_path_factory.mktemp("four"), size=4)
    yield made
    made.stop()


def recipe_of(name: str) -> Any:
    if name == "nvfp4":
        return qtensor.recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)
    return RECIPES[name]


def make_model() -> nn.Sequential:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, K))


def batch(step: int, rank: int) -> Tensor:
    g = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(BATCH, K, generator=g)


def train(model: nn.Module, inputs: Any, scale: float) -> Results:
    """Return the output of each step; the loss is the mean square, times ``scale``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs = []
    for step in range(STEPS):
        optimizer.zero_grad()
        y = model(inputs(step))
        (y.square().mean() * scale).backward()
        outputs.append(y.detach().clone())
        optimizer.step()
    return outputs


def run_mesh(name: str, shape: tuple[int, int], sequence: bool, own: bool, backend: str) -> Any:
    """Return (data parallel rank, outputs, whole parameters) of this rank."""
    recipe = recipe_of(name)
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model = make_model()
    qtensor.convert_(model, recipe)
    styles: Any = qtensor.distributed if own else parallel
    place = Shard(0) if sequence else Replicate()
    plan = {
        "0": styles.ColwiseParallel(input_layouts=place),
        "2": styles.RowwiseParallel(output_layouts=place),
    }
    parallel.parallelize_module(model, mesh["tp"], plan)
    if backend != "eager":
        # The process has compiled the layers of other tests, and Dynamo counts them.
        torch._dynamo.reset()
        for layer in (model[0], model[2]):
            layer.compile(backend=backend, fullgraph=True)
    fully_shard(model, mesh=mesh["dp"])
    dp, tp = (mesh[dim].get_local_rank() for dim in ("dp", "tp"))

    def inputs(step: int) -> Tensor:
        x = batch(step, dp)
        return x.chunk(shape[1])[tp] if sequence else x

    # A rank with a part of the rows has a part of the mean.
    factor = 1 / shape[1] if sequence else 1.0
    outputs = train(model, inputs, factor)
    return dp, tp, outputs, [p.full_tensor().detach().clone() for p in model.parameters()]


def by_hand(name: str, shape: tuple[int, int]) -> tuple[list[Results], Results]:
    """Return the outputs of each data parallel rank and the parameters, computed in one process.

    The first layer's output features and the second layer's input features are split, and each part
    is a layer of its own, as on its rank.
    """
    recipe, (dps, tps) = recipe_of(name), shape
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs: list[Results] = [[] for _ in range(dps)]
    for step in range(STEPS):
        grads: list[Results] = []
        for dp in range(dps):
            x, w1, b1, w2, b2 = batch(step, dp), *[p.detach() for p in model.parameters()]
            parts = []
            for tp in range(tps):
                pair = [qtensor.Linear(K, N // tps, recipe=recipe)]
                pair.append(qtensor.Linear(N // tps, K, bias=False, recipe=recipe))
                pair[0].load_state_dict({"weight": w1.chunk(tps)[tp], "bias": b1.chunk(tps)[tp]})
                pair[1].load_state_dict({"weight": w2.chunk(tps, 1)[tp]})
                parts.append((*pair, pair[1](torch.relu(pair[0](x)))))
            y = sum(part[2].detach() for part in parts) + b2
            y.requires_grad_()
            y.square().mean().backward()
            dy = y.grad
            for part in parts:
                part[2].backward(dy)
            own = [
                torch.cat([part[0].weight.grad for part in parts]),
                torch.cat([part[0].bias.grad for part in parts]),
                torch.cat([part[1].weight.grad for part in parts], 1),
                torch.ops.qtensor.bias_grad(dy),
            ]
            grads.append(own)
            outputs[dp].append(y.detach())
        for parameter, *of in zip(model.parameters(), *grads, strict=True):
            parameter.grad = sum(of) / dps
        optimizer.step()
    return outputs, [p.detach() for p in model.parameters()]


def check(ranks: Ranks, name: str, shape: tuple[int, int], *options: Any) -> None:
    outputs, parameters = by_hand(name, shape)
    sequence = options[0]
    for dp, tp, got, whole in ranks.run(run_mesh, name, shape, *options):
        for step, (a, b) in enumerate(zip(got, outputs[dp], strict=True)):
            want = b.chunk(shape[1])[tp] if sequence else b
            assert_same_bytes(a, want, f"rank ({dp}, {tp}): output of step {step}")
        for i, (a, b) in enumerate(zip(whole, parameters, strict=True)):
            assert_same_bytes(a, b, f"rank ({dp}, {tp}): parameter {i}")


layouts = pytest.mark.parametrize("sequence", [False, True], ids=["tp", "sp"])
styles = pytest.mark.parametrize("own", [False, True], ids=["torch", "own"])
backends = pytest.mark.parametrize("backend", ["eager", "aot_eager"])
two_rank_backends = pytest.mark.parametrize(
    "backend",
    [
        "eager",
        pytest.param(
            "aot_eager", marks=pytest.mark.nightly(reason="test_distributed_matrix compiles these")
        ),
    ],
)


@pytest.mark.parametrize("name", ["current", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("shape", [(1, 2), (2, 1)], ids=["1x2", "2x1"])
@layouts
@styles
@two_rank_backends
def test_two_ranks(
    ranks: Ranks, name: str, shape: tuple[int, int], sequence: bool, own: bool, backend: str
) -> None:
    """Two ranks add two numbers, in either order."""
    check(ranks, name, shape, sequence, own, backend)


@pytest.mark.nightly(reason="four processes; the meshes of two ranks are in the default tier")
@pytest.mark.parametrize("name", ["current", "mxfp8", "nvfp4"])
@layouts
@styles
@backends
def test_four_ranks(four_ranks: Ranks, name: str, sequence: bool, own: bool, backend: str) -> None:
    check(four_ranks, name, (2, 2), sequence, own, backend)


# ---- weights that travel or are stored quantized -------------------------------------------------


def split_model(
    name: str, mesh: Any, sequence: bool, own: bool, first: Any = None, **options: Any
) -> nn.Sequential:
    """Return two layers that styles have split over the dim "tp" of a mesh, after ``first``."""
    model = make_model()
    qtensor.convert_(model, recipe_of(name), **options)
    if first is not None:
        first(model)
    styles: Any = qtensor.distributed if own else parallel
    place = Shard(0) if sequence else Replicate()
    plan = {
        "0": styles.ColwiseParallel(input_layouts=place),
        "2": styles.RowwiseParallel(output_layouts=place),
    }
    return parallel.parallelize_module(model, mesh["tp"], plan)


def own_rows(mesh: Any, sequence: bool) -> Any:
    """Return the function from a step to this rank's input."""
    dp, tp = (mesh[dim].get_local_rank() for dim in ("dp", "tp"))

    def inputs(step: int) -> Tensor:
        x = batch(step, dp)
        return x.chunk(mesh["tp"].size())[tp] if sequence else x

    return inputs


def run_gather(
    name: str, shape: tuple[int, int], sequence: bool, own: bool, backend: str, before: bool
) -> None:
    """A gather of codes gives the bytes of a gather of values, and moves fewer."""
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    inputs, results, gathered = own_rows(mesh, sequence), [], []
    for quantized in (False, True):
        gather = qtensor.distributed.quantized_all_gather
        first = gather if quantized and before else None
        model = split_model(name, mesh, sequence, own, first)
        if quantized and not before:
            assert gather(model) == ["0.weight", "2.weight"]
        if backend != "eager":
            torch._dynamo.reset()
            for layer in (model[0], model[2]):
                layer.compile(backend=backend, fullgraph=True)
        fully_shard(model, mesh=mesh["dp"])
        found = train(model, inputs, 1.0)
        if quantized:
            maxima = qtensor.distributed.reduce_amaxes(model)
            assert maxima == (0 if name == "mxfp8" else 2)
        # With the maxima known, and into the memory of the gathered weight.
        found += train(model, inputs, 1.0)
        if backend == "eager":  # Dynamo compiles no frame below a mode that sees every op
            model.reshard()
            with torch.no_grad(), qtensor.distributed.Traffic() as traffic:
                model(inputs(0))
            gathered.append(traffic.sent["_allgather_base_"])
        state = model.state_dict()
        found += [p.full_tensor().detach().clone() for p in state.values()]
        results.append(found)
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        assert_same_bytes(b, a, f"result {i}")
    if backend == "eager" and shape[0] > 1:
        assert gathered[1] < gathered[0]


def run_stored(name: str, shape: tuple[int, int], sequence: bool, own: bool) -> None:
    """Weights stored quantized: the outputs of the same styles without ``fully_shard``."""
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    inputs, results = own_rows(mesh, sequence), []
    for sharded in (False, True):
        model = split_model(name, mesh, sequence, own, quantized_params=True)
        if sharded:
            fully_shard(model, mesh=mesh["dp"])
            kinds = [type(p.to_local()) for p in (model[0].weight, model[2].weight)]
            assert all(issubclass(kind, qtensor.QuantizedTensor) for kind in kinds)
        results.append([])
        for step in range(2):
            x = inputs(step).clone().requires_grad_()
            y = model(x)
            y.square().mean().backward()
            results[-1] += [y.detach().clone(), x.grad.clone()]
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        assert_same_bytes(b, a, f"result {i}")


orders = pytest.mark.parametrize("before", [False, True], ids=["after", "before"])


@pytest.mark.parametrize("name", ["current", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("shape", [(1, 2), (2, 1)], ids=["1x2", "2x1"])
@layouts
@styles
@two_rank_backends
@orders
def test_quantized_gather_of_two_ranks(
    ranks: Ranks,
    name: str,
    shape: tuple[int, int],
    sequence: bool,
    own: bool,
    backend: str,
    before: bool,
) -> None:
    ranks.run(run_gather, name, shape, sequence, own, backend, before)


@pytest.mark.nightly(reason="four processes; the meshes of two ranks are in the default tier")
@pytest.mark.parametrize("name", ["current", "mxfp8", "nvfp4"])
@layouts
@styles
@backends
@orders
def test_quantized_gather_of_four_ranks(
    four_ranks: Ranks, name: str, sequence: bool, own: bool, backend: str, before: bool
) -> None:
    four_ranks.run(run_gather, name, (2, 2), sequence, own, backend, before)


@pytest.mark.parametrize("name", ["current", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("shape", [(1, 2), (2, 1)], ids=["1x2", "2x1"])
@layouts
@styles
def test_stored_weights_of_two_ranks(
    ranks: Ranks, name: str, shape: tuple[int, int], sequence: bool, own: bool
) -> None:
    ranks.run(run_stored, name, shape, sequence, own)


@pytest.mark.nightly(reason="four processes; the meshes of two ranks are in the default tier")
@pytest.mark.parametrize("name", ["current", "mxfp8", "nvfp4"])
@layouts
@styles
def test_stored_weights_of_four_ranks(
    four_ranks: Ranks, name: str, sequence: bool, own: bool
) -> None:
    four_ranks.run(run_stored, name, (2, 2), sequence, own)


def run_refused() -> str:
    """Return the error of a call after ``fully_shard``."""
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = split_model("mxfp8", mesh, False, True)
    fully_shard(model, mesh=mesh["dp"])
    try:
        qtensor.distributed.quantized_all_gather(model)
    except qtensor.QTensorError as error:
        return str(error)
    return "no error"


def test_a_gather_is_chosen_before_fully_shard(ranks: Ranks) -> None:
    for rank, text in enumerate(ranks.run(run_refused)):
        assert "got a DTensor" in text, f"rank {rank}: {text}"
        assert "Call quantized_all_gather once, before fully_shard" in text
