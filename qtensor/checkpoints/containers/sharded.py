"""Read a folder: one safetensors file, or shards and their index."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from qtensor.checkpoints.containers.base import TensorInfo
from qtensor.checkpoints.containers.safetensors import SafetensorsFile, parse_json
from qtensor.checkpoints.errors import Place, refuse

INDEX_SUFFIX = ".safetensors.index.json"
MAX_JSON = 100_000_000
"""Most bytes of a JSON file beside the tensors."""


class ShardedFiles:
    """Read the shards that an index names, as one set of tensors.

    Tensors that lie in a shard but not in the index are left out; ``unlisted`` names them.
    """

    kind = "safetensors"

    def __init__(self, index: str | os.PathLike[str]) -> None:
        """Open every shard that the index names.

        Args:
            index: path of ``model.safetensors.index.json``.

        Raises:
            CheckpointError: the index or a shard is not sound, a shard lies outside the folder, or
                a tensor is missing from its shard.
        """
        self.extra: Mapping[str, Any] = {}
        self.path = os.fspath(index)
        self.folder: str | None = os.path.dirname(os.path.abspath(self.path))
        place = Place(self.path)
        weight_map = read_json(self.path).get("weight_map")
        if not isinstance(weight_map, dict) or any(type(f) is not str for f in weight_map.values()):
            got = type(weight_map).__name__
            refuse(place, 'an index has "weight_map": {tensor: file}', got, "Export it again")
        self._shards: dict[str, SafetensorsFile] = {
            name: SafetensorsFile(
                path_inside(os.path.dirname(os.path.abspath(self.path)), name, self.path)
            )
            for name in sorted(set(weight_map.values()))
        }
        infos: dict[str, TensorInfo] = {}
        self.infos: Mapping[str, TensorInfo] = infos
        self._shard_of: dict[str, SafetensorsFile] = {}
        for tensor, name in weight_map.items():
            shard = self._shards[name]
            if tensor not in shard.infos:
                rule = "each tensor of the index lies in the shard that the index names"
                got = f"{name!r} without it"
                refuse(Place(self.path, tensor), rule, got, "Download the shards again")
            infos[tensor] = shard.infos[tensor]
            self._shard_of[tensor] = shard
        self.headers: tuple[Mapping[str, str], ...] = tuple(
            header for s in self._shards.values() for header in s.headers
        )
        self.unlisted = tuple(
            tensor
            for shard in self._shards.values()
            for tensor in shard.infos
            if self._shard_of.get(tensor) is not shard
        )

    def read(self, name: str) -> Tensor:
        """Return a tensor, which shares the memory of its shard where its bytes are aligned.

        Raises:
            CheckpointError: no such tensor, or the files are closed.
        """
        if name not in self._shard_of:
            rule = "the index has a tensor of this name"
            refuse(Place(self.path, name), rule, "none", "Choose one of .infos")
        return self._shard_of[name].read(name)

    def release(self, name: str) -> None:
        """Give the pages of a tensor back to the system."""
        self._shard_of[name].release(name)

    def close(self) -> None:
        """Release the shards; tensors that were read stay valid."""
        for shard in self._shards.values():
            shard.close()


def read_json(path: str) -> dict[str, Any]:
    """Return the JSON object of a file.

    Raises:
        CheckpointError: the file cannot be read, is over 100 MB, or is not a JSON object.
    """
    place = Place(path)
    try:
        if os.path.getsize(path) > MAX_JSON:
            refuse(place, f"a JSON file has at most {MAX_JSON} bytes", "more", "Check the file")
        with open(path, "rb") as file:
            text = file.read(MAX_JSON + 1)
    except OSError as error:
        refuse(place, "the file must be readable", error, "Check the path", error)
    return parse_json(text, place)


def path_inside(folder: str, name: str, file: str) -> str:
    """Return the path of a file that another file names.

    Args:
        folder: the folder of the checkpoint.
        name: the name of the file.
        file: the file that holds the name, for messages.

    Raises:
        CheckpointError: the name is not a plain file name, or is a link that leaves the folder.
            A link from a snapshot of the Hugging Face cache into its blobs is legal.
    """
    place = Place(file)
    plain = name not in ("", ".", "..") and not any(c in name for c in "/\\\0")
    if not plain or os.path.basename(name) != name or os.path.splitdrive(name)[0]:
        rule = "a shard is a plain file name inside the folder of the index"
        refuse(place, rule, repr(name), "Put the shards beside the index and name them alone")
    root = os.path.realpath(folder)
    path = os.path.join(root, name)
    target = os.path.realpath(path)
    if os.path.dirname(target) not in (root, _blobs(root)):
        rule = "a file of a checkpoint does not link to a file outside its folder"
        refuse(place, rule, f"{name!r} -> {target!r}", "Copy the file into the folder")
    if not os.path.isfile(target):
        refuse(place, "each file that is named exists", repr(name), "Download the missing file")
    return path


def _blobs(root: str) -> str | None:
    """Return the folder of the blobs if ``root`` is a snapshot of the Hugging Face cache."""
    parent, _ = os.path.split(root)
    repository, kind = os.path.split(parent)
    return os.path.join(repository, "blobs") if kind == "snapshots" else None
