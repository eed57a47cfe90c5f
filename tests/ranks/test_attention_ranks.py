"""``MultiheadAttention`` and ``TransformerLayer`` with heads split over two ranks, by their own
options and by parallel styles, and sharded by ``fully_shard``.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attention_module_cases import sqnr
from fsdp_cases import GPT, WIDTH, assert_equal, expected, shard, train
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import parallel

import qtensor

HIDDEN, HEADS, GROUPS, S, B = 128, 4, 2, 32, 2
RECIPES: dict[str, Any] = {
    "plain": lambda: None,
    "mxfp8": lambda: qtensor.recipes.MXFP8BlockScaling(fp8_dpa=True),
    "current": lambda: qtensor.recipes.Float8CurrentScaling(fp8_dpa=True),
    "delayed": lambda: qtensor.recipes.DelayedScaling(),
}
LEAST = {"plain": 100.0, "mxfp8": 30.0, "current": 18.0, "delayed": 15.0}
"""Decibels. Ranks add parts of sums in another order, which moves a few codes; one factor per
tensor or its part differ by up to a factor of two between a part and the whole.
"""


def build(kind: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    options = {"num_gqa_groups": GROUPS, "attention_dropout": 0.0, **options}
    if kind == "attention":
        return qtensor.MultiheadAttention(HIDDEN, HEADS, **options)
    return qtensor.TransformerLayer(HIDDEN, 256, HEADS, hidden_dropout=0.0, **options)


def step(module: nn.Module, x: Tensor, dy: Tensor, recipe: Any, **options: Any) -> Any:
    region = contextlib.nullcontext() if recipe is None else qtensor.autocast(recipe=recipe)
    x = x.clone().requires_grad_()
    with region:
        y = module(x, **options)
    y.backward(dy)
    return y.detach(), x.grad


def part(t: Tensor, rank: int, dim: int = 0) -> Tensor:
    return t.chunk(2, dim)[rank].contiguous()


def split(whole: Tensor, like: Tensor, rank: int) -> Tensor:
    """The part of a rank of a parameter or its gradient."""
    for dim, size in enumerate(like.shape):
        if whole.shape[dim] != size:
            return part(whole, rank, dim)
    return whole


def run_split(kind: str, recipe: str, sequence: bool, fused: bool, backend: str) -> None:
    rank, chosen = dist.get_rank(), RECIPES[recipe]
    options = {"fuse_qkv_params": fused}
    whole = build(kind, **options)
    options |= {"set_parallel_mode": True, "tp_group": dist.group.WORLD}
    ours = build(kind, **options, sequence_parallel=sequence)
    x, dy = torch.randn(S, B, HIDDEN), torch.randn(S, B, HIDDEN)
    rope = qtensor.RotaryPositionEmbedding(HIDDEN // HEADS)(S)
    want = step(whole, x, dy, chosen(), rotary_pos_emb=rope)
    if sequence:
        want, x, dy = [part(t, rank) for t in want], part(x, rank), part(dy, rank)
    call = ours
    if backend != "eager":
        torch._dynamo.reset()
        call = torch.compile(ours, backend=backend, fullgraph=True)
    got = step(call, x, dy, chosen(), rotary_pos_emb=rope)
    for a, b in zip(got, want, strict=True):
        assert sqnr(a, b) > LEAST[recipe]
    for (name, a), b in zip(ours.named_parameters(), whole.parameters(), strict=True):
        if "fc1" in name or a.grad.shape == b.grad.shape:
            continue
        assert torch.equal(a, split(b, a, rank)), name
        assert sqnr(a.grad, split(b.grad, a, rank)) > LEAST[recipe] - 5, name


@pytest.mark.parametrize("kind", ["attention", "layer"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_heads_are_split(ranks: Ranks, kind, recipe, sequence, fused, backend):
    ranks.run(run_split, kind, recipe, sequence, fused, backend)


def run_styles(recipe: str) -> None:
    chosen = RECIPES[recipe]
    options = {"fuse_qkv_params": True, "input_layernorm": True}
    whole, ours = build("attention", **options), build("attention", **options)
    column, row = qtensor.distributed.ColwiseParallel, qtensor.distributed.RowwiseParallel
    plan = {"layernorm_qkv": column(), "proj": row()}
    parallel.parallelize_module(ours, init_device_mesh("cpu", (2,)), plan)
    x, dy = torch.randn(S, B, HIDDEN), torch.randn(S, B, HIDDEN)
    got, want = (step(m, x, dy, chosen()) for m in (ours, whole))
    for a, b in zip(got, want, strict=True):
        assert sqnr(a, b) > LEAST[recipe]


@pytest.mark.parametrize("recipe", ["plain", "mxfp8", "current"])
def test_parallel_styles_split_the_projections(ranks: Ranks, recipe):
    ranks.run(run_styles, recipe)


def gpt(recipe: str) -> GPT:
    torch.manual_seed(0)
    model = GPT()
    options = {"attn_input_format": "bshd", "hidden_dropout": 0.0, "attention_dropout": 0.0}
    block = qtensor.TransformerLayer(WIDTH, 2 * WIDTH, 2, recipe=RECIPES[recipe](), **options)
    model.blocks = nn.ModuleList([block])
    return model


def run_sharded(recipe: str) -> None:
    assert_equal(train(shard(gpt(recipe))), expected(lambda: gpt(recipe)))


@pytest.mark.parametrize("recipe", RECIPES)
def test_fully_shard_gives_the_bytes_of_one_process(ranks: Ranks, recipe):
    ranks.run(run_sharded, recipe)


def refuse() -> None:
    with pytest.raises(qtensor.QTensorError, match="multiple of the 2 ranks"):
        build("attention", num_gqa_groups=1, set_parallel_mode=True, tp_group=dist.group.WORLD)
    options = {"fuse_qkv_params": True, "qkv_weight_interleaved": False}
    with pytest.raises(qtensor.UnsupportedError, match="split by groups"):
        build("attention", **options, set_parallel_mode=True, tp_group=dist.group.WORLD)
    options = {"set_parallel_mode": True, "tp_group": dist.group.WORLD}
    with pytest.raises(qtensor.UnsupportedError, match="ranks have different heads"):
        build("attention", qk_norm_type="RMSNorm", **options)


def test_options_that_cannot_be_split(ranks: Ranks):
    ranks.run(refuse)
