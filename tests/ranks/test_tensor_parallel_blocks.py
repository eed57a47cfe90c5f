"""LayerNormLinear and LayerNormMLP split over two gloo processes: oracles by hand, the unsharded
module, initial values.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compile_helpers import Compiled
from formats import assert_same_bytes
from parallel_blocks import (
    BLOCKS,
    FFN,
    RECIPES,
    Block,
    block_oracle,
    build,
    joined,
    ranked,
    step,
    tensors,
)
from parallel_cases import SIZE, K, Result, ones, part
from ranks import Ranks
from torch import Tensor

import qtensor


def within(recipe: Any, **options: Any) -> Any:
    if recipe is None:
        return contextlib.nullcontext()
    return qtensor.autocast(recipe=recipe, **options)


def same(got: Result, want: Result, what: str) -> None:
    assert_same_bytes(got.y, want.y, f"{what}: output")
    assert_same_bytes(got.dx, want.dx, f"{what}: gradient of the input")
    for i, (a, b) in enumerate(zip(got.gradients, want.gradients, strict=True)):
        assert_same_bytes(a, b, f"{what}: gradient {i}")


class Zoo(torch.nn.Module):
    """Blocks in one module, so that a compiler has one graph to make of them."""

    def __init__(self, blocks: list[Block], **options: Any) -> None:
        super().__init__()
        rank, group = dist.get_rank(), dist.group.WORLD
        self.members = torch.nn.ModuleList(
            build(b, tensors(b), rank, group, **options) for b in blocks
        )

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        return [member(x) for member, x in zip(self.members, inputs, strict=True)]


def outer_gradient(block: Block, dy: Tensor, rank: int) -> Tensor:
    """What a rank is given of the gradient of the block's output."""
    return block.layers[-1].outputs(dy, rank)


def run_zoo(recipe: Any, backend: str, blocks: list[Block], options: dict[str, Any]) -> Any:
    """Forward and backward of every block on this rank, by one call each."""
    rank, zoo = dist.get_rank(), Zoo(blocks, **options)
    run = Compiled(zoo, backend) if backend else zoo
    given = [tensors(b) for b in blocks]
    inputs = [
        b.local(t.x, rank).clone().requires_grad_() for b, t in zip(blocks, given, strict=True)
    ]
    with within(recipe):
        outputs = run(inputs)
    grads = [outer_gradient(b, t.dy, rank) for b, t in zip(blocks, given, strict=True)]
    torch.autograd.backward(outputs, grads)
    if backend:
        run.check_graphs(1)
    return [
        Result(y.detach(), x.grad, [p.grad for p in member.parameters()])
        for y, x, member in zip(outputs, inputs, zoo.members, strict=True)
    ]


_WIDE = pytest.mark.nightly(reason="ranks compile with aot_eager in the default tier")
backends = pytest.mark.parametrize(
    "backend",
    [
        pytest.param("", id="eager"),
        "aot_eager",
        pytest.param("inductor", marks=_WIDE),
    ],
)
COMPILED = {
    "aot_eager": [BLOCKS[1], BLOCKS[3], BLOCKS[5]],
    "inductor": [BLOCKS[0], BLOCKS[6]],
}


@backends
@pytest.mark.parametrize("name", RECIPES)
def test_every_block(ranks: Ranks, name: str, backend: str) -> None:
    """Norm on the rank's own rows, fc1 by columns, fc2 by rows; the bytes of the oracle, gradients
    of the norm too.
    """
    blocks = COMPILED[backend] if backend else BLOCKS
    results = ranks.run(run_zoo, RECIPES[name], backend, blocks, {})
    for i, block in enumerate(blocks):
        want = block_oracle(block, RECIPES[name], tensors(block), [ones(), ones()])
        for rank in range(SIZE):
            same(results[rank][i], joined(want[rank]), f"{block}, rank {rank}")


MLPS = [b for b in BLOCKS if b.activation]


