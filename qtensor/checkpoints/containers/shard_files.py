"""Read the shards of a folder, which an index names."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from qtensor.checkpoints.containers.base import Container, TensorInfo
from qtensor.checkpoints.containers.safetensors import parse_json
from qtensor.checkpoints.errors import Place, refuse

INDEX_SUFFIX = ".safetensors.index.json"
TORCH_INDEX_SUFFIX = ".bin.index.json"
_KINDS = {"safetensors": "safetensors", "torch": "zips of torch.save"}
"""Kinds of shards -> what messages call them."""
MAX_JSON = 100_000_000
"""Most bytes of a JSON file beside the tensors."""


def path_of(files: Sequence[str]) -> str:
    """Return what ``open`` reads as these files: the one file, or the index of these shards.

    A folder may hold an index for each variant of a model.

    Raises:
        CheckpointError: no index lists the shards.
    """
    if len(files) == 1:
        return files[0]
    folder, names = os.path.dirname(files[0]), {os.path.basename(file) for file in files}
    for index in sorted(glob.glob(os.path.join(glob.escape(folder), "*.safetensors.index*.json"))):
        with open(index, encoding="utf-8") as file:
            if set(json.load(file)["weight_map"].values()) == names:
                return index
    refuse(Place(folder), "an index lists the shards", sorted(names), "Download the whole folder")


class SeveralFiles:
    """Read several files as if they were one; a subclass opens the files."""

    path: str
    source: ClassVar[str]
    """What messages call the files."""

    def __init__(self) -> None:
        self._infos: dict[str, TensorInfo] = {}
        self.infos: Mapping[str, TensorInfo] = self._infos
        self._files: list[Container] = []
        self._file_of: dict[str, Container] = {}
        """The file of each tensor."""

    def read(self, name: str) -> Tensor:
        """Return a tensor, which shares the memory of its file where its bytes are aligned."""
        if name not in self._file_of:
            rule = f"{self.source} has a tensor of this name"
            refuse(Place(self.path, name), rule, "none", "Choose one of .infos")
        return self._file_of[name].read(name)

    def release(self, name: str) -> None:
        """Give the pages of a tensor back to the system."""
        self._file_of[name].release(name)

    def close(self) -> None:
        """Release the files; tensors that were read stay valid."""
        for file in self._files:
            file.close()


class ShardedFiles(SeveralFiles):
    """Read the shards that an index names, as one set of tensors.

    The shards are safetensors files, or zips of torch.save. An index of the latter names tensor
    subclasses, which are records here: all tensors of a record belong to its name.

    Tensors that lie in a shard but not in the index are left out; ``unlisted`` names them.
    """

    source = "the index"

    def __init__(
        self, index: str | os.PathLike[str], open_file: Callable[[str], Container]
    ) -> None:
        """Open every shard that the index names."""
        super().__init__()
        self.path = os.fspath(index)
        self.folder: str | None = os.path.dirname(os.path.abspath(self.path))
        weight_map = self._weight_map()
        self._shards = {
            name: open_file(path_inside(self.folder, name, self.path))
            for name in sorted(set(weight_map.values()))
        }
        self._files += self._shards.values()
        self.kind = self._one_kind()
        for name, file in weight_map.items():
            shard = self._shards[file]
            for info in self._tensors(shard, name, file):
                self._infos[info.name], self._file_of[info.name] = info, shard
        extra: dict[str, dict[str, Any]] = {}
        for file, shard in self._shards.items():
            for key, values in shard.extra.items():
                known = {
                    name: value
                    for name, value in values.items()
                    if weight_map.get(name) == file or self._file_of.get(name) is shard
                }
                extra.setdefault(key, {}).update(known)
        self.extra: Mapping[str, Any] = extra
        self.headers: tuple[Mapping[str, str], ...] = tuple(
            header for s in self._shards.values() for header in s.headers
        )
        self.unlisted = tuple(
            tensor
            for shard in self._shards.values()
            for tensor in shard.infos
            if self._file_of.get(tensor) is not shard
        )

    def _weight_map(self) -> dict[str, str]:
        found = read_json(self.path).get("weight_map")
        if not isinstance(found, dict) or any(type(file) is not str for file in found.values()):
            got = type(found).__name__
            rule = 'an index has "weight_map": {tensor: file}'
            fix = "Pass the folder or the index, or export the checkpoint again"
            refuse(Place(self.path), rule, got, fix)
        if not found:
            refuse(Place(self.path), "an index names tensors", "none", "Export it again")
        return found

    def _one_kind(self) -> str:
        """Return the kind of the shards."""
        kinds = {shard.kind: name for name, shard in self._shards.items()}
        if len(kinds) != 1 or not kinds.keys() <= set(_KINDS):
            rule = f"the shards of an index are all safetensors, or all {_KINDS['torch']}"
            got = ", ".join(f"{name!r} ({kind})" for kind, name in kinds.items())
            refuse(Place(self.path), rule, got, "Convert the shards to safetensors")
        return next(iter(kinds))

    def _tensors(self, shard: Container, name: str, file: str) -> list[TensorInfo]:
        """Return the tensor of a name, or all tensors of a record of that name."""
        record = shard.extra.get("records", {}).get(name)
        if record is not None:
            values = list(record.args)
            values += record.state.values() if type(record.state) is dict else ()
            return [value for value in values if isinstance(value, TensorInfo)]
        if name not in shard.infos:
            rule = "each tensor of the index lies in the shard that the index names"
            fix = "Download the shards again"
            refuse(Place(self.path, name), rule, f"{file!r} without it", fix)
        return [shard.infos[name]]


def read_json(path: str) -> dict[str, Any]:
    """Return the JSON object of a file.

    ``Infinity`` and ``NaN`` are read as Python's json writes them: transformers 4 wrote the
    configs of Mamba models with them.
    """
    place = Place(path)
    try:
        if os.path.getsize(path) > MAX_JSON:
            refuse(place, f"a JSON file has at most {MAX_JSON} bytes", "more", "Check the file")
        with open(path, "rb") as file:
            text = file.read(MAX_JSON + 1)
    except OSError as error:
        refuse(place, "the file must be readable", error, "Check the path", error)
    return parse_json(text, place, infinite=True)


def path_inside(folder: str, name: str, file: str) -> str:
    """Return the path of a file that another file names.

    ``file`` is the one that holds the name, for messages.

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
    """Return the folder of the blobs if ``root`` lies in a snapshot of the Hugging Face cache.

    Diffusers keeps the weights of a part in a subfolder: ``REPOSITORY/snapshots/HASH/transformer``.
    """
    folder = root
    while (parent := os.path.dirname(folder)) != folder:
        repository, kind = os.path.split(parent)
        if kind == "snapshots":
            return os.path.join(repository, "blobs")
        folder = parent
    return None
