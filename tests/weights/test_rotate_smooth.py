"""``rotate_`` and ``smooth_`` leave what a model computes; quantizing it then loses less."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import qtensor
from qtensor.modules.input_hook import QUANTIZER, TRANSFORM, set_input_step
from qtensor.modules.input_quantizer import InputQuantizer
from qtensor.modules.input_transform import InputTransform, _hadamard, hadamard_matrix
from qtensor.weights.calibration import survey
from qtensor.weights.layers import weight_layers
from qtensor.weights.rotation import moved_by, rotated

transformers = pytest.importorskip("transformers", reason="needs the extra transformers")
IDS = torch.arange(24).reshape(2, 12) % 60
COMMON = {
    "vocab_size": 64,
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 160,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
READS, VALUES, ONLINE = "reads the residual", "rotated with it in groups of", "its inputs are"
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def make(kind, **options):
    """Return a small random model whose norms are not 1, and whose inputs have outliers."""
    torch.manual_seed(0)
    text = "Text" if kind == "Gemma3" else ""
    config = getattr(transformers, f"{kind}{text}Config")(**COMMON | options)
    name = "BertModel" if kind == "Bert" else f"{kind}ForCausalLM"
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.3, 1.5)
            if parameter.ndim == 1 and "norm" in name.lower() and name.endswith("weight"):
                parameter[5] = 12.0
    return model


def output(model):
    with torch.no_grad():
        found = model(input_ids=IDS)
    return getattr(found, "logits", None) if "logits" in found else found.last_hidden_state


def assert_same_outputs(model, before):
    moved = (output(model) - before).abs().max() / before.abs().max()
    assert moved < 1e-3
    return float(moved)


def notes(report):
    return {r.name: r.note for r in report.swapped}


KINDS = {
    "Llama": (11, 2, {}),
    "Qwen3": (11, 2, {}),
    "Mixtral": (11, 0, EXPERTS),  # the router and both halves of the experts' first product
    "GptOss": (11, 0, EXPERTS),  # its experts are (E, K, N), with biases
    "Gemma": (11, 2, {}),
    "Bert": (0, 11, {"num_attention_heads": 3}),  # LayerNorm behind the sum
    "Gemma3": (0, 13, {"layer_types": ["full_attention"] * 2}),  # norms of what is added, too
}
"""Layers that read the residual, and layers with an ``InputTransform``.

Besides, the output projection of each attention reads rotated values, in groups of a head.
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_rotated_model_computes_the_same(kind):
    reading, online, options = KINDS[kind]
    model = make(kind, **options)
    before, weights = output(model), copy.deepcopy(model.state_dict())
    found = notes(qtensor.rotate_(model, [{"input_ids": IDS}], size=32))
    assert_same_outputs(model, before)
    assert sum(note.startswith(READS) for note in found.values()) == reading
    assert sum(note.startswith(ONLINE) for note in found.values()) == online
    pairs = [name for name, note in found.items() if VALUES in note]
    assert len(pairs) == 2
    assert all(name.endswith(("o_proj", "attention.output.dense")) for name in pairs)
    for name in found:
        parameter = name if name in weights else f"{name}.weight"
        assert not torch.equal(model.state_dict()[parameter], weights[parameter]), name


def test_a_tied_head_keeps_the_residual():
    model = make("Llama", tie_word_embeddings=True)
    before = output(model)
    report = qtensor.rotate_(model, [{"input_ids": IDS}])
    assert_same_outputs(model, before)
    assert any("is tied to" in r.note for r in report.skipped if r.name == "(residual)")
    assert not any(note.startswith(READS) for note in notes(report).values())


class ReadsTheResidual(nn.Module):
    """A model that uses the output of a norm beside the linear layer behind it."""

    def __init__(self):
        super().__init__()
        self.tokens, self.norm = nn.Embedding(60, 64), nn.RMSNorm(64)
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, ids):
        x = self.tokens(ids)
        y = self.norm(x)
        return self.down(self.up(y).relu() + y.sin()) + x.cos()


