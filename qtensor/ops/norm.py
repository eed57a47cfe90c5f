"""LayerNorm, RMSNorm and L2Normalization as operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qtensor.core.errors import check, fail
from qtensor.library.fused import NORM_QUANTIZE
from qtensor.library.norm import NORM, NORM_BACKWARD
from qtensor.library.pointwise import L2_NORM, L2_NORM_BACKWARD
from qtensor.modules.normed import eps_text, reset_norm
from qtensor.ops.handover import Request, from_buffers, produce
from qtensor.ops.operation import BackwardContext, BasicOperation, OperationContext


def matrix(x: Tensor) -> Tensor:
    """Return ``x`` (..., K) as (M, K)."""
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


class _Norm(BasicOperation):
    """Base of the norms with parameters.

    Args:
        normalized_shape: K or (K,), the size of the last dim.
        eps: number added to the variance.
        zero_centered_gamma: True if the stored weight is gamma - 1.
        device: device of the parameters; "meta" leaves them without data until
            ``reset_parameters``.
        dtype: dtype of the parameters; torch's default dtype if None.
    """

    kind = ""

    def __init__(
        self,
        normalized_shape: int | tuple[int, ...],
        *,
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        given = normalized_shape
        shape = tuple(given) if isinstance(given, (tuple, list)) else (given,)
        rule = "normalized_shape must be the size of the last dim, a positive integer"
        right = len(shape) == 1 and isinstance(shape[0], int) and shape[0] > 0
        check(right, self.label, rule, repr(given), "Pass its size")
        # Stored as a string: Dynamo would make a symbol of a float attribute.
        self._eps = eps_text(self.label, eps)
        self.zero_centered_gamma = zero_centered_gamma
        self.weight = nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))
        self.bias: nn.Parameter | None
        if self.kind == "layernorm":
            self.bias = nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        if not self.weight.is_meta:
            self.reset_parameters()

    @property
    def eps(self) -> float:
        """Number added to the variance."""
        return float(self._eps)

    def reset_parameters(self) -> None:
        """Initialise the weight and bias so that the norm is not rescaled."""
        reset_norm(self.weight, self.bias, self.zero_centered_gamma)

    def op_forward_compute(
        self, input: Tensor, *, next_op_input_request: Request | None = None
    ) -> tuple[Any, tuple[Tensor, ...]]:
        """Return the normalized input; if requested, quantize it in the same pass."""
        weight = self.weight
        if input.ndim == 0 or input.shape[-1] != weight.shape[0]:
            rule = f"the last dim must be {weight.shape[0]}"
            fail(f"{self.label} input", rule, tuple(input.shape), "Fix the input")
        rows = matrix(input)
        settings = (weight, self.bias, self.kind, float(self._eps), self.zero_centered_gamma)
        request = next_op_input_request
        if request is None or not request.canonical:
            y, mean, rstd = NORM(rows, *settings, input.dtype)
            return y if rows is input else y.view(input.shape), (rows, weight, mean, rstd)
        *buffers, mean, rstd = NORM_QUANTIZE(
            rows, *settings, input.dtype, request.canonical, request.scale, None, request.seed
        )
        quantized = from_buffers(buffers, request, input.shape, input.dtype)
        return quantized, (rows, weight, mean, rstd)

    def op_forward_save_ctx(
        self, ctx: OperationContext, input: Tensor, returned: tuple[Tensor, ...]
    ) -> None:
        """Save the input, the weight and the statistics of the input's rows."""
        ctx.save_for_backward(*returned)
        ctx.shape = input.shape

    def op_backward(self, ctx: BackwardContext, grad_output: Tensor) -> tuple[Any, list[Any]]:
        """Return the gradients; if requested, quantize the input's."""
        x, weight, mean, rstd = ctx.saved_tensors
        has_bias = self.kind == "layernorm"
        dx, dweight, dbias = NORM_BACKWARD(
            matrix(grad_output),
            x,
            weight,
            mean,
            rstd,
            self.kind,
            self.zero_centered_gamma,
            has_bias,
        )
        dx = dx if len(ctx.shape) == 2 else dx.view(ctx.shape)
        grads = [dweight, dbias] if has_bias else [dweight]
        return produce(dx, ctx.grad_input_request), grads

    def extra_repr(self) -> str:
        """Return the size and eps."""
        centered = ", zero_centered_gamma=True" if self.zero_centered_gamma else ""
        return f"{self.weight.shape[0]}, eps={self._eps}{centered}"


class LayerNorm(_Norm):
    """LayerNorm over the last dim, with the arithmetic of docs/numerics.md."""

    __doc__ += (_Norm.__doc__ or "")[len("Base of the norms with parameters.") :]
    kind = "layernorm"


class RMSNorm(_Norm):
    """RMSNorm over the last dim, with the arithmetic of docs/numerics.md."""

    __doc__ += (_Norm.__doc__ or "")[len("Base of the norms with parameters.") :]
    kind = "rmsnorm"


class L2Normalization(BasicOperation):
    """``x / sqrt(max(sum(x^2), eps))`` over the last dim.

    Args:
        eps: lower bound of the sum of squares.
    """

    def __init__(self, *, eps: float = 1e-6) -> None:
        super().__init__()
        self._eps = eps_text(self.label, eps)

    def op_forward_compute(
        self, input: Tensor, *, next_op_input_request: Request | None = None
    ) -> tuple[Any, Tensor]:
        """Return the normalized input."""
        y, rnorm = L2_NORM(input, float(self._eps))
        return produce(y, next_op_input_request), rnorm

    def op_forward_save_ctx(self, ctx: OperationContext, input: Tensor, returned: Tensor) -> None:
        """Save the input and the reciprocals of its norms."""
        ctx.save_for_backward(input, returned)

    def op_backward(self, ctx: BackwardContext, grad_output: Tensor) -> tuple[Any, tuple[()]]:
        """Return the gradient of the input."""
        x, rnorm = ctx.saved_tensors
        dx = L2_NORM_BACKWARD(grad_output, x, rnorm, float(self._eps))
        return produce(dx, ctx.grad_input_request), ()
