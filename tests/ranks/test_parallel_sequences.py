"""Styles and layers over a sequence that is split along dim 1, and every style on every layer."""

from __future__ import annotations

import contextlib
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
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel

import qtensor
import qtensor.distributed
from qtensor.distributed import Traffic

Tensors = list[Tensor]
BATCH, SEQUENCE = 2, 128
"""(BATCH, SEQUENCE, K) inputs: a rank has 64 rows of each sequence, whole blocks of 16 and 32."""


def mesh() -> Any:
    return dist.init_device_mesh("cpu", (SIZE,))


def recipe_of(name: str) -> Any:
    if name == "nvfp4":
        return qtensor.recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)
    return RECIPES[name]


def batch() -> tuple[Tensor, Tensor]:
    """Return an input and a gradient whose halves along each dim have other maxima."""
    g = torch.Generator().manual_seed(4)
    x, dy = (torch.randn(BATCH, SEQUENCE, n, generator=g) for n in (K, K))
    x[:, SEQUENCE // 2 :] *= 5
    dy[:, SEQUENCE // 2 :] *= 3
    return x, dy


def two_layers(name: str, bias: bool, **options: Any) -> nn.Sequential:
    torch.manual_seed(6)
    recipe = recipe_of(name)
    return nn.Sequential(
        qtensor.Linear(K, N, bias=bias, recipe=recipe, **options),
        nn.ReLU(),
        qtensor.Linear(N, K, bias=bias, recipe=recipe, **options),
    )


def local(t: Any) -> Tensor:
    """Return this rank's part of a tensor, with memory of its own."""
    t = t.detach()
    return (t.to_local() if isinstance(t, DTensor) else t).clone()


def run_sequence(name: str, bias: bool, backend: str) -> tuple[Tensors, Tensors, dict[str, int]]:
    """Return this rank's results of two styles over dim 1, those over whole rows, and the bytes."""
    rank, (x, dy) = dist.get_rank(), batch()
    results, sent = [], {}
    for split in (True, False):
        model = two_layers(name, bias)
        end = Shard(1) if split else Replicate()
        plan = {
            "0": qtensor.distributed.ColwiseParallel(input_layouts=end),
            "2": qtensor.distributed.RowwiseParallel(output_layouts=end),
        }
        parallel.parallelize_module(model, mesh(), plan)
        given = (part(x, rank, 1) if split else x).clone().requires_grad_()
        run = model if backend == "eager" else Compiled(model, backend)
        # Dynamo compiles no frame below a mode that sees every op.
        counted = Traffic()
        with counted if backend == "eager" else contextlib.nullcontext():
            y = run(given)
            y.backward(part(dy, rank, 1) if split else dy)
        if split:
            sent = dict(counted.sent)
        if backend != "eager":
            run.check_graphs(1)
        found = [y, given.grad, *(p.grad for p in model.parameters())]
        if not split:
            found[:2] = [part(t.detach(), rank, 1) for t in found[:2]]
        results.append([local(t) for t in found])
    return results[0], results[1], sent


WIDE = pytest.mark.nightly(reason="5 s; test_tensor_parallel_blocks.py compiles these layers")


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=WIDE)])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_sequence_along_dim_1(ranks: Ranks, name: str, bias: bool, backend: str) -> None:
    """The layers read the same rows as if the sequence were whole on each rank."""
    for rank, (got, want, sent) in enumerate(ranks.run(run_sequence, name, bias, backend)):
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_same_bytes(a, b, f"rank {rank}: result {i}")
        if backend == "eager":
            # One gather and one reduce-scatter for each layer.
            names = {"all_gather_into_tensor", "reduce_scatter_tensor"}
            assert set(sent) - {"all_reduce"} == names
            assert sent["reduce_scatter_tensor"] == 2 * 4 * BATCH * SEQUENCE * K


# ---- options of the layers and styles ------------------------------------------------------------


def run_both_ways(name: str, bias: bool) -> tuple[Tensors, Tensors]:
    """Return this rank's results by styles, and by ``parallel_mode`` with ``sequence_parallel``."""
    t, rank, results = whole(bias), dist.get_rank(), []
    split = {"tp_group": dist.group.WORLD, "sequence_parallel": True}
    for styled in (True, False):
        layers = []
        for mode in ("column", "row"):
            own = {} if styled else {"parallel_mode": mode, **split}
            layer = qtensor.Linear(K, N, bias=bias, recipe=recipe_of(name), **own)
            dim = 0 if mode == "column" else 1
            with torch.no_grad():
                layer.weight.copy_(t.w if styled else part(t.w, rank, dim))
                if bias:
                    b = t.b if styled or mode == "row" else part(t.b, rank, 0)
                    layer.bias.copy_(b)
            layers.append(layer)
        model = nn.Sequential(*layers)
        if styled:
            plan = {
                "0": qtensor.distributed.ColwiseParallel(input_layouts=Shard(0)),
                "1": qtensor.distributed.RowwiseParallel(output_layouts=Shard(0)),
            }
            parallel.parallelize_module(model, mesh(), plan)
        torch.manual_seed(rank)
        x = part(t.x, rank, 0).clone().requires_grad_()
        y = model(x)
        y.backward(part(t.dy, rank, 0))
        found = [y, x.grad, *(p.grad for p in model.parameters())]
        results.append([local(v) for v in found])
    return results[0], results[1]


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("name", RECIPES)
def test_styles_and_options_agree(ranks: Ranks, name: str, bias: bool) -> None:
    for rank, (got, want) in enumerate(ranks.run(run_both_ways, name, bias)):
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_same_bytes(a, b, f"rank {rank}: result {i}")


