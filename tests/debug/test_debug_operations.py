"""``qtensor.debug.record`` sees each operation of a sequence and each expert of a grouped layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from grouped_cases import RECIPES as GROUPED_RECIPES
from grouped_cases import K as FEATURES
from grouped_cases import N, run_separate, separate
from grouped_cases import inputs as grouped_inputs
from ops_cases import BASIC, FUSED, GROUPS, ROWS, WIDTH, data, handing_over, step  # noqa: F401 - a fixture
from torch import nn
from training import RECIPES, assert_same, compiled

import qtensor
from qtensor import ops, recipes
from qtensor.debug.log import ROLES

pytestmark = pytest.mark.usefixtures("handing_over")

CASES = {**BASIC, **{name: fused.case for name, fused in FUSED.items()}}
SOME = ("mlp_with_biases", "grouped_mlp", "linear_scale_add")
_WIDE = pytest.mark.nightly(reason="the eager cells of every case, and other cases in graphs")
SPLITS = [16, 0, 24]


def by_tensor(log: Any, step: int = 0) -> dict[tuple[str, str], Any]:
    """(layer, role) -> record of a step."""
    return {(r.layer, r.role): r for r in log.records if r.step == step}


# ---- operations


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4", "high_precision"])
@pytest.mark.parametrize("name", CASES)
def test_a_recorded_sequence_has_the_same_bytes(name, recipe):
    """Two of four steps are recorded; the plan without fusions has the bytes of the other."""
    case = CASES[name]
    model, twin, chosen = case.make(), case.make(), RECIPES[recipe]()
    groups = model.groups
    want = [step(twin, twin, data(), chosen, case.extra(ROWS), seed=i) for i in range(4)]
    chosen = RECIPES[recipe]()
    got = [step(model, model, data(), chosen, case.extra(ROWS), seed=0)]
    with qtensor.debug.record(model) as log:
        for i in (1, 2):
            got.append(step(model, model, data(), chosen, case.extra(ROWS), seed=i))
    assert model.groups is groups
    got.append(step(model, model, data(), chosen, case.extra(ROWS), seed=3))
    for ours, theirs in zip(got, want, strict=True):
        assert_same(ours, theirs)
    found = {layer for layer, _ in by_tensor(log, 1)}
    assert found == set(log.layers)
    assert {r.calls for r in log.records} == {1}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("name", "recipe", "backend"),
    [
        ("linear_scale_add", "delayed", "aot_eager"),
        pytest.param("mlp_with_biases", "delayed", "aot_eager", marks=_WIDE),
        pytest.param("mlp_with_biases", "nvfp4", "inductor", marks=_WIDE),
        pytest.param("linear_scale_add", "nvfp4", "aot_eager", marks=_WIDE),
        pytest.param("grouped_mlp", "delayed", "aot_eager", marks=_WIDE),
        pytest.param("grouped_mlp", "mxfp8", "inductor", marks=_WIDE),
    ],
)
def test_compiled_sequences(name, recipe, backend):
    """One more graph, which the next recording uses too, with the records of eager code."""
    case = CASES[name]
    results, logs = [], []
    for recorded in (True, False):
        torch._dynamo.reset()
        model, chosen = case.make(), RECIPES[recipe]()
        call, counter = compiled(model, backend)
        got = [step(call, model, data(), chosen, case.extra(ROWS), seed=0)]
        for i in (1, 2):
            if recorded:
                with qtensor.debug.record(model) as log:
                    got.append(step(call, model, data(), chosen, case.extra(ROWS), seed=i))
                logs.append(by_tensor(log))
            else:
                got.append(step(call, model, data(), chosen, case.extra(ROWS), seed=i))
        assert counter.frame_count == 1 + recorded
        got.append(step(call, model, data(), chosen, case.extra(ROWS), seed=3))
        assert counter.frame_count == 1 + recorded
        results.append(got)
    for ours, theirs in zip(*results, strict=True):
        assert_same(ours, theirs)
    eager, chosen = case.make(), RECIPES[recipe]()
    for i in range(3):
        with qtensor.debug.record(eager) as log:
            step(eager, eager, data(), chosen, case.extra(ROWS), seed=i)
    assert set(by_tensor(log)) == set(logs[0]) == set(logs[1])
    if backend == "aot_eager":
        # By their text, where NaN equals NaN.
        assert {k: str(r) for k, r in by_tensor(log).items()} == {
            k: str(r) for k, r in logs[1].items()
        }


def test_what_is_recorded_of_each_operation():
    """The tensors between the operations, with the quantizers of the products."""
    torch.manual_seed(0)
    recipe = recipes.MXFP8BlockScaling()
    parts = [ops.RMSNorm(WIDTH), ops.Linear(WIDTH, 96, recipe=recipe), ops.GELU()]
    sequence = ops.Sequential(*parts, nn.Linear(96, 32), ops.Identity())
    model = nn.Sequential(sequence)
    x = data().requires_grad_()
    with qtensor.debug.record(model) as log:
        model(x).square().sum().backward()
    assert log.layers == ("0.0", "0.1", "0.2", "0.3")
    found = by_tensor(log)
    linear = {("0.1", role) for role in ROLES} | {("0.3", role) for role in ROLES}
    others = {(n, r) for n in ("0.0", "0.2") for r in ROLES if "weight" not in r}
    assert set(found) == linear | others
    norm = parts[0](x.detach())
    hidden = parts[1](norm)
    expected = {
        ("0.0", "input"): x,
        ("0.0", "output"): norm,
        ("0.1", "input"): norm,
        ("0.1", "weight"): parts[1].weight,
        ("0.1", "output"): hidden,
        ("0.2", "input"): hidden,
        ("0.2", "output"): parts[2](hidden),
        ("0.0", "grad_input"): x.grad,
        ("0.1", "grad_weight"): parts[1].weight.grad,
    }
    for key, tensor in expected.items():
        assert found[key].amax == tensor.abs().max().item(), key
        assert found[key].shape == tuple(tensor.shape)
    quantized = {key for key, record in found.items() if record.quantizer == "mxfp8"}
    assert quantized == {("0.1", role) for role in ("input", "weight", "grad_output")}
    assert found["0.1", "grad_output"].amax == found["0.2", "grad_input"].amax


def test_the_factors_of_delayed_scaling():
    """The records have the factors of the call, for the gradient as well."""
    torch.manual_seed(0)
    sequence = ops.Sequential(ops.Linear(WIDTH, WIDTH, recipe=recipes.DelayedScaling()), ops.GELU())
    with qtensor.debug.record(sequence) as log:
        for _ in range(2):
            sequence(data().requires_grad_()).sum().backward()
    first, second = (by_tensor(log, i) for i in (0, 1))
    for role, largest in (("input", 448), ("weight", 448), ("grad_output", 57344)):
        assert first["0", role].scale_min == 1.0
        factor = torch.tensor(float(largest)) / first["0", role].amax
        assert second["0", role].scale_min == pytest.approx(1 / factor.item(), rel=1e-6)


def test_an_operation_alone():
    torch.manual_seed(0)
    layer, twin = (ops.Linear(WIDTH, 32, recipe=recipes.MXFP8BlockScaling()) for _ in range(2))
    twin.load_state_dict(layer.state_dict())
    before = sorted(layer.__dict__)
    want = step(twin, twin, data(), None)
    with qtensor.debug.record(layer) as log:
        got = step(layer, layer, data(), None)
    assert sorted(layer.__dict__) == before
    assert_same(got, want)
    assert set(by_tensor(log)) == {("", role) for role in ROLES}


def test_some_operations_and_steps():
    """Other layers of a later recording, and steps that are not recorded."""
    sequence = CASES["mlp_with_biases"].make()
    for name in ("2", "4", "3"):
        with qtensor.debug.record(sequence, name, every=2) as log:
            for _ in range(3):
                sequence(data())
        assert {(r.step, r.layer) for r in log.records} == {(0, name), (2, name)}
    with qtensor.debug.record(nn.Sequential(sequence), "0") as log:
        sequence(data())
    assert {r.layer for r in log.records} == {f"0.{i}" for i in (1, 2, 3, 4, 5)}


class _Twice(ops.FusedOperation):
    """The user's fusion of GELU and SiLU."""

    def fuser_forward_compute(self, input, *, basic_op_extra_inputs, basic_op_kwargs, **_):
        first, second = self.basic_ops
        hidden = first.op_forward_compute(input)[0]
        return second.op_forward_compute(hidden)[0], [(), ()], hidden

    def fuser_forward_save_ctx(self, ctxs, input, returned, **_):
        first, second = self.basic_ops
        first.op_forward_save_ctx(ctxs[0], input, None)
        second.op_forward_save_ctx(ctxs[1], returned, None)


