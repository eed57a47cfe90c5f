"""Multi-head latent attention of transformers' models with absorbed projections.

The model expands each cached latent to keys and values of all heads (``expand_kv``). Absorbed, the
queries go into the latent space instead, and the results come back from it: attention reads one
head, of the latent and the rotated key, whose values are the latent.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtensor.caches import KVCache
from qtensor.core.errors import UnsupportedError, fail
from qtensor.modules.input_hook import TRANSFORM
from qtensor.modules.input_transform import InputTransform
from qtensor.storage.base import QuantizedTensorStorage


class NewTokens(NamedTuple):
    """Stands for the keys, and the values, between a cache and the attention function.

    The model hands it on; the attention function appends the tokens and reads the cache.
    """

    cache: KVCache
    k: Tensor
    v: Tensor | None

    @property
    def shape(self) -> Any:
        """Raise an error: a model that asks for it would compute keys and values from it."""
        rule = "an absorbed cache needs a model with absorbed projections"
        fix = "Call absorb_latent_attention(model)"
        fail("QTensorCache", rule, "a model that expands latents", fix, UnsupportedError)


def absorb_latent_attention(model: torch.nn.Module) -> int:
    """Let the latent attention of a model read the latents of ``QTensorCache(absorbed=True)``.

    With other caches, the model computes what it did before. The projection of keys and values
    (``kv_b_proj``) is multiplied with queries and results instead of the cached latents; if its
    weight is quantized, each call decodes it.

    Args:
        model: of transformers, with latent attention (DeepSeek V2 and V3, GLM-4 MoE lite, ...).

    Returns:
        The number of attention layers.

    Raises:
        UnsupportedError: the model has no latent attention, or an adapter or bias in the way.
    """
    layers: list[Any] = [
        m for m in model.modules() if hasattr(m, "expand_kv") and hasattr(m, "kv_b_proj")
    ]
    name, fix = "absorb_latent_attention", "Leave absorbed=True out"
    if not layers:
        rule = "the model must have latent attention (expand_kv and kv_b_proj)"
        fail(name, rule, type(model).__name__, fix, UnsupportedError)
    for layer in layers:
        projection = layer.kv_b_proj
        if not isinstance(projection, torch.nn.Linear) or projection.bias is not None:
            rule = "kv_b_proj must be a linear layer without bias or adapter"
            fail(name, rule, type(projection).__name__, fix, UnsupportedError)
    for layer in layers:
        layer.expand_kv = functools.partial(_expand_or_pass, layer.expand_kv)
    return len(layers)


def _expand_or_pass(expand: Any, kv_nope: Any, k_rot: Any) -> Any:
    """Return new tokens as they are, and expand other latents as the model does."""
    return (kv_nope, k_rot) if isinstance(kv_nope, NewTokens) else expand(kv_nope, k_rot)


def attend_latent(module: Any, query: Tensor, new: NewTokens, options: dict[str, Any]) -> Tensor:
    """Return the attention of a layer with absorbed projections, (B, Hq, M, size of values).

    Args:
        module: the attention of the model.
        query: (B, Hq, M, nope + rope).
        new: tokens and their cache.
        options: of ``KVCache.update``.
    """
    nope, size = module.qk_nope_head_dim, module.v_head_dim
    weight = module.kv_b_proj.weight
    if isinstance(weight, QuantizedTensorStorage):
        weight = weight.dequantize(query.dtype)
    transform = module.kv_b_proj._modules.get(TRANSFORM)
    if isinstance(transform, InputTransform):  # The latents in the cache are not transformed.
        weight = transform.into_weight(weight.float()).to(query.dtype)
    by_heads = weight.unflatten(0, (-1, nope + size))
    latent = query[..., :nope] @ by_heads[:, :nope]
    latent_query = torch.cat([latent, query[..., nope:]], -1)
    result = new.cache.update(latent_query, new.k, None, **options)
    values: Tensor = result @ by_heads[:, nope:].mT
    return values
