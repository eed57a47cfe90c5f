"""Averaged models, adapters of low rank, parametrizations and offloading over quantized weights."""

from __future__ import annotations

import copy
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from formats import BY_NAME, FormatCase, assert_same_bytes, assert_same_tensor, formats, rand
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_multi_avg_fn,
)

import qtensor

STEPS = 3
AVERAGES: dict[
    str, tuple[Callable[[], dict[str, Any]], Callable[[Tensor, Tensor, int], Tensor]]
] = {
    "swa": (dict, lambda a, p, n: a + (p - a) / (n + 1)),
    "swa_multi": (
        lambda: {"multi_avg_fn": get_swa_multi_avg_fn()},
        lambda a, p, n: torch.lerp(a, p, 1 / (n + 1)),
    ),
    "ema": (lambda: {"avg_fn": get_ema_avg_fn(0.5)}, lambda a, p, n: 0.5 * a + (1 - 0.5) * p),
    "ema_multi": (
        lambda: {"multi_avg_fn": get_ema_multi_avg_fn(0.5)},
        lambda a, p, n: torch.lerp(a, p, 1 - 0.5),
    ),
}


def model_of(case: FormatCase, seed: int = 0) -> nn.Linear:
    layer = nn.Linear(64, 32)
    layer.weight = nn.Parameter(case.quantize(rand(32, 64, seed=seed)))
    return layer


def requantized(old: Any, values: Tensor) -> Any:
    return old.detach().clone().quantize_(values)


