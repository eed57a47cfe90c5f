"""Small random models of transformers, for the tests of ``qtensor.integrations.transformers``."""

import pytest
import torch

transformers = pytest.importorskip(
    "transformers", reason="transformers (extra transformers) is not installed"
)

COMMON = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MOE = {"num_experts_per_tok": 2}


def config(name):
    """Return the config of a model; the sizes of experts differ from the hidden size or not."""
    kinds = {
        "llama": ("LlamaConfig", {"intermediate_size": 96, "tie_word_embeddings": False}),
        "llama-tied": ("LlamaConfig", {"intermediate_size": 96, "tie_word_embeddings": True}),
        "qwen3-moe": (
            "Qwen3MoeConfig",
            {"moe_intermediate_size": 32, "num_experts": 4, "head_dim": 16, **MOE},
        ),
        "mixtral": ("MixtralConfig", {"intermediate_size": 96, "num_local_experts": 4, **MOE}),
        # The experts of gpt-oss are square, so that their orientation does not follow from shapes.
        "gpt-oss": (
            "GptOssConfig",
            {
                "intermediate_size": 64,
                "num_local_experts": 4,
                "head_dim": 16,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
                **MOE,
            },
        ),
        "llama4": (
            "Llama4TextConfig",
            {
                "intermediate_size": 64,
                "intermediate_size_mlp": 96,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
                "head_dim": 16,
            },
        ),
    }
    kind, own = kinds[name]
    return getattr(transformers, kind)(**COMMON, **own)


NAMES = ["llama", "llama-tied", "qwen3-moe", "mixtral", "gpt-oss"]
WITH_EXPERTS = ["qwen3-moe", "mixtral", "gpt-oss"]
IDS = torch.tensor([[3, 14, 15, 9, 26, 5]])


def dense(name, folder):
    """Return a random bfloat16 model, and write it to ``folder``."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config(name), dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)  # the default of 0.02 makes all logits alike
    model.save_pretrained(folder)
    return model.eval()


def load(folder, *args, **kwargs):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, *args, **kwargs)


@torch.no_grad()
def logits(model):
    return model(IDS).logits
