"""Parallel styles on layers whose weights are stored quantized."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from compile_helpers import Compiled
from formats import assert_same_bytes
from parallel_cases import RECIPES, SIZE, K, N, part, whole
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor, parallel

import qtensor
import qtensor.distributed

BOTH = {"rowwise": True, "columnwise": True}
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8": ("fp8", {}),
    "fp8_delayed": ("fp8_delayed", {}),
    "fp8_rowwise": ("fp8_rowwise", {}),
    "fp8_blockwise": ("fp8_blockwise", {}),
    "fp8_blockwise-2d": ("fp8_blockwise", {"block_scaling_dim": 2, **BOTH}),
    "mxfp8": ("mxfp8", {}),
    "mxfp8-both": ("mxfp8", BOTH),
    "mxfp8-swizzled": ("mxfp8", {"swizzled": True}),
    "mxfp6": ("mxfp6", {}),
    "mxfp6-packed": ("mxfp6", {"packed": True}),
    "mxfp4": ("mxfp4", {}),
    "nvfp4": ("nvfp4", {}),
    "nvfp4-both": ("nvfp4", BOTH),
}
styles = pytest.mark.parametrize("own", [False, True], ids=["torch", "own"])
modes = pytest.mark.parametrize("mode", ["column", "row"])


def mesh() -> Any:
    return dist.init_device_mesh("cpu", (SIZE,))


def apply_style(layer: nn.Module, mode: str, own: bool) -> None:
    kinds: Any = qtensor.distributed if own else parallel
    style = kinds.ColwiseParallel() if mode == "column" else kinds.RowwiseParallel()
    parallel.parallelize_module(layer, mesh(), style)


def quantized_weight(name: str, weight: Tensor) -> Any:
    kind, options = FORMATS[name]
    scale = {"scale": torch.tensor([8.0])} if kind == "fp8_delayed" else {}
    return qtensor.quantizer(kind, **options).quantize(weight, **scale)


def run_plain(name: str, mode: str, own: bool, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's output and gradient of the input, and the values of the whole weight."""
    t, rank = whole(True), dist.get_rank()
    layer = nn.Linear(K, N)
    layer.weight = nn.Parameter(quantized_weight(name, t.w), requires_grad=False)
    layer.bias = nn.Parameter(t.b)
    apply_style(layer, mode, own)
    stored: Any = layer.weight
    assert isinstance(stored.to_local(), qtensor.QuantizedTensor)
    x = (t.x if mode == "column" else part(t.x, rank, 2)).clone().requires_grad_()
    run = layer if backend == "eager" else Compiled(lambda x: layer(x), backend)
    y = run(x)
    y.backward(part(t.dy, rank, 2) if mode == "column" else t.dy)
    return y.detach().clone(), x.grad.clone(), stored.full_tensor().dequantize()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@styles
@modes
@pytest.mark.parametrize("name", FORMATS)
def test_plain_layer(ranks: Ranks, name: str, mode: str, own: bool, backend: str) -> None:
    """A layer of torch with a quantized weight: the products are those of the decoded weight.

    A sum of n float32 products is off by less than n eps times the sum of their absolute values,
    in any order.
    """
    t = whole(True)
    stored = quantized_weight(name, t.w).dequantize()
    x, dy = t.x.reshape(-1, K).double(), t.dy.reshape(-1, N).double()
    w = stored.double()
    want = {"y": (x @ w.T + t.b).view(t.dy.shape), "dx": (dy @ w).view(t.x.shape)}
    sums = {"y": x.abs() @ w.abs().T + t.b.abs(), "dx": dy.abs() @ w.abs()}
    for rank, (y, dx, values) in enumerate(ranks.run(run_plain, name, mode, own, backend)):
        assert_same_bytes(values, stored, "weight")
        for what, got, dim in (("y", y, mode == "column"), ("dx", dx, mode == "row")):
            bound = (2 * K + 4) * 2.0**-24 * sums[what].view(want[what].shape)
            a, b = want[what], bound
            if dim:
                a, b = part(a, rank, 2), part(b, rank, 2)
            assert ((got - a).abs() <= b).all(), f"rank {rank}: {what}"


