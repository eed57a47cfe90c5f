"""Layers of qtensor whose tensors are DTensors: rows split over ranks, grouped layers, errors."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compile_helpers import Compiled
from formats import assert_same_bytes
from parallel_cases import RECIPES, SIZE, K, N, part, whole
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    parallel,
)

import qtensor
import qtensor.distributed

NAMES = [name for name in RECIPES if name not in ("high_precision", "delayed")]
Tensors = list[Tensor]


def mesh() -> Any:
    return dist.init_device_mesh("cpu", (SIZE,))


def recipe_of(name: str) -> Any:
    if name == "nvfp4":
        return qtensor.recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)
    return RECIPES[name]


def linear(name: str, **options: Any) -> qtensor.Linear:
    t = whole(True)
    layer = qtensor.Linear(K, N, recipe=recipe_of(name), **options)
    layer.load_state_dict({"weight": t.w, "bias": t.b})
    return layer


# ---- replicated parameters -----------------------------------------------------------------------


def run_replicated(name: str, rows: bool, backend: str) -> Tensors:
    """Return output and gradients of the whole, of a layer whose parameters are replicated."""
    layer = distribute_module(linear(name), mesh())
    t = whole(True)
    placement = Shard(0) if rows else Replicate()
    x = distribute_tensor(t.x, mesh(), [placement]).requires_grad_()
    run = layer if backend == "eager" else Compiled(layer, backend)
    y = run(x)
    assert y.placements == (placement,)
    y.backward(distribute_tensor(t.dy, mesh(), [placement]))
    if backend != "eager":
        run.check_graphs(1)
    return [v.full_tensor() for v in (y.detach(), x.grad, layer.weight.grad, layer.bias.grad)]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("rows", [False, True], ids=["whole", "rows"])
@pytest.mark.parametrize("name", NAMES)
def test_replicated_parameters(ranks: Ranks, name: str, rows: bool, backend: str) -> None:
    """Ranks with different rows compute what one process computes of each part."""
    t = whole(True)
    results = []
    for rank in range(SIZE if rows else 1):
        layer = linear(name)
        x = (part(t.x, rank, 0) if rows else t.x).clone().requires_grad_()
        y = layer(x)
        y.backward(part(t.dy, rank, 0) if rows else t.dy)
        results.append([y.detach(), x.grad, layer.weight.grad, layer.bias.grad])
    want = results[0]
    if rows:
        first, second = results
        want = [torch.cat(pair) for pair in zip(first[:2], second[:2], strict=True)]
        want += [a + b for a, b in zip(first[2:], second[2:], strict=True)]
    for got in ranks.run(run_replicated, name, rows, backend):
        for what, a, b in zip(["y", "dx", "dw", "db"], got, want, strict=True):
            assert_same_bytes(a, b, what)


def run_main_grad() -> list[Tensor]:
    """Return ``main_grad`` of a split weight, and the gradient without it."""
    found = []
    for fused in (True, False):
        layer = linear("mxfp8", fuse_wgrad_accumulation=fused)
        parallel.parallelize_module(layer, mesh(), parallel.ColwiseParallel())
        weight: Any = layer.weight
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        t = whole(True)
        layer(t.x.clone().requires_grad_()).backward(part(t.dy, dist.get_rank(), 2))
        found.append((weight.main_grad if fused else weight.grad).to_local())
    return found


def test_main_grad(ranks: Ranks) -> None:
    for fused, plain in ranks.run(run_main_grad):
        assert fused.any()
        assert_same_bytes(fused, plain, "main_grad")


# ---- grouped layers ------------------------------------------------------------------------------

SPLITS = [33, 0, 64, 31]


def grouped(name: str, bias: bool) -> qtensor.GroupedLinear:
    torch.manual_seed(3)
    return qtensor.GroupedLinear(len(SPLITS), K, N, bias=bias, recipe=recipe_of(name))


def run_grouped(name: str, mode: str, bias: bool, backend: str) -> Tensors:
    layer, t, rank = grouped(name, bias), whole(False), dist.get_rank()
    column = mode == "column"
    style: Any = (
        qtensor.distributed.ColwiseParallel if column else qtensor.distributed.RowwiseParallel
    )
    parallel.parallelize_module(layer, mesh(), style())
    rows = t.x.reshape(-1, K)
    x = (rows if column else part(rows, rank, 1)).clone().requires_grad_()
    # The styles are hooks of the layer, which torch.compile traces with what holds the layer.
    run = layer if backend == "eager" else Compiled(lambda x, sizes: layer(x, sizes), backend)
    y = run(x, torch.tensor(SPLITS))
    dy = t.dy.reshape(-1, N)
    y.backward(part(dy, rank, 1) if column else dy)
    if backend != "eager":
        run.check_graphs(1)
    grads = [p.grad.full_tensor() for p in layer.parameters()]
    return [y.detach().clone(), x.grad.clone(), *grads]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("mode", ["column", "row"])
@pytest.mark.parametrize("name", NAMES)
def test_grouped_layer(ranks: Ranks, name: str, mode: str, bias: bool, backend: str) -> None:
    """Each rank computes what a grouped layer with its part of the weights computes."""
    t, column = whole(False), mode == "column"
    x, dy = t.x.reshape(-1, K), t.dy.reshape(-1, N)
    outputs, inputs, gradients = [], [], []
    for rank in range(SIZE):
        layer = grouped(name, bias)
        for i in range(len(SPLITS)):
            weight = part(getattr(layer, f"weight{i}").detach(), rank, 0 if column else 1)
            setattr(layer, f"weight{i}", nn.Parameter(weight))
            if bias:
                b = getattr(layer, f"bias{i}").detach()
                b = part(b, rank, 0) if column else b if rank == 0 else torch.zeros_like(b)
                setattr(layer, f"bias{i}", nn.Parameter(b))
        own = (x if column else part(x, rank, 1)).clone().requires_grad_()
        y = layer(own, SPLITS)
        y.backward(part(dy, rank, 1) if column else dy)
        outputs.append(y.detach())
        inputs.append(own.grad)
        gradients.append([p.grad for p in layer.parameters()])
    if column:
        inputs = [inputs[0] + inputs[1]] * SIZE
    else:
        outputs = [outputs[0] + outputs[1]] * SIZE
    names = [n for n, _ in grouped(name, bias).named_parameters()]
    for rank, (y, dx, *grads) in enumerate(ranks.run(run_grouped, name, mode, bias, backend)):
        assert_same_bytes(y, outputs[rank], f"rank {rank}: output")
        assert_same_bytes(dx, inputs[rank], f"rank {rank}: gradient of the input")
        for which, got, first, second in zip(names, grads, *gradients, strict=True):
            dim = 0 if column else 1
            split = column or which.startswith("weight")
            want = torch.cat([first, second], dim) if split else first
            assert_same_bytes(got, want, f"rank {rank}: gradient of {which}")


# ---- a norm in front of the layer ----------------------------------------------------------------


def run_norm(name: str, sequence: bool, kind: str, backend: str) -> list[Tensors]:
    """Return the results of ``ColwiseParallel``, and of ``parallel_mode="column"``."""
    t, rank, results = whole(True), dist.get_rank(), []
    for styled in (True, False):
        options: Any = {"parallel_mode": "column", "tp_group": dist.group.WORLD}
        options |= {"sequence_parallel": sequence}
        layer = qtensor.LayerNormLinear(
            K, N, recipe=recipe_of(name), normalization=kind, **({} if styled else options)
        )
        with torch.no_grad():
            layer.weight.copy_(t.w if styled else part(t.w, rank, 0))
            layer.bias.copy_(t.b if styled else part(t.b, rank, 0))
            layer.layer_norm_weight.copy_(torch.linspace(0.5, 2, K))
        if styled:
            place = Shard(0) if sequence else Replicate()
            style = qtensor.distributed.ColwiseParallel(input_layouts=place)
            parallel.parallelize_module(layer, mesh(), style)
        x = (part(t.x, rank, 0) if sequence else t.x).clone().requires_grad_()
        run = layer if backend == "eager" else Compiled(lambda x, layer=layer: layer(x), backend)
        y = run(x)
        y.backward(part(t.dy, rank, 2))
        if backend != "eager":
            run.check_graphs(1)
        if not styled and sequence:
            # Each rank has the gradient of its own rows.
            for parameter in (layer.layer_norm_weight, layer.layer_norm_bias):
                if parameter is not None:
                    dist.all_reduce(parameter.grad)
        found = [y.detach(), x.grad]
        for parameter in layer.parameters():
            grad = parameter.grad
            if isinstance(grad, DTensor):
                grad = grad.redistribute(placements=parameter.placements).to_local()
            found.append(grad)
        results.append([v.clone() for v in found])
    return results


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("name", NAMES)
def test_norm_and_layer(ranks: Ranks, name: str, sequence: bool, kind: str, backend: str) -> None:
    """The style and the option of the module give the same bytes."""
    for rank, (got, want) in enumerate(ranks.run(run_norm, name, sequence, kind, backend)):
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_same_bytes(a, b, f"rank {rank}: result {i}")


# ---- other styles, and the loss ------------------------------------------------------------------


def run_loss(sequence_dim: int, own: bool) -> tuple[Tensors, Tensors]:
    """Return loss and gradients of a classifier with loss parallel, and of one whole process."""
    results = []
    styles: Any = qtensor.distributed if own else parallel
    for split in (True, False):
        model = nn.Sequential(linear("mxfp8"), linear("mxfp8"))
        x = whole(False).x.clone().requires_grad_()
        target = torch.arange(x.shape[0] * x.shape[1]) % N
        if split:
            plan = {
                "0": parallel.SequenceParallel(sequence_dim=sequence_dim),
                "1": styles.ColwiseParallel(
                    input_layouts=Shard(sequence_dim), use_local_output=False
                ),
            }
            parallel.parallelize_module(model, mesh(), plan)
            given: Any = distribute_tensor(x.detach(), mesh(), [Shard(sequence_dim)])
            given.requires_grad_()
            with parallel.loss_parallel():
                loss = nn.functional.cross_entropy(model(given).flatten(0, 1), target)
                loss.backward()
        else:
            given = x
            loss = nn.functional.cross_entropy(model(given).flatten(0, 1), target)
            loss.backward()
        tensors = [loss.detach(), given.grad, *(p.grad for p in model.parameters())]
        results.append([t.full_tensor() if isinstance(t, DTensor) else t for t in tensors])
    return results[0], results[1]


@pytest.mark.parametrize("own", [False, True], ids=["torch", "own"])
@pytest.mark.parametrize("sequence_dim", [0, 1])
def test_loss_parallel(ranks: Ranks, sequence_dim: int, own: bool) -> None:
    """MXFP8 blocks see no other rank's values, so that only the order of sums differs: relative to
    the largest value, a few float32 roundings of sums of 256, or one code where a rounding differs.
    """
    for got, want in ranks.run(run_loss, sequence_dim, own):
        for a, b in zip(got, want, strict=True):
            assert (a - b).abs().max() <= 0.02 * b.abs().max()
        torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=0)


# ---- errors --------------------------------------------------------------------------------------


def refuse_plain_input() -> None:
    layer = distribute_module(linear("mxfp8"), mesh())
    layer(whole(False).x)


def refuse_plain_weight() -> None:
    linear("mxfp8")(distribute_tensor(whole(False).x, mesh(), [Replicate()]))


def refuse_short_parts() -> None:
    layer = qtensor.Linear(K, 48, recipe=recipe_of("mxfp8"))
    parallel.parallelize_module(layer, mesh(), parallel.ColwiseParallel())
    layer(whole(False).x)


def refuse_norm_in_rows() -> None:
    layer = qtensor.LayerNormLinear(K, N)
    parallel.parallelize_module(layer, mesh(), qtensor.distributed.RowwiseParallel())


def refuse_two_splits() -> None:
    layer = qtensor.Linear(K, N, parallel_mode="column", tp_group=dist.group.WORLD)
    parallel.parallelize_module(layer, mesh(), qtensor.distributed.ColwiseParallel())


def refuse_summed_main_grad() -> None:
    layer = distribute_module(linear("mxfp8", fuse_wgrad_accumulation=True), mesh())
    layer.weight.main_grad = torch.zeros(N, K)
    layer(distribute_tensor(whole(False).x, mesh(), [Shard(0)]))


def refuse_delayed_wgrad() -> None:
    layer = linear("mxfp8", delay_wgrad_compute=True)
    parallel.parallelize_module(layer, mesh(), parallel.ColwiseParallel())
    layer(whole(False).x)


def error_of(call: Any) -> str:
    try:
        call()
    except qtensor.QTensorError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            refuse_plain_input,
            r"Linear input \(rank [01] of 2\): .*must be one too; got a plain tensor\.",
        ),
        (refuse_plain_weight, r"Linear parameter \(rank [01] of 2\): .*got a plain tensor\."),
        (
            refuse_short_parts,
            r"rank [01] of 2.* part \(\[Shard\(dim=0\)\]\), must be .*; got 256 and 24",
        ),
        (refuse_norm_in_rows, r"the norm needs whole rows.*Use ColwiseParallel"),
        (refuse_two_splits, r"split over its tp_group already; got parallel_mode='column'"),
        (refuse_delayed_wgrad, r"delay_wgrad_compute does not know how ranks share the gradient"),
        (refuse_summed_main_grad, r"fuse_wgrad_accumulation adds the gradient of this rank's rows"),
    ],
)
def test_refused(ranks: Ranks, call: Any, message: str) -> None:
    """Both ranks raise, so that none waits for the other."""
    for rank, text in enumerate(ranks.run(error_of, call)):
        assert re.search(message, text), f"rank {rank}: {text}"
