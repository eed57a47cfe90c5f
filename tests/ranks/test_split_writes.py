"""Optimizer steps on quantized parameters that ranks split give the bytes of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from formats import assert_same_bytes
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, parallel
from torch_process import run_ranks

import qtensor
import qtensor.distributed

ROWS, COLUMNS, STEPS = 512, 256, 2
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8": ("fp8", {"columnwise": True}),
    "fp8_rowwise": ("fp8_rowwise", {"columnwise": True}),
    "fp8_blockwise": ("fp8_blockwise", {}),
    "mxfp8": ("mxfp8", {"columnwise": True}),
    "nvfp4": ("nvfp4", {"columnwise": True}),
}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "loop": lambda p: torch.optim.SGD(p, lr=0.5, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.5, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.5, fused=True),
}
RECIPES: dict[str, Callable[[], Any]] = {
    "current": qtensor.recipes.Float8CurrentScaling,
    "nvfp4": qtensor.recipes.NVFP4BlockScaling,
    "mxfp8": qtensor.recipes.MXFP8BlockScaling,
}


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    made = Ranks(tmp_path_factory.mktemp("four"), size=4)
    yield made
    made.stop()


def assert_equal(parameter: Any, one: Any, what: str) -> None:
    pairs = zip(parameter.full_tensor().detach().buffers(), one.detach().buffers(), strict=True)
    for i, (a, b) in enumerate(pairs):
        assert_same_bytes(a, b, f"{what}: buffer {i}")


def values(step: int) -> Tensor:
    """Return values whose maxima differ between any two halves."""
    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(step))
    return x * torch.linspace(1, 9, ROWS)[:, None] * torch.linspace(1, 5, COLUMNS)


def run_dtensor(name: str, dim: int | None, optimizer: str) -> None:
    kind, options = FORMATS[name]
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    place = [Replicate() if dim is None else Shard(dim)]
    q = qtensor.quantize(values(0), kind, **options)
    one, split = nn.Parameter(q.clone()), nn.Parameter(distribute_tensor(q, mesh, place))
    before = one.dequantize()
    steps = [OPTIMIZERS[optimizer]([p]) for p in (one, split)]
    for step in range(STEPS):
        gradient = values(step + 1)
        one.grad, split.grad = gradient, distribute_tensor(gradient, mesh, place)
        for each in steps:
            each.step()
        assert_equal(split, one, f"step {step}")
    assert not torch.equal(one.dequantize(), before)


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("dim", [0, 1, None], ids=["rows", "columns", "whole"])
@pytest.mark.parametrize("name", list(FORMATS))
def test_parts_are_written_as_the_whole(
    ranks: Ranks, name: str, dim: int | None, optimizer: str
) -> None:
    ranks.run(run_dtensor, name, dim, optimizer)


PROGRAM = """
import sys
import torch
import qtensor
from torch.distributed.tensor import Shard, distribute_tensor

rank, store, kind, more = int(sys.argv[1]), *sys.argv[2:]
exec(more)
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=2
)
mesh = torch.distributed.init_device_mesh("cpu", (2,))
x = torch.randn(64, 64) * torch.linspace(1, 9, 64)[:, None]
if kind == "torch":
    weight = distribute_tensor(qtensor.quantize(x, "fp8"), mesh, [Shard(0)])
elif kind == "quantize":
    weight = qtensor.quantize(distribute_tensor(x, mesh, [Shard(0)]), "fp8")
else:
    recipe = qtensor.recipes.Float8CurrentScaling()
    layer = qtensor.Linear(64, 64, quantized_params=True, recipe=recipe)
    layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    weight = layer.weight.detach()
