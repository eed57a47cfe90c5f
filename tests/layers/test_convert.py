"""``convert_``: which layers are swapped, what they compute, and what is reported."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from convert_models import BLOCKS, convert, gradients, model, names
from formats import assert_same_bytes
from torch import nn

import qtensor
from qtensor import recipes
from qtensor.recipes import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

ALL = [
    Float8CurrentScaling(),
    Float8BlockScaling(),
    MXFP8BlockScaling(),
    NVFP4BlockScaling(disable_stochastic_rounding=True),
    DelayedScaling(),
]
each_recipe = pytest.mark.parametrize("recipe", ALL, ids=lambda r: type(r).__name__)


# ---- what is swapped -----------------------------------------------------------------------------


def test_nested_layers_by_recipe_and_name():
    root = model()
    recipe = MXFP8BlockScaling()
    done = convert(root, recipe)
    assert names(done.swapped) == BLOCKS
    assert [(r.name, r.features, r.note) for r in done.skipped] == [
        ("head", "64 -> 24", "features must be multiples of 32 for the input in mxfp8")
    ]
    for name in BLOCKS:
        layer = root.get_submodule(name)
        assert type(layer) is qtensor.Linear
        assert layer.name == name
        assert layer.recipe is recipe
    assert type(root.head) is nn.Linear


@pytest.mark.parametrize(
    ("recipe", "features", "multiple"),
    [(MXFP8BlockScaling(), 16, 32), (Float8CurrentScaling(), 24, 16), (NVFP4BlockScaling(), 8, 16)],
    ids=["mxfp8", "fp8", "nvfp4"],
)
def test_alignment_is_the_recipes(recipe: recipes.Recipe, features: int, multiple: int):
    for sizes in ((features, 64), (64, features)):
        (skipped,) = convert(nn.Sequential(nn.Linear(*sizes)), recipe).skipped
        assert f"multiples of {multiple} for the input" in skipped.note
    assert convert(nn.Sequential(nn.Linear(multiple, multiple)), recipe).swapped


def test_alignment_asks_for_each_role():
    """What a factory returns for one role of one layer counts, by that layer's name."""

    def factory(role: recipes.Role) -> str:
        return "mxfp8" if role == recipes.Role("grad_output", "linear", "1") else "fp8"

    root = nn.Sequential(nn.Linear(48, 48), nn.Linear(48, 48))
    done = convert(root, CustomRecipe(factory=factory))
    assert names(done.swapped) == ["0"]
    assert done.skipped[0].note.endswith("32 for the grad_output in mxfp8")


def test_filter_by_name_and_shape():
    seen = []

    def narrowing(module: nn.Module, name: str) -> bool:
        seen.append((module, name))
        return name.startswith("stack.1") and module.in_features > module.out_features

    root = model()
    done = convert(root, filter_fn=narrowing)
    assert names(done.swapped) == ["stack.1.down"]
    assert [r.note for r in done.skipped] == ["filtered"] * 4
    assert [name for _, name in seen] == [*BLOCKS, "head"]


def test_an_error_of_the_filter_leaves_the_model():
    root = model()
    before = list(root.modules())

    def filter_fn(module: nn.Module, name: str) -> bool:
        if name == "head":
            raise KeyError(name)
        return True

    with pytest.raises(KeyError):
        convert(root, filter_fn=filter_fn)
    assert list(root.modules()) == before


def test_again_changes_the_recipe():
    root = model()
    convert(root)
    layers = [root.get_submodule(n) for n in BLOCKS]
    recipe = Float8CurrentScaling()
    done = convert(root, recipe)
    assert names(done.swapped) == BLOCKS
    assert {r.note for r in done.swapped} == {"was converted; recipe set"}
    assert [root.get_submodule(n) for n in BLOCKS] == layers
    assert all(layer.recipe is recipe for layer in layers)


