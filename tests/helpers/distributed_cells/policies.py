"""The options of ``fully_shard``, and what a training does beside it: the bytes of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import qtensor
import qtensor.distributed
from distributed_cells.base import ROWS, SIZE, Cell, same, values, whole
from distributed_cells.training import (
    Named,
    backward,
    layers,
    optimizer_of,
    parameters,
    same_training,
    shard,
)

PLAIN, STORED, GATHERED = "plain", "stored", "gathered"
KINDS = {PLAIN: "", STORED: ", `quantized_params`", GATHERED: ", quantized all-gather"}
"""How the weights of a model are kept and travel."""

Optimizer = Callable[[nn.Module], torch.optim.Optimizer]
STEPS = 2


@dataclass(frozen=True)
class Way:
    """How a model is trained.

    Attributes:
        optimizer: makes the optimizer of a model.
        micro: batches of a step; only the last one reduces the gradients.
        norm: the norm to which gradients are clipped, 0 for no clipping.
        dtype: dtype of the products; gradients are reduced in float32.
        prepare: changes the model before it is compiled and sharded, as the oracle's.
        options: arguments of ``fully_shard``.
    """

    optimizer: Optimizer = optimizer_of
    micro: int = 1
    norm: float = 0.0
    dtype: torch.dtype | None = None
    prepare: Callable[[nn.Module], None] = lambda _: None
    options: Callable[[], dict[str, Any]] = field(default=dict)


def make(cell: Cell, kind: str, way: Way) -> nn.Module:
    """Return a model that is not sharded."""
    made = layers()
    qtensor.convert_(made, cell.recipe(), quantized_params=kind == STORED)
    way.prepare(made)
    return nn.Sequential(cell.compile_(made))


def sharded(cell: Cell, kind: str, way: Way) -> Any:
    """Return the model of ``make``, sharded in the way's options."""
    made = make(cell, kind, way)
    if kind == GATHERED:
        qtensor.distributed.quantized_all_gather(made)
    options = way.options()
    if way.dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=way.dtype, reduce_dtype=torch.float32)
        options["mp_policy"] = policy
    return shard(made, **options)


def kept(run: nn.Module) -> Named:
    """Return the weights of a model as plain or quantized tensors.

    ``full_tensor`` of a weight in high precision that travels as codes keeps its class on a mesh
    with one shard; a state dict holds plain values.
    """
    state = run.state_dict()
    names = [n.replace("_checkpoint_wrapped_module.", "") for n, _ in run.named_parameters()]
    return [(name, whole(state[name])) for name in names]


def steps(run: Any, way: Way) -> tuple[Named, list[Any]]:
    """Train; return losses and parameters of each step, and the norms of the gradients."""
    optimizer, results, norms = way.optimizer(run), Named(), []
    for step in range(STEPS):
        for i in range(way.micro):
            if way.micro > 1:
                run.set_requires_gradient_sync(i == way.micro - 1)
            results.append(("loss", backward(run, way.micro * step + i, dist.get_rank())))
        if way.norm:
            norm = nn.utils.clip_grad_norm_(run.parameters(), way.norm)
            assert norm.full_tensor() > way.norm
            norms.append(whole(norm))
        optimizer.step()
        optimizer.zero_grad()
        results += kept(run)
    return results, norms


def steps_alone(build: Callable[[], nn.Module], way: Way, norms: list[Any]) -> Named:
    """Return what ``steps`` must return: one process with a replica for each rank.

    Each replica computes with a copy in ``way.dtype``, and takes its gradients in float32.
    """
    replicas, results = [build() for _ in range(SIZE)], Named()
    copies = replicas
    if way.dtype is not None:
        copies = [copy.deepcopy(replica).to(way.dtype) for replica in replicas]
    optimizers = [way.optimizer(replica) for replica in replicas]
    for step in range(STEPS):
        for rank, run in enumerate(copies):
            for i in range(way.micro):
                call = run if way.dtype is None else (lambda x, run=run: run(x.to(way.dtype)))
                loss = backward(call, way.micro * step + i, rank)
                if rank == dist.get_rank():
                    results.append(("loss", loss))
        squares = torch.zeros((), dtype=torch.float64)
        for group in zip(*[m.parameters() for m in (*copies, *replicas)], strict=True):
            mean = (group[0].grad.float() + group[1].grad.float()) / 2
            squares += mean.double().square().sum()
            for p in group:
                p.grad = None
            for p in group[SIZE:]:
                p.grad = mean.clone()
        for replica, optimizer in zip(replicas, optimizers, strict=True):
            if norms:
                # The ranks sum the squares of their parts: another order of fewer than 2**17
                # float32 additions. Both are then divided by the same norm.
                assert abs(float(norms[step]) / float(squares.sqrt()) - 1) < 2**17 * 2**-24
                nn.utils.clip_grads_with_norm_(replica.parameters(), way.norm, norms[step])
            optimizer.step()
            optimizer.zero_grad()
        if way.dtype is not None:
            for run, replica in zip(copies, replicas, strict=True):
                with torch.no_grad():
                    for a, b in zip(run.parameters(), replica.parameters(), strict=True):
                        a.copy_(b)
        results += parameters(replicas[dist.get_rank()])
    return results


