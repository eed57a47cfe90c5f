"""Keep the weights of a model on disk, and load a layer's when it runs, with accelerate."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qtensor import checkpoints
from qtensor.core.errors import UnsupportedError, fail
from qtensor.integrations.experts import ExpertWeights


class StoredWeights(Mapping[str, Tensor]):
    """Map the names of a model's state dict to tensors in the mapped files of a checkpoint."""

    def __init__(self, state: Mapping[str, Any], folder: str) -> None:
        """Open the checkpoint in which ``state`` was saved.

        Tied tensors are one object in ``state``; the folder holds each once, under its first name.
        """
        first: dict[int, str] = {}
        self._stored = {name: first.setdefault(id(t), name) for name, t in state.items()}
        self._swapped = {n: t.swapped for n, t in state.items() if isinstance(t, ExpertWeights)}
        self._checkpoint = checkpoints.open(folder)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._checkpoint[self._stored[name]]
        if name in self._swapped:
            return ExpertWeights(tensor, self._swapped[name])
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def disk_offload(
    model: nn.Module,
    folder: str | os.PathLike[str],
    execution_device: torch.types.Device = None,
    *,
    overwrite: bool = False,
    **options: Any,
) -> Any:
    """Do what ``accelerate.disk_offload`` does, for models with quantized weights too.

    ``accelerate.disk_offload`` writes one plain array for each parameter, which a quantized weight
    is not. Here the state dict is saved in our layout, and ``accelerate.cpu_offload`` takes each
    weight from the mapped files when its layer runs. On the CPU a weight is not copied: it lies in
    pages of the file, which the system can drop.

    Args:
        model: a module; its parameters move to the meta device between calls.
        folder: gets the weights; it must stay as long as the model is used.
        execution_device: device of the products; by default the first parameter's.
        overwrite: True to replace a checkpoint in the folder.
        **options: further arguments of ``accelerate.cpu_offload``.

    Returns:
        The model.

    Raises:
        CheckpointError: the folder holds a checkpoint, or the disk is full.
        UnsupportedError: accelerate is not installed, or ``state_dict`` is among the options.
    """
    try:
        import accelerate  # noqa: PLC0415 only this function needs it
    except ImportError:
        fix = "Call pip install accelerate"
        fail("disk_offload", "accelerate must be installed", "no accelerate", fix, UnsupportedError)
    if "state_dict" in options:
        fix = "Leave it out, or call accelerate.cpu_offload"
        fail("disk_offload", "the weights are those of the model", "state_dict=", fix)
    state = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    seen: set[int] = set()
    unique = {n: t for n, t in state.items() if not (id(t) in seen or seen.add(id(t)))}  # type: ignore[func-returns-value]
    plain = {n: t.stored if isinstance(t, ExpertWeights) else t for n, t in unique.items()}
    if execution_device is None:
        execution_device = next(iter(model.parameters())).device
    checkpoints.save(plain, folder, overwrite=overwrite)
    weights = StoredWeights(state, os.path.abspath(folder))
    return accelerate.cpu_offload(model, execution_device, state_dict=weights, **options)


__all__ = ["StoredWeights", "disk_offload"]
