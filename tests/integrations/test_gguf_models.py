"""Models of transformers as GGUF files and back: names, metadata, order of rows, weights."""

import json

import numpy as np
import pytest
import torch
from checkpoint_cases import assert_same_bytes, assert_same_values
from gguf_models import (
    ARCHITECTURES,
    FAMILIES,
    IDS,
    STACKED,
    load,
    logits,
    model,
    not_output,
    quantized,
    tokenizer,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import qtensor
from qtensor import QuantizedTensor, checkpoints
from qtensor.core.errors import UnsupportedError
from qtensor.integrations.gguf import open_gguf, save_gguf
from qtensor.integrations.gguf.families import FAMILIES as KNOWN
from qtensor.integrations.gguf.families import OUTER
from qtensor.integrations.gguf.metadata import frequency_factors, text_config
from qtensor.integrations.gguf.rows import pair_rows, take_rows
from qtensor.integrations.gguf.tokenizer import PATTERNS
from qtensor.integrations.transformers import QTensorConfig, weights

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed: pip install gguf")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def architecture(name):
    return ARCHITECTURES.get(name, name)


def decoded(path):
    """name -> float32 values as the package gguf decodes them, with the factors of NVFP4."""
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    found = {}
    for name, tensor in tensors.items():
        values = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type)))
        shape = [int(n) for n in tensor.shape[::-1]]
        factor = tensors.get(name.replace(".weight", ".scale"))
        values = values.float().reshape(shape)
        if factor is not None and factor is not tensor:
            factor = torch.from_numpy(np.array(factor.data)).reshape(-1)
            values = values * (factor if len(factor) == 1 else factor[:, None, None])
        found[name] = values
    return found


def values(tensor):
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor.float()


# ---- names


@pytest.mark.parametrize("family", KNOWN, ids=lambda f: f.model_types[0])
def test_names_are_those_of_the_package_gguf(family):
    kinds = {text: kind for kind, text in gguf.MODEL_ARCH_NAMES.items()}
    theirs = gguf.get_tensor_name_map(kinds[family.architecture], 3)
    ours = dict(OUTER)
    if family.needs.get("tie_word_embeddings"):
        del ours["lm_head"]
    ours |= {f"model.layers.2.{k}": f"blk.2.{v}" for k, v in family.block.items()}
    if family.experts is not None:
        module = f"model.layers.2.{family.experts.module}"
        names = family.experts.projections.items()
        ours |= {f"{module}.{key}": f"blk.2.{own}" for key, own in names}
    assert {key: theirs.get_name(key) for key in ours} == ours


def test_rows_that_are_neighbours_rotate_as_halves_do():
    """Rotating pairs (2 i, 2 i + 1) of the reordered rows is rotating (i, i + half) of the rows."""
    heads, half = 3, 4
    rows = pair_rows(heads * 2 * half, heads)
    x = torch.randn(heads * 2 * half, dtype=torch.float64)
    angle = torch.randn(half, dtype=torch.float64)

    def rotated(first, second):
        cos, sin = angle.cos(), angle.sin()
        return first * cos - second * sin, first * sin + second * cos

    one, other = rotated(*x.view(heads, 2, half).unbind(1))
    want = torch.stack((one, other), 1).flatten()
    one, other = rotated(*x[rows].view(heads, half, 2).unbind(2))
    assert torch.equal(torch.stack((one, other), 2).flatten(), want[rows])


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_rows_of_quantized_weights_keep_their_bytes(fmt):
    x = torch.randn(24, 64)
    rows = torch.randperm(24)
    q = qtensor.quantize(x, fmt)
    assert torch.equal(take_rows(q, rows).dequantize(), q.dequantize()[rows])
    assert_same_bytes(take_rows(take_rows(q, rows), rows.argsort()), q)


