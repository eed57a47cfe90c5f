"""Write the config of a transformers model as key-values of llama.cpp, and read it back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from qtensor.core.errors import UnsupportedError, fail
from qtensor.integrations.gguf.families import Family, layer_types


class _Key(NamedTuple):
    """Pair a key of a GGUF file, without its architecture, with one of config.json."""

    key: str
    config: str
    kind: Callable[[Any], Any] = int


_KEYS = (
    _Key("context_length", "max_position_embeddings"),
    _Key("embedding_length", "hidden_size"),
    _Key("block_count", "num_hidden_layers"),
    _Key("feed_forward_length", "intermediate_size"),
    _Key("attention.head_count", "num_attention_heads"),
    _Key("attention.head_count_kv", "num_key_value_heads"),
    _Key("attention.key_length", "head_dim"),
    _Key("attention.layer_norm_rms_epsilon", "rms_norm_eps", float),
    _Key("vocab_size", "vocab_size"),
    _Key("expert_used_count", "num_experts_per_tok"),
    _Key("attention.sliding_window", "sliding_window"),
    _Key("attn_logit_softcapping", "attn_logit_softcapping", float),
    _Key("final_logit_softcapping", "final_logit_softcapping", float),
)
_EXPERT_COUNTS = ("num_local_experts", "num_experts")
"""Keys of config.json for the number of experts."""
_PATTERN = "attention.sliding_window_pattern"
_YARN = {
    "extrapolation_factor": "yarn_ext_factor",
    "attention_factor": "yarn_attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
_TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id"}
_TOKENS |= {"pad_token_id": "padding_token_id"}


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the language model, with what follows from the other entries."""
    nested = config.get("text_config")
    found = dict(nested if isinstance(nested, Mapping) else config)
    if isinstance(nested, Mapping):
        found.setdefault("tie_word_embeddings", config.get("tie_word_embeddings", True))
    heads = found.get("num_attention_heads")
    if heads:
        found["num_key_value_heads"] = found.get("num_key_value_heads") or heads
        found["head_dim"] = found.get("head_dim") or found["hidden_size"] // heads
    return found


def rotary(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parameters of the rotary embedding: of full attention, and of a window or {}.

    Configs of transformers 5 have ``rope_parameters``; older ones ``rope_theta``, ``rope_scaling``
    and, in Gemma 3, ``rope_local_base_freq``.
    """
    found = config.get("rope_parameters")
    if found:
        full = dict(found.get("full_attention", found))
        return full, dict(found.get("sliding_attention") or {})
    full = {"rope_type": "default", **(config.get("rope_scaling") or {})}
    full["rope_type"] = full.pop("type", full["rope_type"])
    full["rope_theta"] = config.get("rope_theta", 10000.0)
    local = config.get("rope_local_base_freq")
    return full, {} if local is None else {"rope_type": "default", "rope_theta": local}


def key_values(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the key-values that llama.cpp reads, from a config of ``text_config``.

    Raises:
        UnsupportedError: llama.cpp has no such rotary embedding, or scales attention in another
            way.
    """
    name = family.architecture
    pairs: dict[str, Any] = {"general.architecture": name, "general.type": "model"}
    for key, entry, kind in _KEYS:
        value = config.get(entry)
        if value is not None and (entry != "sliding_window" or family.pattern):
            pairs[f"{name}.{key}"] = kind(value)
    pairs[f"{name}.attention.value_length"] = pairs[f"{name}.attention.key_length"]
    pairs[f"{name}.rope.dimension_count"] = pairs[f"{name}.attention.key_length"]
    if family.experts is not None:
        count = next(config[key] for key in _EXPERT_COUNTS if config.get(key))
        pairs[f"{name}.expert_count"] = int(count)
        width = config.get("moe_intermediate_size") or config["intermediate_size"]
        pairs[f"{name}.expert_feed_forward_length"] = int(width)
    pairs |= _rotary_pairs(name, config)
    types = config.get("layer_types")
    if family.pattern and types and list(types) != layer_types(family, len(types)):
        pairs[f"{name}.{_PATTERN}"] = [kind == "sliding_attention" for kind in types]
    _check_attention_scale(family, config)
    for entry, key in _TOKENS.items():
        value = config.get(entry)
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, int) and value >= 0:
            pairs[f"tokenizer.ggml.{key}"] = value
    return pairs


