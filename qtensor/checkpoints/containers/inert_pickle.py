"""Read pickles without importing or calling anything that they name.

``InertUnpickler`` is a small interpreter of the pickle opcodes. A name of Transformer Engine or
torchao becomes a ``Global``, and a call of it a ``Call``, which only records the arguments. The few
functions that torch.save writes are carried out by torch_records.py. Every other name refuses the
stream. The modules pickle and torch.load are not used: their unpicklers can be made to reserve
memory for a memo index or a text of any size, and to hash nested tuples for ever.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from qtensor.checkpoints.containers.base import MAX_SIZE
from qtensor.checkpoints.containers.torch_records import (
    AGAIN,
    DTYPES,
    FUNCTIONS,
    INERT,
    STORAGES,
    WRAPPER,
    Budget,
    Call,
    Global,
    StorageRecord,
    is_inert,
)
from qtensor.checkpoints.errors import Place, refuse

MAX_PICKLE = 64_000_000
"""Most bytes of a pickle."""
MAX_STEPS = 10_000_000
"""Most opcodes of a pickle; a tensor takes about 40."""
MAX_DEPTH = 4
"""Most streams inside streams (``_load_from_bytes``)."""


class InertUnpickler:
    """Interpret one pickle; ``load`` returns its value."""

    def __init__(
        self,
        data: memoryview,
        place: Place,
        budget: Budget | None = None,
        start: int = 0,
        depth: int = 0,
    ) -> None:
        """Prepare to read.

        Args:
            data: the bytes.
            place: file and tensor, for errors.
            budget: the budget of the file; a new one if None.
            start: offset of the pickle in ``data``.
            depth: number of streams around this one.
        """
        self.data, self.place, self.position, self.depth = data, place, start, depth
        self.budget = budget or Budget(len(data))
        self.storages: dict[str, StorageRecord] = {}
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def load(self) -> Any:
        """Return the value; ``position`` is then behind the pickle.

        Raises:
            CheckpointError: the pickle is damaged, too large, or names anything else than tensors.
        """
        if len(self.data) > MAX_PICKLE:
            self.refuse(f"a pickle has at most {MAX_PICKLE:,} bytes", f"{len(self.data):,}")
        steps = 0
        data, end = self.data, len(self.data)
        while True:
            if self.position >= end:
                self._take(1)
            code = data[self.position]
            self.position += 1
            if code == STOP:
                return self._pop()
            operation = OPERATIONS.get(code)
            if operation is None:
                self.refuse("the opcodes of torch.save are read", f"opcode {bytes([code])!r}")
            steps += 1
            if steps > MAX_STEPS:
                self.refuse(f"a pickle has at most {MAX_STEPS:,} opcodes", "more")
            operation(self)

    def refuse(self, rule: str, got: object, fix: str = AGAIN) -> NoReturn:
        """Raise a ``CheckpointError`` that names the file.

        Raises:
            CheckpointError: always.
        """
        refuse(self.place, rule, got, fix)

    def stream(self, data: bytes) -> Any:
        """Return the value of a legacy stream inside this pickle.

        Raises:
            CheckpointError: the stream is damaged, too deep, or read again and again.
        """
        if self.depth >= MAX_DEPTH:
            self.refuse(f"at most {MAX_DEPTH} streams lie inside each other", "more")
        self.budget.spend(len(data), self.place)
        return load_legacy(memoryview(data), self.place, self.budget, self.depth + 1)

    # ---- bytes, stack and memo

    def _take(self, count: int) -> memoryview:
        end = self.position + count
        if end > len(self.data):
            self.refuse("a pickle ends with STOP", "the end of its bytes", "Download it again")
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def _line(self) -> str:
        end = self.position
        limit = min(len(self.data), end + 4096)
        while end < limit and self.data[end] != 10:
            end += 1
        text = bytes(self._take(end - self.position))
        if self._take(1)[0] != 10:
            self.refuse("a line of a pickle has at most 4096 bytes", "more")
        return self._text(text)

    def _text(self, text: bytes) -> str:
        try:
            return text.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            self.refuse("the texts of a pickle are UTF-8", error)

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _sized(self, form: str) -> bytes:
        return bytes(self._take(self._number(form)))

    def _pop(self) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            self.refuse("each opcode finds its operands", "an empty stack")
        return self._stack.pop()

    def _top(self) -> Any:
        value = self._pop()
        self._stack.append(value)
        return value

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _to_mark(self) -> list[Any]:
        if not self._marks:
            self.refuse("each opcode finds its mark", "none")
        start = self._marks.pop()
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def _put(self, index: int) -> None:
        self._memo[index] = self._top()

    def _get(self, index: int) -> None:
        if index not in self._memo:
            self.refuse("each memo index was written before", index)
        self._push(self._memo[index])

    # ---- values

    def _long(self, size: int) -> None:
        if not 0 <= size <= 16:
            self.refuse("an integer has at most 16 bytes", size)
        self._push(int.from_bytes(self._take(size), "little", signed=True))

    def _decimal(self, kind: type) -> None:
        line = self._line().rstrip("L")
        if kind is int and line in ("00", "01"):
            self._push(line == "01")
            return
        try:
            self._push(kind(line[:40]))
        except ValueError as error:
            self.refuse("a number of a pickle is decimal", error)

    def _tuple(self, count: int) -> None:
        values = [self._pop() for _ in range(count)]
        self._push(tuple(reversed(values)))

    def _append(self, values: list[Any]) -> None:
        target = self._top()
        if type(target) is not list:
            self.refuse("values are appended to a list", type(target).__name__)
        target.extend(values)

    def _set_items(self, values: list[Any]) -> None:
        target = self._top()
        if type(target) is not dict or len(values) % 2:
            self.refuse("pairs are put into a dict", type(target).__name__)
        for key, value in zip(values[::2], values[1::2], strict=True):
            # A nested tuple as a key would be hashed in a time that grows as a power.
            if type(key) not in (str, int, bool, float, type(None)):
                self.refuse("the keys of a dict are texts or numbers", type(key).__name__)
            target[key] = value

    def _build(self) -> None:
        state, target = self._pop(), self._top()
        if type(target) is Call:
            target.state = state
        elif type(target) is not dict:
            # A state dict carries its _metadata as an attribute, which is not needed.
            self.refuse("only recorded objects have a state", type(target).__name__)

    # ---- names and calls

    def _find(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            self.refuse("a name is a text", type(name).__name__)
        found = Global(module, name)
        if found in DTYPES:
            self._push(DTYPES[found])
        elif found in FUNCTIONS or found in STORAGES or found == WRAPPER or is_inert(found):
            self._push(found)
        else:
            rule = f"the names that a pickle may hold are those of tensors and of {INERT}"
            self.refuse(rule, f"{found}, which was not imported")

    def _call(self) -> None:
        args, function = self._pop(), self._pop()
        if type(args) is not tuple:
            self.refuse("arguments are a tuple", type(args).__name__)
        carry_out = FUNCTIONS.get(function) if type(function) is Global else None
        if carry_out is not None:
            self._push(carry_out(self, args))
        elif is_inert(function):
            self._push(Call(str(function), args))
        else:
            self.refuse("only functions are called", type(function).__name__)

    def _persistent(self) -> None:
        """Push the storage that a persistent id names: ("storage", type, key, device, count)."""
        pid = self._pop()
        if type(pid) is tuple and len(pid) == 6 and pid[5] is None:
            pid = pid[:5]  # legacy streams add the view, which is None today
        ok = type(pid) is tuple and len(pid) == 5 and pid[0] == "storage"
        if not ok or type(pid[1]) is not Global or pid[1] not in STORAGES:
            self.refuse("a persistent id describes a storage", "something else")
        key, count, dtype = pid[2], pid[4], STORAGES[pid[1]]
        if type(key) is not str or type(count) is not int or not 0 <= count < MAX_SIZE // 16:
            self.refuse("a storage has a name and a size", f"{type(key).__name__}, {count!r:.40}")
        nbytes = count * (dtype.itemsize if dtype else 1)
        known = self.storages.setdefault(key, StorageRecord(key, dtype, nbytes))
        if (known.dtype, known.nbytes) != (dtype, nbytes):
            if known.nbytes != nbytes:
                self.refuse(f"storage {key!r} has one size", f"{known.nbytes} and {nbytes}")
            known = self._alias(known, dtype)
        self._push(known)

    def _alias(self, known: StorageRecord, dtype: torch.dtype | None) -> StorageRecord:
        """Return a storage of the same bytes and another element type."""
        if self.depth:
            self.refuse(f"storage {known.key!r} has one type", f"{known.dtype} and {dtype}")
        return StorageRecord(known.key, dtype, known.nbytes)


# ---- what each opcode does

Operation = Callable[[InertUnpickler], None]


def _text(form: str) -> Operation:
    return lambda m: m._push(m._text(m._sized(form)))


def _raw(form: str) -> Operation:
    return lambda m: m._push(m._sized(form))


def _plain(form: str) -> Operation:
    return lambda m: m._push(m._number(form))


def _constant(make: Callable[[], Any]) -> Operation:
    return lambda m: m._push(make())


def _skip(form: str) -> Operation:
    def skip(m: InertUnpickler) -> None:
        m._number(form)

    return skip


def _discard(m: InertUnpickler) -> None:
    if m._marks and m._marks[-1] == len(m._stack):
        m._marks.pop()  # POP of a mark drops the mark
    else:
        m._pop()


def _discard_to_mark(m: InertUnpickler) -> None:
    m._to_mark()


def _dictionary(m: InertUnpickler) -> None:
    values = m._to_mark()
    m._push({})
    m._set_items(values)


def _set_item(m: InertUnpickler) -> None:
    value, key = m._pop(), m._pop()
    m._set_items([key, value])


def _stack_global(m: InertUnpickler) -> None:
    name, module = m._pop(), m._pop()
    m._find(module, name)


_VALUES: dict[bytes, Operation] = {
    b"N": _constant(lambda: None),
    b"\x88": _constant(lambda: True),
    b"\x89": _constant(lambda: False),
    b"K": _plain("<B"),
    b"M": _plain("<H"),
    b"J": _plain("<i"),
    b"G": _plain(">d"),
    b"\x8a": lambda m: m._long(m._number("<B")),
    b"\x8b": lambda m: m._long(m._number("<i")),
    b"I": lambda m: m._decimal(int),
    b"L": lambda m: m._decimal(int),
    b"F": lambda m: m._decimal(float),
    b"X": _text("<I"),
    b"\x8c": _text("<B"),
    b"\x8d": _text("<Q"),
    b"B": _raw("<I"),
    b"C": _raw("<B"),
    b"\x8e": _raw("<Q"),
    b"]": _constant(list),
    b"}": _constant(dict),
    b")": _constant(tuple),
}
_STRUCTURE: dict[bytes, Operation] = {
    b"\x80": _skip("<B"),
    b"\x95": _skip("<Q"),
    b"(": lambda m: m._marks.append(len(m._stack)),
    b"0": _discard,
    b"1": _discard_to_mark,
    b"2": lambda m: m._push(m._top()),
    b"l": lambda m: m._push(m._to_mark()),
    b"a": lambda m: m._append([m._pop()]),
    b"e": lambda m: m._append(m._to_mark()),
    b"d": _dictionary,
    b"s": _set_item,
    b"u": lambda m: m._set_items(m._to_mark()),
    b"t": lambda m: m._push(tuple(m._to_mark())),
    b"\x85": lambda m: m._tuple(1),
    b"\x86": lambda m: m._tuple(2),
    b"\x87": lambda m: m._tuple(3),
    b"q": lambda m: m._put(m._number("<B")),
    b"r": lambda m: m._put(m._number("<I")),
    b"\x94": lambda m: m._put(len(m._memo)),
    b"h": lambda m: m._get(m._number("<B")),
    b"j": lambda m: m._get(m._number("<I")),
    b"c": lambda m: m._find(m._line(), m._line()),
    b"\x93": _stack_global,
    b"R": lambda m: m._call(),
    b"\x81": lambda m: m._call(),  # NEWOBJ: a class and a tuple, as for a call
    b"b": lambda m: m._build(),
    b"Q": lambda m: m._persistent(),
}
STOP = ord(".")
OPERATIONS: dict[int, Operation] = {
    code[0]: operation for code, operation in (*_VALUES.items(), *_STRUCTURE.items())
}


# ---- legacy streams

LEGACY = 0x1950A86A20F9469CFC6C
"""The first value of the streams that torch.save wrote before 1.6, and writes inside pickles."""


def load_legacy(data: memoryview, place: Place, budget: Budget, depth: int = 0) -> Any:
    """Return the value of a legacy stream; its storages hold their bytes.

    The stream is five pickles (a number, the version, facts of the machine, the value, the keys of
    the storages), then for each storage its number of elements in 8 bytes and its bytes.

    Raises:
        CheckpointError: the stream is damaged, or names anything else than tensors.
    """
    position, found = 0, []
    reader = InertUnpickler(data, place, budget, 0, depth)
    for _ in range(5):
        keep = reader.storages
        reader = InertUnpickler(data, place, budget, position, depth)
        reader.storages = keep
        found.append(reader.load())
        position = reader.position
    magic, version, machine, value, keys = found
    if magic != LEGACY or version != 1001 or type(machine) is not dict:
        reader.refuse("a legacy stream has its magic number and version 1001", "others")
    if machine.get("little_endian") is not True or type(keys) is not list:
        reader.refuse("the numbers of a legacy stream are little-endian", "others")
    for key in keys:
        storage = reader.storages.get(key) if type(key) is str else None
        if storage is None or storage.data is not None:
            reader.refuse("each storage of a legacy stream is described once", "another one")
        size = storage.dtype.itemsize if storage.dtype else 1
        reader.position = position
        if reader._number("<q") * size != storage.nbytes:
            reader.refuse("a storage has the size of its description", "another size")
        storage.data = reader._take(storage.nbytes)
        position = reader.position
    if any(storage.data is None for storage in reader.storages.values()):
        reader.refuse("a legacy stream holds each storage", "one is missing")
    return value
