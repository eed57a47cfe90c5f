"""The CPU kernels of attention: the bits of the oracle, by each instruction set, in every call."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_cases import DTYPES, Problem, attend, random_problem
from formats import assert_same_bytes
from native_cases import threads

from qtensor.build.cache import build
from qtensor.kernels.cpu import attention as native
from qtensor.kernels.cpu import sources
from qtensor.library.native_ops import left_to_python

_SLOW = pytest.mark.nightly(reason="its compiler takes a quarter of a minute")
ISAS = [
    *(pytest.param(isa, marks=_SLOW if isa == "baseline" else ()) for isa in sources.usable_isas()),
    *(["avx512 dots"] if sources.capabilities().get("avx512_bf16") else []),
]


@pytest.fixture(scope="session", params=ISAS)
def way(request: pytest.FixtureRequest) -> tuple[Any, int]:
    """The kernels of an instruction set, and whether they use dot products."""
    isa, _, dots = request.param.partition(" ")
    handle = ctypes.CDLL(str(build(sources.attention_build_spec(isa))))
    handle.qt_attention.argtypes = handle.qt_cache_append.argtypes = (ctypes.c_void_p,)
    handle.qt_join.argtypes = (ctypes.c_void_p,) * 5
    return handle, int(bool(dots))


@pytest.fixture
def _serves(way: tuple[Any, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    calls = []

    class Counting:
        qt_cache_append, qt_join = way[0].qt_cache_append, way[0].qt_join

        def qt_attention(self, call: object) -> int:
            calls.append(call)
            return way[0].qt_attention(call)

    monkeypatch.setattr(native, "library", lambda: Counting())
    monkeypatch.setattr(native, "DOTS", way[1])
    with left_to_python():
        yield
    assert calls, "no kernel was called"


def check_random(seeds: range) -> None:
    """Compare random problems with the oracle."""
    for seed in seeds:
        problem = random_problem(seed)
        if problem is not None:
            got = problem.run()
            assert_same_bytes(got, problem.expected(), f"problem {seed}")
            if problem.v_format not in ("nvfp4", "fp8"):  # Their factor comes before the division.
                assert_same_bytes(joined(problem), got, f"parts of problem {seed}")


def joined(problem: Problem) -> torch.Tensor:
    """The attention over all tokens as one part, joined with one without a score."""
    part = problem.run(op="attention_part", sinks=None)
    none = torch.zeros_like(part[0]), torch.tensor([-torch.inf, 0.0]).expand_as(part[1])
    sinks = problem.options.get("sinks")
    result: torch.Tensor = torch.ops.qtensor.join_attention(*part, *none, problem.dtype, sinks)
    return result


@pytest.mark.usefixtures("_serves")
def test_random_problems() -> None:
    check_random(range(5))


@pytest.mark.nightly(reason="hundreds of problems; five are in the default tier")
@pytest.mark.usefixtures("_serves")
@pytest.mark.parametrize("part", range(8))
def test_hundreds_of_random_problems(part: int) -> None:
    check_random(range(100 + 40 * part, 140 + 40 * part))


LONG = {
    "decode": {"lengths": (1500, 700, 1023), "heads": 2, "groups": 4},
    "prefill": {"lengths": (600, 300), "groups": 3, "queries": 150},
    "window": {"lengths": (1500, 300), "groups": 2, "queries": 3, "options": {"window": 300}},
}
ways = pytest.mark.parametrize("kind", LONG)


@pytest.fixture(params=("fp8_rowwise", "mxfp4", "nvfp4", "bfloat16", "mxfp8", "float32"))
def problem(request: pytest.FixtureRequest) -> Problem:
    """A problem of a format."""
    return Problem(request.param, size=128)


def of_kind(problem: Problem, kind: str) -> Problem:
    return dataclasses.replace(problem, **LONG[kind])


@ways
def test_threads_and_pages_change_nothing(problem: Problem, kind: str) -> None:
    problem = of_kind(problem, kind)
    with threads(1):
        want = problem.run()
    for count in (2, 3):
        with threads(count):
            assert_same_bytes(problem.run(), want, f"{count} threads")
    for page in (16, 40, 256):
        assert_same_bytes(dataclasses.replace(problem, page=page).run(), want, f"pages of {page}")


def test_without_tokens(problem: Problem) -> None:
    """Several threads share queries that see nothing, and parts of an attention without scores."""
    problem = of_kind(problem, "decode")
    problem = dataclasses.replace(problem, options={"first": problem.lengths_tensor})
    for count in (1, 3):
        with threads(count):
            assert problem.run().count_nonzero() == 0
            values, sums = problem.run(op="attention_part", sinks=None)
        assert values.isfinite().all()
        assert (sums == torch.tensor([-torch.inf, 0.0])).all()


@ways
def test_what_no_query_sees_is_not_read(problem: Problem, kind: str) -> None:
    """NaN behind the end changes nothing, nor does the capacity."""
    problem = of_kind(problem, kind)
    want = problem.run()
    k, v, _ = dataclasses.replace(problem, spare=500).cache()
    for side in (k, v):
        for buffer in (side.codes, side.factors):
            if buffer is not None:
                for b, length in enumerate(problem.lengths):
                    buffer[b, :, length:].view(torch.uint8).fill_(0xFF)
    got = attend(problem.q(), k, v, problem.lengths_tensor, **problem.options)
    assert_same_bytes(got, want)


@ways
def test_a_row_alone_and_a_sequence_alone(problem: Problem, kind: str) -> None:
    """Decoding a token at a time equals prefill; a batch equals its sequences."""
    problem = of_kind(problem, kind)
    want, (k, v, _), q = problem.run(), problem.cache(), problem.q()
    for b, length in enumerate(problem.lengths):
        one = [side.map(lambda t: t[b : b + 1]) for side in (k, v)]  # noqa: B023 - used at once
        count = torch.tensor([length])
        got = attend(q[b : b + 1], *one, count, **problem.options)
        assert_same_bytes(got, want[b : b + 1], f"sequence {b}")
        for m in {0, problem.queries // 2, problem.queries - 1}:
            at = count - problem.queries + m + 1
            got = attend(q[b : b + 1, :, m : m + 1], *one, at, **problem.options)
            assert_same_bytes(got, want[b : b + 1, :, m : m + 1], f"row {m} of {b}")


def test_strides_and_kinds_of_indices(problem: Problem) -> None:
    """Caches as (B, S, H, D), strided queries and int32 indices have the same bits."""
    problem = of_kind(problem, "decode")
    want, (k, v, _), q = problem.run(), problem.cache(), problem.q()
    swapped = [s.map(lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)) for s in (k, v)]
    wide = torch.stack([q, q], -2).flatten(-2)[..., : q.shape[-1]]
    got = attend(wide, *swapped, problem.lengths_tensor.int())
    assert_same_bytes(got, want)


@pytest.mark.parametrize("size", [32, 64, 96, 160, 192, 256, 576])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_sizes(size: int, dtype: torch.dtype) -> None:
    for text, v_size in itertools.product(("mxfp8", "nvfp4"), (64, 128)):
        small = Problem(text, "fp8_rowwise", dtype, (60,), size=size, v_size=v_size)
        assert_same_bytes(small.run(), small.expected(), text)


@pytest.mark.usefixtures("_serves")
@pytest.mark.parametrize(
    ("text", "size"),
    [
        (text, size)
        for text in ("fp8_rowwise", "nvfp4", "bfloat16", "float32", "fp8")
        for size in (1, 16, 48, 65, 72, 80, 112)
        if text != "nvfp4" or size % 16 == 0  # whole blocks
    ],
)
def test_head_sizes_that_are_filled_up(text: str, size: int) -> None:
    """Rows of any size get zeros behind them; what lies there in memory is not read."""
    for queries, dtype in ((1, torch.bfloat16), (12, torch.float32)):
        small = Problem(text, "fp8_rowwise", dtype, (40,), queries=queries, size=size, v_size=80)
        k, v, _ = dataclasses.replace(small, spare=30).cache()
        for side in (k, v):
            side.codes[:, :, 40:].view(torch.uint8).fill_(0xFF)
        got = attend(small.q(), k, v, small.lengths_tensor)
        assert_same_bytes(got, small.expected(), f"{queries} queries")


def test_nan_and_infinities() -> None:
    problem = Problem("mxfp8", lengths=(40,), groups=1)
    k, v, _ = problem.cache()
    k.codes[0, 0, 5, 3] = 0x7F
    assert attend(problem.q(), k, v, problem.lengths_tensor).isnan().all()
    k, v, _ = problem.cache()
    v.codes[0, 0, 5, 3] = 0x7F
    got = attend(problem.q(), k, v, problem.lengths_tensor)
    assert got[..., 3].isnan().all()
    assert got.isnan().sum() == 1
    v.factors[0, 0, 5, 1] = 0xFF
    assert attend(problem.q(), k, v, problem.lengths_tensor).isnan().sum() == 33


def test_denormals_count_in_any_mode() -> None:
    problem = Problem("float32", dtype=torch.float32, lengths=(300,), queries=2)
    want = problem.run()
    torch.set_flush_denormal(True)
    try:
        assert_same_bytes(problem.run(), want)
    finally:
        torch.set_flush_denormal(False)
