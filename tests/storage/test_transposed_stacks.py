"""``stack.mT`` is a view for good: it always shows the stack as it is now, and so do its parts."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from formats import BY_NAME, assert_same_bytes, rand

import qtensor

STACKED = ["fp8_blockwise", "mxfp8", "mxfp6", "mxfp4", "nvfp4"]
stacked = pytest.mark.parametrize("name", STACKED)


def stack_of(name: str, *lead: int, **options: Any) -> Any:
    return BY_NAME[name].quantize(rand(*lead or (2,), 128, 256), **options)


LOOKS: dict[str, Callable[[Any], object]] = {
    "buffers": lambda t: t.buffers(),
    "attribute": lambda t: t._columnwise_data,
    "html": lambda t: t._repr_html_(),
    "matrix": lambda t: t[0],
    "clone": lambda t: t.clone(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda t: torch.save(t, io.BytesIO()),
    "view": lambda t: t.view(t.shape[0], 1, *t.shape[1:]),
    "saving": lambda t: t.prepare_for_saving(),
    "product": lambda t: torch.bmm(torch.ones(2, 1, 256), t),
}


@stacked
@pytest.mark.parametrize("look", LOOKS)
def test_it_stays_a_view_after_somebody_looked(name: str, look: str) -> None:
    stack, values = stack_of(name), rand(2, 128, 256, seed=1)
    turned = stack.mT
    LOOKS[look](turned)
    stack.copy_(values)
    want = stack.dequantize().mT
    assert_same_bytes(turned.dequantize(), want)
    assert_same_bytes(turned.clone().dequantize(), want)
    assert_same_bytes(turned.detach()[1].dequantize(), want[1])


PARTS: dict[str, Callable[[Any], Any]] = {
    "matrix": lambda t: t[1],
    "unbound": lambda t: t.unbind()[1],
    "matrices": lambda t: t[1:],
    "split": lambda t: t.split(1)[0],
    "unsqueezed": lambda t: t.unsqueeze(1),
    "squeezed": lambda t: t[:1].squeeze(0),
    "viewed": lambda t: t.view(1, *t.shape),
    "rows": lambda t: t[..., 128:, :],
}


@stacked
@pytest.mark.parametrize("part", PARTS)
def test_a_part_shows_what_is_written_to_the_stack(name: str, part: str) -> None:
    stack = stack_of(name)
    seen = PARTS[part](stack.mT)
    assert_same_bytes(seen.dequantize(), PARTS[part](stack.dequantize().mT).contiguous())
    stack.copy_(rand(2, 128, 256, seed=1))
    want = PARTS[part](stack.dequantize().mT).contiguous()
    assert_same_bytes(seen.dequantize(), want)
    assert_same_bytes(seen.clone().dequantize(), want)


@stacked
@pytest.mark.parametrize("part", PARTS)
def test_a_write_to_a_part_arrives(name: str, part: str) -> None:
    stack = stack_of(name)
    seen, want = PARTS[part](stack.mT), stack.dequantize()
    seen.zero_()
    PARTS[part](want.mT).zero_()
    assert torch.equal(stack.dequantize(), want)
    assert torch.equal(seen.dequantize(), torch.zeros(seen.shape))


@stacked
def test_four_dims(name: str) -> None:
    stack = stack_of(name, 2, 3)
    turned = stack.mT
    parts = (turned[1], turned[1, 2], turned[1][1:], turned.view(6, 256, 128))
    stack.copy_(rand(2, 3, 128, 256, seed=1))
    want = stack.dequantize().mT
    wanted = (want[1], want[1, 2], want[1][1:], want.reshape(6, 256, 128))
    for seen, values in zip(parts, wanted, strict=True):
        assert_same_bytes(seen.dequantize(), values.contiguous())


@stacked
def test_a_view_of_other_matrices_is_a_copy(name: str) -> None:
    """As in torch, where a transposed stack is not contiguous."""
    stack = stack_of(name)
    flat = stack.mT.flatten(0, 1)
    want = stack.dequantize().mT.flatten(0, 1)
    stack.zero_()
    assert_same_bytes(flat.dequantize(), want)
    flat.zero_()
    assert not flat.dequantize().any()


@stacked
def test_a_view_that_splits_the_rows_of_the_matrices_is_refused(name: str) -> None:
    """A copy would not follow later writes, as the view that torch has does."""
    stack, shape = stack_of(name), (2, 2, 128, 128)
    assert rand(2, 128, 256).mT.view(shape).stride() == (128 * 256, 128, 1, 256)
    with pytest.raises(qtensor.UnsupportedError, match=r"transposed view.*Call \.clone\(\)"):
        stack.mT.view(shape)
    assert_same_bytes(stack.mT.clone().view(shape).dequantize(), stack.dequantize().mT.view(shape))


@pytest.mark.parametrize(
    "name",
    ["mxfp8", pytest.param("nvfp4", marks=pytest.mark.nightly(reason="the same view of codes"))],
)
def test_such_a_view_in_a_graph_of_any_size_refuses_writes(name: str) -> None:
    """A graph of symbolic sizes cannot know whether torch has a view."""
    stack = stack_of(name)
    before = stack.dequantize()
    split = torch.compile(
        lambda t: t.mT.reshape(2 * t.shape[0], -1, 128), dynamic=True, fullgraph=True
    )(stack)
    assert_same_bytes(split.dequantize(), before.mT.reshape(4, 128, 128))
    with pytest.raises(qtensor.UnsupportedError, match="cannot reach the whole tensor"):
        split.mul_(2)
    assert_same_bytes(stack.dequantize(), before)


@stacked
def test_a_part_that_the_stack_does_not_have_is_refused(name: str) -> None:
    """As it has no bytes that stay up to date. The copy that the message names is free to use."""
    stack = stack_of(name)
    with pytest.raises(qtensor.UnsupportedError, match=r"transposed view.*Call \.clone\(\)"):
        stack.mT[..., 3:5]
    own = stack.mT.contiguous()
    before = stack.dequantize()
    own.zero_()
    assert not own.dequantize().any()
    assert_same_bytes(stack.dequantize(), before)


@stacked
def test_data_of_a_transposed_stack(name: str) -> None:
    """Assigned, it is the same view: writes do not get lost. The reverse has bytes of its own."""
    stack = stack_of(name)
    x = stack.mT.clone()
    x.data = stack.mT
    x.fill_(1)
    assert bool((stack.dequantize() == 1).all())
    stack.zero_()
    assert not x.dequantize().any()
    turned = stack_of(name).mT
    own = turned.clone()
    turned.data = own
    turned.zero_()
    assert not own.dequantize().any()


@stacked
def test_shared_memory_is_that_of_the_stack(name: str) -> None:
    stack = stack_of(name)
    turned = stack.mT
    assert not turned.is_shared()
    assert turned.share_memory_() is turned
    assert turned.is_shared()
    assert stack.is_shared()


@stacked
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_function_reads_the_stack(name: str, backend: str) -> None:
    def step(t: Any, x: torch.Tensor) -> tuple[Any, ...]:
        return torch.bmm(x, t), t[0].dequantize(), t.mT.dequantize(), t.unsqueeze(0)

    stack, x = stack_of(name), rand(2, 3, 256, seed=2)
    turned = stack.mT
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for seed in (1, 3):
        got, want = compiled(turned, x), step(turned, x)
        for ours, theirs in zip(got[:3], want[:3], strict=True):
            assert_same_bytes(ours, theirs)
        stack.copy_(rand(2, 128, 256, seed=seed))
        assert_same_bytes(got[3][0].dequantize(), stack.dequantize().mT)


@stacked
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_function_returns_it_with_a_gradient(name: str) -> None:
    """A graph break hands it to the next graph."""

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        turned = BY_NAME[name].quantizer().quantize(w).mT
        torch._dynamo.graph_break()
        return torch.bmm(x, turned)

    x, w = rand(2, 3, 256), rand(2, 128, 256, seed=1).requires_grad_(True)
    got = torch.compile(step, backend="aot_eager")(x, w)
    want = step(x, w)
    assert_same_bytes(got.detach(), want.detach())
    found, wanted = (torch.autograd.grad(y.sum(), w)[0] for y in (got, want))
    assert_same_bytes(found, wanted)


formless = pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("fp8_rowwise", (2, 32, 64), {}),
        ("fp8_rowwise", (2, 32, 64), {"axis": 0}),
        ("fp8_blockwise", (2, 130, 200), {}),
        ("nvfp4", (2, 32, 64), {"row_scaled": True}),
        ("mxfp8", (2, 32, 64), {}),
    ],
    ids=["lines", "lines of axis 0", "ragged blocks", "row_scaled", "whole blocks"],
)


@pytest.mark.parametrize(("name", "n"), [("fp8_rowwise", 32), ("fp8_blockwise", 130)])
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_transpose_without_buffers_leaves_a_graph_with_a_gradient(name: str, n: int) -> None:
    """AOTAutograd makes it contiguous, to guess the form of its gradient."""
    stack = BY_NAME[name].quantize(rand(2, n, 64)).requires_grad_()
    found = []
    for run in (lambda f: f, lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")):
        turned = run(lambda t: t.transpose(1, 2))(stack)
        loss = (turned.dequantize() * rand(*turned.shape, seed=1)).sum()
        found.append((turned.detach().dequantize(), *torch.autograd.grad(loss, stack)))
    for got, want in zip(*found, strict=True):
        assert_same_bytes(got, want)


@formless
@pytest.mark.parametrize("copied", ["clone", "contiguous"])
def test_a_copy_of_a_transpose_without_buffers(
    name: str, shape: tuple[int, ...], options: dict[str, Any], copied: str
) -> None:
    stack = BY_NAME[name].quantize(rand(*shape), **options)
    own, before = getattr(stack.mT, copied)(), stack.dequantize()
    assert_same_bytes(own.dequantize(), before.mT.contiguous())
    own.zero_()
    assert not own.dequantize().any()
    assert_same_bytes(stack.dequantize(), before)


@formless
def test_products_where_the_transpose_has_no_buffers(
    name: str, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    """On either side, with a bias or without."""
    count, n, k = shape
    stack = BY_NAME[name].quantize(rand(*shape), **options)
    turned, plain = stack.mT, stack.mT.dequantize()
    bias, x, y = rand(count, 3, n, seed=1), rand(count, 3, k, seed=2), rand(count, n, 3, seed=3)
    products = (
        (torch.bmm(x, turned), torch.bmm(x, plain)),
        (torch.baddbmm(bias, x, turned), torch.baddbmm(bias, x, plain)),
        (bias.clone().baddbmm_(x, turned), torch.baddbmm(bias, x, plain)),
        (torch.bmm(turned, y), torch.bmm(plain, y)),
        (torch.baddbmm(x.mT, turned, y), torch.baddbmm(x.mT, plain, y)),
    )
    for got, want in products:
        # At most 200 products of unit size in float32, in another order.
        torch.testing.assert_close(got, want, rtol=0, atol=200 * 2**-20)


@stacked
def test_it_has_the_usages_of_the_stack(name: str) -> None:
    stack = stack_of(name, columnwise=True)
    with pytest.raises(qtensor.UnsupportedError, match="Call it on the tensor that it shows"):
        stack.mT.update_usage(columnwise=False)
    own = stack.mT.contiguous()
    own.update_usage(columnwise=False)
    assert own.get_usages() == {"rowwise": True, "columnwise": False}