def trained(model: nn.Linear) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(rand(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# ---- averages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", AVERAGES)
@formats
def test_an_average_in_the_format_of_the_model(case: FormatCase, name: str) -> None:
    """Each update decodes, averages and quantizes once."""
    options, rule = AVERAGES[name]
    model = model_of(case)
    averaged = AveragedModel(model, **options())
    averaged.update_parameters(model)
    want = model.weight.detach().clone()
    assert_same_tensor(averaged.module.weight.detach(), want)
    for count in range(1, STEPS):
        trained(model)
        averaged.update_parameters(model)
        values = rule(want.dequantize(), model.weight.detach().dequantize(), count)
        want = requantized(want, values)
        assert_same_tensor(averaged.module.weight.detach(), want)
    assert not torch.equal(averaged.module.weight, model.weight)


@pytest.mark.parametrize("name", AVERAGES)
@formats
def test_a_plain_average_of_a_quantized_model(case: FormatCase, name: str) -> None:
    """The copy has plain parameters, so that no update is lost in rounding."""
    options, rule = AVERAGES[name]
    model = model_of(case)
    copied = copy.deepcopy(model)
    copied.weight = nn.Parameter(copied.weight.detach().dequantize())
    averaged = AveragedModel(copied, **options())
    want = model.weight.detach().dequantize()
    for count in range(STEPS):
        averaged.update_parameters(model)
        values = model.weight.detach().dequantize()
        want = rule(want, values, count) if count else values
        assert type(averaged.module.weight) is nn.Parameter
        assert_same_bytes(averaged.module.weight.detach(), want)
        trained(model)


def test_a_plain_average_of_converted_layers() -> None:
    """``revert_`` turns the copy into plain layers with the dequantized values."""
    model = nn.Sequential(nn.Linear(64, 32))
    qtensor.convert_(model, qtensor.recipes.MXFP8BlockScaling(), quantized_params=True)
    copied = copy.deepcopy(model)
    qtensor.revert_(copied)
    averaged = AveragedModel(copied, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    averaged.update_parameters(model)
    first = model[0].weight.detach().dequantize()
    trained(model)
    averaged.update_parameters(model)
    want = torch.lerp(first, model[0].weight.detach().dequantize(), 0.5)
    assert_same_bytes(averaged.module[0].weight.detach(), want)


@formats
def test_an_average_is_saved_and_loaded(case: FormatCase) -> None:
    model = model_of(case)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in range(2):
        averaged.update_parameters(model)
        trained(model)
    data = io.BytesIO()
    torch.save(averaged.state_dict(), data)
    data.seek(0)
    other = AveragedModel(model_of(case, seed=1), multi_avg_fn=get_ema_multi_avg_fn(0.5))
    other.load_state_dict(torch.load(data, weights_only=True))
    for one in (averaged, other):
        one.update_parameters(model)
    assert_same_tensor(other.module.weight.detach(), averaged.module.weight.detach())


# ---- adapters and parametrizations ---------------------------------------------------------------


class LowRank(nn.Module):
    """A parametrization: the decoded weight plus a product of low rank."""

    def __init__(self, rows: int, cols: int) -> None:
        super().__init__()
        self.a = nn.Parameter(rand(4, cols, seed=1))
        self.b = nn.Parameter(rand(rows, 4, seed=2))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


@formats
def test_parametrize_over_a_frozen_quantized_weight(case: FormatCase) -> None:
    """Forward, gradients, a copy and the removal equal those over the decoded weight."""
    layer, plain = model_of(case), nn.Linear(64, 32)
    plain.load_state_dict({"weight": layer.weight.detach().dequantize(), "bias": layer.bias})
    x, results = rand(8, 64, seed=3), []
    for module in (layer, plain):
        module.weight.requires_grad_(False)
        parametrize.register_parametrization(module, "weight", LowRank(32, 64))
        y = module(x)
        y.square().mean().backward()
        adapter = module.parametrizations.weight[0]
        results.append([y.detach(), adapter.a.grad, adapter.b.grad])
    for got, want in zip(*results, strict=True):
        assert_same_bytes(got, want)
    original = layer.parametrizations.weight.original
    assert isinstance(original, qtensor.QuantizedTensor)
    copied = copy.deepcopy(layer)
    assert_same_tensor(copied.parametrizations.weight.original.detach(), original.detach())
    assert_same_bytes(copied(x).detach(), results[0][0])
    values = layer.weight.detach()
    parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
    # What is left of the layer is the sum, which is not quantized.
    assert type(layer.weight) is nn.Parameter
    assert_same_bytes(layer.weight.detach(), values)


@formats
def test_removal_without_the_adapter_gives_the_quantized_weight_back(case: FormatCase) -> None:
    layer = model_of(case)
    before = layer.weight.detach().clone()
    parametrize.register_parametrization(layer, "weight", LowRank(32, 64))
    parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
    assert_same_tensor(layer.weight.detach(), before)


def test_weight_norm() -> None:
    """Of a plain weight under a recipe; of a quantized weight it is an error with the way out."""
    layer = weight_norm(qtensor.Linear(64, 32))
    with qtensor.autocast(recipe=qtensor.recipes.MXFP8BlockScaling()):
        layer(rand(32, 64)).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    with pytest.raises(qtensor.UnsupportedError, match=r"weight_norm.*dequantize\(\)"):
        weight_norm(model_of(BY_NAME["mxfp8"]))(rand(8, 64))


@pytest.mark.parametrize("name", ["fp8", "mxfp8", "nvfp4"])
def test_peft_adapters_of_a_quantized_base(name: str) -> None:
    """The base keeps its bytes while the adapters learn; a merge writes through the quantizer."""
    peft = pytest.importorskip("peft", reason="extra dev")
    torch.manual_seed(0)
    model = nn.Sequential(model_of(BY_NAME[name]), nn.ReLU(), nn.Linear(32, 8))
    base = model[0].weight.detach().clone()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["0"]))
    optimizer = torch.optim.AdamW((p for p in adapted.parameters() if p.requires_grad), lr=0.1)
    losses = []
    for _ in range(5):
        loss = adapted(rand(8, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    layer = adapted.base_model.model[0]
    assert_same_tensor(layer.base_layer.weight.detach(), base)
    delta = layer.get_delta_weight("default").detach()
    merged = adapted.merge_and_unload()
    assert_same_tensor(merged[0].weight.detach(), requantized(base, base.dequantize() + delta))


@pytest.mark.parametrize("stored", [False, True], ids=["plain", "stored"])
def test_peft_adapters_of_a_layer_of_qtensor(stored: bool) -> None:
    """``qtensor.Linear`` is an ``nn.Linear`` to peft: its output is that of the layer plus the
    adapter, and the base keeps its bytes.
    """
    peft = pytest.importorskip("peft", reason="extra dev")
    torch.manual_seed(0)
    recipe = qtensor.recipes.MXFP8BlockScaling()
    base = qtensor.Linear(64, 32, recipe=recipe, quantized_params=stored)
    before = base.weight.detach().clone()
    x = rand(32, 64)
    own = base(x).detach()
    adapted = peft.get_peft_model(
        nn.Sequential(base), peft.LoraConfig(r=4, target_modules=["0"], lora_dropout=0.0)
    )
    optimizer = torch.optim.AdamW((p for p in adapted.parameters() if p.requires_grad), lr=0.01)
    assert_same_bytes(adapted(x).detach(), own)  # the second factor begins at zero
    losses = []
    for _ in range(5):
        loss = adapted(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    layer = adapted.base_model.model[0]
    assert isinstance(layer.base_layer.weight, qtensor.QuantizedTensor) == stored
    assert torch.equal(layer.base_layer.weight.detach(), before)
    delta = layer.get_delta_weight("default").detach()
    merged = adapted.merge_and_unload()[0]
    assert isinstance(merged, qtensor.Linear)
    if stored:
        want = requantized(before, before.dequantize() + delta)
        assert_same_tensor(merged.weight.detach(), want)
    else:
        assert_same_bytes(merged.weight.detach(), before + delta)


# ---- parameter.data = plain, by which libraries merge --------------------------------------------


def test_peft_merges_dora_after_the_graph_is_gone() -> None:
    """A graph that reads the weight refuses the merge; without it, the merge makes it plain."""
    peft = pytest.importorskip("peft", reason="extra dev")
    torch.manual_seed(0)
    base = model_of(BY_NAME["mxfp8"]).requires_grad_(False)
    config = peft.LoraConfig(r=4, target_modules=["0"], use_dora=True, init_lora_weights=False)
    adapted = peft.get_peft_model(nn.Sequential(base), config)
    before, x = base.weight.detach().clone(), rand(8, 64).requires_grad_()
    y = adapted(x)
    with pytest.raises(qtensor.UnsupportedError, match=r"data\[mxfp8\].*graph.*backward\(\)"):
        adapted.merge_adapter()
    assert_same_tensor(base.weight.detach(), before)
    y.sum().backward()  # the refused merge has changed nothing that the graph reads
    adapted.merge_adapter()
    assert type(base.weight) is nn.Parameter
    torch.testing.assert_close(adapted(x), y)


def product(parameter: Any) -> Tensor:
    return nn.functional.linear(rand(3, 64).requires_grad_(), parameter)


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "product": product,
    "factor": lambda p: p * torch.ones(1, requires_grad=True),
    "slice": lambda p: p[:16],
    "weak reference": weakref.ref,
}


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_tensor_that_is_held_stays_quantized(holder: str, trained: bool) -> None:
    parameter = model_of(BY_NAME["nvfp4"]).weight.requires_grad_(trained)
    before, plain = parameter.detach().clone(), torch.ones(32, 64)
    held = HOLDERS[holder](parameter)
    with pytest.raises(qtensor.UnsupportedError, match=r"data\[nvfp4\]: .* holds .*Parameter\("):
        parameter.data = plain
    assert_same_tensor(parameter.detach(), before)
    if trained and isinstance(held, Tensor):
        held.sum().backward()
        assert parameter.grad is not None
    del held
    parameter.data = plain
    assert type(parameter) is nn.Parameter


@formats
def test_a_gradient_for_replaced_codes_is_refused(case: FormatCase) -> None:
    """The graph of ``dequantize`` saves no codes, so it does not keep the parameter quantized."""
    parameter = model_of(case).weight
    y = parameter.dequantize()
    parameter.data = torch.ones(32, 64)
    with pytest.raises(qtensor.UnsupportedError, match=r"backward: .*become plain"):
        y.sum().backward()
    assert parameter.grad is None
    parameter.square().sum().backward()
    assert_same_bytes(parameter.grad, torch.full((32, 64), 2.0))


@pytest.mark.parametrize("inference", [False, True])
@formats
def test_a_tensor_that_becomes_plain_keeps_what_others_set(
    case: FormatCase, inference: bool
) -> None:
    layer, plain = model_of(case), rand(32, 64, seed=1, dtype=torch.bfloat16)
    layer(rand(3, 64)).sum().backward()
    parameter, gradient = layer.weight, layer.weight.grad
    parameter.group = "decoder"
    with torch.inference_mode(inference):
        parameter.data = plain
    assert type(parameter) is nn.Parameter
    assert parameter.requires_grad
    assert parameter.group == "decoder"
    assert set(vars(parameter)) == {"group"}
    assert_same_bytes(parameter.grad, gradient.bfloat16())
    assert_same_bytes(parameter.detach(), plain)
    leaf = case.quantize(rand(32, 64)).requires_grad_()
    leaf.data = plain
    assert type(leaf) is Tensor
    assert leaf.requires_grad


def test_a_graph_or_a_hook_would_be_lost() -> None:
    plain = torch.ones(32, 64)
    result = qtensor.quantize(rand(32, 64).requires_grad_(), "mxfp8")
    hooked, accumulated = (model_of(BY_NAME["mxfp8"]).weight for _ in range(2))
    hooked.register_hook(lambda gradient: None)
    accumulated.register_post_accumulate_grad_hook(lambda parameter: None)
    for tensor in (result, hooked, accumulated):
        with pytest.raises(qtensor.UnsupportedError, match="would lose its graph and its hooks"):
            tensor.data = plain


# ---- calls that client libraries make, without these libraries


@formats
def test_offload_a_parameter_and_bring_it_back(case: FormatCase):
    """Accelerate rebuilds parameters with ``type(old)(new, requires_grad=...)``, also on meta."""
    layer, x = model_of(case), torch.randn(8, 64)
    expected, old = layer(x), layer.weight
    saved = layer.state_dict()["weight"]
    on_meta = type(old)(old.to("meta"), requires_grad=old.requires_grad).to("meta")
    layer._parameters["weight"] = on_meta
    assert on_meta.is_meta
    assert isinstance(on_meta, nn.Parameter)
    back = type(on_meta)(saved.to(on_meta.dtype), requires_grad=False).to("cpu")
    layer._parameters["weight"] = back
    assert isinstance(back, nn.Parameter)
    assert not back.requires_grad
    assert_same_bytes(layer(x), expected)


def test_a_plain_tensor_is_not_taken_for_a_quantized_one():
    """Weights that were offloaded as plain values cannot stand in for codes."""
    q = qtensor.quantize(torch.randn(32, 64), "mxfp8")
    with pytest.raises(qtensor.QTensorError, match=r"MXFP8Tensor: .*got Tensor\. Quantize it"):
        type(q)(q.dequantize(), requires_grad=False)


def test_adapters_find_converted_layers():
    """PEFT finds instances of torch.nn.Linear by class and name, and reads their attributes."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    qtensor.convert_(model, qtensor.recipes.MXFP8BlockScaling())
    found = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert [type(module) for module in found] == [qtensor.Linear] * 2
    assert [(m.in_features, m.out_features) for m in found] == [(64, 128), (128, 64)]
