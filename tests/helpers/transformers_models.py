"""Small random models of transformers, for the tests of ``qtensor.integrations.transformers``."""

import pytest
import torch

from qtensor import QuantizedTensor

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
            if not parameter.any():
                parameter.normal_()  # biases begin as zeros, and a lost one would not be seen
            elif parameter.ndim > 1:
                parameter.mul_(4)  # the default of 0.02 makes all logits alike
    model.save_pretrained(folder)
    return model.eval()


def load(folder, *args, **kwargs):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, *args, **kwargs)


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def frozen(model):
    """Return the values of the quantized parameters of a model by name."""
    from qtensor.integrations.experts import ExpertWeights  # noqa: PLC0415 - needs transformers

    return {
        name: parameter.dequantize().clone()
        for name, parameter in model.named_parameters()
        if isinstance(parameter, (QuantizedTensor, ExpertWeights))
    }


def need(name):
    """Import a module, or skip the test."""
    return pytest.importorskip(name, reason=f"{name} is not installed; pip install {name}")


class Texts(torch.utils.data.Dataset):
    """Eight random texts, which are their own labels."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        tokens = torch.randint(3, 64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def trainer(model, folder, steps, **options):
    """Return a ``Trainer`` with the optimizer that it takes by default, fused AdamW."""
    need("accelerate")
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        save_steps=2,
        logging_steps=1,
        disable_tqdm=True,
        **options,
    )
    assert "fused" in arguments.optim
    return transformers.Trainer(model, arguments, train_dataset=Texts())
