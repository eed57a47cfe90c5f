"""``search`` finds the best choice under its assumption, measures it, and says what is wrong."""

import itertools
import json
import math
import random
import types

import pytest
import torch
import weights_search_cases as cases
from torch import nn
from weights_search_cases import make_inputs

import qtensor
from benchmarks.memory import RESET, peak_mib
from qtensor.weights.groups import layer_groups
from qtensor.weights.knapsack import Option, front
from qtensor.weights.metrics import call, kl, noise
from qtensor.weights.search_result import SearchResult

FORMATS = ("mxfp4", "nvfp4", "mxfp8")


def make_model():
    return cases.make_model(width=128)


# ---- the exact choice
# ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_front_equals_brute_force(seed):
    draw = random.Random(seed)
    groups = [
        [
            Option(draw.randrange(1, 40), draw.choice([0.0, 0.5, 1.0, draw.random()]))
            for _ in range(3)
        ]
        for _ in range(5)
    ]
    every = [
        (sum(o.bytes for o in each), math.fsum(o.error for o in each))
        for each in itertools.product(*groups)
    ]
    whole = front(groups, 10_000)
    for limit in range(0, 210, 7):
        within = [error for size, error in every if size <= limit]
        found = front(groups, limit)
        assert bool(within) == bool(len(found.bytes))
        if within:
            assert found.errors[-1] == pytest.approx(min(within))
            below = whole.errors[whole.bytes <= limit]
            assert below[-1] == pytest.approx(min(within))
    for index in range(len(whole.bytes)):
        chosen = [group[i] for group, i in zip(groups, whole.choice(index), strict=True)]
        assert sum(o.bytes for o in chosen) == whole.bytes[index]
        assert sum(o.error for o in chosen) == pytest.approx(whole.errors[index])


def test_infinite_errors_are_never_chosen():
    found = front([[Option(1, math.inf), Option(9, 1.0)], [Option(1, 0.5)]], 100)
    assert found.bytes.tolist() == [10]
    assert found.choice(0) == [1, 0]


# ---- the search
# ---------------------------------------------------------------------------------------------


def test_the_best_choice_and_what_it_measures():
    model, inputs = make_model(), make_inputs()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    result = qtensor.search(model, inputs, budget_bits=6, formats=FORMATS, metric="sqnr")
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    # Independently: the error of each layer alone, all choices, and the bytes of real tensors.
    names = ("0", "2", "4")
    with torch.no_grad():
        references = [model(x) for x in inputs]

    def error_of(formats):
        copy = make_model()
        copy.load_state_dict(before)
        for name, fmt in formats.items():
            layer = copy.get_submodule(name)
            layer.weight = nn.Parameter(qtensor.quantize(layer.weight.detach(), fmt), False)
        with torch.no_grad():
            pairs = zip(references, inputs, strict=True)
            return sum(noise(r, copy(x)) for r, x in pairs) / len(inputs)

    def size_of(name, fmt):
        return qtensor.quantize(before[f"{name}.weight"], fmt).nbytes

    alone = {(n, f): error_of({n: f}) for n in names for f in FORMATS}
    values = sum(before[f"{n}.weight"].numel() for n in names)
    fitting = [
        (sum(alone[n, f] for n, f in zip(names, formats, strict=True)), formats)
        for formats in itertools.product(FORMATS, repeat=3)
        if 8 * sum(size_of(n, f) for n, f in zip(names, formats, strict=True)) <= 6 * values
    ]
    predicted, best = min(fitting)
    assert result.formats == dict(zip(names, best, strict=True))
    assert result.predicted == pytest.approx(predicted)
    assert result.measured == pytest.approx(error_of(result.formats))
    assert result.bits <= 6
    bits, errors = [p.bits for p in result.curve], [p.predicted for p in result.curve]
    assert bits == sorted(set(bits))
    assert errors == sorted(set(errors), reverse=True)

    result.apply(model)
    for name in names:
        assert model.get_submodule(name).weight._quantizer.canonical == result.formats[name]
    with torch.no_grad():
        pairs = zip(references, inputs, strict=True)
        applied = sum(noise(r, model(x)) for r, x in pairs) / len(inputs)
    assert applied == pytest.approx(result.measured)


