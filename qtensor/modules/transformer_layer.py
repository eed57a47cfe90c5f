"""``TransformerLayer``: attention and an MLP, each with a norm and a residual connection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from qtensor.core.errors import UnsupportedError, check, fail
from qtensor.functional.attention.layouts import sequence_dim
from qtensor.functional.attention.masks import Masks, Window
from qtensor.modules.dot_product_attention import share_text
from qtensor.modules.layernorm_mlp import LayerNormMLP
from qtensor.modules.linear import make_parallel
from qtensor.modules.multihead_attention import MultiheadAttention
from qtensor.modules.norm import Norm
from qtensor.recipes import Recipe


class TransformerLayer(nn.Module):
    """A layer of a transformer: attention and an MLP, each behind a norm and beside a residual.

    Its parts are ``self_attention`` (``MultiheadAttention``), ``inter_attention`` of a decoder, and
    ``layernorm_mlp`` (``LayerNormMLP``). The arguments have the names and meanings of Transformer
    Engine's.

    Args:
        hidden_size: features of the input and the output.
        ffn_hidden_size: see ``LayerNormMLP``, as activation and activation_params.
        num_attention_heads: heads of the queries.
        num_gqa_groups: heads of keys and values of the self attention; None for as many.
        layernorm_epsilon: added to the variance of each norm.
        hidden_dropout: the share of the outputs of attention and MLP that is set to 0 in training.
        attention_dropout: see ``MultiheadAttention``, as kv_channels, normalization,
            zero_centered_gamma, bias, rotary_pos_interleaved, fuse_qkv_params and
            qkv_weight_interleaved.
        init_method: fills the weights of the first projections of attention and MLP.
        output_layer_init_method: fills the weights of their last projections.
        layer_number: stored for the caller.
        self_attn_mask_type, window_size, bottom_right_diagonal: the mask of the self attention,
            see ``DotProductAttention``.
        enc_dec_attn_mask_type, enc_dec_window_size, enc_dec_bottom_right_diagonal: that of the
            attention over ``encoder_output``.
        attn_input_format: "sbhd", "bshd" or "thd", the layout of the input; see
            ``MultiheadAttention``.
        apply_residual_connection_post_layernorm: the residuals are the normed inputs.
        output_layernorm: a norm of the output instead of one of the input.
        parallel_attention_mlp: attention and MLP read the same input, and both are added to it.
        layer_type: "encoder", or "decoder" with attention over ``encoder_output``.
        drop_path_rate: the share of samples for which attention or MLP are left out in training.
        qk_norm_type, qk_norm_eps, qk_norm_before_rope, softmax_type: see ``MultiheadAttention``.
        set_parallel_mode: split heads and MLP over ``tp_group``. Ranks must draw the same dropout
            without ``sequence_parallel``, and each its own with it: seed them so.
        tp_group: process group of tensor parallelism.
        sequence_parallel: the input and the output are split over the group along dim 0.
        recipe: used outside every ``autocast`` region.
        name: shown in error messages, and the beginning of the names of the parts.
        **options: options of ``Linear`` for all projections: device, params_dtype, dtype,
            quantized_params, fuse_wgrad_accumulation, delay_wgrad_compute.

    Raises:
        QTensorError: an argument is illegal, or two arguments do not go together.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Callable[[Tensor], Any] | None = None,
        output_layer_init_method: Callable[[Tensor], Any] | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: Window | None = None,
        bottom_right_diagonal: bool | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None,
        enc_dec_window_size: Window | None = None,
        *,
        attn_input_format: str = "sbhd",
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        bias: bool = True,
        fuse_qkv_params: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
        set_parallel_mode: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        recipe: Recipe | None = None,
        name: str = "",
        **options: Any,
    ) -> None:
        super().__init__()
        self.name, self.layer_number, self.layer_type = name, layer_number, layer_type
        self.apply_residual_connection_post_layernorm = apply_residual_connection_post_layernorm
        self.output_layernorm = output_layernorm
        self.parallel_attention_mlp = parallel_attention_mlp
        self.attn_input_format = attn_input_format
        self._hidden_dropout = share_text(self.label, "hidden_dropout", hidden_dropout)
        self._drop_path = share_text(self.label, "drop_path_rate", drop_path_rate)
        self._check_options()
        norm = {"normalization": normalization, "zero_centered_gamma": zero_centered_gamma}
        split = {
            "set_parallel_mode": set_parallel_mode,
            "tp_group": tp_group,
            "sequence_parallel": sequence_parallel,
        }
        common = {**options, **norm, **split, "bias": bias, "recipe": recipe}
        post = apply_residual_connection_post_layernorm
        heads: dict[str, Any] = {
            **common,
            "num_gqa_groups": num_gqa_groups,
            "return_layernorm_output": post,
            "fuse_qkv_params": fuse_qkv_params,
            "qkv_weight_interleaved": qkv_weight_interleaved,
            "rotary_pos_interleaved": rotary_pos_interleaved,
            "qkv_format": attn_input_format,
            "qk_norm_type": qk_norm_type,
            "qk_norm_eps": qk_norm_eps,
            "qk_norm_before_rope": qk_norm_before_rope,
            "softmax_type": softmax_type,
        }
        heads |= {
            "attention_dropout": attention_dropout,
            "kv_channels": kv_channels,
            "layernorm_epsilon": layernorm_epsilon,
            "init_method": init_method,
            "output_layer_init_method": output_layer_init_method,
            "layer_number": layer_number,
        }
        own: dict[str, Any] = {
            "input_layernorm": not output_layernorm,
            "attn_mask_type": self_attn_mask_type,
            "window_size": window_size,
            "bottom_right_diagonal": bottom_right_diagonal,
            "name": self._inner("self_attention"),
        }
        self.self_attention = MultiheadAttention(hidden_size, num_attention_heads, **heads, **own)
        if layer_type == "decoder":
            own = {
                "input_layernorm": True,
                "attention_type": "cross",
                "attn_mask_type": enc_dec_attn_mask_type,
                "window_size": enc_dec_window_size,
                "bottom_right_diagonal": enc_dec_bottom_right_diagonal,
                "name": self._inner("inter_attention"),
            }
            self.inter_attention = MultiheadAttention(
                hidden_size, num_attention_heads, **heads, **own
            )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            layernorm_epsilon,
            **common,
            activation=activation,
            activation_params=activation_params,
            return_layernorm_output=post,
            init_method=init_method,
            output_layer_init_method=output_layer_init_method,
            name=self._inner("layernorm_mlp"),
        )
        if output_layernorm:
            like = self.self_attention.proj.weight
            mode = "column" if set_parallel_mode else None
            split_of = make_parallel(self.label, tp_group, mode, sequence_parallel)
            factory = {"device": like.device, "dtype": like.dtype}
            sizes = (hidden_size, normalization, layernorm_epsilon)
            self.layernorm = Norm(*sizes, zero_centered_gamma, factory, split_of)

    @property
    def label(self) -> str:
        """The class and the name of the module, for error messages."""
        kind = type(self).__name__
        return f"{kind}[{self.name}]" if self.name else kind

    def _inner(self, part: str) -> str:
        return f"{self.name}.{part}" if self.name else part

    def _check_options(self) -> None:
        layout, post = self.attn_input_format, self.apply_residual_connection_post_layernorm
        if self.layer_type not in ("encoder", "decoder"):
            rule = "layer_type must be 'encoder' or 'decoder'"
            fail(self.label, rule, repr(self.layer_type), "Choose one")
        is_decoder, parallel = self.layer_type == "decoder", self.parallel_attention_mlp
        refused = {
            "parallel_attention_mlp is for encoders": parallel and is_decoder,
            "parallel_attention_mlp adds both to the input itself": parallel and post,
            "output_layernorm leaves no norm whose output is a residual": (
                self.output_layernorm and post
            ),
            "a decoder takes padded sequences, not 'thd'": is_decoder and layout == "thd",
            "drop_path_rate needs samples, which 'thd' has not": (
                layout == "thd" and float(self._drop_path) > 0
            ),
        }
        for rule, broken in refused.items():
            check(not broken, self.label, rule, layout, "Fix one of the options", UnsupportedError)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Masks = None,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: Masks = None,
        *,
        self_attn_mask_type: str | None = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: Window | None = None,
        is_first_microbatch: bool | None = None,
        **attention: Any,
    ) -> Tensor:
        """Return the output of the layer.

        Args:
            hidden_states: (S, B, hidden_size), (B, S, hidden_size) or (T, hidden_size), by
                ``attn_input_format``; float32, bfloat16 or float16.
            attention_mask: of the self attention; see ``DotProductAttention.forward``.
            encoder_output: the input of keys and values of a decoder's second attention.
            enc_dec_attn_mask: the mask of that attention.
            self_attn_mask_type: instead of the module's.
            enc_dec_attn_mask_type: instead of the module's.
            enc_dec_window_size: instead of the module's.
            is_first_microbatch: see ``Linear.forward``.
            **attention: further arguments of the self attention, see
                ``MultiheadAttention.forward``: rotary_pos_emb, sums of lengths, a window, cache.

        Returns:
            The shape of ``hidden_states``.

        Raises:
            QTensorError: an argument does not fit the layer or the others.
        """
        first = {"is_first_microbatch": is_first_microbatch}
        own = self.self_attention(
            *(hidden_states, attention_mask),
            attn_mask_type=self_attn_mask_type,
            **first,
            **attention,
        )
        if self.parallel_attention_mlp:
            both = self._dropped(own) + self._dropped(self.layernorm_mlp(hidden_states, **first))
            return self._output(hidden_states + both)
        hidden = self._added(hidden_states, own)
        if self.layer_type == "decoder":
            other = self.inter_attention(
                *(hidden, enc_dec_attn_mask, encoder_output),
                attn_mask_type=enc_dec_attn_mask_type,
                window_size=enc_dec_window_size,
                **first,
            )
            hidden = self._added(hidden, other)
        return self._output(self._added(hidden, self.layernorm_mlp(hidden, **first)))

    def _added(self, input: Tensor, result: Any) -> Tensor:
        """Return the residual plus the result of a part, after dropout."""
        out, residual = result, input
        if self.apply_residual_connection_post_layernorm:
            out, residual = result
        return residual + self._dropped(out)

    def _dropped(self, out: Tensor) -> Tensor:
        """Return the result of a part with values, or whole samples, set to 0."""
        if not self.training:
            return out
        if dropout := float(self._hidden_dropout):
            out = functional.dropout(out, dropout)
        if rate := float(self._drop_path):
            sizes = [1] * out.ndim
            batch = 1 - sequence_dim(self.attn_input_format)
            sizes[batch] = out.shape[batch]
            kept = torch.empty(sizes, dtype=out.dtype, device=out.device).bernoulli_(1 - rate)
            out = out * kept / (1 - rate)
        return out

    def _output(self, hidden: Tensor) -> Tensor:
        return self.layernorm(hidden) if self.output_layernorm else hidden

    def backward_dw(self) -> None:
        """Compute the oldest postponed weight gradients of all projections; see ``Linear``."""
        for part in self.children():
            if isinstance(part, MultiheadAttention | LayerNormMLP):
                part.backward_dw()
