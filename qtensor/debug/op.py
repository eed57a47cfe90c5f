"""Define the ops that hand tensors to a recorder, in eager code and from inside compiled graphs.

An op finds its recorder by a number in a tensor: one graph serves all recorders. It writes to that
tensor, which keeps compilers from dropping the op or changing the order of such ops.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from qtensor.api import parsed
from qtensor.core.buffer_shapes import Shape, rows_cols
from qtensor.core.errors import check
from qtensor.core.torch_state import in_backward
from qtensor.debug.log import ROLES, known_role
from qtensor.library.checks import check_one
from qtensor.library.define import Written, leaf_op, no_outputs
from qtensor.library.ragged import Groups
from qtensor.storage.base import QuantizedTensorStorage

FORWARD_ROLES = ROLES[:3]
Values = Tensor | QuantizedTensorStorage
"""A plain or quantized tensor that is recorded."""


class Sink(Protocol):
    """A recorder as the ops see it."""

    @property
    def active(self) -> bool:
        """Whether this step is recorded."""

    def begin_forward(self) -> None:
        """Note that the model begins a forward pass."""

    def wants(self, site: int, role: str) -> bool:
        """Return whether a tensor of the site is recorded in this step."""

    def receive(
        self, site: int, role: str, values: Values, quantizer: str, scale: Tensor | None
    ) -> None:
        """Take a plain or quantized tensor of the site."""


SINKS: dict[int, Sink] = {}
"""Number of a recorder -> the recorder, while it records."""


def _sink(op: str, token: Tensor) -> Sink | None:
    check_one(op, "token", token, torch.int64)
    return SINKS.get(int(token))


class _RecordTensorArgs(NamedTuple):
    buffers: list[Tensor]
    stored: str
    shape: Shape
    role: str
    quantizer: str
    ticket: Tensor
    token: Written
    scale: Tensor | None = None


class _RecordGroupsArgs(NamedTuple):
    x: Tensor
    role: str
    quantizer: str
    ticket: Tensor
    token: Written
    split: Groups
    scale: Tensor | None = None


def _record_fill(_: None, args: _RecordTensorArgs) -> None:
    sink = _sink("record_tensor_", args.token)
    check_one("record_tensor_", "ticket", args.ticket, torch.int64)
    known_role("record_tensor_", args.role)
    rule = "buffers must hold a plain tensor, or the buffers of a quantized tensor"
    check(bool(args.buffers), "record_tensor_", rule, "none", "Pass [x] for a plain tensor x")
    site = int(args.ticket)
    if sink is None or not sink.wants(site, args.role):
        return
    if args.role in FORWARD_ROLES and in_backward():
        return
    values: Values = args.buffers[0]
    if args.stored:
        quantizer = parsed(args.stored)
        values = quantizer.assemble(args.buffers, args.shape, torch.float32, bare=True)
    sink.receive(site, args.role, values, args.quantizer, args.scale)


def _record_groups_fill(_: None, args: _RecordGroupsArgs) -> None:
    sizes = args.split.read("record_groups_")
    check_one("record_groups_", "ticket", args.ticket, torch.int64, len(sizes))
    rule = "scale must have one factor for each group"
    good = args.scale is None or args.scale.numel() == len(sizes)
    check(good, "record_groups_", rule, getattr(args.scale, "shape", None), "Pass such a scale")
    shape = rows_cols(args.x.shape)
    rule = "the sizes of the groups must add up to the rows of x"
    check(sum(sizes) == shape[0], "record_groups_", rule, f"{sizes}, {shape[0]} rows", "Fix them")
    for i, part in enumerate(args.x.reshape(shape).split(sizes)):
        scale = None if args.scale is None else args.scale[i : i + 1]
        ticket, token = args.ticket[i : i + 1], args.token
        one = _RecordTensorArgs(
            [part], "", part.shape, args.role, args.quantizer, ticket, token, scale
        )
        _record_fill(None, one)


RECORD_TENSOR = leaf_op("record_tensor_", _RecordTensorArgs, "()", no_outputs, _record_fill)
"""Hand a tensor to the recorder whose number is ``token``, int64 (1,) on the CPU.

``buffers`` is one plain tensor, or the buffers of a quantized tensor of the logical ``shape`` that
the quantizer ``stored`` made. ``quantizer`` is the canonical text with which the layer quantizes a
plain tensor, or ""; ``scale`` is its factor under delayed scaling. ``ticket``, int64 (1,) on the
CPU, is the number of the layer.
"""


RECORD_GROUPS = leaf_op("record_groups_", _RecordGroupsArgs, "()", no_outputs, _record_groups_fill)
"""Hand the rows of each group of ``x`` (..., K) to the recorder whose number is ``token``.

``ticket``, int64 (groups,) on the CPU, has the number of each group; ``scale`` (groups,) the
factors of delayed scaling. The other arguments are as for ``record_tensor_``.
"""


class _BeginForwardArgs(NamedTuple):
    token: Written


def _begin_fill(_: None, args: _BeginForwardArgs) -> None:
    sink = _sink("begin_recorded_forward_", args.token)
    if sink is not None and not in_backward():
        sink.begin_forward()


BEGIN_FORWARD = leaf_op("begin_recorded_forward_", _BeginForwardArgs, "()", no_outputs, _begin_fill)
"""Tell the recorder whose number is ``token`` that the model begins a forward pass."""
