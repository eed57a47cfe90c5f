"""``DotProductAttention``: softmax(q k^T) v, in high precision or through quantized operands."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from qtensor.core.errors import UnsupportedError, check, fail
from qtensor.functional.attention.alibi import alibi_bias
from qtensor.functional.attention.cache import AttentionCache
from qtensor.functional.attention.core import Scoring, attention, quantized_attention
from qtensor.functional.attention.layouts import (
    check_format,
    check_heads,
    heads_first,
    heads_last,
)
from qtensor.functional.attention.masks import (
    Lengths,
    MaskOptions,
    Masks,
    Window,
    mask_options,
    padding_lengths,
    visible,
)
from qtensor.functional.attention.packed import packing
from qtensor.functional.attention.plan import attention_plan
from qtensor.functional.checkpoint import checkpoint
from qtensor.modules.options import check_features
from qtensor.modules.quantized_module import QuantizedModule
from qtensor.recipes import Recipe

BIAS_TYPES = ("no_bias", "post_scale_bias", "alibi")
SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


class Sums(NamedTuple):
    """Sums of the lengths of sequences, as a caller passes them; see ``forward``."""

    q: Tensor | None
    kv: Tensor | None
    q_padded: Tensor | None
    kv_padded: Tensor | None
    longest_q: int | None
    longest_kv: int | None


def share_text(label: str, name: str, share: float) -> str:
    """Return a probability as a string: Dynamo would make a float symbolic, and compile twice."""
    rule = f"{name} must be a number from 0 to below 1"
    fits = isinstance(share, float | int) and 0 <= share < 1
    check(fits, label, rule, repr(share), "Pass such a number")
    return repr(float(share))


class DotProductAttention(QuantizedModule):
    """Attention over heads: ``softmax(q @ k.mT * softmax_scale) @ v``.

    By default it computes in the dtype of its inputs, through torch's
    ``scaled_dot_product_attention``. Under a recipe with ``fp8_dpa=True`` (``DelayedScaling`` and
    ``Float8CurrentScaling``: FP8 with a factor per tensor; ``MXFP8BlockScaling``; ``CustomRecipe``:
    the roles of the module "attention") both products, forward and backward, read quantized
    operands:

    - forward: scores = q k^T (roles "qkv"), and output = P v ("probabilities", "qkv"), where P is
      the result of the softmax after dropout;
    - backward: dP = dO v^T and dv = P^T dO ("grad_output"), dq = dS k and dk = dS^T q
      ("grad_scores", the gradient of the scores).

    The tensors and formats are those of Transformer Engine with the same option: E4M3 for q, k, v
    and P; the format of gradients for dO and dS (E5M2 under HYBRID). MXFP8 quantizes each operand
    along the dim of its product, q, k, v and dO thus in both directions. Three things differ.
    All factors come from the tensors themselves: Transformer Engine has factors of earlier steps
    for P and dS under ``Float8CurrentScaling``, and for all under ``DelayedScaling``, since its
    fused kernel needs them before it has the values. And P and dS in MXFP8 have a factor per 32
    values here, while cuDNN's kernel decides this by itself, and takes sum(dO O) from O and dO in
    16 bits where the gradient of the softmax here takes sum(dP P). And its kernel under
    ``DelayedScaling`` writes the output, dq, dk and dv in FP8, while they have the dtype of the
    inputs here.

    Products are summed in float32, and scores, softmax and its gradient are float32. The derivative
    of quantization counts as 1 (straight-through): backward differentiates the products of the
    quantized operands, and the softmax at its result before quantization, as Transformer Engine's
    unfused emulation does. ``backward_override`` holds as for linear layers. Sequences and heads
    are padded with zeros to multiples of the block, which changes no other value. All scores are in
    memory at once. Where ranks have different heads, the factor of a tensor is that of a rank's.

    Errors in decibels (signal to noise, beside float64) of output, dq, dk and dv, for 512 causal
    tokens, heads of 64 normal values, bfloat16: without quantization 54, 51, 45, 45; FP8 with
    E5M2 gradients 26, 21, 21, 24; FP8 or MXFP8 with E4M3 gradients 26, 24, 24, 26.

    Args:
        num_attention_heads: heads of the queries.
        kv_channels: the head size, or a tuple: that of queries and keys, that of values.
        num_gqa_groups: heads of keys and values; None for as many as the queries have.
        attention_dropout: the share of probabilities that is set to 0 in training.
        qkv_format: "sbhd", "bshd" or "thd" (packed sequences, with sums of their lengths).
        attn_mask_type: "no_mask", "padding", "causal", "padding_causal", "causal_bottom_right",
            "padding_causal_bottom_right" or "arbitrary". Causal masks align the first query with
            the first key, those of "bottom_right" the last with the last.
        window_size: (left, right): a query sees so many keys before and after its position, -1 for
            all. None for no window.
        bottom_right_diagonal: align the window of other masks to the last key (None or True), or
            to the first one (False).
        attention_type: "self" or "cross"; both compute the same.
        softmax_scale: ``1 / sqrt(head size)`` if None.
        softmax_type: "vanilla"; or with an attention sink: each query has a score beside those of
            the keys that has no value (Xiao et al., 2023). "off-by-one": the score 0, thus
            ``exp(s_i) / (1 + sum_j exp(s_j))``; "learnable": the parameter ``softmax_offset``
            (heads,), zeros at first.
        layer_number: stored for the caller.
        device: of ``softmax_offset``.
        recipe: used outside every ``autocast`` region.
        name: shown in error messages, and passed to recipes as part of each role.

    Raises:
        QTensorError: an argument is illegal, or two arguments do not go together.
    """

    softmax_offset: nn.Parameter | None

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: Window | None = None,
        bottom_right_diagonal: bool | None = None,
        *,
        attention_type: str = "self",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        layer_number: int | None = None,
        device: torch.device | str | None = None,
        recipe: Recipe | None = None,
        name: str = "",
    ) -> None:
        super().__init__(recipe, name)
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        sizes = kv_channels if isinstance(kv_channels, tuple | list) else (kv_channels, kv_channels)
        check_features(self.label, num_attention_heads=num_attention_heads, num_gqa_groups=groups)
        check_features(self.label, kv_channels=sizes[0], kv_channels_of_values=sizes[-1])
        rule = "num_attention_heads must be a multiple of num_gqa_groups"
        got = f"{num_attention_heads} and {groups}"
        check(num_attention_heads % groups == 0, self.label, rule, got, "Fix one of them")
        if attention_type not in ("self", "cross"):
            rule = "attention_type must be 'self' or 'cross'"
            fail(self.label, rule, repr(attention_type), "Choose one")
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads, groups
        self.kv_channels, self.layer_number = kv_channels, layer_number
        self.attention_type = attention_type
        self.qkv_format = check_format(self.label, qkv_format)
        self._mask = mask_options(self.label, attn_mask_type, window_size, bottom_right_diagonal)
        self._dropout = share_text(self.label, "attention_dropout", attention_dropout)
        scale = 1 / math.sqrt(sizes[0]) if softmax_scale is None else softmax_scale
        rule = "softmax_scale must be a finite number"
        fits = isinstance(scale, float | int) and math.isfinite(scale)
        check(fits, self.label, rule, repr(scale), "Pass a number, or None")
        self._scale = repr(float(scale))
        if softmax_type not in SOFTMAX_TYPES:
            rule = f"softmax_type must be one of {', '.join(map(repr, SOFTMAX_TYPES))}"
            fail(self.label, rule, repr(softmax_type), "Choose one of them")
        self.softmax_type = softmax_type
        offset = None
        if softmax_type == "learnable":
            offset = nn.Parameter(torch.zeros(num_attention_heads, device=device))
        self.register_parameter("softmax_offset", offset)

    def reset_parameters(self) -> None:
        """Set ``softmax_offset`` to zeros."""
        if self.softmax_offset is not None:
            nn.init.zeros_(self.softmax_offset)

    @property
    def attention_dropout(self) -> float:
        """The share of probabilities that is set to 0 in training."""
        return float(self._dropout)

    @property
    def softmax_scale(self) -> float:
        """The number that multiplies the scores."""
        return float(self._scale)

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Masks = None,
        *,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: Window | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        cache: AttentionCache | None = None,
    ) -> Tensor:
        """Return the attention of queries (H heads) over keys and values (G heads).

        Args:
            query_layer: (S, B, H, D), (B, S, H, D) or (T, H, D), by ``qkv_format``.
            key_layer: the same with G heads; G divides H.
            value_layer: as the keys, with a head size E of its own.
            attention_mask: bool, True hides: (B, 1, 1, S) of padded sequences, for other keys a
                tuple of two; or for "arbitrary" broadcastable to (B, H, Sq, Skv).
            qkv_format: instead of the module's.
            cu_seqlens_q: (B + 1,) integers, sums of the lengths of the sequences.
            cu_seqlens_kv: the same for keys; those of the queries if None.
            cu_seqlens_q_padded: sums with padding between packed sequences ("thd").
            cu_seqlens_kv_padded: the same for keys.
            max_seqlen_q: the greatest length, for "thd"; read from ``cu_seqlens_q`` if None, which
                compiled code cannot do.
            max_seqlen_kv: the same for keys.
            attn_mask_type: instead of the module's.
            window_size: instead of the module's.
            bottom_right_diagonal: instead of the module's.
            checkpoint_core_attention: compute the attention again in backward.
            core_attention_bias_type: "no_bias"; "post_scale_bias": add ``core_attention_bias``;
                "alibi": subtract slope times distance of the positions of query and key.
            core_attention_bias: floating, broadcastable to (B, H, Sq, Skv).
            alibi_slopes: (H,) or (B, H) floating, for "alibi"; None for those of Press et al.
            cache: for inference: keys and values are appended to it, and the queries see all of
                its tokens, causally and within the left window.

        Returns:
            (S, B, H * E), (B, S, H * E) or (T, H * E); 0 for queries that see no key.

        Raises:
            QTensorError: an argument does not fit the others.
        """
        layout = self.qkv_format
        if qkv_format is not None:
            layout = check_format(self.label, qkv_format)
        q, k, v = query_layer, key_layer, value_layer
        check_heads(self.label, q, k, v, layout)
        mask = self._mask_of(attn_mask_type, window_size, bottom_right_diagonal)
        bias, is_biased = core_attention_bias, core_attention_bias_type != "no_bias"
        self._check_bias(core_attention_bias_type, bias, alibi_slopes)
        if cache is not None:
            plain = attention_mask is None and not is_biased
            return self._cached((q, k, v), mask, layout, cache, plain)
        sums = Sums(
            *(cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded),
            *(max_seqlen_q, max_seqlen_kv),
        )
        if layout == "thd":
            return self._packed((q, k, v), mask, sums, is_biased, checkpoint_core_attention)
        heads = [heads_first(t, layout) for t in (q, k, v)]
        sizes, lengths, hidden = (heads[0].shape[2], heads[1].shape[2]), None, None
        if mask.is_padded:
            lengths = padding_lengths(self.label, attention_mask, (sums.q, sums.kv), sizes)
        elif mask.kind == "arbitrary":
            hidden = self._arbitrary(attention_mask)
        elif attention_mask is not None:
            rule = "attention_mask is for masks of padding, and for 'arbitrary'"
            fail(self.label, rule, mask.kind, "Pass another attn_mask_type, or no mask")
        if core_attention_bias_type == "alibi":
            bias = alibi_bias(self.label, alibi_slopes, mask, (heads[0], heads[1]), lengths)
        plain_softmax = not is_biased and self.softmax_type == "vanilla"
        seen, is_causal = None, plain_softmax and mask.is_causal(*sizes)
        if not (is_causal or mask.is_plain()):
            seen = visible(mask, sizes, q.device, lengths, hidden)
        scoring = self._scoring(heads[0], seen, is_causal, bias)
        return heads_last(self._attend(heads, scoring, checkpoint_core_attention), layout)

    def _mask_of(
        self, kind: str | None, window: Window | None, bottom_right: bool | None
    ) -> MaskOptions:
        """Return the mask of a call, whose arguments replace those of the module."""
        own = self._mask
        if kind is None and window is None and bottom_right is None:
            return own
        if kind is None:
            kind = own.kind
        if window is None:
            left, right = own.window
            # The right side of a causal mask is that of its type.
            window = (left, -1) if own.is_causal_kind else (left, right)
        if bottom_right is None and not own.is_causal_kind:
            bottom_right = own.bottom_right
        return mask_options(self.label, kind, window, bottom_right)

    def _check_bias(self, kind: str, bias: Tensor | None, slopes: Tensor | None) -> None:
        if kind not in BIAS_TYPES:
            rule = f"core_attention_bias_type must be one of {', '.join(BIAS_TYPES)}"
            fix = "Add another bias to the scores as a post_scale_bias"
            fail(self.label, rule, repr(kind), fix, UnsupportedError)
        rule = "core_attention_bias goes with core_attention_bias_type='post_scale_bias'"
        fits = (kind == "post_scale_bias") == (bias is not None)
        check(fits, self.label, rule, kind, "Pass both, or none")
        rule = "alibi_slopes goes with core_attention_bias_type='alibi'"
        check(kind == "alibi" or slopes is None, self.label, rule, kind, "Leave it out")

    def _arbitrary(self, hidden: Masks) -> Tensor:
        if not isinstance(hidden, Tensor) or hidden.dtype is not torch.bool:
            rule = "the mask type 'arbitrary' needs a bool attention_mask, True for hidden keys"
            got = hidden.dtype if isinstance(hidden, Tensor) else type(hidden).__name__
            fail(self.label, rule, got, "Pass one that broadcasts to (B, H, Sq, Skv)")
        return hidden

    def _sinks(self, q: Tensor) -> Tensor | None:
        """Return the scores (H,) beside those of the keys for queries (B, H, Sq, D)."""
        if self.softmax_type == "off-by-one":
            return q.new_zeros(q.shape[1])
        return self.softmax_offset

    def _scoring(
        self, q: Tensor, seen: Tensor | None, is_causal: bool, bias: Tensor | None
    ) -> Scoring:
        dropout = float(self._dropout) if self.training else 0.0
        return Scoring(float(self._scale), seen, is_causal, bias, dropout, self._sinks(q))

    def _attend(self, heads: list[Tensor], scoring: Scoring, recompute: bool) -> Tensor:
        """Return the attention (B, H, Sq, E) of q, k and v (B, heads, S, D)."""
        plan = attention_plan(self._recipe_key(), self.name)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if plan is None:
                return attention(q, k, v, scoring)
            return quantized_attention(q, k, v, scoring, plan)

        if recompute and torch.is_grad_enabled():
            return checkpoint(run, *heads)
        return run(*heads)

    def _packed(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        mask: MaskOptions,
        sums: Sums,
        is_biased: bool,
        recompute: bool,
    ) -> Tensor:
        """Return the attention (T, H * E) of packed sequences."""
        if mask.kind == "arbitrary" or is_biased:
            rule = "packed sequences ('thd') have causal masks, windows and padding alone"
            got = "a bias" if is_biased else "'arbitrary'"
            fail(self.label, rule, got, "Pass padded sequences, or another mask", UnsupportedError)
        of_q = packing(self.label, "q", sums.q, sums.q_padded, sums.longest_q)
        of_kv = of_q
        if sums.kv is not None and sums.kv is not sums.q:
            of_kv = packing(self.label, "kv", sums.kv, sums.kv_padded, sums.longest_kv)
        rule = "without cu_seqlens_kv there are as many keys as queries"
        tokens = [t.shape[0] for t in qkv]
        fits = of_kv is not of_q or tokens[0] == tokens[1]
        check(fits, self.label, rule, tokens, "Pass cu_seqlens_kv")
        places = (of_q, of_kv, of_kv)
        heads = [heads_first(p.padded(t), "bshd") for p, t in zip(places, qkv, strict=True)]
        lengths = Lengths(of_q.lengths, of_kv.lengths, of_q.is_token(), of_kv.is_token())
        seen = visible(mask, (of_q.longest, of_kv.longest), qkv[0].device, lengths)
        out = self._attend(heads, self._scoring(heads[0], seen, False, None), recompute)
        return of_q.packed(heads_last(out, "bshd"), qkv[0].shape[0])

    def _cached(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        mask: MaskOptions,
        layout: str,
        cache: AttentionCache,
        is_plain: bool,
    ) -> Tensor:
        """Append keys and values to a cache, and return the attention over all of its tokens."""
        causal = mask.is_causal_kind and not mask.is_padded
        no_dropout = not (self.training and self.attention_dropout)
        learned = () if self.softmax_offset is None else (self.softmax_offset,)
        needs_grad = any(t.requires_grad for t in (*qkv, *learned))
        no_grad = not (torch.is_grad_enabled() and needs_grad)
        if layout == "thd" or not (causal and is_plain and no_dropout and no_grad):
            rule = "a cache serves causal inference: no padding, mask, bias, dropout or gradient"
            fix = "Call eval(), use torch.no_grad() and a causal mask"
            fail(self.label, rule, f"{mask.kind}, {layout}", fix, UnsupportedError)
        q, k, v = (heads_first(t, layout) for t in qkv)
        left = mask.window[0]
        window = None if left < 0 else left + 1
        scale, sinks = float(self._scale), self._sinks(q)
        return heads_last(cache.update(q, k, v, scale=scale, window=window, sinks=sinks), layout)

    def extra_repr(self) -> str:
        """Return the sizes and options for the repr of the module."""
        sizes = f"heads={self.num_attention_heads}, gqa_groups={self.num_gqa_groups}"
        kinds = f"attn_mask_type={self._mask.kind!r}, softmax_type={self.softmax_type!r}"
        return f"{sizes}, kv_channels={self.kv_channels}, {kinds}"
