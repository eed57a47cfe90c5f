"""Move quantized tensors between ranks: the collectives of ``torch.distributed``.

They write into tensors that the caller allocated. Point-to-point calls send each buffer as a
separate message, straight into the receiver's memory: NCCL may group such calls, and then the
caller cannot wait for one of them. Other calls move one tensor of bytes for each rank
(``wire.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from qtensor.core.errors import UnsupportedError, fail
from qtensor.storage import geometry
from qtensor.storage.base import is_quantized
from qtensor.storage.ops.table import C10D, Args, Kwargs, Op, implements
from qtensor.storage.ranks.functional_collectives import parts_of, row_parts, split_rows, stack_rows
from qtensor.storage.ranks.state_dict_broadcast import is_installed, refuse_broadcast
from qtensor.storage.ranks.wire import (
    check_alike,
    check_sender,
    pack,
    refuse_reduction,
    unpack,
    wire_layout,
    write_into,
)
from qtensor.storage.rebuild import set_origin

if TYPE_CHECKING:
    from datetime import timedelta

    from qtensor.storage.tensor import QuantizedTensor

_PENDING: set[dist.Work] = set()
"""Works that the caller has not waited for. C++ does not keep the Python object of a work alive."""


class _Received(dist.Work):
    """Wait for works of plain tensors, then write what they received into quantized ones."""

    def __init__(
        self, works: Sequence[dist.Work], finish: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self.works = works
        self.finish = finish
        _PENDING.add(self)

    def wait(self, *timeout: timedelta) -> bool:
        """Wait for the ranks and write the received buffers."""
        done = all([work.wait(*timeout) for work in self.works])
        finish, self.finish = self.finish, None
        if finish is not None:
            finish()
        _PENDING.discard(self)
        return bool(done)

    def is_completed(self) -> bool:
        """Return True if the bytes are here; ``wait`` writes them."""
        return all(work.is_completed() for work in self.works)

    def is_success(self) -> bool:
        """Return True if no rank failed."""
        return all(work.is_success() for work in self.works)

    def get_future(self) -> Any:
        """Return a future that is done; this waits for the ranks."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self.wait()
        future.set_result([])
        return future

    def __hash__(self) -> int:
        return id(self)


def _bind(func: Op, args: Args, kwargs: Kwargs) -> Kwargs:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _unboxed(result: Any) -> Any:
    work = result[1] if isinstance(result, tuple) else result
    return None if work is None else dist.Work.unbox(work)


def _run(func: Op, bound: Kwargs, finish: Callable[[], None], answer: object = None) -> Any:
    """Run a collective on plain tensors and write its results.

    Args:
        func: the op.
        bound: its arguments by name.
        finish: writes the received bytes into quantized tensors.
        answer: the first result of the op; None if the work is its only result.
    """
    result = func(**bound)
    work = _unboxed(result)
    if bound.get("async_op", True) and work is not None:
        boxed = _Received([work], finish).boxed()
    else:
        if work is not None:
            work.wait()
        finish()
        boxed = result[1] if isinstance(result, tuple) else result
    return boxed if answer is None else (answer, boxed)


def _is_root(bound: Kwargs) -> bool:
    return bool(dist.ProcessGroup.unbox(bound["process_group"]).rank() == bound["root_rank"])


def _first(tensors: object) -> QuantizedTensor:
    """Return the first quantized tensor of a call."""
    leaves = torch.utils._pytree.tree_leaves(tensors)
    return next(t for t in leaves if is_quantized(t))


@implements(C10D, "broadcast_")
def _broadcast(func: Op, args: Args, kwargs: Kwargs) -> Any:
    bound = _bind(func, args, kwargs)
    t, answer = _first(bound["tensors"]), bound["tensors"]
    check_alike(answer, t, "broadcast")
    if not is_installed():
        # Send NaN: no rank waits, and a rank that receives into a plain tensor gets no numbers.
        nan = [torch.full(x.shape, float("nan"), dtype=x.dtype, device=x.device) for x in answer]
        _run(func, {**bound, "tensors": nan, "async_op": False}, lambda: None)
        refuse_broadcast(t)
    packed = [pack(each) for each in answer]

    def finish() -> None:
        if not _is_root(bound):
            for each, received in zip(answer, packed, strict=True):
                check_sender(received, each, "broadcast")
                write_into(each, unpack(received, each, each.shape), "broadcast")

    return _run(func, {**bound, "tensors": packed}, finish, answer)


