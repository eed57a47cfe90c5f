"""``TorchMultiheadAttention``: torch's multi-head attention with quantized projections."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from qtensor.core.dtensors import is_dtensor
from qtensor.core.errors import ArgumentTypeError, UnsupportedError, check, fail
from qtensor.functional.attention.core import (
    Scoring,
    attention,
    probabilities,
    quantized_attention,
)
from qtensor.functional.attention.plan import attention_plan
from qtensor.modules.dot_product_attention import share_text
from qtensor.modules.input_checks import check_width
from qtensor.modules.linear import Linear
from qtensor.modules.linear_module import LinearModule
from qtensor.modules.options import LinearOptions
from qtensor.modules.parameters import activation_dtype
from qtensor.recipes import Recipe

_NAMES = ("in_proj_weight", "in_proj_bias")


class TorchMultiheadAttention(LinearModule, nn.MultiheadAttention):  # type: ignore[misc]
    """``nn.MultiheadAttention`` whose projections follow recipes; ``qtensor.convert_`` makes it.

    Parameters, their names, and the arguments of the constructor and of ``forward`` are torch's.
    Under a recipe with ``fp8_dpa=True`` the attention reads quantized operands too, see
    ``DotProductAttention``.

    Args:
        embed_dim: E, features of queries, keys, values and the output.
        num_heads: heads; they divide E.
        dropout: the share of probabilities that is set to 0 in training.
        bias: add biases in the projections.
        batch_first: inputs are (B, S, E), not (S, B, E).
        device: device of the parameters.
        dtype: dtype of the parameters.
        recipe: used outside every ``autocast`` region.
        name: shown in error messages. The roles of recipes have ``name.in_proj`` and
            ``name.out_proj``.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        batch_first: bool = False,
        device: torch.types.Device = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | None = None,
        name: str = "",
    ) -> None:
        super().__init__(recipe, name)
        rule = "embed_dim must be a multiple of num_heads"
        got = f"{embed_dim} and {num_heads}"
        fits = num_heads > 0 and embed_dim % num_heads == 0
        check(fits, self.label, rule, got, "Fix one of them")
        self.embed_dim = self.kdim = self.vdim = embed_dim
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.dropout, self.batch_first = dropout, batch_first
        self._dropout = share_text(self.label, "dropout", dropout)
        # Attributes that users of torch's class read.
        self._qkv_same_embed_dim, self.add_zero_attn = True, False
        self.bias_k = self.bias_v = None
        prefix = f"{name}." if name else ""
        self._options = LinearOptions("linear", f"{prefix}in_proj")
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self._make_layer(_NAMES, self._options, (3 * embed_dim, embed_dim), bias, factory)
        for part in ("q", "k", "v"):
            self.register_parameter(f"{part}_proj_weight", None)
        name = f"{prefix}out_proj"
        self.out_proj: Any = Linear(embed_dim, embed_dim, bias, **factory, recipe=recipe, name=name)
        if not self.in_proj_weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the first projection as ``nn.MultiheadAttention`` does."""
        old = self.in_proj_weight
        values = torch.empty(tuple(old.shape), dtype=old.dtype, device=old.device)
        self._set_weight("in_proj_weight", nn.init.xavier_uniform_(values), self._options)
        if self.in_proj_bias is not None:
            with torch.no_grad():
                self.in_proj_bias.zero_()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention and its probabilities, as ``nn.MultiheadAttention.forward``.

        Args:
            query: (L, B, E), or (B, L, E) with ``batch_first``, or (L, E); float32, bfloat16 or
                float16.
            key: (S, B, E), the same way.
            value: as the keys.
            key_padding_mask: (B, S), or (S,) without a batch: bool, True hides, or floating, added
                to the scores.
            need_weights: return the probabilities too.
            attn_mask: (L, S) or (B * heads, L, S), bool or floating.
            average_attn_weights: average the probabilities over the heads.
            is_causal: a hint of torch that ``attn_mask`` is causal; the mask decides.

        Returns:
            The output in the shape of ``query``; and the probabilities (B, L, S), or (B, heads, L,
            S) of each head, after dropout; or None. They are 0 for a query that sees no key, where
            torch has NaN with ``need_weights``.

        Raises:
            QTensorError: inputs or masks do not fit; ``need_weights`` where attention itself is
                quantized; nested tensors.
        """
        is_self, same_values = query is key and key is value, key is value
        self._check_inputs(query, key, value, is_causal and attn_mask is None)
        is_batched = query.ndim == 3
        sources = [query] if is_self else [query, key] if same_values else [query, key, value]
        sources = [activation_dtype(t) for t in sources]
        if not is_batched:
            sources = [t.unsqueeze(0) for t in sources]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            sources = [t.transpose(0, 1) for t in sources]
        q, k, v = (
            t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self._project(sources)
        )
        scoring = self._scoring(q, k, key_padding_mask, attn_mask)
        plan, weights = attention_plan(self._recipe_key(), self._options.name), None
        if plan is not None:
            rule = "attention through quantized operands returns no probabilities"
            fix = "Pass need_weights=False"
            check(not need_weights, self.label, rule, "need_weights=True", fix, UnsupportedError)
            context = quantized_attention(q, k, v, scoring, plan)
        elif need_weights:
            weights = probabilities((q @ k.mT).float(), scoring).to(v.dtype)
            context = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            context = attention(q, k, v, scoring)
        out = self.out_proj(context.transpose(1, 2).flatten(2))
        if not is_batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return (out if self.batch_first else out.transpose(0, 1)), weights

    def _check_inputs(self, q: Tensor, k: Tensor, v: Tensor, is_bare_hint: bool) -> None:
        for name, t in (("query", q), ("key", k), ("value", v)):
            if t.is_nested:
                rule = "nested tensors are for torch's own module"
                fail(self.label, rule, name, "Pass padded sequences and masks", UnsupportedError)
            check_width(f"{self.label} {name}", t, self.embed_dim)
            rule = "query, key and value must be (L, B, E), or all (L, E)"
            check(t.ndim in (2, 3) and t.ndim == q.ndim, self.label, rule, tuple(t.shape), "Fix it")
        rule = "is_causal is a hint that goes with attn_mask"
        check(not is_bare_hint, self.label, rule, "no attn_mask", "Pass a causal attn_mask")

    def _project(self, sources: list[Tensor]) -> list[Tensor]:
        """Return queries, keys and values (B, S, E) of one, two or three inputs (B, S, E)."""
        weight, bias = _NAMES
        if len(sources) == 1:
            has_bias = bias if self.in_proj_bias is not None else ""
            both = self._linear(sources[0], weight, has_bias, self._options, None)
            return list(both.chunk(3, -1))
        if is_dtensor(self.in_proj_weight):
            rule = "a sharded weight projects one input, which is query, key and value"
            fail(self.label, rule, "several inputs", "Split no in_proj_weight", UnsupportedError)
        found, start, width = [], 0, self.embed_dim
        sizes = [width, 2 * width] if len(sources) == 2 else [width] * 3
        for source, size in zip(sources, sizes, strict=True):
            rows = slice(start, start + size)
            b = None if self.in_proj_bias is None else self.in_proj_bias[rows]
            w = self.in_proj_weight[rows]
            out = self._local_linear(source, weight, w, b, self._options, None)
            found += out.split(width, -1)
            start += size
        return found

    def _scoring(
        self, q: Tensor, k: Tensor, padding: Tensor | None, attn_mask: Tensor | None
    ) -> Scoring:
        (batch, heads, queries, size), keys = q.shape, k.shape[2]
        masks = []
        if padding is not None:
            if tuple(padding.shape) != (batch, keys):
                rule = f"key_padding_mask must be ({batch}, {keys})"
                fail(self.label, rule, tuple(padding.shape), "Fix the mask")
            masks.append(padding[:, None, None])
        if attn_mask is not None:
            shape, every = tuple(attn_mask.shape), (batch * heads, queries, keys)
            if shape not in (every, every[1:]):
                rule = f"attn_mask must be {every[1:]} or {every}"
                fail(self.label, rule, shape, "Fix the mask")
            three = attn_mask.ndim == 3
            masks.append(attn_mask.unflatten(0, (batch, heads)) if three else attn_mask)
        seen = bias = None
        for mask in masks:
            if mask.dtype is torch.bool:
                seen = ~mask if seen is None else seen & ~mask
            elif mask.is_floating_point():
                bias = mask if bias is None else bias + mask
            else:
                rule = "masks must be bool (True hides) or floating"
                fail(self.label, rule, mask.dtype, "Convert it", ArgumentTypeError)
        dropout = float(self._dropout) if self.training else 0.0
        return Scoring(1 / math.sqrt(size), seen, False, bias, dropout)
