"""The ops ``attention`` and ``cache_append_`` in C++: bytes and errors of the Python kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_cases import (
    DTYPES,
    FORMATS,
    Problem,
    Side,
    append,
    attend,
    empty_side,
    random_problem,
)
from formats import assert_same_bytes, rand
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import qtensor
from qtensor.kernels.cpu import attention as kernels
from qtensor.kernels.cpu import native
from qtensor.library import native_ops
from qtensor.library.define import FILLS

OPS = torch.ops.qtensor
B, H, N, D, E = 2, 3, 4, 64, 32


@pytest.fixture(autouse=True, scope="module")
def _served() -> None:
    """Skip where there are no kernels."""
    missing = isinstance(native.library(), str) or kernels.library() is None
    if missing or native_ops.library() is None:
        pytest.skip(reason="no compiler for the C++ kernels")


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the ops whose calls came to Python."""
    names: list[str] = []
    for name in ("attention", "cache_append_"):
        fill = FILLS[name]

        def noted(*args: Any, name: str = name, fill: Any = fill) -> None:
            names.append(name)
            fill(*args)

        monkeypatch.setitem(FILLS, name, noted)
    return names


def in_python(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with native_ops.left_to_python():
        return call(*args, **kwargs)


def check_attention(problem: Problem, left: list[str], **more: Any) -> None:
    with torch.no_grad():
        found = problem.run(**more)
    assert "attention" not in left
    want = in_python(problem.run, **more)
    assert (found.shape, found.stride(), found.dtype) == (want.shape, want.stride(), want.dtype)
    assert_same_bytes(found, want)
    left.clear()


def test_attention_of_random_problems(left: list[str]) -> None:
    for seed in range(40):
        problem = random_problem(seed)
        if problem is not None:
            check_attention(problem, left)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_with_every_argument(dtype: torch.dtype, left: list[str]) -> None:
    """Indices of 32 bits and strided, kinds of sinks, expanded masks, pages, a strided q."""
    problem = Problem("mxfp8", "nvfp4", dtype, (40, 21), heads=2, queries=3, page=16)
    sinks = torch.randn(2, 4, 3).to(dtype)
    positions = torch.tensor([[37, 38, 39], [18, 19, 20]]).int()
    strided = torch.stack([positions, positions], -1)[..., 0]
    mask = (torch.randn(2, 1, 1, 40) < 1.5).expand(2, 4, 1, 40)
    for options in (
        {"sinks": sinks, "positions": positions, "soft_cap": 20.0},
        {"sinks": sinks.float().mT.contiguous().mT, "positions": strided, "window": 30},
        {"sinks": sinks[0, :, 0].contiguous(), "first": torch.tensor([1, 2]).int()},
        {"mask": mask, "causal": False, "lengths": torch.tensor([40, 21]).int()},
        {"mask": torch.randn(1, 4, 3, 44).to(dtype)},
    ):
        check_attention(problem, left, **options)
    k, v, paged = problem.cache()
    q = problem.q().transpose(1, 2).contiguous().transpose(1, 2)
    table = {"block_table": paged["block_table"].int()}
    left.clear()
    found = attend(q, k, v, problem.lengths_tensor, **table)
    assert left == []
    assert_same_bytes(found, in_python(attend, q, k, v, problem.lengths_tensor, **table))


def new_rows(dtype: torch.dtype, strided: bool = False) -> tuple[Tensor, Tensor]:
    keys, values = rand(B, H, N, D, seed=1).to(dtype), rand(B, H, N, E, seed=2).to(dtype)
    if strided:
        keys, values = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (keys, values))
    return keys, values


@torch.no_grad()
@pytest.mark.parametrize("text", FORMATS)
def test_append_to_every_format(text: str, left: list[str]) -> None:
    """Plain and strided rows, a mean of either shape, pages, rows that are not written."""
    positions = torch.tensor([[0, 3, -1, 9], [7, 2, 5, 8]])
    table = torch.tensor([[2, 0], [3, 1]])
    means = (None, rand(H, D, seed=3), rand(B, H, D, seed=4).bfloat16())
    for i, dtype in enumerate(DTYPES):
        plain = getattr(torch, text, None)
        if plain not in (None, dtype):
            continue
        mean = None if plain else means[i]
        for strided, paged in ((False, False), (True, False), (False, True), (True, True)):
            lead = (4, H, 8) if paged else (B, H, 16)
            options = {"block_table": table.int()} if paged else {}
            k, v = empty_side(text, lead, D), empty_side(text, lead, E)
            want = [side.map(Tensor.clone) for side in (k, v)]
            call = *new_rows(dtype, strided), positions.int() if paged else positions
            append(k, v, *call, k_mean=mean, **options)
            assert left == []
            in_python(append, *want, *call, k_mean=mean, **options)
            left.clear()
            for a, b in zip((k, v), want, strict=True):
                assert_same_bytes(a.codes, b.codes)
                if a.factors is not None:
                    assert_same_bytes(a.factors, b.factors)


