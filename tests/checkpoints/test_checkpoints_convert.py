"""``checkpoints.convert`` and ``dequantize``: what is moved, what is quantized, what is said."""

import json
import math

import pytest
import torch
from checkpoint_cases import (
    EXAMPLES,
    READ,
    assert_same_bytes,
    assert_same_values,
    stored_bytes,
    weight,
)

import qtensor
from qtensor import checkpoints
from qtensor.checkpoints import CheckpointError
from qtensor.checkpoints.checkpoint import open_with_factors
from qtensor.checkpoints.conversion import rows

CONFIG = {"model_type": "llama", "dtype": "bfloat16", "tie_word_embeddings": True}
CT, FINE = "compressed-tensors", "fine-grained-fp8"


def model(**more):
    """Plain tensors of a small model, matrices of several parts' rows among them."""
    generator = torch.Generator().manual_seed(0)

    def matrix(rows, cols):
        return torch.randn(rows, cols, generator=generator).bfloat16()

    return {
        "model.embed_tokens.weight": matrix(64, 128),
        "model.layers.0.mlp.up_proj.weight": matrix(300, 256),
        "model.layers.0.mlp.up_proj.bias": torch.randn(300, generator=generator),
        "model.layers.0.mlp.down_proj.weight": matrix(48, 320),
        "model.norm.weight": torch.ones(128),
        **more,
    }


UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def source(tmp_path):
    """A plain checkpoint, a folder with a tokenizer."""
    path = tmp_path / "source"
    checkpoints.save(model(), path, layout="plain", config=CONFIG)
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.fixture
def small_parts(monkeypatch):
    """Parts of 128 rows, so that small tensors have several."""
    monkeypatch.setattr(rows, "PART", 1)


# ---- from plain tensors


FORMATS = (
    "fp8",
    "fp8_rowwise",
    "fp8_blockwise",
    "fp8_blockwise(block_scaling_dim=2)",
    "mxfp8",
    "mxfp8(swizzled=True)",
    "mxfp8(columnwise=True)",
    "mxfp6(packed=True)",
    "mxfp4",
    "nvfp4",
    "nvfp4(row_scaled=True)",
    "nvfp4(swizzled=True)",
)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("fmt", FORMATS)
def test_parts_have_the_bytes_of_the_whole(fmt, source, tmp_path):
    report = checkpoints.convert(source, tmp_path / "out", format=fmt)
    quantizer = qtensor.core.quantizer_registry.parse(fmt)
    assert report.counts() == {"quantized": 2, "plain": 3}
    with checkpoints.open(tmp_path / "out") as out:
        for result in report.tensors:
            values = model()[result.name]
            if result.action == "plain":
                assert_same_bytes(out[result.name], values)
                continue
            want = qtensor.quantize(values, quantizer)
            assert_same_bytes(out[result.name], want)
            about = qtensor.error_report(values, want)
            assert math.isclose(result.sqnr_db, about.sqnr_db, rel_tol=1e-5)
            assert math.isclose(result.max_abs_error, about.max_abs_error, rel_tol=1e-6)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("fmt", ["fp8", "nvfp4", "mxfp8"])
def test_values_that_are_not_finite(value, fmt, tmp_path):
    values = torch.randn(300, 64).bfloat16()
    values[200, 3] = value
    checkpoints.save({"a.weight": values}, tmp_path / "in", layout="plain")
    report = checkpoints.convert(tmp_path / "in", tmp_path / "out", format=fmt)
    with checkpoints.open(tmp_path / "out") as out:
        assert_same_bytes(out["a.weight"], qtensor.quantize(values, fmt))
    assert math.isnan(report.tensors[0].sqnr_db)
    assert json.loads(json.dumps(report.to_dict()))["tensors"][0]["sqnr_db"] == "nan"


def test_one_thread_gives_the_same_files(source, tmp_path):
    for jobs in (1, 2):
        checkpoints.convert(source, tmp_path / str(jobs), CT, "nvfp4", jobs=jobs)
    assert stored_bytes(tmp_path / "1") == stored_bytes(tmp_path / "2")


