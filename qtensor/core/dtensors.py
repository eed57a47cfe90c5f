"""Recognize DTensors, and build them, without importing ``torch.distributed.tensor``.

Only programs that use DTensors need that import, which is slow.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

_RULES = "qtensor.library.dtensor_rules"


def is_dtensor(t: object) -> TypeGuard[DTensor]:
    """Return whether ``t`` is a DTensor. The class is compared by name."""
    kind = type(t)
    return kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed.tensor")


def install_rules() -> None:
    """Tell DTensor how to run our ops; only callers that have a DTensor call this."""
    if not torch.compiler.is_compiling():
        importlib.import_module(_RULES)


def local_part(t: object) -> Any:
    """Return the local tensor of a DTensor, without autograd; other values as they are."""
    if not is_dtensor(t):
        return t
    with torch.no_grad():
        return t.to_local()


def part_of(placements: Sequence[Placement]) -> str:
    """Return placements as text, for error messages, which name the rank themselves."""
    return f"{list(placements)}"


def from_part(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """Return the DTensor of ``shape``, contiguous, of which this rank has the part ``local``."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - see the module

    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step = step * size
    return DTensor.from_local(
        local,
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(strides),
    )
