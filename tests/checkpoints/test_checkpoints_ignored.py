"""Lists of ignored modules are carried: a loader needs them also for modules that no file has."""

import json

import pytest
import torch
from checkpoint_cases import EXAMPLES, weight

from qtensor import checkpoints
from qtensor.checkpoints.ignoring import NAMES, REGEX, WILDCARD, carried, translated
from tests.checkpoints.test_checkpoints_configs import LAYOUTS, fp8, write
from tests.checkpoints.test_checkpoints_variants import grid

KEYS = {
    "compressed-tensors": "ignore",
    "modelopt": "ignore",
    "fine-grained-fp8": "modules_to_not_convert",
    "fbgemm-fp8": "modules_to_not_convert",
    "gpt-oss": "modules_to_not_convert",
    "quark": "exclude",
}


def list_of(folder, layout):
    config = json.loads((folder / "config.json").read_text())
    return config["quantization_config"][KEYS[layout]]


COPIES = [
    ("modelopt_nvfp4", ["lm_head", "model.embed_tokens"]),
    ("ct_fp8_tensor", ["lm_head"]),
    ("quark_mxfp4", ["lm_head"]),
    ("gptoss_mxfp4", None),
    ("fbgemm_fp8", ["lm_head"]),
]


@pytest.mark.parametrize(("folder", "want"), COPIES)
@pytest.mark.parametrize("how", ["save", "convert"])
def test_a_copy_keeps_the_list(folder, want, how, tmp_path):
    """Also the names of modules that the file lacks, such as a tied output layer."""
    with checkpoints.open(EXAMPLES / folder) as checkpoint:
        layout = checkpoint.layout
        if how == "save":
            checkpoints.save(checkpoint, tmp_path / "x", layout=layout)
        else:
            checkpoints.convert(EXAMPLES / folder, tmp_path / "x", layout=layout)
        want = want or checkpoint.config["quantization_config"][KEYS[layout]]
    assert list_of(tmp_path / "x", layout) == want
    if layout == "modelopt":
        hf = json.loads((tmp_path / "x" / "hf_quant_config.json").read_text())
        assert hf["quantization"]["exclude_modules"] == want


STATE = {
    "layers.0.up.weight": "quantized",
    "layers.0.gate.weight": "plain",
    "layers.1.gate_proj.weight": "quantized",
    "visual.0.fc.weight": "plain",
    "embed.weight": "plain",
}


def state():
    tensors = {}
    for name, kind in STATE.items():
        if kind == "quantized":
            tensors |= fp8(torch.tensor([0.5]), 32, 64, name=name)
        else:
            tensors[name] = torch.ones(4, 4, dtype=torch.bfloat16)
    return tensors


LISTS = [
    (
        ["lm_head", "re:.*[.]gate$", "re:visual.*", "up", "re:.*gate_proj", "re:("],
        "compressed-tensors",
        ["lm_head", "re:.*[.]gate$", "re:visual.*", "re:(", "embed"],
    ),
    (
        ["lm_head", r"re:.*\.gate$", "re:visual.*", "re:.*mtp[.]fc"],
        "modelopt",
        ["lm_head", "*.gate", "visual*", "embed"],
    ),
    (
        ["lm_head", r"re:.*\.gate$", "visual"],
        "fine-grained-fp8",
        ["lm_head", r".*\.gate$", "visual", "embed"],
    ),
]


@pytest.mark.parametrize(("given", "layout", "want"), LISTS)
def test_entries_in_the_style_of_the_layout(given, layout, want, tmp_path):
    """What matches a quantized module is left out; what no entry covers is added by name."""
    (tmp_path / "in").mkdir()
    entry = {"quant_method": "compressed-tensors", **LAYOUTS["compressed-tensors"]}
    config = {"quantization_config": {**entry, "ignore": given}}
    write(tmp_path / "in", state(), config).close()
    report = checkpoints.convert(tmp_path / "in", tmp_path / "x", layout=layout)
    assert list_of(tmp_path / "x", layout) == want
    assert any("has the entries that still apply" in note for note in report.notes)


def test_wildcards_become_patterns():
    assert translated("model.layers.*.router", REGEX) == r"re:model\.layers.*\.router$"
    assert translated("*lm_head*", REGEX) == r"re:.*lm_head.*$"
    assert translated("*lm_head", NAMES) == ".*lm_head"
    assert translated("re:model[.]x|y", WILDCARD) is None
    assert translated("re:(", NAMES) is None
    assert translated("lm_head", REGEX) == translated("lm_head", NAMES) == "lm_head"
    assert translated("re:.*q", WILDCARD) == "*q*"


@pytest.mark.parametrize("style", [NAMES, REGEX, WILDCARD])
def test_parents_and_last_parts_of_quantized_modules(style):
    entries = ["model", "model.a", "b", "ghost", "ghost.b"]
    assert carried(entries, ["c"], ["model.a.b"], style) == ["ghost", "ghost.b", "c"]


def test_a_weight_that_is_quantized_now_leaves_the_list(tmp_path):
    """The output layer of the source was plain."""
    state = {"lm_head.weight": torch.randn(32, 64).bfloat16(), "a.weight": weight("nvfp4")}
    checkpoints.save(state, tmp_path / "in", layout="modelopt")
    assert list_of(tmp_path / "in", "modelopt") == ["lm_head"]
    out = tmp_path / "x"
    checkpoints.convert(
        tmp_path / "in", out, layout="modelopt", format="nvfp4", include=["lm_head*"]
    )
    assert list_of(out, "modelopt") == []


def test_transformers_skips_what_the_list_says(tmp_path):
    """The entries work in transformers' own matching, with the modules added by name."""
    utils = pytest.importorskip(
        "transformers.quantizers.quantizers_utils", reason="an extra of the tests"
    )
    (tmp_path / "in").mkdir()
    entry = {"quant_method": "fp8", "weight_block_size": None}
    entry["modules_to_not_convert"] = ["model.visual", r"model\..*\.router"]
    scale = grid()
    tensors = fp8(scale, 4, 8, name="model.up.weight", factor="_scale_inv")
    for name in ("model.visual.fc", "model.0.router", "lm_head"):
        tensors[f"{name}.weight"] = torch.ones(2, 2)
    with write(tmp_path / "in", tensors, {"quantization_config": entry}) as checkpoint:
        checkpoints.save(checkpoint, tmp_path / "x", layout="fine-grained-fp8")
    found = list_of(tmp_path / "x", "fine-grained-fp8")
    assert found == ["model.visual", r"model\..*\.router", "lm_head"]
    plain = [n for n in ("model.up", "lm_head", "model.visual.fc", "model.0.router")]
    assert [utils.should_convert_module(n, found) for n in plain] == [True, False, False, False]
