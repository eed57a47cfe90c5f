"""Read pickles of torch.save without importing or calling anything that they name.

``InertUnpickler`` is Python's own unpickler with other answers to what a pickle asks for. The few
functions that torch.save writes describe tensors. A name of Transformer Engine or torchao stays a
``Global``, and a call of it becomes a ``Call``, which records the arguments. Every other name
refuses the pickle.

``torch.load(weights_only=True)`` does not serve here. It reads no pickle of protocol 4, and so no
extra state of Transformer Engine. It does not compare the sizes of storages with the file. A nested
tuple as the key of a dict keeps it busy for ever. Stand-ins for foreign classes are registered for
all threads, beside the classes that an imported torchao registers under the same names.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch

from qtensor.checkpoints.containers.base import MAX_SIZE, STORED_NAMES, TensorInfo
from qtensor.checkpoints.errors import CheckpointError, Place, refuse

MAX_PICKLE = 64_000_000
"""Most bytes of a pickle."""
MAX_READS = 10_000_000
"""Most reads of a pickle: one for each opcode and for each operand, about 60 for a tensor."""
MAX_DIMS = 64
MAX_NAME = 250
"""Most characters of the name of a function or class."""
INERT = ("transformer_engine", "transformer_engine_torch", "torchao")
"""Packages whose names are recorded."""
BYTES_IO = "io.BytesIO"
LEGACY = 0x1950A86A20F9469CFC6C
"""The first value of the streams that torch.save wrote before 1.6, and writes inside pickles."""
_AGAIN = "Convert the file to safetensors where it was made, if you trust it"
_OPCODES = """
    PROTO STOP POP POP_MARK MARK GLOBAL STACK_GLOBAL BINPERSID
    BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET
    NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT
    BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8
    EMPTY_LIST APPEND APPENDS EMPTY_DICT EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
