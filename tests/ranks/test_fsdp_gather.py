"""Weights in high precision that travel as codes and scales: the same training, fewer bytes."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_cases import GPT, Named, assert_equal, loss_of, plain, shard, state, whole
from ranks import RankError, Ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import qtensor
from qtensor.distributed import Traffic, quantized_all_gather, reduce_amaxes
from qtensor.recipes import CustomRecipe, Role

BITS: dict[str, tuple[str, dict[str, Any], float]] = {
    "fp8": ("fp8", {}, 8),
    "fp8_rowwise": ("fp8_rowwise", {}, 8 + 32 / 512),
    "fp8_blockwise 2-D": ("fp8_blockwise", {"block_scaling_dim": 2}, 8 + 32 / 128**2),
    "fp8_blockwise": ("fp8_blockwise", {"block_scaling_dim": 1}, 2 * (8 + 32 / 128)),
    "mxfp8": ("mxfp8", {}, 2 * (8 + 8 / 32)),
    "mxfp8 2-D": ("mxfp8", {"with_2d_quantization": True}, 8 + 8 / 32),
    "mxfp6": ("mxfp6", {"packed": True}, 2 * (6 + 8 / 32)),
    "mxfp6 2-D": ("mxfp6", {"with_2d_quantization": True, "packed": True}, 6 + 8 / 32),
    "mxfp4": ("mxfp4", {}, 2 * (4 + 8 / 32)),
    "mxfp4 2-D": ("mxfp4", {"with_2d_quantization": True}, 4 + 8 / 32),
    "nvfp4": ("nvfp4", {}, 2 * (4 + 8 / 16)),
    "nvfp4 2-D": ("nvfp4", {"with_2d_quantization": True}, 4 + 8 / 16),
}
"""Format, options and the bits a value of a weight (512, 512) that travel: codes and factors.

With 1-D blocks both directions travel.
"""


def recipe_of(name: str) -> Any:
    fmt, options, _ = BITS[name]
    quantizers = {"weight": qtensor.quantizer(fmt, **options)}

    def factory(role: Role) -> Any:
        return quantizers.get(role.tensor, qtensor.quantizer(fmt))

    return CustomRecipe(factory=factory)


def run_bytes(name: str) -> None:
    model = nn.Sequential(qtensor.Linear(512, 512, bias=False, recipe=recipe_of(name)))
    assert quantized_all_gather(model) == ["0.weight"]
    fully_shard(model)
    reduce_amaxes(model)
    x = torch.randn(128, 512)
    model(x)
    model.reshard()
    with torch.no_grad(), Traffic() as traffic:
        model(x)
    bits = 8 * traffic.gathered / (512 * 512 // 2)
    # Each buffer of a shard is padded to 16 bytes, of which there are at most six.
    assert BITS[name][2] <= bits <= BITS[name][2] + 6 * 16 * 8 / (512 * 512 // 2)
    assert set(traffic.sent) == {"_allgather_base_"}


@pytest.mark.parametrize("name", BITS)
def test_bits_a_value(ranks: Ranks, name: str) -> None:
    ranks.run(run_bytes, name)


def converted(name: str) -> GPT:
    model = plain()
    qtensor.convert_(model, recipe_of(name), lambda _, path: path != "head")
    return model


def run_training(
    name: str, mixed: bool, reduces: bool, is_compiled: bool, sizes: tuple[int, ...] = (2,)
) -> None:
    names = ("replicate", "shard")[-len(sizes) :]
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", sizes, mesh_dim_names=names)}
    if mixed:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options["mp_policy"] = policy
    results: list[Named] = []
    for quantized in (False, True):
        model: Any = converted(name)
        if quantized:
            assert len(quantized_all_gather(model)) == 4
        if is_compiled:
            torch._dynamo.reset()
            for block in model.blocks:
                block.compile(backend="aot_eager", fullgraph=True)
        shard(model, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        found: Named = []
        for step in range(3):
            loss = loss_of(model, step, dist.get_rank())
            loss.backward()
            found += [("loss", loss.detach()), *state(model, "gradient")]
            total = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            found.append(("norm", whole(total)))
            optimizer.step()
            optimizer.zero_grad()
            if quantized and reduces:
                reduce_amaxes(model)
        found += [(key, whole(t)) for key, t in model.state_dict().items()]
        results.append(found)
    assert_equal(*results)


MIXED = pytest.mark.parametrize("mixed", [False, True])
REDUCES = pytest.mark.parametrize("reduces", [False, True])


@REDUCES
@MIXED
@pytest.mark.parametrize("name", [name for name in BITS if "blockwise" not in name])
def test_training_equals_a_gather_in_high_precision(
    ranks: Ranks, name: str, mixed: bool, reduces: bool
) -> None:
    ranks.run(run_training, name, mixed, reduces, False)


@pytest.mark.nightly(reason="nine seconds; test_fsdp.py compiles blocks; eager training is above")
@pytest.mark.parametrize("name", ["fp8", "mxfp8 2-D"])
def test_compiled_training_equals_a_gather_in_high_precision(ranks: Ranks, name: str) -> None:
    ranks.run(run_training, name, False, True, True)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=str)
def test_meshes_with_replicas(ranks: Ranks, sizes: tuple[int, ...]) -> None:
    ranks.run(run_training, "nvfp4 2-D", False, True, False, sizes)


class Calls(Traffic):
    """Count the collectives, too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.sent.total()
        found = super().__torch_dispatch__(func, types, args, kwargs)
        self.calls[func._opname] += self.sent.total() > before
        return found


