"""Base of the CPU backends: stacks matrix by matrix, and what a kernel leaves to torch."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from qtensor.kernels.products.finishing import finish_in_torch, kernel_finishes
from qtensor.kernels.products.problem import GemmSide, Problem
from qtensor.kernels.products.stacks import multiply_each, of_each


class MatrixBackend:
    """Multiply matrices by ``multiply``, and the matrices of stacks one by one.

    Attributes:
        problem: the product without its data.
        each: the backend of one matrix of a stack, or None.
        finishes: whether ``multiply`` adds the bias and writes the dtype of the result.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.each = type(self)(of_each(problem)) if problem.batched else None
        self.finishes = kernel_finishes(problem)

    def __call__(
        self, out: Tensor, a: list[Tensor], b: list[Tensor], bias: Tensor | None
    ) -> str | None:
        """Write ``out`` (..., N); or return why these tensors cannot be taken."""
        if self.finishes and (self.each is None or bias is None):
            return self._multiply(out, a, b, bias)
        return finish_in_torch(out, bias, lambda total: self._multiply(total, a, b, None))

    def _multiply(
        self, out: Tensor, a: list[Tensor], b: list[Tensor], bias: Tensor | None
    ) -> str | None:
        if self.each is not None:
            return multiply_each(self.each, out, (self.problem.a, a), (self.problem.b, b))
        return self.multiply(out, a, b, bias)

    def multiply(
        self, out: Tensor, a: list[Tensor], b: list[Tensor], bias: Tensor | None
    ) -> str | None:
        """Write a product of matrices.

        Args:
            out: (..., N), of the dtype of the problem or float32.
            a: the buffers of the left operand.
            b: those of the right one.
            bias: one value or (N,), or None.

        Returns:
            Why it wrote nothing, or None.
        """
        raise NotImplementedError


def sides_refusal(problem: Problem, of_side: Callable[[GemmSide], str | None]) -> str | None:
    """Return why a backend does not take one of the operands, or None."""
    for name, side in (("a", problem.a), ("b", problem.b)):
        reason = of_side(side)
        if reason is not None:
            return f"operand {name}: {reason}"
    return None