@pytest.mark.parametrize("backend", ["", "aot_eager"], ids=["eager", "aot_eager"])
def test_recomputed_activations(ranks: Ranks, backend: str) -> None:
    """The sum over ranks is taken again in the second run of fc2."""
    recipe = RECIPES["current"]
    results = ranks.run(run_zoo, recipe, backend, MLPS, {"recompute_activation": True})
    for i, block in enumerate(MLPS):
        want = block_oracle(block, recipe, tensors(block), [ones(), ones()])
        for rank in range(SIZE):
            same(results[rank][i], joined(want[rank]), f"{block}, rank {rank}")


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        # Sums of 256 products in another order, each within 256 eps of its terms.
        ("high_precision", 256 * 2.0**-24),
        # Whole blocks: the codes of the unsharded module, but where the other order of a sum before
        # moves a value over the middle between two codes. Few values are that near; each moves by
        # the format's step, an eighth.
        ("mxfp8", 2.0**-8),
        # Factors of the rank's own part of weights and inner tensors: apart by quantization, half a
        # step of an eighth (e4m3) or a fourth (e5m2) for each of the operands of four products in a
        # row.
        ("current", 2.0**-2),
        ("delayed", 2.0**-2),
    ],
)
@pytest.mark.parametrize("backend", ["", "aot_eager"], ids=["eager", "aot_eager"])
def test_the_unsharded_module(ranks: Ranks, name: str, bound: float, backend: str) -> None:
    blocks = COMPILED[backend] if backend else BLOCKS
    results = ranks.run(run_zoo, RECIPES[name], backend, blocks, {})
    for i, block in enumerate(blocks):
        t = tensors(block)
        module = build(block, t, None, None)
        with within(RECIPES[name]):
            want = step(module, module, t.x, t.dy)
        got = [results[rank][i] for rank in range(SIZE)]
        whole_y = torch.cat([r.y for r in got], -1 if not block.activation else 0)
        y = whole_y if not block.activation or block.sequence else got[0].y
        assert relative(y, want.y) <= bound, f"{block}: output"
        dx = torch.cat([r.dx for r in got]) if block.sequence else got[0].dx
        assert relative(dx, want.dx) <= bound, f"{block}: gradient of the input"
        norms = 1 if t.beta is None else 2
        for j in range(norms):
            # Of the rank's own rows where the sequence is split, else of all on both.
            g = sum(r.gradients[j] for r in got) if block.sequence else got[0].gradients[j]
            assert relative(g, want.gradients[j]) <= bound, f"{block}: gradient of the norm"
        column = ranked(want.gradients[norms], block.gated)
        g = torch.cat([r.gradients[norms] for r in got])
        assert relative(g, column) <= bound, f"{block}: gradient of the first weight"
        if block.activation:
            j = norms + 1 + block.bias
            g = torch.cat([r.gradients[j] for r in got], -1)
            assert relative(g, want.gradients[j]) <= bound, f"{block}: gradient of fc2"


# ---- delayed scaling -----------------------------------------------------------------------------


STEPS = 3
ROLES = {"input": "e4m3", "weight": "e4m3", "grad_output": "e5m2"}


def run_delayed(block: Block, reduce: bool, backend: str) -> list[tuple[Result, list[Tensor]]]:
    """(result, factors in use of each layer) of each step."""
    rank, found = dist.get_rank(), []
    module = build(block, tensors(block), rank, dist.group.WORLD)
    run = Compiled(module, backend) if backend else module
    for s in range(STEPS):
        t = tensors(block, s)
        group = dist.group.WORLD if reduce else None
        with within(RECIPES["delayed"], amax_reduction_group=group):
            result = step(module, run, block.local(t.x, rank), outer_gradient(block, t.dy, rank))
        state = module.state_dict()
        found.append((result, [v for k, v in state.items() if k.endswith(".scale")]))
    if backend:
        run.check_graphs(1)
    return found


