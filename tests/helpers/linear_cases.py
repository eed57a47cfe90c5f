"""Arguments for the ops that compute a whole linear layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from compile_helpers import ordinary
from formats import FormatCase
from torch import Tensor

from qtensor.core.linear_plans import backward_text, forward_text
from qtensor.core.quantizer_registry import parse

Sample = tuple[tuple[Any, ...], dict[str, Any]]


def kept_text(q: Any, usage: str) -> str:
    """Return the canonical text of one direction of a quantizer, "" for none."""
    if not usage:
        return ""
    rowwise, columnwise = usage != "columnwise", usage != "rowwise"
    return q.with_usage(rowwise=rowwise, columnwise=columnwise).canonical


def call_values(q: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return scales of input, weight and gradient, and a seed, for the quantizers that take
    them."""
    scales = torch.tensor([0.5, 3.0, 40.0]) if q.needs_scale else None
    return scales, torch.tensor([7]) if q.stochastic_rounding else None


def forward_arguments(
    q: Any,
    sizes: tuple[int, int, int] = (32, 64, 48),
    kept: tuple[str, str] = ("columnwise", "columnwise"),
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype] = (torch.float32,) * 3,
    bias: Tensor | None = None,
) -> tuple[Any, ...]:
    """Return the arguments of ``linear_forward`` for (M, N, K) and dtypes of its tensors."""
    m, n, k = sizes
    x, weight = ordinary((m, k), dtypes[0], seed=1), ordinary((n, k), dtypes[1], seed=2)
    texts = [kept_text(q, usage) for usage in kept]
    scales, seed = call_values(q)
    plan = forward_text(q.canonical, texts[0], q.canonical, texts[1], dtypes[2])
    return (x, weight, bias, plan, scales, seed, seed)


def backward_arguments(
    q: Any,
    sizes: tuple[int, int, int] = (32, 64, 48),
    wanted: tuple[bool, bool, bool] = (True, True, True),
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype] = (torch.float32,) * 3,
) -> tuple[Any, ...]:
    """Arguments of ``linear_backward``: gradients of input, weight and bias where wanted; dtypes of
    dy and of the first two.
    """
    m, n, k = sizes
    kept = ("columnwise", "columnwise")
    found = torch.ops.qtensor.linear_forward(*forward_arguments(q, sizes, kept))[1:]
    text = kept_text(q, "columnwise")
    count = len(parse(text).slots)
    x = found[:count] if wanted[1] else []
    weight = found[count : 2 * count] if wanted[0] else []
    texts = text if wanted[1] else "", text if wanted[0] else ""
    plan = backward_text(q.canonical, *texts, dtypes[1], dtypes[2], wanted[2])
    dy = ordinary((m, n), dtypes[0], seed=3)
    return (dy, [*x, *weight], k, plan, *call_values(q))


def linear_forward(case: FormatCase) -> Iterator[Sample]:
    """For opcheck."""
    q = case.quantizer(columnwise=True)
    yield forward_arguments(q), {}
    yield forward_arguments(q, kept=("", "both"), bias=torch.randn(64)), {}
    yield forward_arguments(q, (1, 32, 32), ("both", "")), {}
    halves = (torch.bfloat16, torch.float32, torch.bfloat16)
    yield forward_arguments(q, kept=("rowwise", ""), dtypes=halves), {}


def linear_backward(case: FormatCase) -> Iterator[Sample]:
    """For opcheck."""
    q = case.quantizer(columnwise=True)
    for wanted in ((True, True, True), (True, False, False), (False, True, False)):
        yield backward_arguments(q, wanted=wanted), {}
    halves = (torch.bfloat16, torch.bfloat16, torch.float32)
    yield backward_arguments(q, dtypes=halves), {}
