"""What ``search`` and ``quantize_`` keep in memory, resuming after a kill, and models of users."""

import os
import signal
import subprocess
import sys
import weakref

import pytest
import torch
from places import PYTHONPATH
from torch import nn
from weights_search_cases import make_inputs, make_model

import qtensor
from qtensor.storage.base import QuantizedTensorStorage
from qtensor.weights import measurement
from qtensor.weights.metrics import noise

GROUPS = [["0", "2"]]
PROBES = 3
"""Calls of a metric by which a file of measurements recognizes it."""


def test_one_group_is_quantized_at_a_time(monkeypatch):
    """While a model is measured, the only quantized tensors are those of one group."""
    model, made, live = make_model(), [], []

    def quantize(weight, quantizer):
        tensor = qtensor.quantize(weight, quantizer)
        made.append(weakref.ref(tensor))
        return tensor

    def metric(reference, output):
        quantized = [
            n for n, p in model.named_parameters() if isinstance(p, QuantizedTensorStorage)
        ]
        alive = sum(ref() is not None for ref in made)
        live.append((quantized, alive))
        return noise(reference, output)

    monkeypatch.setattr(measurement, "quantize", quantize)
    options = {"formats": ["mxfp4", "mxfp8"], "groups": GROUPS, "budget_bits": 8}
    qtensor.search(model, make_inputs(), metric=metric, **options)
    pair, last = ["0.weight", "2.weight"], ["4.weight"]
    assert [names for names, _ in live] == [pair] * 4 + [last] * 4 + [pair + last] * 2
    assert all(alive <= len(names) for names, alive in live)
    # Sizes come from tensors without data, which are made by the same function.
    assert len(made) >= 2 * 2 + 2 + 3


@pytest.mark.parametrize("rounding", ["weighted_mse", "gptq"])
def test_activations_are_not_kept(rounding):
    """When a run ends, at most the input of one call is alive, whatever the number of inputs."""
    outputs, alive = [], []

    class Watch(nn.Module):
        def forward(self, x):
            x = x + 1
            outputs.append(weakref.ref(x))
            return x

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(Watch(), nn.Linear(64, 64), Watch(), nn.Linear(64, 32))

        def forward(self, x):
            alive.append(sum(ref() is not None for ref in outputs))
            return self.body(x)

    inputs = [torch.randn(16, 64) for _ in range(6)]
    qtensor.quantize_(Root(), "mxfp4", rounding=rounding, calibration=inputs)
    assert len(alive) == {"weighted_mse": 6, "gptq": 18}[rounding]
    assert max(alive) <= 1


KILLED = """
import os, signal, sys
import tests.weights.test_weights_search_limits as t
import qtensor
calls = []
def metric(reference, output):
    calls.append(1)
    if len(calls) == t.PROBES + 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return t.noise(reference, output)
qtensor.search(t.make_model(), t.make_inputs(), metric=metric, resume=sys.argv[1],
               formats=["mxfp4", "mxfp8"], groups=t.GROUPS, budget_bits=6)
"""