def test_include_and_exclude_select_by_name(source, tmp_path):
    def chosen(**options):
        report = checkpoints.convert(
            source, tmp_path / "out", format="mxfp8", overwrite=True, **options
        )
        return {t.name for t in report.tensors if t.action == "quantized"}

    assert chosen() == {UP, DOWN}
    assert chosen(include=["*down*"]) == {DOWN}
    assert chosen(include="*embed*") == {"model.embed_tokens.weight"}
    assert chosen(exclude=["*down*"]) == {UP, "model.embed_tokens.weight"}
    assert chosen(include=["*mlp*weight"], exclude=["*down*"]) == {UP}


def test_stacked_experts_are_quantized_if_they_are_named(tmp_path):
    experts = torch.randn(4, 128, 64).bfloat16()
    checkpoints.save({"experts.up": experts}, tmp_path / "in", layout="plain")
    report = checkpoints.convert(tmp_path / "in", tmp_path / "a", format="mxfp4")
    assert report.counts() == {"plain": 1}
    report = checkpoints.convert(tmp_path / "in", tmp_path / "b", format="mxfp4", include="*.up")
    assert report.tensors[0].shape == (4, 128, 64)
    with checkpoints.open(tmp_path / "b") as out:
        assert_same_bytes(out["experts.up"], qtensor.quantize(experts, "mxfp4"))


def test_config_and_other_files_are_carried(source, tmp_path):
    report = checkpoints.convert(source, tmp_path / "out", CT, "mxfp4")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "mxfp4-pack-quantized"
    assert config["quantization_config"]["ignore"] == ["model.embed_tokens"]
    assert config["model_type"] == "llama"
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert any("tie_word_embeddings" in note for note in report.notes)
    assert any("tokenizer.json" in note for note in report.notes)


def test_a_folder_without_a_config_keeps_its_tokenizer(tmp_path):
    """And what lies beside a single file stays there: it may belong to others."""
    source = tmp_path / "source"
    checkpoints.save({"a.weight": weight("mxfp8")}, source)
    (source / "config.json").unlink()
    (source / "tokenizer.json").write_text("{}")
    report = checkpoints.convert(source, tmp_path / "a", "mlx")
    assert (tmp_path / "a" / "tokenizer.json").read_text() == "{}"
    assert "copied from the source: tokenizer.json" in report.notes
    checkpoints.convert(source / "model.safetensors", tmp_path / "b", "mlx")
    assert not (tmp_path / "b" / "tokenizer.json").exists()


def test_files_beside_a_loose_file_are_not_copied(tmp_path):
    """A file without a config.json may lie in a folder of downloads."""
    checkpoints.save({"a.weight": weight("mxfp4")}, tmp_path / "a.gguf", layout="gguf")
    (tmp_path / "notes.txt").write_text("private")
    checkpoints.convert(tmp_path / "a.gguf", tmp_path / "out", "qtensor")
    assert not (tmp_path / "out" / "notes.txt").exists()


def test_a_single_file_says_if_it_needs_a_layout(source, tmp_path):
    ours = checkpoints.convert(source, tmp_path / "a.safetensors", "qtensor", "mxfp4")
    assert not any("pass layout=" in note for note in ours.notes)
    assert checkpoints.verify(tmp_path / "a.safetensors").ok
    other = checkpoints.convert(source, tmp_path / "b.safetensors", CT, "mxfp4")
    assert any("pass layout=" in note for note in other.notes)


def test_messages_name_the_argument(source, tmp_path):
    with pytest.raises(qtensor.QTensorError, match=r"nvfp4; for a format of your own"):
        checkpoints.convert(source, tmp_path / "out", CT, "mxfp9")
    with pytest.raises(qtensor.QTensorError, match=r"got 'bf16'\. Pass torch"):
        checkpoints.load_state_dict(source, dtype="bf16")
    with pytest.raises(qtensor.QTensorError, match="Pass the folder"):
        checkpoints.open(source / "config.json")