def test_high_precision_pins_and_groups():
    model, inputs = make_model(), make_inputs()
    result = qtensor.search(
        model,
        inputs,
        budget_bits=20,
        formats=["mxfp4", None],
        groups=[["0", "2"]],
        pinned={"4": "mxfp8"},
        metric="sqnr",
    )
    assert result.formats["0"] == result.formats["2"]
    assert result.formats["4"] == "mxfp8"
    assert {group.names for group in result.groups} == {("4",), ("0", "2")}
    assert "high precision" in str(qtensor.search(model, inputs, budget_bits=32, formats=[None]))


def test_activations():
    model, inputs = make_model(), make_inputs()
    options = {"budget_bits": 9, "formats": FORMATS, "metric": "sqnr", "pinned": {"2": None}}
    weights = qtensor.search(model, inputs, **{**options, "budget_bits": 20})
    both = qtensor.search(model, inputs, activations=True, **{**options, "budget_bits": 20})
    assert both.measured > weights.measured
    with torch.no_grad():
        references = [model(x) for x in inputs]
    both.apply(model)
    assert isinstance(model[0], qtensor.Linear)
    assert type(model[2]) is nn.Linear
    with torch.no_grad():
        pairs = zip(references, inputs, strict=True)
        applied = sum(noise(r, model(x)) for r, x in pairs) / len(inputs)
    assert applied == pytest.approx(both.measured, rel=1e-3)


def test_save_and_load(tmp_path):
    result = qtensor.search(make_model(), make_inputs(), budget_bits=6, formats=FORMATS)
    path = str(tmp_path / "choice.json")
    result.save(path)
    assert SearchResult.load(path) == result
    (tmp_path / "other.json").write_text('{"version": 1}')
    with pytest.raises(qtensor.QTensorError, match=r"SearchResult\.save"):
        SearchResult.load(str(tmp_path / "other.json"))
    data = json.loads((tmp_path / "choice.json").read_text())
    (tmp_path / "newer.json").write_text(json.dumps({**data, "version": 2}))
    with pytest.raises(qtensor.QTensorError, match="reads version 1"):
        SearchResult.load(str(tmp_path / "newer.json"))


def test_resume(tmp_path):
    """A search that was interrupted measures only what is missing."""
    path, calls, probes = str(tmp_path / "search.jsonl"), [], 3

    def metric(reference, output):
        calls.append(1)
        if len(calls) == probes + 9:
            raise KeyboardInterrupt
        return noise(reference, output)

    options = {"budget_bits": 6, "formats": FORMATS, "metric": metric, "resume": path}
    with pytest.raises(KeyboardInterrupt):
        qtensor.search(make_model(), make_inputs(), **options)
    with open(path, "a") as file:
        file.write('{"key": "2 in mx')  # cut off in the middle of a line
    done = []
    result = qtensor.search(
        make_model(), make_inputs(), progress=lambda *step: done.append(step), **options
    )
    # Of nine measurements of two inputs four were kept; five and the whole choice were missing.
    assert len(calls) == 9 + 2 * 6 + 2 * probes
    assert [step[:2] for step in done] == [(i, 9) for i in range(1, 10)]
    fresh = qtensor.search(make_model(), make_inputs(), **{**options, "resume": None})
    assert result == fresh

    other = [torch.randn(16, 64)]
    with pytest.raises(qtensor.QTensorError, match="same outputs in high precision"):
        qtensor.search(make_model(), other, **options)
    (tmp_path / "text").write_text("text\nmore\n")
    with pytest.raises(qtensor.QTensorError, match="an earlier search wrote"):
        qtensor.search(make_model(), make_inputs(), **{**options, "resume": str(tmp_path / "text")})


