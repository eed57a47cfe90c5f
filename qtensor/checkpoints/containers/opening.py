"""Choose the container of a path: a file, a folder, an index or an open file."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from qtensor.checkpoints.containers.base import Container, Path
from qtensor.checkpoints.containers.gguf import MAGIC
from qtensor.checkpoints.containers.gguf_split import is_later_part, open_gguf
from qtensor.checkpoints.containers.safetensors import SafetensorsFile
from qtensor.checkpoints.containers.shard_files import (
    INDEX_SUFFIX,
    TORCH_INDEX_SUFFIX,
    ShardedFiles,
    path_inside,
)
from qtensor.checkpoints.containers.torch_zip import LEGACY_START, ZIP_START, TorchZip
from qtensor.checkpoints.errors import Place, refuse

OPENERS: tuple[tuple[bytes, Callable[[Any], Container]], ...] = (
    (MAGIC, open_gguf),
    (ZIP_START, TorchZip),
)
"""(first bytes of a file, container): files that begin otherwise are safetensors."""
FOREIGN: tuple[tuple[bytes, str], ...] = (
    (LEGACY_START, "a file of torch.save before 1.6"),
    *((bytes([0x80, protocol]), "a pickle without a zip") for protocol in range(2, 6)),
)
"""(first bytes, what a file is) of files that are not read."""
_NAMES = (
    "model.safetensors",
    f"model{INDEX_SUFFIX}",
    "model.gguf",
    "model.pt",
    "pytorch_model.bin",
    f"pytorch_model{TORCH_INDEX_SUFFIX}",
)
_SUFFIXES = (INDEX_SUFFIX, TORCH_INDEX_SUFFIX, ".safetensors", ".gguf", ".pt", ".pth", ".bin")
"""What a folder is searched for, the first match alone."""


def open_container(path: Path) -> Container:
    """Open the container of a path."""
    if not isinstance(path, (str, os.PathLike)):
        return _open_file(path, str(getattr(path, "name", "an open file")))
    name = os.fspath(path)
    if os.path.isdir(name):
        name = _file_of_folder(name)
    if name.endswith(".json"):
        return ShardedFiles(name, lambda path: _open_file(path, path))
    return _open_file(name, name)


def _open_file(file: Path, path: str) -> Container:
    """Open one file by its first bytes."""
    first = _first_bytes(file, path)
    for magic, opener in OPENERS:
        if first.startswith(magic):
            return opener(file)
    for magic, kind in FOREIGN:
        # A safetensors header of 640 bytes begins as a pickle does; its JSON begins at byte 8.
        if first.startswith(magic) and first[8:9] != b"{":
            rule = "the files that are read are safetensors, GGUF and zips of torch.save"
            refuse(Place(path), rule, kind, "Convert it to safetensors where it was made")
    return SafetensorsFile(file)


def _first_bytes(file: Path, path: str) -> bytes:
    try:
        if isinstance(file, (str, os.PathLike)):
            with open(file, "rb") as opened:
                return opened.read(9)
        file.seek(0)
        first = bytes(file.read(9))
        file.seek(0)
        return first
    except (OSError, AttributeError, TypeError, ValueError) as error:
        rule = "a path is a file, a folder, an index or an open binary file"
        refuse(Place(path), rule, error, "Check the path", error)


def _file_of_folder(folder: str) -> str:
    """Return the file or index that a folder holds."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        refuse(Place(folder), "the folder must be readable", error, "Check the path", error)
    for name in _NAMES:
        if name in names:
            return path_inside(folder, name, folder)
    for suffix in _SUFFIXES:
        found = [name for name in names if name.endswith(suffix) and not is_later_part(name)]
        if len(found) == 1:
            return path_inside(folder, found[0], folder)
        if found:
            rule = "a folder has model.safetensors, an index, or one file of tensors"
            refuse(Place(folder), rule, found, "Pass the path of the file")
    rule = f"a folder holds a file that ends in {', '.join(_SUFFIXES)}"
    refuse(Place(folder), rule, names or "an empty folder", "Check the path")
