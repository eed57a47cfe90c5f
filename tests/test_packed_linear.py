"""The packed ops of a linear layer: the bytes of those that keep buffers one by one, and what
compiled layers keep.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from formats import FormatCase
from linear_cases import (
    backward_arguments,
    forward_arguments,
    packed_backward_arguments,
    packed_forward_arguments,
)
from test_linear_ops import FLOATS, every_format, quantizers, same, serves_here
from test_native_calls import answers, by_cpp  # noqa: F401 - a fixture
from test_wgrad_scheduling import SAVED
from training import RECIPES, WIDTH, assert_same, build, compiled, region, step, twins

from qtensor.kernels.cpu.small_calls.answers import left_to_python
from qtensor.library.linear import LinearForwardArgs, packing, unpack
from qtensor.linear_plans import forward_plan
from qtensor.registry import parse

OPS = torch.ops.qtensor
SIZES = ((32, 32, 32), (2, 32, 64), (33, 96, 160), (1, 32, 32), (300, 256, 288))
PACKED = ("current", "blockwise", "mxfp8", "nvfp4", "delayed")
KEPT = SAVED | {"delayed": SAVED["current"], "nvfp4": SAVED["nvfp4"] - 8}
"""Bytes of what is kept of both operands; a seed is not among them."""


def unpacked(outputs: list[torch.Tensor], args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the product, the kept buffers and the amaxes."""
    call = LinearForwardArgs(*args)
    plan = forward_plan(call.plan)
    layout = packing(plan.x_kept, call.x.shape, plan.weight_kept, call.weight.shape)
    assert outputs[1].shape == (layout.size,)
    assert outputs[1].dtype == torch.uint8
    return [outputs[0], *unpack(outputs[1], layout), *outputs[2:]]


@every_format
def test_forward_keeps_the_same_bytes(case: FormatCase):
    kept = itertools.cycle(itertools.product(("", "rowwise", "columnwise", "both"), repeat=2))
    dtypes = itertools.cycle(itertools.product(FLOATS, repeat=2))
    for q, sizes in itertools.product(quantizers(case), SIZES):
        for bias in (None, torch.randn(sizes[1])):
            some, kinds = next(kept), next(dtypes)
            args = packed_forward_arguments(q, sizes, some, kinds, bias)
            expected = OPS.linear_forward(
                *forward_arguments(q, sizes, some, (*kinds, kinds[0]), bias)
            )
            with left_to_python():
                same(unpacked(OPS.linear_forward(*args), args), expected)
            for _ in range(4):
                same(unpacked(OPS.linear_forward(*args), args), expected)
            assert torch.equal(*(OPS.linear_forward(*args)[1] for _ in range(2)))
            x, weight = args[0].t().contiguous().t(), args[1].t().contiguous().t()
            turned = (x, weight, *args[2:])
            same(unpacked(OPS.linear_forward(*turned), args), expected)


@every_format
def test_backward_gives_the_same_bytes(case: FormatCase):
    wanted = [w for w in itertools.product((True, False), repeat=3) if any(w[:2])]
    dtypes = itertools.cycle(itertools.product(FLOATS, repeat=2))
    for q, sizes in itertools.product(quantizers(case), SIZES):
        for some in wanted:
            kinds = next(dtypes)
            args = packed_backward_arguments(q, sizes, some, kinds)
            expected = OPS.linear_backward(*backward_arguments(q, sizes, some, (kinds[0], *kinds)))
            with left_to_python():
                same(OPS.linear_backward(*args), expected)
            for _ in range(4):
                same(OPS.linear_backward(*args), expected)
            turned = args[0].t().contiguous().t()
            same(OPS.linear_backward(turned, *args[1:]), expected)


@every_format
def test_cpp_answers_them(case: FormatCase, answers, monkeypatch):  # noqa: F811
    q = case.quantizer(columnwise=True)
    if not serves_here(case):
        pytest.skip(reason="programs do not have the format")
    by_cpp(OPS.linear_forward, packed_forward_arguments(q), monkeypatch)
    by_cpp(OPS.linear_backward, packed_backward_arguments(q), monkeypatch)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("recipe", PACKED)
def test_a_compiled_layer_keeps_one_buffer_and_frees_it(recipe):
    module, x = build("linear"), torch.randn(40, WIDTH)
    call, _ = compiled(module)
    saved, alive = [], []

    def keep(t: torch.Tensor) -> torch.Tensor:
        if t.dtype == torch.uint8:
            saved.append(t.nbytes)
            alive.append(weakref.ref(t))
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), region(RECIPES[recipe]()):
        out = call(x.clone().requires_grad_())
    assert len(saved) == 1
    exact = KEPT[recipe]
    assert exact <= saved[0] < exact + 4 * 16
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    del out
    gc.collect()
    assert [ref() for ref in alive] == [None]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("recipe", PACKED)
@pytest.mark.parametrize("shape", [(40, WIDTH), (2, 5, WIDTH), (WIDTH,), (0, WIDTH)])
def test_shapes(recipe, shape):
    eager, traced = twins("linear")
    call, _ = compiled(traced)
    x = torch.randn(shape)
    chosen = RECIPES[recipe]()
    assert_same(step(call, traced, x, chosen), step(eager, eager, x, chosen))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("frozen", ["input", "weight", "bias"])
def test_what_needs_no_gradient(frozen):
    eager, traced = twins("linear")
    results = []
    for module, call in ((eager, eager), (traced, compiled(traced)[0])):
        if frozen != "input":
            getattr(module, frozen).requires_grad_(False)
        x = torch.linspace(-2, 2, 40 * WIDTH).view(40, WIDTH).requires_grad_(frozen != "input")
        with region(RECIPES["current"]()):
            out = call(x)
        (out * out).sum().backward()
        grads = [t.grad for t in (x, module.weight, module.bias)]
        results.append([out.detach(), *(g for g in grads if g is not None)])
        assert len(results[-1]) == 3
    assert_same(*results)


def test_pieces_do_not_overlap():
    for text in ("mxfp8(columnwise=True)", "fp8(columnwise=True)", "nvfp4(columnwise=True)"):
        layout = packing(text, (33, 96), text, (64, 96))
        assert len(layout.pieces) == 2 * len(parse(text).slots)
        ends = 0
        for piece in sorted(layout.pieces, key=lambda p: p.offset):
            assert piece.offset >= ends
            assert piece.offset % 16 == 0
            ends = piece.offset + piece.nbytes
        assert ends <= layout.size
        covered = sum(piece.nbytes for piece in layout.pieces)
        assert covered + sum(end - start for start, end in layout.gaps()) == layout.size