def test_frequency_factors_of_llama_3():
    """What transformers divides its frequencies by."""
    found = model("llama3-tied").config
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](found, "cpu")
    plain = 1 / 500000.0 ** (torch.arange(0, 64, 2) / 64)
    factors = frequency_factors(text_config(found.to_dict()))
    torch.testing.assert_close(plain / factors, frequencies, rtol=1e-6, atol=0)
    assert factors.unique().numel() > 1


# ---- whole models


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_goes_to_gguf_and_back(name, tmp_path):
    """The same logits, and what the package gguf reads are the tensors of the model."""
    made = model(name)
    assert save_gguf(made, tmp_path / "x.gguf") == {}
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    assert reader.fields["general.architecture"].contents() == architecture(name)
    with open_gguf(tmp_path / "x.gguf") as again:
        config = {**again.config, "model_type": made.config.model_type}
        state = weights(made)
        assert set(again) == set(state)
        for key, tensor in state.items():
            exact = "gemma" not in name or not key.endswith("norm.weight")
            got = again[key].float()
            # w + 1 is rounded to float32 once, and is below 2: half a unit is 2^-24.
            close = (got - tensor.float()).abs().max() <= 2**-24
            assert torch.equal(got, tensor.float()) if exact else close, key
        checkpoints.save(again, tmp_path / "back", layout="plain", config=config)
    back = load(tmp_path / "back", dtype=torch.bfloat16)
    assert torch.equal(logits(back), logits(made))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("fmt", "rounding"), [("nvfp4", "mse"), ("mxfp4", "gptq")])
def test_quantized_weights_keep_codes_and_factors(name, fmt, rounding, tmp_path):
    made = quantized(name, fmt, tmp_path / "dense", rounding)
    save_gguf(made, tmp_path / "x.gguf", accept_unscaled=True)
    theirs = decoded(tmp_path / "x.gguf")
    state = weights(made)
    with open_gguf(tmp_path / "x.gguf") as again:
        assert set(again) == set(state)
        stored = {key for key, t in state.items() if isinstance(t, QuantizedTensor)}
        assert len(stored) > 7
        for key in stored:
            assert again[key].quantizer.format == fmt
            assert torch.equal(values(again[key]), values(state[key])), key
    order = torch.arange(256).view(4, 2, -1).transpose(1, 2).flatten()
    pairs = architecture(name) == "llama"
    q = values(state["model.layers.1.self_attn.q_proj.weight"])
    assert torch.equal(theirs["blk.1.attn_q.weight"], q[order] if pairs else q)
    v = values(state["model.layers.1.self_attn.v_proj.weight"])
    assert torch.equal(theirs["blk.1.attn_v.weight"], v)
    experts = made.model.layers[1].mlp
    if name in STACKED:
        both = values(experts.experts.gate_up_proj.stored)
        gate, up = (both[:, ::2], both[:, 1::2]) if name == "gpt-oss" else both.chunk(2, 1)
        assert torch.equal(theirs["blk.1.ffn_gate_exps.weight"], gate)
        assert torch.equal(theirs["blk.1.ffn_up_exps.weight"], up)


def test_from_pretrained_of_transformers_refuses_our_config_for_gguf_files(tmp_path):
    """It decodes the weights itself. ``open_gguf`` and a folder of ours keep them quantized."""
    made = quantized("llama", "mxfp4", tmp_path / "dense")
    save_gguf(made, tmp_path / "x.gguf")
    with pytest.raises(ValueError, match="You cannot combine"):
        load(tmp_path, gguf_file="x.gguf", quantization_config=QTensorConfig())
    with open_gguf(tmp_path / "x.gguf") as found:
        checkpoints.save(found, tmp_path / "folder", config=found.config)
    again = load(tmp_path / "folder")
    assert again.model.layers[1].mlp.up_proj.weight.quantizer.format == "mxfp4"
    assert torch.equal(logits(again), logits(made))


