"""``quantize_`` and ``search`` of convolutions, embeddings, recurrent layers and attention."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
from compile_helpers import Compiled
from gptq_oracle import assert_gptq, correlated
from rounding_cases import assert_same_bytes
from torch import nn
from torch.nn import functional as F

import qtensor
import qtensor.checkpoints
from qtensor.storage.rebuild import tensor_of
from qtensor.weights.layer_inputs import patches_of
from qtensor.weights.layers import KINDS


class Net(nn.Module):
    """One layer of each kind; the depthwise convolution has nine values in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 64)
        self.bag = nn.EmbeddingBag(50, 64)
        self.wide, self.deep = nn.Conv1d(64, 64, 3, padding=1), nn.Conv1d(64, 64, 9, groups=64)
        self.encoder = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.cross = nn.MultiheadAttention(64, 4, kdim=32, vdim=32, batch_first=True)
        self.lstm, self.gru = nn.LSTM(64, 32, batch_first=True), nn.GRU(32, 32, batch_first=True)
        self.head = nn.Linear(32, 50)

    def forward(self, index):
        x = self.table(index) + self.bag(index).unsqueeze(1)
        x = self.wide(x.mT).mT + F.pad(self.deep(x.mT), (4, 4)).mT
        x = self.encoder(x)
        x = x + self.cross(x, x[..., :32], x[..., :32])[0]
        return self.head(self.gru(self.lstm(x)[0])[0])


LINEAR = [
    *("encoder.self_attn.in_proj_weight", "encoder.self_attn.out_proj"),
    *("encoder.linear1", "encoder.linear2"),
    *(f"cross.{role}_proj_weight" for role in "qkv"),
    *("cross.out_proj", "head"),
]
OTHERS = {
    "convolution": ["wide"],
    "embedding": ["table", "bag"],
    "recurrent": [f"{rnn}.weight_{part}_l0" for rnn in ("lstm", "gru") for part in ("ih", "hh")],
}


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


INDEX = torch.arange(24).view(2, 12) * 7 % 50


def test_kinds_are_chosen_by_name(net):
    done = qtensor.quantize_(copy.deepcopy(net), "mxfp8")
    assert [report.name for report in done.swapped] == LINEAR
    plain = {report.name: report.note for report in done.dense}
    assert {"table", "bag", "wide", "deep", "lstm", "gru"} <= set(plain)
    share = 100 * net.lstm.weight_ih_l0.numel() / sum(p.numel() for p in net.parameters())
    assert float(plain["lstm"].removesuffix(" %")) > share
    for kind, names in OTHERS.items():
        model = copy.deepcopy(net)
        done = qtensor.quantize_(model, "mxfp8", kinds=[kind])
        assert [report.name for report in done.swapped] == names
        model(INDEX).sum().backward()
    model = copy.deepcopy(net)
    done = qtensor.quantize_(model, "mxfp8", kinds=KINDS)
    assert {report.name for report in done.swapped} == {*LINEAR, *itertools.chain(*OTHERS.values())}
    (skipped,) = done.skipped
    note = "a row has 9 values, less than a block of 32"
    assert (skipped.name, skipped.features, skipped.note) == ("deep", "64 -> 64, 9", note)
    assert "wide.weight" not in {report.name for report in done.dense}
    (row,) = [report for report in done.swapped if report.name == "wide"]
    assert row.features == "64 -> 64, 3"
    assert "weight=mxfp8" in str(model)


@pytest.mark.parametrize("fmt", ["fp8", "mxfp8", "nvfp4"])
def test_a_model_of_all_kinds(net, fmt):
    model, plain = copy.deepcopy(net), copy.deepcopy(net)
    qtensor.quantize_(model, fmt, kinds=KINDS)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, qtensor.QuantizedTensor):
            owner, _, own = name.rpartition(".")
            value = nn.Parameter(parameter.dequantize(), requires_grad=False)
            setattr(plain.get_submodule(owner), own, value)
    wanted = plain(INDEX)
    y = model(INDEX)
    # The same values, with sums in another order: some roundings of values near 1.
    assert (y - wanted).abs().max() < 1e-4
    with torch.no_grad():
        assert (model(INDEX) - wanted).abs().max() < 1e-4
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = Net().eval()
    loaded.load_state_dict(torch.load(file), assign=True)
    assert torch.equal(loaded(INDEX), y)