def test_fusions_of_the_user_run():
    """They may compute something else, so a recording leaves them in the plan."""
    ran = []

    def build(operations, recipe):
        ran.append(operations)
        return _Twice(operations)

    ops.register_forward_fusion([ops.GELU, ops.SiLU], build)
    try:
        sequence = ops.Sequential(ops.GELU(), ops.SiLU(), ops.Linear(WIDTH, 32))
        with qtensor.debug.record(sequence) as log:
            step(sequence, sequence, data(), None)
    finally:
        ops.unregister_fusion(build)
    assert len(ran) == 1
    seen = set(by_tensor(log))
    assert {("0", "input"), ("1", "output"), ("1", "grad_output"), ("0", "grad_input")} <= seen
    assert not {("0", "output"), ("1", "input")} & seen


def test_a_nan_inside_a_sequence():
    sequence = CASES["mlp_with_biases"].make()
    with torch.no_grad():
        sequence[4].bias[7] = float("nan")
    with qtensor.debug.record(sequence) as log:
        sequence(data())
    assert (log.first_not_finite.layer, log.first_not_finite.role) == ("4", "output")


# ---- experts


def _grouped(recipe: Any) -> Any:
    torch.manual_seed(0)
    return qtensor.GroupedLinear(GROUPS, FEATURES, N, recipe=recipe)


