"""The cells of docs/distributed_matrix.md: what each of two ranks runs and checks.

A cell is one feature with one format or recipe, in eager mode or under aot_eager. It raises if a
result differs from that of one process, in any byte.
"""

from __future__ import annotations

import functools
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, parallel
from torch.nn.parallel import DistributedDataParallel

import qtensor
import qtensor.distributed
from qtensor import QTensorError, QuantizedTensor, recipes

SIZE = 2
ROWS = K = 256
"""Half of each is whole blocks of every format."""

FORMATS = qtensor.formats()
RECIPES: dict[str, Callable[[], Any]] = {
    "Float8CurrentScaling": recipes.Float8CurrentScaling,
    "DelayedScaling": lambda: recipes.DelayedScaling(amax_history_len=4),
    "Float8BlockScaling": recipes.Float8BlockScaling,
    "MXFP8BlockScaling": recipes.MXFP8BlockScaling,
    "NVFP4BlockScaling": recipes.NVFP4BlockScaling,
    "CustomRecipe (MXFP6, MXFP4)": lambda: recipes.CustomRecipe(factory=_mixed),
}
MODES = ("eager", "aot_eager")
WITH_SQUARE_BLOCKS = {
    "fp8_blockwise": {"block_scaling_dim": 2},
    "mxfp8": {"with_2d_quantization": True},
    "mxfp6": {"with_2d_quantization": True, "packed": True},
    "mxfp4": {"with_2d_quantization": True},
    "nvfp4": {"with_2d_quantization": True},
}


def _mixed(role: recipes.Role) -> str:
    return {"weight": "mxfp4"}.get(role.tensor, "mxfp6")


@dataclass(frozen=True)
class Cell:
    """The format or recipe of a cell, and its mode."""

    column: str
    mode: str

    def quantize(self, x: Tensor) -> Any:
        """Quantize in both directions."""
        call = {"scale": torch.tensor([32.0])} if self.column == "fp8_delayed" else {}
        return qtensor.quantize(x, self.column, columnwise=True, **call)

    def tensor(self, seed: int) -> Any:
        """Return a quantized (256, 256) tensor whose tensor-wide factor is that of all seeds."""
        x = torch.randn(ROWS, K, generator=torch.Generator().manual_seed(seed))
        x[0] = x[:, 0] = 8.0
        return self.quantize(x)

    def weight(self) -> Any:
        """Return a quantized (256, 256) tensor whose halves have maxima of different size."""
        return self.quantize(values())

    def recipe(self, *, random: bool = True) -> Any:
        if self.column.startswith("NVFP4") and not random:
            return recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)
        return RECIPES[self.column]()

    def run(self, function: Callable[..., Any], whole: bool = True) -> Callable[..., Any]:
        """Return the function, compiled in one piece (or in several) if the mode asks for it."""
        if self.mode == "eager":
            return function
        torch._dynamo.reset()
        return torch.compile(function, backend=self.mode, fullgraph=whole)

    def compile_(self, module: nn.Module) -> nn.Module:
        if self.mode != "eager":
            module.compile(backend=self.mode, fullgraph=True)
        return module


