"""DTensors of quantized tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import qtensor
from distributed_cells.base import ROWS, SIZE, Cell, K, mesh, part, same, spread, values, whole
from qtensor import QuantizedTensor


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


def uneven(placement: Any, size: int) -> Callable[[Cell], None]:
    """Return the cell of a dim that ranks do not divide: the first part is half, rounded up."""

    def run(cell: Cell) -> None:
        shape = (size, K) if placement == Shard(0) else (ROWS, size)
        q = cell.quantize(values(*shape))
        distributed = spread(q, placement)
        half = -(-size // SIZE)
        assert distributed.to_local().shape[placement.dim] == (half, size - half)[dist.get_rank()]
        assert isinstance(distributed.to_local(), QuantizedTensor)
        with torch.no_grad():
            same(cell.run(lambda d: d.full_tensor())(distributed.clone()), q)

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
        local, want = got.to_local(), cell.weight()
        assert isinstance(local, QuantizedTensor)
        same(local.dequantize(), part(want.dequantize(), placement), "rowwise")
        for t in (local, want):
            t.update_usage(rowwise=False)
        same(local.dequantize(), part(want.dequantize(), placement), "columnwise")

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


def input_gradient(placement: Any) -> Callable[[Cell], None]:
    """Return the cell of a layer's product, and of the gradient of its input.

    A product whose contracted dim is split is the sum of the products of the parts.
    """

    def run(cell: Cell) -> None:
        x, w, dy = values(64, K), cell.weight(), values(64, ROWS)
        dim = placement.dim
        given: Any = spread(x, Replicate()).requires_grad_()
        y = cell.run(nn.functional.linear)(given, spread(w, placement))
        y.redistribute(placements=[Replicate()]).to_local().backward(dy)
        outputs, gradients = [], []
        for number, own in enumerate(w.chunk(SIZE, dim)):
            part_x = x if dim == 0 else x.chunk(SIZE, 1)[number]
            part_dy = dy if dim == 1 else dy.chunk(SIZE, 1)[number]
            part_x = part_x.clone().requires_grad_()
            out = nn.functional.linear(part_x, own.clone())
            out.backward(part_dy.contiguous())
            outputs.append(out.detach())
            gradients.append(part_x.grad)
        joined = (torch.cat(outputs, 1), gradients[0] + gradients[1])
        if dim == 1:
            joined = (outputs[0] + outputs[1], torch.cat(gradients, 1))
        same(whole(y), joined[0], "output")
        same(whole(given.grad), joined[1], "gradient of the input")

    return run


def matmul(cell: Cell) -> None:
    """The contracted dim is split: the sum of the products of the parts."""
    x, w = values(64, K), cell.weight()
    with torch.no_grad():
        got = cell.run(lambda x, w: x @ w.t())(spread(x, Shard(1)), spread(w, Shard(1)))
    a, b = [p @ q.t() for p, q in zip(x.chunk(2, 1), w.chunk(2, 1), strict=True)]
    same(got.full_tensor(), a + b)


def embedding(placement: Any) -> Callable[[Cell], None]:
    """Return the cell of an embedding; of split rows, each rank gives zeros for those it lacks."""

    def run(cell: Cell) -> None:
        w, index = cell.weight(), torch.arange(0, ROWS, 7)
        with torch.no_grad():
            call = cell.run(nn.functional.embedding)
            got = call(spread(index, Replicate()), spread(w, placement))
        same(got.full_tensor(), nn.functional.embedding(index, w))

    return run


VIEWS: dict[str, Callable[[Any], Any]] = {
    "t": lambda q: q.t(),
    "transpose": lambda q: q.transpose(0, 1),
    "permute": lambda q: q.permute(1, 0),
    "view": lambda q: q.view(2, -1, q.shape[1]),
    "rows": lambda q: q[: ROWS // 2],
    "columns": lambda q: q[:, : K // 2],
    "chunk": lambda q: q.chunk(2, 0)[1],
    "cat": lambda q: torch.cat([q, q]),
    "clone": lambda q: q.clone(),
    "detach": lambda q: q.detach(),
    "to": lambda q: q.to(torch.bfloat16),
}


def views(placement: Any) -> Callable[[Cell], None]:
    """Return the cell of ``VIEWS``: the bytes of the view of the whole."""

    def run(cell: Cell) -> None:
        for name, view in VIEWS.items():
            with torch.no_grad():
                got = cell.run(view)(spread(cell.weight(), placement))
                assert isinstance(got.to_local(), QuantizedTensor), name
                same(got.full_tensor(), view(cell.weight()), name)

    return run


def three_dims(placement: Any) -> Callable[[Cell], None]:
    def run(cell: Cell) -> None:
        q = cell.quantize(values(4, ROWS, K))
        with torch.no_grad():
            same(cell.run(lambda d: d.full_tensor())(spread(q, placement)), q)

    return run


def two_meshes(cell: Cell) -> None:
    """Both dims of a tensor are split, over meshes whose dims have two ranks and one."""
    q = cell.weight()
    for sizes in ((1, SIZE), (SIZE, 1)):
        over = init_device_mesh("cpu", sizes)
        with torch.no_grad():
            got: Any = distribute_tensor(q, over, [Shard(0), Shard(1)])
            same(got.full_tensor(), q, f"{sizes}")
            moved = cell.run(lambda d: d.redistribute(placements=[Shard(1), Replicate()]))(got)
            same(moved.full_tensor(), q, f"{sizes}, redistributed")
