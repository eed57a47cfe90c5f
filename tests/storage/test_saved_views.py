"""Tensors at an offset within their storage: every op reads the tensor that it is given, whichever
memory holds it.

Activation pools (offloading, ``saved_tensors_hooks``) hand the buffers of a layer back as views of
one large tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from formats import FormatCase
from linear_cases import backward_arguments, forward_arguments
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from training import RECIPES, region

import qtensor
from tests.library.test_linear_ops import every_format, same

OPS = torch.ops.qtensor
OFFSETS = (4096, 16, 8, 4, 1)
"""Elements in front of a view: far away, and every alignment that a program could have learned."""


def view_at(t: Tensor, offset: int) -> Tensor:
    """Return a copy of ``t`` that lies ``offset`` elements behind the start of its storage."""
    memory = torch.full((offset + t.numel() + 64,), 255, dtype=torch.uint8).to(t.dtype)
    view = memory[offset : offset + t.numel()].view(t.shape)
    return view.copy_(t)


@every_format
def test_backward_reads_views_of_its_buffers(case: FormatCase):
    q = case.quantizer(columnwise=True)
    dy, saved, *rest = backward_arguments(q)
    expected = OPS.linear_backward(dy, [t.clone() for t in saved], *rest)
    for offset in OFFSETS:
        for _ in range(4):
            moved = [view_at(t, offset) for t in saved]
            same(OPS.linear_backward(dy, moved, *rest), expected)
    same(OPS.linear_backward(dy, [t.clone() for t in saved], *rest), expected)
    strided = [torch.stack([t, t], dim=-1)[..., 0] for t in saved]
    for _ in range(4):
        same(OPS.linear_backward(dy, strided, *rest), expected)


@every_format
def test_forward_reads_views_of_its_tensors(case: FormatCase):
    q = case.quantizer(columnwise=True)
    x, weight, *rest = forward_arguments(q)
    expected = OPS.linear_forward(x, weight, *rest)
    for shift in (1, 3, 8):
        memory = torch.full((x.numel() + shift,), float("nan"))
        view = memory[shift:].view(x.shape)
        view.copy_(x)
        for _ in range(4):
            same(OPS.linear_forward(view, weight, *rest), expected)


@every_format
def test_quantize_and_dequantize_read_views(case: FormatCase):
    """``quantize``, ``dequantize`` and ``gemm`` where every tensor, scales and seeds too, lies at
    an offset.
    """
    q = case.quantizer(columnwise=True)
    x = torch.randn(32, 64)
    call = {"scale": torch.tensor([0.5])} if q.needs_scale else {}
    expected = OPS.quantize(x, q.canonical, **call)
    memory = torch.full((5 + x.numel(),), float("nan"))
    view = memory[5:].view(x.shape)
    view.copy_(x)
    scales = {"scale": torch.tensor([9.0, 0.5, 9.0])[1:2]} if q.needs_scale else {}
    for _ in range(4):
        same(OPS.quantize(view, q.canonical, **scales), expected)
    buffers = expected[: len(q.slots)]
    shape, plain = list(x.shape), torch.randn(16, 64)

    def shifted(t: Tensor) -> Tensor:
        moved = torch.cat([t.new_zeros(1), t.reshape(-1)])[1:]
        return moved.view(t.shape)

    values = OPS.dequantize(buffers, q.canonical, shape, torch.float32)
    product = OPS.gemm([plain], "", [16, 64], buffers, q.canonical, shape, "TN", torch.float32)
    for _ in range(4):
        moved = [shifted(t) for t in buffers]
        same([OPS.dequantize(moved, q.canonical, shape, torch.float32)], [values])
        operands = ([shifted(plain)], "", [16, 64], moved, q.canonical, shape)
        same([OPS.gemm(*operands, "TN", torch.float32)], [product])


def pooled(offset: int) -> saved_tensors_hooks:
    """Return hooks that keep byte tensors in one buffer, from ``offset`` on."""
    pool = torch.zeros(1 << 22, dtype=torch.uint8)
    used = offset

    def pack(t: Tensor) -> Any:
        nonlocal used
        if t.dtype is not torch.uint8:
            return t
        start, used = used, used + t.numel()
        pool[start:used].copy_(t.reshape(-1))
        return start, t.shape

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        start, shape = kept
        return pool[start : start + shape.numel()].view(shape)

    return saved_tensors_hooks(pack, unpack)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("recipe", ["current", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("offset", [65536, 1 << 20, 1029])
def test_compiled_gradients_with_an_activation_pool(recipe: str, offset: int):
    """Gradients with a pool, and those of later calls without one, are those of eager code."""
    torch.manual_seed(0)
    layer, x = qtensor.Linear(64, 96), torch.randn(32, 64)
    chosen = RECIPES[recipe]()

    def eager(t: Tensor) -> Tensor:
        with region(chosen):
            return layer(t)

    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")

    def gradient(call: Callable[[Tensor], Tensor], hooks: Any) -> Tensor:
        layer.zero_grad()
        torch.manual_seed(1)
        layer._states["weight"].draws.zero_()
        with hooks:
            call(x).sum().backward()
        return layer.weight.grad.clone()

    expected = gradient(eager, contextlib.nullcontext())
    for _ in range(4):
        same([gradient(compiled, pooled(offset))], [expected])
    same([gradient(compiled, contextlib.nullcontext())], [expected])
