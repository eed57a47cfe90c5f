"""Operations without parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from qtensor.autocasting import active_recipe as active_key
from qtensor.core.errors import check
from qtensor.core.quantizer_registry import parse
from qtensor.functional.linear.linear_function import quantized_output
from qtensor.functional.linear.output import output_canonical
from qtensor.functional.operands import draw_seeds
from qtensor.library.pointwise import DROPOUT, SCALE
from qtensor.modules.state import counter
from qtensor.ops.handover import Request, Value, produce
from qtensor.ops.operation import BackwardContext, BasicOperation, OperationContext
from qtensor.quantizers import Quantizer
from qtensor.recipes import Role, compile_constant, parse_recipe
from qtensor.storage.base import QuantizedTensorStorage


class Identity(BasicOperation):
    """Return the input unchanged."""

    passes_input = True

    def op_forward_compute(
        self, input: Value, *, next_op_input_request: Request | None = None
    ) -> tuple[Value, None]:
        """Return the input."""
        return input, None

    def op_forward_save_ctx(self, ctx: OperationContext, input: Value, returned: None) -> None:
        """Save nothing."""

    def op_backward(self, ctx: BackwardContext, grad_output: Value) -> tuple[Value, tuple[()]]:
        """Return the gradient unchanged."""
        return grad_output, ()


class Reshape(BasicOperation):
    """Reshape the input: ``x.reshape(shape)``.

    Args:
        *shape: sizes, of which one may be -1, or one tuple of sizes.
    """

    def __init__(self, *shape: int | Sequence[int]) -> None:
        super().__init__()
        first = shape[0] if len(shape) == 1 else None
        sizes = cast(tuple[int, ...], tuple(first) if isinstance(first, (tuple, list)) else shape)
        right = all(isinstance(size, int) and size >= -1 for size in sizes)
        rule = "a shape consists of sizes, of which one may be -1"
        check(right and sizes.count(-1) <= 1, self.label, rule, sizes, "Fix the shape")
        self.shape = sizes
        self._known = math.prod([size for size in sizes if size != -1])

    def op_forward_compute(
        self, input: Tensor, *, next_op_input_request: Request | None = None
    ) -> tuple[Any, None]:
        """Return the reshaped input."""
        known = self._known
        fits = (
            input.numel() == known
            if -1 not in self.shape
            else known == 0 or input.numel() % known == 0
        )
        rule = f"the number of elements must fit {self.shape}"
        check(fits, f"{self.label} input", rule, tuple(input.shape), "Fix the input")
        return produce(input.reshape(self.shape), next_op_input_request), None

    def op_forward_save_ctx(self, ctx: OperationContext, input: Tensor, returned: None) -> None:
        """Save the input's shape."""
        ctx.shape = input.shape

    def op_backward(self, ctx: BackwardContext, grad_output: Tensor) -> tuple[Any, tuple[()]]:
        """Return the gradient in the input's shape."""
        return produce(grad_output.reshape(ctx.shape), ctx.grad_input_request), ()

    def extra_repr(self) -> str:
        """Return the shape."""
        return f"{self.shape}"


class ConstantScale(BasicOperation):
    """Multiply by a constant: ``x * scale``.

    Args:
        scale: a number.
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        right = isinstance(scale, (int, float)) and not isinstance(scale, bool)
        check(right, self.label, "scale must be a number", repr(scale), "Pass a float")
        # Stored as a string: Dynamo would make a symbol of a float attribute.
        self._text = repr(float(scale))

    @property
    def scale(self) -> float:
        """The factor."""
        return float(self._text)

    def op_forward_compute(
        self, input: Tensor, *, next_op_input_request: Request | None = None
    ) -> tuple[Any, None]:
        """Return the product."""
        return produce(SCALE(input, float(self._text)), next_op_input_request), None

    def op_forward_save_ctx(self, ctx: OperationContext, input: Tensor, returned: None) -> None:
        """Save nothing."""

    def op_backward(self, ctx: BackwardContext, grad_output: Tensor) -> tuple[Any, tuple[()]]:
        """Return the gradient times the factor."""
        return produce(SCALE(grad_output, float(self._text)), ctx.grad_input_request), ()

    def extra_repr(self) -> str:
        """Return the factor."""
        return self._text


class Dropout(BasicOperation):
    """Set elements to zero with probability ``p`` in training; multiply others by ``1 / (1 - p)``.

    The choice depends on a seed from torch's generator and on an element's position. Eager and
    compiled code therefore drop the same elements, and backward saves 8 bytes instead of a mask.

    Args:
        p: from 0 to 1.
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        right = isinstance(p, (int, float)) and 0 <= p <= 1
        check(right, self.label, "p must be between 0 and 1", repr(p), "Pass such a number")
        self._p = repr(float(p))
        self.draws = counter()

    @property
    def p(self) -> float:
        """The probability."""
        return float(self._p)

    def forward_kwargs(self, like: Tensor, input_requires_grad: bool) -> dict[str, Any]:
        """Return the seed of this call; None outside training."""
        if not self.training or float(self._p) == 0.0:
            return {"seed": None}
        return {"seed": draw_seeds(like, self.draws, (True, False, False))[0]}

    def op_forward_compute(
        self, input: Tensor, *, seed: Tensor | None, next_op_input_request: Request | None = None
    ) -> tuple[Any, None]:
        """Return the input with elements dropped."""
        y = input if seed is None else DROPOUT(input, float(self._p), seed)
        return produce(y, next_op_input_request), None

    def op_forward_save_ctx(
        self, ctx: OperationContext, input: Tensor, returned: None, *, seed: Tensor | None
    ) -> None:
        """Save the seed."""
        ctx.save_for_backward(seed)

    def op_backward(self, ctx: BackwardContext, grad_output: Tensor) -> tuple[Any, tuple[()]]:
        """Drop the same elements of the gradient."""
        (seed,) = ctx.saved_tensors
        dx = grad_output if seed is None else DROPOUT(grad_output, float(self._p), seed)
        return produce(dx, ctx.grad_input_request), ()

    def extra_repr(self) -> str:
        """Return the probability."""
        return f"p={self._p}"


