"""Find the ranks that share the factors of a parameter that is split over them.

A write to a part of a weight must find the maxima of the whole weight, and torch gives a write the
local tensor alone. ``quantize`` of a DTensor and the layers of qtensor note on the local tensor how
the DTensor is split. For parameters that torch alone has made, a hook does so before each step of
an optimizer; ``import qtensor.distributed`` registers it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from qtensor.core.dtensors import is_dtensor
from qtensor.storage.base import QuantizedTensorStorage
from qtensor.storage.origin import Split
from qtensor.storage.process_groups import group_of_mesh
from qtensor.storage.rebuild import set_origin

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def splits_of(parameter: DTensor) -> tuple[Split, ...]:
    """Return how a DTensor is split, for each dim of its mesh that splits it over several ranks."""
    mesh, last = parameter.device_mesh, parameter.ndim - 1
    splits = []
    for i, placement in enumerate(parameter.placements):
        # Shard and the strided shards that fully_shard makes of parts have a dim.
        dim = getattr(placement, "dim", None)
        if dim is not None and mesh.size(i) > 1:
            group = group_of_mesh(mesh, i, "optimizer step")
            axis = "k" if dim % parameter.ndim == last else "m"
            splits.append(Split(group.group_name, axis))
    return tuple(splits)


def note_splits(parameter: DTensor) -> None:
    """Note on the local tensor of a quantized DTensor how the DTensor is split."""
    # to_local() returns another view each time; an op writes to this tensor.
    local = parameter._local_tensor
    if not isinstance(local, QuantizedTensorStorage):
        return
    known = {split.group: split for split in local._origin.split or ()}
    splits = tuple([known.get(split.group, split) for split in splits_of(parameter)])
    if splits != local._origin.split:
        set_origin(local, local._origin._replace(split=splits))


def _before_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if is_dtensor(parameter):
                note_splits(parameter)


def install() -> None:
    """Have every optimizer of torch note the splits of its parameters before a step."""
    register_optimizer_step_pre_hook(_before_step)
