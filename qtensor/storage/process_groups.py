"""Find process groups by name, and reduce maxima over them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from qtensor.core.errors import QTensorError, this_rank


def check_group(group: Any, op: str) -> Any:
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
    typed: Any = name  # torch has a type of its own for names
    try:
        return torch.distributed.distributed_c10d._resolve_process_group(typed)
    except (RuntimeError, LookupError, ValueError) as error:
        raise _missing(op, f"the name {name!r}") from error


def group_of_mesh(mesh: Any, dim: int | None, op: str) -> Any:
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
    # Imported here: torch.distributed's functional collectives take 0.1 s.
    import torch.distributed._functional_collectives  # noqa: PLC0415

    if not torch.compiler.is_compiling():
        check_group(group, op)
    ops, found = torch.ops._c10d_functional, values.nan_to_num(nan=math.inf, posinf=math.inf)
    return ops.wait_tensor(ops.all_reduce(found, "max", group))
