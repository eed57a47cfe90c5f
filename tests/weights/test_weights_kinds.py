"""``quantize_`` of layers that are linear without being ``nn.Linear``, against a small GPTQ.

Conv1D of transformers, layers of qtensor, experts, and layers that share a weight.
"""

import copy

import pytest
import torch
from gptq_oracle import ELEMENT, assert_gptq, correlated
from rounding_cases import assert_same_bytes, named_buffers
from torch import nn

import qtensor
from qtensor.weights import calibration

by_format = pytest.mark.parametrize("fmt", list(ELEMENT))


@by_format
def test_the_oracle_and_linear(fmt):
    torch.manual_seed(0)
    layer, rows = nn.Linear(64, 16), correlated(200, 64, 1)
    plain = layer.weight.detach().clone()
    qtensor.quantize_(layer, fmt, rounding="gptq", calibration=[rows[:90], rows[90:]])
    assert_gptq(layer.weight, plain, rows, fmt)
    with pytest.raises(AssertionError):
        assert_gptq(qtensor.quantize(plain, fmt), plain, rows, fmt)
    with pytest.raises(AssertionError):
        assert_gptq(layer.weight, plain, rows.abs(), fmt)


# ---- Conv1D
# -------------------------------------------------------------------------------------------------


def conv1d(rows, columns):
    utils = pytest.importorskip("transformers.pytorch_utils", reason="needs the extra transformers")
    torch.manual_seed(2)
    return utils.Conv1D(rows, columns)


@by_format
def test_conv1d(fmt):
    """The weight (K, N) holds the quantized transpose; the module computes with it."""
    layer, rows = conv1d(16, 64), correlated(200, 64, 3)
    plain = layer.weight.detach().clone()
    done = qtensor.quantize_(layer, fmt, rounding="gptq", calibration=[rows.view(2, 100, 64)])
    assert (done.swapped[0].features, len(done.skipped)) == ("64 -> 16", 0)
    assert layer.weight.shape == (64, 16)
    assert_gptq(layer.weight.t(), plain.t(), rows, fmt)
    expected = rows @ layer.weight.t().dequantize().t() + layer.bias
    torch.testing.assert_close(layer(rows), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rounding", ["nearest", "mse"])
def test_conv1d_without_inputs(rounding):
    layer = conv1d(16, 64)
    linear = nn.Linear(64, 16)
    linear.weight = nn.Parameter(layer.weight.detach().t().contiguous())
    for model in (layer, linear):
        qtensor.quantize_(model, "nvfp4", rounding=rounding)
    assert_same_bytes(layer.weight.t(), linear.weight)


def test_a_gpt2():
    """All products of a GPT-2 but the tied head; a state dict holds the quantized weights."""
    library = pytest.importorskip("transformers", reason="needs the extra transformers")
    config = library.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2)
    torch.manual_seed(4)
    model = library.GPT2LMHeadModel(config).eval()
    inputs = [{"input_ids": torch.randint(64, (2, 16))} for _ in range(2)]
    with torch.no_grad():
        before = model(**inputs[0]).logits
    done = qtensor.quantize_(model, "mxfp8", rounding="gptq", calibration=inputs)
    names = [report.name.rpartition("h.0.")[2] for report in done.swapped]
    assert names == ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
    (skipped,) = done.skipped
    assert skipped.name == "lm_head"
    assert "tied: transformer.wte.weight" in skipped.note
    with torch.no_grad():
        after = model(**inputs[0]).logits
    # E4M3 has a half step of 2^-4; errors of four products in a row stay below it.
    assert float((after - before).norm() / before.norm()) < 2**-4


# ---- layers of qtensor
# -------------------------------------------------------------------------------------------------


def mxfp4_weights(role):
    return {"weight": "mxfp4", "input": "mxfp8"}.get(role.tensor)


MXFP4_WEIGHTS = qtensor.recipes.CustomRecipe(
    factory=mxfp4_weights, backward_override="high_precision"
)


