"""Find process groups by name, and reduce maxima over them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from qtensor.core.errors import QTensorError, check, this_rank

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Group: TypeAlias = "ProcessGroup | DeviceMesh | str"
"""What callers name a group by: the group, a mesh with one dim, or the group's name."""


def check_group(group: object, op: str) -> Any:
    """Return the process group with a name, after a check that it was not destroyed.

    Args:
        group: a process group or its name; other values, such as a mesh, are returned as they are.
        op: the operation, for the error.

    Raises:
        QTensorError: the process has no such group.
    """
    name = group if isinstance(group, str) else getattr(group, "group_name", None)
    if not isinstance(name, str):
        return group
    try:
        # torch has a type of its own for names.
        return torch.distributed.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except (RuntimeError, LookupError, ValueError) as error:
        raise _missing(op, f"the name {name!r}") from error


def group_of_mesh(mesh: DeviceMesh, dim: int | None, op: str) -> ProcessGroup:
    """Return the process group of a dim of a mesh; None stands for the only dim.

    Raises:
        QTensorError: the group was destroyed.
    """
    try:
        return mesh.get_group() if dim is None else mesh.get_group(dim)
    except (RuntimeError, LookupError, ValueError) as error:
        raise _missing(op, f"dim {0 if dim is None else dim} of {mesh}") from error


def _missing(op: str, got: str) -> QTensorError:
    rank = this_rank()
    return QTensorError(
        f"{op}{f' ({rank})' if rank else ''}: the process group must exist on this rank; got {got}"
        ", which has no group here. Destroy a group after its last use, and pass groups of "
        "torch.distributed.new_group."
    )


def max_over(values: Tensor, group: str, op: str) -> Tensor:
    """Return the maximum over a group, the same on each rank, of the shape of ``values``.

    A NaN counts as inf: a maximum over ranks may lose it on some.

    Args:
        values: a floating-point tensor of the same shape on every rank.
        group: the name of the process group.
        op: the operation, for the error.

    Raises:
        QTensorError: the group was destroyed.
    """
    # Imported here, because importing the functional collectives is slow.
    import torch.distributed._functional_collectives  # noqa: PLC0415

    if not torch.compiler.is_compiling():
        check_group(group, op)
    ops, without_nan = torch.ops._c10d_functional, values.nan_to_num(nan=math.inf, posinf=math.inf)
    return ops.wait_tensor(ops.all_reduce(without_nan, "max", group))


def reduce_max(amax: Tensor, group: Group) -> Tensor:
    """Return the maximum of ``amax`` over a group that a caller has passed, of the same shape.

    Raises:
        QTensorError: ``torch.distributed`` is not initialised, or the group was destroyed.
    """
    check(
        torch.distributed.is_available() and torch.distributed.is_initialized(),
        "quantize",
        "amax_reduction_group needs torch.distributed",
        "not initialised",
        "Call torch.distributed.init_process_group first",
        QTensorError,
    )
    if not torch.compiler.is_compiling():
        check_group(group, "quantize")
    # Imported here, because importing the functional collectives is slow.
    from torch.distributed._functional_collectives import all_reduce  # noqa: PLC0415

    # A maximum over ranks may lose a NaN. An inf gives the same scale as a NaN.
    without_nan = amax.nan_to_num(nan=math.inf, posinf=math.inf)
    # torch has a type of its own for names.
    return all_reduce(without_nan, "max", group)  # type: ignore[arg-type]
