"""Operations without parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from qtensor.autocasting import active_recipe as active_key
from qtensor.errors import check
from qtensor.functional.linear import quantized_output
from qtensor.functional.operands import draw_seeds
from qtensor.functional.output import output_canonical
from qtensor.library.codec import parse
from qtensor.library.direct import direct
from qtensor.library.pointwise import DROPOUT, SCALE
from qtensor.modules.state import counter
from qtensor.ops.handover import Request, produce
from qtensor.ops.operation import BackwardContext, BasicOperation, OperationContext
from qtensor.quantizers import Quantizer
from qtensor.recipes import Role, compile_constant, parse_recipe
from qtensor.storage.base import QuantizedTensorStorage

_dropout = direct(DROPOUT, 0, 2)
_scale = direct(SCALE, 0)


class Identity(BasicOperation):
    """The input as it is."""

    passes_input = True

    def op_forward_compute(
        self, input: Any, *, next_op_input_request: Request | None = None
    ) -> tuple[Any, None]:
        """The input."""
        return input, None

    def op_forward_save_ctx(self, ctx: OperationContext, input: Any, returned: None) -> None:
        """Nothing."""

    def op_backward(self, ctx: BackwardContext, grad_output: Any) -> tuple[Any, tuple[()]]:
        """The gradient as it is."""
        return grad_output, ()


class Reshape(BasicOperation):
    """``x.reshape(shape)``.

    Args:
        *shape: sizes, one of which may be -1; or a tuple of them.
    """

    def __init__(self, *shape: Any) -> None:
        super().__init__()
        nested = len(shape) == 1 and isinstance(shape[0], (tuple, list))
        given = tuple(shape[0]) if nested else shape
        right = all(isinstance(size, int) and size >= -1 for size in given)
        rule = "a shape is made of sizes, one of which may be -1"
        check(right and given.count(-1) <= 1, self.label, rule, given, "Mend the shape")
        self.shape = given
        self._known = math.prod([size for size in given if size != -1])

    def op_forward_compute(
        self, input: Tensor, *, next_op_input_request: Request | None = None
    ) -> tuple[Any, None]:
        """The reshaped input."""
        known = self._known
        fits = (
            input.numel() == known
            if -1 not in self.shape
            else known == 0 or input.numel() % known == 0
        )
        rule = f"the input must have the elements of {self.shape}"
        check(fits, f"{self.label} input", rule, tuple(input.shape), "Mend the input")
        return produce(input.reshape(self.shape), next_op_input_request), None

    def op_forward_save_ctx(self, ctx: OperationContext, input: Tensor, returned: None) -> None:
        """The input's shape."""
        ctx.shape = input.shape

    def op_backward(self, ctx: BackwardContext, grad_output: Tensor) -> tuple[Any, tuple[()]]:
        """The gradient in the input's shape."""
        return produce(grad_output.reshape(ctx.shape), ctx.grad_input_request), ()

    def extra_repr(self) -> str:
        """The shape."""
        return f"{self.shape}"


class ConstantScale(BasicOperation):
    """``x * scale``.

    Args:
        scale: a number.
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        right = isinstance(scale, (int, float)) and not isinstance(scale, bool)
        check(right, self.label, "scale must be a number", repr(scale), "Pass a float")
        # As text: Dynamo would make a symbol of a float that it finds in an object.
        self._text = repr(float(scale))

    @property
    def scale(self) -> float:
        """The factor."""
        return float(self._text)

    def op_forward_compute(
        self, input: Tensor, *, next_op_input_request: Request | None = None
    ) -> tuple[Any, None]:
        """The product."""
        return produce(_scale(input, float(self._text)), next_op_input_request), None

    def op_forward_save_ctx(self, ctx: OperationContext, input: Tensor, returned: None) -> None:
        """Nothing."""

    def op_backward(self, ctx: BackwardContext, grad_output: Tensor) -> tuple[Any, tuple[()]]:
        """The gradient times the factor."""
        return produce(_scale(grad_output, float(self._text)), ctx.grad_input_request), ()

    def extra_repr(self) -> str:
        """The factor."""
        return self._text


class Dropout(BasicOperation):
    """Elements are zero with probability ``p`` in training, the others grow by ``1 / (1 - p)``.

    Which ones depends on a seed from torch's generator and on an element's place: eager and compiled code drop the same ones,
    and backward saves 8 bytes instead of a mask.

    Args:
        p: from 0 to 1.
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        right = isinstance(p, (int, float)) and 0 <= p <= 1
        check(right, self.label, "p must lie between 0 and 1", repr(p), "Pass such a number")
        self._p = repr(float(p))
        self.draws = counter()

    @property
    def p(self) -> float:
        """The probability."""
        return float(self._p)

    def forward_kwargs(self, like: Tensor, input_requires_grad: bool) -> dict[str, Any]:
        """A seed, in training."""
        if not self.training or float(self._p) == 0.0:
            return {"seed": None}
        return {"seed": draw_seeds(like, self.draws, (True, False, False))[0]}

    def op_forward_compute(
        self,
        input: Tensor,
        *,
        seed: Tensor | None,
        next_op_input_request: Request | None = None,
    ) -> tuple[Any, None]:
        """What is left of the input."""
        y = input if seed is None else _dropout(input, float(self._p), seed)
        return produce(y, next_op_input_request), None

    def op_forward_save_ctx(
        self, ctx: OperationContext, input: Tensor, returned: None, *, seed: Tensor | None
    ) -> None:
        """The seed."""
        ctx.save_for_backward(seed)

    def op_backward(self, ctx: BackwardContext, grad_output: Tensor) -> tuple[Any, tuple[()]]:
        """The same elements of the gradient."""
        (seed,) = ctx.saved_tensors
        dx = grad_output if seed is None else _dropout(grad_output, float(self._p), seed)
        return produce(dx, ctx.grad_input_request), ()

    def extra_repr(self) -> str:
        """The probability."""
        return f"p={self._p}"


