"""Calls of collectives on quantized tensors, and what each rank must receive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from formats import BY_NAME, assert_same_bytes, assert_same_tensor, rand, refusal

import qtensor.distributed  # noqa: F401 - torch broadcasts quantized tensors with it

ROWS, COLS = 256, 256


def tensor(case: str, options: dict[str, Any], seed: int, rows: int = ROWS) -> Any:
    """Return a quantized (rows, 256) tensor whose amax does not depend on the seed."""
    x = rand(rows, COLS, seed=seed)
    x[0] = x[:, 0] = 8.0
    return BY_NAME[case].quantize(x, **options)


def empty(like: Any) -> Any:
    """Return a quantized tensor like another, with other bytes in every buffer."""
    out = torch.empty_like(like)
    for buffer in out.buffers():
        buffer.fill_(3)
    return out


def finish(work: Any) -> None:
    """Wait for a work as a caller does who keeps no other reference."""
    if work is not None:
        work.wait()


def broadcast(make: Callable[[int], Any], wait: bool) -> None:
    rank = dist.get_rank()
    q = make(1) if rank == 1 else empty(make(1))
    finish(dist.broadcast(q, 1, async_op=wait))
    assert_same_tensor(q, make(1))


def all_gather(make: Callable[[int], Any], wait: bool) -> None:
    outs = [empty(make(0)) for _ in range(dist.get_world_size())]
    finish(dist.all_gather(outs, make(dist.get_rank()), async_op=wait))
    for rank, out in enumerate(outs):
        assert_same_tensor(out, make(rank))


def all_gather_into_tensor(make: Callable[[int], Any], wait: bool) -> None:
    size = dist.get_world_size()
    wanted = torch.cat([make(rank) for rank in range(size)])
    out = empty(wanted)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    finish(gather(out, make(dist.get_rank()), async_op=wait))
    assert_same_tensor(out, wanted)


def gather(make: Callable[[int], Any], wait: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    outs = [empty(make(0)) for _ in range(size)] if rank == 0 else None
    finish(dist.gather(make(rank), outs, 0, async_op=wait))
    for source, out in enumerate(outs or []):
        assert_same_tensor(out, make(source))


def scatter(make: Callable[[int], Any], wait: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [make(r) for r in range(size)] if rank == 1 else None
    out = empty(make(0))
    finish(dist.scatter(out, parts, 1, async_op=wait))
    assert_same_tensor(out, make(rank))


def all_to_all_single(make: Callable[[int], Any], wait: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = ROWS // size
    wanted = torch.cat([make(r)[rank * rows : (rank + 1) * rows].clone() for r in range(size)])
    out = empty(wanted)
    finish(dist.all_to_all_single(out, make(rank), async_op=wait))
    assert_same_tensor(out, wanted)


def all_to_all_single_uneven(make: Callable[[int], Any], wait: bool) -> None:
    """The first rank receives 128 rows of each rank, the second one the others, and so on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sizes = [128, 128, *[0] * size][:size]
    mine = sizes[rank]
    start = sum(sizes[:rank])
    wanted = torch.cat([make(r)[start : start + mine].clone() for r in range(size)])
    out = empty(wanted)
    finish(dist.all_to_all_single(out, make(rank), [mine] * size, sizes, async_op=wait))
    assert_same_tensor(out, wanted)


