"""Small random models of the families that GGUF files hold, for ``qtensor.integrations.gguf``."""

import copy
import json

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers_models import transformers

import qtensor
from qtensor.integrations.transformers import QTensorConfig

SIZES = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "llama3-tied": (
        "LlamaConfig",
        {
            "rope_parameters": LLAMA3,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral": ("MixtralConfig", EXPERTS),
    "qwen2": ("Qwen2Config", {"head_dim": 32}),
    "qwen3": ("Qwen3Config", {"head_dim": 128}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {**EXPERTS, "moe_intermediate_size": 64, "norm_topk_prob": True},
    ),
    "gemma": ("GemmaConfig", {}),
    "gemma2": ("Gemma2Config", {"head_dim": 256, "query_pre_attn_scalar": 256}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "query_pre_attn_scalar": 64,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "gpt-oss": (
        "GptOssConfig",
        {**EXPERTS, "max_position_embeddings": 131072},
    ),
}
"""Name -> class of the config, and its entries besides ``SIZES``."""
IDS = torch.tensor([list(range(3, 27))])
ARCHITECTURES = {"llama3-tied": "llama", "mixtral": "llama", "qwen3-moe": "qwen3moe"}
"""Name -> ``general.architecture``, where it is another word."""
STACKED = ("mixtral", "qwen3-moe", "gpt-oss")


def config(name, **own):
    kind, entries = FAMILIES[name]
    entries = {**SIZES, **copy.deepcopy(entries), **own}
    if name == "gpt-oss":
        entries["rope_parameters"] = {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
            "rope_theta": 150000.0,
        }
    return getattr(transformers, kind)(**entries)


def model(name, dtype=torch.bfloat16, **own):
    """A model with random weights; norms, biases and sinks too."""
    torch.manual_seed(len(name))
    made = transformers.AutoModelForCausalLM.from_config(config(name, **own), dtype=dtype).eval()
    near_one = "gemma" not in name
    with torch.no_grad():
        for key, parameter in made.named_parameters():
            parameter.normal_(std=0.05 if parameter.ndim > 1 else 0.1)
            if near_one and "norm" in key:
                parameter.add_(1)
    return made


def quantized(name, fmt, folder, rounding="mse", dtype=torch.float32):
    """A model whose weights are quantized: experts while it loads, others by ``quantize_``."""
    made = model(name, dtype)
    if name in STACKED:
        made.save_pretrained(folder)
        load = transformers.AutoModelForCausalLM.from_pretrained
        return load(folder, quantization_config=QTensorConfig(fmt), dtype=dtype).eval()
    batches = [IDS] if "gptq" in rounding else None
    qtensor.quantize_(made, fmt, not_output, rounding=rounding, calibration=batches)
    return made


def not_output(_, name):
    return "lm_head" not in name


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def load(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


TEXTS = ["The quick brown fox", "it's 12345 tokens!", "Ünïcode\n\n  and   spaces", "HELLOworld/x"]


def tokenizer(folder, pattern, size=320):
    """Train a byte-level BPE tokenizer on ``TEXTS`` and save it; two tokens are special."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - 10,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(TEXTS * 3, trainer)
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {"add_bos_token": False, "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return made
