"""Ops that C++ answers without Python: the bytes of the Python kernels, and who answers what."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from formats import BY_NAME, FormatCase
from linear_cases import backward_arguments, forward_arguments

import qtensor
from qtensor.library import native_ops as cpp
from qtensor.library.define import FILLS
from tests.library.test_linear_ops import every_format, same, serves_here

FORWARD, BACKWARD = torch.ops.qtensor.linear_forward, torch.ops.qtensor.linear_backward
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def answers() -> None:
    """Skip where there are no kernels, or no C++ that calls them."""
    if not serves_here(BY_NAME["fp8"]) or cpp.library() is None:
        pytest.skip(reason="no compiler, or a torch without its headers")


def refuse(*args: Any) -> None:
    raise AssertionError("the Python kernel")


def by_cpp(op: Any, args: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Return what C++ answers. It learns a call when it comes for the second time."""
    for _ in range(2):
        op(*args)
    with monkeypatch.context() as patch:
        for name in ("linear_forward", "linear_backward"):
            patch.setitem(FILLS, name, refuse)
        return op(*args)


@every_format
def test_bytes_of_the_python_kernels(case: FormatCase, answers, monkeypatch):
    if not serves_here(case):
        pytest.skip(reason="programs do not have the format")
    kept = itertools.cycle(itertools.product(("", "rowwise", "columnwise", "both"), repeat=2))
    dtypes = itertools.cycle(itertools.product(FLOATS, repeat=3))
    wanted = [w for w in itertools.product((True, False), repeat=3) if any(w[:2])]
    for sizes, some in itertools.product(((32, 32, 32), (2, 32, 64), (33, 96, 160)), wanted):
        for options in ({}, *case.each_option()):
            if options.get("with_global_scale_inv"):
                continue  # programs do not write stored factors; test_global_scale.py has the bytes
            q = case.quantizer(columnwise=True, **options)
            bias = torch.randn(sizes[1]) if some[2] else None
            forward = forward_arguments(q, sizes, next(kept), next(dtypes), bias)
            backward = backward_arguments(q, sizes, some, next(dtypes))
            for op, args in ((FORWARD, forward), (BACKWARD, backward)):
                found = by_cpp(op, args, monkeypatch)
                with cpp.left_to_python():
                    expected = op(*args)
                same(found, expected)
                layouts = [[(t.shape, t.stride(), t.dtype) for t in ts] for ts in (found, expected)]
                assert layouts[0] == layouts[1]


@every_format
def test_operands_of_other_strides(case: FormatCase):
    """Transposed operands, of small sizes and of those that programs leave to Python."""
    kept = itertools.cycle(itertools.product(("", "rowwise", "columnwise", "both"), repeat=2))
    dtypes = itertools.cycle(itertools.product(FLOATS, repeat=3))
    wanted = itertools.cycle([w for w in itertools.product((True, False), repeat=3) if any(w[:2])])

    def turned(t: torch.Tensor) -> torch.Tensor:
        return t.t().contiguous().t()

    for options in ({}, *case.each_option()):
        q = case.quantizer(columnwise=True, **options)
        for sizes in ((32, 32, 32), (2, 32, 64), (33, 96, 160), (1, 32, 32), (300, 256, 288)):
            x, weight, *rest = forward_arguments(q, sizes, next(kept), next(dtypes))
            dy, *saved = backward_arguments(q, sizes, next(wanted), next(dtypes))
            with cpp.left_to_python():
                expected, gradients = FORWARD(x, weight, *rest), BACKWARD(dy, *saved)
            for _ in range(4):
                same(FORWARD(turned(x), turned(weight), *rest), expected)
                same(BACKWARD(turned(dy), *saved), gradients)


def test_a_gradient_of_any_strides(answers, monkeypatch):
    args = backward_arguments(qtensor.quantizer("fp8", columnwise=True))
    dy = args[0]
    for other in (dy.t().contiguous().t(), torch.ones(()).expand_as(dy), dy.repeat(1, 2)[:, ::2]):
        found = by_cpp(BACKWARD, (other, *args[1:]), monkeypatch)
        same(found, BACKWARD(other.contiguous(), *args[1:]))


def test_what_is_left_to_python(answers):
    """Strides, sizes and devices that programs do not take, now and after many calls."""
    q = qtensor.quantizer("fp8", columnwise=True)
    args = forward_arguments(q)
    turned = args[0].t().contiguous().t()
    cases = [(turned, *args[1:]), forward_arguments(q, (1, 32, 32))]
    cases.append(forward_arguments(q, (512, 160, 512)))
    for case in cases:
        with cpp.left_to_python():
            expected = FORWARD(*case)
        for _ in range(3):
            same(FORWARD(*case), expected)
    meta = FORWARD(*[a.to("meta") if isinstance(a, torch.Tensor) else a for a in args])
    assert [t.shape for t in meta] == [t.shape for t in FORWARD(*args)]
    assert all(t.is_meta for t in meta)


def test_errors_keep_their_types(answers):
    q = qtensor.quantizer("fp8_delayed", columnwise=True)
    args = list(backward_arguments(q))
    BACKWARD(*args)
    args[-2] = torch.ones(2)
    for _ in range(3):
        with pytest.raises(qtensor.QTensorError):
            BACKWARD(*args)
    q = qtensor.quantizer("fp8", columnwise=True)
    args = list(forward_arguments(q))
    args[1] = torch.randn(64, 32)
    for _ in range(3):
        with pytest.raises(qtensor.QTensorError, match="must be equal"):
            FORWARD(*args)


def test_values_are_read_at_every_call(answers, monkeypatch):
    """A program is remembered, not its tensors: new values, scales and seeds count."""
    for name, options in (("fp8_delayed", {}), ("nvfp4", {"stochastic_rounding": True})):
        q = BY_NAME[name].quantizer(columnwise=True, **options)
        args = list(forward_arguments(q))
        by_cpp(FORWARD, tuple(args), monkeypatch)
        for round_ in range(3):
            args[0] = args[0] * 1.5
            args[4] = None if args[4] is None else args[4] * 2
            args[5] = None if args[5] is None else args[5] + round_
            found = by_cpp(FORWARD, tuple(args), monkeypatch)
            with cpp.left_to_python():
                same(found, FORWARD(*args))


def test_modes_that_watch_still_see_the_op(answers, monkeypatch):
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    args = forward_arguments(qtensor.quantizer("mxfp8", columnwise=True))
    by_cpp(FORWARD, args, monkeypatch)
    with Watch():
        FORWARD(*args)
    assert seen == [FORWARD.default]
    with torch.inference_mode():
        assert all(t.is_inference() for t in FORWARD(*args))


def test_threads_learn_at_the_same_time(answers):
    q = qtensor.quantizer("mxfp8", columnwise=True)
    cases = [forward_arguments(q, (rows, 32, 64)) for rows in range(2, 34)]
    with cpp.left_to_python():
        expected = [FORWARD(*args) for args in cases]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            for found, want in zip(pool.map(lambda a: FORWARD(*a), cases), expected, strict=True):
                same(found, want)
