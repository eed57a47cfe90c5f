"""``convert_`` and ``revert_`` lose nothing: parameters, hooks, modes, ties; what they cannot keep
they leave alone.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from convert_models import BLOCKS, convert, model, names
from formats import assert_same_bytes
from torch import nn
from torch.nn.utils import parametrizations

import qtensor
from qtensor.recipes import MXFP8BlockScaling

# ---- what is kept --------------------------------------------------------------------------------


def test_parameters_are_the_same_objects():
    root = model()
    root.stack[0].up.weight.requires_grad_(False)
    before = dict(root.named_parameters())
    state = {k: v.clone() for k, v in root.state_dict().items()}
    generator = torch.get_rng_state()
    convert(root)
    assert torch.equal(torch.get_rng_state(), generator)
    after = dict(root.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert not root.stack[0].up.weight.requires_grad
    assert root.state_dict().keys() == state.keys()
    root.load_state_dict(state)
    for key, value in root.state_dict().items():
        assert_same_bytes(value, state[key])


def test_state_dicts_of_plain_models_load():
    root = model()
    state = model().state_dict()
    convert(root)
    root.load_state_dict(state)
    assert_same_bytes(root.stack[1].up.weight.detach(), state["stack.1.up.weight"])
    back = model()
    back.load_state_dict(root.state_dict())


def test_mode_hooks_and_attributes():
    root = model()
    layer = root.stack[0].up
    layer.eval()
    layer.weight_decay = 0.5
    layer.weight.tag = "mine"
    calls: list[str] = []
    handle = layer.register_forward_hook(lambda *_: calls.append("forward"))
    layer.register_forward_pre_hook(lambda *_: calls.append("before"))
    layer.register_full_backward_hook(lambda *_: calls.append("backward"))
    layer.register_state_dict_post_hook(lambda *_: calls.append("saved"))
    layer.register_load_state_dict_pre_hook(lambda module, *_: calls.append(type(module).__name__))
    layer.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
    layer.weight.register_hook(lambda g: calls.append("gradient"))
    del layer

    def use() -> list[str]:
        calls.clear()
        root(torch.randn(32, 64, requires_grad=True)).sum().backward()
        root.load_state_dict(root.state_dict())
        return sorted(calls)

    expected = ["before", "forward", "backward", "gradient", "saved", "loaded"]
    for swap, kind in (
        (convert, "Linear"),
        (lambda m: qtensor.revert_(m), "Linear"),
    ):
        swap(root)
        new = root.stack[0].up
        assert not new.training
        assert root.training
        assert new.weight_decay == 0.5
        assert use() == sorted([*expected, kind])
    handle.remove()
    assert "forward" not in use()


def test_a_quantized_weight_takes_over_what_was_on_the_old_one():
    root = nn.Sequential(nn.Linear(32, 32))
    root[0].weight.tag = "mine"
    root[0].weight.requires_grad_(False)
    root[0].weight.grad = torch.ones(32, 32)
    convert(root, quantized_params=True)
    for _ in range(2):
        weight = root[0].weight
        assert weight.tag == "mine"
        assert not weight.requires_grad
        assert_same_bytes(weight.grad, torch.ones(32, 32))
        assert not isinstance(weight.grad, qtensor.QuantizedTensor)
        qtensor.revert_(root)
    assert type(root[0].weight) is nn.Parameter
    assert vars(root[0].weight).keys() == {"tag"}


def test_copies_and_files(tmp_path: Any):
    root = model()
    convert(root, quantized_params=True)
    x = torch.randn(32, 64)
    want = root(x)
    assert_same_bytes(copy.deepcopy(root)(x), want)
    torch.save(root.state_dict(), tmp_path / "state.pt")
    other = model()
    convert(other, quantized_params=True)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert_same_bytes(other(x), want)


# ---- shared and tied -----------------------------------------------------------------------------


def test_a_shared_layer_stays_shared():
    shared = nn.Linear(64, 64)
    root = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    (report,) = convert(root).swapped
    assert (report.name, report.note) == ("a", "also b.0")
    assert root["a"] is root["b"][0]
    assert root["a"].name == "a"
    qtensor.revert_(root)
    assert root["a"] is root["b"][0]
    assert type(root["a"]) is nn.Linear


def test_a_shared_layer_is_filtered_under_each_name():
    shared = nn.Linear(64, 64)
    root = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    (report,) = convert(root, filter_fn=lambda module, name: name == "a").skipped
    assert (report.name, report.note) == ("a", "filtered; also b.0")
    assert root["a"] is root["b"][0] is shared


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, 64)
        self.head = nn.Linear(64, 96, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_weights_stay_tied():
    root = Tied()
    assert names(convert(root).swapped) == ["head"]
    assert root.head.weight is root.embedding.weight
    root.head(root.embedding(torch.arange(32))).sum().backward()
    assert root.embedding.weight.grad.isfinite().all()


def test_tied_weights_are_not_stored_quantized():
    root = Tied()
    (report,) = convert(root, quantized_params=True).skipped
    assert report.note == "its weight is tied to embedding.weight and cannot be stored quantized"
    assert root.head.weight is root.embedding.weight


def test_two_layers_of_one_quantized_weight():
    root = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    convert(root, quantized_params=True)
    root[1].weight = root[0].weight
    qtensor.revert_(root)
    assert root[1].weight is root[0].weight
    assert type(root[0].weight) is nn.Parameter


# ---- what stays ----------------------------------------------------------------------------------


class Odd(nn.Linear):
    pass


def with_own_forward() -> nn.Linear:
    layer = nn.Linear(64, 64)
    layer.forward = lambda x: x
    return layer


def compiled_alone() -> nn.Linear:
    layer = nn.Linear(64, 64)
    layer.compile(backend="eager")
    return layer


def with_attribute() -> nn.Linear:
    layer = nn.Linear(64, 64)
    layer.recipe = "soup"
    return layer


def with_another_parameter() -> nn.Linear:
    layer = nn.Linear(64, 64)
    layer.gain = nn.Parameter(torch.ones(64))
    return layer


def flattened() -> nn.Linear:
    layer = nn.Linear(64, 64)
    layer.weight = nn.Parameter(torch.zeros(64 * 64))
    return layer


STAYS = {
    "Odd is a subclass of nn.Linear": lambda: Odd(64, 64),
    "ParametrizedLinear is a subclass": lambda: parametrizations.weight_norm(nn.Linear(64, 64)),
    "LazyLinear is a subclass": lambda: nn.LazyLinear(64),
    "its parameters are weight, bias, gain": with_another_parameter,
    "its forward was replaced or compiled": with_own_forward,
    "its forward was replaced or compiled on": compiled_alone,
    "qtensor.Linear has attributes of the same name: recipe": with_attribute,
    r"its weight is of shape (4096,)": flattened,
    "its weight is torch.float64": lambda: nn.Linear(64, 64, dtype=torch.float64),
    "its weight has no elements": lambda: nn.Linear(64, 0),
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op:UserWarning")
@pytest.mark.parametrize("reason", STAYS)
def test_layers_that_are_more_than_their_class_says(reason: str):
    layer = STAYS[reason]()
    root = nn.Sequential(layer, nn.Linear(64, 64))
    done = convert(root)
    assert names(done.swapped) == ["1"]
    assert done.skipped[0].note.startswith(reason)
    assert root[0] is layer


def test_a_weight_with_hooks_is_not_exchanged():
    root = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    root[0].weight.register_hook(lambda g: g)
    root[1].weight.register_post_accumulate_grad_hook(lambda p: None)
    done = convert(root, quantized_params=True)
    assert {r.note for r in done.skipped} == {
        "its weight has hooks, which a new parameter would lose"
    }


class Rooted(nn.Linear):
    """A linear layer with children."""

    def __init__(self) -> None:
        super().__init__(64, 64)
        self.child = nn.Linear(64, 64)


@pytest.mark.parametrize("make", [lambda: nn.Linear(64, 64), Rooted], ids=["leaf", "children"])
def test_a_root_has_no_parent(make: Any):
    with pytest.raises(qtensor.QTensorError, match=r"inside of their parent.*nn\.Sequential"):
        convert(make())


def test_a_converted_root():
    layer = qtensor.Linear(64, 64)
    assert names(convert(layer).swapped) == ["(root)"]
    assert isinstance(layer.recipe, MXFP8BlockScaling)
    with pytest.raises(qtensor.QTensorError, match=r"revert_: .*inside of their parent"):
        qtensor.revert_(layer)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: convert("model"), "convert_: model must be a torch.nn.Module; got str"),
        (lambda: convert(model(), MXFP8BlockScaling), "recipe must be a recipe object"),
        (lambda: convert(model(), filter_fn="head"), "filter_fn must be a function"),
        (
            lambda: qtensor.convert_(model(), None, quantized_params=True),
            "quantized_params needs a recipe",
        ),
    ],
    ids=["model", "recipe", "filter", "quantized"],
)
def test_bad_arguments(call: Any, message: str):
    with pytest.raises(qtensor.QTensorError, match=message):
        call()


# ---- and back ------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantized_params", [False, True], ids=["plain", "quantized"])
def test_and_back(quantized_params: bool):
    root = model()
    before = dict(root.named_parameters())
    convert(root, quantized_params=quantized_params)
    stored = (
        {n: p.detach().dequantize() for n, p in root.named_parameters()} if quantized_params else {}
    )
    done = qtensor.revert_(root)
    assert names(done.swapped) == BLOCKS
    assert not done.skipped
    note = "weight dequantized from mxfp8" if quantized_params else ""
    assert {r.note for r in done.swapped} == {note}
    assert {type(root.get_submodule(n)) for n in BLOCKS} == {nn.Linear}
    assert repr(root) == repr(model())
    for name, parameter in root.named_parameters():
        if quantized_params:
            assert type(parameter) is nn.Parameter
            assert_same_bytes(parameter.detach(), stored[name])
        else:
            assert parameter is before[name]
    assert vars(root.stack[0].up).keys() == vars(nn.Linear(1, 1)).keys()


def test_layers_without_a_counterpart_stay():
    root = nn.Sequential(
        qtensor.Linear(32, 32, return_bias=True),
        qtensor.Linear(32, 32, delay_wgrad_compute=True),
        qtensor.Linear(32, 32),
    )
    done = qtensor.revert_(root, lambda module, name: name != "2")
    assert [r.note for r in done.skipped] == [
        "nn.Linear has no return_bias",
        "nn.Linear has no delay_wgrad_compute",
        "filtered",
    ]
