"""The portable kernels of attention on another machine: aarch64 has the bytes of the oracle."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import FORMATS, Problem, random_problem
from emulator import MARKS, Emulated, compile_server
from formats import assert_same_bytes

from qtensor.kernels.cpu import attention as native
from qtensor.kernels.cpu import sources
from qtensor.library.native_ops import left_to_python

pytestmark = MARKS


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    units = [u for u in sources.attention_build_spec("baseline").units if u.name == "attention"]
    return compile_server("attention_server", units, tmp_path_factory.mktemp("aarch64"))


def side_buffers(call: Any, name: str) -> Iterator[tuple[int, int, int]]:
    """Yield (offset of the address, address, bytes) of codes and factors."""
    side, start = getattr(call, name), getattr(native.AttentionCall, name).offset
    outer = call.pages if call.table else call.batch
    tokens = call.page if call.table else call.capacity
    plain = {5: 2, 6: 2, 7: 4}.get(side.element, 1)
    width = side.stored * plain
    if side.element == 4:
        width = side.stored // 2
    elif side.packed:
        width = side.stored // 4 * 3
    last = (outer - 1) * side.outer + (call.heads - 1) * side.head + (tokens - 1) * side.token
    yield start + native.StoredRows.codes.offset, side.codes, last + width
    if side.factors:
        width = side.stored // side.block if side.block else 4
        last = (outer - 1) * side.factor_outer + (call.heads - 1) * side.factor_head
        last += (tokens - 1) * side.factor_token
        yield start + native.StoredRows.factors.offset, side.factors, last + width


def buffers(call: Any) -> Iterator[tuple[int, int, int]]:
    """Yield (offset of the address, address, bytes) of what a call reads, then of its result."""
    fields = native.AttentionCall
    rows, heads = call.batch * call.queries, call.heads * call.groups
    item = (4, 2, 2)[call.q_dtype]
    last = (call.batch - 1) * call.q_batch + (heads - 1) * call.q_head
    last += (call.queries - 1) * call.q_query + call.k.stored
    yield fields.q.offset, call.q, last * item
    for name in ("k", "v"):
        yield from side_buffers(call, name)
    mask = (call.batch - 1) * call.mask_batch + (heads - 1) * call.mask_head
    mask += (call.queries - 1) * call.mask_query + (call.mask_tokens - 1) * call.mask_token + 1
    sinks = (call.batch - 1) * call.sink_batch + (heads - 1) * call.sink_head
    sinks += (call.queries - 1) * call.sink_query + 1
    for name, size in (
        ("table", call.batch * call.table_stride * 8),
        ("lengths", call.batch * 8),
        ("positions", rows * 8),
        ("first", call.batch * 8),
        ("mask", mask * (4, 2, 2, 1)[call.mask_dtype]),
        ("sinks", sinks * 4),
    ):
        if getattr(call, name):
            yield getattr(fields, name).offset, getattr(call, name), size
    yield fields.out.offset, call.out, rows * heads * call.v.stored * item


@pytest.fixture
def emulated(server: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulated]:
    here, found = native.library(), Emulated(server)

    class Remote:
        qt_cache_append = here.qt_cache_append

        def qt_attention(self, reference: Any) -> int:
            call = reference._obj
            held = list(buffers(call))
            contents = [(offset, ctypes.string_at(at, size)) for offset, at, size in held]
            ctypes.memmove(call.out, found.call(bytes(call), contents)[-1], held[-1][2])
            return 0

    monkeypatch.setattr(native, "library", lambda: Remote())
    with left_to_python():
        yield found
    found.close()


def test_random_problems(emulated: Emulated) -> None:
    problems = [p for p in map(random_problem, range(60)) if p is not None]
    for problem in problems:
        assert_same_bytes(problem.run(), problem.expected(), str(problem.seed))
    assert emulated.calls == len(problems) > 30


def test_formats_and_head_sizes(emulated: Emulated) -> None:
    """Few rows and many, of every format, and heads that are filled up with zeros."""
    for text, queries in itertools.product(FORMATS, (1, 20)):
        problem = Problem(text, lengths=(70,), queries=queries, size=64)
        assert_same_bytes(problem.run(), problem.expected(), f"{text}, {queries}")
    for text, size in (("fp8_rowwise", 65), ("nvfp4", 80), ("bfloat16", 72), ("mxfp8", 576)):
        problem = Problem(text, "fp8_rowwise", torch.float32, (40,), size=size, v_size=80)
        assert_same_bytes(problem.run(), problem.expected(), f"{text}, heads of {size}")
    assert emulated.calls == 2 * len(FORMATS) + 4
