"""Define what every container gives: a header of tensor infos, and tensors by name."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping
from typing import IO, Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from qtensor.checkpoints.errors import Place, refuse

Path = str | os.PathLike[str] | IO[bytes]
"""A file, a folder, an index, or an open binary file."""
Mapped = mmap.mmap | bytearray
"""The bytes of a file: a map, or what was read of a file in memory."""
MAX_SIZE = 2**63
"""A dim, and the number of elements of a tensor, is smaller than this."""


class StoredType(NamedTuple):
    """Describe an element type of the safetensors format."""

    bits: int
    torch_dtype: torch.dtype


STORED_TYPES: dict[str, StoredType] = {
    "BOOL": StoredType(8, torch.bool),
    "U8": StoredType(8, torch.uint8),
    "I8": StoredType(8, torch.int8),
    "I16": StoredType(16, torch.int16),
    "U16": StoredType(16, torch.uint16),
    "I32": StoredType(32, torch.int32),
    "U32": StoredType(32, torch.uint32),
    "I64": StoredType(64, torch.int64),
    "U64": StoredType(64, torch.uint64),
    "F16": StoredType(16, torch.float16),
    "BF16": StoredType(16, torch.bfloat16),
    "F32": StoredType(32, torch.float32),
    "F64": StoredType(64, torch.float64),
    "C64": StoredType(64, torch.complex64),
    "F8_E4M3": StoredType(8, torch.float8_e4m3fn),
    "F8_E5M2": StoredType(8, torch.float8_e5m2),
    "F8_E8M0": StoredType(8, torch.float8_e8m0fnu),
    "F4": StoredType(4, torch.float4_e2m1fn_x2),
}
"""Names of the safetensors format -> width and torch dtype. Two F4 elements share a byte."""

STORED_NAMES: dict[torch.dtype, str] = {t.torch_dtype: name for name, t in STORED_TYPES.items()}


class TensorInfo(NamedTuple):
    """Describe a stored tensor without its data.

    Attributes:
        name: name in the file.
        dtype: name of the element type in the safetensors format, for example ``"F8_E4M3"``.
        shape: sizes in elements; F4 counts single elements, not bytes.
        file: path of the file that holds the data.
        start: offset of the first byte from the beginning of the file.
        nbytes: number of bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    nbytes: int


class Container(Protocol):
    """Hold the tensors of one file, or of the shards of a folder."""

    kind: str
    """``"safetensors"``, ``"torch"`` or ``"gguf"``."""
    path: str
    """Path for messages."""
    folder: str | None
    """Folder in which config.json lies, or None for an open file."""
    infos: Mapping[str, TensorInfo]
    """Every tensor by name, in the order of the file."""
    headers: tuple[Mapping[str, str], ...]
    """The texts (``__metadata__``) of each file's header."""
    extra: Mapping[str, Any]
    """What else the container has: records of a pickle, key-values of GGUF."""

    def read(self, name: str) -> Tensor:
        """Return a tensor; it shares the memory of the mapped file where alignment allows."""

    def release(self, name: str) -> None:
        """Give the pages of a tensor back to the system, if the tensor lies in a map of its own."""

    def close(self) -> None:
        """Release the files; tensors that were read stay valid."""


def checked_shape(shape: object, file: str, tensor: str, layout: str = "") -> tuple[int, ...]:
    """Return a shape from a file as a tuple."""
    if type(shape) is not list:
        _refuse_shape(shape, Place(file, tensor, layout))
    count = 1
    for n in shape:
        if type(n) is not int or n < 0:
            _refuse_shape(shape, Place(file, tensor, layout))
        count *= n or 1
    if count >= MAX_SIZE:
        _refuse_shape(shape, Place(file, tensor, layout))
    return tuple(shape)


def _refuse_shape(shape: object, place: Place) -> NoReturn:
    rule = "a shape is a list of integers that are not negative, with a product below 2^63"
    refuse(place, rule, repr(shape), "Export the file again")


def stored_size(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the number of bits of a tensor."""
    return STORED_TYPES[dtype].bits * math.prod(shape)


def torch_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the torch tensor; the last dim of F4 counts bytes in torch."""
    return (*shape[:-1], shape[-1] // 2) if dtype == "F4" else shape
