"""``generate`` with a quantized cache: the attention on codes gives what decoded values give."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.utils import counters
from transformers_caches import IDS, MASK, MODELS, NEW, build, cache_of, config, generate
from transformers_models import transformers

import qtensor
from qtensor.integrations.transformers import QTensorCache, absorb_latent_attention, kv_scales
from qtensor.modules.input_hook import TRANSFORM, set_input_step
from qtensor.modules.input_transform import InputTransform

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

models = pytest.mark.parametrize("name", MODELS)
OWN = [name for name in MODELS if "absorbed" not in name]


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("formats", [("fp8_rowwise", None), ("mxfp8", "mxfp4"), ("nvfp4", None)])
def test_codes_and_values_agree(name, formats):
    """Attention over codes is torch's over the values that the same cache decodes."""
    model = build(name)
    cache, plain = (cache_of(name, model, *formats) for _ in range(2))
    tokens, logits = generate(model, cache)
    wanted, wanted_logits = generate(model, plain, "eager")
    assert torch.equal(tokens, wanted)
    torch.testing.assert_close(logits, wanted_logits, atol=2e-3, rtol=0)
    assert cache.get_seq_length() == IDS.shape[1] + NEW - 1


@pytest.mark.parametrize("name", [name for name in MODELS if name not in OWN])
@pytest.mark.parametrize("text", ["mxfp8", "mxfp4"])
def test_absorbed_latents_are_those_that_the_model_expands(name, text):
    """A cache that keeps latent and rotated key apart has the same blocks of codes."""
    model = build(name)
    tokens, logits = generate(model, cache_of(name, model, text))
    wanted, wanted_logits = generate(model, QTensorCache(model.config, text), "eager")
    assert torch.equal(tokens, wanted)
    torch.testing.assert_close(logits, wanted_logits, atol=2e-3, rtol=0)


@models
@pytest.mark.parametrize("residual", [0, 5])
def test_a_fixed_capacity_changes_no_bit(name, residual):
    """And a prompt whose tokens come one after the other changes none either."""
    model, options = build(name), {"residual": residual}
    if residual and name == "deepseek-v3":
        with pytest.raises(qtensor.UnsupportedError, match="with residual or absorbed"):
            generate(model, cache_of(name, model, **options))
        return
    tokens, logits = generate(model, cache_of(name, model, **options))
    static = cache_of(name, model, capacity=32, **options)
    again, same = generate(model, static)
    assert torch.equal(again, tokens)
    if "deepseek" in name:  # torch's products, whose sums depend on the capacity or rows
        torch.testing.assert_close(same, logits)
    else:
        assert torch.equal(same, logits)
    static.reset()
    assert torch.equal(generate(model, static)[1], same)


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "gemma3", "deepseek-v3 absorbed"])
def test_the_last_tokens_in_bfloat16(name):
    """With all tokens among them, the format does not matter; with some, it matters less."""
    model = build(name, torch.bfloat16)
    exact, whole, some, none = (
        generate(model, cache_of(name, model, text, residual=residual))[1].float()
        for text, residual in (("bfloat16", 0), ("mxfp4", 99), ("mxfp4", 7), ("mxfp4", 0))
    )
    assert torch.equal(whole, exact)
    errors = [(t[0] - exact[0]).norm() for t in (some, none)]
    assert 0 < errors[0] < errors[1]


@pytest.mark.nightly(reason="six seconds; test_generate_compiles_decoding_itself compiles a step")
@models
def test_compiled(name):
    """Two graphs, of the prompt and of a token, serve the whole text."""
    model = build(name)
    options = {"capacity": 32, "residual": 5 * ("gemma" in name or "absorbed" in name)}
    want, logits = generate(model, cache_of(name, model, **options))
    cache = cache_of(name, model, **options)
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
@pytest.mark.parametrize("capacity", [None, 32])
def test_beams(name, capacity):
    model = build(name)
    options = {"k_format": "mxfp8", "capacity": capacity}
    tokens = generate(model, cache_of(name, model, **options), num_beams=3)[0]
    wanted = generate(model, QTensorCache(model.config, "mxfp8"), "eager", num_beams=3)[0]
    assert torch.equal(tokens, wanted)


ASSISTED = [(name, 0) for name in MODELS]
ASSISTED += [(name, 5) for name in MODELS if name != "deepseek-v3"]


@pytest.mark.parametrize(("name", "residual"), ASSISTED)
def test_assisted_decoding(name, residual):
    """Tokens that the model refuses are cropped, also behind a window."""
    model = build(name)
    torch.manual_seed(3)
    assistant = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config(name))).eval()
    one = {"ids": IDS[:1], "mask": MASK[:1]}
    wanted = generate(model, cache_of(name, model, residual=residual), **one)[0]
    model.set_attn_implementation("qtensor")
    cache = cache_of(name, model, residual=residual)
    tokens = generate(model, cache, assistant_model=assistant, **one)[0]
    assert torch.equal(tokens, wanted)