# ---- from quantized weights


PAIRS = (
    (CT, FINE, ("fp8", "fp8_blockwise(block_scaling_dim=2)", "mxfp8")),
    (FINE, CT, ("fp8", "fp8_blockwise(block_scaling_dim=2)", "mxfp8")),
    ("qtensor", CT, ("fp8", "fp8_rowwise", "nvfp4", "mxfp4", "mxfp6(packed=True)", "mxfp8")),
    (CT, "qtensor", ("fp8", "fp8_rowwise", "nvfp4", "mxfp4", "mxfp6(packed=True)", "mxfp8")),
    ("qtensor", FINE, ("fp8", "mxfp8", "mxfp4")),
    (FINE, "qtensor", ("fp8", "mxfp8", "mxfp4")),
)


@pytest.mark.parametrize(
    ("old", "new", "fmt"), [(old, new, fmt) for old, new, fmts in PAIRS for fmt in fmts]
)
def test_codes_and_factors_are_moved(old, new, fmt, tmp_path):
    """There and back gives the same stored bytes, and the weight never changes."""
    state = {
        "a.weight": weight(qtensor.core.quantizer_registry.parse(fmt)),
        "a.bias": torch.ones(48),
    }
    checkpoints.save(state, tmp_path / "a", layout=old, config=CONFIG)
    report = checkpoints.convert(tmp_path / "a", tmp_path / "b", new)
    assert report.lossless
    assert report.counts() == {"moved": 1, "plain": 1}
    with checkpoints.open(tmp_path / "a") as a, checkpoints.open(tmp_path / "b") as b:
        assert b.layout == new
        for one, other in zip(a["a.weight"].buffers(), b["a.weight"].buffers(), strict=True):
            assert_same_bytes(one, other)
    checkpoints.convert(tmp_path / "b", tmp_path / "c", old)
    assert stored_bytes(tmp_path / "c") == stored_bytes(tmp_path / "a")


@pytest.mark.parametrize("example", READ, ids=lambda example: example.folder)
def test_examples_become_our_layout_and_plain_tensors(example, tmp_path):
    """Moved weights are the ones of ``open``; decoded ones are the values of the origin."""
    with open_with_factors(example.path) as source:
        report = checkpoints.dequantize(example.path, tmp_path / "plain")
        with checkpoints.open(tmp_path / "plain") as plain:
            # The states of Transformer Engine's modules pass through, and are its mark.
            states = any(name.endswith("_extra_state") for name in plain)
            assert plain.layout == ("transformer-engine" if states else "plain")
            assert "quantization_config" not in plain.config
            for name in source.groups:
                assert_same_values(plain[name], source.dense(name, torch.bfloat16))
        if source.groups and not example.formats:
            with pytest.raises(CheckpointError, match="Pass format="):
                checkpoints.convert(example.path, tmp_path / "ours")
            return
        report = checkpoints.convert(example.path, tmp_path / "ours")
        assert report.lossless
        with checkpoints.open(tmp_path / "ours") as ours:
            for name in source:
                assert_same_bytes(ours[name], source[name])


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_gguf_there_and_back(fmt, tmp_path):
    """A GGUF file holds the factor of NVFP4 apart; conversion takes it along both ways."""
    state = {"blk.0.ffn_up.weight": weight(fmt, 16, 128), "token_embd.weight": torch.ones(4, 64)}
    checkpoints.save(state, tmp_path / "a")
    report = checkpoints.convert(tmp_path / "a", tmp_path / "b.gguf", "gguf")
    assert report.lossless
    checkpoints.convert(tmp_path / "b.gguf", tmp_path / "c")
    with checkpoints.open(tmp_path / "a") as a, checkpoints.open(tmp_path / "c") as c:
        assert set(a) == set(c)
        for name in a:
            one, other = a.dense(name, torch.float32), c.dense(name, torch.float32)
            assert_same_values(other, one)


