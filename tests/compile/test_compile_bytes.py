"""Eager, aot_eager and inductor give the same bytes: every format, each option, each dtype, both
usages, and each alone.
"""

from __future__ import annotations

import pytest
import torch
from compile_helpers import (
    Compiled,
    adversarial,
    assert_same,
    backends,
    ordinary,
    quantizers,
    seeded,
)
from formats import DTYPES, FORMATS, FormatCase, formats
from torch import Tensor

import qtensor

SEED = torch.tensor([20240607])


def encoded(chosen: list[qtensor.Quantizer], inputs: list[Tensor], state: dict, seed: Tensor):
    """What a region does with many quantizers for inductor, which lowers each op anew: it
    quantizes.
    """
    return [q.quantize(x, **state, **seeded(q, seed)) for q in chosen for x in inputs]


def sweep(chosen: list[qtensor.Quantizer], inputs: list[Tensor], state: dict, seed: Tensor) -> list:
    """What a region does with each quantizer and input: quantize, hand out, decode, decode to
    another dtype.
    """
    results = []
    for q in chosen:
        for x in inputs:
            t = q.quantize(x, **state, **seeded(q, seed))
            results.append((t, t.dequantize(), t.dequantize(torch.float16)))
    return results


def name_the_first_difference(chosen, inputs, got, want):
    pairs = [(q, x) for q in chosen for x in inputs]
    for (q, x), a, b in zip(pairs, got, want, strict=True):
        try:
            assert_same(a, b)
        except AssertionError as error:
            raise AssertionError(f"{q.canonical} of {x.dtype} {tuple(x.shape)}: {error}") from None


@backends
@pytest.mark.parametrize("which", ["adversarial", "ordinary"])
@formats
def test_each_option_and_dtype(case: FormatCase, which: str, backend: str):
    """All options, usages and dtypes of a format in one region; inductor takes a part of it for
    each input.
    """
    chosen = quantizers(case)
    make = adversarial if which == "adversarial" else ordinary
    dtypes = DTYPES
    if backend == "inductor":
        chosen = [q for q in chosen if q.columnwise and q.rowwise]
        dtypes = DTYPES if which == "adversarial" else [torch.bfloat16]
    inputs = [make((33, 72), dtype, seed=i) for i, dtype in enumerate(dtypes)]
    if which == "adversarial":
        assert all(x.isnan().any() and x.isinf().any() and (x == 0).any() for x in inputs)
    compiled = Compiled(lambda inputs, state, seed: sweep(chosen, inputs, state, seed), backend)
    got = compiled(inputs, case.call(), SEED)
    want = sweep(chosen, inputs, case.call(), SEED)
    name_the_first_difference(chosen, inputs, got, want)
    assert len(got) == len(chosen) * len(inputs)
    compiled.check_graphs(1)


@pytest.mark.nightly(reason="test_each_option_and_dtype has each option on its own")
@backends
@formats
def test_every_combination_of_options(case: FormatCase, backend: str):
    """Options together, both usages, on one ragged input; graph by graph of 64 quantizers."""
    work = sweep if backend == "aot_eager" else encoded
    chosen = [case.quantizer(columnwise=True, **options) for options in case.every_option()]
    x = adversarial((20, 40), torch.bfloat16)
    for start in range(0, len(chosen), 64):
        part = chosen[start : start + 64]
        compiled = Compiled(lambda x, state, part=part: work(part, [x], state, SEED), backend)
        got, want = compiled(x, case.call()), work(part, [x], case.call(), SEED)
        name_the_first_difference(part, [x], got, want)
        compiled.check_graphs(1)


def around(q: qtensor.Quantizer, x: Tensor, state: dict, seed: Tensor) -> tuple:
    """Exact neighbours that a compiler likes to fuse, reorder or lay out anew: no rounding of
    theirs is involved.
    """
    extra = {**state, **seeded(q, seed)}
    first = q.quantize(torch.relu(x) * 2, **extra)
    turned = q.quantize(x.t(), **extra)
    strided = q.quantize(x[1::2, ::3], **extra)
    expanded = q.quantize(x[:1].expand(40, x.shape[1]), **extra)
    joined = q.quantize(torch.cat([x, -x], 1), **extra)
    upcast = q.quantize(x.float(), **extra)
    deep = q.quantize(x.reshape(3, 11, -1).transpose(0, 1), **extra)
    again = q.quantize(first.dequantize() * 0.5, **extra)
    return first, turned, strided, expanded, joined, upcast, deep, again, turned.dequantize().t()


@backends
@formats
def test_between_other_ops(case: FormatCase, backend: str):
    q = case.quantizer(columnwise=True)
    inputs = [adversarial((33, 72), dtype) for dtype in DTYPES]

    def region(inputs, state, seed):
        return [around(q, x, state, seed) for x in inputs]

    compiled = Compiled(region, backend)
    assert_same(compiled(inputs, case.call(), SEED), region(inputs, case.call(), SEED))
    compiled.check_graphs(1)


@backends
def test_same_input_quantized_twice_is_the_same(backend: str):
    """Common subexpressions may be merged, but two formats or two usages of one input never."""
    chosen = [case.quantizer(columnwise=column) for case in FORMATS for column in (False, True)]

    def region(x, scale):
        results = []
        for q in (*chosen, *chosen):
            results.append(q.quantize(x, **({"scale": scale} if q.needs_scale else {})))
        return results

    x, scale = adversarial((33, 72), torch.float32), torch.tensor([2.0])
    compiled = Compiled(region, backend)
    got = compiled(x, scale)
    assert_same(got, region(x, scale))
    half = len(chosen)
    assert_same(got[:half], got[half:])
    # No two results share memory, so writing to one leaves the other alone.
    pointers = [b.data_ptr() for t in got for b in t.buffers()]
    assert len(set(pointers)) == len(pointers)
    compiled.check_graphs(1)
