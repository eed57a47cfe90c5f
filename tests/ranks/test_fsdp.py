"""High-precision parameters under ``fully_shard``: training equals one process, in every bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_cases import (
    GPT,
    RECIPES,
    Block,
    assert_equal,
    converted,
    expected,
    loss_of,
    plain,
    shard,
    train,
    whole,
)
from ranks import RankError, Ranks
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import qtensor


def compiled(model: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True, **options)
    return model


def checkpointed(model: Any) -> Any:
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
    return model


def compiled_checkpoints(model: Any) -> Any:
    return compiled(checkpointed(model))


def mesh(*sizes: int) -> Any:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))


def run_case(case: str, recipe: str) -> None:
    """Train in one of the ways of ``CASES`` on this rank, and compare."""
    micro, prepare, call, options = 1, lambda model: model, None, {}
    if case == "compiled blocks":
        prepare = compiled
    elif case == "checkpointed":
        prepare = checkpointed
    elif case == "checkpointed and compiled":
        prepare = compiled_checkpoints
    elif case == "accumulated":
        micro = 2
    elif case == "offloaded":
        options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    elif case.startswith("mesh"):
        options = {"mesh": mesh(*map(int, case.split()[1:]))}
    model = shard(prepare(converted(recipe)), **options)
    if case == "compiled whole":
        # Not `call or model`: a compiled model has no len(), which the truth of an object asks for.
        call = torch.compile(model, backend="aot_eager")
    ours = train(model, call, micro=micro)
    assert_equal(ours, expected(lambda: prepare(converted(recipe)), micro=micro))


CASES = [
    *(("eager", recipe) for recipe in RECIPES),
    *(("compiled blocks", recipe) for recipe in RECIPES),
    ("compiled whole", "delayed"),
    *(("checkpointed", recipe) for recipe in ("delayed", "mxfp8", "nvfp4")),
    ("checkpointed and compiled", "nvfp4"),
    *(("accumulated", recipe) for recipe in ("delayed", "mxfp8")),
    ("offloaded", "delayed"),
    ("mesh 2 1", "delayed"),
    ("mesh 1 2", "mxfp8"),
]
QUICK = {
    *(("eager", recipe) for recipe in ("delayed", "blockwise", "mxfp8", "nvfp4")),
    ("compiled blocks", "mxfp8"),
    ("checkpointed", "delayed"),
    ("accumulated", "delayed"),
    ("offloaded", "delayed"),
    ("mesh 2 1", "delayed"),
}
WIDE = pytest.mark.nightly(reason="each trains on two ranks; the default tier has nine of them")


@pytest.mark.parametrize(
    "cell", [pytest.param(c, marks=() if c in QUICK else WIDE, id="-".join(c)) for c in CASES]
)
def test_training_equals_one_process(ranks: Ranks, cell: tuple[str, str]) -> None:
    ranks.run(run_case, *cell)


def run_mixed(recipe: str) -> None:
    """Gradients of bfloat16 products, summed in float32, and their norm."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(converted(recipe), mp_policy=policy)
    loss_of(model, 0, dist.get_rank()).backward()
    replicas = [converted(recipe).bfloat16() for _ in range(2)]
    for rank, replica in enumerate(replicas):
        loss_of(replica, 0, rank).backward()
    squares = torch.zeros((), dtype=torch.float64)
    for p, a, b in zip(*[m.parameters() for m in (model, *replicas)], strict=True):
        mean = (a.grad.float() + b.grad.float()) / 2
        assert torch.equal(whole(p.grad), mean)
        squares += mean.double().square().sum()
    total = nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()
    # The ranks sum the squares of their parts, one process those of the whole, so that the order
    # differs. n float32 additions are off by less than n * 2**-24.
    count = sum(p.numel() for p in replicas[0].parameters())
    assert abs(float(total) / float(squares.sqrt()) - 1) < count * 2**-24


@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8", "nvfp4"])
def test_mixed_precision_and_clipping(ranks: Ranks, recipe: str) -> None:
    ranks.run(run_mixed, recipe)


# ---- torch's checkpoint outside of the region --------------------------------------------------


class Within(nn.Module):
    """A model that runs inside of a region, which its backward pass does not see."""

    def __init__(self, model: nn.Module, recipe: Any) -> None:
        super().__init__()
        self.model, self.recipe = model, recipe

    def forward(self, tokens: Tensor) -> Tensor:
        with qtensor.autocast(recipe=self.recipe):
            return self.model(tokens)


def without_recipe() -> GPT:
    model = plain()
    qtensor.convert_(model, None)
    return model


def run_outside(recipe: str) -> None:
    model = shard(checkpointed(without_recipe()))
    ours = train(model, Within(model, RECIPES[recipe]()))
    theirs = expected(lambda: Within(without_recipe(), RECIPES[recipe]()))
    assert_equal(ours, [(name.replace("model.", ""), t) for name, t in theirs])


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_backward_of_a_checkpoint_outside_of_the_region(ranks: Ranks, recipe: str) -> None:
    ranks.run(run_outside, recipe)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_runs_under_the_recipe_of_its_forward(use_reentrant: bool) -> None:
    """The steps alternate between recipes, and evaluation between them uses another one."""
    layers, x = [qtensor.Linear(64, 64)], torch.randn(32, 64)
    layers.append(copy.deepcopy(layers[0]))
    for name in ("mxfp8", "delayed", "mxfp8"):
        gradients = []
        for layer, function in zip(layers, (checkpoint, lambda f, x, **_: f(x)), strict=True):
            layer.zero_grad()
            inputs = x.clone().requires_grad_()
            with qtensor.autocast(recipe=RECIPES[name]()):
                y = function(layer, inputs, use_reentrant=use_reentrant)
            y.square().sum().backward()
            gradients.append([inputs.grad, *[p.grad for p in layer.parameters()]])
            with torch.no_grad(), qtensor.autocast(enabled=False):
                layer.eval()(x)
            layer.train()
        for a, b in zip(*gradients, strict=True):
            assert torch.equal(a, b)