def test_resume_with_another_metric(tmp_path):
    """Metrics of one name are told apart by what they return, not taken for each other."""

    def top(count):
        def missed(reference, output):
            wanted = reference.argmax(-1, keepdim=True)
            return 1 - float((output.topk(count, -1).indices == wanted).any(-1).float().mean())

        return missed

    metrics = {
        "missed": [top(1), top(5)],
        "<lambda>": [lambda r, o: noise(r, o), lambda r, o: noise(o, r)],
    }
    for name, (first, second) in metrics.items():
        options = {"budget_bits": 6, "formats": FORMATS, "resume": str(tmp_path / name)}
        found = qtensor.search(make_model(), make_inputs(), metric=first, **options)
        assert found.metric == name
        with pytest.raises(qtensor.QTensorError, match="a search with the same metric's values"):
            qtensor.search(make_model(), make_inputs(), metric=second, **options)
        assert qtensor.search(make_model(), make_inputs(), metric=first, **options) == found


def test_the_model_is_restored_after_an_error():
    model = make_model()
    own = [p for p in model.parameters()]

    def metric(reference, output):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        qtensor.search(model, make_inputs(), budget_bits=6, metric=metric, activations=True)
    assert all(a is b for a, b in zip(own, model.parameters(), strict=True))
    assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": []}, "at least one input"),
        ({"inputs": torch.randn(16, 64)}, "a list of inputs of the model; got a Tensor"),
        ({"inputs": None}, "a list of inputs of the model; got a NoneType"),
        ({"budget_bits": "5"}, "a number of bits; got '5'"),
        ({"formats": "mxfp4"}, "a list of formats; got 'mxfp4'"),
        ({"metric": lambda reference, output: None}, "one number.*NoneType from <lambda>"),
        ({"metric": lambda reference, output: output}, r"one number.*\(16, 32\) from <lambda>"),
        ({"budget_bits": 4}, r"Pass 4\.67 or more"),
        ({"budget_bits": math.nan}, "budget_bits"),
        ({"formats": []}, "at least one format"),
        ({"formats": ["nvfp5"]}, "nvfp5"),
        ({"metric": "mse"}, "kl, sqnr"),
        ({"metric": lambda reference, output: math.nan}, "must leave the model's outputs finite"),
        ({"pinned": {"7": "mxfp8"}}, "pinned must match"),
        ({"groups": [["0", "7"]]}, "groups must match"),
        ({"groups": [["0"], ["*"]]}, "one group only"),
        ({"groups": ["02"]}, "a list of names"),
        ({"filter_fn": lambda module, name: False}, "needs layers of kinds.* got 0: filtered"),
    ],
)
def test_bad_arguments(change, message):
    options = {"inputs": make_inputs(), "budget_bits": 5, "formats": FORMATS, **change}
    with pytest.raises(qtensor.QTensorError, match=message):
        qtensor.search(make_model(), options.pop("inputs"), **options)


def test_default_groups():
    block = "model.layers.0"
    names = [
        f"{block}.self_attn.q_proj",
        f"{block}.self_attn.k_proj",
        f"{block}.self_attn.v_proj",
        f"{block}.self_attn.o_proj",
        f"{block}.mlp.experts.0.gate_proj",
        f"{block}.mlp.experts.0.up_proj",
        f"{block}.mlp.experts.0.down_proj",
        f"{block}.mlp.experts.1.gate_proj",
        f"{block}.mlp.experts.1.up_proj",
        f"{block}.mlp.experts.1.down_proj",
        "lm_head",
    ]
    groups = layer_groups("search", names, None)
    assert groups == [
        tuple(names[:3]),
        (names[3],),
        (names[4], names[5], names[7], names[8]),
        (names[6], names[9]),
        ("lm_head",),
    ]