def values(*shape: int) -> Tensor:
    """Return values whose halves have maxima of different size along each dim."""
    x = torch.randn(*(shape or (ROWS, K)), generator=torch.Generator().manual_seed(3)) / 16
    x[: x.shape[0] // 2] *= 3
    x[..., : x.shape[-1] // 2] *= 7
    return x


def mesh() -> Any:
    return init_device_mesh("cpu", (SIZE,))


def same(got: Any, want: Any, what: str = "values") -> None:
    """Assert equal classes, dtypes, shapes and bytes.

    Raises:
        AssertionError: they differ; a quantized tensor that became a plain one is named so.
    """
    if isinstance(got, functional.AsyncCollectiveTensor):
        got = got.wait()
    if type(got) is not type(want):
        raise AssertionError(f"{what}: {type(got).__name__} instead of {type(want).__name__}")
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        raise AssertionError(f"{what}: {tuple(got.shape)} {got.dtype}, wanted {tuple(want.shape)}")
    if not isinstance(want, QuantizedTensor):
        if not torch.equal(got.detach().nan_to_num(), want.detach().nan_to_num()):
            raise AssertionError(f"{what}: {int((got != want).sum())} of {got.numel()} differ")
        return
    if got.quantizer != want.quantizer:
        raise AssertionError(f"{what}: {got.quantizer} instead of {want.quantizer}")
    for number, (a, b) in enumerate(zip(got.buffers(), want.buffers(), strict=True)):
        same(a.view(torch.uint8), b.view(torch.uint8), f"{what}: buffer {number}")


# ---- collectives ---------------------------------------------------------------------------------


def emptied(like: Any) -> Any:
    out = torch.empty_like(like)
    for buffer in out.buffers():
        buffer.fill_(3)
    return out


def gathered(cell: Cell) -> Any:
    return torch.cat([cell.tensor(rank) for rank in range(SIZE)])


def exchanged(cell: Cell) -> Any:
    rank, half = dist.get_rank(), ROWS // SIZE
    parts = [cell.tensor(r)[rank * half : (rank + 1) * half].clone() for r in range(SIZE)]
    return torch.cat(parts)


def broadcast(cell: Cell) -> None:
    q = cell.tensor(1) if dist.get_rank() == 1 else emptied(cell.tensor(1))

    def call(q: Any) -> Any:
        dist.broadcast(q, 1)
        return q

    same(cell.run(call, whole=False)(q), cell.tensor(1))


def scatter(cell: Cell) -> None:
    rank = dist.get_rank()
    parts = [cell.tensor(r) for r in range(SIZE)] if rank == 1 else None

    def call(out: Any, parts: Any) -> Any:
        dist.scatter(out, parts, 1)
        return out

    same(cell.run(call, whole=False)(emptied(cell.tensor(0)), parts), cell.tensor(rank))


def gather(cell: Cell) -> None:
    outs = [emptied(cell.tensor(0)) for _ in range(SIZE)] if dist.get_rank() == 0 else None

    def call(q: Any, outs: Any) -> Any:
        dist.gather(q, outs, 0)
        return outs

    for source, out in enumerate(
        cell.run(call, whole=False)(cell.tensor(dist.get_rank()), outs) or []
    ):
        same(out, cell.tensor(source))


def all_gather(cell: Cell) -> None:
    outs = [emptied(cell.tensor(0)) for _ in range(SIZE)]

    def call(q: Any, outs: Any) -> Any:
        dist.all_gather(outs, q)
        return outs

    for rank, out in enumerate(cell.run(call, whole=False)(cell.tensor(dist.get_rank()), outs)):
        same(out, cell.tensor(rank))


def all_gather_into_tensor(cell: Cell) -> None:
    want = gathered(cell)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def call(q: Any, out: Any) -> Any:
        gather(out, q)
        return out

    same(cell.run(call, whole=False)(cell.tensor(dist.get_rank()), emptied(want)), want)


def all_to_all_single(cell: Cell) -> None:
    want = exchanged(cell)

    def call(q: Any, out: Any) -> Any:
        dist.all_to_all_single(out, q)
        return out

    same(cell.run(call, whole=False)(cell.tensor(dist.get_rank()), emptied(want)), want)


def send_recv(cell: Cell) -> None:
    rank = dist.get_rank()

    def call(q: Any, out: Any) -> Any:
        if rank == 0:
            dist.send(q, 1)
            dist.recv(out, 1)
        else:
            dist.recv(out, 0)
            dist.send(q, 0)
        return out

    out = cell.run(call, whole=False)(cell.tensor(rank), emptied(cell.tensor(0)))
    same(out, cell.tensor(1 - rank))


def batch_isend_irecv(cell: Cell) -> None:
    rank = dist.get_rank()

    def call(q: Any, out: Any) -> Any:
        ops = [dist.P2POp(dist.isend, q, 1 - rank), dist.P2POp(dist.irecv, out, 1 - rank)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return out

    out = cell.run(call, whole=False)(cell.tensor(rank), emptied(cell.tensor(0)))
    same(out, cell.tensor(1 - rank))


def all_reduce(cell: Cell) -> None:
    def call(q: Any) -> Any:
        dist.all_reduce(q)
        return q

    cell.run(call, whole=False)(cell.tensor(0))
    raise AssertionError("codes were added")


def reduce_scatter(cell: Cell) -> None:
    def call(q: Any, out: Any) -> Any:
        dist.reduce_scatter_tensor(out, q)
        return out

    cell.run(call, whole=False)(gathered(cell), cell.tensor(0))
    raise AssertionError("codes were added")


def functional_gather(cell: Cell) -> None:
    gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
    call = cell.run(lambda q: gather(q, 0, dist.group.WORLD))
    with torch.no_grad():
        same(call(cell.tensor(dist.get_rank())), gathered(cell))


def functional_broadcast(cell: Cell) -> None:
    call = cell.run(lambda q: functional.broadcast(q, 1, dist.group.WORLD))
    with torch.no_grad():
        same(call(cell.tensor(dist.get_rank())), cell.tensor(1))


def functional_all_to_all(cell: Cell) -> None:
    call = cell.run(lambda q: functional.all_to_all_single(q, None, None, dist.group.WORLD))
    with torch.no_grad():
        same(call(cell.tensor(dist.get_rank())), exchanged(cell))


def functional_reduce(cell: Cell) -> None:
    call = cell.run(lambda q: functional.all_reduce(q, "sum", dist.group.WORLD))
    with torch.no_grad():
        call(cell.tensor(0))
    raise AssertionError("codes were added")


# ---- DTensor -------------------------------------------------------------------------------------


def spread(t: Any, placement: Any) -> Any:
    return distribute_tensor(t, mesh(), [placement])


def part(t: Any, placement: Any) -> Any:
    if placement.is_replicate():
        return t
    return t.chunk(SIZE, placement.dim)[dist.get_rank()].clone()


def distribute(placement: Any) -> Callable[[Cell], None]:
    """Each rank gets rank 0's values, and ``from_local`` of the parts is the whole again."""

    def run(cell: Cell) -> None:
        q = cell.weight()
        distributed = spread(q if dist.get_rank() == 0 else cell.tensor(1), placement)
        local = distributed.to_local()
        same(local, part(q, placement))

        def call(local: Any) -> Any:
            return DTensor.from_local(local, mesh_, [placement]).to_local()

        mesh_ = mesh()
        with torch.no_grad():
            same(cell.run(call)(local), local)
        again = DTensor.from_local(local, mesh_, [placement], shape=q.shape, stride=q.stride())
        same(again.full_tensor(), q)

    return run


def full_tensor(placement: Any) -> Callable[[Cell], None]:
    def run(cell: Cell) -> None:
        distributed = spread(cell.weight(), placement)
        with torch.no_grad():
            same(cell.run(lambda d: d.full_tensor())(distributed), cell.weight())

    return run


def redistribute(before: Any, after: Any) -> Callable[[Cell], None]:
    def run(cell: Cell) -> None:
        distributed = spread(cell.weight(), before)
        with torch.no_grad():
            moved = cell.run(lambda d: d.redistribute(placements=[after]))(distributed)
        assert moved.placements == (after,)
        same(moved.to_local(), part(cell.weight(), after))

    return run


def quantize(placement: Any) -> Callable[[Cell], None]:
    """Compare the values in both directions: a part may have notes that the whole has not."""

    def run(cell: Cell) -> None:
        with torch.no_grad():
            got = cell.run(cell.quantize)(spread(values(), placement))
        assert got.placements == (placement,)
        local, whole = got.to_local(), cell.weight()
        assert isinstance(local, QuantizedTensor)
        same(local.dequantize(), part(whole.dequantize(), placement), "rowwise")
        for t in (local, whole):
            t.update_usage(rowwise=False)
        same(local.dequantize(), part(whole.dequantize(), placement), "columnwise")

    return run


def dequantize(placement: Any) -> Callable[[Cell], None]:
    def run(cell: Cell) -> None:
        with torch.no_grad():
            got = cell.run(qtensor.dequantize)(spread(cell.weight(), placement))
        assert got.placements == (placement,)
        same(got.to_local(), part(cell.weight().dequantize(), placement))

    return run


def linear(cell: Cell) -> None:
    x, w = values(64, K), cell.weight()
    with torch.no_grad():
        call = cell.run(nn.functional.linear)
        got = call(spread(x, Replicate()), spread(w, Shard(0)))
    assert got.placements == (Shard(1),)
    same(got.full_tensor(), nn.functional.linear(x, w))


def matmul(cell: Cell) -> None:
    """The contracted dim is split: the sum of the products of the parts."""
    x, w = values(64, K), cell.weight()
    with torch.no_grad():
        got = cell.run(lambda x, w: x @ w.t())(spread(x, Shard(1)), spread(w, Shard(1)))
    a, b = [p @ q.t() for p, q in zip(x.chunk(2, 1), w.chunk(2, 1), strict=True)]
    same(got.full_tensor(), a + b)


def embedding(cell: Cell) -> None:
    w, index = cell.weight(), torch.arange(0, ROWS, 7)
    with torch.no_grad():
        call = cell.run(nn.functional.embedding)
        got = call(spread(index, Replicate()), spread(w, Shard(1)))
    same(got.full_tensor(), nn.functional.embedding(index, w))


# ---- training ------------------------------------------------------------------------------------

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


def whole(t: Any) -> Any:
    t = t.detach()
    return (t.full_tensor() if isinstance(t, DTensor) else t).clone()


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


def ddp(stored: bool) -> Callable[[Cell], None]:
    def run(cell: Cell) -> None:
        ours = train(DistributedDataParallel(model(cell, stored)))
        same_training(ours, train_alone(lambda: model(cell, stored)))

    return run


def shard(made: Any) -> Any:
    fully_shard(made[0])
    return fully_shard(made)


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
    return recipes.CustomRecipe(factory=lambda r: quantizers.get(r.tensor, qtensor.quantizer(other)))


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
    run_frozen(cell, DistributedDataParallel)


# ---- parallel styles -----------------------------------------------------------------------------


def styles_of_torch(cell: Cell) -> None:
    run_styles(cell, parallel)


def styles_of_qtensor(cell: Cell) -> None:
    run_styles(cell, qtensor.distributed)


def run_styles(cell: Cell, styles: Any) -> None:
    """One process that computes the parts of both ranks and adds them."""
    made = layers()
    first, second = made[0], made[2]
    plan = {"0": styles.ColwiseParallel(), "2": styles.RowwiseParallel()}
    half, recipe = ROWS // SIZE, cell.recipe(random=False)
    x, dy = values(64, 128), values(64, ROWS)
    own: Any = []
    for rank in range(SIZE):
        rows = slice(rank * half, (rank + 1) * half)
        a = qtensor.Linear(128, half, recipe=recipe)
        b = qtensor.Linear(half, ROWS, bias=False, recipe=recipe)
        a.load_state_dict({"weight": first.weight[rows], "bias": first.bias[rows]})
        b.load_state_dict({"weight": second.weight[:, rows]})
        own.append((a, b))
    wanted_x, bias = x.clone().requires_grad_(), second.bias.detach().clone().requires_grad_()
    products = [cell.compile_(nn.Sequential(a, nn.ReLU(), b))(wanted_x) for a, b in own]
    want = products[0] + products[1] + bias
    want.backward(dy)

    qtensor.convert_(made, recipe)
    parallel.parallelize_module(made, mesh(), plan)
    cell.compile_(made)
    inputs = x.clone().requires_grad_()
    y = made(inputs)
    y.backward(dy)
    same(y.detach().clone(), want.detach(), "output")
    same(inputs.grad, wanted_x.grad, "gradient of the input")
    a, b = own[dist.get_rank()]
    pairs = ((first.weight, a.weight), (first.bias, a.bias), (second.weight, b.weight))
    for ours, theirs in pairs:
        same(ours.grad.to_local(), theirs.grad, "gradient of a parameter")
    same(second.bias.grad.to_local(), bias.grad, "gradient of the bias")


def styles_of_weights(cell: Cell) -> None:
    """nn.Linear with a quantized weight: the parts have the factors of the whole."""
    x, w = values(64, K), cell.weight()
    outputs = []
    for style in (parallel.ColwiseParallel, parallel.RowwiseParallel):
        made = nn.Sequential(frozen(cell))
        extra = {"use_local_output": False} if style is parallel.ColwiseParallel else {}
        parallel.parallelize_module(made, mesh(), {"0": style(**extra)})
        assert isinstance(made[0].weight.to_local(), QuantizedTensor)
        given = x if style is parallel.ColwiseParallel else part(x, Shard(1))
        with torch.no_grad():
            outputs.append(whole(cell.compile_(made)(given)))
    bias = torch.full((ROWS,), 0.5)
    with torch.no_grad():
        same(outputs[0], nn.functional.linear(x, w, bias), "ColwiseParallel")
        pairs = zip(x.chunk(2, 1), w.chunk(2, 1), strict=True)
        a, b = [nn.functional.linear(p, q) for p, q in pairs]
    same(outputs[1], a + b + bias, "RowwiseParallel")


def tp_of_modules(cell: Cell) -> None:
    """``parallel_mode`` of the layers, against the same oracle as the styles."""
    group, half, rank = dist.group.WORLD, ROWS // SIZE, dist.get_rank()
    x, dy, recipe = values(64, 128), values(64, ROWS), cell.recipe(random=False)
    whole_ = layers()
    options = {"recipe": recipe, "tp_group": group}
    made = nn.Sequential(
        qtensor.Linear(128, ROWS, parallel_mode="column", **options),
        nn.ReLU(),
        qtensor.Linear(ROWS, ROWS, parallel_mode="row", **options),
    )
    own = []
    for r in range(SIZE):
        rows = slice(r * half, (r + 1) * half)
        state = {
            "0.weight": whole_[0].weight[rows],
            "0.bias": whole_[0].bias[rows],
            "2.weight": whole_[2].weight[:, rows],
        }
        one = nn.Sequential(
            qtensor.Linear(128, half, recipe=recipe),
            nn.ReLU(),
            qtensor.Linear(half, ROWS, bias=False, recipe=recipe),
        )
        one.load_state_dict(state)
        own.append(cell.compile_(one))
        if r == rank:
            made.load_state_dict({**state, "2.bias": whole_[2].bias})
    inputs, wanted = [x.clone().requires_grad_() for _ in range(2)]
    want = own[0](wanted) + own[1](wanted) + whole_[2].bias.detach()
    want.backward(dy)
    y = cell.compile_(made)(inputs)
    y.backward(dy)
    same(y.detach(), want.detach(), "output")
    same(inputs.grad, wanted.grad, "gradient of the input")
    for name, p in own[rank].named_parameters():
        same(made.get_parameter(name).grad, p.grad, name)


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
            inner = [e[0] if isinstance(e, tuple) else e for e in getattr(error, "failures", {}).values()]
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


def resume(stored: bool) -> Callable[[Cell], None]:
    def run(cell: Cell) -> None:
        import torch.distributed.checkpoint as dcp  # noqa: PLC0415 - warns, and takes a second
        from torch.distributed.checkpoint.state_dict import (  # noqa: PLC0415
            get_state_dict,
            set_state_dict,
        )

        keep, folder = shared_folder()
        rank, results = dist.get_rank(), []
        for number in range(2):
            made = shard(model(cell, stored))
            optimizer = optimizer_of(made)
            if number == 0:
                backward(made, 0, rank)
                optimizer.step()
                optimizer.zero_grad()
            state = dict(zip(("model", "optimizer"), get_state_dict(made, optimizer), strict=True))
            if number == 0:
                quietly(dcp.save, state, checkpoint_id=folder)
            else:
                quietly(dcp.load, state, checkpoint_id=folder)
                set_state_dict(
                    made,
                    optimizer,
                    model_state_dict=state["model"],
                    optim_state_dict=state["optimizer"],
                )
            loss = backward(made, 1, rank)
            optimizer.step()
            results.append([("loss", loss), *parameters(made)])
        same_training(results[1], results[0])
        dist.barrier()
        del keep

    return run


# ---- the table -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Feature:
    """A row of the document: ``run(cell)`` on each rank."""

    name: str
    run: Callable[[Cell], None]
    columns: tuple[str, ...] = FORMATS
    modes: tuple[str, ...] = MODES


def _by_recipe(name: str, run: Callable[[Cell], None], modes: tuple[str, ...] = MODES) -> Feature:
    return Feature(name, run, tuple(RECIPES), modes)


S0, S1, WHOLE = Shard(0), Shard(1), Replicate()
EAGER = MODES[:1]

SECTIONS: dict[str, list[Feature]] = {
    "Collectives": [
        Feature("`broadcast`", broadcast),
        Feature("`scatter`", scatter),
        Feature("`gather`", gather),
        Feature("`all_gather`", all_gather),
        Feature("`all_gather_into_tensor`", all_gather_into_tensor),
        Feature("`all_to_all_single`", all_to_all_single),
        Feature("`send`, `recv`", send_recv),
        Feature("`batch_isend_irecv`", batch_isend_irecv),
        Feature("`all_reduce`", all_reduce),
        Feature("`reduce_scatter_tensor`", reduce_scatter),
        Feature("functional `all_gather_tensor`", functional_gather),
        Feature("functional `broadcast`", functional_broadcast),
        Feature("functional `all_to_all_single`", functional_all_to_all),
        Feature("functional `all_reduce`", functional_reduce),
    ],
    "DTensor": [
        *(
            Feature(f"`distribute_tensor`, `from_local`: {p}", distribute(p))
            for p in (S0, S1, WHOLE)
        ),
        *(Feature(f"`full_tensor`: {p}", full_tensor(p)) for p in (S0, S1)),
        *(
            Feature(f"`redistribute`: {a} to {b}", redistribute(a, b))
            for a, b in ((S0, S1), (S1, S0), (S0, WHOLE), (WHOLE, S1))
        ),
        *(Feature(f"`quantize`: {p}", quantize(p)) for p in (S0, S1, WHOLE)),
        *(Feature(f"`dequantize`: {p}", dequantize(p)) for p in (S0, S1)),
        Feature("`linear`: weight Shard(0)", linear),
        Feature("`matmul`: both Shard(1)", matmul),
        Feature("`embedding`: weight Shard(1)", embedding),
    ],
    "Weights that are stored quantized, in layers of torch": [
        Feature("DDP, frozen weight", ddp_frozen),
        Feature("`fully_shard`, frozen weight", fsdp_frozen),
        Feature("`ColwiseParallel`, `RowwiseParallel`", styles_of_weights),
        Feature("quantized all-gather", fsdp_gather_format),
        Feature("`dcp.save`, `dcp.load`: Shard(0) to Shard(0)", checkpoint(S0, S0), modes=EAGER),
        Feature("`dcp.save`, `dcp.load`: Shard(0) to Shard(1)", checkpoint(S0, S1), modes=EAGER),
        Feature("`dcp.save`, `dcp.load`: Shard(1) to Replicate", checkpoint(S1, WHOLE), modes=EAGER),
    ],
    "Training": [
        _by_recipe("DDP", ddp(False)),
        _by_recipe("DDP, `quantized_params`", ddp(True)),
        _by_recipe("`fully_shard`", fsdp(False)),
        _by_recipe("`fully_shard`, `quantized_params`", fsdp(True)),
        _by_recipe("`fully_shard`, quantized all-gather", fsdp_gather),
        _by_recipe("torch's `ColwiseParallel`, `RowwiseParallel`", styles_of_torch),
        _by_recipe("qtensor's `ColwiseParallel`, `RowwiseParallel`", styles_of_qtensor),
        _by_recipe("`parallel_mode` of the layers", tp_of_modules),
        _by_recipe("`fully_shard`: next step after `dcp.load`", resume(False)),
        _by_recipe("the same, `quantized_params`", resume(True)),
    ],
}


@functools.cache
def features() -> dict[str, Feature]:
    """Return each feature by its name."""
    return {feature.name: feature for rows in SECTIONS.values() for feature in rows}


def cells() -> Iterator[tuple[str, str, str]]:
    """Yield (feature, mode, column) of every cell."""
    for feature in features().values():
        for mode in feature.modes:
            for column in feature.columns:
                yield feature.name, mode, column


def run_cell(feature: str, mode: str, column: str) -> tuple[str, str]:
    """Run a cell on this rank.

    Returns:
        ("pass", ""), ("error", the first clause of a QTensorError), or ("fail", what differs).
    """
    try:
        features()[feature].run(Cell(column, mode))
    except Exception as error:
        return verdict(error)
    finally:
        torch._dynamo.reset()
    return "pass", ""


def verdict(error: BaseException) -> tuple[str, str]:
    """Return the outcome of a cell that raised.

    An error that torch raised from a QTensorError, as Dynamo does, counts as that.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, QTensorError):
        cause = cause.__cause__
    if cause is not None:
        return "error", str(cause).partition("; got ")[0]
    text = " ".join(str(error).split())
    return "fail", f"{type(error).__name__}: {text}"[:300]