def test_files_hold_all_kinds(net, tmp_path):
    qtensor.quantize_(net, "nvfp4", kinds=KINDS)
    qtensor.checkpoints.save(net, tmp_path / "model.safetensors")
    with torch.device("meta"):
        loaded = Net().eval()
    state = qtensor.checkpoints.load_state_dict(tmp_path / "model.safetensors")
    loaded.load_state_dict(state, assign=True)
    assert torch.equal(loaded(INDEX), net(INDEX))
    report = qtensor.model_report(net)
    assert {"nvfp4", "plain"} <= {word.strip(":") for word in str(report).split()}


def test_attention_is_compiled(net):
    qtensor.quantize_(net, "mxfp8", kinds=["linear", "attention", "embedding"])
    layers = nn.Sequential(net.table, net.encoder)
    compiled = Compiled(layers)
    with torch.no_grad():
        assert torch.equal(compiled(INDEX), layers(INDEX))
    compiled.check_graphs(1)


# ---- calibration


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("options", [
    {},
    {"stride": 2, "padding": 1, "groups": 2},
    {"dilation": 2, "padding": "same"},
    {"padding": 2, "padding_mode": "circular"},
])  # fmt: skip
def test_patches_times_rows_is_the_convolution(rank, options):
    layer = getattr(nn, f"Conv{rank}d")(4, 6, 3, bias=False, **options).double()
    x = torch.randn(2, 4, *[9] * rank, dtype=torch.float64)
    y, groups = layer(x), layer.groups
    rows = layer.weight.flatten(1).unflatten(0, (groups, -1))
    parts = [rows[i % groups] @ patch.t() for i, patch in enumerate(patches_of(layer, x))]
    assert torch.allclose(torch.stack(parts).view(y.shape), y, atol=1e-12)


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp6"])
def test_a_convolution_is_compensated_for_its_patches(fmt):
    torch.manual_seed(1)
    layer = nn.Conv2d(8, 16, (2, 4), stride=2, padding=(0, 1))
    images = correlated(96, 64, 5).view(3, 32, 8, 8).mT.reshape(12, 8, 8, 8)
    plain = layer.weight.detach().flatten(1).clone()
    batches = [images[:5], images[5:]]
    done = qtensor.quantize_(layer, fmt, kinds=KINDS, rounding="gptq", calibration=batches)
    assert done.swapped[0].features == "8 -> 16, 2x4"
    rows = F.unfold(images, (2, 4), stride=2, padding=(0, 1)).mT.flatten(0, 1)
    assert_gptq(tensor_of(layer.weight), plain, rows, fmt)


@pytest.mark.parametrize("fast", [True, False])
def test_attention_is_compensated(fast):
    """The output projection is rounded for what attention with the quantized weights gives it."""
    torch.manual_seed(2)
    layer = nn.MultiheadAttention(32, 4, batch_first=True)
    x = correlated(200, 32, 3).view(2, 100, 32)
    plain = [layer.in_proj_weight.detach().clone(), layer.out_proj.weight.detach().clone()]

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = layer

        def forward(self, x):
            return self.attention(x, x, x, need_weights=not fast)[0]

    done = qtensor.quantize_(Own(), "mxfp4", rounding="gptq", calibration=[x])
    names = ["attention.in_proj_weight", "attention.out_proj"]
    assert [report.name for report in done.swapped] == names
    assert_gptq(layer.in_proj_weight, plain[0], x.flatten(0, 1), "mxfp4")
    products = F.linear(x, layer.in_proj_weight, layer.in_proj_bias)
    q, k, v = (t.unflatten(2, (4, -1)).transpose(1, 2) for t in products.chunk(3, -1))
    rows = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).flatten(0, 1)
    assert_gptq(layer.out_proj.weight, plain[1], rows, "mxfp4")
    assert torch.backends.mha.get_fastpath_enabled()