@models
def test_padding_is_not_seen(name):
    """The padded sequence continues as it does alone."""
    model = build(name)
    padded = generate(model, cache_of(name, model))[0]
    alone = generate(model, cache_of(name, model), ids=IDS[1:, 4:], mask=MASK[1:, 4:])[0]
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
    with pytest.raises(qtensor.QTensorError, match="mxfp9"):
        QTensorCache(model.config, "mxfp9")
    with pytest.raises(qtensor.QTensorError, match="residual must be an integer"):
        QTensorCache(model.config, residual=2.5)


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek-v3 absorbed"])
@pytest.mark.parametrize("formats", [("nvfp4", None), ("fp8", "nvfp4"), ("mxfp8", "fp8")])
def test_a_calibrated_cache(name, formats):
    """The maxima of prompts in bfloat16 fix the global values; the first tokens no longer do."""
    if "absorbed" in name:
        formats = formats[:1]
    model = build(name, torch.bfloat16)
    plain = cache_of(name, model, "bfloat16")
    generate(model, plain)
    scales = plain.measured_scales(*formats)
    cache = cache_of(name, model, *formats, scales=scales)
    generate(model, cache, ids=IDS[:, :3], mask=MASK[:, :3])
    for index, layer in enumerate(cache.layers):
        state, measured = layer.cache.state_dict(), plain.layers[index].cache
        for side, text, rows in zip("kv", formats, (measured.keys, measured.values), strict=False):
            text = text or formats[0]
            if text == "mxfp8":
                assert scales[index][0] is None
            elif f"{side}_global" in state:
                want = rows.abs().max().float() / (448.0 if text == "fp8" else 1.0)
                torch.testing.assert_close(state[f"{side}_global"][0], want)


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "deepseek-v3 absorbed"])
def test_generate_compiles_decoding_itself(name):
    """As it does on a GPU: the prompt in eager mode, one graph for all tokens after it."""
    model = build(name)
    want, logits = generate(model, cache_of(name, model, capacity=32))
    cache, heads = cache_of(name, model, capacity=32), 1 if "deepseek" in name else 2
    cache.early_initialization(2, heads, 32, torch.float32, torch.device("cpu"))
    compile_config = transformers.CompileConfig(
        fullgraph=True, dynamic=False, backend="aot_eager", mode=None
    )
    compile_config._compile_all_devices = True  # generate compiles on a CPU only with this
    torch._dynamo.reset()
    counters.clear()
    got, again = generate(model, cache, compile_config=compile_config)
    assert counters["stats"]["unique_graphs"] == 1
    assert torch.equal(got, want)
    torch.testing.assert_close(again, logits)


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
    with pytest.raises(qtensor.UnsupportedError, match="has forgotten tokens"), torch.no_grad():
        sliding(long[:, :1], past_key_values=cache)


def test_what_transformers_refuses():
    """Names of caches are fixed, and continuous batching has a cache and attentions of its own."""
    model = build("llama")
    model.set_attn_implementation("qtensor")
    with pytest.raises(ValueError, match="Invalid `cache_implementation`"):
        model.generate(IDS, cache_implementation="fp8_rowwise")
    with pytest.raises(qtensor.UnsupportedError, match="reads a QTensorCache"):
        generate(model, None, cache_implementation="static")
    with pytest.raises(ValueError, match="qtensor is not supported for continuous batching"):
        model.generate_batch([[3, 4, 5]], max_new_tokens=2)


def test_what_absorbing_refuses():
    model = build("deepseek-v3")
    cache = QTensorCache(model.config, absorbed=True)
    with pytest.raises(qtensor.UnsupportedError, match=r"Call absorb_latent_attention\(model\)"):
        generate(model, cache)
    with pytest.raises(qtensor.UnsupportedError, match="residual or absorbed, needs its attention"):
        generate(model, QTensorCache(model.config, absorbed=True), "eager")
    with pytest.raises(qtensor.QTensorError, match="models with latent attention; got LlamaConfig"):
        QTensorCache(config("llama"), absorbed=True)
    with pytest.raises(qtensor.UnsupportedError, match="must have latent attention"):
        absorb_latent_attention(build("llama"))
    layer = model.model.layers[1].self_attn
    layer.kv_b_proj = torch.nn.Sequential(layer.kv_b_proj)
    with pytest.raises(qtensor.UnsupportedError, match="without bias or adapter; got Sequential"):
        absorb_latent_attention(model)
    assert "expand_kv" not in vars(model.model.layers[0].self_attn)


def test_a_quantized_projection_is_absorbed():
    model = build("deepseek-v3 absorbed")
    dense = copy.deepcopy(model)
    for layer, other in zip(model.model.layers, dense.model.layers, strict=True):
        weight = qtensor.quantize(layer.self_attn.kv_b_proj.weight.detach(), "mxfp8")
        layer.self_attn.kv_b_proj.weight = torch.nn.Parameter(weight, requires_grad=False)
        other.self_attn.kv_b_proj.weight.data = weight.dequantize()
    got, want = (generate(m, cache_of("absorbed", m, "mxfp8"))[1] for m in (model, dense))
    assert torch.equal(got, want)


def test_a_projection_that_transforms_its_inputs_is_absorbed():
    """Its weight was multiplied by latents that were neither scaled nor rotated."""
    model = build("deepseek-v3 absorbed")
    plain = copy.deepcopy(model)
    for layer in model.model.layers:
        projection = layer.self_attn.kv_b_proj
        scale = torch.linspace(0.5, 2, projection.in_features)
        transform = InputTransform(scale, 16)
        with torch.no_grad():
            projection.weight.copy_(transform.of_weight(projection.weight))
        set_input_step(projection, TRANSFORM, transform)
    got, want = (generate(m, cache_of("absorbed", m, "bfloat16"))[0] for m in (model, plain))
    assert torch.equal(got, want)