@compile_constant
def _quantize_canonicals(key: str, requested: str) -> tuple[str, str, bool]:
    """Return the canonical strings of output and gradient ("" for high precision).

    The third value is True if the gradient is rounded stochastically.
    """
    if requested:
        return requested, requested, bool(getattr(parse(requested), "stochastic_rounding", False))
    if not key:
        return "", "", False
    output, gradient = (
        parse_recipe(key).quantizer(Role(tensor, "quantize")) for tensor in ("output", "grad_input")
    )
    canonical = "" if output is None else output_canonical(key, output.canonical, "quantize", "")
    if gradient is None:
        return canonical, "", False
    return canonical, gradient.canonical, bool(gradient.stochastic_rounding)


class Quantize(BasicOperation):
    """Quantize the tensor that passes through, and with ``backward`` also its gradient.

    In forward the result is a tensor subclass; an operation that reads the same format uses its
    bytes unchanged. In backward the result is a plain tensor of the format's values, rounded as the
    format does.

    Args:
        format: a format id or quantizer. None uses the recipe's role "output" (for the gradient:
            "grad_input"); without a recipe, or if the role is high precision, nothing is quantized.
        forward: True to quantize the tensor in forward.
        backward: True to quantize the gradient in backward.
    """

    def __init__(
        self, format: str | Quantizer | None = None, *, forward: bool = True, backward: bool = False
    ) -> None:
        super().__init__()
        right = format is None or isinstance(format, (str, Quantizer))
        rule = "format must be a format id, a quantizer or None"
        check(right, self.label, rule, repr(format), 'Pass a format id, for example "fp8"')
        self.canonical = ""
        if format is not None:
            requested = format if isinstance(format, str) else format.canonical
            self.canonical = (
                output_canonical("", requested, "quantize", "")
                if forward
                else parse(requested).canonical
            )
        self.in_forward, self.in_backward = forward, backward
        self.draws = counter()

    def plan_key(self) -> str:
        """Return the key of the active recipe."""
        return active_key()

    def forward_kwargs(self, like: Tensor, input_requires_grad: bool) -> dict[str, Any]:
        """Return the canonical strings of both quantizers and the seed of this call."""
        output, gradient, is_stochastic = _quantize_canonicals(active_key(), self.canonical)
        canonicals = (output if self.in_forward else "", gradient if self.in_backward else "")
        draws = is_stochastic and self.in_backward and torch.is_grad_enabled()
        seed = draw_seeds(like, self.draws, (True, False, False))[0] if draws else None
        return {"canonicals": canonicals, "seed": seed}

    def op_forward_compute(
        self,
        input: Tensor,
        *,
        canonicals: tuple[str, str],
        seed: Tensor | None,
        next_op_input_request: Request | None = None,
    ) -> tuple[Any, None]:
        """Return the quantized input."""
        canonical = canonicals[0]
        if not canonical or isinstance(input, QuantizedTensorStorage):
            return input, None
        return quantized_output(input, canonical), None

    def op_forward_save_ctx(
        self,
        ctx: OperationContext,
        input: Tensor,
        returned: None,
        *,
        canonicals: tuple[str, str],
        seed: Tensor | None,
    ) -> None:
        """Save the quantizer and the seed."""
        ctx.canonical = canonicals[1]
        ctx.save_for_backward(seed)

    def op_backward(self, ctx: BackwardContext, grad_output: Tensor) -> tuple[Any, tuple[()]]:
        """Return the gradient, as values of the format if ``backward`` was set."""
        if not ctx.canonical:
            return grad_output, ()
        values = quantized_output(grad_output, ctx.canonical, ctx.saved_tensors[0]).dequantize()
        return produce(values, ctx.grad_input_request), ()