def all_to_all(make: Callable[[int], Any], wait: bool) -> None:
    """Lists: rank r sends 128 * (to + 1) rows to rank ``to``."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def part(source: int, to: int) -> Any:
        return make(size * source + to)[: 128 * (to + 1)].clone()

    outs = [empty(part(source, rank)) for source in range(size)]
    finish(dist.all_to_all(outs, [part(rank, to) for to in range(size)], async_op=wait))
    for source, out in enumerate(outs):
        assert_same_tensor(out, part(source, rank))


def send_and_receive(make: Callable[[int], Any], wait: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    out = empty(make(0))
    after, before = (rank + 1) % size, (rank - 1) % size
    if wait:
        works = [dist.isend(make(rank), after), dist.irecv(out, before)]
        for work in works:
            finish(work)
    elif rank == 0:
        dist.send(make(rank), after)
        assert dist.recv(out, before) == before
    else:
        assert dist.recv(out, before) == before
        dist.send(make(rank), after)
    assert_same_tensor(out, make(before))


def batch_send_and_receive(make: Callable[[int], Any], wait: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    out = empty(make(0))
    after, before = (rank + 1) % size, (rank - 1) % size
    ops = [dist.P2POp(dist.isend, make(rank), after), dist.P2POp(dist.irecv, out, before)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert_same_tensor(out, make(before))


COLLECTIVES = (
    broadcast,
    all_gather,
    all_gather_into_tensor,
    gather,
    scatter,
    all_to_all,
    all_to_all_single,
    all_to_all_single_uneven,
    send_and_receive,
    batch_send_and_receive,
)


def run(case: str, options: dict[str, Any], wait: bool) -> None:
    """Run every collective of ``torch.distributed`` on this rank."""
    for collective in COLLECTIVES:
        collective(lambda seed: tensor(case, options, seed), wait)


# ---- functional collectives


def waited(t: Any) -> Any:
    return t.wait() if isinstance(t, functional.AsyncCollectiveTensor) else t


def gather_along(dim: int) -> Callable[[Any], Any]:
    def call(q: Any) -> Any:
        gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
        return waited(gather(q, dim, dist.group.WORLD))

    return call


def gather_coalesced(q: Any) -> Any:
    group = dist.group.WORLD
    new = getattr(functional, "all_gather_single_coalesced", None)
    gather = new or functional.all_gather_into_tensor_coalesced
    return torch.cat([waited(t) for t in gather([q, q.clone()], group)])


def functional_broadcast(q: Any) -> Any:
    return waited(functional.broadcast(q, 1, dist.group.WORLD))


def functional_all_to_all(q: Any) -> Any:
    return waited(functional.all_to_all_single(q, None, None, dist.group.WORLD))


def wanted_gather(dim: int) -> Callable[..., Any]:
    return lambda make: torch.cat([make(r) for r in range(dist.get_world_size())], dim)


def wanted_all_to_all(make: Callable[[int], Any]) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = ROWS // size
    return torch.cat([make(r)[rank * rows : (rank + 1) * rows].clone() for r in range(size)])


FUNCTIONAL: dict[str, tuple[Callable[[Any], Any], Callable[..., Any]]] = {
    "gather0": (gather_along(0), wanted_gather(0)),
    "gather1": (gather_along(1), wanted_gather(1)),
    "coalesced": (gather_coalesced, lambda make: torch.cat([wanted_gather(0)(make)] * 2)),
    "broadcast": (functional_broadcast, lambda make: make(1)),
    "all_to_all": (functional_all_to_all, wanted_all_to_all),
}


def run_functional(name: str, case: str, options: dict[str, Any], compiled: bool) -> None:
    """Run a functional collective on this rank, in eager mode or under aot_eager."""
    call, wanted = FUNCTIONAL[name]
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        got = call(tensor(case, options, dist.get_rank()))
    assert_same_tensor(got, wanted(lambda seed: tensor(case, options, seed)))


# ---- lists with plain and quantized tensors


def plain_beside_quantized() -> dict[str, str]:
    """Return the errors of lists with both kinds, by collective."""
    q, size = tensor("mxfp8", {}, dist.get_rank()), dist.get_world_size()
    plain, outs = q.dequantize(), [empty(q) for _ in range(size)]
    mixed = [plain.clone(), *outs[1:]]
    alone = [dist.new_group([rank]) for rank in range(size)][dist.get_rank()]
    joined = torch.empty(size * ROWS, COLS)
    gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    calls: dict[str, Callable[[], Any]] = {
        "all_gather of a quantized tensor": lambda: dist.all_gather(mixed, q),
        "all_gather_into_tensor": lambda: gather_single(joined, q),
        "all_to_all to both": lambda: dist.all_to_all(mixed, [q] * size),
        "all_to_all of both": lambda: dist.all_to_all(outs, [plain, q][:size]),
        "scatter": lambda: dist.scatter(outs[0], [plain], dist.get_rank(), group=alone),
        "gather": lambda: dist.gather(q, [plain.clone()], dist.get_rank(), group=alone),
    }
    errors = {name: refusal(call) for name, call in calls.items()}
    # torch does not show us the list: it copies the values into each output, which quantizes them.
    dist.all_gather(outs, plain)
    for rank, out in enumerate(outs):
        sent = tensor("mxfp8", {}, rank).dequantize()
        assert_same_tensor(out, BY_NAME["mxfp8"].quantize(sent))
    return errors


def coalesced_of_both() -> None:
    """A functional gather of several tensors takes both kinds; each keeps its own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    new = getattr(functional, "all_gather_single_coalesced", None)
    gather = new or functional.all_gather_into_tensor_coalesced
    q, plain = tensor("nvfp4", {}, rank), rand(4, 8, seed=rank)
    got, values = (waited(t) for t in gather([q, plain], group))
    assert_same_tensor(got, torch.cat([tensor("nvfp4", {}, r) for r in range(size)]))
    wanted = torch.cat([rand(4, 8, seed=r) for r in range(size)])
    assert_same_bytes(values, wanted)
    out, values = empty(got), torch.empty_like(wanted)
    gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with dist._coalescing_manager(group, async_ops=True) as manager:
        gather_single(out, q)
        gather_single(values, plain)
    manager.wait()
    assert_same_tensor(out, got)
    assert_same_bytes(values, wanted)