def test_other_readers_are_noticed():
    torch.manual_seed(0)
    model = ReadsTheResidual()
    with torch.no_grad():
        before = model(IDS)
        report = qtensor.rotate_(model, [IDS], size=16)
        assert "the residual has other readers" in report.skipped[-1].note
        assert {*notes(report)} == {"up", "down"}
        torch.testing.assert_close(model(IDS), before, rtol=1e-4, atol=1e-5)
        with pytest.raises(qtensor.QTensorError, match="no such place"):
            qtensor.smooth_(ReadsTheResidual(), "mxfp4", [IDS])


def quantized(model, fmt, inputs):
    model = copy.deepcopy(model)
    qtensor.quantize_(model, fmt)
    for layer in [m for m in model.modules() if isinstance(m, nn.Linear)]:
        if inputs:
            set_input_step(layer, QUANTIZER, InputQuantizer(fmt))
    return model


def loss(model, fmt, inputs, before):
    found = output(quantized(model, fmt, inputs))
    return float((found - before).square().sum() / before.square().sum())


@pytest.mark.parametrize(
    ("fmt", "prepare", "limit"),
    [("mxfp4", "rotate_", 0.8), ("mxfp4", "smooth_", 0.8), ("nvfp4", "smooth_", 0.95)],
)
def test_less_is_lost(fmt, prepare, limit):
    """The norms of the model blow up one channel by 12. Blocks of 16 gain nothing by rotations.

    For rotations, inputs of the layers that read no norm have outliers, too.
    """
    model = make("Llama")
    if prepare == "rotate_":
        with torch.no_grad():
            for block in model.model.layers:
                block.self_attn.v_proj.weight[3] *= 30
                block.mlp.up_proj.weight[7] *= 30
    before, batches = output(model), [{"input_ids": IDS}]
    plain = loss(model, fmt, True, before)
    if prepare == "rotate_":
        qtensor.rotate_(model, batches)
    else:
        qtensor.smooth_(model, fmt, batches, inputs=fmt)
    assert loss(model, fmt, True, before) < limit * plain


def test_where_scales_are_folded():
    model = make("Llama")
    before = output(model)
    report = qtensor.smooth_(model, "mxfp4", [{"input_ids": IDS}], inputs="mxfp4", alpha=0.5)
    assert_same_outputs(model, before)
    sources = {
        name.replace("model.layers.", ""): note.split()[2].replace("model.layers.", "")
        for name, note in notes(report).items()
    }
    for i in range(2):
        for name in ("q_proj", "k_proj", "v_proj"):
            assert sources[f"{i}.self_attn.{name}"] == f"{i}.input_layernorm"
        assert sources[f"{i}.self_attn.o_proj"] == f"{i}.self_attn.v_proj"
        assert sources[f"{i}.mlp.gate_proj"] == f"{i}.post_attention_layernorm"
        assert sources[f"{i}.mlp.down_proj"] == f"{i}.mlp.up_proj"


@pytest.mark.parametrize(("kind", "options"), [("Mixtral", EXPERTS), ("Gemma", {}), ("Bert", {})])
def test_scales_of_other_models(kind, options):
    model = make(kind, **options)
    before = output(model)
    found = notes(qtensor.smooth_(model, "nvfp4", [{"input_ids": IDS}]))
    assert_same_outputs(model, before)
    if kind == "Bert":
        assert {"encoder.layer.0.attention.output.dense"} <= {*found}
        assert not any("query" in name for name in found)
    if kind == "Mixtral":
        assert any(name.endswith("experts.gate_up_proj") for name in found)
        assert any(name.endswith("experts.down_proj") for name in found)


