"""Collectives over a process group, as functional ops that trace."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from qtensor.core.errors import ArgumentTypeError, check
from qtensor.functional.ranks.parallel import Parallel, all_gather, all_reduce, reduce_scatter
from qtensor.ops.handover import Request, produce
from qtensor.ops.operation import BackwardContext, BasicOperation, OperationContext


class _Collective(BasicOperation):
    """Base of the collectives.

    Args:
        group: process group that this rank belongs to. With one rank the operation does nothing.

    Raises:
        QTensorError: ``group`` is not a process group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        right = hasattr(group, "group_name") and hasattr(group, "size")
        rule = "it needs a process group that this rank belongs to"
        fix = "Pass a process group, for example torch.distributed.group.WORLD"
        check(right, self.label, rule, repr(group), fix, ArgumentTypeError)
        self.parallel = Parallel(group.group_name, group.size(), "row", True)

    def collect(self, x: Tensor) -> Tensor:
        """Return the result of the forward collective; called on several ranks only."""
        raise NotImplementedError

    def collect_gradient(self, dy: Tensor) -> Tensor:
        """Return the result of the backward collective; called on several ranks only."""
        raise NotImplementedError

    def op_forward_compute(
        self, input: Tensor, *, next_op_input_request: Request | None = None
    ) -> tuple[Any, None]:
        """Run the collective."""
        y = input if self.parallel.size == 1 else self.collect(input)
        return produce(y, next_op_input_request), None

    def op_forward_save_ctx(self, ctx: OperationContext, input: Tensor, returned: None) -> None:
        """Save nothing."""

    def op_backward(self, ctx: BackwardContext, grad_output: Tensor) -> tuple[Any, tuple[()]]:
        """Run the counterpart of the forward collective."""
        alone = self.parallel.size == 1
        dx = grad_output if alone else self.collect_gradient(grad_output)
        return produce(dx, ctx.grad_input_request), ()

    def extra_repr(self) -> str:
        """Return the number of ranks."""
        return f"size={self.parallel.size}"


def _check_rows(op: BasicOperation, x: Tensor, size: int) -> None:
    rule = f"dim 0 must be a multiple of the {size} ranks"
    fits = x.ndim > 0 and x.shape[0] % size == 0
    check(fits, f"{op.label} input", rule, tuple(x.shape), "Pad it")


class AllGather(_Collective):
    """Gather (S, ...) of each rank to (size * S, ...).

    Backward sums the gradients over ranks and returns each rank's part.
    """

    def collect(self, x: Tensor) -> Tensor:
        """Return the rows of all ranks."""
        return all_gather(x, self.parallel)

    def collect_gradient(self, dy: Tensor) -> Tensor:
        """Return this rank's part of the sum."""
        return reduce_scatter(dy, self.parallel)


class ReduceScatter(_Collective):
    """Sum (size * S, ...) over ranks and return each rank's part (S, ...); backward gathers."""

    def collect(self, x: Tensor) -> Tensor:
        """Return this rank's part of the sum."""
        _check_rows(self, x, self.parallel.size)
        return reduce_scatter(x, self.parallel)

    def collect_gradient(self, dy: Tensor) -> Tensor:
        """Return the rows of all ranks."""
        return all_gather(dy, self.parallel)


class AllReduce(_Collective):
    """Sum over ranks.

    Backward returns the gradient unchanged: all ranks have the gradient of the same sum.
    """

    def collect(self, x: Tensor) -> Tensor:
        """Return the sum."""
        return all_reduce(x, self.parallel)

    def collect_gradient(self, dy: Tensor) -> Tensor:
        """Return the gradient unchanged."""
        return dy