weight = torch.nn.Parameter(weight)
weight.grad = distribute_tensor(x, mesh, [Shard(0)])
torch.optim.SGD([weight], lr=2.0).step()
print(weight.full_tensor().shape[0])
"""


def test_the_missing_import_is_named(tmp_path: Path) -> None:
    """torch tells the write to a part nothing of the whole: parts get factors of their own."""
    for rank in run_ranks(PROGRAM, tmp_path, "torch", ""):
        assert "tensor-wide factors; got other ones" in rank.stderr
        assert "equal after `import qtensor.distributed`" in rank.stderr


@pytest.mark.parametrize(
    ("kind", "more"), [("torch", "import qtensor.distributed"), ("quantize", ""), ("layer", "")]
)
def test_the_split_is_known(tmp_path: Path, kind: str, more: str) -> None:
    """By the import, or without it where code of ours has made the DTensor or holds it."""
    for rank in run_ranks(PROGRAM, tmp_path, kind, more):
        assert rank.stdout == "64\n", rank.stderr


def run_fused_sgd() -> str:
    """Return torch's error; an empty string if this version can step DTensors."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    q = qtensor.quantize(values(0), "fp8", columnwise=True)
    found = ""
    for t in (q, values(0)):
        split = nn.Parameter(distribute_tensor(t, mesh, [Shard(0)]))
        split.grad = distribute_tensor(values(1), mesh, [Shard(0)])
        try:
            torch.optim.SGD([split], lr=0.5, fused=True).step()
        except NotImplementedError as error:
            found += str(error)
    return found


def test_fused_sgd_of_shards_is_an_error_of_torch(ranks: Ranks) -> None:
    """Watches torch: docs/distributed.md names the limit, which plain parameters have, too."""
    for message in ranks.run(run_fused_sgd):
        assert message.count("aten._fused_sgd_.default") in (0, 2), message


def run_layer(recipe: str, shape: tuple[int, int], mode: str, kind: str, sharded: bool) -> None:
    """A parallel style splits a layer, and ``fully_shard`` its parts over the other mesh dim."""
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(COLUMNS, ROWS))
        qtensor.convert_(made, RECIPES[recipe](), quantized_params=True)
        if kind == "torch":
            plain = nn.Linear(COLUMNS, ROWS)
            plain.weight, plain.bias = made[0].weight, made[0].bias
            made = nn.Sequential(plain)
        return made

    one, split = make(), make()
    styles: Any = parallel if kind == "torch" else qtensor.distributed
    style = styles.ColwiseParallel() if mode == "column" else styles.RowwiseParallel()
    parallel.parallelize_module(split, mesh["tp"], {"0": style})
    if sharded:
        fully_shard(split, mesh=mesh["dp"])
    x = torch.randn(64, COLUMNS, generator=torch.Generator().manual_seed(7)) * 4
    if mode == "row":
        x = x.chunk(shape[1], 1)[mesh["tp"].get_local_rank()]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.5) for m in (one, split)]
    for step in range(STEPS):
        split(x).square().mean().backward()
        for p, q in zip(split.parameters(), one.parameters(), strict=True):
            q.grad = p.grad.full_tensor().detach().clone()
        for each in optimizers:
            each.step()
            each.zero_grad()
        assert_equal(split[0].weight, one[0].weight, f"step {step}")


modes = pytest.mark.parametrize("mode", ["column", "row"])
recipes = pytest.mark.parametrize("recipe", list(RECIPES))


@pytest.mark.parametrize(
    ("shape", "sharded"),
    [((1, 2), False), ((1, 2), True), ((2, 1), True)],
    ids=["style", "style and shards", "shards"],
)
@modes
@recipes
def test_layers_of_two_ranks(
    ranks: Ranks, recipe: str, mode: str, shape: tuple[int, int], sharded: bool
) -> None:
    ranks.run(run_layer, recipe, shape, mode, "own", sharded)


@modes
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_layers_of_torch(ranks: Ranks, recipe: str, mode: str) -> None:
    ranks.run(run_layer, recipe, (1, 2), mode, "torch", False)


@pytest.mark.nightly(reason="four processes; two ranks in test_layers_of_two_ranks")
@modes
@recipes
def test_layers_of_four_ranks(four_ranks: Ranks, recipe: str, mode: str) -> None:
    four_ranks.run(run_layer, recipe, (2, 2), mode, "own", True)
