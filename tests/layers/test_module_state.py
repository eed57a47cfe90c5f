"""State of modules: allocated where a recipe asks for it, saved under attribute paths, checked
before it is loaded.
"""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import torch
import torch_process
from formats import assert_same_bytes
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from training import RECIPES, WIDTH, region

import qtensor
from qtensor import QTensorError
from qtensor.modules import state as module_state
from qtensor.recipes import CustomRecipe, DelayedScaling

MODULES = {
    "linear": lambda **options: qtensor.Linear(WIDTH, WIDTH, **options),
    "layernorm_mlp": lambda **options: qtensor.LayerNormMLP(WIDTH, WIDTH, **options),
    "grouped": lambda **options: qtensor.GroupedLinear(2, WIDTH, WIDTH, **options),
}
each_module = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)


def run(module, recipe=None, steps=2):
    more = ([8, 24],) if isinstance(module, qtensor.GroupedLinear) else ()
    for i in range(steps):
        with region(recipe):
            y = module(torch.randn(32, WIDTH) * 4**i, *more)
        if y.requires_grad:
            y.square().sum().backward()
    return module


def states(module):
    return [s.delayed for part in module.modules() for s in getattr(part, "_states", {}).values()]


def same_state(a, b):
    for one, two in zip(states(a), states(b), strict=True):
        assert_same_bytes(one.scale, two.scale)
        assert_same_bytes(one.merged(), two.merged())


@each_module
@pytest.mark.parametrize("recipe", [None, "mxfp8", "current"])
def test_nothing_is_allocated_without_delayed_scaling(make, recipe):
    module = run(make(), RECIPES[recipe]() if recipe else None)
    copy.deepcopy(module).bfloat16().state_dict()
    allocated = [s.delayed_state for s in module._states.values()]
    assert allocated == [None] * len(allocated)
    assert not any("_delayed_scaling" in key for key in module.state_dict())


@each_module
def test_the_state_is_there_for_who_asks(make):
    for state in make()._states.values():
        assert state.delayed is state.delayed
        assert (state.delayed.scale == 1).all()
        assert not state.delayed.used


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_first_call_without_gradients_leaves_a_state_that_trains(backend):
    """Tensors made in inference mode could not be written later, nor those of a trace."""
    torch._dynamo.reset()
    module, twin = MODULES["linear"](), MODULES["linear"]()
    twin.load_state_dict(module.state_dict())
    call = torch.compile(module, backend=backend, fullgraph=True) if backend else module
    module.eval()
    with torch.inference_mode(), region(DelayedScaling()):
        call(torch.randn(32, WIDTH))
    module.train()
    for m in (call, twin):
        torch.manual_seed(0)
        for _ in range(3):
            with region(DelayedScaling()):
                y = m(torch.randn(32, WIDTH))
            y.sum().backward()
    same_state(module, twin)


def test_one_graph_serves_layers_with_and_without_state():
    torch._dynamo.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    layers = [qtensor.Linear(WIDTH, WIDTH) for _ in range(4)]
    run(layers[2], DelayedScaling())
    forward = torch.compile(lambda layer, x: layer(x), backend=count, fullgraph=True)
    with region(DelayedScaling()):
        for layer in layers * 2:
            forward(layer, torch.randn(32, WIDTH))
    assert len(graphs) == 1


def test_explain_allocates_nothing():
    sequence = qtensor.ops.Sequential(qtensor.ops.Linear(WIDTH, WIDTH), qtensor.ops.ReLU())
    with region(DelayedScaling()):
        assert sequence.explain().quantize_calls == 3
    owners = [module for module in sequence.modules() if hasattr(module, "_states")]
    assert owners
    assert all(owner._states["weight"].delayed_state is None for owner in owners)


