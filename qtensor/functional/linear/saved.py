"""Keep the operands of a forward for its backward, for ``linear`` and ``grouped_linear`` alike.

Forward is pure: it returns the buffers that it made, and records for each operand where its tensors
come from (``save_operand``). The caller then replaces inputs of the call by the tensors themselves
(``tensors_to_save``) and passes all of them to ``save_for_backward``. Backward splits them again
(``restore_operands``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from qtensor.core.buffer_shapes import Shape
from qtensor.core.operand import Operand


class SavedOperand(NamedTuple):
    """Describe the saved tensors of one operand. It holds values only, no tensors.

    Attributes:
        canonical: canonical text of their quantizer, "" for plain tensors.
        shape: logical shape of the operand: (M, K) of an input, (N, K) of a weight.
        length: the number of saved tensors.
        is_input: the tensors are inputs of the call, which forward must not return.
    """

    canonical: str
    shape: Shape
    length: int
    is_input: bool


class SavedOperands(NamedTuple):
    """Describe the saved tensors of a call, by values only, so an autograd context can keep it.

    Attributes:
        input: the operand that wgrad reads, or None if no weight needs a gradient.
        weight: the operand that dgrad reads, or None if the input needs no gradient.
        requantize_input: wgrad quantizes the saved input, which is the one that the caller passed.
    """

    input: SavedOperand | None = None
    weight: SavedOperand | None = None
    requantize_input: bool = False


NOTHING_SAVED = SavedOperands()

Args = TypeVar("Args")


def save_operand(
    operand: Operand, is_input: bool = False
) -> tuple[SavedOperand, list[Tensor | None]]:
    """Return the record of an operand and its tensors; None stands for each input of the call."""
    length = len(operand.buffers)
    tensors: list[Tensor | None] = [None] * length if is_input else [*operand.buffers]
    return SavedOperand(operand.canonical, operand.shape, length, is_input), tensors


def tensors_to_save(
    saved: SavedOperands,
    tensors: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> list[Tensor | None]:
    """Return the tensors for ``save_for_backward``.

    Args:
        saved: the records of both operands.
        tensors: the tensors that ``save_operand`` returned, those of the input first.
        inputs: the input of the call; it replaces the None of an input that is saved as it is.
        weights: the weights of the call; they replace each None of weights saved as they are.
    """
    whole: list[Tensor | None] = []
    start = 0
    for record, originals in ((saved.input, inputs), (saved.weight, weights)):
        if record is not None:
            end = start + record.length
            whole += originals if record.is_input else tensors[start:end]
            start = end
    return whole


def restore_operands(
    saved: SavedOperands, tensors: Sequence[Tensor | None]
) -> tuple[Operand | None, Operand | None, Sequence[Tensor | None]]:
    """Return the operands of wgrad and dgrad (None if not saved), and the other tensors.

    ``tensors`` begin with those that ``tensors_to_save`` returned.
    """
    operands: list[Operand | None] = []
    for record in (saved.input, saved.weight):
        if record is None:
            operands.append(None)
            continue
        buffers: list[Any] = list(tensors[: record.length])
        operands.append(Operand(buffers, record.canonical, record.shape))
        tensors = tensors[record.length :]
    return operands[0], operands[1], tensors


def with_tensors(args: Args, *tensors: object) -> Args:
    """Return a copy of a slotted dataclass with other values in its first fields.

    This is a hot path, for which ``dataclasses.replace`` is too slow.
    """
    kind: Any = type(args)
    copy: Args = kind(*tensors, *[getattr(args, name) for name in kind.__slots__[len(tensors) :]])
    return copy