# ---- every style on every layer ------------------------------------------------------------------


def quantized_linear() -> nn.Module:
    layer = nn.Linear(K, N, bias=False)
    layer.weight = nn.Parameter(qtensor.quantize(layer.weight.detach(), "mxfp8"), False)
    return layer


MX = qtensor.recipes.MXFP8BlockScaling()
LAYERS: dict[str, Any] = {
    "Linear": lambda: qtensor.Linear(K, N, recipe=MX),
    "LayerNormLinear": lambda: qtensor.LayerNormLinear(K, N, recipe=MX),
    "LayerNormMLP": lambda: qtensor.LayerNormMLP(K, N, recipe=MX),
    "GroupedLinear": lambda: qtensor.GroupedLinear(2, K, N, recipe=MX),
    "nn.Linear": quantized_linear,
}
SPLITS = [BATCH * SEQUENCE // 2] * 2
S1 = Shard(1)


def inputs_of(kind: str, style: str, layer: str) -> Any:
    """Return the style, and this rank's part of the input."""
    x, rank = batch()[0], dist.get_rank()
    styles: Any = qtensor.distributed if style.startswith("qtensor") else parallel
    rows = S1 if layer != "GroupedLinear" else Replicate()
    if kind == "ColwiseParallel":
        made = styles.ColwiseParallel(input_layouts=rows)
    elif kind == "RowwiseParallel":
        return styles.RowwiseParallel(output_layouts=rows), part(x, rank, 2)
    elif kind == "SequenceParallel":
        made, rows = parallel.SequenceParallel(use_local_output=True), S1
    elif kind == "PrepareModuleInput":
        layouts = {"input_layouts": (rows,), "desired_input_layouts": (Replicate(),)}
        if layer == "GroupedLinear":
            layouts = {name: (*pair, None) for name, pair in layouts.items()}
        made = parallel.PrepareModuleInput(**layouts, use_local_output=True)
    elif kind == "PrepareModuleOutput":
        made, rows = (
            parallel.PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=S1),
            Replicate(),
        )
    else:
        layouts = {"input_layouts": (rows,), "desired_input_layouts": (Replicate(),)}
        if layer == "GroupedLinear":
            layouts = {name: (*pair, None) for name, pair in layouts.items()}
        made = parallel.PrepareModuleInputOutput(
            **layouts, use_local_input=True, output_layouts=Replicate(), desired_output_layouts=S1
        )
    return made, (part(x, rank, 1) if rows == S1 else x)


OUTPUT = {"ColwiseParallel": 2, "PrepareModuleInput": None}
"""The dim along which a rank has a part of the output, 1 if it is not listed."""


def run_style(layer: str, style: str) -> tuple[str, Tensors]:
    """Return ("", this rank's output and the whole's part), or the error."""
    kind = style.partition(" ")[2]
    torch.manual_seed(8)
    module = LAYERS[layer]()
    torch.manual_seed(8)
    one = LAYERS[layer]()
    extra = [SPLITS] if layer == "GroupedLinear" else []
    try:
        made, x = inputs_of(kind, style, layer)
        parallel.parallelize_module(module, mesh(), made)
        with torch.no_grad():
            y = module(x, *extra)
    except (qtensor.QTensorError, NotImplementedError, TypeError) as error:
        return f"{type(error).__name__}: {error}", []
    with torch.no_grad():
        want = one(batch()[0], *extra)
    dim = OUTPUT.get(kind, 1)
    if layer == "GroupedLinear" and kind == "RowwiseParallel":
        dim = None
    return "", [local(y), want if dim is None else part(want, dist.get_rank(), dim)]


STYLES = [
    *(
        f"{of} {kind}"
        for of in ("torch", "qtensor")
        for kind in ("ColwiseParallel", "RowwiseParallel")
    ),
    "torch SequenceParallel",
    "torch PrepareModuleInput",
    "torch PrepareModuleOutput",
    "torch PrepareModuleInputOutput",
]
TORCH_REFUSES = r"^NotImplementedError: .* only support nn.Linear and nn.Embedding"
REFUSED = {
    **{
        (layer, f"torch {kind}"): TORCH_REFUSES
        for layer in ("LayerNormLinear", "LayerNormMLP", "GroupedLinear")
        for kind in ("ColwiseParallel", "RowwiseParallel")
    },
    # torch's SequenceParallel passes the first argument alone.
    ("GroupedLinear", "torch SequenceParallel"): r"^TypeError: .*argument: 'm_splits'",
    ("LayerNormLinear", "qtensor RowwiseParallel"): "the norm needs whole rows.*ColwiseParallel",
    ("LayerNormMLP", "qtensor ColwiseParallel"): "set_parallel_mode=True",
    ("LayerNormMLP", "qtensor RowwiseParallel"): "set_parallel_mode=True",
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("layer", LAYERS)
def test_styles(ranks: Ranks, layer: str, style: str) -> None:
    """MXFP8 has the codes of the whole; the sum over ranks of a row layer has another order."""
    for rank, (error, tensors) in enumerate(ranks.run(run_style, layer, style)):
        if (layer, style) in REFUSED:
            assert re.search(REFUSED[layer, style], error), error
            continue
        assert not error, error
        got, want = tensors
        if style.endswith("RowwiseParallel") or layer == "nn.Linear":
            bound = 4 * K * 2.0**-24 * want.abs().max() * 16
            assert (got - want).abs().max() <= bound, f"rank {rank}"
        else:
            assert_same_bytes(got, want, f"rank {rank}")