def run_amaxes() -> None:
    """One collective for all weights; a write makes the maxima invalid, by whatever name."""
    model = converted("fp8")
    quantized_all_gather(model)
    shard(model)
    x = torch.zeros(1, 32, dtype=torch.int64)
    model(x)
    saved = model.state_dict()["blocks.0.up.weight"]
    writes: dict[str, Any] = {
        "none": None,
        "detached": lambda p: p.detach().mul_(3),
        "local": lambda p: p.to_local().detach().mul_(3),
        "plain": lambda p: model.state_dict()["blocks.0.up.weight"].to_local().mul_(3),
        "saved before": lambda p: saved.to_local().mul_(3),
    }
    for kind, write in writes.items():
        with torch.no_grad():
            model.reshard()
            model.blocks[0].reshard()
            with Calls() as traffic:
                assert reduce_amaxes(model) == 4
            assert traffic.sent == {"all_reduce": 4 * 4}
            assert +traffic.calls == {"all_reduce": 1}
            if write is not None:
                write(model.blocks[0].up.weight)
            with Traffic() as traffic:
                model(x)
            assert traffic.sent["all_reduce"] == (0 if write is None else 4), kind


def test_maxima_are_reduced_once(ranks: Ranks) -> None:
    ranks.run(run_amaxes)


def run_state_dict() -> None:
    model = converted("nvfp4 2-D")
    before = {key: t.clone() for key, t in model.state_dict().items()}
    quantized_all_gather(model)
    shard(model)
    saved = model.state_dict()
    for key, tensor in saved.items():
        assert type(tensor.to_local()) is torch.Tensor, key
        assert torch.equal(whole(tensor), before[key])
    doubled = {key: t * 2 for key, t in saved.items()}
    model.load_state_dict(doubled)
    for key, tensor in model.state_dict().items():
        assert torch.equal(whole(tensor), before[key] * 2)
    loss_of(model, 0, 0).backward()


def test_a_state_dict_holds_plain_values(ranks: Ranks) -> None:
    ranks.run(run_state_dict)


def run_refused(rows: int, name: str) -> None:
    model = nn.Sequential(qtensor.Linear(128, rows, bias=False, recipe=recipe_of(name)))
    quantized_all_gather(model)
    fully_shard(model)(torch.randn(128, 128))


@pytest.mark.parametrize(
    ("rows", "name", "message"),
    [
        (96, "mxfp8", r"rank \d.*each shard must end at a block of 32 rows.*multiple of 64"),
        (384, "fp8_blockwise 2-D", r"rank \d.*a block of 128 rows.*multiple of 256"),
    ],
)
def test_shards_that_cannot_be_quantized_are_refused(
    ranks: Ranks, rows: int, name: str, message: str
) -> None:
    with pytest.raises(RankError, match=message):
        ranks.run(run_refused, rows, name)


def test_calls_that_cannot_work_are_refused() -> None:
    def refused(model: Any, match: str, recipe: Any = None) -> None:
        with pytest.raises(qtensor.QTensorError, match=match):
            quantized_all_gather(model, recipe)

    refused(nn.Linear(64, 64), "must have layers of qtensor")
    layer = nn.Sequential(qtensor.Linear(64, 64))
    refused(layer, "must have layers of qtensor")
    refused(layer, r"0\.weight.*from their shards", qtensor.recipes.DelayedScaling())
    recipe = qtensor.recipes.Float8CurrentScaling()
    layer[0].extra = nn.Module()
    layer[0].extra.weight = layer[0].weight
    refused(layer, r"0\.weight.*0\.extra shares", recipe)
    del layer[0].extra
    quantized_all_gather(layer, recipe)
    refused(layer, "a plain parameter.*got MasterWeight", recipe)


def test_a_weight_that_is_not_sharded_has_the_same_codes() -> None:
    """Without ``fully_shard`` the layer quantizes the values itself, and optimizers see them."""
    x, outputs = torch.randn(32, 64), []
    for quantized in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(qtensor.Linear(64, 64, recipe=qtensor.recipes.NVFP4BlockScaling()))
        if quantized:
            quantized_all_gather(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(1)
        for _ in range(2):
            y = model(x)
            y.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        outputs += [y.detach(), model.state_dict()["0.weight"]]
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[3])
    assert math.isfinite(float(outputs[0].sum()))


def run_modules(name: str) -> None:
    kinds: Any = {
        "norm": lambda **o: qtensor.LayerNormLinear(64, 128, **o),
        "mlp": lambda **o: qtensor.LayerNormMLP(64, 128, **o),
        "grouped": lambda **o: qtensor.GroupedLinear(2, 64, 128, **o),
    }
    for kind, make in kinds.items():
        results = []
        for quantized in (False, True):
            torch.manual_seed(0)
            model = nn.ModuleDict({"layer": make(recipe=recipe_of(name))})
            if quantized:
                assert len(quantized_all_gather(model)) == (1 if kind == "norm" else 2)
            fully_shard(model["layer"])
            torch.manual_seed(1 + dist.get_rank())
            x = torch.randn(64, 64, requires_grad=True)
            splits = ([32, 32],) if kind == "grouped" else ()
            y = model["layer"](x, *splits)
            y.square().sum().backward()
            gradients = [(n, whole(p.grad)) for n, p in model.named_parameters()]
            results.append([("y", y.detach()), ("dx", x.grad), *gradients])
        assert_equal(*results)


@pytest.mark.parametrize("name", ["fp8", "nvfp4 2-D"])
def test_every_kind_of_layer(ranks: Ranks, name: str) -> None:
    ranks.run(run_modules, name)