@pytest.mark.parametrize("recipe", [None, MXFP4_WEIGHTS], ids=["no recipe", "recipe"])
def test_linear_of_qtensor(recipe):
    torch.manual_seed(5)
    layer, rows = qtensor.Linear(64, 32, recipe=recipe), correlated(200, 64, 6)
    plain = layer.weight.detach().clone()
    qtensor.quantize_(layer, "mxfp4", rounding="gptq", calibration=[rows])
    assert_gptq(layer.weight, plain, rows, "mxfp4")
    x = rows if recipe is None else qtensor.quantize(rows, "mxfp8").dequantize()
    with torch.no_grad():
        expected = x @ layer.weight.dequantize().t() + layer.bias
        torch.testing.assert_close(layer(rows), expected, rtol=1e-5, atol=1e-4)


def test_a_format_that_the_recipe_does_not_read():
    layer = qtensor.Linear(64, 32, recipe=qtensor.recipes.MXFP8BlockScaling())
    own = layer.weight
    with pytest.raises(qtensor.QTensorError, match="MXFP8BlockScaling reads weights as mxfp8"):
        qtensor.quantize_(nn.Sequential(nn.Linear(64, 64), layer), "nvfp4")
    assert layer.weight is own


def test_layers_that_compute_more_are_reported():
    model = nn.ModuleList([qtensor.LayerNormLinear(64, 32), nn.Linear(64, 32)])
    done = qtensor.quantize_(model, "mxfp8")
    assert [report.name for report in done.swapped] == ["1"]
    assert "computes more than a product" in done.skipped[0].note


# ---- experts
# -------------------------------------------------------------------------------------------------


class Routed(nn.Module):
    """A ``GroupedLinear``, and a linear layer after it."""

    def __init__(self):
        super().__init__()
        self.experts = qtensor.GroupedLinear(3, 64, 32, bias=False)
        self.out = nn.Linear(32, 16)

    def forward(self, x, splits):
        return self.out(self.experts(x, splits))


@by_format
@pytest.mark.parametrize("together", [True, False])
def test_grouped_linear(fmt, together, monkeypatch):
    """Each expert is compensated for the rows that it gets; one run holds all matrices or one."""
    if not together:
        monkeypatch.setattr(calibration, "MATRICES_BYTES", 1)
    torch.manual_seed(7)
    model, rows = Routed(), correlated(500, 64, 8)
    plain = [getattr(model.experts, f"weight{i}").detach().clone() for i in range(3)]
    batches = [
        (rows[:250], [100, 120, 30]),
        {"x": rows[250:], "splits": torch.tensor([90, 0, 160])},
    ]
    done = qtensor.quantize_(model, fmt, rounding="gptq", calibration=batches)
    assert [report.name for report in done.swapped] == ["experts", "out"]
    assert done.swapped[0].note.startswith(f"3 experts, {fmt}, ")
    parts = (
        torch.cat((rows[:100], rows[250:340])),
        rows[100:220],
        torch.cat((rows[220:250], rows[340:])),
    )
    for i, part in enumerate(parts):
        assert_gptq(getattr(model.experts, f"weight{i}"), plain[i], part, fmt)


def test_experts_without_inputs():
    """They are rounded to nearest, and the report says which; no inputs at all are an error."""
    torch.manual_seed(9)
    model, rows = Routed(), correlated(100, 64, 10)
    plain = model.experts.weight1.detach().clone()
    spare = copy.deepcopy(model)
    done = qtensor.quantize_(model, "mxfp8", rounding="gptq", calibration=[(rows, [40, 0, 60])])
    assert done.swapped[0].note.endswith("1 of 3 experts had no inputs (1)")
    assert_same_bytes(model.experts.weight1, qtensor.quantize(plain, "mxfp8"))
    with pytest.raises(qtensor.QTensorError, match="no input of experts"):
        qtensor.quantize_(spare, "mxfp8", rounding="gptq", calibration=[(rows[:0], [0, 0, 0])])


