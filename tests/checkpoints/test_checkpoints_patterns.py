"""Regular expressions of configs: the same matches as ``re``, and a bounded time."""

import json
import re
import shutil

import pytest
from checkpoint_cases import EXAMPLES

from qtensor import checkpoints
from qtensor.checkpoints import patterns
from qtensor.checkpoints.errors import Place
from qtensor.checkpoints.patterns import Pattern

PLACE = Place("config.json", "", "compressed-tensors")
NAMES = (
    "",
    "lm_head",
    "model.layers.0.self_attn.q_proj",
    "model.layers.10.self_attn.k_proj",
    "model.layers.11.mlp.experts.7.up_proj",
    "model.layers.3.mlp.gate",
    "model.vision_tower.blocks.2.attn.qkv",
    "model.layers.1.mlp.down_proj\n",
    "visual.merger",
    "größe.weight",
    "model.language_model.layers.127.feed_forward.experts.255.down_proj",
)
REAL = (
    "lm_head",
    ".*",
    ".*lm_head",
    ".*self_attn.*",
    r".*\.self_attn\..*",
    "visual.*",
    ".*mlp.gate$",
    ".*mlp.(gate|up|down)_proj$",
    r"model\.layers\.(\d+)\.mlp\.(up|gate)_proj",
    r".*layers\.(1[01]|[0-3])\.",
    r"^(?!.*(lm_head|vision_tower|visual)).*$",
    r"^(?=.*proj$).*layers.1\d?\.",
    r"(?:model\.)?layers.*",
    r"(?P<part>model|visual)\..{3,6}\.",
    r"model\.layers\.[0-9]{2}\.",
    r"[^.]*$",
    r"[]m\].]+",
    r"[(*+|]*[?)]|\(\*|model",
    r"\w+\Z",
    r".*?proj\Z",
    r"\Amodel",
    r"a{,2}m{1}o{1,}",
    r"x{|model",
    r"\bmodel",
    r"(m)odel.(?<=\.)v",
    "(?=" * 40 + "model" + ")" * 40,
)
"""Expressions as configs have them, and each construct that is read."""


@pytest.mark.parametrize("text", REAL)
def test_the_same_names_match(text):
    pattern = Pattern(text, PLACE)
    assert [pattern.matches(name) for name in NAMES] == [bool(re.match(text, n)) for n in NAMES]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(a+)+b", "repetition of a group"),
        ("(a|a)*b", "repetition of a group"),
        ("(.*)*b", "repetition of a group"),
        ("(?=(a+)+b)", "repetition of a group"),
        ("(?:a|aa){40}b", "repetition of a group"),
        ("(?:a+)*?b", "repetition of a group"),
        ("(?x)(a+) +b", "flags or conditions"),
        ("(?i)model", "flags or conditions"),
        ("(a)(?(1)b|c)", "flags or conditions"),
        ("(?P=name)", "flags or conditions"),
        ("((a{60}){60}){60}", "repetition of a group"),
        (r"(a)\1", "backreference"),
        ("(", "unterminated"),
        ("a)", "parenthesis"),
        ("[a", "unterminated"),
        ("*a", "nothing to repeat"),
        ("a**", "multiple repeat"),
        ("a{3,2}", "min repeat"),
        ("a{99999999999}", "too large"),
        ("a" * 2001, "2001 characters"),
        ("(" * 999 + ")" * 999, "recursion"),
        ("[z-a]", "bad character range"),
        ("\\", "bad escape"),
    ],
)
def test_refused_expressions(text, message):
    with pytest.raises(checkpoints.CheckpointError, match=message) as raised:
        Pattern(text, PLACE)
    assert raised.value.file == "config.json"
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize(
    "text",
    [
        ".*.*.*.*.*.*.*.*b",
        ".*?.*?.*?.*?.*?.*?.*?.*?b",
        "a?" * 40 + "a" * 40 + "b",
        "(a|a)" * 40 + "b",
        "(a|(a|a))(a|a|a)" * 20 + "b",
        "(?:a|aa)?" * 40 + "b",
        "(a*)(?:a*)a*[a]*a{0,}b",
        "(?!a*a*a*b)(?=a*a*b)",
        ".*.*" + "a" * 1900 + "b",
        "|".join(["a*a*b"] * 4),
    ],
)
def test_too_many_steps_are_refused(text):
    """Without the check, most of them do not end."""
    with pytest.raises(checkpoints.CheckpointError, match="may take 2,000,000,000 steps") as raised:
        Pattern(text, PLACE).matches("a" * 2000)
    assert raised.value.file == "config.json"


def test_all_names_together_take_a_bounded_time(monkeypatch):
    monkeypatch.setattr(patterns, "MAX_SECONDS", 0.0)
    pattern = Pattern(".*b", PLACE)
    assert not pattern.matches("a" * 1000)
    with pytest.raises(checkpoints.CheckpointError, match=r"0\.0 seconds for all names"):
        pattern.matches("a")


def test_targets_of_a_config(tmp_path):
    """Two groups that the tensors do not tell apart, and a target that ``re`` would not finish."""
    folder = tmp_path / "ct"
    shutil.copytree(EXAMPLES / "ct_mxfp4", folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    groups = config["quantization_config"]["config_groups"]
    (scheme,) = groups.values()
    name = next(iter(checkpoints.open(folder).groups))
    groups["other"] = {
        **scheme,
        "targets": ["re:.*(q|k)_none$"],
        "weights": {**scheme["weights"], "strategy": "channel"},
    }
    scheme["targets"] = ["re:(?!.*none)model.*"]
    path.write_text(json.dumps(config))
    assert name in checkpoints.open(folder)
    for target in ("re:(x", "re:(.*)*(.+)+(x+x+)+y", "re:" + ".*" * 30 + "y"):
        groups["other"]["targets"] = [target]
        path.write_text(json.dumps(config))
        with pytest.raises(checkpoints.CheckpointError, match=r"an expression (has|may)") as raised:
            checkpoints.open(folder)
        assert raised.value.layout == "compressed-tensors"