def test_convolutions_of_one_input_have_their_own_patches():
    torch.manual_seed(3)
    one, two = nn.Conv1d(32, 16, 1), nn.Conv1d(32, 16, 3, padding=1)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = one, two

        def forward(self, x):
            return self.one(x) + self.two(x)

    x = correlated(100, 32, 4).t().unsqueeze(0)
    plain = [layer.weight.detach().flatten(1).clone() for layer in (one, two)]
    qtensor.quantize_(Both(), "mxfp6", kinds=KINDS, rounding="gptq", calibration=[x])
    for layer, weight, width in zip((one, two), plain, (1, 3), strict=True):
        rows = F.unfold(x.unsqueeze(2), (1, width), padding=(0, width // 2))[0].t()
        assert_gptq(tensor_of(layer.weight), weight, rows, "mxfp6")


# ---- tied weights, search, errors


def test_a_table_tied_to_a_head_is_quantized_with_it():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(50, 64), nn.Linear(64, 50, bias=False)
            self.head.weight = self.table.weight

        def forward(self, index):
            return self.head(self.table(index))

    model = Tied()
    plain = model.table.weight.detach().clone()
    with pytest.raises(qtensor.QTensorError, match=r"its weight is tied: table.weight"):
        qtensor.quantize_(model, "nvfp4")
    done = qtensor.quantize_(
        model, "nvfp4", kinds=("linear", "embedding"), rounding="gptq", calibration=[INDEX]
    )
    assert "shared with head" in done.swapped[0].note
    assert model.head.weight is model.table.weight
    with pytest.raises(AssertionError):
        assert_same_bytes(model.head.weight, qtensor.quantize(plain, "nvfp4"))


def test_a_search_over_all_kinds(net):
    formats = ["nvfp4", "mxfp8"]
    result = qtensor.search(
        net, [INDEX], budget_bits=9, formats=formats, metric="sqnr", kinds=KINDS
    )
    names = {*LINEAR, *itertools.chain(*OTHERS.values()), "deep"}
    assert set(result.formats) == names
    assert result.formats["deep"] is None, "no format has blocks of nine values"
    with torch.no_grad():
        before = net(INDEX)
    result.apply(net)
    after = net(INDEX).detach()
    noise = float((after - before).square().sum() / before.square().sum())
    assert noise == pytest.approx(result.measured, rel=1e-3)
    again = qtensor.search(Net().eval(), [INDEX], budget_bits=9, formats=formats)
    assert set(again.formats) == set(LINEAR)


CALLS = {
    "a word": ({"kinds": "convolution"}, r"kinds holds some of linear.*got 'convolution'"),
    "an unknown kind": ({"kinds": ["conv"]}, r"kinds holds some of.*got \['conv'\]"),
    "nothing": ({"kinds": []}, r"kinds holds some of.*got none"),
    "a rounding without inputs": (
        {"kinds": ["embedding"], "rounding": "gptq", "calibration": [INDEX]},
        r"whose inputs can be seen; got table.weight, of kind 'embedding'.*second call",
    ),
    "a recurrent layer": (
        {"kinds": ["recurrent"], "rounding": "weighted_mse", "calibration": [INDEX]},
        r"got lstm.weight_ih_l0, of kind 'recurrent'",
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_that_are_refused(net, call):
    options, message = CALLS[call]
    before = net(INDEX)
    with pytest.raises(qtensor.QTensorError, match=message):
        qtensor.quantize_(net, "nvfp4", **options)
    assert torch.equal(net(INDEX), before)


def test_layers_that_stay_as_they_are():
    class Odd(nn.Embedding):
        pass

    class Turned(nn.MultiheadAttention):
        pass

    model = nn.ModuleDict({
        "scaled": nn.Embedding(8, 64, max_norm=1.0),
        "odd": Odd(8, 64),
        "turned": Turned(64, 4),
        "fits": nn.EmbeddingBag(8, 64),
    })
    done = qtensor.quantize_(model, "nvfp4", kinds=KINDS)
    notes = {report.name: report.note for report in done.skipped}
    assert "max_norm scales its rows" in notes["scaled"]
    assert "Odd is a subclass of nn.Embedding" in notes["odd"]
    own = "Turned is a subclass of nn.MultiheadAttention, with a forward of its own"
    assert (notes["turned.in_proj_weight"], notes["turned.out_proj"]) == (own, own)
    assert [report.name for report in done.swapped] == ["fits"]
    pinned = {"deep": "nvfp4"}
    with pytest.raises(qtensor.QTensorError, match="blocks are not longer than its rows; got deep"):
        qtensor.search(Net(), [INDEX], pinned=pinned, kinds=KINDS)
