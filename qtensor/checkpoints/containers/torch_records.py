"""Carry out the few functions that torch.save writes into pickles, and record all others.

Nothing is imported or called by a name of the file: ``FUNCTIONS`` lists the names that this module
carries out itself, and names of Transformer Engine and torchao are only recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Protocol

import torch

from qtensor.checkpoints.containers.base import MAX_SIZE, STORED_NAMES, TensorInfo
from qtensor.checkpoints.errors import Place, refuse

MAX_DIMS = 64
INERT = ("transformer_engine", "transformer_engine_torch", "torchao")
"""Packages whose names are recorded."""
AGAIN = "Convert the file to safetensors where it was made, if you trust it"


class Global(NamedTuple):
    """Hold the name of a function or class, which is never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Call:
    """Record a call or an instance that a pickle asks for.

    Attributes:
        function: the full name of the function or class.
        args: the positional arguments.
        state: what BUILD gives the object, or the attributes of a tensor subclass; else None.
    """

    __slots__ = ("args", "function", "state")

    def __init__(self, function: str, args: tuple[Any, ...], state: Any = None) -> None:
        self.function, self.args, self.state = function, args, state


class StorageRecord:
    """Describe a storage.

    Attributes:
        key: its name in the file.
        dtype: its element type, or None for bytes.
        nbytes: its size.
        data: its bytes if they lie in the pickle stream (legacy streams), else None.
    """

    __slots__ = ("data", "dtype", "key", "nbytes")

    def __init__(self, key: str, dtype: torch.dtype | None, nbytes: int) -> None:
        self.key, self.dtype, self.nbytes = key, dtype, nbytes
        self.data: memoryview | None = None


class TensorRecord(NamedTuple):
    """Describe a strided tensor that lies inside its storage; offset and strides in elements."""

    storage: StorageRecord
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Budget:
    """Bound the bytes that the calls of one file may copy or parse again."""

    def __init__(self, size: int) -> None:
        self._left = 1_000_000 + 16 * size

    def spend(self, count: int, place: Place) -> None:
        """Take ``count`` bytes.

        Raises:
            CheckpointError: none are left.
        """
        self._left -= count
        if self._left < 0:
            rule = "a pickle uses its own bytes a few times at most"
            refuse(place, rule, "the same bytes again and again", AGAIN)


_TYPES: dict[str, torch.dtype] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
}
STORAGES: dict[Global, torch.dtype | None] = {
    **{Global("torch", name): dtype for name, dtype in _TYPES.items()},
    Global("torch.storage", "UntypedStorage"): None,
}
DTYPES: dict[Global, torch.dtype] = {
    Global("torch", str(dtype).removeprefix("torch.")): dtype for dtype in STORED_NAMES
}
WRAPPER = Global("torch._utils", "_rebuild_wrapper_subclass")


def holds_tensor(value: Any) -> bool:
    """Return True if a tensor lies anywhere inside a value of a pickle, which may hold itself."""
    waiting, seen = [value], set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, (TensorRecord, TensorInfo)):
            return True
        if type(value) not in (Call, dict, list, tuple) or id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) is Call:
            waiting += [value.args, value.state]
        else:
            waiting += value.values() if type(value) is dict else value
    return False


def is_inert(name: Any) -> bool:
    """Return True for a name of Transformer Engine or torchao."""
    return type(name) is Global and name.module.partition(".")[0] in INERT


class Reader(Protocol):
    """Give functions what they need of the unpickler."""

    budget: Budget
    place: Place

    def refuse(self, rule: str, got: object, fix: str = ...) -> NoReturn:
        """Raise a ``CheckpointError`` that names the file."""

    def stream(self, data: bytes) -> Any:
        """Return the value of a legacy stream inside this one."""


def _arguments(m: Reader, args: tuple[Any, ...], least: int, most: int) -> None:
    if not least <= len(args) <= most:
        m.refuse(f"a function of torch has {least} to {most} arguments", len(args))


def _sizes(m: Reader, values: Any) -> tuple[int, ...]:
    """Return a tuple of at most 64 sizes after checking it."""
    if type(values) not in (tuple, list) or len(values) > MAX_DIMS:
        m.refuse(f"a shape is a tuple of at most {MAX_DIMS} sizes", type(values).__name__)
    if any(type(n) is not int or not 0 <= n < MAX_SIZE for n in values):
        m.refuse("sizes and strides are integers from 0 to 2^63 - 1", "others")
    return tuple(values)


