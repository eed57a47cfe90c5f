"""Compute the layers that torch runs as one op without gradients, with quantized weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qtensor.core.errors import UnsupportedError, fail
from qtensor.storage.base import is_quantized
from qtensor.storage.ops.table import COMPUTE, Args, Kwargs, Op, implements, named

_ATTENTION, _PADDING = 0, 1
"""Kinds of masks: (L, S), and (B, S). Any other kind is (B, heads, L, S)."""


@implements(COMPUTE, "_transformer_encoder_layer_fwd")
def _encoder_layer(func: Op, args: Args, kwargs: Kwargs) -> Tensor:
    """Handle a layer of ``nn.TransformerEncoder``: attention and MLP, each with its own norm."""
    given = named(func, args, kwargs)
    x, mask = given["src"], given["mask"]
    if is_quantized(x):
        _refuse(func, "src")
    if x.is_nested:
        # A sequence has no padding, so it needs no mask.
        rest = {key: value for key, value in given.items() if key not in ("src", "mask")}
        each = [func(src=sequence.unsqueeze(0), **rest).squeeze(0) for sequence in x.unbind()]
        return torch.nested.as_nested_tensor(each)

    def norm(x: Tensor, number: int) -> Tensor:
        scale, shift = given[f"norm_weight_{number}"], given[f"norm_bias_{number}"]
        return F.layer_norm(x, (given["embed_dim"],), scale, shift, given["eps"])

    def attention(x: Tensor) -> Tensor:
        return _attention(given, (x, x, x), given["num_heads"], mask, need_weights=False)[0]

    def mlp(x: Tensor) -> Tensor:
        hidden = F.linear(x, given["ffn_weight_1"], given["ffn_bias_1"])
        hidden = F.gelu(hidden) if given["use_gelu"] else F.relu(hidden)
        return F.linear(hidden, given["ffn_weight_2"], given["ffn_bias_2"])

    if given["norm_first"]:
        x = x + attention(norm(x, 1))
        return x + mlp(norm(x, 2))
    x = norm(x + attention(x), 1)
    return norm(x + mlp(x), 2)


@implements(COMPUTE, "_native_multi_head_attention")
def _native_attention(func: Op, args: Args, kwargs: Kwargs) -> tuple[Tensor, Tensor | None]:
    """Handle ``nn.MultiheadAttention`` in eval mode."""
    given = named(func, args, kwargs)
    inputs = given["query"], given["key"], given["value"]
    if any(is_quantized(x) or x.is_nested for x in inputs):
        _refuse(func, "query, key or value, or a nested one")
    need, average = given["need_weights"], given["average_attn_weights"]
    return _attention(given, inputs, given["num_head"], given["mask"], need, average)


def _attention(
    given: dict[str, Any],
    inputs: tuple[Tensor, Tensor, Tensor],
    heads: int,
    mask: Tensor | None,
    need_weights: bool,
    average: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return attention of ``inputs``, each (B, L, E), and its probabilities if they are needed."""
    kind = given["mask_type"]
    if mask is not None and kind not in (_ATTENTION, _PADDING):
        mask = mask.expand(-1, heads, -1, -1).flatten(0, 1)
    same = inputs[0] is inputs[1] and inputs[1] is inputs[2]
    rows = [x.transpose(0, 1) for x in inputs[: 1 if same else 3]]
    query, key, value = rows * 3 if same else rows
    y, probabilities = F.multi_head_attention_forward(
        query,
        key,
        value,
        given["embed_dim"],
        heads,
        given["qkv_weight"],
        given["qkv_bias"],
        None,
        None,
        False,
        0.0,
        given["proj_weight"],
        given["proj_bias"],
        training=False,
        key_padding_mask=mask if kind == _PADDING else None,
        need_weights=need_weights,
        attn_mask=None if kind == _PADDING else mask,
        average_attn_weights=average,
    )
    return y.transpose(0, 1), probabilities


def _refuse(func: Op, name: str) -> None:
    rule = "only the weights may be quantized, and the inputs must be plain"
    fix = "Call .dequantize() on the input"
    fail(str(func), rule, f"a quantized {name}", fix, UnsupportedError)