@pytest.mark.parametrize(
    "backend",
    [None, pytest.param("aot_eager", marks=pytest.mark.nightly(reason="six graphs: 2 seconds"))],
)
def test_a_sequence_keeps_a_bounded_number_of_plans(backend, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(qtensor.ops.fuser, "MOST_PLANS", 2)
    sequence = qtensor.ops.Sequential(qtensor.ops.Linear(WIDTH, WIDTH), qtensor.ops.ReLU())
    call = torch.compile(sequence, backend=backend, fullgraph=True) if backend else sequence
    x = torch.randn(32, WIDTH)
    chosen = [RECIPES[name]() for name in ("mxfp8", "current", "nvfp4")] * 2
    outputs = []
    for recipe in chosen:
        with region(recipe):
            outputs.append(call(x))
    for first, second in zip(outputs[:3], outputs[3:], strict=True):
        assert torch.equal(first, second)
    (fuser,) = [g for g in sequence.groups if isinstance(g, qtensor.ops.fuser.OperationFuser)]
    assert (
        len([name for name in vars(fuser) if name.startswith("plan_") and name[5:].isdigit()]) == 2
    )


# ---- state dicts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [None, "mxfp8", "nvfp4"])
def test_a_plain_linear_loads_strictly_and_back(recipe):
    module = run(qtensor.Linear(WIDTH, WIDTH), RECIPES[recipe]() if recipe else None)
    plain = nn.Linear(WIDTH, WIDTH)
    plain.load_state_dict(module.state_dict())
    module.load_state_dict(plain.state_dict())
    assert list(module.state_dict()) == list(plain.state_dict())


@each_module
def test_distributed_checkpoint_walks_the_keys(make):
    """get_model_state_dict follows each key by getattr."""
    model = nn.Sequential(run(make(), DelayedScaling()))
    saved = get_model_state_dict(model)
    assert any(key.endswith(".amax_history") for key in saved)
    for key, tensor in saved.items():
        value = model
        for name in key.split("."):
            value = getattr(value, name)
        assert torch.equal(value, tensor)
    other = nn.Sequential(make())
    set_model_state_dict(other, saved)
    same_state(model, other)


@each_module
@pytest.mark.parametrize("own", [True, False], ids=["own recipe", "region"])
@pytest.mark.parametrize("save", ["torch", "dcp"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_fresh_model_loads_the_state(make, own, save, tmp_path):
    """Neither way needs a forward: DCP loads in place, so that the fresh state has all keys."""
    recipe = DelayedScaling(amax_history_len=4)
    trained = nn.Sequential(run(make(recipe=recipe), None if own else recipe))
    fresh = nn.Sequential(make(recipe=recipe if own else None))
    if save == "torch":
        fresh.load_state_dict(trained.state_dict())
    else:
        checkpoint.save(get_model_state_dict(trained), checkpoint_id=tmp_path)
        with contextlib.nullcontext() if own else region(recipe):
            template = get_model_state_dict(fresh)
        checkpoint.load(template, checkpoint_id=tmp_path)
        set_model_state_dict(fresh, template)
    same_state(trained, fresh)
    assert list(fresh.state_dict()) == list(trained.state_dict())


@each_module
def test_state_that_is_not_used_changes_nothing_where_it_loads(make):
    recipe = DelayedScaling(amax_history_len=4)
    model = make(recipe=recipe)
    state = model.state_dict()
    assert any("_delayed_scaling" in key for key in state)
    other = make(recipe=recipe)
    other.load_state_dict(state)
    for module in (model, other):
        torch.manual_seed(1)
        run(module, steps=3)
    same_state(model, other)


def test_state_dicts_under_a_custom_recipe_hold_the_layers_that_use_it():
    def factory(role):
        delayed = qtensor.quantizer("fp8_delayed")
        return delayed if role.name == "a" else qtensor.quantizer("mxfp8")

    recipe = CustomRecipe(factory=factory, delayed_scaling=DelayedScaling())
    layers = [qtensor.Linear(WIDTH, WIDTH, name=name) for name in "ab"]
    with region(recipe):
        keys = list(nn.Sequential(*layers).state_dict())
    assert [key for key in keys if key.endswith(".scale")] == ["0._delayed_scaling.weight.scale"]


@each_module
def test_a_checkpoint_saves_no_sync_for_state_that_is_not_used(make, monkeypatch):
    module = run(make().eval(), DelayedScaling())
    monkeypatch.setattr(module_state, "MERGED_HISTORY", None)
    assert not any("_delayed_scaling" in key for key in module.state_dict())


BAD = {
    "shape": lambda scale, history: (scale[:1], history),
    "nan": lambda scale, history: (torch.full_like(scale, float("nan")), history),
    "inf": lambda scale, history: (torch.full_like(scale, float("inf")), history),
    "zero": lambda scale, history: (torch.zeros_like(scale), history),
    "negative": lambda scale, history: (-scale, history),
    "dtype": lambda scale, history: (scale.double(), history),
    "no tensor": lambda scale, history: (1.0, history),
    "meta": lambda scale, history: (scale.to("meta"), history),
    "history columns": lambda scale, history: (scale, history[:, :2]),
    "history rows": lambda scale, history: (scale, torch.cat([history, history])),
    "history dims": lambda scale, history: (scale, history[0]),
    "history negative": lambda scale, history: (scale, -history - 1),
}


@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD)
def test_a_wrong_state_is_refused_before_anything_is_written(spoil):
    state = run(qtensor.Linear(WIDTH, WIDTH), DelayedScaling()).state_dict()
    keys = [f"_delayed_scaling.weight.{name}" for name in ("scale", "amax_history")]
    module = run(qtensor.Linear(WIDTH, WIDTH, name="fc"), DelayedScaling())
    before = copy.deepcopy(module.state_dict())
    bad = dict(zip(keys, spoil(*[state[key] for key in keys]), strict=True))
    with pytest.raises(QTensorError, match=r"Linear\[fc\] _delayed_scaling.weight: "):
        module.load_state_dict({**state, **bad})
    after = module.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("missing", ["scale", "amax_history"])
@pytest.mark.parametrize("strict", [True, False])
def test_half_a_state_is_refused(missing, strict):
    state = run(qtensor.Linear(WIDTH, WIDTH), DelayedScaling()).state_dict()
    del state[f"_delayed_scaling.weight.{missing}"]
    module = qtensor.Linear(WIDTH, WIDTH)
    weight = module.weight.detach().clone()
    with pytest.raises(QTensorError, match=r"two entries, scale and amax_history; got .* alone"):
        module.load_state_dict(state, strict=strict)
    assert torch.equal(module.weight, weight)
    assert not module._states["weight"].delayed.used


def test_nan_and_infinite_maxima_load():
    """Steps with such values record them, and keep the old scale."""
    module = qtensor.Linear(WIDTH, WIDTH)
    x = torch.randn(32, WIDTH)
    x[0, 0] = float("nan")
    with region(DelayedScaling()):
        module(x)
    other = qtensor.Linear(WIDTH, WIDTH)
    other.load_state_dict(module.state_dict())
    assert not other._states["weight"].delayed.history[0, 0].isfinite()


def test_a_pickled_module_goes_on_in_another_process(tmp_path):
    """Its steps were counted by the process that it comes from: the new one counts from 0."""
    module = run(qtensor.Linear(WIDTH, WIDTH), DelayedScaling(), steps=5)
    path = tmp_path / "module.pickle"
    path.write_bytes(pickle.dumps(module))
    script = (
        "import pickle, sys, torch, qtensor\n"
        "module = pickle.load(open(sys.argv[1], 'rb'))\n"
        "for i in range(2):\n"
        "    with qtensor.autocast(recipe=qtensor.recipes.DelayedScaling()):\n"
        "        y = module(torch.ones(32, module.in_features))\n"
        "    (y.sum() * 1e6).backward()\n"
        "assert float(module._states['weight'].delayed.merged()[0, 2]) == 1e6\n"
    )
    torch_process.run(script, str(path))