def _tensor(m: Reader, args: tuple[Any, ...], dtype: Any) -> TensorRecord:
    """Return the record of a tensor after checking that it lies inside its storage."""
    storage, offset = args[0], args[1]
    if type(storage) is not StorageRecord or not isinstance(dtype, torch.dtype):
        m.refuse("a tensor has a storage and a dtype", type(storage).__name__)
    shape, strides = _sizes(m, args[2]), _sizes(m, args[3])
    if type(offset) is not int or offset < 0 or len(shape) != len(strides):
        m.refuse("a tensor has an offset, and a stride for each dim", f"offset {offset!r:.40}")
    count = 1
    for n in shape:
        count *= n or 1
    capacity = storage.nbytes // dtype.itemsize
    if count >= MAX_SIZE or (0 not in shape and count > capacity):
        rule = f"a tensor of shape {shape} has at most as many elements as its storage"
        m.refuse(rule, f"{capacity} elements of {dtype}")
    last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if 0 not in shape and last >= capacity:
        rule = f"a tensor of shape {shape} with strides {strides} lies inside its storage"
        m.refuse(rule, f"offset {offset} in {capacity} elements of {dtype}")
    return TensorRecord(storage, dtype, offset, shape, strides)


def _tensor_v2(m: Reader, args: tuple[Any, ...]) -> TensorRecord:
    _arguments(m, args, 4, 7)
    storage = args[0]
    dtype = storage.dtype if type(storage) is StorageRecord else None
    return _tensor(m, args, dtype)


def _tensor_v3(m: Reader, args: tuple[Any, ...]) -> TensorRecord:
    _arguments(m, args, 7, 8)
    return _tensor(m, args, args[6])


def _subclass(m: Reader, args: tuple[Any, ...]) -> Call:
    """Record a tensor subclass: the class, the arguments of the wrapper, and the attributes."""
    _arguments(m, args, 4, 4)
    function, cls, inner, state = args
    if function != WRAPPER or not is_inert(cls) or type(inner) is not tuple:
        m.refuse("a tensor subclass is one of torchao", "another one")
    if type(state) is not dict:
        m.refuse("a tensor subclass has attributes", type(state).__name__)
    return Call(str(cls), inner, state)


def _parameter(m: Reader, args: tuple[Any, ...]) -> Any:
    _arguments(m, args, 3, 4)
    return args[0]


def _attribute(m: Reader, args: tuple[Any, ...]) -> Global:
    _arguments(m, args, 2, 2)
    owner, name = args
    if not is_inert(owner) or type(name) is not str:
        m.refuse(f"getattr is read for names of {INERT}", type(owner).__name__)
    return Global(owner.module, f"{owner.name}.{name}")


def _ordered_dict(m: Reader, args: tuple[Any, ...]) -> dict[Any, Any]:
    _arguments(m, args, 0, 0)
    return {}


def _size(m: Reader, args: tuple[Any, ...]) -> tuple[int, ...]:
    _arguments(m, args, 1, 1)
    return _sizes(m, args[0])


def _encode(m: Reader, args: tuple[Any, ...]) -> bytes:
    """Return the bytes that protocol 2 writes as a text in latin-1."""
    _arguments(m, args, 2, 2)
    text, codec = args
    if type(text) is not str or codec != "latin1":
        m.refuse("_codecs.encode takes a text in latin1", type(text).__name__)
    m.budget.spend(len(text), m.place)
    try:
        return text.encode("latin1")
    except UnicodeEncodeError as error:
        m.refuse("_codecs.encode takes a text in latin1", error)


def _no_bytes(m: Reader, args: tuple[Any, ...]) -> bytes:
    """Return the empty bytes, which protocol 2 writes as a call of ``bytes``."""
    _arguments(m, args, 0, 0)
    return b""


def _bytes_io(m: Reader, args: tuple[Any, ...]) -> Call:
    _arguments(m, args, 0, 1)
    return Call(BYTES_IO, args)


def _from_bytes(m: Reader, args: tuple[Any, ...]) -> Any:
    _arguments(m, args, 1, 1)
    if type(args[0]) is not bytes:
        m.refuse("_load_from_bytes takes bytes", type(args[0]).__name__)
    return m.stream(args[0])


def _inert(m: Reader, args: tuple[Any, ...]) -> None:
    """Take the place of a layout or device, which is not needed."""


BYTES_IO = "io.BytesIO"
FUNCTIONS: dict[Global, Callable[[Reader, tuple[Any, ...]], Any]] = {
    Global("torch._utils", "_rebuild_tensor_v2"): _tensor_v2,
    Global("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    Global("torch._utils", "_rebuild_parameter"): _parameter,
    Global("torch._tensor", "_rebuild_from_type_v2"): _subclass,
    Global("torch.storage", "_load_from_bytes"): _from_bytes,
    Global("torch.serialization", "_get_layout"): _inert,
    Global("torch", "device"): _inert,
    Global("torch", "Size"): _size,
    Global("collections", "OrderedDict"): _ordered_dict,
    Global("_codecs", "encode"): _encode,
    Global("__builtin__", "bytes"): _no_bytes,
    Global("io", "BytesIO"): _bytes_io,
    Global("_io", "BytesIO"): _bytes_io,
    Global("builtins", "getattr"): _attribute,
    Global("__builtin__", "getattr"): _attribute,
}