"""
"""The opcodes that do here what they do in Python. torch.save writes no others, except a few that
``InertUnpickler`` defines."""


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

    def __init__(self, function: str, args: tuple[Any, ...], state: object = None) -> None:
        self.function, self.args, self.state = function, args, state


class StorageRecord(NamedTuple):
    """Describe a storage.

    Attributes:
        key: its name in the file.
        dtype: its element type, or None for bytes.
        nbytes: its size.
        stream: the bytes of storages by key, if the storage lies in a legacy stream.
    """

    key: str
    dtype: torch.dtype | None
    nbytes: int
    stream: dict[str, bytes] | None


class TensorRecord(NamedTuple):
    """Describe a strided tensor that lies inside its storage; offset and strides in elements."""

    storage: StorageRecord
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


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


def _is_inert(name: object) -> bool:
    """Return True for a name of Transformer Engine or torchao."""
    return type(name) is Global and name.module.partition(".")[0] in INERT


class _Bytes(io.BytesIO):
    """Hold bytes that are read a bounded number of times."""

    reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.reads += 1
        if self.reads > MAX_READS:
            raise pickle.UnpicklingError(f"more than {MAX_READS:,} opcodes and operands")
        return super().read(size)


class InertUnpickler(pickle._Unpickler):
    """Read pickles that follow each other; ``value`` returns the value of the next one.

    The base class is the one in Python. That in C cannot check the keys of a dict, and reserves
    memory for any memo index.
    """

    # Attributes of the base class, which its type stubs leave out.
    append: Callable[[Any], None]
    memo: dict[int, Any]
    pop_mark: Callable[[], list[Any]]
    read: Callable[[int], bytes]
    stack: list[Any]

    def __init__(self, data: bytes, place: Place, stream: dict[str, bytes] | None = None) -> None:
        """Prepare to read.

        For a legacy stream, ``stream`` will hold the bytes of its storages.
        """
        self.place, self.stream = place, stream
        if len(data) > MAX_PICKLE:
            self._refuse(f"a pickle has at most {MAX_PICKLE:,} bytes", f"{len(data):,}")
        self.file = _Bytes(data)
        super().__init__(self.file)
        self.storages: dict[str, StorageRecord] = {}
        self._made: dict[int, tuple[object, Any]] = {}

    def value(self) -> Any:
        """Return the value of the next pickle."""
        self.memo.clear()
        try:
            return self.load()
        except CheckpointError:
            raise
        except KeyError as error:
            refuse(self.place, "the opcodes are those of torch.save", error, _AGAIN, error)
        except Exception as error:  # noqa: BLE001 a damaged pickle can raise any of them
            got = f"{type(error).__name__}: {error}"
            refuse(self.place, "a pickle of torch.save is sound", got, _AGAIN, error)

    def _refuse(self, rule: str, got: object) -> NoReturn:
        refuse(self.place, rule, got, _AGAIN)

    def _once(self, source: object, make: Callable[[], Any]) -> Any:
        """Return ``make()``, called once for each object: a pickle may ask again and again."""
        if id(source) not in self._made:
            self._made[id(source)] = source, make()
        return self._made[id(source)][1]

    # ---- opcodes

    def find_class(self, module: str, name: str) -> Any:
        """Return a dtype, or the name itself."""
        found = Global(module, name)
        if len(module) + len(name) > MAX_NAME:
            # A pickle can repeat a name, and lengthen it by getattr, with a few bytes.
            self._refuse(f"a name has at most {MAX_NAME} characters", f"{found!s:.200}")
        if found in DTYPES:
            return DTYPES[found]
        if found in FUNCTIONS or found in STORAGES or found == WRAPPER or _is_inert(found):
            return found
        rule = f"the names that a pickle may hold are those of tensors and of {INERT}"
        self._refuse(rule, f"{found!s:.200}, which was not imported")

    def persistent_load(self, pid: Any) -> StorageRecord:
        """Return the storage of ("storage", type, key, device, count)."""
        # Legacy streams add the view, which is None today.
        kind, owner, key, _, count = pid[:5] if pid[5:] == (None,) else pid
        if kind != "storage" or type(owner) is not Global or owner not in STORAGES:
            self._refuse("a persistent id describes a storage", "something else")
        if type(key) is not str or type(count) is not int or not 0 <= count < MAX_SIZE // 16:
            self._refuse("a storage has a name and a size", "others")
        dtype = STORAGES[owner]
        nbytes = count * (dtype.itemsize if dtype else 1)
        record = StorageRecord(key, dtype, nbytes, self.stream)
        if self.storages.setdefault(key, record) != record:
            self._refuse("a storage has one type and size", f"two for {key!r}")
        return record

    def load_frame(self) -> None:
        """Skip the size of a frame; every read is then counted."""
        self.read(8)

    def load_reduce(self) -> None:
        """Carry out a function of torch.save, or record a call."""
        args, function = self.stack.pop(), self.stack.pop()
        if type(args) is not tuple or type(function) is not Global:
            self._refuse("a pickle calls functions by name", type(function).__name__)
        if function in FUNCTIONS:
            self.append(FUNCTIONS[function](self, *args))
        elif _is_inert(function):
            self.append(Call(str(function), args))
        else:
            self._refuse("a pickle calls functions", function)

    def load_build(self) -> None:
        """Record the state of an object."""
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is Call:
            target.state = state
        elif type(target) is not dict:
            # A state dict carries its _metadata as an attribute, which is not needed.
            self._refuse("only recorded objects have a state", type(target).__name__)

    def load_setitem(self) -> None:
        """Put a pair into a dict."""
        value, key = self.stack.pop(), self.stack.pop()
        self._put([key, value])

    def load_setitems(self) -> None:
        """Put the pairs since the mark into a dict."""
        self._put(self.pop_mark())

    def _put(self, items: list[Any]) -> None:
        target = self.stack[-1]
        # A nested tuple as a key would be hashed in a time that grows as a power.
        if type(target) is not dict or any(type(key) not in _KEYS for key in items[::2]):
            self._refuse("a dict has keys that are texts or numbers", type(target).__name__)
        target.update(zip(items[::2], items[1::2], strict=True))

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **{
            getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]]
            for name in _OPCODES.split()
        },
        pickle.FRAME[0]: load_frame,
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_reduce,  # a class and a tuple, as for a call
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
    }

    # ---- functions of torch.save

    def tensor(
        self, storage: Any, offset: object, shape: object, strides: object, *options: object
    ) -> TensorRecord:
        """Return the record of a tensor after checking that it lies inside its storage.

        The third option of ``_rebuild_tensor_v3`` is the dtype.
        """
        dtype = next((x for x in options if isinstance(x, torch.dtype)), None)
        dtype = dtype or storage.dtype
        if type(storage) is not StorageRecord or not isinstance(dtype, torch.dtype):
            self._refuse("a tensor has a storage and a dtype", type(storage).__name__)
        (offset,), shape, strides = self.sizes([offset]), self.sizes(shape), self.sizes(strides)
        if len(shape) != len(strides):
            self._refuse("a tensor has a stride for each dim", f"{len(strides)} for {shape}")
        capacity = storage.nbytes // dtype.itemsize
        last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        count = math.prod(n or 1 for n in shape)
        if count >= MAX_SIZE or (0 not in shape and max(count - 1, last) >= capacity):
            rule = f"a tensor of shape {shape} and strides {strides} has no more elements than"
            got = f"offset {offset} in {capacity} elements of {dtype}"
            self._refuse(f"{rule} its storage, and lies inside it", got)
        return TensorRecord(storage, dtype, offset, shape, strides)

    def sizes(self, values: Any) -> tuple[int, ...]:
        """Return sizes or strides as a tuple after checking them."""
        ok = type(values) in (tuple, list) and len(values) <= MAX_DIMS
        if not ok or any(type(n) is not int or not 0 <= n < MAX_SIZE for n in values):
            rule = f"sizes and strides are at most {MAX_DIMS} integers from 0 to 2^63 - 1"
            self._refuse(rule, "others")
        return tuple(values)

    def subclass(self, function: object, cls: object, inner: object, state: object) -> Call:
        """Record a tensor subclass: the class, the arguments of the wrapper, and the attributes."""
        if function != WRAPPER or not _is_inert(cls):
            self._refuse("a tensor subclass is one of torchao", "another one")
        if type(inner) is not tuple or type(state) is not dict:
            self._refuse("a tensor subclass has arguments and attributes", type(state).__name__)
        return Call(str(cls), inner, state)

    def attribute(self, owner: Any, name: object) -> Any:
        """Return the name of a class inside a class."""
        if not _is_inert(owner) or type(name) is not str:
            self._refuse(f"getattr is read for names of {INERT}", type(owner).__name__)
        return self.find_class(owner.module, f"{owner.name}.{name}")

    def encode(self, text: object, codec: object) -> bytes:
        """Return the bytes that protocol 2 writes as a text in latin-1."""
        if type(text) is not str or codec != "latin1":
            self._refuse("_codecs.encode takes a text in latin1", type(text).__name__)
        return self._once(text, lambda: text.encode("latin1"))

    def legacy(self, data: object) -> Any:
        """Return the value of a legacy stream inside this pickle."""
        if type(data) is not bytes or self.stream is not None:
            self._refuse("a legacy stream is bytes, and holds no other stream", "something else")
        return self._once(data, lambda: load_legacy(data, self.place))


_STORED = {
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
    **{Global("torch", name): dtype for name, dtype in _STORED.items()},
    Global("torch.storage", "UntypedStorage"): None,
}
DTYPES: dict[Global, torch.dtype] = {
    Global("torch", str(dtype).removeprefix("torch.")): dtype for dtype in STORED_NAMES
}
WRAPPER = Global("torch._utils", "_rebuild_wrapper_subclass")
FUNCTIONS: dict[Global, Callable[..., Any]] = {
    Global("torch._utils", "_rebuild_tensor_v2"): InertUnpickler.tensor,
    Global("torch._utils", "_rebuild_tensor_v3"): InertUnpickler.tensor,
    Global("torch._utils", "_rebuild_parameter"): lambda reader, data, *options: data,
    Global("torch._tensor", "_rebuild_from_type_v2"): InertUnpickler.subclass,
    Global("torch.storage", "_load_from_bytes"): InertUnpickler.legacy,
    Global("torch.serialization", "_get_layout"): lambda reader, name: None,
    Global("torch", "device"): lambda reader, *names: None,
    Global("torch", "Size"): InertUnpickler.sizes,
    Global("collections", "OrderedDict"): lambda reader: {},
    Global("_codecs", "encode"): InertUnpickler.encode,
    Global("__builtin__", "bytes"): lambda reader: b"",
    Global("io", "BytesIO"): lambda reader, *data: Call(BYTES_IO, data),
    Global("_io", "BytesIO"): lambda reader, *data: Call(BYTES_IO, data),
    Global("builtins", "getattr"): InertUnpickler.attribute,
    Global("__builtin__", "getattr"): InertUnpickler.attribute,
}
"""What stands for each function that torch.save writes."""
_KEYS = (str, int, bool, float, type(None))


def load_legacy(data: bytes, place: Place) -> Any:
    """Return the value of a legacy stream; its storages hold their bytes.

    The stream is five pickles (a number, the version, facts of the machine, the value, the keys of
    the storages), then for each storage its number of elements in 8 bytes and its bytes.
    """
    stream: dict[str, bytes] = {}
    reader = InertUnpickler(data, place, stream)
    magic, version, machine, value, keys = (reader.value() for _ in range(5))
    little = type(machine) is dict and machine.get("little_endian") is True
    if magic != LEGACY or version != 1001 or not little or type(keys) is not list:
        refuse(place, "a legacy stream is little-endian and of version 1001", "another", _AGAIN)
    for key in keys:
        known = reader.storages.get(key) if type(key) is str else None
        count = int.from_bytes(reader.file.read(8), "little")
        size = known.dtype.itemsize if known and known.dtype else 1
        stream[key] = reader.file.read(known.nbytes if known else 0)
        if known is None or known.nbytes != count * size or known.nbytes != len(stream[key]):
            refuse(place, "a legacy stream holds the storages that it describes", "another", _AGAIN)
    if stream.keys() != reader.storages.keys():
        refuse(place, "a legacy stream holds each storage", "one is missing", _AGAIN)
    return value