@pytest.mark.parametrize("old", ["modelopt_fp8_kv"])
def test_factors_of_the_kv_cache_take_their_names(old, tmp_path):
    source = EXAMPLES / old
    checkpoints.convert(source, tmp_path / "ct", "compressed-tensors")
    with checkpoints.open(source) as a, checkpoints.open(tmp_path / "ct") as b:
        names = [name for name in a if name.endswith((".k_scale", ".v_scale"))]
        assert names
        for name in names:
            moved = name.replace(".k_proj.", ".").replace(".v_proj.", ".")
            assert b[moved].item() == a[name].item()


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("rounding", ["origin", None])
def test_decoding_in_parts(rounding, tmp_path):
    for fmt in ("fp8_rowwise", "nvfp4", "mxfp4", "fp8_blockwise(block_scaling_dim=2)"):
        made = weight(qtensor.core.quantizer_registry.parse(fmt), 300, 256)
        checkpoints.save({"a.weight": made}, tmp_path / fmt, layout=CT)
        out = tmp_path / f"{fmt}.out"
        report = checkpoints.dequantize(tmp_path / fmt, out, "f32", rounding)
        assert report.counts() == {"decoded": 1}
        with checkpoints.open(tmp_path / fmt) as a, checkpoints.open(out) as b:
            want = a.dense("a.weight", torch.float32)
            if rounding is None:
                want = a["a.weight"].dequantize(torch.float32)
            assert_same_bytes(b["a.weight"], want)


def test_requantizing_needs_a_format(tmp_path):
    state = {"a.weight": weight("fp8_rowwise"), "b.weight": weight("fp8", seed=1)}
    checkpoints.save(state, tmp_path / "a", layout=CT)
    with pytest.raises(CheckpointError, match=r"'a.weight'.*fp8_rowwise.*pass format="):
        checkpoints.convert(tmp_path / "a", tmp_path / "b", FINE)
    assert not (tmp_path / "b").exists()
    report = checkpoints.convert(tmp_path / "a", tmp_path / "b", FINE, "fp8")
    assert report.counts() == {"moved": 1, "requantized": 1}
    assert not report.lossless
    result = report.tensors[0]
    assert (result.before, result.after) == ("fp8_rowwise", "fp8")
    assert 20 < result.sqnr_db < 40
    with checkpoints.open(tmp_path / "a") as a, checkpoints.open(tmp_path / "b") as b:
        want = qtensor.quantize(a.dense("a.weight"), "fp8")
        assert torch.equal(b["a.weight"].dequantize(), want.dequantize())
        assert_same_bytes(b["b.weight"], a["b.weight"])


def test_plain_weights_of_a_quantized_source_stay_plain(tmp_path):
    """Its producer left them plain; ``include`` alone selects them."""
    state = {"a.weight": weight("mxfp8"), "gate_proj.weight": torch.randn(64, 64).bfloat16()}
    checkpoints.save(state, tmp_path / "a", layout=CT)
    report = checkpoints.convert(tmp_path / "a", tmp_path / "b", CT, "nvfp4")
    assert report.counts() == {"requantized": 1, "plain": 1}
    report = checkpoints.convert(tmp_path / "a", tmp_path / "c", CT, "nvfp4", include="gate*")
    assert report.counts() == {"moved": 1, "quantized": 1}


def test_nvfp4_with_a_stored_factor_is_not_requantized(tmp_path):
    state = {"a.weight": weight("nvfp4")}
    checkpoints.save(state, tmp_path / "a", layout=CT)
    path = tmp_path / "a" / "model.safetensors"
    data = bytearray(path.read_bytes())
    with checkpoints.open(tmp_path / "a") as a:
        info = a.source.tensors["a.weight_global_scale"]
    data[info.start : info.start + 4] = bytes(
        torch.tensor([1.0 / 3e-4 * 1.37]).view(torch.uint8).tolist()
    )
    path.write_bytes(data)
    report = checkpoints.convert(tmp_path / "a", tmp_path / "b", CT, "nvfp4")
    assert report.counts() == {"moved": 1}
    assert stored_bytes(tmp_path / "a") == stored_bytes(tmp_path / "b")