def test_scales_between_the_products_of_experts():
    """An expert has scales of its own, and one that no token reached has none."""
    model = make("Mixtral", **EXPERTS | {"num_local_experts": 32, "num_hidden_layers": 1})
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        experts.gate_up_proj[:, 160 + 7] *= 30  # the second half are the rows of "up"
    before, weights = output(model), copy.deepcopy(experts.state_dict())
    batch = {"input_ids": IDS[:1, :4]}
    report = qtensor.smooth_(
        model, "mxfp4", [batch], lambda m, n: "experts" in n, inputs="mxfp4", alpha=0.5
    )
    assert_same_outputs(model, before)
    name = "model.layers.0.mlp.experts"
    note = notes(report)[f"{name}.down_proj"]
    assert f"scales of {name}.gate_up_proj" in note
    old, new = weights["down_proj"].double(), experts.down_proj.detach().double()
    scales = (new / old).mean(1)  # (E, N)
    reached = [e for e in range(32) if not torch.equal(new[e], old[e])]
    assert note.endswith(f"{len(reached)} experts")
    assert 2 <= len(reached) <= 8, "four tokens reach at most eight experts"
    assert scales[reached, 7].mean() > 2 * scales[reached].mean()
    # The columns of both halves got scales of the norm in front.
    ratio = experts.gate_up_proj.detach().double() / weights["gate_up_proj"].double()
    columns = ratio[:, :160].mean(1, keepdim=True)
    wanted = columns / scales[..., None]
    torch.testing.assert_close(ratio[:, 160:], wanted, rtol=1e-5, atol=1e-5)


def test_smooth_after_rotate():
    model = make("Llama")
    before = output(model)
    qtensor.rotate_(model, [{"input_ids": IDS}])
    report = qtensor.smooth_(model, "mxfp4", [{"input_ids": IDS}], inputs="mxfp4", alpha=0.5)
    found, left = notes(report), {own.name: own.note for own in report.skipped}
    assert_same_outputs(model, before)
    assert left["model.layers.1.mlp.down_proj"] == "its inputs have a transform already"
    assert any("o_proj" in name for name in found)  # its rotation is in the weights
    assert not any("down_proj" in name for name in found)


def test_values_are_rotated_at_each_call_on_request():
    model = make("Llama")
    before = output(model)
    found = notes(qtensor.rotate_(model, [{"input_ids": IDS}], values=False))
    assert_same_outputs(model, before)
    name = "model.layers.0.self_attn.o_proj"
    assert found[name] == "its inputs are rotated in groups of 128 at each call"


def test_the_group_of_a_rotated_head():
    """Heads of 48 channels, and twice as many for queries as for values: groups of 16."""
    model = make("Llama", head_dim=48)
    before, weights = output(model), copy.deepcopy(model.state_dict())
    only = lambda layer, name: name.endswith(("v_proj", "o_proj"))  # noqa: E731
    found = notes(qtensor.rotate_(model, [{"input_ids": IDS}], only, size=64, residual=False))
    assert_same_outputs(model, before)
    name = "model.layers.0.self_attn"
    assert found[f"{name}.o_proj"] == f"reads {name}.v_proj, rotated with it in groups of 16"
    values = weights[f"{name}.v_proj.weight"].double()
    wanted = rotated(values.t(), 16).t().float()
    wanted = rotated(wanted.double(), 32).float()  # its own inputs, at each call
    assert torch.equal(model.state_dict()[f"{name}.v_proj.weight"], wanted)
    reader = rotated(weights[f"{name}.o_proj.weight"].double(), 16).float()
    assert torch.equal(model.state_dict()[f"{name}.o_proj.weight"], reader)


def test_roundings_see_rotated_inputs():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)), torch.randn(50, 64)
    qtensor.rotate_(model, [x], size=16)
    layers, _ = weight_layers("test", model, None)
    with torch.no_grad():
        squares = survey(model, layers, [x])["0"].squares[0]
    torch.testing.assert_close(squares, rotated(x, 16).double().square().sum(0))
    qtensor.quantize_(model, "mxfp4", rounding="gptq", calibration=[x])
    assert isinstance(model[0].input_transform, InputTransform)