@compile_constant
def _quantize_texts(key: str, given: str) -> tuple[str, str, bool]:
    """Canonical texts of an output and of its gradient, "" for high precision; whether the latter is rounded at random."""
    if given:
        return given, given, bool(getattr(parse(given), "stochastic_rounding", False))
    if not key:
        return "", "", False
    output, gradient = (
        parse_recipe(key).quantizer(Role(tensor, "quantize")) for tensor in ("output", "grad_input")
    )
    text = "" if output is None else output_canonical(key, output.canonical, "quantize", "")
    if gradient is None:
        return text, "", False
    return text, gradient.canonical, bool(gradient.stochastic_rounding)


class Quantize(BasicOperation):
    """Quantize the tensor that passes, and with ``backward`` its gradient.

    In forward the tensor subclass goes on, whose bytes an operation that reads the same format takes as they are. A gradient
    goes on as the format's values, rounded as the format says.

    Args:
        format: a format id or quantizer; None for the recipe's "output" role (of the gradient: "grad_input"). Where that is
            high precision, or there is no recipe, nothing is quantized.
        forward: quantize what passes in forward.
        backward: quantize what passes in backward.
    """

    def __init__(
        self, format: str | Quantizer | None = None, *, forward: bool = True, backward: bool = False
    ) -> None:
        super().__init__()
        right = format is None or isinstance(format, (str, Quantizer))
        rule = "format must be a format id, a quantizer or None"
        check(right, self.label, rule, repr(format), 'Pass "fp8", say')
        self.text = ""
        if format is not None:
            given = format if isinstance(format, str) else format.canonical
            self.text = (
                output_canonical("", given, "quantize", "") if forward else parse(given).canonical
            )
        self.in_forward, self.in_backward = forward, backward
        self.draws = counter()

    def plan_key(self) -> str:
        """The recipe in force."""
        return active_key()

    def forward_kwargs(self, like: Tensor, input_requires_grad: bool) -> dict[str, Any]:
        """Which quantizer."""
        output, gradient, is_stochastic = _quantize_texts(active_key(), self.text)
        texts = (output if self.in_forward else "", gradient if self.in_backward else "")
        draws = is_stochastic and self.in_backward and torch.is_grad_enabled()
        seed = draw_seeds(like, self.draws, (True, False, False))[0] if draws else None
        return {"texts": texts, "seed": seed}

    def op_forward_compute(
        self,
        input: Any,
        *,
        texts: tuple[str, str],
        seed: Tensor | None,
        next_op_input_request: Request | None = None,
    ) -> tuple[Any, None]:
        """The quantized input."""
        text = texts[0]
        if not text or isinstance(input, QuantizedTensorStorage):
            return input, None
        return quantized_output(input, text), None

    def op_forward_save_ctx(
        self,
        ctx: OperationContext,
        input: Any,
        returned: None,
        *,
        texts: tuple[str, str],
        seed: Tensor | None,
    ) -> None:
        """The quantizer and the seed."""
        ctx.text = texts[1]
        ctx.save_for_backward(seed)

    def op_backward(self, ctx: BackwardContext, grad_output: Tensor) -> tuple[Any, tuple[()]]:
        """The gradient, as values of the format where that was asked for."""
        if not ctx.text:
            return grad_output, ()
        values = quantized_output(grad_output, ctx.text, ctx.saved_tensors[0]).dequantize()
        return produce(values, ctx.grad_input_request), ()
