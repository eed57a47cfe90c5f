"""Operations with extra tensors: inputs and outputs of a sequence in addition to the main ones."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qtensor.core.errors import check, fail
from qtensor.library.pointwise import add
from qtensor.ops.handover import Request, Value, produce
from qtensor.ops.operation import (
    BackwardContext,
    BasicOperation,
    Extra,
    GradExtra,
    OperationContext,
)


def check_channel(label: str, channel: str | None) -> None:
    """Check that a channel is a name or None."""
    right = channel is None or (isinstance(channel, str) and bool(channel))
    rule = "a channel must be a name, or None for a tensor of the caller"
    check(right, label, rule, repr(channel), 'Pass a name, for example "residual"')


def check_extra(op: BasicOperation, input: Tensor, extra: Tensor) -> None:
    """Check that an extra input has the shape and dtype of the input."""
    if input.shape != extra.shape or input.dtype != extra.dtype:
        rule = "the extra input must have the shape and dtype of the input"
        got = f"{tuple(extra.shape)} {extra.dtype} for input {tuple(input.shape)} {input.dtype}"
        fail(op.label, rule, got, "Fix one of them")


class _Passing(BasicOperation, is_base=True):
    """Base of operations whose backward needs nothing from the forward."""

    fuser_is_split = True

    def fuser_forward_save_ctx(
        self, basic_op_ctxs: list[OperationContext], input: Value, returned: None, **_: object
    ) -> None:
        """Save nothing."""


class AddExtraInput(_Passing):
    """Add an extra input: ``x + extra``.

    Args:
        channel: channel of an earlier ``MakeExtraOutput`` in the sequence that brings the extra
            input. None if the caller passes it after the input.
    """

    num_extra_inputs = 1

    def __init__(self, *, channel: str | None = None) -> None:
        super().__init__()
        check_channel(self.label, channel)
        self.input_channels = (channel,)

    def fuser_forward_compute(
        self,
        input: Tensor,
        *,
        basic_op_extra_inputs: Extra,
        next_op_input_request: Request | None = None,
        **_: object,
    ) -> tuple[Any, Extra, None]:
        """Return the sum."""
        (extra,) = basic_op_extra_inputs[0]
        check_extra(self, input, extra)
        return produce(add(input, extra), next_op_input_request), [()], None

    def fuser_backward(
        self, basic_op_ctxs: list[BackwardContext], grad_output: Tensor, **_: object
    ) -> tuple[Any, list[tuple[()]], GradExtra]:
        """Return the gradient for both inputs."""
        dx = produce(grad_output, basic_op_ctxs[0].grad_input_request)
        return dx, [()], [(grad_output,)]

    def extra_repr(self) -> str:
        """Return the channel."""
        return "" if self.input_channels[0] is None else f"channel={self.input_channels[0]!r}"


class MakeExtraOutput(_Passing):
    """Return the input unchanged, and a second time as an extra output.

    Args:
        channel: channel from which later operations of the sequence read it. None if it is returned
            to the caller after the output.
    """

    num_extra_outputs = 1
    passes_input = True

    def __init__(self, *, channel: str | None = None) -> None:
        super().__init__()
        check_channel(self.label, channel)
        self.output_channels = (channel,)

    def fuser_forward_compute(
        self, input: Tensor, *, next_op_input_request: Request | None = None, **_: object
    ) -> tuple[Any, Extra, None]:
        """Return the input twice."""
        return produce(input, next_op_input_request), [(input,)], None

    def fuser_backward(
        self,
        basic_op_ctxs: list[BackwardContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: GradExtra,
    ) -> tuple[Any, list[tuple[()]], list[tuple[()]]]:
        """Return the sum of both gradients."""
        (extra,) = basic_op_grad_extra_outputs[0]
        dx = grad_output if extra is None else add(grad_output, extra)
        return produce(dx, basic_op_ctxs[0].grad_input_request), [()], [()]

    def extra_repr(self) -> str:
        """Return the channel."""
        return "" if self.output_channels[0] is None else f"channel={self.output_channels[0]!r}"


class ExtraInput(_Passing):
    """Return the input unchanged, and put a tensor of the caller into a channel.

    Any number of later operations can read the channel.

    Args:
        channel: name of the channel.
    """

    num_extra_inputs = 1
    num_extra_outputs = 1

    def __init__(self, *, channel: str) -> None:
        super().__init__()
        rule = "channel must be the name of the channel that receives the tensor"
        check(channel is not None, self.label, rule, "None", 'Pass one, for example "splits"')
        check_channel(self.label, channel)
        self.output_channels = (channel,)

    def fuser_forward_compute(
        self, input: Value, *, basic_op_extra_inputs: Extra, **_: object
    ) -> tuple[Any, Extra, None]:
        """Return both tensors unchanged."""
        return input, [basic_op_extra_inputs[0]], None

    def fuser_backward(
        self,
        basic_op_ctxs: list[BackwardContext],
        grad_output: Value,
        *,
        basic_op_grad_extra_outputs: GradExtra,
    ) -> tuple[Any, list[tuple[()]], GradExtra]:
        """Return both gradients unchanged."""
        return grad_output, [()], [basic_op_grad_extra_outputs[0]]

    def extra_repr(self) -> str:
        """Return the channel."""
        return f"channel={self.output_channels[0]!r}"
