"""Collectives over a process group, as functional ops that trace."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qtensor.errors import DtypeError, check
from qtensor.functional.parallel import Parallel, all_gather, all_reduce, reduce_scatter
from qtensor.ops.handover import Request, produce
from qtensor.ops.operation import BackwardContext, BasicOperation, OperationContext


class _Collective(BasicOperation):
    """What the collectives share.

    Args:
        group: process group that this rank belongs to; with one rank nothing is done.

    Raises:
        QTensorError: no process group.
    """

    def __init__(self, group: Any) -> None:
        super().__init__()
        check(
            hasattr(group, "group_name") and hasattr(group, "size"),
            self.label,
            "it needs a process group that this rank belongs to",
            repr(group),
            "Pass torch.distributed.group.WORLD, say",
            DtypeError,
        )
        self.parallel = Parallel(group.group_name, group.size(), "row", True)

    def collect(self, x: Tensor) -> Tensor:
        """What forward does on several ranks."""
        raise NotImplementedError

    def collect_gradient(self, dy: Tensor) -> Tensor:
        """What backward does on several ranks."""
        raise NotImplementedError

    def op_forward_compute(
        self, input: Tensor, *, next_op_input_request: Request | None = None
    ) -> tuple[Any, None]:
        """The collective."""
        y = input if self.parallel.size == 1 else self.collect(input)
        return produce(y, next_op_input_request), None

    def op_forward_save_ctx(self, ctx: OperationContext, input: Tensor, returned: None) -> None:
        """Nothing."""

    def op_backward(self, ctx: BackwardContext, grad_output: Tensor) -> tuple[Any, tuple[()]]:
        """Its counterpart."""
        alone = self.parallel.size == 1
        dx = grad_output if alone else self.collect_gradient(grad_output)
        return produce(dx, ctx.grad_input_request), ()

    def extra_repr(self) -> str:
        """The number of ranks."""
        return f"size={self.parallel.size}"


def _check_rows(op: BasicOperation, x: Tensor, size: int) -> None:
    rule = f"dim 0 must be a multiple of the {size} ranks"
    fits = x.ndim > 0 and x.shape[0] % size == 0
    check(fits, f"{op.label} input", rule, tuple(x.shape), "Pad it")


class AllGather(_Collective):
    """(S, ...) of each rank to (size * S, ...); backward sums the gradients over ranks, each rank its part."""

    def collect(self, x: Tensor) -> Tensor:
        """All ranks' rows."""
        return all_gather(x, self.parallel)

    def collect_gradient(self, dy: Tensor) -> Tensor:
        """This rank's part of the sum."""
        return reduce_scatter(dy, self.parallel)


class ReduceScatter(_Collective):
    """(size * S, ...) summed over ranks to (S, ...), each rank its part; backward gathers."""

    def collect(self, x: Tensor) -> Tensor:
        """This rank's part of the sum."""
        _check_rows(self, x, self.parallel.size)
        return reduce_scatter(x, self.parallel)

    def collect_gradient(self, dy: Tensor) -> Tensor:
        """All ranks' rows."""
        return all_gather(dy, self.parallel)


class AllReduce(_Collective):
    """The sum over ranks; backward passes the gradient, which each rank has of the same sum, as it is."""

    def collect(self, x: Tensor) -> Tensor:
        """The sum."""
        return all_reduce(x, self.parallel)

    def collect_gradient(self, dy: Tensor) -> Tensor:
        """The gradient as it is."""
        return dy
