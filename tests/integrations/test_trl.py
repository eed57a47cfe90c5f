"""``SFTTrainer`` of trl over stored quantized weights: what is not quantized is trained."""

import pytest
import torch
from transformers_models import dense, frozen, load, logits, transformers

import qtensor
from qtensor.integrations.transformers import QTensorConfig

trl = pytest.importorskip("trl", reason="trl (extra dev) is not installed")
datasets = pytest.importorskip("datasets", reason="trl needs the package datasets")
peft = pytest.importorskip("peft", reason="peft (extra dev) is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="transformers needs the package tokenizers")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # theirs, not ours
    pytest.mark.nightly(reason="imports trl and trains; Trainer in test_transformers_clients.py"),
]


def tokenizer():
    words = dict.fromkeys(["<pad>", "<s>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"])
    numbers = {word: number for number, word in enumerate(words)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, **names)


def trained(model, folder, steps=3, lora=None, resume=False, **options):
    arguments = trl.SFTConfig(
        str(folder),
        max_steps=steps,
        save_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    texts = ["a b c d e f g", "h i j k l m n o", "p q r s", "t u v w x y z"] * 2
    trainer = trl.SFTTrainer(
        model,
        arguments,
        train_dataset=datasets.Dataset.from_dict({"text": texts}),
        processing_class=tokenizer(),
        peft_config=lora,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model


@pytest.fixture
def make(tmp_path):
    """Return a function that loads a quantized model."""
    dense("llama", tmp_path / "dense")

    def model(fmt):
        return load(tmp_path / "dense", quantization_config=QTensorConfig(fmt))

    return model


@pytest.mark.parametrize("fmt", ["fp8", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("options", [{}, {"packing": True, "max_length": 16}], ids=["", "packed"])
def test_what_is_not_quantized_is_trained(fmt, options, make, tmp_path):
    """Codes stay, embeddings change, and the run goes on from a checkpoint."""
    model = make(fmt)
    before, embeddings = frozen(model), model.model.embed_tokens.weight.detach().clone()
    model = trained(model, tmp_path / "run", **options)
    after = frozen(model)
    assert after.keys() == before.keys()
    assert all(map(torch.equal, after.values(), before.values()))
    assert not torch.equal(model.model.embed_tokens.weight, embeddings)
    resumed = trained(make(fmt), tmp_path / "run", 4, resume=True, **options)
    assert all(map(torch.equal, frozen(resumed).values(), before.values()))
    saved = load(tmp_path / "run" / "checkpoint-4")
    assert torch.equal(logits(saved), logits(resumed.eval()))


@pytest.mark.parametrize("fmt", ["fp8", "mxfp8", "nvfp4"])
def test_adapters_are_trained(fmt, make, tmp_path):
    model = make(fmt)
    before = frozen(model)
    lora = peft.LoraConfig(r=4, target_modules="all-linear")
    adapted = trained(model, tmp_path / "run", lora=lora)
    assert all(map(torch.equal, frozen(adapted).values(), before.values()))
    changed = [p for name, p in adapted.named_parameters() if "lora_B" in name]
    assert len(changed) == len(before)
    assert all(p.abs().max() > 0 for p in changed)


@pytest.mark.parametrize("fmt", ["fp8", "mxfp8", "nvfp4"])
def test_a_quantized_output_layer(fmt, tmp_path):
    """trl computes its loss from blocks of rows of the output layer's weight."""
    dense("llama", tmp_path / "dense")
    formats = QTensorConfig({"*_proj": fmt, "lm_head": fmt})
    model = load(tmp_path / "dense", quantization_config=formats)
    assert isinstance(model.lm_head.weight, qtensor.QuantizedTensor)
    before, embeddings = frozen(model), model.model.embed_tokens.weight.detach().clone()
    model = trained(model, tmp_path / "run")
    assert all(map(torch.equal, frozen(model).values(), before.values()))
    assert not torch.equal(model.model.embed_tokens.weight, embeddings)
