"""Read a GGUF model that llama-gguf-split wrote as several files, as one set of tensors."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from qtensor.checkpoints.containers.base import Path, TensorInfo
from qtensor.checkpoints.containers.gguf import GGUFFile
from qtensor.checkpoints.containers.shard_files import path_inside
from qtensor.checkpoints.errors import Place, refuse

NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
"""Keys of each part: its number from 0, the number of parts, and that of all tensors."""
KEYS = (NUMBER, COUNT, TENSORS)
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_AGAIN = "Download every part into one folder, or merge them with llama-gguf-split"


def open_gguf(file: Path) -> GGUFFile | SplitGGUF:
    """Return the container of a GGUF file, or of all parts if the file is one of several.

    Raises:
        CheckpointError: the file is not sound, or a part is missing.
    """
    part = GGUFFile(file)
    count = _number(part, COUNT)
    if count is None or count == 1:
        return part
    part.close()
    return SplitGGUF(part, count)


def is_later_part(name: str) -> bool:
    """Return True for the name of a part that is not the first one."""
    match = PART.fullmatch(name)
    return match is not None and int(match[2]) > 1


def _number(part: GGUFFile, key: str) -> int | None:
    value = part.extra["key_values"].get(key)
    found = None if value is None else value.decode()
    if found is not None and (type(found) is not int or found < 0):
        refuse(Place(part.path), f"{key} is a number", repr(found), _AGAIN)
    return found


class SplitGGUF:
    """Hold the tensors of all parts. The key-values are those of the first part."""

    kind = "gguf"

    def __init__(self, part: GGUFFile, count: int) -> None:
        """Open every part.

        Args:
            part: one of the parts, for its path.
            count: the number of parts.

        Raises:
            CheckpointError: a part is missing, has another number, or a name occurs twice.
        """
        self.path, self.folder = part.path, part.folder
        self.headers: tuple[Mapping[str, str], ...] = ()
        match = PART.fullmatch(os.path.basename(part.path))
        if part.folder is None or match is None or int(match[3]) != count:
            rule = f"the parts of a model in {count} files are named NAME-00001-of-{count:05d}.gguf"
            refuse(Place(part.path), rule, os.path.basename(part.path), _AGAIN)
        infos: dict[str, TensorInfo] = {}
        self.infos: Mapping[str, TensorInfo] = infos
        self._part_of: dict[str, GGUFFile] = {}
        self._parts: list[GGUFFile] = []
        types: dict[str, str] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for number in range(count):
            name = f"{match[1]}-{number + 1:05d}-of-{count:05d}.gguf"
            one = GGUFFile(path_inside(part.folder, name, part.path))
            if (_number(one, NUMBER), _number(one, COUNT)) != (number, count):
                got = f"{_number(one, NUMBER)} of {_number(one, COUNT)}"
                refuse(Place(one.path), f"this is part {number} of {count}", got, _AGAIN)
            for tensor, info in one.infos.items():
                if tensor in infos:
                    refuse(Place(one.path, tensor), "each name occurs once", "two of them", _AGAIN)
                infos[tensor], self._part_of[tensor] = info, one
            self._parts.append(one)
            types |= one.extra["types"]
            shapes |= one.extra["shapes"]
        total = _number(self._parts[0], TENSORS)
        if total not in (None, len(infos)):
            rule = f"the parts have {total} tensors"
            refuse(Place(self._parts[0].path), rule, len(infos), _AGAIN)
        values = self._parts[0].extra["key_values"]
        self.extra: Mapping[str, Any] = {"types": types, "shapes": shapes, "key_values": values}

    def read(self, name: str) -> Tensor:
        """Return a tensor, which shares the memory of its part where its bytes are aligned.

        Raises:
            CheckpointError: no such tensor, or the files are closed.
        """
        if name not in self._part_of:
            rule = "a part has a tensor of this name"
            refuse(Place(self.path, name), rule, "none", "Choose one of .infos")
        return self._part_of[name].read(name)

    def release(self, name: str) -> None:
        """Give the pages of a tensor back to the system."""
        self._part_of[name].release(name)

    def close(self) -> None:
        """Release the parts; tensors that were read stay valid."""
        for part in self._parts:
            part.close()