def test_ignored_modules_stay_plain_and_are_named(tmp_path):
    state = {"a.weight": weight("mxfp8"), "lm_head.weight": torch.randn(64, 64).bfloat16()}
    checkpoints.save(state, tmp_path / "a", layout=CT)
    report = checkpoints.convert(tmp_path / "a", tmp_path / "b", FINE)
    assert any("the source's config ignores lm_head;" in note for note in report.notes)
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["quantization_config"]["modules_to_not_convert"] == ["lm_head"]


def test_factors_of_the_cache_take_the_names_of_the_layout(tmp_path, monkeypatch):
    """Layouts place the factors of the KV cache at the attention or at its projections."""
    target = checkpoints.layouts()[FINE]
    monkeypatch.setattr(target, "kv_factors", ("k_proj.k_scale", "v_proj.v_scale"))
    state = {
        "self_attn.k_proj.weight": weight("fp8"),
        "self_attn.k_scale": torch.tensor([0.5]),
        "self_attn.v_scale": torch.tensor([0.25]),
    }
    checkpoints.save(state, tmp_path / "a", layout=CT)
    checkpoints.convert(tmp_path / "a", tmp_path / "b", FINE)
    with checkpoints.open(tmp_path / "b") as b:
        assert_same_bytes(b["self_attn.k_proj.k_scale"], torch.tensor(0.5))
        assert_same_bytes(b["self_attn.v_proj.v_scale"], torch.tensor(0.25))
    checkpoints.convert(tmp_path / "b", tmp_path / "c", CT)
    assert stored_bytes(tmp_path / "c") == stored_bytes(tmp_path / "a")


# ---- factors beside weights


def test_factors_of_activations_and_of_the_cache_are_carried(tmp_path):
    one = torch.tensor([3.0])
    state = {
        "attn.q_proj.weight": weight("nvfp4"),
        "attn.q_proj.input_global_scale": one,
        "mlp.up.weight": weight("fp8", seed=1),
        "mlp.up.input_scale": torch.tensor([0.25]),
        "attn.k_scale": torch.tensor([0.5]),
    }
    checkpoints.save(state, tmp_path / "ct", layout=CT)
    report = checkpoints.convert(tmp_path / "ct", tmp_path / "ours")
    assert report.not_carried == {}
    with checkpoints.open(tmp_path / "ours") as ours:
        for name in state:
            if not name.endswith(".weight"):
                assert_same_bytes(ours[name], state[name])
    back = checkpoints.convert(tmp_path / "ours", tmp_path / "back", CT)
    assert back.lossless
    assert stored_bytes(tmp_path / "back") == stored_bytes(tmp_path / "ct")


def test_a_factor_becomes_a_divisor(tmp_path):
    """Our layout keeps the names of others: a factor of NVFP4 activations is CT's reciprocal."""
    state = {
        "up.weight": weight("nvfp4"),
        "up.input_scale": torch.tensor(0.007),
        "down.weight": weight("fp8", seed=1),
        "down.input_scale": torch.tensor(0.007),
    }
    checkpoints.save(state, tmp_path / "ours")
    report = checkpoints.convert(tmp_path / "ours", tmp_path / "ct", CT)
    names = {t.source: (t.name, t.action) for t in report.tensors}
    assert names["up.input_scale"] == ("up.input_global_scale", "reciprocal")
    assert names["down.input_scale"] == ("down.input_scale", "plain")
    with checkpoints.open(tmp_path / "ct") as ct:
        assert_same_bytes(ct["up.input_global_scale"], 1 / torch.tensor([0.007]))
        assert_same_bytes(ct["down.input_scale"], torch.tensor([0.007]))
        groups = ct.config["quantization_config"]["config_groups"].values()
    static = [group["input_activations"]["dynamic"] for group in groups]
    assert static == ["local", False]


