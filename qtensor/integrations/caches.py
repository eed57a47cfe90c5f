"""Let ``generate`` of transformers keep keys and values quantized, and read them as they are.

Importing ``qtensor.integrations.transformers`` registers the attention ``"qtensor"`` and its masks.
"""

from __future__ import annotations

import os
import re
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    STATIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    get_layer_types_and_kwargs,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from qtensor import checkpoints
from qtensor.api import Format, dequantize
from qtensor.caches import KVCache, global_value
from qtensor.caches.options import check_counts
from qtensor.caches.rows import form_of
from qtensor.checkpoints.layout_base import layouts
from qtensor.core.errors import UnsupportedError, check, fail
from qtensor.integrations.latent_attention import NewTokens, attend_latent
from qtensor.storage.ops.attention import attention

NAME = "qtensor"
"""The attention implementation that reads quantized keys and values."""
KINDS = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers of transformers whose keys and values a cache holds."""
_START = 256
"""Tokens for which a cache that grows has room at first."""
Scales = dict[int, tuple[Tensor | None, Tensor | None]]
"""Layer -> the global values of keys and of values, float32 (1,); None if the format has none."""


class QTensorLayer(CacheLayerMixin):
    """The cache of one layer of a model.

    Attributes:
        cache: the keys and values; None before the first token.
    """

    is_croppable = True

    def __init__(self, config: Any, window: int, capacity: int | None, options: Any) -> None:
        """Make an empty cache.

        Args:
            config: of the model; it names the attention implementation.
            window: tokens that a query sees; 0 for all.
            capacity: tokens of a sequence; None to grow.
            options: keyword arguments of ``KVCache``.
        """
        super().__init__()
        self.config, self.window, self.capacity, self.options = config, window, capacity, options
        self.is_sliding, self.is_compileable = window > 0, capacity is not None
        self.cache: KVCache | None = None
        self._keeps_all = False
        self._count = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the buffers for keys (B, H, N, D) and values (B, H, N, E)."""
        self.cache = self._make(key_states, value_states)
        self.is_initialized = True

    def _make(self, key_states: Tensor, value_states: Tensor) -> KVCache:
        batch, heads, _, size = key_states.shape
        v_size, options = value_states.shape[-1], dict(self.options)
        self.batch_size = batch
        if options.get("latent"):
            v_size = self.config.kv_lora_rank
            size = v_size + self.config.qk_rope_head_dim
        if 0 < self.window <= options["residual"]:  # A query sees tokens in bfloat16 alone.
            options |= {"residual": 0, "k_format": "bfloat16", "v_format": None}
            options |= {"k_global": None, "v_global": None}
        # A ring of pages is for our attention: the others get all tokens, and mask them.
        ring = 0 if self._keeps_all or not self._is_read else self.window
        return KVCache(
            *(batch, heads, size, self.capacity or _START),
            v_head_size=v_size,
            grow=self.capacity is None,
            window=ring,
            dtype=key_states.dtype,
            device=key_states.device,
            **options,
        )

    @property
    def _is_read(self) -> bool:
        """Whether the attention of the model reads the cache itself.

        Models with latent attention compute keys and values from what the cache returns, unless
        they are absorbed.
        """
        latent = self.options.get("latent", False)
        return self.config._attn_implementation == NAME and latent == _is_latent(self.config)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what the attention function reads: for ours the new tokens and the cache.

        Another attention gets the decoded values of all tokens.
        """
        cache = self.cache = self.cache or self._make(key_states, value_states)
        self.is_initialized = True
        if self.capacity is None:
            self._count += key_states.shape[2]
        latent = self.options.get("latent", False)
        if self._is_read:
            new = NewTokens(cache, key_states, value_states)
            if latent:
                new = NewTokens(cache, torch.cat([key_states, value_states], -1), None)
            return new, new
        if cache.block_table is not None or cache.residual or latent:
            rule = (
                "a cache that has forgotten tokens, with residual or absorbed, needs its attention"
            )
            got = self.config._attn_implementation
            fail("QTensorCache", rule, got, 'Use attn_implementation="qtensor"', UnsupportedError)
        cache.append(key_states, value_states)
        return self._shown(cache.keys, cache.k_mean), self._shown(cache.values, None)

    def _shown(self, t: Tensor, mean: Tensor | None) -> Tensor:
        values: Tensor = torch.ops.qtensor.dequantize_tensor(t, None)
        if mean is not None:
            values = (values + mean.unsqueeze(-2)).to(values.dtype)
        return values if self.capacity is not None else values[:, :, : self._count]

    def get_seq_length(self) -> Any:
        """Return the tokens of a sequence; a tensor for a cache of fixed capacity."""
        if self.capacity is None:
            return self._count
        return 0 if self.cache is None else self.cache.lengths[0]

    def get_max_length(self) -> int:
        """Return the capacity; -1 if the cache grows."""
        return -1 if self.capacity is None else self.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of tokens that a mask covers, and the first one."""
        return (self._count + query_length if self.capacity is None else self.capacity), 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, as assisted decoding asks for.

        Args:
            tokens_to_remove: minus the number of tokens.
        """
        if self.cache is not None and tokens_to_remove:
            self.cache.crop(self.cache.lengths - abs(tokens_to_remove))
            self._count -= abs(tokens_to_remove) if self.capacity is None else 0

    def activate_past_recording(self) -> None:
        """Keep all tokens, so that ``crop`` can go back to any.

        Raises:
            UnsupportedError: a sliding layer has forgotten tokens.
        """
        self._keeps_all = True
        if self.cache is not None and self.cache.block_table is not None:
            rule = "a cache that assisted decoding crops must be empty at first"
            fail("QTensorCache", rule, "tokens", "Make a new cache", UnsupportedError)

    def reset(self) -> None:
        """Forget all tokens."""
        self._count = 0
        if self.cache is not None:
            self.cache.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let each beam continue the one that ``beam_idx`` names."""
        if self.cache is not None:
            self.cache.select(beam_idx)
            self.batch_size = beam_idx.shape[0]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences that ``indices`` names."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        if self.cache is not None:
            each = torch.arange(self.cache.lengths.shape[0], device=self.cache.lengths.device)
            self.reorder_cache(each.repeat_interleave(repeats))

    def offload(self) -> None:
        """Move the buffers to the CPU."""
        if self.cache is not None:
            self.cache.to("cpu")

    def prefetch(self) -> None:
        """Move the buffers back; transformers calls this only for caches that it offloads."""


