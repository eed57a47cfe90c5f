"""Read a GGUF model that llama-gguf-split wrote as several files, as one set of tensors."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from qtensor.checkpoints.containers.base import Container, Path
from qtensor.checkpoints.containers.gguf import GGUFFile
from qtensor.checkpoints.containers.shard_files import SeveralFiles, path_inside
from qtensor.checkpoints.errors import Place, refuse

NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
"""Keys of each part: its number from 0, the number of parts, the number of all tensors."""
KEYS = (NUMBER, COUNT, TENSORS)
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_AGAIN = "Download every part into one folder, or merge them with llama-gguf-split"


def open_gguf(file: Path) -> GGUFFile | SplitGGUF:
    """Return the container of a GGUF file, or of all parts if the file is one of several."""
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


def _number(part: Container, key: str) -> int | None:
    value = part.extra["key_values"].get(key)
    found = None if value is None else value.decode()
    if found is not None and (type(found) is not int or found < 0):
        refuse(Place(part.path), f"{key} is a number", repr(found), _AGAIN)
    return found


class SplitGGUF(SeveralFiles):
    """Hold the tensors of all parts. The first part gives the key-values."""

    kind = "gguf"
    source = "a part"

    def __init__(self, part: GGUFFile, count: int) -> None:
        """Open every one of ``count`` parts; ``part`` is one of them, for its path."""
        super().__init__()
        self.path, self.folder = part.path, part.folder
        self.headers: tuple[Mapping[str, str], ...] = ()
        match = PART.fullmatch(os.path.basename(part.path))
        if part.folder is None or match is None or int(match[3]) != count:
            rule = f"the parts of a model in {count} files are named NAME-00001-of-{count:05d}.gguf"
            refuse(Place(part.path), rule, os.path.basename(part.path), _AGAIN)
        types: dict[str, str] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for number in range(count):
            name = f"{match[1]}-{number + 1:05d}-of-{count:05d}.gguf"
            one = GGUFFile(path_inside(part.folder, name, part.path))
            if (_number(one, NUMBER), _number(one, COUNT)) != (number, count):
                got = f"{_number(one, NUMBER)} of {_number(one, COUNT)}"
                refuse(Place(one.path), f"this is part {number} of {count}", got, _AGAIN)
            for tensor, info in one.infos.items():
                if tensor in self.infos:
                    refuse(Place(one.path, tensor), "each name occurs once", "two of them", _AGAIN)
                self._infos[tensor], self._file_of[tensor] = info, one
            self._files.append(one)
            types |= one.extra["types"]
            shapes |= one.extra["shapes"]
        first = self._files[0]
        total = _number(first, TENSORS)
        if total not in (None, len(self.infos)):
            rule = f"the parts have {total} tensors"
            refuse(Place(first.path), rule, len(self.infos), _AGAIN)
        values = first.extra["key_values"]
        self.extra: Mapping[str, Any] = {"types": types, "shapes": shapes, "key_values": values}