def test_other_layers_get_the_recipe():
    """Grouped layers hold their weights as weight0, weight1, ..., and blocks two of them."""
    root = nn.Sequential(
        qtensor.LayerNormLinear(64, 64),
        qtensor.LayerNormMLP(64, 64),
        qtensor.GroupedLinear(2, 64, 64),
    )
    recipe = Float8CurrentScaling()
    assert names(convert(root, recipe).swapped) == ["0", "1", "2"]
    assert all(layer.recipe is recipe for layer in root)
    odd = nn.Sequential(qtensor.GroupedLinear(2, 64, 40))
    (skipped,) = qtensor.convert_(odd, MXFP8BlockScaling()).skipped
    assert "features must be multiples of 32" in skipped.note


def test_without_a_recipe_layers_follow_autocast():
    root = model()
    done = qtensor.convert_(root, None)
    assert len(done.swapped) == 5
    x = torch.randn(32, 64)
    assert_same_bytes(root(x), qtensor_free(model(), root)(x))
    other = model()
    convert(other, Float8CurrentScaling(), lambda m, n: n != "head")
    other.load_state_dict(root.state_dict())
    with qtensor.autocast(recipe=Float8CurrentScaling()):
        assert_same_bytes(root.stack(x), other.stack(x))


def qtensor_free(plain: nn.Module, source: nn.Module) -> nn.Module:
    plain.load_state_dict(source.state_dict())
    return plain


# ---- what it computes ----------------------------------------------------------------------------


@each_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_computes_as_layers_made_by_hand(recipe: recipes.Recipe, dtype: torch.dtype):
    plain = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32)).to(dtype)
    by_hand = nn.Sequential(
        qtensor.Linear(64, 128, dtype=dtype, recipe=recipe),
        nn.ReLU(),
        qtensor.Linear(128, 32, dtype=dtype, recipe=recipe),
    )
    by_hand.load_state_dict(plain.state_dict())
    convert(plain, recipe)
    for _ in range(2):
        x = torch.randn(48, 64, dtype=dtype)
        for got, want in zip(gradients(plain, x), gradients(by_hand, x), strict=True):
            assert_same_bytes(got, want)


@each_recipe
def test_weights_stored_quantized(recipe: recipes.Recipe):
    """As quantized in each step, but for delayed scaling: weights are stored by their own maxima,
    as there are no factors yet.
    """
    root = model()
    twin, current = copy.deepcopy(root), copy.deepcopy(root)
    convert(twin, recipe)
    done = convert(root, recipe, quantized_params=True)
    assert {r.note for r in done.swapped} == {"weight quantized"}
    for report in done.swapped:
        weight = root.get_submodule(report.name).weight
        assert isinstance(weight, qtensor.QuantizedTensor)
        assert isinstance(weight, nn.Parameter)
    if isinstance(recipe, DelayedScaling):
        convert(current, Float8CurrentScaling(), quantized_params=True)
        assert_same_bytes(root.stack[0].up.weight._data, current.stack[0].up.weight._data)
        return
    x = torch.randn(32, 64)
    for got, want in zip(gradients(root, x), gradients(twin, x), strict=True):
        assert_same_bytes(got, want)


LAYERS: dict[str, Any] = {
    "Linear": lambda **o: qtensor.Linear(64, 128, **o),
    "LayerNormLinear": lambda **o: qtensor.LayerNormLinear(64, 128, **o),
    "LayerNormMLP": lambda **o: qtensor.LayerNormMLP(64, 128, **o),
    "GroupedLinear": lambda **o: qtensor.GroupedLinear(2, 64, 128, **o),
}


