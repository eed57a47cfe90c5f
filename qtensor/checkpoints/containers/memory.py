"""Hold tensors in memory as the stored tensors of a file, for callers that have read one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from qtensor.checkpoints.containers.base import STORED_NAMES, TensorInfo
from qtensor.checkpoints.errors import Place, refuse


class MemoryContainer:
    """Give tensors by name, as a safetensors file without a header text does."""

    kind: str = "safetensors"
    folder: str | None = None

    def __init__(self, tensors: Mapping[str, Tensor], path: str = "the state dict") -> None:
        """Take the stored tensors.

        Raises:
            CheckpointError: a tensor has a dtype that no file has.
        """
        self.path = path
        self._tensors = dict(tensors)
        self.headers: tuple[Mapping[str, str], ...] = ()
        self.extra: Mapping[str, Any] = {}
        infos: dict[str, TensorInfo] = {}
        for name, tensor in self._tensors.items():
            dtype = STORED_NAMES.get(tensor.dtype)
            if dtype is None:
                rule = "stored tensors have a dtype of safetensors files"
                refuse(Place(path, name), rule, tensor.dtype, "Leave the tensor out")
            shape = tuple(tensor.shape)
            shape = (*shape[:-1], 2 * shape[-1]) if dtype == "F4" else shape
            infos[name] = TensorInfo(name, dtype, shape, path, 0, tensor.nbytes)
        self.infos: Mapping[str, TensorInfo] = infos

    def read(self, name: str) -> Tensor:
        """Return a tensor, which is shared."""
        return self._tensors[name]

    def release(self, name: str) -> None:
        """Do nothing: the tensors belong to the caller."""

    def close(self) -> None:
        """Do nothing: the tensors belong to the caller."""
