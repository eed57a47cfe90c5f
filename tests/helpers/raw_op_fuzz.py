"""Call raw ops with random arguments, most of them wrong: a program that prints what it finds.

    python tests/helpers/raw_op_fuzz.py SEED COUNT [OP ...]

It makes COUNT calls of each op. Before each call it prints the call, so that the last line names
the call that ended the process. A line that begins with BAD is a fault.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import zlib
from typing import Any

import torch
from raw_op_cases import MAKERS, RANDOM, Arguments, Maker, spoil
from torch import Tensor

import qtensor
from qtensor.library.native_ops import left_to_python

CANARY = 0xA5
MARGIN = 256
"""Bytes around each tensor of a call."""
REPEATS = 3
"""Calls with equal arguments. Python serves the last: C++ gives its bytes and its errors."""
EXPECTED = (qtensor.QTensorError, RuntimeError, TypeError, ValueError, NotImplementedError)


class Guarded:
    """A tensor of a call within a larger memory whose other bytes are known.

    Args:
        source: the tensor to copy; its sizes, strides and dtype stay.
        shift: bytes, a multiple of its element size, that the copy begins later.
    """

    def __init__(self, source: Tensor, shift: int) -> None:
        size = source.element_size()
        last = sum((n - 1) * s for n, s in zip(source.shape, source.stride(), strict=True))
        extent = (last + 1) * size if source.numel() else 0
        start = MARGIN + shift * size
        self.memory = torch.full((start + extent + MARGIN,), CANARY, dtype=torch.uint8)
        flat = self.memory[: self.memory.numel() // size * size].view(source.dtype)
        self.tensor = flat.as_strided(source.shape, source.stride(), start // size)
        if source.numel():
            origin = source.detach().untyped_storage()
            first = source.storage_offset() * size
            block = torch.empty(0, dtype=torch.uint8).set_(origin)[first : first + extent]
            self.memory[start : start + extent] = block
        self.before = self.memory.clone()
        self.inside = torch.zeros_like(self.memory, dtype=torch.bool)
        if source.numel():
            offsets = torch.zeros((), dtype=torch.int64)
            for n, s in zip(source.shape, source.stride(), strict=True):
                offsets = offsets.unsqueeze(-1) + torch.arange(n) * s
            for byte in range(size):
                self.inside[start + offsets.reshape(-1) * size + byte] = True

    def outside_changed(self) -> bool:
        """Return whether bytes that are not elements of the tensor were written."""
        return bool(((self.memory != self.before) & ~self.inside).any())

    def changed(self) -> bool:
        """Return whether any byte was written."""
        return not torch.equal(self.memory, self.before)


def guardable(value: Any) -> bool:
    """Return whether a value is a plain, dense CPU tensor."""
    return (
        type(value) is Tensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and all(s >= 0 for s in value.stride())
    )


def guard(arguments: Arguments, shift: int) -> tuple[Arguments, dict[str, list[Guarded]]]:
    """Return the arguments with every tensor copied into guarded memory, and these memories."""
    guards: dict[str, list[Guarded]] = {}

    def copy(name: str, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(copy(name, item) for item in value)
        if guardable(value):
            guarded = Guarded(value, shift)
            guards.setdefault(name, []).append(guarded)
            return guarded.tensor
        with contextlib.suppress(qtensor.UnsupportedError):  # A view that cannot be copied.
            return value.clone() if isinstance(value, Tensor) and not value.is_meta else value
        return value

    return {name: copy(name, value) for name, value in arguments.items()}, guards


def describe(value: Any) -> str:
    """Return a value in a few words: shapes, strides and dtypes in place of numbers."""
    if isinstance(value, Tensor):
        kind = "" if type(value) is Tensor else f"{type(value).__name__} "
        strides = value.stride() if value.layout is torch.strided else value.layout
        dtype = str(value.dtype).removeprefix("torch.")
        return f"<{kind}{dtype} {tuple(value.shape)} {strides} {value.device}>"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(describe(item) for item in value) + "]"
    return repr(value)[:100]


def leaves(result: Any) -> list[Tensor]:
    """Return the tensors of a result."""
    if result is None:
        return []
    return [result] if isinstance(result, Tensor) else list(result)


def as_bytes(t: Tensor) -> bytes:
    """Return the elements of a plain tensor as bytes.

    All NaNs of a product count as one: BLAS and the vectors of a CPU choose sign and payload.
    """
    t = t.detach()
    if t.is_floating_point() and t.element_size() > 1:
        t = torch.where(t.isnan(), torch.full_like(t, float("nan")), t)
    if t.is_conj():
        t = t.resolve_conj()
    return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""


def dirty(sizes: list[int], value: int) -> None:
    """Fill and free memory of these sizes. Later allocations get it and must not show it."""
    blocks = [torch.full((size,), value, dtype=torch.uint8) for size in sizes for _ in range(2)]
    del blocks


def call_once(name: str, arguments: Arguments, turn: int, sizes: list[int]) -> tuple[Any, str]:
    """Call an op on guarded copies and return (its bytes or its error, the fault or "")."""
    op = getattr(torch.ops.qtensor, name).default
    mutable = {a.name for a in op._schema.arguments if a.alias_info and a.alias_info.is_write}
    copies, guards = guard(arguments, 8 * (turn % 3))
    dirty(sizes, 17 * turn + 1)
    fault = ""
    try:
        result = leaves(op(**copies))
        answer: Any = [(tuple(t.shape), t.dtype, b"" if t.is_meta else as_bytes(t)) for t in result]
        sizes[:] = [0 if t.is_meta else t.numel() * t.element_size() for t in result]
        written = [as_bytes(g.tensor) for name in sorted(mutable) for g in guards.get(name, [])]
        answer += written
    except EXPECTED as error:
        answer = f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - any other kind is a fault
        answer = f"{type(error).__name__}: {error}"
        fault = f"raises {answer[:200]}"
    for argument, memories in guards.items():
        for memory in memories:
            if memory.outside_changed():
                fault = f"writes outside {argument}"
            if argument not in mutable and memory.changed():
                fault = f"writes to {argument}"
    return answer, fault


def random_call(name: str, seed: int) -> Arguments:
    """Return the arguments of a call, of which none, one, two or three are spoiled."""
    make = Maker(seed)
    arguments = MAKERS[name](make)
    names = list(arguments)
    for _ in range(make.random.choice((0, 1, 1, 1, 2, 3))):
        argument = make.random.choice(names)
        if arguments[argument] is not None and make.random.random() < 0.1:
            arguments[argument] = None
            continue
        with contextlib.suppress(*EXPECTED):  # A tensor that cannot exist.
            arguments[argument] = spoil(make.random, arguments[argument])
    return arguments


def check_call(name: str, seed: int) -> str:
    """Repeat a random call and return "ok", "refused", or a line that begins with BAD."""
    arguments = random_call(name, seed)
    text = ", ".join(f"{key}={describe(value)}" for key, value in arguments.items())
    print(f"{name} {seed}: {text}", flush=True)
    sizes: list[int] = []
    answers = []
    for turn in range(REPEATS):
        with left_to_python() if turn == REPEATS - 1 else contextlib.nullcontext():
            answer, fault = call_once(name, arguments, turn, sizes)
        if fault:
            return f"BAD {name} {seed}: {fault}; {text}"
        answers.append(answer)
    if name not in RANDOM and any(answer != answers[0] for answer in answers[1:]):
        kinds = [a if isinstance(a, str) else "bytes" for a in answers]
        return f"BAD {name} {seed}: equal calls differ, {kinds}; {text}"
    return "refused" if isinstance(answers[0], str) else "ok"


def main(seed: int, count: int, names: list[str]) -> None:
    """Make ``count`` calls of each op and print how many were answered and refused."""
    torch.set_num_threads(1)
    outcomes: dict[str, dict[str, int]] = {}
    for name in names or MAKERS:
        tally = outcomes.setdefault(name, {"ok": 0, "refused": 0, "bad": 0})
        for i in range(count):
            own = zlib.crc32(f"{name} {seed} {i}".encode())
            torch.manual_seed(own)
            outcome = check_call(name, own)
            if outcome.startswith("BAD"):
                print(outcome, flush=True)
                outcome = "bad"
            tally[outcome] += 1
    for name, tally in outcomes.items():
        print(f"DONE {name} {tally['ok']} {tally['refused']} {tally['bad']}", flush=True)


if __name__ == "__main__":
    faulthandler.enable()
    first, second, *rest = sys.argv[1:]
    main(int(first), int(second), rest)
