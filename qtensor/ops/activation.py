"""Activations; the gated ones read both halves of the last dim."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from qtensor.errors import check, fail
from qtensor.library.activation import (
    ACTIVATION,
    ACTIVATION_BACKWARD,
    clamped_swiglu,
    is_gated,
)
from qtensor.library.direct import direct
from qtensor.library.fused import ACTIVATION_QUANTIZE
from qtensor.ops.handover import Request, collected, produce
from qtensor.ops.norm import matrix
from qtensor.ops.operation import BackwardContext, BasicOperation, OperationContext

_activation = direct(ACTIVATION, 0)
_activation_quantize = direct(ACTIVATION_QUANTIZE, 0)
_activation_backward = direct(ACTIVATION_BACKWARD, 0, 1)


class Activation(BasicOperation):
    """An activation by its name.

    Attributes:
        kind: as ``qtensor.functional.activation.activation`` takes it.
        is_gated: it reads two halves of the last dim.
    """

    kind = ""
    is_gated: ClassVar[bool]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.is_gated = is_gated(cls.kind)

    def op_forward_compute(
        self, input: Tensor, *, next_op_input_request: Request | None = None
    ) -> tuple[Any, None]:
        """The activation, quantized in the same pass where that was asked for."""
        if input.ndim == 0:
            fail(f"{self.label} input", "it must have a last dim", "a 0-d tensor", "Reshape it")
        width = input.shape[-1]
        if self.is_gated:
            if width % 2:
                rule = "the last dim must be even: one half is activated, the other multiplied"
                fail(f"{self.label} input", rule, tuple(input.shape), "Mend the input")
            width //= 2
        rows, request = matrix(input), next_op_input_request
        if request is None or not request.canonical:
            y = _activation(rows, self.kind)
            return y if rows is input else y.view(*input.shape[:-1], width), None
        shape = (*input.shape[:-1], width)
        buffers = _activation_quantize(
            rows, self.kind, request.canonical, request.scale, None, request.seed
        )
        return collected(buffers, request, shape, input.dtype), None

    def op_forward_save_ctx(self, ctx: OperationContext, input: Tensor, returned: None) -> None:
        """The input."""
        ctx.save_for_backward(matrix(input))
        ctx.shape = input.shape

    def gradient(self, ctx: BackwardContext, grad_output: Tensor) -> Tensor:
        """That of the input."""
        (x,) = ctx.saved_tensors
        dx = _activation_backward(matrix(grad_output), x, self.kind)
        return dx if len(ctx.shape) == 2 else dx.view(ctx.shape)

    def op_backward(self, ctx: BackwardContext, grad_output: Tensor) -> tuple[Any, tuple[()]]:
        """As ``gradient``, quantized where that was asked for."""
        return produce(self.gradient(ctx, grad_output), ctx.grad_input_request), ()


class GELU(Activation):
    """``x * Phi(x)``, by tanh."""

    kind = "gelu"


class QGELU(Activation):
    """``x * sigmoid(1.702 x)``."""

    kind = "qgelu"


class ReLU(Activation):
    """``max(x, 0)``."""

    kind = "relu"


class SReLU(Activation):
    """``max(x, 0)^2``."""

    kind = "srelu"


class SiLU(Activation):
    """``x * sigmoid(x)``."""

    kind = "silu"


class GLU(Activation):
    """``sigmoid(a) * b`` of the halves (a, b) of the last dim."""

    kind = "glu"


class GEGLU(Activation):
    """``gelu(a) * b`` of the halves (a, b) of the last dim."""

    kind = "geglu"


class QGEGLU(Activation):
    """``qgelu(a) * b`` of the halves (a, b) of the last dim."""

    kind = "qgeglu"


class ReGLU(Activation):
    """``relu(a) * b`` of the halves (a, b) of the last dim."""

    kind = "reglu"


class SReGLU(Activation):
    """``srelu(a) * b`` of the halves (a, b) of the last dim."""

    kind = "sreglu"


class SwiGLU(Activation):
    """``silu(a) * b`` of the halves (a, b) of the last dim."""

    kind = "swiglu"


class ClampedSwiGLU(Activation):
    """SwiGLU as GPT-OSS has it: ``g * sigmoid(alpha * g) * (l + offset)``, g = min(a, limit), l = b within +-limit.

    Args:
        alpha: of the sigmoid.
        limit: of both halves (a, b) of the last dim.
        offset: added to the second half.

    Raises:
        QTensorError: numbers that it does not take.
    """

    kind = clamped_swiglu()

    def __init__(self, alpha: float = 1.702, limit: float = 7.0, offset: float = 1.0) -> None:
        super().__init__()
        given = (alpha, limit, offset)
        right = all(isinstance(n, (int, float)) for n in given)
        check(right, self.label, "alpha, limit and offset must be numbers", given, "Mend them")
        self.kind = clamped_swiglu(alpha, limit, offset)

    def extra_repr(self) -> str:
        """The numbers."""
        return self.kind.partition("(")[2].rstrip(")").replace(",", ", ")


ACTIVATIONS: tuple[type[Activation], ...] = (
    GELU,
    QGELU,
    ReLU,
    SReLU,
    SiLU,
    GLU,
    GEGLU,
    QGEGLU,
    ReGLU,
    SReGLU,
    SwiGLU,
    ClampedSwiGLU,
)