@pytest.mark.parametrize("rounding", ["mse", "gptq"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_experts_that_quantize_chose_factors_for(name, rounding, tmp_path):
    """A stack with a factor for each expert; gate and up share one before they are parted."""
    made = model(name, torch.float32)
    batches = [IDS] if rounding == "gptq" else None
    qtensor.quantize_(
        made, "nvfp4", lambda _, key: "experts" in key, rounding=rounding, calibration=batches
    )
    both = values(made.model.layers[1].mlp.experts.gate_up_proj.detach())
    save_gguf(made, tmp_path / "x.gguf")
    theirs = decoded(tmp_path / "x.gguf")
    gate, up = both.chunk(2, 1)
    assert torch.equal(theirs["blk.1.ffn_gate_exps.weight"], gate)
    assert torch.equal(theirs["blk.1.ffn_up_exps.weight"], up)
    again = load_back(tmp_path / "x.gguf", tmp_path / "back")
    torch.testing.assert_close(logits(again), logits(made), rtol=1e-5, atol=1e-5)


TRANSFORMERS_READS = ["llama", "qwen2", "qwen3", "gemma2"]
"""transformers leaves out other entries of the metadata, such as the size of heads of these."""


@pytest.mark.parametrize("name", TRANSFORMERS_READS)
@pytest.mark.parametrize("fmt", ["mxfp4", None])
def test_transformers_reads_the_file(name, fmt, tmp_path):
    """``from_pretrained(gguf_file=)`` decodes to the same logits; it has no factor of NVFP4."""
    made = quantized(name, fmt, tmp_path) if fmt else model(name, torch.float32)
    save_gguf(made, tmp_path / "x.gguf")
    theirs = load(tmp_path, gguf_file="x.gguf", dtype=torch.float32)
    want = logits(dense(made))
    if name == "gemma2":  # norms are w + 1 - 1
        torch.testing.assert_close(logits(theirs), want, rtol=0, atol=2e-3)
    else:
        assert torch.equal(logits(theirs), want)


def dense(made):
    """The same model with plain weights: products of quantized ones sum in another order."""
    for module in made.modules():
        for key, parameter in dict(module._parameters).items():
            if isinstance(parameter, QuantizedTensor):
                plain = torch.nn.Parameter(parameter.detach().dequantize(), requires_grad=False)
                module._parameters[key] = plain
    return made


# ---- folders


def test_a_mixed_folder(tmp_path):
    """NVFP4 weights move; FP8 ones are decoded as ModelOpt does, if the caller says so."""
    made = model("qwen3")
    formats = {"*self_attn*": "fp8", "*mlp*": "nvfp4"}
    qtensor.quantize_(made, formats, not_output)
    state, config = weights(made), made.config.to_dict()
    for layout in ("modelopt", "compressed-tensors"):
        folder = tmp_path / layout
        checkpoints.save(state, folder, layout=layout, config=config)
        with pytest.raises(UnsupportedError, match=r"decode=torch\.bfloat16"):
            save_gguf(folder, tmp_path / "none.gguf")
        assert not (tmp_path / "none.gguf").exists()
        save_gguf(folder, tmp_path / f"{layout}.gguf", decode=torch.bfloat16)
        theirs = decoded(tmp_path / f"{layout}.gguf")
        with (
            checkpoints.open(folder) as checkpoint,
            open_gguf(tmp_path / f"{layout}.gguf") as again,
        ):
            key = "model.layers.0.mlp.up_proj.weight"
            own = checkpoint[key].to(torch.float32)
            assert_same_bytes(again[key], own)
            assert torch.equal(theirs["blk.0.ffn_up.weight"], own.dequantize())
            key = "model.layers.0.self_attn.q_proj.weight"
            want = checkpoint.dense(key, torch.bfloat16)
            assert_same_bytes(again[key], want)
            assert torch.equal(theirs["blk.0.attn_q.weight"], want.float())


def test_experts_of_a_folder(tmp_path):
    """A folder stores every expert apart, and a file one stack with a factor for each expert."""
    made = quantized("qwen3-moe", "nvfp4", tmp_path / "dense")
    made.save_pretrained(tmp_path / "folder")
    save_gguf(tmp_path / "folder", tmp_path / "x.gguf")
    with checkpoints.open(tmp_path / "folder") as folder, open_gguf(tmp_path / "x.gguf") as again:
        assert set(folder) == set(again)
        for key in folder:
            assert_same_values(values(again[key]), values(folder[key]).float())
    again = load_back(tmp_path / "x.gguf", tmp_path / "back")
    assert torch.equal(logits(again), logits(made))


def test_factors_of_activations(tmp_path):
    """``input_scale`` of ModelOpt stays beside its weight; factors of a KV cache are left out."""
    made = quantized("qwen3-moe", "nvfp4", tmp_path / "dense")
    state = dict(weights(made))
    extra = {"self_attn.q_proj.input_scale": 0.5, "self_attn.k_proj.k_scale": 2.0}
    extra |= {f"mlp.experts.{e}.up_proj.input_scale": e + 0.25 for e in range(4)}
    for name, value in extra.items():
        state[f"model.layers.0.{name}"] = torch.tensor(value)
    left_out = save_gguf(state, tmp_path / "x.gguf", made.config)
    assert list(left_out) == ["model.layers.0.self_attn.k_proj.k_scale"]
    theirs = decoded(tmp_path / "x.gguf")
    assert theirs["blk.0.attn_q.input_scale"].tolist() == [0.5]
    assert theirs["blk.0.ffn_up_exps.input_scale"].tolist() == [0.25, 1.25, 2.25, 3.25]
    with open_gguf(tmp_path / "x.gguf") as again:
        assert again["model.layers.0.self_attn.q_proj.input_scale"].item() == 0.5
        assert again["model.layers.0.mlp.experts.2.up_proj.input_scale"].item() == 2.25


def load_back(path, folder):
    with open_gguf(path) as found:
        checkpoints.save(found, folder, config=found.config)
    return load(folder, dtype=torch.float32)


def test_integer_types_load_and_are_quantized_again(tmp_path):
    """A Q8_0 file, written by the package gguf: plain values in transformers, then NVFP4."""
    save_gguf(model("qwen3", torch.float32), tmp_path / "plain.gguf")
    source = gguf.GGUFReader(tmp_path / "plain.gguf")
    writer = gguf.GGUFWriter(tmp_path / "q8.gguf", "qwen3")
    for field in source.fields.values():
        if field.name.startswith("qwen3."):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    kind = gguf.GGMLQuantizationType.Q8_0
    for tensor in source.tensors:
        data = np.array(tensor.data)
        if tensor.name.startswith("blk.") and data.ndim == 2:
            writer.add_tensor(tensor.name, gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    again = load_back(tmp_path / "q8.gguf", tmp_path / "back")
    theirs = load(tmp_path, gguf_file="q8.gguf", dtype=torch.float32)
    assert torch.equal(logits(again), logits(theirs))
    with open_gguf(tmp_path / "q8.gguf") as found:
        key = "model.layers.0.mlp.up_proj.weight"
        assert_same_bytes(
            qtensor.quantize(found[key], "nvfp4"),
            qtensor.quantize(decoded(tmp_path / "q8.gguf")["blk.0.ffn_up.weight"], "nvfp4"),
        )
    qtensor.quantize_(again, "nvfp4", not_output)
    assert logits(again).isfinite().all()


def test_a_language_model_with_another_part(tmp_path):
    """Names of a model with a vision part, whose tensors are left out and named."""
    made = model("gemma3")
    state = {}
    for key, tensor in weights(made).items():
        state[key.replace("model.", "model.language_model.", 1)] = tensor
    state["model.vision_tower.patch.weight"] = torch.ones(2, 2)
    config = {"model_type": "gemma3", "text_config": made.config.to_dict()}
    left_out = save_gguf(state, tmp_path / "x.gguf", config)
    assert left_out == {"model.vision_tower.patch.weight": "it is not a part of the language model"}
    save_gguf(made, tmp_path / "y.gguf")
    assert (tmp_path / "x.gguf").read_bytes() == (tmp_path / "y.gguf").read_bytes()


def test_configs_of_older_versions(tmp_path):
    """``rope_theta`` and ``rope_scaling`` mean the same as ``rope_parameters``."""
    made = model("llama3-tied")
    state, config = weights(made), made.config.to_dict()
    save_gguf(state, tmp_path / "x.gguf", config)
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    save_gguf(state, tmp_path / "y.gguf", json.loads(json.dumps(config)))
    assert (tmp_path / "x.gguf").read_bytes() == (tmp_path / "y.gguf").read_bytes()


def test_the_scale_of_attention_of_the_largest_gemma(tmp_path):
    """llama.cpp knows Gemma 2 of 27B by its 46 layers; no key holds the scale."""
    sizes = {"num_hidden_layers": 46, "hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    made = model("gemma2", **sizes, query_pre_attn_scalar=16)
    save_gguf(made, tmp_path / "x.gguf")
    with open_gguf(tmp_path / "x.gguf") as again:
        assert again.config["query_pre_attn_scalar"] == 16
    with pytest.raises(UnsupportedError, match="query_pre_attn_scalar = 16"):
        save_gguf(model("gemma2", **sizes, query_pre_attn_scalar=32), tmp_path / "y.gguf")


def test_a_window_that_llama_cpp_does_not_have(tmp_path):
    made = model("mixtral", sliding_window=16)
    assert list(save_gguf(made, tmp_path / "x.gguf")) == ["config.json: sliding_window"]


def test_the_tokenizer_of_another_file(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "vocab.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_gguf(model("llama"), tmp_path / "x.gguf", metadata=tmp_path / "vocab.gguf")
    fields = gguf.GGUFReader(tmp_path / "x.gguf").fields
    assert fields["tokenizer.ggml.model"].contents() == "gpt2"
    assert fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    empty = tmp_path / "empty.gguf"
    checkpoints.save({"a": torch.ones(1)}, empty, layout="gguf")
    with pytest.raises(qtensor.QTensorError, match="the file has a tokenizer"):
        save_gguf(model("llama"), tmp_path / "z.gguf", metadata=empty)


@pytest.mark.parametrize("pattern", PATTERNS, ids=PATTERNS.values())
def test_a_tokenizer_of_a_folder(pattern, tmp_path):
    """Tokens, kinds, merges and the template; the package gguf reads the same merges."""
    made = tokenizer(tmp_path / "tok", pattern)
    save_gguf(model("llama", vocab_size=320), tmp_path / "x.gguf", metadata=tmp_path / "tok")
    fields = gguf.GGUFReader(tmp_path / "x.gguf").fields
    found = {key: fields[f"tokenizer.{key}"].contents() for key in ("ggml.tokens", "ggml.merges")}
    vocabulary = made.get_vocab()
    assert all(found["ggml.tokens"][number] == text for text, number in vocabulary.items())
    assert found["ggml.tokens"][319] == "[PAD319]"
    theirs = gguf.SpecialVocab(tmp_path / "tok", load_merges=True)
    assert found["ggml.merges"] == theirs.merges
    assert fields["tokenizer.ggml.token_type"].types[-1] == gguf.GGUFValueType.INT32
    kinds = fields["tokenizer.ggml.token_type"].contents()
    assert (kinds[0], kinds[5], kinds[319]) == (3, 1, 5)
    assert fields["tokenizer.ggml.pre"].contents() == PATTERNS[pattern]
    assert fields["tokenizer.chat_template"].contents() == theirs.chat_template
    assert not fields["tokenizer.ggml.add_bos_token"].contents()


def test_a_tokenizer_that_llama_cpp_has_no_name_for(tmp_path):
    tokenizer(tmp_path / "tok", r"\s+|\w+")
    with pytest.raises(UnsupportedError, match="byte-level BPE"):
        save_gguf(model("llama", vocab_size=320), tmp_path / "x.gguf", metadata=tmp_path / "tok")
    tokenizer(tmp_path / "tok", next(iter(PATTERNS)))
    with pytest.raises(UnsupportedError, match="at most 96 tokens"):
        save_gguf(model("llama"), tmp_path / "x.gguf", metadata=tmp_path / "tok")


# ---- refusals


REFUSED = [
    ("llama", {"model_type": "bert"}, "model_type of llama"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act = 'silu'"),
    ("qwen3-moe", {"norm_topk_prob": False}, "norm_topk_prob = True"),
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window = False"),
    ("gemma2", {"query_pre_attn_scalar": 100}, "query_pre_attn_scalar = 256"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "linear, yarn"),
]


@pytest.mark.parametrize(("name", "entry", "message"), REFUSED)
def test_what_llama_cpp_computes_otherwise(name, entry, message, tmp_path):
    made = model(name)
    config = {**made.config.to_dict(), **entry}
    with pytest.raises(UnsupportedError, match=message):
        save_gguf(made, tmp_path / "x.gguf", config)


def test_tensors_without_a_place(tmp_path):
    made = model("llama")
    state = {**weights(made), "model.layers.0.mlp.extra.weight": torch.ones(2)}
    with pytest.raises(UnsupportedError, match=r"got model\.layers\.0\.mlp\.extra\.weight"):
        save_gguf(state, tmp_path / "x.gguf", made.config)
    save_gguf(made, tmp_path / "x.gguf")
    with checkpoints.open(tmp_path / "x.gguf") as found:
        pairs = found.source.extra["key_values"]
        wrong = {**found, "blk.0.extra.weight": torch.ones(2)}
        checkpoints.save(wrong, tmp_path / "y.gguf", layout="gguf", config=pairs)
    with pytest.raises(UnsupportedError, match=r"got blk\.0\.extra\.weight"):
        open_gguf(tmp_path / "y.gguf")
    checkpoints.save({"a": torch.ones(1)}, tmp_path / "z.gguf", layout="gguf")
    with pytest.raises(UnsupportedError, match=r"general\.architecture"):
        open_gguf(tmp_path / "z.gguf")


def test_tensors_that_are_missing(tmp_path):
    """A lost shard is named instead of a file that llama.cpp refuses."""
    made = model("llama")
    state = weights(made)
    del state["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(UnsupportedError, match=r"no blk\.1\.ffn_up\.weight"):
        save_gguf(state, tmp_path / "x.gguf", made.config)
    made = model("mixtral")
    state = weights(made)
    del state["model.layers.0.block_sparse_moe.experts.1.w2.weight"]
    with pytest.raises(UnsupportedError, match=r"none for \[1\]"):
        save_gguf(state, tmp_path / "x.gguf", made.config)
    save_gguf(model("llama"), tmp_path / "x.gguf")
    with checkpoints.open(tmp_path / "x.gguf") as found:
        pairs = found.source.extra["key_values"]
        part = {key: found[key] for key in found if "output_norm" not in key}
        checkpoints.save(part, tmp_path / "y.gguf", layout="gguf", config=pairs)
    with pytest.raises(UnsupportedError, match=r"no output_norm\.weight"):
        open_gguf(tmp_path / "y.gguf")


def test_factors_that_llama_cpp_forgets(tmp_path):
    """Its graphs of these families do not multiply by the factors of feed-forward layers."""
    made = quantized("gemma2", "nvfp4", tmp_path)
    with pytest.raises(UnsupportedError, match="accept_unscaled"):
        save_gguf(made, tmp_path / "x.gguf")
    attention = model("gemma2")
    qtensor.quantize_(attention, "nvfp4", lambda _, key: "self_attn" in key)
    save_gguf(attention, tmp_path / "x.gguf")


def test_what_is_no_model_of_transformers_is_refused(tmp_path):
    with pytest.raises(qtensor.QTensorError, match="Pass config="):
        save_gguf({"a": torch.ones(1)}, tmp_path / "x.gguf")
    with pytest.raises(qtensor.QTensorError, match="is one of transformers; got Linear"):
        save_gguf(torch.nn.Linear(2, 2), tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()
