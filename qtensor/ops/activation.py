"""Activations as operations; gated activations read both halves of the last dim."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from qtensor.core.errors import check, fail
from qtensor.library.activation import ACTIVATION, ACTIVATION_BACKWARD, clamped_swiglu, is_gated
from qtensor.library.fused import ACTIVATION_QUANTIZE
from qtensor.ops.handover import Request, from_buffers, produce
from qtensor.ops.norm import matrix
from qtensor.ops.operation import BackwardContext, BasicOperation, OperationContext


class Activation(BasicOperation):
    """Base of the activations.

    Attributes:
        kind: name of the activation, as ``qtensor.functional.activation.activation`` takes it.
        is_gated: True if it reads two halves of the last dim.
    """

    kind = ""
    is_gated: ClassVar[bool]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.is_gated = is_gated(cls.kind)

    def op_forward_compute(
        self, input: Tensor, *, next_op_input_request: Request | None = None
    ) -> tuple[Any, None]:
        """Return the activation; if requested, quantize it in the same pass."""
        if input.ndim == 0:
            fail(f"{self.label} input", "it must have a last dim", "a 0-d tensor", "Reshape it")
        width = input.shape[-1]
        if self.is_gated:
            if width % 2:
                rule = "the last dim must be even: one half is activated, the other multiplied"
                fail(f"{self.label} input", rule, tuple(input.shape), "Fix the input")
            width //= 2
        rows, request = matrix(input), next_op_input_request
        if request is None or not request.canonical:
            y = ACTIVATION(rows, self.kind)
            return y if rows is input else y.view(*input.shape[:-1], width), None
        shape = (*input.shape[:-1], width)
        buffers = ACTIVATION_QUANTIZE(
            rows, self.kind, request.canonical, request.scale, None, request.seed
        )
        return from_buffers(buffers, request, shape, input.dtype), None

    def op_forward_save_ctx(self, ctx: OperationContext, input: Tensor, returned: None) -> None:
        """Save the input."""
        ctx.save_for_backward(matrix(input))
        ctx.shape = input.shape

    def op_backward(self, ctx: BackwardContext, grad_output: Tensor) -> tuple[Any, tuple[()]]:
        """Return the gradient of the input; if requested, quantize it."""
        (x,) = ctx.saved_tensors
        dx = ACTIVATION_BACKWARD(matrix(grad_output), x, self.kind)
        dx = dx if len(ctx.shape) == 2 else dx.view(ctx.shape)
        return produce(dx, ctx.grad_input_request), ()


class GELU(Activation):
    """``x * Phi(x)``, in the tanh approximation."""

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
    """SwiGLU as in GPT-OSS: ``g * sigmoid(alpha * g) * (l + offset)``.

    For halves (a, b) of the last dim, g = min(a, limit) and l = b clamped to +-limit.

    Args:
        alpha: factor of the sigmoid's argument.
        limit: bound of both halves.
        offset: number added to the second half.

    Raises:
        QTensorError: an argument is not a number, or out of range.
    """

    kind = clamped_swiglu()

    def __init__(self, alpha: float = 1.702, limit: float = 7.0, offset: float = 1.0) -> None:
        super().__init__()
        numbers = (alpha, limit, offset)
        right = all(isinstance(n, (int, float)) for n in numbers)
        check(right, self.label, "alpha, limit and offset must be numbers", numbers, "Pass numbers")
        self.kind = clamped_swiglu(alpha, limit, offset)

    def extra_repr(self) -> str:
        """Return alpha, limit and offset."""
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