@implements(C10D, "allgather_", "gather_")
def _gather(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Handle the gathers into lists of tensors."""
    # all_gather alone returns its outputs in front of its work.
    to_all = func._schema.name == "c10d::allgather_"
    op = "all_gather" if to_all else "gather"
    bound = _bind(func, args, kwargs)
    outputs, inputs = bound["output_tensors"], bound["input_tensors"]
    first = _first([inputs, outputs])
    check_alike([*inputs, *(t for each in outputs for t in each)], first, op)
    received = [[_empty_packed(t) for t in each] for each in outputs]
    sent = [pack(t) for t in inputs]
    bound = {**bound, "output_tensors": received, "input_tensors": sent}
    answer = outputs if to_all else None
    return _run(func, bound, lambda: _write_lists(outputs, received, op), answer)


def _empty_packed(t: QuantizedTensor) -> Tensor:
    nbytes = wire_layout(t._quantizer, t.shape).nbytes
    return torch.empty(nbytes, dtype=torch.uint8, device=t.device)


def _write_lists(
    outputs: Sequence[Sequence[QuantizedTensor]], rows: Sequence[Sequence[Tensor]], op: str
) -> None:
    for tensors, received in zip(outputs, rows, strict=True):
        for t, packed in zip(tensors, received, strict=True):
            check_sender(packed, t, op)
            write_into(t, unpack(packed, t, t.shape), op)


@implements(C10D, "_allgather_base_")
def _all_gather_base(func: Op, args: Args, kwargs: Kwargs) -> Any:
    bound = _bind(func, args, kwargs)
    out, t = bound["output_tensor"], bound["input_tensor"]
    packed, finish = _into_tensor(out, t)
    bound = {**bound, "output_tensor": packed[0], "input_tensor": packed[1]}
    return _run(func, bound, finish, out)


@implements(C10D, "allgather_into_tensor_coalesced_")
def _all_gather_coalesced(func: Op, args: Args, kwargs: Kwargs) -> Any:
    bound = _bind(func, args, kwargs)
    pairs = list(zip(bound["outputs"], bound["inputs"], strict=True))
    plain = [p for p in pairs if not any(is_quantized(t) for t in p)]
    plans = [_into_tensor(*p) for p in pairs if not any(p is other for other in plain)]
    # gloo joins the tensors of a call, and gives other bytes if their dtypes differ.
    work = None
    if plain:
        outputs, inputs = map(list, zip(*plain, strict=True))
        work = _unboxed(func(**{**bound, "outputs": outputs, "inputs": inputs}))
    outputs, inputs = [p[0][0] for p in plans], [p[0][1] for p in plans]

    def finish() -> None:
        if work is not None:
            work.wait()
        for _, write in plans:
            write()

    return _run(func, {**bound, "outputs": outputs, "inputs": inputs}, finish)


def _into_tensor(
    out: QuantizedTensor, t: QuantizedTensor
) -> tuple[tuple[Tensor, Tensor], Callable[[], None]]:
    """Return the bytes of both tensors of ``all_gather_into_tensor``, and what writes ``out``.

    Raises:
        QTensorError: ``out`` is plain, or has another shape than the concatenated parts.
    """
    op = "all_gather_into_tensor"
    check_alike([out, t], t if is_quantized(t) else out, op)
    size, rest = divmod(out.shape[0] if out.ndim else 0, max(t.shape[0] if t.ndim else 0, 1))
    if rest or out.shape[1:] != t.shape[1:] or out.ndim != t.ndim:
        rule = "the output must hold the parts of all ranks along dim 0"
        fail(op, rule, f"{tuple(out.shape)} for parts of {tuple(t.shape)}", "Fix its shape")
    nbytes = wire_layout(t._quantizer, t.shape).nbytes
    packed = torch.empty(size * nbytes, dtype=torch.uint8, device=t.device)

    def finish() -> None:
        joined = torch.ops.aten.cat(parts_of(packed.view(size, -1), t, op), 0)
        write_into(out, joined, op)

    return (packed, pack(t)), finish


@implements(C10D, "scatter_")
def _scatter(func: Op, args: Args, kwargs: Kwargs) -> Any:
    bound = _bind(func, args, kwargs)
    answer, inputs = bound["output_tensors"], bound["input_tensors"]
    (out,) = answer
    if not is_quantized(out):
        check_alike([out], _first(inputs), "scatter")
    for tensors in inputs:
        check_alike(tensors, out, "scatter", out.shape)
    packed = _empty_packed(out)

    def finish() -> None:
        check_sender(packed, out, "scatter")
        write_into(out, unpack(packed, out, out.shape), "scatter")
        # DTensor pads shards before a scatter, and takes the part before the padding.
        set_origin(out, out._origin._replace(may_be_padded=True))

    bound["output_tensors"] = [packed]
    bound["input_tensors"] = [[pack(t) for t in tensors] for tensors in inputs]
    return _run(func, bound, finish, answer)


@implements(C10D, "alltoall_")
def _all_to_all(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Handle ``alltoall_``: one tensor for each rank, of any shape.

    The bytes travel by ``alltoall_base_``, as in ``all_to_all_single``.
    """
    bound = _bind(func, args, kwargs)
    answer, inputs = bound.pop("output_tensors"), bound.pop("input_tensors")
    check_alike([*answer, *inputs], _first([answer, inputs]), "all_to_all")
    lengths = [wire_layout(t._quantizer, t.shape).nbytes for t in answer]
    exchanged = _byte_exchange([pack(t) for t in inputs], lengths)

    def finish() -> None:
        _write_lists([answer], [exchanged["output"].split(lengths)], "all_to_all")

    return _run(torch.ops.c10d.alltoall_base_.default, bound | exchanged, finish, answer)


def _byte_exchange(packed: Sequence[Tensor], lengths: list[int]) -> Kwargs:
    """Return the arguments of ``alltoall_base_`` that move bytes.

    Args:
        packed: uint8 tensors to send, one for each rank.
        lengths: number of bytes to receive from each rank.
    """
    return {
        "output": torch.empty(sum(lengths), dtype=torch.uint8, device=packed[0].device),
        "input": torch.cat(list(packed)),
        "output_split_sizes": lengths,
        "input_split_sizes": [p.shape[0] for p in packed],
    }


@implements(C10D, "alltoall_base_")
def _all_to_all_base(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Handle ``alltoall_base_``: rows of one tensor for each rank."""
    op = "all_to_all_single"
    bound = _bind(func, args, kwargs)
    out, t = bound["output"], bound["input"]
    check_alike([out, t], t if is_quantized(t) else out, op)
    ranks = dist.ProcessGroup.unbox(bound["process_group"]).size()
    sizes = [
        list(bound[name]) or [each.shape[0] // ranks] * ranks
        for name, each in (("output_split_sizes", out), ("input_split_sizes", t))
    ]
    for rows, each in zip(sizes, (out, t), strict=True):
        if sum(rows) != each.shape[0]:
            fail(op, f"the sizes must sum to {each.shape[0]} rows", rows, "Fix the sizes")
    packed = [pack(part) for part in split_rows(t, sizes[1])]
    lengths = [wire_layout(t._quantizer, (n, *out.shape[1:])).nbytes for n in sizes[0]]
    exchanged = _byte_exchange(packed, lengths)

    def finish() -> None:
        parts = row_parts(exchanged["output"], t, sizes[0], op)
        joined = stack_rows(parts)
        write_into(out, joined, op)

    return _run(func, bound | exchanged, finish)


@implements(C10D, "send")
def _send(func: Op, args: Args, kwargs: Kwargs) -> Any:
    bound = _bind(func, args, kwargs)
    (t,) = bound["tensors"]
    buffers = [b.contiguous() for b in geometry.whole_buffers(t)]
    works = [_unboxed(func(**{**bound, "tensors": [buffer]})) for buffer in buffers]
    return _Received(works).boxed()


@implements(C10D, "recv_")
def _receive(func: Op, args: Args, kwargs: Kwargs) -> Any:
    bound = _bind(func, args, kwargs)
    (t,) = bound["tensors"]
    own, whole = t.buffers(), geometry.whole_buffers(t)
    if (
        t._origin.is_part
        or t._parts
        or any(a is not b or not a.is_contiguous() for a, b in zip(own, whole, strict=True))
    ):
        fail(
            f"recv[{t._quantizer.format}]",
            "a message is written straight into the buffers, so they must be whole and contiguous",
            f"a part of a tensor, {tuple(t.shape)}",
            "Receive into torch.empty_like(part) and copy it: part.copy_(received)",
            UnsupportedError,
        )
    works = [_unboxed(func(**{**bound, "tensors": [buffer]})) for buffer in own]
    return _Received(works).boxed()


@implements(C10D, "recv_any_source_")
def _receive_any(func: Op, args: Args, kwargs: Kwargs) -> Any:
    fail(
        f"recv[{_first(args)._quantizer.format}]",
        "the buffers travel as several messages, which must come from one rank",
        "src=None",
        "Name the source: torch.distributed.recv(quantized, src)",
        UnsupportedError,
    )


@implements(
    C10D,
    "_reduce_scatter_base_",
    "allreduce_",
    "allreduce_coalesced_",
    "reduce_",
    "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_",
)
def _reduce(func: Op, args: Args, kwargs: Kwargs) -> Any:
    refuse_reduction(func, _first((args, kwargs)))