def trains(kind: str, way: Way) -> Callable[[Cell], None]:
    """Return the cell of a training under ``fully_shard``."""

    def run(cell: Cell) -> None:
        ours, norms = steps(sharded(cell, kind, way), way)
        same_training(ours, steps_alone(lambda: make(cell, kind, way), way, norms))

    return run


def mesh_of(*sizes: int) -> Callable[[], dict[str, Any]]:
    """Return the options of a mesh of (replicate, shard)."""
    names = ("replicate", "shard")
    return lambda: {"mesh": init_device_mesh("cpu", sizes, mesh_dim_names=names)}


def checkpointed(made: nn.Module) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (  # noqa: PLC0415
        apply_activation_checkpointing,
    )

    apply_activation_checkpointing(made, check_fn=lambda m: isinstance(m, nn.Linear))


WAYS: dict[str, Way] = {
    "`MixedPrecisionPolicy`": Way(dtype=torch.bfloat16),
    "`CPUOffloadPolicy`": Way(
        options=lambda: {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    ),
    "mesh of 2 replicas x 1 shard": Way(options=mesh_of(2, 1)),
    "mesh of 1 replica x 2 shards": Way(options=mesh_of(1, 2)),
    "activation checkpointing": Way(prepare=checkpointed),
    "accumulation, `clip_grad_norm_`": Way(micro=2, norm=1e-3),
    "`reshard_after_forward=False`": Way(options=lambda: {"reshard_after_forward": False}),
}


# ---- optimizers ----------------------------------------------------------------------------------


def _adamw(**options: Any) -> Optimizer:
    return lambda run: torch.optim.AdamW(run.parameters(), lr=0.01, **options)


def _sgd(run: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(run.parameters(), lr=0.1, momentum=0.9, foreach=True)


def _small_state(run: nn.Module) -> torch.optim.Optimizer:
    """AdamW whose averages are stored quantized.

    ``mxfp8`` quantizes each row by itself, so that a shard has the codes of the whole.
    """
    optimizer = torch.optim.AdamW(run.parameters(), lr=0.01)
    averages = {"exp_avg": "mxfp8", "exp_avg_sq": "mxfp8"}
    qtensor.optim.quantize_state_(optimizer, averages, min_numel=1024)
    return optimizer


OPTIMIZERS: dict[str, Optimizer] = {
    "`AdamW(foreach=True)`": _adamw(foreach=True),
    "`AdamW(fused=True)`": _adamw(fused=True),
    "`SGD(foreach=True)` with momentum": _sgd,
    "AdamW, state in `mxfp8`": _small_state,
}


# ---- parameters on the meta device, averages, adapters -------------------------------------------


def meta(kind: str) -> Callable[[Cell], None]:
    """Return the cell of a model that gets memory and values after it was sharded."""

    def run(cell: Cell) -> None:
        with torch.device("meta"):
            made = make(cell, kind, Way())
        if kind == GATHERED:
            qtensor.distributed.quantized_all_gather(made)
        shard(made).to_empty(device="cpu")
        torch.manual_seed(dist.get_rank())  # the first rank decides
        for module in made.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        torch.manual_seed(0)
        first = layers_in_order()
        for ours, theirs in zip(made.parameters(), first, strict=True):
            same(whole(ours), theirs.detach(), "first values")

        def alone() -> nn.Module:
            one = make(cell, PLAIN, Way())
            with torch.no_grad():
                for ours, theirs in zip(one.parameters(), first, strict=True):
                    ours.copy_(theirs)
            return one

        ours, _ = steps(made, Way())
        same_training(ours, steps_alone(alone, Way(), []))

    return run


def layers_in_order() -> list[nn.Parameter]:
    """Return the parameters of two new layers, drawn from the current random state."""
    made = [nn.Linear(128, ROWS), nn.Linear(ROWS, ROWS)]
    return [p for layer in made for p in layer.parameters()]


def averages(kind: str) -> Callable[[Cell], None]:
    """Return the cell of ``AveragedModel`` with an exponential average, and its forward."""

    def run(cell: Cell) -> None:
        from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn  # noqa: PLC0415

        results = []
        for is_sharded in (True, False):
            made = make(cell, kind, Way())
            if is_sharded and kind == GATHERED:
                qtensor.distributed.quantized_all_gather(made)
            average = AveragedModel(made, multi_avg_fn=get_ema_multi_avg_fn(0.5))
            if is_sharded:
                shard(made)
                shard(average.module)
            optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
            for step in range(STEPS):
                backward(made, step, 0)  # equal batches: the mean of two is each of them
                optimizer.step()
                optimizer.zero_grad()
                average.update_parameters(made)
            torch.manual_seed(5)
            with torch.no_grad():
                output = average(values(64, 128))
            results.append([*kept(average.module), ("output", output)])
        same_training(*results)

    return run


class Adapted(nn.Module):
    """A frozen layer with a quantized weight, and a trained product of low rank beside it."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(8, columns)), nn.Parameter(torch.zeros(rows, 8))

    def forward(self, x: Any) -> Any:
        return nn.functional.linear(x, self.weight) + x @ self.a.t() @ self.b.t()


def adapters(cell: Cell) -> None:
    """Two steps of the adapters of frozen weights in the cell's format."""
    results = []
    for is_sharded in (True, False):
        torch.manual_seed(0)
        first, second = (Adapted(cell.quantize(values(ROWS, n))) for n in (128, ROWS))
        seen: set[type] = {type(first.weight)}
        made = nn.Sequential(cell.compile_(nn.Sequential(first, nn.ReLU(), second)))
        if is_sharded:
            for layer in (first, second):
                layer.register_forward_pre_hook(lambda m, _, seen=seen: seen.add(type(m.weight)))
            shard(made)
        trained = [p for p in made.parameters() if p.requires_grad]
        optimizer, found = torch.optim.AdamW(trained, lr=0.01), Named()
        for step in range(STEPS):
            found.append(("loss", backward(made, step, 0)))
            optimizer.step()
            optimizer.zero_grad()
        results.append([*found, *parameters(made)])
        assert len(seen) == 1, f"weights of {seen} were used"
    same_training(*results)


def parametrized(cell: Cell) -> None:
    """A parametrization that adds a trained product of low rank to a frozen quantized weight."""
    from torch.nn.utils import parametrize  # noqa: PLC0415

    results = []
    for is_sharded in (True, False):
        torch.manual_seed(0)
        layer = nn.Linear(128, ROWS)
        weight = cell.quantize(values(ROWS, 128))
        layer.weight = nn.Parameter(weight, requires_grad=False)
        parametrize.register_parametrization(layer, "weight", Added(ROWS, 128))
        made: nn.Module = nn.Sequential(layer)
        if is_sharded:
            fully_shard(made)
        run = cell.run(lambda x, made=made: made(x), whole=False)
        loss = backward(run, 0, 0)
        trained = [(n, p) for n, p in made.named_parameters() if p.requires_grad]
        assert len(trained) == 3
        results.append([("loss", loss), *[(n, whole(p.grad)) for n, p in trained]])
    same_training(*results)


class Added(nn.Module):
    """The sum of a weight and a product of low rank."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(*s)) for s in ((4, columns), (rows, 4)))

    def forward(self, weight: Any) -> Any:
        return weight + self.b @ self.a


AROUND: dict[str, Callable[[str], Callable[[Cell], None]]] = {
    **{
        name: lambda kind, optimizer=optimizer: trains(kind, Way(optimizer=optimizer))
        for name, optimizer in OPTIMIZERS.items()
    },
    "parameters on the meta device": meta,
    "`AveragedModel`, exponential average": averages,
}
"""What runs beside the model, between its graphs."""