def test_static_activations_of_fine_grained_fp8(tmp_path):
    state = {"up.weight": weight("fp8"), "up.input_scale": torch.tensor([0.5])}
    checkpoints.save(state, tmp_path / "ct", layout=CT)
    checkpoints.convert(tmp_path / "ct", tmp_path / "fine", FINE)
    with checkpoints.open(tmp_path / "fine") as fine:
        assert_same_bytes(fine["up.activation_scale"], torch.tensor(0.5))
        assert fine.config["quantization_config"]["activation_scheme"] == "static"
    checkpoints.convert(tmp_path / "fine", tmp_path / "back", CT)
    assert stored_bytes(tmp_path / "back") == stored_bytes(tmp_path / "ct")


def test_factors_of_another_format_are_named_as_not_carried(tmp_path):
    state = {"up.weight": weight("fp8"), "up.input_scale": torch.tensor([0.5])}
    checkpoints.save(state, tmp_path / "ct", layout=CT)
    report = checkpoints.convert(tmp_path / "ct", tmp_path / "out", CT, "nvfp4")
    assert "calibrate again" in report.not_carried["up.input_scale"]
    assert "up.input_scale" in repr(report)
    assert not report.lossless
    report = checkpoints.dequantize(tmp_path / "ct", tmp_path / "plain")
    assert list(report.not_carried) == ["up.input_scale"]


def test_the_function_layouts_keeps_its_name():
    """The folder ``checkpoints/layouts`` is imported when a file is first opened."""
    for _ in range(2):
        assert {CT, FINE, "qtensor", "plain"} <= set(checkpoints.layouts())


# ---- refusals


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s, o: checkpoints.convert(s, o, "ggml"), "layout= is the name"),
        (lambda s, o: checkpoints.convert(s, o, format="int4"), "format is a format id"),
        (lambda s, o: checkpoints.convert(s, o, format="fp8_delayed"), "same bytes"),
        (
            lambda s, o: checkpoints.convert(s, o, format="nvfp4(stochastic_rounding=True)"),
            "same bytes",
        ),
        (lambda s, o: checkpoints.convert(s, o, includes="*"), "the options are"),
        (lambda s, o: checkpoints.convert(s, o, include=[3]), "shell patterns"),
        (lambda s, o: checkpoints.convert(s, o, jobs=0), "number of threads"),
        (lambda s, o: checkpoints.convert(s, o, shard_size="5 potatoes"), "shard_size"),
        (lambda s, o: checkpoints.convert(s, s), "outside the source"),
        (lambda s, o: checkpoints.convert(s, s / "sub"), "outside the source"),
        (lambda s, o: checkpoints.convert(s, s.parent, overwrite=True), "outside the source"),
        (lambda s, o: checkpoints.convert(s / "model.safetensors", s), "outside the source"),
        (lambda s, o: checkpoints.dequantize(s, o, dtype="int8"), "dtype is"),
        (lambda s, o: checkpoints.dequantize(s, o, rounding="up"), "rounding is"),
        (lambda s, o: checkpoints.convert(None, o), "src is the path"),
        (lambda s, o: checkpoints.convert(s, ""), "dst is the path"),
        (lambda s, o: checkpoints.convert(s, o, CT, "fp8", include="*norm*"), "no tensor"),
    ],
)
def test_wrong_calls_are_refused(call, message, source, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        call(source, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def test_an_existing_result_is_kept(source, tmp_path):
    out = tmp_path / "out"
    checkpoints.convert(source, out, format="mxfp8")
    before = stored_bytes(out)
    with pytest.raises(CheckpointError, match="overwrite=True"):
        checkpoints.convert(source, out, format="nvfp4")
    assert stored_bytes(out) == before
    checkpoints.convert(source, out, format="nvfp4", overwrite=True)
    with checkpoints.open(out) as now:
        assert now[UP].quantizer.format == "nvfp4"


def test_a_folder_with_other_files_is_not_replaced(source, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"'thesis.tex'"):
        checkpoints.convert(source, out, format="mxfp8", overwrite=True)
    assert (out / "thesis.tex").read_text() == "years of work"