@pytest.mark.parametrize("backend", ["", "aot_eager"], ids=["eager", "aot_eager"])
@pytest.mark.parametrize("reduce", [True, False], ids=["group", "alone"])
@pytest.mark.parametrize("block", [BLOCKS[2], BLOCKS[3], BLOCKS[5]], ids=str)
def test_delayed_scaling(ranks: Ranks, block: Block, reduce: bool, backend: str) -> None:
    """Factors of each layer from the maxima of the steps before: over both ranks, or the rank's
    own.
    """
    results = ranks.run(run_delayed, block, reduce, backend)
    layers = range(len(block.layers))
    fresh = qtensor.delayed_scaling_state(4, 1)
    states = [[dict.fromkeys(ROLES, fresh) for _ in range(SIZE)] for _ in layers]
    for s in range(STEPS):
        scales = [[{r: scale for r, (_, scale) in st.items()} for st in layer] for layer in states]
        want = block_oracle(block, RECIPES["delayed"], tensors(block, s), scales)
        for rank in range(SIZE):
            got, used = results[rank][s]
            same(got, joined(want[rank]), f"step {s}, rank {rank}")
            for layer in layers:
                expected = torch.cat(list(scales[layer][rank].values()))
                assert_same_bytes(used[layer], expected, f"step {s}, rank {rank}: factors")
        for layer in layers:
            for role, element in ROLES.items():
                maxima = [want[rank][layer].amax[role] for rank in range(SIZE)]
                for rank in range(SIZE):
                    history, scale = states[layer][rank][role]
                    history = history.clone()
                    amax = torch.maximum(*maxima) if reduce else maxima[rank]
                    qtensor.record_amax_(history, amax)
                    new = qtensor.delayed_scaling_update(history, scale, dtype=element)
                    states[layer][rank][role] = new
    equal = all(torch.equal(results[0][-1][1][i], results[1][-1][1][i]) for i in layers)
    assert equal == reduce


def run_apart(block: Block) -> list[Tensor]:
    """Factors of each layer after two steps of a recipe that does not reduce, in a region with a
    group.
    """
    rank = dist.get_rank()
    module = build(block, tensors(block), rank, dist.group.WORLD)
    recipe = qtensor.recipes.DelayedScaling(amax_history_len=4, reduce_amax=False)
    for s in range(2):
        t = tensors(block, s)
        with within(recipe, amax_reduction_group=dist.group.WORLD):
            step(module, module, block.local(t.x, rank), outer_gradient(block, t.dy, rank))
    return [v for k, v in module.state_dict().items() if k.endswith(".scale")]


def test_a_recipe_that_does_not_reduce(ranks: Ranks) -> None:
    block = BLOCKS[5]
    alone = [found[1][1] for found in ranks.run(run_delayed, block, False, "")]
    for got, want in zip(ranks.run(run_apart, block), alone, strict=True):
        for a, b in zip(got, want, strict=True):
            assert_same_bytes(a, b)


# ---- initial values ------------------------------------------------------------------------------


