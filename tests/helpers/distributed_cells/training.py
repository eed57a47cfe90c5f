"""Training: data parallel, FSDP2, and what a checkpoint resumes."""

from __future__ import annotations

import contextlib
import copy
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import qtensor
import qtensor.distributed
from distributed_cells.base import (
    ROWS,
    SIZE,
    WITH_SQUARE_BLOCKS,
    Cell,
    K,
    part,
    same,
    spread,
    values,
    whole,
)
from qtensor import QTensorError, recipes

Named = list[tuple[str, Any]]


def layers(**options: Any) -> nn.Module:
    """Return two layers with 256 rows, from a fixed seed."""
    torch.manual_seed(0)
    kind = qtensor.Linear if options else nn.Linear
    return nn.Sequential(kind(128, ROWS, **options), nn.ReLU(), kind(ROWS, ROWS, **options))


def model(cell: Cell, stored: bool = False) -> nn.Module:
    """Return a model with one block of two layers, which is compiled if the mode asks for it."""
    made = layers()
    qtensor.convert_(made, cell.recipe(), quantized_params=stored)
    return nn.Sequential(cell.compile_(made))


def backward(call: nn.Module, step: int, rank: int) -> Tensor:
    g = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(64, 128, generator=g) * (1 + 3 * rank)
    torch.manual_seed(1000 + 100 * step + rank)  # of stochastic rounding
    loss = call(x).square().mean()
    loss.backward()
    return loss.detach()


def parameters(trained: nn.Module) -> Named:
    return [(name, whole(p)) for name, p in trained.named_parameters()]


def optimizer_of(trained: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained.parameters(), lr=0.01)


def train(run: nn.Module, steps: int = 2) -> Named:
    optimizer, results = optimizer_of(run), []
    for step in range(steps):
        results.append(("loss", backward(run, step, dist.get_rank())))
        optimizer.step()
        optimizer.zero_grad()
    return results + parameters(run)


def train_alone(make: Callable[[], nn.Module], steps: int = 2) -> Named:
    """Return what ``train`` must return: one process with two replicas and averaged gradients."""
    replicas, results = [make() for _ in range(SIZE)], []
    optimizers = [optimizer_of(replica) for replica in replicas]
    for step in range(steps):
        losses = [backward(replica, step, rank) for rank, replica in enumerate(replicas)]
        results.append(("loss", losses[dist.get_rank()]))
        for a, b in zip(*[r.parameters() for r in replicas], strict=True):
            if a.grad is not None:
                a.grad = (a.grad + b.grad) / 2
                b.grad = a.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return results + parameters(replicas[dist.get_rank()])


def same_training(ours: Named, theirs: Named) -> None:
    for (name, a), (_, b) in zip(ours, theirs, strict=True):
        same(a, b, name)


def replicated(made: nn.Module) -> nn.Module:
    """Return a model with quantized weights under DDP."""
    qtensor.distributed.broadcast_parameters(made)
    return DistributedDataParallel(made, init_sync=False)


def ddp(stored: bool) -> Callable[[Cell], None]:
    def run(cell: Cell) -> None:
        wrap = replicated if stored else DistributedDataParallel
        ours = train(wrap(model(cell, stored)))
        same_training(ours, train_alone(lambda: model(cell, stored)))

    return run


def shard(made: Any, **options: Any) -> Any:
    fully_shard(made[0], **options)
    return fully_shard(made, **options)


def fsdp(stored: bool) -> Callable[[Cell], None]:
    def run(cell: Cell) -> None:
        ours = train(shard(model(cell, stored)))
        same_training(ours, train_alone(lambda: model(cell, stored)))

    return run


def fsdp_gather(cell: Cell) -> None:
    made = model(cell)
    qtensor.distributed.quantized_all_gather(made)
    same_training(train(shard(made)), train_alone(lambda: model(cell)))


def _format_recipe(cell: Cell) -> Any:
    weight = qtensor.quantizer(cell.column, **WITH_SQUARE_BLOCKS.get(cell.column, {}))
    other = "fp8" if cell.column == "fp8_delayed" else cell.column
    quantizers = {"weight": weight}
    return recipes.CustomRecipe(
        factory=lambda r: quantizers.get(r.tensor, qtensor.quantizer(other))
    )


def fsdp_gather_format(cell: Cell) -> None:
    """Weights in high precision; codes of square blocks travel where the format has them."""

    def make() -> nn.Module:
        made = layers()
        qtensor.convert_(made, _format_recipe(cell))
        return nn.Sequential(cell.compile_(made))

    made = make()
    qtensor.distributed.quantized_all_gather(made)
    same_training(train(shard(made)), train_alone(make))


def frozen(cell: Cell) -> nn.Module:
    """Return a layer of torch with a frozen quantized weight and a trained bias."""
    made = nn.Linear(K, ROWS)
    made.weight = nn.Parameter(cell.weight(), requires_grad=False)
    made.bias.data.fill_(0.5)
    return made