@pytest.mark.nightly(reason="starts another Python")
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no SIGKILL")
def test_a_search_that_was_killed(tmp_path):
    """Two of four measurements were written before the kill; the search goes on with the third."""
    path = str(tmp_path / "search.jsonl")
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run([sys.executable, "-c", KILLED, path], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    calls = []

    def metric(reference, output):
        calls.append(1)
        return noise(reference, output)

    options = {"formats": ["mxfp4", "mxfp8"], "groups": GROUPS, "budget_bits": 6}
    result = qtensor.search(make_model(), make_inputs(), metric=metric, resume=path, **options)
    assert len(calls) == PROBES + 2 * 2 + 2
    calls.clear()
    assert result == qtensor.search(make_model(), make_inputs(), metric=metric, **options)
    assert len(calls) == 4 * 2 + 2


# ---- models of users
# -------------------------------------------------------------------------------------------------


def test_a_random_llama():
    library = pytest.importorskip("transformers", reason="needs the extra transformers")
    torch.manual_seed(2)
    config = library.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = library.LlamaForCausalLM(config)
    inputs = [torch.randint(64, (2, 12)) for _ in range(2)]
    with torch.no_grad():
        references = [model.eval()(x).logits for x in inputs]
    result = qtensor.search(model, inputs, budget_bits=9.5, pinned={"lm_head": None})
    names = [tuple(name.rpartition(".")[2] for name in group.names) for group in result.groups]
    assert names == [
        ("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",),
        ("lm_head",),
    ]  # fmt: skip
    result.apply(model)
    with torch.no_grad():
        pairs = zip(references, inputs, strict=True)
        after = [qtensor.weights.metrics.kl(r, model(x).logits) for r, x in pairs]
    assert sum(after) / 2 == pytest.approx(result.measured, rel=1e-6)
    assert model.lm_head.weight.dtype == torch.float32
    with pytest.raises(qtensor.QTensorError, match="quantized already"):
        qtensor.search(model, inputs, filter_fn=lambda module, name: name != "lm_head")


def test_a_cnn_and_a_metric_that_returns_a_tensor():
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 32),
    )  # fmt: skip
    inputs = [torch.randn(4, 3, 12, 12) for _ in range(2)]
    result = qtensor.search(
        model, inputs, budget_bits=6.5, metric=lambda r, o: (r - o).abs().mean()
    )
    assert set(result.formats) == {"4", "6"}
    assert result.metric == "<lambda>"
    assert result.bits <= 6.5
    assert result.measured > 0
    with pytest.raises(qtensor.QTensorError, match=r"inputs\[1\] failed; got RuntimeError"):
        qtensor.search(model, [inputs[0], inputs[1][:, :2]])


def test_experts_and_conv1d_are_searched():
    """A stack of experts is one weight with one format; the measured error is the applied one."""
    library = pytest.importorskip("transformers", reason="needs the extra transformers")
    torch.manual_seed(4)
    config = library.GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=1, n_head=2)
    gpt2 = library.GPT2LMHeadModel(config)
    config = library.MixtralConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    mixtral = library.MixtralForCausalLM(config)
    inputs = [torch.randint(64, (2, 12))]
    for model, layer in ((gpt2, "mlp.c_fc"), (mixtral, "experts.down_proj")):
        own = dict(model.named_parameters())
        result = qtensor.search(model, inputs, formats=["mxfp4", "mxfp8"], budget_bits=7)
        assert all(own[name] is p for name, p in model.named_parameters())
        assert any(name.endswith(layer) for name in result.formats)
        with torch.no_grad():
            reference = model.eval()(inputs[0]).logits
            result.apply(model)
            after = qtensor.weights.metrics.kl(reference, model(inputs[0]).logits)
        assert after == pytest.approx(result.measured, rel=1e-6)


def search_in(path):
    return qtensor.search(make_model(), make_inputs(), budget_bits=7, metric="sqnr", resume=path)


@pytest.mark.parametrize("content", [b'{"hidden_size": 64}', b"\xff\xfe", b"{}\n\xff"], ids=repr)
def test_resume_leaves_files_of_others_as_they_are(tmp_path, content):
    """Also one without the end of a line, which a search that was cut off could have left."""
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(qtensor.QTensorError, match="an earlier search wrote"):
        search_in(str(path))
    assert path.read_bytes() == content


def test_resume_after_a_cut_in_the_first_line(tmp_path):
    path = tmp_path / "search.jsonl"
    found = search_in(path)
    whole = path.read_bytes()
    for size in (0, 1, whole.index(b"\n")):
        path.write_bytes(whole[:size])
        assert search_in(path) == found
        assert path.read_bytes() == whole


def test_resume_without_a_usable_path(tmp_path):
    for path in (tmp_path / "missing" / "file", tmp_path):
        with pytest.raises(qtensor.QTensorError, match="can be read and written; got"):
            search_in(str(path))
    with pytest.raises(qtensor.ArgumentTypeError, match="resume is the path of a file; got 3"):
        search_in(3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": [[0]]}, "each pattern of groups is a string; got 0"),
        ({"groups": [None]}, "each group is a list of names or patterns; got None"),
        ({"groups": 5}, "groups is a list of lists of names; got 5"),
        ({"pinned": {0: "mxfp8"}}, "each pattern of pinned is a string; got 0"),
        ({"pinned": ["0"]}, r"pinned is a dict from names to formats; got \['0'\]"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_groups_and_pinned_of_other_types(arguments, message):
    with pytest.raises(qtensor.ArgumentTypeError, match=message):
        qtensor.search(make_model(), make_inputs(), budget_bits=7, metric="sqnr", **arguments)
