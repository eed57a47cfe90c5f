"""``MultiheadAttention``: projections, attention over heads, and the projection of its output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from qtensor.core.errors import UnsupportedError, check, fail
from qtensor.functional.attention.layouts import sequence_dim
from qtensor.functional.attention.masks import Masks
from qtensor.functional.attention.packed import places_of, starts_of
from qtensor.functional.attention.rotary import Embedding, rotate
from qtensor.modules.dot_product_attention import DotProductAttention
from qtensor.modules.layernorm_linear import LayerNormLinear
from qtensor.modules.linear import Linear, LinearBase
from qtensor.modules.norm import Norm
from qtensor.modules.normed import eps_text
from qtensor.modules.options import check_features
from qtensor.recipes import Recipe

QK_NORMS = (None, "L2Normalization", "RMSNorm", "LayerNorm")


class MultiheadAttention(nn.Module):
    """Multi-head attention: projections of queries, keys and values, attention, and a projection.

    The projections are ``Linear`` or, with ``input_layernorm``, ``LayerNormLinear``; the attention
    is ``DotProductAttention``, ``core_attention``. The arguments have the names and meanings of
    Transformer Engine's.

    Args:
        hidden_size: features of the input and the output.
        num_attention_heads: heads of the queries.
        kv_channels: the head size; ``hidden_size / num_attention_heads`` if None.
        attention_dropout: the share of probabilities that is set to 0 in training.
        layernorm_epsilon: added to the variance of the norm.
        init_method: fills the weights of the first projections; see ``Linear``.
        output_layer_init_method: fills the weight of the last projection.
        layer_number: stored for the caller.
        attn_mask_type, window_size, bottom_right_diagonal, qkv_format: see
            ``DotProductAttention``. The input is (S, B, hidden_size) for "sbhd", (B, S,
            hidden_size) for "bshd" and (T, hidden_size) for "thd".
        softmax_scale: ``1 / sqrt(kv_channels)`` if None.
        softmax_type: see ``DotProductAttention``.
        num_gqa_groups: heads of keys and values; None for as many as the queries have.
        input_layernorm: apply a norm to the input.
        normalization, zero_centered_gamma, return_layernorm_output: see ``LayerNormLinear``.
        attention_type: "self", or "cross" for keys and values of ``encoder_output``.
        fuse_qkv_params: one weight for queries, keys and values ("cross": keys and values), which
            quantizes the input once, instead of one for each.
        qkv_weight_interleaved: the fused weight has the rows of each group one after another: its
            queries, its key, its value. False: all queries, then all keys, then all values.
        qk_norm_type: "L2Normalization", "RMSNorm" or "LayerNorm" over the head size of queries and
            keys; None for none.
        qk_norm_eps: added to the variance of that norm.
        qk_norm_before_rope: apply it before the rotation, not after it.
        rotary_pos_interleaved: pairs of rotated channels are neighbours.
        bias: add biases in all projections.
        return_bias: do not add the bias of the last projection, and return it.
        set_parallel_mode: split the heads over ``tp_group``: the first projections by columns, the
            last one by rows. The number of groups must be a multiple of the ranks. Dropout draws
            from each rank's generator.
        tp_group: process group of tensor parallelism.
        sequence_parallel: the input and the output are split over the group along dim 0.
        name: shown in error messages. The roles of recipes have ``name.qkv``, ``name.proj`` and
            so on, after the attributes.
        recipe: used outside every ``autocast`` region, also by the attention.
        **options: options of ``Linear`` for all projections: device, params_dtype, dtype,
            quantized_params, fuse_wgrad_accumulation, delay_wgrad_compute.

    Raises:
        QTensorError: an argument is illegal, or two arguments do not go together.
    """

    key: Linear
    value: Linear
    key_value: Linear

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: Callable[[Tensor], Any] | None = None,
        output_layer_init_method: Callable[[Tensor], Any] | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        *,
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        num_gqa_groups: int | None = None,
        input_layernorm: bool = False,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        attention_type: str = "self",
        fuse_qkv_params: bool = False,
        qkv_weight_interleaved: bool = True,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        rotary_pos_interleaved: bool = False,
        qkv_format: str = "sbhd",
        bias: bool = True,
        return_bias: bool = False,
        set_parallel_mode: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        recipe: Recipe | None = None,
        name: str = "",
        **options: Any,
    ) -> None:
        super().__init__()
        self.name = name
        check_features(self.label, hidden_size=hidden_size, num_attention_heads=num_attention_heads)
        if kv_channels is None:
            rule = "hidden_size must be a multiple of num_attention_heads without kv_channels"
            got = f"{hidden_size} and {num_attention_heads}"
            fits = hidden_size % num_attention_heads == 0
            check(fits, self.label, rule, got, "Pass kv_channels")
            kv_channels = hidden_size // num_attention_heads
        self.hidden_size, self.layer_number = hidden_size, layer_number
        self.attention_type, self.input_layernorm = attention_type, input_layernorm
        self.return_bias, self.return_layernorm_output = return_bias, return_layernorm_output
        self.rotary_pos_interleaved = rotary_pos_interleaved
        self.fuse_qkv_params, self.qkv_weight_interleaved = fuse_qkv_params, qkv_weight_interleaved
        self.core_attention = DotProductAttention(
            *(num_attention_heads, kv_channels, num_gqa_groups, attention_dropout),
            *(qkv_format, attn_mask_type, window_size, bottom_right_diagonal),
            attention_type=attention_type,
            softmax_scale=softmax_scale,
            softmax_type=softmax_type,
            layer_number=layer_number,
            device=options.get("device"),
            recipe=recipe,
            name=self._inner("core_attention"),
        )
        self._check_options(tp_group if set_parallel_mode else None, qk_norm_type)
        options |= {"bias": bias, "recipe": recipe, "tp_group": tp_group}
        options["sequence_parallel"] = sequence_parallel
        modes = ("column", "row") if set_parallel_mode else (None, None)
        norm = {
            "normalization": normalization,
            "eps": layernorm_epsilon,
            "zero_centered_gamma": zero_centered_gamma,
        }
        first = {**options, "parallel_mode": modes[0], "init_method": init_method}
        self._make_projections(first, norm)
        self.proj = Linear(
            num_attention_heads * kv_channels,
            hidden_size,
            **{**options, "parallel_mode": modes[1], "init_method": output_layer_init_method},
            return_bias=return_bias,
            name=self._inner("proj"),
        )
        self.qk_norm_type, self.qk_norm_before_rope = qk_norm_type, qk_norm_before_rope
        self._qk_norm_eps = eps_text(self.label, qk_norm_eps)
        self.q_norm = self.k_norm = None
        if qk_norm_type in ("RMSNorm", "LayerNorm"):
            like = self.proj.weight
            factory = {"device": like.device, "dtype": like.dtype}
            own = (kv_channels, qk_norm_type, qk_norm_eps, False, factory)
            self.q_norm, self.k_norm = Norm(*own), Norm(*own)

    @property
    def label(self) -> str:
        """The class and the name of the module, for error messages."""
        kind = type(self).__name__
        return f"{kind}[{self.name}]" if self.name else kind

    @property
    def kv_channels(self) -> int:
        """The head size."""
        size: Any = self.core_attention.kv_channels
        return size

    def _inner(self, part: str) -> str:
        return f"{self.name}.{part}" if self.name else part

    def _check_options(self, tp_group: dist.ProcessGroup | None, qk_norm_type: str | None) -> None:
        if qk_norm_type not in QK_NORMS:
            rule = f"qk_norm_type must be one of {', '.join(map(repr, QK_NORMS))}"
            fail(self.label, rule, repr(qk_norm_type), "Choose one of them")
        rule, fix = "return_layernorm_output needs input_layernorm", "Pass both"
        right = self.input_layernorm or not self.return_layernorm_output
        check(right, self.label, rule, "input_layernorm=False", fix)
        if tp_group is None or tp_group.size() == 1:
            return
        groups, ranks = self.core_attention.num_gqa_groups, tp_group.size()
        rule = f"num_gqa_groups must be a multiple of the {ranks} ranks of tp_group"
        check(groups % ranks == 0, self.label, rule, groups, "Choose another number or group")
        if self.fuse_qkv_params and not self.qkv_weight_interleaved:
            rule = "a fused weight is split by groups, whose rows must lie together"
            fix = "Pass qkv_weight_interleaved=True"
            fail(self.label, rule, "qkv_weight_interleaved=False", fix, UnsupportedError)
        if self.core_attention.softmax_offset is not None:
            rule = "ranks have different heads, and each all of softmax_offset"
            fail(self.label, rule, "'learnable'", "Choose 'off-by-one'", UnsupportedError)
        if qk_norm_type in ("RMSNorm", "LayerNorm"):
            rule = "all heads share the weights of qk_norm_type, and ranks have different heads"
            fail(self.label, rule, repr(qk_norm_type), "Use L2Normalization", UnsupportedError)

    def _make_projections(self, options: dict[str, Any], norm: dict[str, Any]) -> None:
        """Make the projections of queries, keys and values."""
        core, size = self.core_attention, self.kv_channels
        queries, keys = core.num_attention_heads * size, core.num_gqa_groups * size
        fused, is_self = self.fuse_qkv_params, self.attention_type == "self"
        first = "qkv" if fused and is_self else "query"
        features = queries + 2 * keys if first == "qkv" else queries
        if self.input_layernorm:
            name = f"layernorm_{first}"
            # Separate keys and values of self attention read the normed input too.
            normed = self.return_layernorm_output or (is_self and not fused)
            options_of_norm = {**norm, "return_layernorm_output": normed}
            layer: LinearBase = LayerNormLinear(
                self.hidden_size, features, **options_of_norm, **options, name=self._inner(name)
            )
        else:
            name = first
            layer = Linear(self.hidden_size, features, **options, name=self._inner(name))
        self.add_module(name, layer)
        self._first = name
        others = {} if first == "qkv" else {"key": keys, "value": keys}
        if fused and not is_self:
            others = {"key_value": 2 * keys}
        for name, features in others.items():
            layer = Linear(self.hidden_size, features, **options, name=self._inner(name))
            self.add_module(name, layer)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Masks = None,
        encoder_output: Tensor | None = None,
        *,
        is_first_microbatch: bool | None = None,
        rotary_pos_emb: Embedding | None = None,
        **attention: Any,
    ) -> Any:
        """Return the attention of the tokens over those of the same input or of another one.

        Args:
            hidden_states: (S, B, hidden_size), (B, S, hidden_size) or (T, hidden_size), by
                ``qkv_format``; float32, bfloat16 or float16.
            attention_mask: see ``DotProductAttention.forward``.
            encoder_output: the input of keys and values, for attention_type="cross".
            is_first_microbatch: see ``Linear.forward``.
            rotary_pos_emb: angles (S or more, 1, 1, channels) of ``RotaryPositionEmbedding``, or
                a tuple: those of queries and of keys. Row i is for the token i of a sequence; with
                a cache, for the token i of this call.
            **attention: further arguments of ``DotProductAttention.forward``: sums of lengths,
                another mask, a bias, slopes, ``checkpoint_core_attention``, ``cache``.

        Returns:
            The shape of ``hidden_states``; then the bias (hidden_size,) with ``return_bias``, then
            the normed input with ``return_layernorm_output``.

        Raises:
            QTensorError: an argument does not fit the module or the others.
        """
        is_cross = self.attention_type == "cross"
        rule = "encoder_output goes with attention_type='cross'"
        fits = is_cross == (encoder_output is not None)
        check(fits, self.label, rule, self.attention_type, "Pass both, or none")
        source = hidden_states if encoder_output is None else encoder_output
        q, k, v, normed = self._project(hidden_states, source, is_first_microbatch)
        if self.qk_norm_before_rope:
            q, k = self._normed(q, k)
        if rotary_pos_emb is not None:
            q, k = self._rotated(q, k, rotary_pos_emb, attention)
        if not self.qk_norm_before_rope:
            q, k = self._normed(q, k)
        context = self.core_attention(q, k, v, attention_mask, **attention)
        out = self.proj(context, is_first_microbatch)
        results = [*out] if self.return_bias else [out]
        if self.return_layernorm_output:
            results.append(normed)
        return tuple(results) if len(results) > 1 else out

    def _project(
        self, input: Tensor, source: Tensor, first: bool | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return queries, keys and values (..., heads, head size), and the normed input or None."""
        core, size = self.core_attention, self.kv_channels
        own, normed = self.get_submodule(self._first)(input, first), None
        if isinstance(own, tuple):
            own, normed = own
        heads, groups = core.num_attention_heads, core.num_gqa_groups
        interleaved = self.fuse_qkv_params and self.qkv_weight_interleaved
        if self._first.endswith("qkv") and interleaved:
            # A rank has some of the groups.
            parts = own.unflatten(-1, (-1, heads // groups + 2, size))
            q = parts[..., :-2, :].flatten(-3, -2)
            return q, parts[..., -2, :], parts[..., -1, :], normed
        if self._first.endswith("qkv"):
            flat = own.split([heads * size, groups * size, groups * size], -1)
        else:
            if source is input and normed is not None:
                source = normed
            flat = (own, *self._keys_and_values(source, first))
        q, k, v = (t.unflatten(-1, (-1, size)) for t in flat)
        return q, k, v, normed

    def _keys_and_values(self, source: Tensor, first: bool | None) -> tuple[Tensor, Tensor]:
        """Return keys and values (..., heads * head size), by layers of their own."""
        if not self.fuse_qkv_params:
            return self.key(source, first), self.value(source, first)
        both = self.key_value(source, first)
        if not self.qkv_weight_interleaved:
            k, v = both.chunk(2, -1)
        else:
            k, v = both.unflatten(-1, (-1, 2, self.kv_channels)).unbind(-2)
            k, v = k.flatten(-2), v.flatten(-2)
        return k, v

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is not None and self.k_norm is not None:
            return self.q_norm(q), self.k_norm(k)
        if self.qk_norm_type is None:
            return q, k
        eps = float(self._qk_norm_eps)
        return l2_norm(q, eps), l2_norm(k, eps)

    def _rotated(
        self, q: Tensor, k: Tensor, embedding: Embedding, attention: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        layout = attention.get("qkv_format") or self.core_attention.qkv_format
        of_q, of_k = embedding if isinstance(embedding, tuple) else (embedding, embedding)
        if layout == "thd":
            sums = [attention.get(f"cu_seqlens_{name}") for name in ("q", "kv")]
            padded = [attention.get(f"cu_seqlens_{name}_padded") for name in ("q", "kv")]
            if sums[1] is None:
                sums[1], padded[1] = sums[0], padded[0]
            of_q = self._of_tokens(of_q, q, "q", sums[0], padded[0])
            of_k = self._of_tokens(of_k, k, "kv", sums[1], padded[1])
        dim, interleaved = sequence_dim(layout), self.rotary_pos_interleaved
        return rotate(q, of_q, dim, interleaved), rotate(k, of_k, dim, interleaved)

    def _of_tokens(
        self, embedding: Tensor, t: Tensor, name: str, sums: Tensor | None, padded: Tensor | None
    ) -> Tensor:
        """Return the angles (T, 1, 1, channels) of packed tokens."""
        starts, _ = starts_of(self.label, name, sums, padded)
        _, position = places_of(starts, t.shape[0])
        return embedding[position.clamp(max=embedding.shape[0] - 1)]

    def backward_dw(self) -> None:
        """Compute the oldest postponed weight gradients of all projections; see ``Linear``."""
        for layer in self.children():
            if isinstance(layer, LinearBase):
                layer.backward_dw()


def l2_norm(t: Tensor, eps: float) -> Tensor:
    """Return ``t`` (..., K) divided by the square root of (its squares' sum over K, plus eps)."""
    values = t.float()
    return (values * (values.square().sum(-1, keepdim=True) + eps).rsqrt()).to(t.dtype)