PARTS: dict[str, Callable[[Any], Any]] = {
    "slice": lambda t: t[:128],
    "last rows": lambda t: t[128:],
    "chunk": lambda t: t.chunk(2)[0],
    "split": lambda t: t.split(128)[1],
    "narrow": lambda t: t.narrow(0, 0, 128),
    "columns": lambda t: t[:, :128],
    "viewed": lambda t: t.view(2, -1, COLS)[0],
    "part of a part": lambda t: t[:128][:, :128],
}


def assert_a_write_arrives(t: Any, part: str) -> None:
    """Write to a part of a tensor: it reaches the whole or raises, and nothing else changes."""
    want = t.dequantize()
    if message := refusal(lambda: PARTS[part](t).fill_(0.5)):
        assert "copy" in message or "slicing a middle dim" in message, message
    else:
        PARTS[part](want).fill_(0.5)
    assert torch.equal(t.dequantize(), want), part


def write_to_parts(case: str, options: dict[str, Any]) -> None:
    """Write to parts of what collectives made, padding at the end or not."""
    rank, size = dist.get_rank(), dist.get_world_size()
    half = tensor(case, options, rank, ROWS // size)
    padded = torch.nn.functional.pad(tensor(case, options, 7, ROWS // 2), [0, 0, 0, ROWS // 2])
    for part in PARTS:
        assert_a_write_arrives(gather_along(0)(half), part)
        out = empty(padded)
        dist.scatter(out, [padded] * size if rank == 0 else None)
        assert_a_write_arrives(out, part)
        out.copy_(tensor(case, options, 3))
        assert_a_write_arrives(out, part)
        out.copy_(padded)
        assert_a_write_arrives(out, part)


def write_before_padding(case: str, options: dict[str, Any]) -> None:
    """A part before zeros may end inside of a block, and gets factors that fit what is written.

    Once other values follow it, a write that would change their factors raises.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    small = BY_NAME[case].quantize(rand(37, COLS), **options)
    padded = torch.nn.functional.pad(small, [0, 0, 0, ROWS - 37])
    out = empty(padded)
    dist.scatter(out, [padded] * size if rank == 0 else None)
    part, values = out[:37], 1000 * rand(37, COLS, seed=1)
    assert_same_bytes(part.dequantize(), small.dequantize())
    part.copy_(values)
    want = BY_NAME[case].quantize(values, **options).dequantize()
    assert_same_bytes(part.dequantize(), want)
    assert_same_bytes(out.dequantize()[:37], want)
    assert not out.dequantize()[37:].any()
    out.copy_(tensor(case, options, 3))
    for way in ({}, {"columnwise": False}, {"rowwise": False}):
        seen = out.detach()
        if all(seen.get_usages().values()):
            seen.update_usage(**way)
        before = seen.dequantize()
        message = refusal(lambda: part.copy_(values))
        assert not message or "copy" in message
        assert_same_bytes(seen.dequantize()[37:], before[37:])


def write_to_a_part_of_a_gather(case: str) -> None:
    """Parts that make up no tensor share the factors of the whole: a write leaves the others."""
    q = tensor(case, {"columnwise": True}, dist.get_rank(), 40)
    parts = gather_along(0)(q).split(40)
    before = [part.dequantize() for part in parts]
    parts[0].copy_(1000 * rand(40, COLS))
    assert not torch.equal(parts[0].dequantize(), before[0])
    for part, old in zip(parts[1:], before[1:], strict=True):
        assert_same_bytes(part.dequantize(), old)