@torch.no_grad()
def test_append_to_views_of_a_larger_cache(left: list[str]) -> None:
    """Capacity, heads and layout of the cache in memory may be any."""
    texts, seen = ("fp8_rowwise", "mxfp4"), []
    for run in (append, lambda *a: in_python(append, *a)):
        sides = [empty_side(t, (B, 16, 2 * H), D) for t in texts]
        views = [s.map(lambda t: t.transpose(1, 2)[:, ::2]) for s in sides]
        keys, _ = new_rows(torch.bfloat16)
        run(*views, keys, keys, torch.arange(N).expand(B, N))
        seen.append(sides)
    assert left == ["cache_append_"]
    for a, b in zip(*seen, strict=True):
        assert a.codes.any()
        assert_same_bytes(a.codes, b.codes)
        assert_same_bytes(a.factors, b.factors)


def wrong_calls() -> list[Callable[[], Any]]:
    problem = Problem("mxfp8", lengths=(40, 21))
    k, v, _ = problem.cache()
    q, lengths = problem.q(), problem.lengths_tensor
    keys = rand(B, 1, N, D)
    at = torch.arange(N).expand(B, N)
    wide = dataclasses.replace(v, text="mxfp8(swizzled=True)")
    fewer = Side(k.text, k.codes, k.factors[..., :1], None)
    return [
        lambda: attend(q.double(), k, v, lengths),
        lambda: attend(q[..., :32], k, v, lengths),
        lambda: attend(q, fewer, v, lengths),
        lambda: attend(q, k, wide, lengths),
        lambda: attend(q, k, v, lengths + 60),
        lambda: attend(q, k, v, -lengths),
        lambda: attend(q, k, v, lengths.float()),
        lambda: attend(q, k, v, lengths, scale=float("nan")),
        lambda: attend(q, k, v, lengths, scale=1e-60),
        lambda: attend(q, k, v, lengths, soft_cap=-1.0),
        lambda: attend(q, k, v, lengths, window=3, causal=False),
        lambda: attend(q, k, v, lengths, mask=torch.zeros(1, 1, 1, 39)),
        lambda: attend(q, k, v, lengths, sinks=torch.zeros(3)),
        lambda: attend(q, k, v, lengths, k_global=torch.ones(1)),
        lambda: append(k, v, keys, keys, at + 60),
        lambda: append(k, v, keys[:, :, :2], keys, at),
        lambda: append(k, v, keys.double(), keys, at),
        lambda: append(fewer, v, keys, keys, at),
        lambda: append(k, v, keys, keys, at, k_mean=torch.ones(5)),
        lambda: append(k, v, keys, keys, at, block_table=at[:1]),
    ]


def test_errors_are_those_of_the_python_kernels() -> None:
    for i, call in enumerate(wrong_calls()):
        with pytest.raises(qtensor.QTensorError) as expected:
            in_python(call)
        with pytest.raises(type(expected.value)) as found:
            call()
        assert type(found.value) is type(expected.value), i
        assert str(found.value) == str(expected.value), i


def test_what_is_left_to_python(left: list[str]) -> None:
    """Buffers that may require a gradient, and rows of another plain dtype."""
    keys, at = rand(B, H, N, D), torch.arange(N).expand(B, N)
    for text, grad, python in (
        ("mxfp8", True, False),
        ("fp8_rowwise", True, True),
        ("fp8_rowwise", False, False),
        ("float32", False, False),
        ("bfloat16", False, True),
    ):
        k, v = (empty_side(text, (B, H, 16), D) for _ in range(2))
        with torch.set_grad_enabled(grad):
            append(k, v, keys, keys, at)
        assert left == ["cache_append_"] * python, (text, grad)
        left.clear()


def test_what_watches_sees_the_ops() -> None:
    class Watch(TorchDispatchMode):
        seen: list[str] = []  # noqa: RUF012 - of one test

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func.namespace == "qtensor":
                self.seen.append(func.name())
            return func(*args, **(kwargs or {}))

    problem = Problem("mxfp8", lengths=(40, 21))
    k, v, _ = problem.cache()
    q, lengths = problem.q(), problem.lengths_tensor
    with Watch() as watch:
        problem.run()
    assert watch.seen == ["qtensor::cache_append_", "qtensor::attention"]
    with torch.profiler.profile() as profile:
        problem.run()
    names = {event.key for event in profile.key_averages()}
    assert {"qtensor::cache_append_", "qtensor::attention"} <= names
    with FakeTensorMode() as mode:
        fake = [s.map(mode.from_tensor) for s in (k, v)]
        out = attend(mode.from_tensor(q), *fake, mode.from_tensor(lengths))
    assert out.shape == q.shape
    mapped = torch.vmap(lambda x: attend(x, k, v, lengths))(torch.stack([q, -q]))
    assert_same_bytes(mapped[1], attend(-q, k, v, lengths))
