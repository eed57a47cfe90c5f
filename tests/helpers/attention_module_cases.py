"""Attention in float64 by its definition: loops over queries and keys, no code of the library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import qtensor

NO_WINDOW = (-1, -1)


class Mask(NamedTuple):
    """A mask as a caller describes it.

    Attributes:
        kind: the type.
        window: keys before and after.
        bottom_right: of the window of masks that are not causal.
    """

    kind: str
    window: tuple[int, int] = NO_WINDOW
    bottom_right: bool | None = None

    def options(self) -> dict[str, Any]:
        window = None if self.window == NO_WINDOW else self.window
        return {
            "attn_mask_type": self.kind,
            "window_size": window,
            "bottom_right_diagonal": self.bottom_right,
        }

    def sees(self, i: int, j: int, queries: int, keys: int) -> bool:
        """Whether query i of so many sees key j of so many."""
        if "causal" in self.kind:
            shift = keys - queries if "bottom_right" in self.kind else 0
        else:
            shift = 0 if self.bottom_right is False else keys - queries
        position, (left, right) = i + shift, self.window
        if "causal" in self.kind and j > position:
            return False
        return (left < 0 or j >= position - left) and (right < 0 or j <= position + right)


def table(mask: Mask, sizes: tuple[int, int], lengths: Sequence[tuple[int, int]]) -> Tensor:
    """(B, 1, Sq, Skv) bool: the keys that the queries of sequences of these lengths see."""
    found = torch.zeros(len(lengths), 1, *sizes, dtype=torch.bool)
    for b, (queries, keys) in enumerate(lengths):
        for i in range(queries):
            for j in range(keys):
                found[b, 0, i, j] = mask.sees(i, j, queries, keys)
    return found


def attention64(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float | None = None,
    bias: Any = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """(B, H, Sq, E) in float64 of heads-first tensors; 0 where nothing is seen."""
    q, k, v = (t.double() for t in (q, k, v))
    times = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(times, 1) for t in (k, v))
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale) + bias
    weights = torch.where(seen, (scores - scores.amax(-1, keepdim=True)).exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks.double().view(-1, 1, 1) - scores.amax(-1, keepdim=True)).exp()
    return weights / torch.where(total == 0, 1.0, total) @ v


def first(t: Tensor, qkv_format: str) -> Tensor:
    """(B, H, S, D) of sbhd or bshd."""
    return t.permute(1, 2, 0, 3) if qkv_format == "sbhd" else t.transpose(1, 2)


def last(t: Tensor, qkv_format: str) -> Tensor:
    """Heads-first results as the modules return them."""
    t = t.permute(2, 0, 1, 3) if qkv_format == "sbhd" else t.transpose(1, 2)
    return t.flatten(2)


class Sizes(NamedTuple):
    batch: int = 2
    queries: int = 40
    keys: int = 40
    heads: int = 4
    groups: int = 2
    size: int = 16
    values: int = 16

    def draw(self, qkv_format: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
        """q, k, v that require gradients."""
        generator = torch.Generator().manual_seed(seed)
        made = []
        for tokens, heads, size in (
            (self.queries, self.heads, self.size),
            (self.keys, self.groups, self.size),
            (self.keys, self.groups, self.values),
        ):
            lead = (tokens, self.batch) if qkv_format == "sbhd" else (self.batch, tokens)
            t = torch.randn(*lead, heads, size, generator=generator).to(dtype)
            made.append(t.requires_grad_())
        return made


def module(sizes: Sizes, qkv_format: str, **options: Any) -> qtensor.DotProductAttention:
    channels = (sizes.size, sizes.values)
    return qtensor.DotProductAttention(
        sizes.heads, channels, sizes.groups, qkv_format=qkv_format, **options
    )


def gradients(y: Tensor, inputs: Sequence[Tensor], seed: int = 1) -> list[Tensor]:
    """Output and gradients for a random gradient of the output."""
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


def sqnr(got: Tensor, want: Tensor) -> float:
    """Signal to noise in decibels."""
    got, want = got.detach().double(), want.detach().double()
    return float(10 * torch.log10(want.square().sum() / (got - want).square().sum()))


class PlainCache:
    """A cache in high precision, as the protocol of caches wants it."""

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def update(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        self.k = k if self.k is None else torch.cat((self.k, k), 2)
        self.v = v if self.v is None else torch.cat((self.v, v), 2)
        mask = Mask("causal_bottom_right", (window - 1, 0) if window else NO_WINDOW)
        sizes = (q.shape[2], self.k.shape[2])
        seen = table(mask, sizes, [sizes] * q.shape[0])
        return attention64(q, self.k, self.v, seen, scale, sinks=sinks).to(q.dtype)
