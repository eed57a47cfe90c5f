"""``generate`` with a quantized cache: the attention on codes gives what decoded values give."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.utils import counters
from transformers_models import transformers

import qtensor
from qtensor.integrations.transformers import QTensorCache, kv_scales

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

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
MODELS = {
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
    "deepseek-v3": (
        "DeepseekV3Config",
        {
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
        },
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
    return model.eval()


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


models = pytest.mark.parametrize("name", MODELS)


@models
@pytest.mark.parametrize("formats", [("fp8_rowwise", None), ("mxfp8", "mxfp4"), ("nvfp4", None)])
def test_codes_and_values_agree(name, formats):
    """Attention over codes is torch's over the values that the same cache decodes."""
    model = build(name)
    cache, plain = (QTensorCache(model.config, *formats) for _ in range(2))
    tokens, logits = generate(model, cache)
    wanted, wanted_logits = generate(model, plain, "eager")
    assert torch.equal(tokens, wanted)
    torch.testing.assert_close(logits, wanted_logits, atol=2e-3, rtol=0)
    assert cache.get_seq_length() == IDS.shape[1] + NEW - 1


@models
def test_a_fixed_capacity_changes_no_bit(name):
    model = build(name)
    tokens, logits = generate(model, QTensorCache(model.config))
    static = QTensorCache(model.config, capacity=32)
    again, same = generate(model, static)
    assert torch.equal(again, tokens)
    if name == "deepseek-v3":  # torch's attention, whose sums depend on the capacity
        torch.testing.assert_close(same, logits)
    else:
        assert torch.equal(same, logits)
    static.reset()
    assert torch.equal(generate(model, static)[1], same)


@models
def test_compiled(name):
    """Two graphs, of the prompt and of a token, serve the whole text."""
    model = build(name)
    want, logits = generate(model, QTensorCache(model.config, capacity=32))
    cache = QTensorCache(model.config, capacity=32)
    heads = 1 if "deepseek" in name else 2
    cache.early_initialization(2, heads, 32, torch.float32, torch.device("cpu"))
    plain = model.forward
    torch._dynamo.reset()
    counters.clear()
    model.forward = torch.compile(plain, fullgraph=True, backend="aot_eager")
    try:
        tokens, got = generate(model, cache)
    finally:
        model.forward = plain
    assert counters["stats"]["unique_graphs"] == 2
    assert torch.equal(tokens, want)
    torch.testing.assert_close(got, logits)


@models
def test_beams(name):
    model = build(name)
    tokens = generate(model, QTensorCache(model.config), num_beams=3)[0]
    wanted = generate(model, QTensorCache(model.config), "eager", num_beams=3)[0]
    assert torch.equal(tokens, wanted)


@models
def test_assisted_decoding(name):
    """Tokens that the model refuses are cropped, also behind a window."""
    model = build(name)
    torch.manual_seed(3)
    assistant = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config(name))).eval()
    one = {"ids": IDS[:1], "mask": MASK[:1]}
    wanted = generate(model, QTensorCache(model.config), **one)[0]
    model.set_attn_implementation("qtensor")
    tokens = generate(model, QTensorCache(model.config), assistant_model=assistant, **one)[0]
    assert torch.equal(tokens, wanted)


def test_padding_is_not_seen():
    """The padded sequence continues as it does alone."""
    model = build("gpt-oss")
    padded = generate(model, QTensorCache(model.config))[0]
    alone = generate(model, QTensorCache(model.config), ids=IDS[1:, 4:], mask=MASK[1:, 4:])[0]
    assert torch.equal(padded[1, 4:], alone[0])


def test_a_sliding_layer_forgets():
    model = build("gemma3")
    long = torch.randint(2, 64, (1, 100))
    cache = QTensorCache(model.config, capacity=512)
    generate(model, cache, ids=long, mask=torch.ones_like(long))
    sliding, full = (layer.cache for layer in cache.layers)
    assert sliding.keys.shape[0] * sliding.keys.shape[2] < 256 < full.keys.shape[2]
    assert cache.nbytes == sliding.nbytes + full.nbytes


@pytest.mark.parametrize(
    ("text", "share"),
    [("fp8_rowwise", 0.52), ("mxfp8", 0.52), ("mxfp4", 0.27), ("nvfp4", 0.28), ("bfloat16", 1)],
)
@pytest.mark.parametrize("capacity", [None, 1024])
def test_bytes_beside_those_of_transformers(text, share, capacity):
    """The heads of an 8B Llama: bytes of 1024 tokens, relative to a cache in bfloat16."""
    own = transformers.LlamaConfig(num_hidden_layers=4, num_key_value_heads=8, head_dim=128)
    theirs, cache = (
        transformers.DynamicCache(config=own),
        QTensorCache(own, text, capacity=capacity),
    )
    rows = torch.randn(1, 8, 1024, 128).bfloat16()
    for layer in range(4):
        theirs.update(rows, rows, layer)
        cache.update(rows, rows, layer)  # Not our attention: the layer appends.
    assert cache.get_seq_length() == theirs.get_seq_length() == 1024
    total = sum(layer.keys.nbytes + layer.values.nbytes for layer in theirs.layers)
    assert total == 4 * 2 * 8 * 1024 * 128 * 2
    assert cache.nbytes / total == pytest.approx(share, abs=0.005)


def test_keys_without_the_mean_of_the_prompt():
    model = build("gpt-oss")
    exact = generate(model, QTensorCache(model.config, "float32"))[1]
    got = generate(model, QTensorCache(model.config, "float32", k_mean="first"))[1]
    torch.testing.assert_close(got, exact, atol=1e-4, rtol=0)


def test_factors_of_a_checkpoint(tmp_path):
    model = build("llama")
    factors = {f"model.layers.{i}.self_attn.{n}_scale": 0.01 + i for i in (0, 1) for n in "kv"}
    state = {key: torch.tensor([value]) for key, value in factors.items()}
    qtensor.checkpoints.save({**state, "weight": torch.ones(2, 2)}, tmp_path / "scales.safetensors")
    scales = kv_scales(tmp_path / "scales.safetensors")
    assert [float(t) for i in (0, 1) for t in scales[i]] == pytest.approx([0.01, 0.01, 1.01, 1.01])
    cache = QTensorCache(model.config, "fp8", scales=scales)
    generate(model, cache)
    for i, layer in enumerate(cache.layers):
        assert torch.equal(layer.cache.state_dict()["k_global"], scales[i][0])
    with pytest.raises(qtensor.QTensorError, match="none for layer 1"):
        QTensorCache(model.config, "fp8", scales={0: scales[0]})


def test_without_a_cache():
    model = build("llama")
    outputs = []
    for attention in ("qtensor", "eager"):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            outputs.append(model(IDS, attention_mask=MASK, use_cache=False).logits[MASK > 0])
    torch.testing.assert_close(*outputs, atol=1e-4, rtol=0)


def test_refusals():
    model = build("llama")
    with pytest.raises(qtensor.UnsupportedError, match="reads a QTensorCache"):
        generate(model, transformers.DynamicCache())
    with pytest.raises(qtensor.UnsupportedError, match="requires grad"):
        model(IDS)
    sliding = build("mistral")
    cache = QTensorCache(sliding.config)
    long = torch.randint(2, 64, (1, 400))
    generate(sliding, cache, ids=long, mask=torch.ones_like(long))
    sliding.set_attn_implementation("eager")
    with pytest.raises(qtensor.UnsupportedError, match="have forgotten tokens"), torch.no_grad():
        sliding(long[:, :1], past_key_values=cache)