def initial(activation: str, options: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(5)
    split = {"set_parallel_mode": True, "tp_group": dist.group.WORLD}
    module = qtensor.LayerNormMLP(64, 128, activation=activation, **split, **options)
    assert not hasattr(module.layer_norm_weight, "sequence_parallel")
    return {name: p.detach() for name, p in module.named_parameters()}


@pytest.mark.parametrize(
    "options",
    [{}, {"init_method": torch.nn.init.xavier_normal_}],
    ids=["as nn.Linear", "init_method"],
)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_initial_values_are_parts_of_the_whole(
    ranks: Ranks, activation: str, options: dict[str, Any]
) -> None:
    torch.manual_seed(5)
    whole = dict(qtensor.LayerNormMLP(64, 128, activation=activation, **options).named_parameters())
    gated = activation == "swiglu"
    for rank, found in enumerate(ranks.run(initial, activation, options)):
        assert found.keys() == whole.keys()
        assert_same_bytes(found["fc1_weight"], part(ranked(whole["fc1_weight"], gated), rank, 0))
        assert_same_bytes(found["fc1_bias"], part(ranked(whole["fc1_bias"], gated), rank, 0))
        assert_same_bytes(found["fc2_weight"], part(whole["fc2_weight"], rank, 1))
        assert_same_bytes(found["fc2_bias"], whole["fc2_bias"])


def marks() -> list[bool]:
    split = {"tp_group": dist.group.WORLD, "sequence_parallel": True}
    built = [
        qtensor.LayerNormLinear(64, 128, parallel_mode="column", **split),
        qtensor.LayerNormMLP(64, 128, set_parallel_mode=True, **split),
        qtensor.LayerNormMLP(64, 128, set_parallel_mode=True, device="meta", **split),
    ]
    built[2].to_empty(device="cpu").reset_parameters()
    return [
        {n for n, p in m.named_parameters() if getattr(p, "sequence_parallel", False)}
        == {"layer_norm_weight", "layer_norm_bias"}
        for m in built
    ]


def test_parameters_that_a_framework_has_to_sum_are_marked(ranks: Ranks) -> None:
    assert ranks.run(marks) == [[True] * 3] * SIZE


# ---- what is refused -----------------------------------------------------------------------------


def refusals() -> list[str]:
    """The message of each call that must not pass, by this rank."""
    group = dist.group.WORLD
    split = {"set_parallel_mode": True, "tp_group": group}
    mxfp8 = {"recipe": RECIPES["mxfp8"]}
    calls = [
        lambda: qtensor.LayerNormLinear(64, 64, name="qkv", parallel_mode="row", tp_group=group),
        lambda: qtensor.LayerNormLinear(64, 63, name="qkv", parallel_mode="column", tp_group=group),
        lambda: qtensor.LayerNormLinear(64, 64, name="qkv", parallel_mode="column"),
        lambda: qtensor.LayerNormMLP(64, 127, name="mlp", **split),
        lambda: qtensor.LayerNormMLP(64, 128, name="mlp", set_parallel_mode=True),
        lambda: qtensor.LayerNormMLP(64, 128, name="mlp", tp_group=group, sequence_parallel=True),
        lambda: qtensor.LayerNormMLP(64, 32, name="mlp", **split, **mxfp8)(torch.zeros(32, 64)),
        lambda: qtensor.LayerNormMLP(64, 64, name="mlp", sequence_parallel=True, **split)(
            torch.zeros(64)
        ),
        lambda: qtensor.GroupedLinear(2, 64, 64, name="moe", parallel_mode="row", tp_group=group),
        lambda: qtensor.GroupedLinear(2, 64, 64, name="moe", parallel_mode="column"),
        lambda: qtensor.GroupedLinear(2, 64, 64, name="moe", sequence_parallel=True),
    ]
    found = []
    for call in calls:
        try:
            call()
            found.append("it passed")
        except qtensor.QTensorError as error:
            found.append(str(error))
    # The group without a mode is not used.
    assert qtensor.GroupedLinear(2, 64, 64, tp_group=group).weight0.shape == (64, 64)
    return found


MESSAGES = [
    "LayerNormLinear[qkv]: the norm needs whole rows, so only out_features can be split; got "
    "parallel_mode='row'.",
    "LayerNormLinear[qkv]: out_features must be a multiple of the 2 ranks of tp_group; got 63.",
    "LayerNormLinear[qkv]: parallel_mode needs the process group that the weight is split over; "
    "got tp_group=None.",
    "LayerNormMLP[mlp]: ffn_hidden_size must be a multiple of the 2 ranks of tp_group; got 127.",
    "LayerNormMLP[mlp]: set_parallel_mode needs the process group that the weight is split over; "
    "got tp_group=None.",
    "LayerNormMLP[mlp]: sequence_parallel needs set_parallel_mode; got set_parallel_mode=False.",
    "LayerNormMLP[mlp] input[mxfp8]: in_features and out_features, of each rank's part, must be "
    "multiples of 32; got 64 and 16.",
    "LayerNormMLP[mlp] input: sequence_parallel splits dim 0, so there must be one beside the "
    "features; got (64,).",
    *(
        "GroupedLinear[moe]: a grouped layer does not communicate: the code that sends tokens "
        "to experts must gather the inputs and sum the outputs over the group"
        for _ in range(3)
    ),
]


def test_what_cannot_be_split_is_refused(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.run(refusals)):
        assert len(found) == len(MESSAGES)
        for got, want in zip(found, MESSAGES, strict=True):
            assert got.replace(f" (rank {rank} of {SIZE})", "", 1).startswith(want), got


def grouped_alone() -> bool:
    group = [dist.new_group([r]) for r in range(SIZE)][dist.get_rank()]
    module = qtensor.GroupedLinear(2, 64, 32, parallel_mode="row", tp_group=group)
    return module.weight0.shape == (32, 64)


def test_a_group_of_one_splits_no_grouped_layer(ranks: Ranks) -> None:
    assert ranks.run(grouped_alone) == [True, True]


def test_the_oracle_sees_a_wrong_part() -> None:
    """Parts of fc1 taken without regard to its halves give another result."""
    block = next(b for b in BLOCKS if b.gated)
    t = tensors(block)
    assert t.weights[0].shape == (2 * FFN, K)
    right = block_oracle(block, None, t, [ones(), ones()])
    t.weights[0] = ranked(t.weights[0], True)
    wrong = block_oracle(block, None, t, [ones(), ones()])
    assert relative(wrong[0][1].y, right[0][1].y) > 0.1