class QTensorCache(Cache):
    """Keys and values of a model, quantized as they are appended.

    ``model.generate(ids, past_key_values=QTensorCache(model.config))``. With
    ``model.set_attn_implementation("qtensor")`` the attention reads the codes; with another one it
    gets decoded values, which saves memory but no time.
    """

    def __init__(
        self,
        config: Any,
        k_format: Format = "fp8_rowwise",
        v_format: Format | None = None,
        *,
        capacity: int | None = None,
        k_mean: str | None = None,
        residual: int = 0,
        absorbed: bool = False,
        scales: Scales | None = None,
    ) -> None:
        """Make an empty cache.

        Args:
            config: of the model.
            k_format: format of the keys, as in ``KVCache``.
            v_format: format of the values; that of the keys if None.
            capacity: tokens of a sequence, prompt and result together, for a cache that compiled
                code can use; None to grow.
            k_mean: ``"first"`` to quantize keys without the mean of the prompt's.
            residual: tokens that each query reads in bfloat16, as in ``KVCache``.
            absorbed: keep the latents of a model with latent attention for
                ``absorb_latent_attention``, in ``k_format``.
            scales: by layer what ``k_global`` and ``v_global`` of ``KVCache`` are: factors of a
                checkpoint for "fp8" (``kv_scales``), or the result of ``measured_scales``.

        Raises:
            QTensorError: a format or ``residual`` is wrong, ``scales`` lacks a layer, or
                ``absorbed`` does not fit the model.
        """
        # The sizes of heads are known at the first token. What can be refused now is refused now.
        check_counts("QTensorCache", 0, residual=residual)
        for fmt in (k_format, v_format):
            if fmt is not None:
                form_of(fmt)
        text = config.get_text_config(decoder=True)
        rule = "absorbed is for models with latent attention"
        fits = not absorbed or _is_latent(text)
        check(fits, "QTensorCache", rule, type(text).__name__, "Leave it out")
        others = DYNAMIC_LAYER_TYPE_MAPPING if capacity is None else STATIC_LAYER_TYPE_MAPPING
        sizes = {} if capacity is None else {"max_cache_len": capacity}
        layers = []
        for index, (kind, own) in enumerate(zip(*get_layer_types_and_kwargs(text), strict=True)):
            if kind not in KINDS:
                layers.append(others[kind](**own, **sizes))
                continue
            options: dict[str, Any] = {"k_format": k_format, "v_format": v_format, "k_mean": k_mean}
            options["residual"] = residual
            if absorbed:
                options["latent"] = True
            if scales is not None:
                if index not in scales:
                    rule = "scales must have the factors of every layer"
                    fail("QTensorCache", rule, f"none for layer {index}", "Leave scales out")
                options["k_global"], v_global = scales[index]
                options["v_global"] = None if absorbed else v_global
            layers.append(QTensorLayer(text, own.get("sliding_window") or 0, capacity, options))
        super().__init__(layers=layers)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of the quantized layers."""
        return sum(cache.nbytes for cache in self._caches().values())

    def _caches(self) -> dict[int, KVCache]:
        """Return the caches that have tokens, by layer."""
        ours = ((i, layer) for i, layer in enumerate(self.layers))
        caches = {i: layer.cache for i, layer in ours if isinstance(layer, QTensorLayer)}
        return {i: cache for i, cache in caches.items() if cache is not None}

    def measured_scales(self, k_format: Format, v_format: Format | None = None) -> Scales:
        """Return global values with which formats hold all keys and values of this cache.

        To calibrate, let a model process prompts with ``QTensorCache(config, "bfloat16")``.

        Args:
            k_format: "nvfp4", "fp8", or a format without a global value.
            v_format: the same for the values; ``k_format`` if None.

        Returns:
            For the argument ``scales`` of caches of these formats.
        """
        formats = (k_format, k_format if v_format is None else v_format)
        return {
            index: (_measured(formats[0], cache.keys), _measured(formats[1], cache.values))
            for index, cache in self._caches().items()
        }


def _measured(fmt: Format, rows: Tensor) -> Tensor | None:
    if not form_of(fmt).divisor:
        return None
    amax = dequantize(rows).abs().amax().float()
    return global_value(fmt, amax.clamp(min=2.0**-40))


def kv_scales(path: str | os.PathLike[str]) -> Scales:
    """Return the factors of keys and values that a checkpoint stores, by layer.

    Args:
        path: of a checkpoint that ``qtensor.checkpoints.open`` reads.

    Returns:
        float32 (1,) for keys and for values, for ``QTensorCache(..., "fp8", scales=...)``.

    Raises:
        QTensorError: a layer has one of the two alone, or several values for one.
    """
    ends = [{layout.kv_factors[i] for layout in layouts().values()} for i in (0, 1)]
    found: dict[int, dict[int, Tensor]] = {}
    with checkpoints.open(path) as checkpoint:
        for name in checkpoint:
            layer = re.search(r"\.layers\.(\d+)\.", name)
            which = [i for i in (0, 1) if any(name.endswith(f".{end}") for end in ends[i])]
            if layer is None or not which:
                continue
            factor = checkpoint[name].float().reshape(-1)
            rule = "a layer must have one factor for all keys"
            if factor.numel() != 1:
                fail("kv_scales", rule, f"{name} {tuple(factor.shape)}", "Leave scales out")
            found.setdefault(int(layer[1]), {})[which[0]] = factor.clone()
    for index, both in found.items():
        if len(both) != 2:
            rule = "a layer must have factors of both keys and values"
            fail("kv_scales", rule, f"one for layer {index}", "Leave scales out")
    return {index: (both[0], both[1]) for index, both in sorted(found.items())}


def _is_latent(config: Any) -> bool:
    return getattr(config, "kv_lora_rank", None) is not None


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention for a model of transformers, as its interface has it.

    Args:
        module: the attention of the model.
        query: (B, Hq, M, D).
        key: new tokens and their cache; or plain keys (B, H, M, D) without a cache.
        value: as ``key``.
        attention_mask: what ``make_mask`` returned, or a mask (B, 1, M, S) of the caller.
        scaling: multiplies the scores.
        dropout: must be 0.
        sliding_window: tokens that a query sees.
        softcap: of the scores.
        s_aux: (Hq,) sinks.
        is_causal: False for encoders.
        **kwargs: arguments of other implementations.

    Returns:
        (B, M, Hq, E), and None in place of weights.

    Raises:
        UnsupportedError: a gradient, dropout, a bias or a cache of another class.
    """
    if _is_latent(module.config) and not isinstance(key, NewTokens):
        return sdpa_attention_forward(
            *(module, query, key, value, attention_mask),
            **{"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs},
        )
    _check(query, dropout, kwargs.get("position_bias"))
    mask = attention_mask
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if mask is not None and mask.shape[2] > 1:
        causal = False  # The mask says everything.
    window = (sliding_window or 0) if causal else 0
    options: dict[str, Any] = {"mask": mask, "causal": causal, "window": window}
    options |= {"soft_cap": softcap or 0.0, "sinks": s_aux, "scale": scaling}
    if isinstance(key, NewTokens):
        if causal and not window:
            options["window"] = None  # A mask of chunks lies within the window of the cache.
        if key.v is None:
            result = attend_latent(module, query, key, options)
            return result.transpose(1, 2).contiguous(), None
        result = key.cache.update(query, key.k, key.v, **options)
    else:
        if causal and key.shape[2] != query.shape[2]:
            rule = 'attn_implementation="qtensor" reads a QTensorCache'
            fix = "Pass past_key_values=QTensorCache(model.config), or use_cache=False"
            fail("attention", rule, "a cache of another class", fix, UnsupportedError)
        result = attention(query, key, value, **options)
    return result.transpose(1, 2).contiguous(), None


def _check(query: Tensor, dropout: float, bias: object) -> None:
    gradient = torch.is_grad_enabled() and query.requires_grad
    if gradient or dropout or bias is not None:
        rule = 'attn_implementation="qtensor" has no gradient, dropout or bias'
        got = "a query that requires grad" if gradient else f"dropout={dropout}, a bias"
        fix = 'Run it in torch.no_grad() and eval(), or use "sdpa"'
        fail("attention", rule, got, fix, UnsupportedError)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """Return the mask of ``attend``: of padding alone where the rest is causal and a window.

    Args:
        batch_size: B.
        q_length: M.
        kv_length: tokens S that the mask covers.
        q_offset: position of the first query.
        kv_offset: position of the first token.
        mask_function: tells for indices whether a query sees a token.
        attention_mask: (B, tokens) bool, False for padding.
        **options: further arguments of ``sdpa_mask``.

    Returns:
        None, bool (B, 1, 1, S) for padding, or bool (B, 1, M, S) for everything.
    """
    config, local = options.get("config"), options.get("local_size")
    known = local is None or local == getattr(config, "sliding_window", None)
    known = known and not options.get("use_vmap") and not _is_latent(config)
    if not known or (q_length > 1 and not options.get("allow_is_causal_skip", True)):
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        full: Tensor = sdpa_mask(
            *(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask),
            **options,
        )
        return full
    if attention_mask is None:
        return None
    if not torch.compiler.is_compiling() and bool(attention_mask.all()):
        return None
    missing = kv_length + kv_offset - attention_mask.shape[-1]
    padded = torch.nn.functional.pad(attention_mask, (0, max(missing, 0)))
    return padded[:, None, None, kv_offset : kv_offset + kv_length]


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, make_mask)