class Attention(nn.Module):
    """Projections that servers fuse into one matrix."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.k_proj, self.v_proj = [nn.Linear(64, 32) for _ in range(3)]
        self.o_proj = nn.Linear(32, 32)

    def forward(self, x):
        return self.o_proj(self.q_proj(x) + self.k_proj(x) + self.v_proj(x))


def test_a_pin_holds_for_the_group():
    model, options = Attention(), {"budget_bits": 32, "formats": ["mxfp4"]}
    found = qtensor.search(model, make_inputs(), pinned={"k_proj": "mxfp8"}, **options)
    fused = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "mxfp8")
    assert found.formats == {**fused, "o_proj": "mxfp4"}
    high = qtensor.search(model, make_inputs(), pinned={"v_proj": None}, **options)
    assert high.formats == {**dict.fromkeys(fused), "o_proj": "mxfp4"}
    apart = qtensor.search(model, make_inputs(), pinned={"q_proj": "mxfp8"}, groups=[], **options)
    assert apart.formats == {**dict.fromkeys(found.formats, "mxfp4"), "q_proj": "mxfp8"}
    with pytest.raises(qtensor.QTensorError, match="q_proj: mxfp8, v_proj: high precision"):
        qtensor.search(model, make_inputs(), pinned={"q_proj": "mxfp8", "v_proj": None}, **options)


def test_metrics():
    a, b = torch.tensor([[0.0, 0.0]]), torch.tensor([[math.log(3), 0.0]])
    # p = (1/2, 1/2), q = (3/4, 1/4)
    assert kl(a, b) == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25))
    assert noise(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.0])) == pytest.approx(1 / 25)


def test_metrics_of_many_rows():
    """They are computed in chunks, and are those of all rows together."""
    torch.manual_seed(0)
    a, b = torch.randn(3, 50, 5000, dtype=torch.bfloat16), torch.randn(3, 50, 5000)
    p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
    assert kl(a, b) == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-12)
    ratio = (a.double() - b.double()).square().sum() / a.double().square().sum()
    assert noise(a, b) == pytest.approx(float(ratio), rel=1e-12)
    assert math.isnan(kl(a[:0], b[:0]))


@pytest.mark.skipif(not RESET.exists(), reason="the peak of the memory is read from /proc")
@pytest.mark.parametrize("metric", ["kl", "sqnr"])
def test_peak_memory(metric):
    """A search holds the outputs in high precision, what a run needs, and a few MiB."""
    torch.manual_seed(0)
    model, x = nn.Linear(32, 16384, bias=False), torch.randn(512, 32)
    outputs = 512 * 16384 * 4 / 2**20
    options = {"budget_bits": 9, "formats": ["mxfp8"], "metric": metric}
    qtensor.search(model, [x[:1]], **options)
    # The layer holds its output and a product before it; the allocator gives some back late.
    assert peak_mib(lambda: qtensor.search(model, [x], **options)) < 5 * outputs
    reference, output = torch.randn(2, 512, 16384)
    function = {"kl": kl, "sqnr": noise}[metric]
    assert peak_mib(lambda: function(reference, output)) < 2 * outputs


def test_what_models_return():
    x = torch.randn(2, 3, 4)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert call("search", "inputs[0]", lambda x: (x, 1), x) is x
    assert call("search", "inputs[0]", lambda x: types.SimpleNamespace(logits=x), x) is x
    assert call("search", "inputs[0]", lambda x, y: x, (x, 2)) is x
    output = types.SimpleNamespace(last_hidden_state=x)
    kept = call("search", "inputs[0]", lambda **batch: output, {"x": x, "attention_mask": mask})
    assert torch.equal(kept, torch.stack([x[0, 0], x[0, 1], x[1, 0]]))
    with pytest.raises(qtensor.ArgumentTypeError, match="floating tensor"):
        call("search", "inputs[0]", lambda x: "text", x)