def experts_of_mixtral():
    library = pytest.importorskip("transformers", reason="needs the extra transformers")
    path = "transformers.models.mixtral.modeling_mixtral"
    mixtral = pytest.importorskip(path, reason="this version of transformers lacks Mixtral")
    if not hasattr(mixtral, "MixtralExperts"):
        pytest.skip(reason="this version of transformers has a linear layer for each expert")
    config = library.MixtralConfig(
        hidden_size=64, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2
    )
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(11)
    experts = mixtral.MixtralExperts(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    return experts.eval()


@by_format
def test_stacked_experts(fmt):
    """One weight (E, N, K): each expert for the tokens that the router sends to it."""
    experts, x = experts_of_mixtral(), correlated(240, 64, 12)
    plain = {name: p.detach().clone() for name, p in experts.named_parameters()}
    first = torch.arange(240) % 3  # no token for expert 3 of 4 but the first 60
    second = torch.where(torch.arange(240) < 60, 3, (first + 1) % 3)
    index, shares = torch.stack((first, second), 1), torch.full((240, 2), 0.5)
    batches = [(x[part], index[part], shares[part]) for part in (slice(0, 130), slice(130, 240))]
    done = qtensor.quantize_(experts, fmt, rounding="gptq", calibration=batches)
    assert [report.name for report in done.swapped] == ["gate_up_proj", "down_proj"]
    assert "forward" not in vars(experts)
    for expert in range(4):
        rows = x[(index == expert).any(1)]
        weight = experts.gate_up_proj[expert]
        assert_gptq(weight, plain["gate_up_proj"][expert], rows, fmt)
        gate, up = (rows @ weight.dequantize().t()).chunk(2, -1)
        inner = nn.functional.silu(gate) * up
        assert_gptq(experts.down_proj[expert], plain["down_proj"][expert], inner, fmt)
    with torch.no_grad():
        out = experts(*batches[0])
    assert out.isfinite().all()


def test_stacked_experts_by_scales():
    """``mse`` and ``weighted_mse`` search each block; one factor for all experts is refused."""
    experts, x = experts_of_mixtral(), correlated(80, 64, 13)
    index = torch.stack((torch.arange(80) % 4, (torch.arange(80) + 1) % 4), 1)
    batches = [(x, index, torch.full((80, 2), 0.5))]
    flat = {}
    for rounding in ("mse", "weighted_mse"):
        model = copy.deepcopy(experts)
        inputs = batches if rounding == "weighted_mse" else None
        qtensor.quantize_(model, "nvfp4", rounding=rounding, calibration=inputs)
        flat[rounding] = model.gate_up_proj
    nearest = qtensor.quantize(experts.gate_up_proj.detach(), "nvfp4")

    def error(weight):
        return float((weight.dequantize() - experts.gate_up_proj.detach()).double().square().sum())

    assert error(flat["mse"]) < error(flat["weighted_mse"]) < error(nearest)
    amax = "_amax_rowwise"
    assert torch.equal(named_buffers(flat["mse"])[amax], named_buffers(nearest)[amax])
    with pytest.raises(qtensor.QTensorError, match="factors of its own"):
        qtensor.quantize_(experts, "fp8", rounding="gptq", calibration=batches)


# ---- weights that layers share
# -------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


@by_format
def test_a_weight_of_two_layers(fmt):
    """Both inputs count, and both layers have the new weight."""
    torch.manual_seed(14)
    model, rows = Twice(), correlated(150, 64, 15)
    plain = model.first.weight.detach().clone()
    with torch.no_grad():
        inner = torch.tanh(model.first(rows))
    done = qtensor.quantize_(model, fmt, rounding="gptq", calibration=[rows])
    assert model.first.weight is model.second.weight
    assert [report.name for report in done.swapped] == ["first"]
    assert done.swapped[0].note.endswith(", shared with second")
    assert_gptq(model.first.weight, plain, torch.cat((rows, inner)), fmt)


def test_a_weight_that_is_shared_with_something_else():
    model = nn.ModuleDict({"words": nn.Embedding(32, 64), "head": nn.Linear(64, 32), "a": Twice()})
    model["head"].weight = model["words"].weight
    done = qtensor.quantize_(
        nn.ModuleList([model, nn.Linear(64, 64)]), "mxfp8", lambda m, name: name != "0.a.second"
    )
    notes = {report.name: report.note for report in done.skipped}
    assert notes["0.head"] == "its weight is tied: 0.words.weight, 0.head.weight"
    assert notes["0.a.first"] == "its weight is tied: 0.a.first.weight, 0.a.second.weight"
    assert notes["0.a.second"] == "filtered"
