"""What planners read and return: the arguments of a call by name, and its program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from qtensor.core.operand import Operand
from qtensor.kernels.cpu.buffers import BufferLayout
from qtensor.kernels.cpu.small_calls.program import Program

Parse = Callable[[str], Any]
"""Canonical text -> quantizer."""

Address = tuple[int, int]
"""(index of a tensor of the call, or -1 - index of an output; bytes after its start)."""


class CallProgram(NamedTuple):
    """A program for a call and all calls of the same description.

    Attributes:
        program: computes the outputs.
        addresses: the source of each address that the program takes.
        cleared: indices of the outputs that start as zeros.
    """

    program: Program
    addresses: Sequence[Address]
    cleared: Sequence[int] = ()


def _add(values: dict[str, Any], record: Any) -> None:
    for name, value in record._asdict().items():
        if isinstance(value, Operand):
            values |= {
                name: value.buffers,
                f"{name}_quantizer": value.canonical,
                f"{name}_shape": value.shape,
            }
        elif hasattr(value, "_asdict"):
            _add(values, value)
        else:
            values[name] = value


class Arguments:
    """The arguments of a call by name, and the index of each tensor among the call's tensors.

    The fields of a record among the arguments (`Pair`) are arguments themselves, as in the schema.
    """

    def __init__(self, args: Any) -> None:
        values: dict[str, Any] = {}
        _add(values, args)
        self.values = values
        self.first: dict[str, int] = {}
        count = 0
        for name, value in values.items():
            self.first[name] = count
            if value is None or isinstance(value, Tensor):
                count += 1
            elif isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
                count += len(value)

    def __getattr__(self, name: str) -> Any:
        return self.values[name]

    def are_contiguous(self, first: int = 0) -> bool:
        """Return whether the tensors are contiguous, from tensor number `first` of the call on."""
        tensors: list[Tensor | None] = []
        for value in self.values.values():
            if value is None or isinstance(value, Tensor):
                tensors.append(value)
            elif isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
                tensors += value
        return all(t is None or t.is_contiguous() for t in tensors[first:])

    def at(self, name: str, offset: int = 0) -> Address:
        """Return the address source of a tensor argument, `offset` bytes after its start."""
        return self.first[name], offset

    def all_at(self, name: str) -> list[Address]:
        """Return the address sources of the tensors of a list argument."""
        return [(self.first[name] + i, 0) for i in range(len(self.values[name]))]


def outputs_at(indices: Iterable[int]) -> list[Address]:
    """Return the address sources of outputs."""
    return [(-1 - i, 0) for i in indices]


def are_buffers(buffers: Sequence[Tensor], matrix_layout: BufferLayout) -> bool:
    """Return whether tensors are the buffers of a quantized matrix, in slot order."""
    expected = [(tuple(size), dtype) for _, _, size, dtype in matrix_layout.slots]
    return [(tuple(t.shape), t.dtype) for t in buffers[: len(expected)]] == expected
