"""The ways of gradients of extra tensors through a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qtensor.library.pointwise import add
from qtensor.ops.checks import listed


def split(flat: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    """Consecutive parts of the given lengths."""
    parts, start = [], 0
    for count in counts:
        parts.append(list(flat[start : start + count]))
        start += count
    return parts


class Routes:
    """Where the gradients of extra tensors go: along channels, from the caller and to it."""

    def __init__(self, fuser: Any, grads: Sequence[Any]) -> None:
        self.fuser = fuser
        self.grads = split(grads, fuser.n_extra_outputs) if any(fuser.n_extra_outputs) else []
        self.by_channel: dict[str, Any] = {}
        self.to_caller: dict[int, list[Any]] = {}

    def incoming(
        self, first: int, outputs: Sequence[tuple[str | None, ...]]
    ) -> list[tuple[Any, ...]]:
        """Gradients of the extra outputs of the operations of a step, by their channels."""
        return [
            tuple([
                self.grads[place].pop(0) if channel is None else self.by_channel.get(channel)
                for channel in names
            ])
            for place, names in enumerate(outputs, first)
        ]

    def outgoing(
        self,
        op: Any,
        first: int,
        inputs: Sequence[tuple[str | None, ...]],
        extras: Sequence[Sequence[Any]],
    ) -> None:
        """Take the gradients of the extra inputs of the operations of a step, by their channels."""
        name = "fuser_backward"
        listed(op, name, "gradients of extra inputs of each operation", extras, len(inputs))
        for place, (names, extra) in enumerate(zip(inputs, extras, strict=True), first):
            if not names and type(extra) is tuple and not extra:
                continue
            listed(op, name, "gradients of its extra inputs", extra, len(names))
            for channel, grad in zip(names, extra, strict=True):
                if channel is None:
                    self.to_caller.setdefault(place, []).append(grad)
                elif grad is not None:
                    known = self.by_channel.get(channel)
                    self.by_channel[channel] = grad if known is None else add(known, grad)

    def outside(self) -> list[Any]:
        """Gradients of the caller's extra inputs, None for those of operations that took no part."""
        found: list[Any] = []
        if self.fuser.n_extra_inputs:
            for place, names in enumerate(self.fuser.input_channels):
                count = names.count(None)
                found += self.to_caller.get(place, [None] * count) if count else []
        return found
