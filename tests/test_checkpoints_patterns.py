"""Regular expressions of configs: the same matches as ``re``, and a bounded time."""

import json
import random
import re
import shutil

import pytest
from checkpoint_cases import EXAMPLES

from qtensor import checkpoints
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
    r"\w+\Z",
    r".*?proj\Z",
    r"\Amodel",
    r"a{,2}m{1}o{1,}",
    r"x{|model",
    "(?=" * 40 + "model" + ")" * 40,
)
"""Expressions as configs have them, and each construct that is read."""


def matches(text, name):
    return Pattern(text, PLACE).matches(name)


@pytest.mark.parametrize("text", REAL)
def test_the_same_names_match(text):
    pattern = Pattern(text, PLACE)
    assert [pattern.matches(name) for name in NAMES] == [bool(re.match(text, n)) for n in NAMES]
    # Again: the sets of states are kept by now.
    assert [pattern.matches(name) for name in NAMES] == [bool(re.match(text, n)) for n in NAMES]


def expression(chance, depth=0):
    """A random expression over three letters, without two repetitions in a row."""
    parts = []
    for _ in range(chance.randint(0, 3)):
        kind = chance.randrange(9 if depth < 3 else 5)
        atom = "ab.."[kind] if kind < 4 else chance.choice(["[ab]", "[^a]", r"\.", r"\w", "^", "$"])
        if kind > 4:
            head = chance.choice(["(", "(?:", "(?=", "(?!"])
            atom = head + expression(chance, depth + 1) + ")"
        free = atom not in ("^", "$") and not atom.startswith(("(?=", "(?!"))
        many = ["*", "+", "?", "{2}", "{1,2}", "{,1}", "{2,}", "*?", "+?", "??"]
        parts.append(atom + (chance.choice(many) if free and chance.random() < 0.4 else ""))
    text = "".join(parts)
    return f"{text}|{expression(chance, depth + 1)}" if chance.random() < 0.2 else text


def test_random_expressions_match_as_those_of_re():
    chance, found = random.Random(0), 0
    names = ["".join(chance.choices("ab.", k=chance.randint(0, 7))) for _ in range(25)]
    for _ in range(1500):
        text = expression(chance)
        pattern, want = Pattern(text, PLACE), re.compile(text)
        for name in [*names, "ab\n"]:
            assert pattern.matches(name) == bool(want.match(name)), (text, name)
            found += bool(want.match(name))
    assert 1500 < found < 1500 * 25


@pytest.mark.parametrize(
    "text",
    [
        "(a+)+b",
        "(a|a)*b",
        "(a*)*b",
        "(.*)*b",
        "(a|aa)+b",
        "(.+)+(.+)+b",
        ".*.*.*.*.*.*.*.*b",
        "(?=(a+)+b)",
    ],
)
def test_nested_repetitions_take_no_longer_than_others(text):
    """With ``re`` each of them takes longer than anybody waits."""
    pattern = Pattern(text, PLACE)
    assert not pattern.matches("a" * 2000)
    assert matches(text, "aaab")


def test_all_names_together_take_a_bounded_number_of_steps():
    pattern = Pattern("(?:(?!.*b).)*c", PLACE)
    with pytest.raises(checkpoints.CheckpointError, match="at most 5,000,000 steps") as raised:
        pattern.matches("a" * 100_000)
    assert raised.value.file == "config.json"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(", "without its end"),
        ("a)", "parenthesis"),
        ("[a", "without its end"),
        ("*a", "repetition of nothing"),
        ("a**", "two repetitions"),
        ("a++", "two repetitions"),
        ("a{3,2}", "3 to 2"),
        ("a{100000}", "100000 repetitions"),
        ("((a{60}){60}){60}", "more than 5000"),
        ("(((){4000}){4000}){4000}", "more than 5000"),
        ("((){4000}(){4000})*", "more than 5000"),
        ("a" * 2001, "2001 characters"),
        ("(" * 60 + ")" * 60, "more than 50 groups"),
        ("(?=" * 60 + ")" * 60, "more than 50 groups"),
        (r"(a)\1", "the escape"),
        (r"\bmodel", "the escape"),
        ("(?<=a)b", r"'\(\?<='"),
        ("(?i)model", r"'\(\?i\)'"),
        ("(?P=name)", "P="),
        ("[z-a]", "bad character range"),
        ("\\", "the escape"),
    ],
)
def test_refused_expressions(text, message):
    with pytest.raises(checkpoints.CheckpointError, match=message) as raised:
        Pattern(text, PLACE)
    assert raised.value.file == "config.json"
    assert len(str(raised.value)) < 1000


def test_targets_of_a_config(tmp_path):
    """Two groups that the tensors do not tell apart, and targets that ``re`` would not finish."""
    folder = tmp_path / "ct"
    shutil.copytree(EXAMPLES / "ct_mxfp4", folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    groups = config["quantization_config"]["config_groups"]
    (scheme,) = groups.values()
    name = next(iter(checkpoints.open(folder).groups))
    groups["other"] = {
        **scheme,
        "targets": ["re:(.*)*(.+)+(x+x+)+y"],
        "weights": {**scheme["weights"], "strategy": "channel"},
    }
    scheme["targets"] = ["re:(a*)*model.*"]
    path.write_text(json.dumps(config))
    assert name in checkpoints.open(folder)
    groups["other"]["targets"] = ["re:(x"]
    path.write_text(json.dumps(config))
    with pytest.raises(checkpoints.CheckpointError, match="without its end") as raised:
        checkpoints.open(folder)
    assert raised.value.layout == "compressed-tensors"