def run_module(name: str, own: bool, backend: str) -> list[list[Tensor]]:
    """Return the results of two layers, split by styles, and of one rank's parts by hand."""
    recipe = RECIPES[name]
    if name == "nvfp4":
        recipe = qtensor.recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)
    t = whole(True)
    torch.manual_seed(5)
    model = nn.Sequential(*[
        qtensor.Linear(K, N, bias=False, recipe=recipe, quantized_params=True) for _ in range(2)
    ])
    by_hand = [qtensor.Linear(K, N, bias=False, recipe=recipe, quantized_params=True) for _ in "ab"]
    for i, layer in enumerate(by_hand):
        stored: Any = model[i].weight.detach()
        split = distribute_tensor(stored, mesh(), [Shard(i)]).to_local()
        layer.weight = nn.Parameter(split)
    kinds: Any = qtensor.distributed if own else parallel
    plan = {"0": kinds.ColwiseParallel(), "1": kinds.RowwiseParallel()}
    parallel.parallelize_module(model, mesh(), plan)
    results = []
    for styled in (True, False):
        x = t.x.clone().requires_grad_()
        if styled:
            run = model if backend == "eager" else Compiled(model, backend)
            y = run(x)
            if backend != "eager":
                run.check_graphs(1)
        else:
            y = by_hand[1](by_hand[0](x))
            dist.all_reduce(y.detach())
        y.backward(t.dy)
        if not styled:
            dist.all_reduce(x.grad)
        layers: Any = model if styled else by_hand
        grads = [layer.weight.grad for layer in layers]
        local = [g.to_local() if hasattr(g, "to_local") else g for g in grads]
        results.append([v.clone() for v in (y.detach(), x.grad, *local)])
    return results


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@styles
@pytest.mark.parametrize("name", ["current", "blockwise", "mxfp8", "nvfp4"])
def test_quantized_params(ranks: Ranks, name: str, own: bool, backend: str) -> None:
    """Column then row, with weights that were quantized whole: factors of the whole weight."""
    for rank, (got, want) in enumerate(ranks.run(run_module, name, own, backend)):
        for what, a, b in zip(["y", "dx", "dw1", "dw2"], got, want, strict=True):
            assert_same_bytes(a, b, f"rank {rank}: {what}")


# ---- quantized outputs ---------------------------------------------------------------------------

OUTPUTS = ["fp8", "fp8_rowwise", "fp8_blockwise", "mxfp8", "mxfp6", "mxfp4", "nvfp4"]


def run_output(name: str, mode: str, backend: str) -> None:
    """The quantized output has the codes and factors of the plain one, quantized as a whole."""
    torch.manual_seed(0)
    kinds: Any = qtensor.distributed
    style = kinds.ColwiseParallel if mode == "column" else kinds.RowwiseParallel
    layer = qtensor.Linear(256, 256, recipe=qtensor.recipes.MXFP8BlockScaling())
    parallel.parallelize_module(layer, mesh(), style(use_local_output=False))
    x = torch.randn(64, 256)
    x = x if mode == "column" else x.chunk(SIZE, 1)[dist.get_rank()].contiguous()
    inputs, results = [x.clone().requires_grad_() for _ in range(2)], []
    run: Any = layer if backend == "eager" else Compiled(layer, backend)
    for own, options in zip(inputs, ({}, {"quantized_output": name}), strict=True):
        with torch.set_grad_enabled(backend == "eager"):
            y = run(own, **options)
        if backend == "eager":
            y.backward(distribute_tensor(torch.ones(64, 256), y.device_mesh, y.placements))
        results.append(y.detach())
    plain, quantized = results
    assert quantized.placements == plain.placements
    wanted = qtensor.quantize(plain.full_tensor(), name)
    got = quantized.full_tensor()
    assert got.quantizer == wanted.quantizer
    for ours, theirs in zip(got.buffers(), wanted.buffers(), strict=True):
        assert_same_bytes(ours, theirs)
    if backend == "eager":
        assert_same_bytes(inputs[1].grad, inputs[0].grad)


@modes
@pytest.mark.parametrize("name", OUTPUTS)
def test_quantized_outputs(ranks: Ranks, name: str, mode: str) -> None:
    ranks.run(run_output, name, mode, "eager")


@pytest.mark.parametrize("name", ["fp8", "mxfp8"])
def test_compiled_quantized_outputs(ranks: Ranks, name: str) -> None:
    """In inference: AOTAutograd cannot take a plain gradient of a DTensor of quantized parts."""
    ranks.run(run_output, name, "column", "aot_eager")