@pytest.mark.parametrize("kind", LAYERS)
@each_recipe
def test_every_layer_of_qtensor_stores_its_weights(kind: str, recipe: recipes.Recipe):
    """With the bytes of a layer that was built with ``quantized_params``."""
    made = []
    for options in ({}, {"recipe": recipe, "quantized_params": True}):
        torch.manual_seed(0)
        made.append(nn.ModuleDict({"layer": LAYERS[kind](**options)}))
    root, twin = made
    report = convert(root, recipe, quantized_params=True)
    count = sum(isinstance(p, qtensor.QuantizedTensor) for p in twin.parameters())
    assert count == (1 if "Linear" in kind and kind != "GroupedLinear" else 2)
    found = "weight" if count == 1 else "2 weights"
    assert [r.note for r in report.swapped] == [f"was converted; recipe set; {found} quantized"]
    for (name, ours), theirs in zip(root.named_parameters(), twin.parameters(), strict=True):
        assert type(ours) is type(theirs), name
        if isinstance(theirs, qtensor.QuantizedTensor):
            for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
                assert_same_bytes(a, b)
    again = convert(root, recipe, quantized_params=True)
    assert [r.note for r in again.swapped] == ["was converted; recipe set"]


def test_a_recipe_that_cannot_read_stored_weights():
    root = model()
    convert(root, quantized_params=True)
    done = convert(root, NVFP4BlockScaling(), lambda m, n: n != "head")
    assert not done.swapped
    notes = [r.note for r in done.skipped]
    assert notes == [*["its weight is stored as mxfp8; qtensor.revert_ it first"] * 4, "filtered"]
    again = convert(root, MXFP8BlockScaling(scale_mode="floor"), quantized_params=True)
    assert names(again.swapped) == BLOCKS
    assert {r.note for r in again.swapped} == {"was converted; recipe set"}


def test_a_high_precision_role_keeps_its_parameter():
    recipe = MXFP8BlockScaling(overrides={"weight": None})
    root = model()
    weight = root.stack[0].up.weight
    convert(root, recipe, quantized_params=True)
    assert root.stack[0].up.weight is weight


def test_without_data():
    """A model on "meta" is converted, and filled afterwards."""
    with torch.device("meta"):
        root = model()
    convert(root, quantized_params=True)
    assert all(p.is_meta for p in root.parameters())
    root.to_empty(device="cpu")
    for module in root.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert isinstance(root.stack[0].up.weight, qtensor.MXFP8Tensor)
    assert root(torch.randn(32, 64)).isfinite().all()


def test_in_evaluation_a_transformer_layer_calls_its_layers():
    """PyTorch's fast path computes with the weights themselves."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    root = nn.Sequential(layer).eval()
    x = torch.randn(2, 32, 64)
    with torch.no_grad():
        plain = root(x)
        convert(root, Float8CurrentScaling())
        attended = layer.norm1(x + layer.self_attn(x, x, x, need_weights=False)[0])
        want = layer.norm2(attended + layer.linear2(layer.linear1(attended).relu()))
        assert_same_bytes(root(x), want)
        assert not torch.equal(want, plain)
        qtensor.revert_(root)
        assert_same_bytes(root(x), plain)


# ---- the report ----------------------------------------------------------------------------------


def test_text():
    text = str(convert(model()))
    assert text.splitlines() == [
        "convert_ to MXFP8BlockScaling: 4 of 5 layers",
        "",
        "swapped (4)",
        "  layer         in -> out  count  note",
        "  stack.*.up    64 -> 128  2",
        "  stack.*.down  128 -> 64  2",
        "",
        "skipped (1)",
        "  layer  in -> out  count  note",
        "  head   64 -> 24   1      features must be multiples of 32 for the input in mxfp8",
    ]


def test_nothing_is_printed_and_the_repr_is_the_table(capsys: Any):
    root = model()
    for done in (qtensor.convert_(root, MXFP8BlockScaling()), qtensor.revert_(root)):
        assert repr(done) == str(done)
        assert repr(done).splitlines()[0] == done.heading
    assert capsys.readouterr().out == ""


def test_printing_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = qtensor.convert_(model(), MXFP8BlockScaling())
    done.print()
    assert capsys.readouterr().out == f"{done}\n"


@pytest.mark.skipif(
    importlib.util.find_spec("rich") is None, reason="rich (extra cli) is not installed"
)
def test_printing_with_rich(capsys: Any):
    qtensor.convert_(model(), MXFP8BlockScaling()).print()
    printed = capsys.readouterr().out.split()
    assert {"stack.*.up", "head", "swapped", "skipped", "multiples"} <= set(printed)