def test_a_checkpoint_after_forwards_under_several_recipes_is_refused() -> None:
    layer, x = qtensor.Linear(64, 64, name="proj"), torch.randn(32, 64)
    losses = []
    for recipe in ("mxfp8", "current"):
        with qtensor.autocast(recipe=RECIPES[recipe]()):
            y = checkpoint(layer, x.requires_grad_(), use_reentrant=False)
        losses.append(y.sum())
    with pytest.raises(qtensor.QTensorError, match=r"Linear\[proj\].*share one recipe"):
        losses[0].backward()


# ---- layers of qtensor ---------------------------------------------------------------------------


def run_meta() -> None:
    """Values of a rank that draws others than the first rank are those of the first rank."""
    kinds: Any = {
        "linear": lambda: qtensor.Linear(64, 96),
        "norm": lambda: qtensor.LayerNormLinear(64, 96),
        "mlp": lambda: qtensor.LayerNormMLP(64, 96, activation="swiglu"),
        "grouped": lambda: qtensor.GroupedLinear(2, 64, 96),
    }
    for name, make in kinds.items():
        with torch.device("meta"):
            layer = make()
        fully_shard(layer)
        layer.to_empty(device="cpu")
        torch.manual_seed(dist.get_rank())
        layer.reset_parameters()
        torch.manual_seed(0)
        for (key, ours), theirs in zip(layer.named_parameters(), make().parameters(), strict=True):
            assert torch.equal(whole(ours), theirs), (name, key)


def test_meta_layers_get_the_values_of_one_process(ranks: Ranks) -> None:
    ranks.run(run_meta)


def run_meta_quantized() -> None:
    recipe = RECIPES["mxfp8"]()
    layer = qtensor.Linear(64, 96, device="meta", recipe=recipe, quantized_params=True)
    fully_shard(layer).to_empty(device="cpu")
    with pytest.raises(qtensor.UnsupportedError, match="before fully_shard"):
        layer.reset_parameters()


def test_a_sharded_weight_cannot_become_quantized(ranks: Ranks) -> None:
    ranks.run(run_meta_quantized)


def run_delayed_wgrad() -> None:
    for options in ({}, {"mesh": mesh(2, 1)}):
        gradients = []
        for delay in (False, True):
            torch.manual_seed(0)
            layer = qtensor.Linear(64, 96, recipe=RECIPES["mxfp8"](), delay_wgrad_compute=delay)
            model = fully_shard(nn.Sequential(layer), **options)
            for step in range(2):
                torch.manual_seed(10 * step + dist.get_rank())
                model(torch.randn(32, 64)).square().sum().backward()
                if delay:
                    layer.backward_dw()
            gradients.append([whole(p.grad) for p in model.parameters()])
        for a, b in zip(*gradients, strict=True):
            assert torch.equal(a, b)


def test_delayed_weight_gradients_are_averaged(ranks: Ranks) -> None:
    ranks.run(run_delayed_wgrad)


def run_fused_wgrad() -> None:
    layer = qtensor.Linear(64, 96, recipe=RECIPES["mxfp8"](), fuse_wgrad_accumulation=True)
    model = fully_shard(nn.Sequential(layer))
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    model(torch.randn(32, 64))


def test_fused_accumulation_is_refused(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"Under fully_shard.*fuse_wgrad_accumulation=False"):
        ranks.run(run_fused_wgrad)


# ---- convert_ ------------------------------------------------------------------------------------


def run_converted_late(recipe: str) -> None:
    """The root gathers its parameters in the evaluation and holds them when it is converted."""
    model = plain()
    fully_shard(model.blocks[0].up)
    head = model.head
    shard(model)
    with torch.no_grad():
        loss_of(model, 0, 0)
    report = qtensor.convert_(model, RECIPES[recipe]())
    assert len(report.swapped) == 5
    assert model.head is head
    assert isinstance(head, qtensor.Linear)
    assert isinstance(model.blocks[0].up, qtensor.Linear)
    model.reshard()
    assert_equal(train(model), expected(lambda: converted(recipe)))
    kept = qtensor.convert_(model, RECIPES[recipe](), quantized_params=True)
    assert {r.note for r in kept.skipped} == {
        "its weight is sharded; convert with quantized_params before fully_shard and "
        "parallelize_module"
    }
    qtensor.revert_(model)
    assert type(head) is nn.Linear
    assert not isinstance(model.blocks[0].up, qtensor.Linear)
    loss_of(model, 0, 0).backward()


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_layers_of_a_sharded_model_are_converted_in_place(ranks: Ranks, recipe: str) -> None:
    ranks.run(run_converted_late, recipe)
