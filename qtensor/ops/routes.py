"""Routing of the gradients of extra tensors through a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qtensor.library.pointwise import add
from qtensor.ops.checks import check_list
from qtensor.ops.operation import BasicOperation, FusibleOperation


class Wiring:
    """The operations of a sequence, and the routing of their extra tensors.

    Attributes:
        ops: the basic operations.
        input_channels, output_channels: for each operation a channel or None for each extra tensor.
        asking: indices of the operations that may request a format for their gradient.
        n_extra_inputs: number of extra inputs that the caller passes.
        n_extra_outputs: for each operation, the number of extra outputs that the caller gets.
    """

    ops: tuple[BasicOperation, ...]
    input_channels: list[tuple[str | None, ...]]
    output_channels: list[tuple[str | None, ...]]
    asking: tuple[int, ...]
    n_extra_inputs: int
    n_extra_outputs: list[int]


def split(flat: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    """Split ``flat`` into consecutive lists of the given lengths."""
    pieces, start = [], 0
    for count in counts:
        pieces.append(list(flat[start : start + count]))
        start += count
    return pieces


class Routes:
    """Carry gradients of extra inputs and outputs between the operations of a sequence.

    Those of a named channel go from operation to operation, the others come from the caller or go
    back to it. ``grads`` are the gradients of the extra outputs that the caller got, in order.
    """

    def __init__(self, fuser: Wiring, grads: Sequence[Any]) -> None:
        self.fuser = fuser
        self.grads = split(grads, fuser.n_extra_outputs) if any(fuser.n_extra_outputs) else []
        self.by_channel: dict[str, Any] = {}
        self.to_caller: dict[int, list[Any]] = {}

    def incoming(
        self, first: int, outputs: Sequence[tuple[str | None, ...]]
    ) -> list[tuple[Any, ...]]:
        """Return the gradients of the extra outputs of each operation of a step.

        ``first`` is the index of the step's first operation; ``outputs`` holds the channels.
        """
        return [
            tuple([
                self.grads[index].pop(0) if channel is None else self.by_channel.get(channel)
                for channel in names
            ])
            for index, names in enumerate(outputs, first)
        ]

    def outgoing(
        self,
        op: FusibleOperation,
        first: int,
        inputs: Sequence[tuple[str | None, ...]],
        extras: Sequence[Sequence[Any]],
    ) -> None:
        """Store the gradients of the extra inputs of each operation of a step.

        Gradients that arrive for the same channel are added.
        """
        name = "fuser_backward"
        check_list(op, name, "gradients of extra inputs of each operation", extras, len(inputs))
        for index, (names, extra) in enumerate(zip(inputs, extras, strict=True), first):
            if not names and type(extra) is tuple and not extra:
                continue
            check_list(op, name, "gradients of its extra inputs", extra, len(names))
            for channel, grad in zip(names, extra, strict=True):
                if channel is None:
                    self.to_caller.setdefault(index, []).append(grad)
                elif grad is not None:
                    known = self.by_channel.get(channel)
                    self.by_channel[channel] = grad if known is None else add(known, grad)

    def outside(self) -> list[Any]:
        """Return the gradients of the caller's extra inputs.

        None stands for an input of an operation that took no part in backward.
        """
        grads: list[Any] = []
        if self.fuser.n_extra_inputs:
            for index, names in enumerate(self.fuser.input_channels):
                count = names.count(None)
                grads += self.to_caller.get(index, [None] * count) if count else []
        return grads