def run_frozen(cell: Cell, wrap: Callable[[nn.Module], nn.Module]) -> None:
    x, results = values(64, K), []
    seen: list[type] = []
    for is_wrapped in (False, True):
        layer = frozen(cell)
        layer.register_forward_pre_hook(lambda m, _: seen.append(type(m.weight)))
        made: nn.Module = nn.Sequential(cell.compile_(layer))
        made = wrap(made) if is_wrapped else made
        inputs = x.clone().requires_grad_()
        y = made(inputs)
        y.square().sum().backward()
        bias = next(p for name, p in made.named_parameters() if name.endswith("bias"))
        results.append([y.detach(), inputs.grad, whole(bias.grad)])
    assert len({type(cell.weight()), *seen}) == 1, f"weights of {seen} were used"
    for what, a, b in zip(("output", "gradient of the input", "of bias"), *results, strict=True):
        same(b, a, what)


def fsdp_frozen(cell: Cell) -> None:
    run_frozen(cell, fully_shard)


def ddp_frozen(cell: Cell) -> None:
    run_frozen(cell, replicated)


# ---- checkpoints ---------------------------------------------------------------------------------


def shared_folder() -> Any:
    """Return a folder that all ranks see; it is removed with the object that rank 0 holds."""
    own = tempfile.TemporaryDirectory() if dist.get_rank() == 0 else None
    names = [own.name if own else None]
    dist.broadcast_object_list(names, 0)
    return own, names[0]


def quietly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return function(*args, **kwargs)
        except Exception as error:
            # torch wraps the errors of all ranks in one of its own.
            inner = [
                e[0] if isinstance(e, tuple) else e for e in getattr(error, "failures", {}).values()
            ]
            refused = [e for e in inner if isinstance(e, QTensorError)]
            raise (refused[0] if refused else error) from error


def checkpoint(before: Any, after: Any) -> Callable[[Cell], None]:
    def run(cell: Cell) -> None:
        import torch.distributed.checkpoint as dcp  # noqa: PLC0415 - warns, and takes a second

        keep, folder = shared_folder()
        quietly(dcp.save, {"w": spread(cell.weight(), before)}, checkpoint_id=folder)
        template = spread(cell.tensor(1), after)
        quietly(dcp.load, {"w": template}, checkpoint_id=folder)
        same(template.to_local(), part(cell.weight(), after))
        same(template.full_tensor(), cell.weight())
        dist.barrier()
        del keep

    return run


KEPT = {
    "dcp": "`dcp.load`",
    "async": "`async_save`",
    "full": "`full_state_dict=True`",
}
"""How a state is kept: in files of a distributed checkpoint, or in full state dicts."""


def resume(stored: bool, reduced: bool, way: str = "dcp") -> Callable[[Cell], None]:
    """Compare the step after a load with the step that would have come.

    Args:
        stored: weights are stored quantized.
        reduced: maxima of delayed scaling are reduced over the ranks.
        way: one of ``KEPT``.
    """

    def region(cell: Cell) -> Any:
        if not reduced:
            return contextlib.nullcontext()
        return qtensor.autocast(recipe=cell.recipe(), amax_reduction_group=dist.group.WORLD)

    def run(cell: Cell) -> None:
        rank, results = dist.get_rank(), []
        keep, folder = shared_folder()
        kept: Any = None
        for number in range(2):
            made = shard(model(cell, stored))
            optimizer = optimizer_of(made)
            if number == 0:
                with region(cell):
                    backward(made, 0, rank)
                optimizer.step()
                optimizer.zero_grad()
            with region(cell), torch.no_grad():
                if number == 0:
                    kept = keep_state(way, folder, made, optimizer)
                else:
                    give_state(way, folder, made, optimizer, kept)
            with region(cell):
                loss = backward(made, 1, rank)
            optimizer.step()
            results.append([("loss", loss), *parameters(made)])
            if number == 0 and way == "async":
                getattr(kept, "upload_completion", kept).result()
                dist.barrier()
        same_training(results[1], results[0])
        dist.barrier()
        del keep

    return run


def keep_state(way: str, folder: str, made: nn.Module, optimizer: Any) -> Any:
    """Save model and optimizer, and return what ``give_state`` needs."""
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415 - warns, and takes a second
    from torch.distributed.checkpoint.state_dict import (  # noqa: PLC0415
        StateDictOptions,
        get_state_dict,
    )

    if way == "full":
        options = StateDictOptions(full_state_dict=True)
        return copy.deepcopy(get_state_dict(made, optimizer, options=options))
    state = dict(zip(("model", "optimizer"), get_state_dict(made, optimizer), strict=True))
    if way == "async":
        # A thread saves, whose collectives must not mix with those of the next step.
        group = dist.new_group()
        options = {"process_group": group, "async_stager": qtensor.distributed.Stager()}
        return quietly(dcp.async_save, state, checkpoint_id=folder, **options)
    return quietly(dcp.save, state, checkpoint_id=folder)


def give_state(way: str, folder: str, made: nn.Module, optimizer: Any, kept: Any) -> None:
    """Load what ``keep_state`` saved."""
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415 - warns, and takes a second
    from torch.distributed.checkpoint.state_dict import (  # noqa: PLC0415
        StateDictOptions,
        get_state_dict,
        set_state_dict,
    )

    options = None
    if way == "full":
        weights, moments = kept
        options = StateDictOptions(full_state_dict=True)
    else:
        weights, moments = get_state_dict(made, optimizer)
        quietly(dcp.load, {"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(
        made, optimizer, model_state_dict=weights, optim_state_dict=moments, options=options
    )