def _step(module: Any, call: Any, seed: int, splits: Any = SPLITS) -> list[torch.Tensor]:
    x, dy = grouped_inputs(ROWS, seed)
    torch.manual_seed(seed)
    y = call(x.requires_grad_(), splits)
    y.backward(dy)
    grads = [p.grad for p in module.parameters()]
    module.zero_grad()
    return [y.detach(), x.grad, *grads]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("recipe", "backend", "as_tensor"),
    [
        *[(name, None, False) for name in ("high_precision", "delayed", "mxfp8", "nvfp4")],
        ("delayed", "aot_eager", True),
        pytest.param("nvfp4", "aot_eager", False, marks=_WIDE),
        pytest.param("mxfp8", "inductor", True, marks=_WIDE),
    ],
)
def test_each_expert_has_the_records_of_a_layer_of_its_own(recipe, backend, as_tensor):
    """Of a ``qtensor.Linear`` for its rows; the bytes of the grouped layer do not change."""
    make = GROUPED_RECIPES[recipe]
    model, twin = _grouped(make()), _grouped(make())
    splits = torch.tensor(SPLITS) if as_tensor else SPLITS
    call = model if backend is None else compiled(model, backend)[0]
    layers = nn.ModuleList(separate(_grouped(make())))
    got, want = [], []
    with qtensor.debug.record(model) as log, qtensor.debug.record(layers, count="manual") as single:
        for seed in range(2):
            got.append(_step(model, call, seed, splits))
            x, dy = grouped_inputs(ROWS, seed)
            run_separate(layers, x, dy, SPLITS, seed)
            layers.zero_grad()
            single.step()
    want = [_step(twin, twin, seed) for seed in range(2)]
    for ours, theirs in zip(got, want, strict=True):
        assert_same(ours, theirs)
    assert log.layers == ("weight0", "weight1", "weight2")
    for i in range(2):
        ours, theirs = by_tensor(log, i), by_tensor(single, i)
        assert set(ours) == {(f"weight{e}", role) for e in range(GROUPS) for role in ROLES}
        for (layer, role), record in theirs.items():
            if (layer, role) == ("1", "grad_weight") or "nvfp4" in record.quantizer:
                continue  # the layer without rows has no gradient; random rounding
            other = ours[f"weight{layer}", role]
            assert str(other).replace(f"weight{layer}", layer) == str(record), (layer, role)


def test_an_expert_without_rows():
    model = _grouped(recipes.MXFP8BlockScaling())
    with qtensor.debug.record(nn.ModuleDict({"experts": model}), count="manual") as log:
        _step(model, model, 0)
    found = by_tensor(log)
    empty = found["experts.weight1", "input"]
    assert (empty.shape, empty.amax, empty.is_finite) == ((0, FEATURES), 0.0, True)
    assert found["experts.weight2", "input"].shape == (24, FEATURES)
    assert "experts.weight1" in str(log)


def test_a_nan_of_one_expert():
    model = _grouped(recipes.MXFP8BlockScaling())
    x, _ = grouped_inputs(ROWS, 0)
    x[20, 5] = float("nan")
    with qtensor.debug.record(model) as log:
        model(x, SPLITS)
    assert (log.first_not_finite.layer, log.first_not_finite.role) == ("weight2", "input")
    assert log.first_not_finite.nan == 1


def test_experts_of_a_sequence():
    """The operation has the records of the module."""
    model = _grouped(recipes.MXFP8BlockScaling())
    operation = ops.GroupedLinear(GROUPS, FEATURES, N, recipe=recipes.MXFP8BlockScaling())
    operation.load_state_dict(model.state_dict())
    logs = []
    for module in (model, ops.Sequential(operation, ops.Identity())):
        with qtensor.debug.record(module) as log:
            _step(module, module, 0, torch.tensor(SPLITS))
        logs.append([str(r).replace("layer='0.", "layer='") for r in log.records])
    assert sorted(logs[0]) == sorted(logs[1])