def test_a_rotated_layer_is_a_module_like_others():
    torch.manual_seed(0)
    layer, x = nn.Sequential(nn.Linear(64, 32)), torch.randn(3, 64)
    want = layer(x)
    qtensor.rotate_(layer, [x], size=32)
    rotation = layer[0].input_transform
    torch.testing.assert_close(
        rotation(x),
        x.unflatten(-1, (2, 32)).matmul(hadamard_matrix(32)).flatten(1) / 32**0.5,
    )
    for other in (
        layer,
        copy.deepcopy(layer),
        torch.compile(layer, fullgraph=True, backend="eager"),
    ):
        torch.testing.assert_close(other(x), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer[0](input=x), want, rtol=1e-5, atol=1e-5)
    assert {*layer.state_dict()} == {"0.weight", "0.bias", "0.input_transform.hadamard"}
    half = copy.deepcopy(layer).bfloat16()
    assert half(x.bfloat16()).dtype is torch.bfloat16
    torch.testing.assert_close(half(x.bfloat16()).float(), want, rtol=0.05, atol=0.05)
    # The rotation comes before the quantizer of the inputs, in whatever order they were set.
    set_input_step(layer[0], QUANTIZER, InputQuantizer("mxfp8"))
    wanted = F.linear(qtensor.quantize(rotation(x), "mxfp8"), layer[0].weight, layer[0].bias)
    assert torch.equal(layer(x), wanted)


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda m, x: qtensor.rotate_(m, [x], size=100), "size is a power of two"),
        (lambda m, x: qtensor.rotate_(m, [x], size=8), "of at least 16; got 8"),
        (lambda m, x: qtensor.rotate_(m, [x], size="64"), "size is a power of two.*got '64'"),
        (lambda m, x: qtensor.rotate_(m, [x / 0]), r"NaN in the output of calibration\[0\]"),
        (lambda m, x: qtensor.rotate_(m, [x[:0]]), r"an empty output of calibration\[0\]"),
        (lambda m, x: qtensor.smooth_(m, "mxfp4", [x[:0]]), "an empty output"),
        (lambda m, x: qtensor.rotate_(copy.deepcopy(m).to("meta"), [x.to("meta")]), "no data"),
        (lambda m, x: qtensor.rotate_(m, []), "at least one input"),
        (lambda m, x: qtensor.rotate_(m, [x], lambda layer, name: False), "must allow a rotation"),
        (lambda m, x: qtensor.smooth_(m, "mxfp4", [x], alpha=2), "alpha is a number from 0 to 1"),
        (lambda m, x: qtensor.smooth_(m, "mxfp4", [x], alpha="a"), "from 0 to 1, or None; got 'a'"),
        (lambda m, x: qtensor.smooth_(m, "mxfp4", [x]), "no such place"),
        (lambda m, x: qtensor.smooth_(m, "mxfp9", [x]), "mxfp9"),
    ],
)
def test_errors_leave_the_model(call, rule):
    model = nn.Sequential(nn.Linear(64, 32))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(qtensor.QTensorError, match=rule):
        call(model, torch.randn(3, 64))
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert not hasattr(model[0], "input_transform")


PREPARATIONS = {
    "rotate": lambda model: qtensor.rotate_(model, [IDS]),
    "smooth": lambda model: qtensor.smooth_(model, "nvfp4", [IDS]),
}


