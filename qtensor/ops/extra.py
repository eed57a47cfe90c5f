"""Tensors that enter or leave a sequence beside its input and output."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qtensor.errors import check, fail
from qtensor.library.pointwise import add
from qtensor.ops.handover import Request, produce
from qtensor.ops.operation import BackwardContext, BasicOperation

Extra = list[tuple[Tensor, ...]]


def check_channel(label: str, channel: str | None) -> None:
    """Refuse what is no name.

    Raises:
        QTensorError: with the value.
    """
    right = channel is None or (isinstance(channel, str) and bool(channel))
    rule = "a channel is a name, or None for a tensor of the caller"
    check(right, label, rule, repr(channel), 'Pass "residual", say')


def check_extra(op: BasicOperation, input: Tensor, extra: Tensor) -> None:
    """Refuse a tensor that does not fit beside the input.

    Raises:
        QTensorError: with both shapes.
    """
    if input.shape != extra.shape or input.dtype != extra.dtype:
        rule = "the extra input must have the shape and dtype of the input"
        got = f"{tuple(extra.shape)} {extra.dtype} beside {tuple(input.shape)} {input.dtype}"
        fail(op.label, rule, got, "Mend one of them")


class _Passing(BasicOperation, is_base=True):
    """What operations share whose backward needs nothing of the forward."""

    fuser_is_split = True

    def fuser_forward_save_ctx(
        self, basic_op_ctxs: Any, input: Any, returned: Any, **kwargs: Any
    ) -> None:
        """Nothing."""


class AddExtraInput(_Passing):
    """``x + extra``.

    Args:
        channel: take the extra input from the ``MakeExtraOutput`` of this channel, earlier in the sequence; None: from the
            caller, who passes it behind the input.
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
        basic_op_kwargs: list[dict[str, Any]],
        next_op_input_request: Request | None = None,
    ) -> tuple[Any, Extra, None]:
        """The sum."""
        (extra,) = basic_op_extra_inputs[0]
        check_extra(self, input, extra)
        return produce(add(input, extra), next_op_input_request), [()], None

    def fuser_backward(
        self,
        basic_op_ctxs: list[BackwardContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[Tensor | None, ...]],
    ) -> tuple[Any, list[tuple[()]], list[tuple[Tensor | None, ...]]]:
        """The gradient, for both."""
        dx = produce(grad_output, basic_op_ctxs[0].grad_input_request)
        return dx, [()], [(grad_output,)]

    def extra_repr(self) -> str:
        """The channel."""
        return "" if self.input_channels[0] is None else f"channel={self.input_channels[0]!r}"


class MakeExtraOutput(_Passing):
    """The input as it is, and once more as an extra output.

    Args:
        channel: the operations of this channel, later in the sequence, read it; None: it goes to the caller, behind the
            output.
    """

    num_extra_outputs = 1
    passes_input = True

    def __init__(self, *, channel: str | None = None) -> None:
        super().__init__()
        check_channel(self.label, channel)
        self.output_channels = (channel,)

    def fuser_forward_compute(
        self,
        input: Tensor,
        *,
        basic_op_extra_inputs: Extra,
        basic_op_kwargs: list[dict[str, Any]],
        next_op_input_request: Request | None = None,
    ) -> tuple[Any, Extra, None]:
        """The input, twice."""
        return produce(input, next_op_input_request), [(input,)], None

    def fuser_backward(
        self,
        basic_op_ctxs: list[BackwardContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[Tensor | None, ...]],
    ) -> tuple[Any, list[tuple[()]], list[tuple[()]]]:
        """The sum of both gradients."""
        (extra,) = basic_op_grad_extra_outputs[0]
        dx = grad_output if extra is None else add(grad_output, extra)
        return produce(dx, basic_op_ctxs[0].grad_input_request), [()], [()]

    def extra_repr(self) -> str:
        """The channel."""
        return "" if self.output_channels[0] is None else f"channel={self.output_channels[0]!r}"


class ExtraInput(_Passing):
    """The input as it is; a tensor of the caller goes into a channel, for any number of later operations.

    Args:
        channel: its name.
    """

    num_extra_inputs = 1
    num_extra_outputs = 1

    def __init__(self, *, channel: str) -> None:
        super().__init__()
        rule = "it needs the channel that the tensor goes into"
        check(channel is not None, self.label, rule, "None", 'Pass channel="splits", say')
        check_channel(self.label, channel)
        self.output_channels = (channel,)

    def fuser_forward_compute(
        self,
        input: Any,
        *,
        basic_op_extra_inputs: Extra,
        basic_op_kwargs: list[dict[str, Any]],
        next_op_input_request: Request | None = None,
    ) -> tuple[Any, Extra, None]:
        """Both as they are."""
        return input, [basic_op_extra_inputs[0]], None

    def fuser_backward(
        self,
        basic_op_ctxs: list[BackwardContext],
        grad_output: Any,
        *,
        basic_op_grad_extra_outputs: list[tuple[Tensor | None, ...]],
    ) -> tuple[Any, list[tuple[()]], list[tuple[Tensor | None, ...]]]:
        """Both gradients as they are."""
        return grad_output, [()], [basic_op_grad_extra_outputs[0]]

    def extra_repr(self) -> str:
        """The channel."""
        return f"channel={self.output_channels[0]!r}"
