"""Weights that are stored quantized, under ``fully_shard``: frozen and trained."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from formats import assert_same_tensor
from fsdp_cases import converted, loss_of, shard
from ranks import RankError, Ranks
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import qtensor
import qtensor.distributed

BOTH = {"columnwise": True}
WEIGHTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8": ("fp8", BOTH),
    "fp8_delayed": ("fp8_delayed", BOTH),
    "fp8_rowwise": ("fp8_rowwise", BOTH),
    "fp8_blockwise": ("fp8_blockwise", BOTH),
    "fp8_blockwise 2-D": ("fp8_blockwise", {**BOTH, "block_scaling_dim": 2}),
    "mxfp8": ("mxfp8", BOTH),
    "mxfp8 2-D": ("mxfp8", {**BOTH, "with_2d_quantization": True}),
    "mxfp8 rowwise": ("mxfp8", {}),
    "mxfp6": ("mxfp6", BOTH),
    "mxfp6 packed": ("mxfp6", {**BOTH, "packed": True}),
    "mxfp4": ("mxfp4", BOTH),
    "nvfp4": ("nvfp4", BOTH),
    "nvfp4 2-D": ("nvfp4", {**BOTH, "with_2d_quantization": True}),
    "nvfp4 rowwise": ("nvfp4", {}),
}
NO_FLAT_FORM: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8_rowwise rowwise": ("fp8_rowwise", {}),
    "fp8_blockwise rowwise": ("fp8_blockwise", {}),
    "mxfp8 padded": ("mxfp8", {}),
    "mxfp6 padded": ("mxfp6", {"packed": True}),
    "mxfp4 padded": ("mxfp4", {}),
    "mxfp4 swizzled": ("mxfp4", {"swizzled": True}),
    "nvfp4 padded": ("nvfp4", {}),
    "nvfp4 row_scaled": ("nvfp4", {"row_scaled": True}),
}
"""Rowwise data alone, whose factors a row are padded, swizzled, or belong to the row."""
WEIGHTS |= NO_FLAT_FORM


def layer(name: str, rows: int = 256) -> nn.Linear:
    """Return a layer with a frozen quantized weight and a plain bias."""
    fmt, options = WEIGHTS[name]
    torch.manual_seed(1)
    # 160 columns have 5 factors of MX and 10 of NVFP4, which are stored in 8 and 12.
    made = nn.Linear(160 if "padded" in name else 128, rows)
    call = {"scale": torch.tensor([3.0])} if fmt == "fp8_delayed" else {}
    quantized = qtensor.quantizer(fmt, **options)(made.weight.detach(), **call)
    made.weight = nn.Parameter(quantized, requires_grad=False)
    return made


def run_frozen(name: str, sizes: tuple[int, ...], rows: int) -> None:
    """The gathered weight has every byte of the weight, in two passes over the same memory."""
    made = layer(name, rows)
    kind, bytes_before = type(made.weight), [b.clone() for b in made.weight.buffers()]
    x, results = torch.randn(32, made.in_features), []
    seen: list[Any] = []
    made.register_forward_pre_hook(lambda m, _: seen.append(m.weight))
    for is_sharded in (False, True):
        model = nn.Sequential(made)
        if is_sharded:
            names = ("replicate", "shard")[-len(sizes) :]
            fully_shard(model, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names))
        for _ in range(2):
            inputs = x.clone().requires_grad_()
            y = model(inputs)
            if is_sharded:
                model.unshard()
            assert isinstance(seen[-1], kind)
            for ours, theirs in zip(seen[-1].buffers(), bytes_before, strict=True):
                assert torch.equal(ours, theirs)
            y.square().sum().backward()
            results.append([y.detach(), inputs.grad])
    for pair in results[1:]:
        for ours, theirs in zip(pair, results[0], strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("sizes", [(2,), (2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("name", WEIGHTS)
def test_frozen_weights_travel_as_bytes(ranks: Ranks, name: str, sizes: tuple[int, ...]) -> None:
    ranks.run(run_frozen, name, sizes, 256)


UNEVEN = ["fp8", "fp8_rowwise", "mxfp8 rowwise", "nvfp4 rowwise"]
UNEVEN += [name for name in NO_FLAT_FORM if "swizzled" not in name]


@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_shards_of_any_size(ranks: Ranks, name: str) -> None:
    ranks.run(run_frozen, name, (2,), 97)


@pytest.mark.parametrize("name", WEIGHTS)
def test_uneven_shards_that_end_at_blocks(ranks: Ranks, name: str) -> None:
    """The first shard has 128 rows, a multiple of every block, and the second one has 127."""
    ranks.run(run_frozen, name, (2,), 255)


@pytest.mark.nightly(reason="three processes; two ranks are in the default tier")
@pytest.mark.parametrize("name", WEIGHTS)
def test_uneven_shards_of_three_ranks(three_ranks: Ranks, name: str) -> None:
    three_ranks.run(run_frozen, name, (3,), 382)


def run_cut(name: str, rows: int) -> None:
    fully_shard(nn.Sequential(layer(name, rows)))


@pytest.mark.parametrize(
    ("name", "rows", "block"),
    [("mxfp8", 96, 32), ("fp8_blockwise 2-D", 384, 128), ("nvfp4", 16, 16)],
)
def test_shards_that_cut_a_block_are_refused(
    ranks: Ranks, name: str, rows: int, block: int
) -> None:
    wanted = rf"rank \d of 2.*Shard\(0\) over n ranks.*multiple of {block}\."
    with pytest.raises(RankError, match=wanted):
        ranks.run(run_cut, name, rows)


def run_columns(stored: bool) -> str:
    """Shards of columns are refused before anything travels."""
    recipe = qtensor.recipes.MXFP8BlockScaling()
    made: Any = layer("mxfp8")
    if not stored:
        made = qtensor.Linear(128, 128, bias=False, recipe=recipe)
    model = nn.Sequential(made)
    if not stored:
        qtensor.distributed.quantized_all_gather(model)
    fully_shard(model, shard_placement_fn=lambda p: Shard(1) if p.ndim > 1 else None)
    with pytest.raises(qtensor.UnsupportedError) as raised:
        model(torch.randn(32, 128))
    return str(raised.value)


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "gathered"])
def test_shards_of_columns_are_refused(ranks: Ranks, stored: bool) -> None:
    for rank, message in enumerate(ranks.run(run_columns, stored)):
        name = "" if stored else "0.weight: "  # quantized_all_gather has seen the model
        assert message.startswith(f"{name}fully_shard[mxfp8] (rank {rank} of 2)"), message
        assert "got Shard(1)" in message


def run_different() -> None:
    """One rank alone has another format: every rank raises."""
    made = layer("mxfp8" if dist.get_rank() else "mxfp8 rowwise")
    model = fully_shard(nn.Sequential(made))
    with pytest.raises(qtensor.QTensorError, match=rf"alike.*rank {dist.get_rank()}"):
        model(torch.randn(32, 128))


def test_ranks_with_different_formats_raise_on_every_rank(ranks: Ranks) -> None:
    ranks.run(run_different)


def run_slices(name: str) -> None:
    """A write to some rows of a shard changes no other row, and waits for no other rank."""
    model = fully_shard(layer(name))
    model(torch.randn(2, 128))
    model.reshard()
    shard_of_rank = model.weight._local_tensor
    before = shard_of_rank.dequantize()
    if dist.get_rank() == 0:
        shard_of_rank[:64].copy_(100 * torch.randn(64, 128))
        assert not torch.equal(shard_of_rank.dequantize()[:64], before[:64])
    assert torch.equal(shard_of_rank.dequantize()[64:], before[64:])


@pytest.mark.parametrize("name", ["fp8", "fp8_delayed", "nvfp4", "nvfp4 rowwise", "mxfp8"])
def test_a_write_to_a_slice_of_a_shard(ranks: Ranks, name: str) -> None:
    ranks.run(run_slices, name)


def run_factors() -> None:
    """Each rank wrote its shard with factors of its own before the first forward."""
    made = layer("fp8")
    model = fully_shard(nn.Sequential(made))
    made.weight.detach().to_local().copy_(torch.randn(128, 128) * (1 + dist.get_rank()))
    wanted = r"fully_shard\[fp8\]: all ranks must have .*tensor-wide factors"
    with pytest.raises(qtensor.QTensorError, match=wanted):
        model(torch.randn(32, 128))


def test_shards_with_different_factors_raise_on_every_rank(ranks: Ranks) -> None:
    ranks.run(run_factors)


# ---- trained -------------------------------------------------------------------------------------


def run_trained(recipe: str, mixed: bool) -> None:
    """Bytes of the weights after each step equal those of one process with two replicas."""
    dtype = torch.bfloat16 if mixed else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model = shard(
        converted(recipe, quantized_params=True), **({"mp_policy": policy} if mixed else {})
    )
    replicas = [converted(recipe, quantized_params=True) for _ in range(2)]
    everyone = [model, *replicas]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in everyone]
    rank = dist.get_rank()
    for step in range(2):
        loss = loss_of(model, step, rank)
        loss.backward()
        if not mixed:
            losses = [loss_of(replica, step, r) for r, replica in enumerate(replicas)]
            for own in losses:
                own.backward()
            assert torch.equal(loss, losses[rank])
            for a, b in zip(*[r.parameters() for r in replicas], strict=True):
                a.grad = (a.grad + b.grad) / 2
                b.grad = a.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if mixed:
        assert torch.isfinite(loss_of(model, 2, rank))
        return
    model.unshard()
    for block in model.blocks:
        block.unshard()
    compared = 0
    for (name, ours), theirs in zip(
        model.named_parameters(), replicas[0].parameters(), strict=True
    ):
        if isinstance(theirs, qtensor.QuantizedTensor):
            pairs = zip(ours.buffers(), theirs.buffers(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), name
            compared += 1
    assert compared == 5


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8", "nvfp4"])
def test_quantized_weights_are_trained(ranks: Ranks, recipe: str, mixed: bool) -> None:
    ranks.run(run_trained, recipe, mixed)


def run_rowwise(name: str, rows: int, compiled: bool) -> None:
    """Train a stored weight, save the shards, and load them into another model."""
    model, *replicas = [layer(name, rows) for _ in range(3)]
    everyone = [nn.Sequential(model), *replicas]
    for each in everyone:
        each.requires_grad_()
    sharded = fully_shard(everyone[0])
    call = torch.compile(sharded, backend="aot_eager") if compiled else sharded
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in everyone]
    rank = dist.get_rank()
    for step in range(2):
        torch.manual_seed(step)
        batches = torch.randn(2, 32, model.in_features)
        outputs = [replica(x) for replica, x in zip(replicas, batches, strict=True)]
        ours = call(batches[rank])
        assert torch.equal(ours, outputs[rank])
        for y in (ours, *outputs):
            y.square().sum().backward()
        for a, b in zip(*[r.parameters() for r in replicas], strict=True):
            a.grad = (a.grad + b.grad) / 2
            b.grad = a.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    other = fully_shard(nn.Sequential(layer(name, rows)))
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        checkpoint.save(sharded.state_dict(), checkpoint_id=folder[0])
        loaded = other.state_dict()
        checkpoint.load(loaded, checkpoint_id=folder[0])
        dist.barrier()
    other.load_state_dict(loaded)
    for restored in (sharded, other):
        whole = restored.state_dict()["0.weight"].full_tensor().clone()
        assert_same_tensor(whole, replicas[0].weight.detach())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("rows", [255, 256])
@pytest.mark.parametrize("name", NO_FLAT_FORM)
def test_rowwise_weights_are_trained_and_saved(
    ranks: Ranks, name: str, rows: int, compiled: bool
) -> None:
    ranks.run(run_rowwise, name, rows, compiled)