@pytest.mark.parametrize("prepare", PREPARATIONS)
def test_an_interrupt_leaves_the_model(prepare):
    """The third run of the model is a trial; the sixth follows changes that are final."""
    model = make("Llama")
    before = copy.deepcopy(model.state_dict())
    for stop in (3, 6):
        runs = iter(range(1, 99))

        def interrupt(module, args, kwargs, runs=runs, stop=stop):
            if next(runs) == stop:
                raise KeyboardInterrupt

        handle = model.register_forward_pre_hook(interrupt, with_kwargs=True)
        with pytest.raises(KeyboardInterrupt):
            PREPARATIONS[prepare](model)
        handle.remove()
        assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_an_error_leaves_the_bytes_of_bfloat16():
    """Rotated twice, weights of bfloat16 would be rounded twice."""

    class Reader(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + self[0].weight.sum(0)

    torch.manual_seed(0)
    model = Reader(nn.Linear(64, 64)).bfloat16()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(qtensor.QTensorError, match="outputs that moved by"):
        qtensor.rotate_(model, [torch.randn(3, 64).bfloat16()])
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_a_matrix_that_was_first_made_without_gradients_or_data():
    """All transforms of a size share one matrix."""
    _hadamard.cache_clear()
    with torch.inference_mode():
        InputTransform(hadamard=16)
    with FakeTensorMode():
        InputTransform(hadamard=32)
    for size in (16, 32):
        x = torch.randn(2, 64, requires_grad=True)
        y = InputTransform(hadamard=size)(x)
        y.square().sum().backward()
        torch.testing.assert_close(x.grad, 2 * x.detach())  # a rotation keeps the norm


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_with_blocks_of_another_size(assign):
    """The size was loaded, and the matrix was not."""
    torch.manual_seed(0)
    x = torch.randn(3, 64)
    plain = nn.Sequential(nn.Linear(64, 32))
    want, models = plain(x), [copy.deepcopy(plain) for _ in range(2)]
    for model, size in zip(models, (16, 64), strict=True):
        qtensor.rotate_(model, [x], size=size)
    models[0].load_state_dict(models[1].state_dict(), assign=assign)
    torch.testing.assert_close(models[0](x), want)
    assert "hadamard=64" in repr(models[0])


@pytest.mark.parametrize("failed", [False, True])
def test_a_second_rotation_of_the_residual_alone(failed, monkeypatch):
    """No layer rotates its inputs at each call; the second call undid the first one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(60, 64), nn.RMSNorm(64), nn.Linear(64, 32))
    if failed:
        with monkeypatch.context() as patched:
            patched.setattr("qtensor.weights.rotation.find_pairs", interrupt)
            with pytest.raises(KeyboardInterrupt):
                qtensor.rotate_(model, [IDS])
    assert READS in qtensor.rotate_(model, [IDS]).swapped[0].note
    rotated = model[2].weight.detach().clone()
    with pytest.raises(qtensor.QTensorError, match=r"rotated once.*rotation of the inputs of 1"):
        qtensor.rotate_(copy.deepcopy(model), [IDS])
    assert torch.equal(model[2].weight, rotated)


def interrupt(*args):
    raise KeyboardInterrupt


def test_a_second_rotation_and_inputs_that_are_quantized():
    torch.manual_seed(0)
    x = torch.randn(3, 64)
    model = make("Llama")
    qtensor.rotate_(model, [IDS])
    before = copy.deepcopy(model.state_dict())
    rule = "a model is rotated once.*got a rotation of the inputs of .*layers.0.mlp.down_proj"
    with pytest.raises(qtensor.QTensorError, match=rule):
        qtensor.rotate_(model, [IDS])
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    scaled = nn.Sequential(nn.Linear(64, 32))
    set_input_step(scaled[0], TRANSFORM, InputTransform(torch.ones(64)))
    with pytest.raises(qtensor.QTensorError, match="0: its inputs have a transform already"):
        qtensor.rotate_(scaled, [x])
    with pytest.raises(qtensor.QTensorError, match="no such place; 0: its inputs have a transform"):
        qtensor.smooth_(scaled, "mxfp4", [x])
    plain = nn.Sequential(nn.Linear(64, 32))
    qtensor.calibrate(plain, [x], "nvfp4").apply(plain)
    with pytest.raises(qtensor.QTensorError, match="quantized already; calibrate after rotate_"):
        qtensor.rotate_(plain, [x])
    assert moved_by([torch.tensor([1.0, -torch.inf])], [torch.tensor([1.0, -torch.inf])]) is None
    assert moved_by([torch.tensor([torch.nan, 1.0])], [torch.ones(2)]) == torch.inf