def _rotary_pairs(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the key-values of the rotary embedding."""
    full, local = rotary(config)
    pairs: dict[str, Any] = {f"{name}.rope.freq_base": float(full["rope_theta"])}
    kind = full.get("rope_type", "default")
    if local:
        pairs[f"{name}.rope.freq_base_swa"] = float(local["rope_theta"])
    if kind not in ("default", "linear", "yarn", "llama3") or local.get("rope_type") not in (
        None,
        "default",
    ):
        rule = "the rotary embedding is default, linear, yarn or llama3, and default in a window"
        fix = "llama.cpp has no key-values for another one"
        fail("gguf", rule, f"{kind}, {local.get('rope_type')}", fix, UnsupportedError)
    if kind in ("linear", "yarn"):
        pairs[f"{name}.rope.scaling.type"] = kind
        pairs[f"{name}.rope.scaling.factor"] = float(full["factor"])
    if kind == "yarn":
        original = full.get("original_max_position_embeddings", config["max_position_embeddings"])
        pairs[f"{name}.rope.scaling.original_context_length"] = int(original)
        for entry, key in _YARN.items():
            if full.get(entry) is not None:
                pairs[f"{name}.rope.scaling.{key}"] = float(full[entry])
    return pairs


def _check_attention_scale(family: Family, config: Mapping[str, Any]) -> None:
    """Refuse a scale of attention other than that of llama.cpp, which no key-value holds."""
    scalar, wanted = config.get("query_pre_attn_scalar"), _attention_scalar(family, config)
    if scalar not in (None, wanted):
        rule = f"llama.cpp computes this model with query_pre_attn_scalar = {wanted}"
        fix = "Such a model gives other results there"
        fail("gguf", rule, scalar, fix, UnsupportedError)


def _attention_scalar(family: Family, config: Mapping[str, Any]) -> int:
    """Return whose root llama.cpp divides scores of attention by: the largest Gemmas differ."""
    largest = {"gemma2": 46, "gemma3": 62}.get(family.architecture)
    if config["num_hidden_layers"] == largest:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def frequency_factors(config: Mapping[str, Any]) -> Tensor | None:
    """Return what divides the rotary frequencies of Llama 3, float32 (head_dim / 2,), or None.

    It is the tensor ``rope_freqs.weight``. Frequencies of waves longer than the old context are
    divided by ``factor``, those of short ones by 1, and between them the divisor is smooth.
    """
    full, _ = rotary(config)
    if full.get("rope_type") != "llama3":
        return None
    dims = config["head_dim"]
    factor, low, high = (
        float(full.get(key, value))
        for key, value in (("factor", 8), ("low_freq_factor", 1), ("high_freq_factor", 4))
    )
    context = full.get("original_max_position_embeddings", 8192)
    exponents = torch.arange(0, dims, 2, dtype=torch.float32) / dims
    found = []
    for frequency in (1.0 / full["rope_theta"] ** exponents).tolist():
        wave = 2 * math.pi / frequency
        if wave < context / high:
            found.append(1.0)
        elif wave > context / low:
            found.append(factor)
        else:
            smooth = (context / wave - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(found, dtype=torch.float32)


def config_of(
    family: Family, pairs: Mapping[str, Any], tied: bool, factors: Tensor | None
) -> dict[str, Any]:
    """Return config.json of the model that a file holds.

    Args:
        family: that of the file.
        pairs: its key-values, decoded.
        tied: True if the file has no output layer of its own.
        factors: the tensor ``rope_freqs.weight``, or None.

    Raises:
        UnsupportedError: no parameters of Llama 3 give the factors.
    """
    name = family.architecture
    config: dict[str, Any] = {"model_type": family.model_types[0]}
    pairs = {key: _shortest(value) for key, value in pairs.items()}
    for key, entry, _ in _KEYS:
        if f"{name}.{key}" in pairs:
            config[entry] = pairs[f"{name}.{key}"]
    if "vocab_size" not in config:
        config["vocab_size"] = len(pairs.get("tokenizer.ggml.tokens", ()))
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    width = pairs.get(f"{name}.rope.dimension_count")
    default = width or config["hidden_size"] // config["num_attention_heads"]
    config.setdefault("head_dim", default)
    config |= {key: value for key, value in family.needs.items() if value is not None}
    config["tie_word_embeddings"] = tied
    if family.experts is not None:
        count = pairs[f"{name}.expert_count"]
        config |= dict.fromkeys(_EXPERT_COUNTS, count)
        config["moe_intermediate_size"] = pairs.get(f"{name}.expert_feed_forward_length")
    if family.pattern:
        config["layer_types"] = _types_of(family, pairs, config)
        config["query_pre_attn_scalar"] = _attention_scalar(family, config)
    config["rope_parameters"] = _rope_parameters(name, pairs, config, factors)
    for entry, key in _TOKENS.items():
        config[entry] = pairs.get(f"tokenizer.ggml.{key}")
    return config


def _shortest(value: Any) -> Any:
    """Return a number of 32 bits as the shortest decimal number that rounds to it: 1e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _types_of(family: Family, pairs: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Return ``layer_types`` of a file."""
    count = config["num_hidden_layers"]
    found = pairs.get(f"{family.architecture}.{_PATTERN}")
    if isinstance(found, list):
        return [("full_attention", "sliding_attention")[bool(swa)] for swa in found]
    return layer_types(family, count)


def _rope_parameters(
    name: str, pairs: Mapping[str, Any], config: Mapping[str, Any], factors: Tensor | None
) -> dict[str, Any]:
    """Return ``rope_parameters`` of transformers 5."""
    full: dict[str, Any] = {"rope_theta": pairs.get(f"{name}.rope.freq_base", 10000.0)}
    full["rope_type"] = pairs.get(f"{name}.rope.scaling.type", "default")
    if full["rope_type"] == "none":
        full["rope_type"] = "default"
    if full["rope_type"] != "default":
        full["factor"] = pairs[f"{name}.rope.scaling.factor"]
    if full["rope_type"] == "yarn":
        key = f"{name}.rope.scaling.original_context_length"
        full["original_max_position_embeddings"] = pairs[key]
        for entry, key in _YARN.items():
            if f"{name}.rope.scaling.{key}" in pairs:
                full[entry] = pairs[f"{name}.rope.scaling.{key}"]
        if name == "gpt-oss":
            full["truncate"] = False
    if factors is not None:
        full |= _llama3(full, config, factors)
    if name != "gemma3":
        return full
    local = pairs.get(f"{name}.rope.freq_base_swa", 10000.0)
    window = {"rope_type": "default", "rope_theta": local}
    return {"full_attention": full, "sliding_attention": window}


def _llama3(full: Mapping[str, Any], config: Mapping[str, Any], factors: Tensor) -> dict[str, Any]:
    """Return the parameters of Llama 3 whose frequency factors are those of a file."""
    guess = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    made = frequency_factors({**config, "rope_parameters": {**full, **guess}})
    if made is not None and torch.allclose(made, factors, rtol=1e-6):
        return guess
    rule = "rope_freqs.weight holds the factors of Llama 3"
    fix = "Pass config=, the config.json of the model"
    fail("gguf", rule, factors.tolist()[:8], fix, UnsupportedError)
