"""Small random models of transformers that generate with a ``QTensorCache``."""

from __future__ import annotations

from typing import Any

import torch
from transformers_models import transformers

from qtensor.integrations.transformers import QTensorCache, absorb_latent_attention

COMMON = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
WINDOW = {"sliding_window": 8}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 32}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
"""Latent attention, and experts that need no groups."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"use_sliding_window": True, "max_window_layers": 1, **WINDOW}),
    "mistral": ("MistralConfig", WINDOW),
    "mixtral": ("MixtralConfig", MOE),
    "gpt-oss": (
        "GptOssConfig",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, **WINDOW, **MOE},
    ),
    "gemma2": ("Gemma2Config", {**WINDOW, **MIXED}),
    "gemma3": ("Gemma3TextConfig", {**WINDOW, **MIXED}),
    "llama4": (
        "Llama4TextConfig",
        {
            "intermediate_size_mlp": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 8,
            "layer_types": ["chunked_attention", "full_attention"],
        },
    ),
    "deepseek-v3": ("DeepseekV3Config", LATENT),
    "deepseek-v3 absorbed": ("DeepseekV3Config", LATENT),
    "deepseek-v2 absorbed": (
        "DeepseekV2Config",
        {**LATENT, "head_dim": 32, "topk_method": "greedy"},
    ),
}
IDS = torch.randint(2, 64, (2, 12), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
IDS[1, :4], MASK[1, :4] = 0, 0
"""The second sequence begins with padding; the prompts are longer than the windows."""
NEW = 10


def config(name):
    kind, own = MODELS[name]
    return getattr(transformers, kind)(**{**COMMON, **own})


def build(name, dtype=torch.float32):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config(name), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2)
    if "absorbed" in name:
        assert absorb_latent_attention(model) == 2
    return model.eval()


def cache_of(name, model, *formats, **options):
    """Return an empty cache for a model of ``build``."""
    return QTensorCache(model.config, *formats, absorbed="absorbed" in name, **options)


@torch.no_grad()
def generate(model, cache, attention="qtensor", ids=IDS, mask=MASK, **options):
    """Return the tokens, and the logits of each step."""
    model.set_attn_implementation(attention)
    out = model.generate(
        ids,
        attention_mask=mask,
        past_key_values=cache,
        max_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return out.sequences, torch.stack(out.logits)
