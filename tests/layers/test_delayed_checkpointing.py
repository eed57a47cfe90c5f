"""Delayed scaling in checkpoints: the second run reads the factors of the first one.

Every test compares outputs, gradients and state in every bit with those of a twin that runs without
checkpoints.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint as torchs_checkpoint
from training import WIDTH, build, region

import qtensor
from qtensor import ops, recipes
from qtensor.library import recomputation

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
WIDE = pytest.mark.nightly(reason="compiles for a second; another cell is like it")


class OwnFunction(torch.autograd.Function):
    """A checkpoint as other libraries write them."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.function(x).backward(grad)
        return None, x.grad


CHECKPOINTS: dict[str, Callable[..., Tensor]] = {
    "ours": lambda f, x: qtensor.checkpoint(f, x),
    "ours reentrant": lambda f, x: qtensor.checkpoint(f, x, use_reentrant=True),
    "torch": lambda f, x: torchs_checkpoint(f, x, use_reentrant=False),
    "torch reentrant": lambda f, x: torchs_checkpoint(f, x, use_reentrant=True),
    "own function": OwnFunction.apply,
}
each_checkpoint = pytest.mark.parametrize("checkpoint", CHECKPOINTS)


class Grouped(qtensor.GroupedLinear):
    """A grouped layer whose rows are split evenly."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, [8, 8])


def sequence(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return ops.Sequential(ops.RMSNorm(WIDTH), ops.Linear(WIDTH, WIDTH, **options), ops.GELU())


def grouped(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Grouped(2, WIDTH, WIDTH, **options)


def square(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return qtensor.Linear(WIDTH, WIDTH, **options)


def stacked(**options: Any) -> nn.Module:
    """Two layers, so that the second one reads what the first one has computed again."""
    torch.manual_seed(0)
    layers = (qtensor.Linear(WIDTH, WIDTH, **options) for _ in range(2))
    return nn.Sequential(next(layers), nn.GELU(), next(layers))


MODULES: dict[str, Callable[..., nn.Module]] = {
    "linear": square,
    "layernorm_linear": lambda **o: build("layernorm_linear", **o),
    "layernorm_mlp": lambda **o: build("layernorm_mlp", **o),
    "recomputing_mlp": lambda **o: build("recomputing_mlp", **o),
    "grouped": grouped,
    "ops": sequence,
    "stacked": stacked,
}


def inputs(step: int, count: int = 1) -> list[Tensor]:
    """Inputs whose size grows, so that each step has other factors."""
    g = torch.Generator().manual_seed(step)
    drawn = [torch.randn(16, WIDTH, generator=g) * (1 + step + 5 * i) for i in range(count)]
    return [x.requires_grad_() for x in drawn]


def loss(y: Tensor) -> Tensor:
    return y.square().sum()


Step = Callable[[nn.Module, Callable[[Tensor], Tensor], Any, int], list[Tensor]]


def in_modes(first: str, second: str, place: str = "outside") -> Step:
    """A step whose backward pass runs at ``place``, with the module in another mode."""

    def step(module: nn.Module, call: Any, enter: Any, number: int) -> list[Tensor]:
        (x,) = inputs(number)
        module.train(first == "train")
        with enter():
            y = call(x)
            module.train(second == "train")
            if place == "inside":
                loss(y).backward()
        if place == "outside":
            loss(y).backward()
        if place == "second region":
            with enter():
                loss(y).backward()
        return [y, x.grad]

    return step


def regions(order: Callable[[list[Tensor]], Any]) -> Step:
    """Three regions, then the backward passes in an order."""

    def step(module: nn.Module, call: Any, enter: Any, number: int) -> list[Tensor]:
        ys, xs = [], inputs(number, 3)
        for x in xs:
            with enter():
                ys.append(call(x))
        order(ys)
        return ys + [x.grad for x in xs]

    return step


def each(ys: list[Tensor], retain: bool = False) -> None:
    for y in ys:
        loss(y).backward(retain_graph=retain)


STEPS: dict[str, Step] = {
    "outside": in_modes("train", "train"),
    "inside": in_modes("train", "train", "inside"),
    "in a second region": in_modes("train", "train", "second region"),
    "eval": in_modes("eval", "eval"),
    "train, then eval": in_modes("train", "eval"),
    "eval, then train": in_modes("eval", "train", "second region"),
    "three regions": regions(lambda ys: each(ys)),
    "three regions, last first": regions(lambda ys: each(ys[::-1])),
    "retained": regions(lambda ys: (each(ys, retain=True), each(ys[::-1]))),
}


def twin_of(module: str, own: bool) -> tuple[nn.Module, Any]:
    """Return a module and a function that enters a region; ``own``: the recipe is the module's."""
    recipe = recipes.DelayedScaling(amax_compute_algo="most_recent")
    if own:
        return MODULES[module](recipe=recipe), contextlib.nullcontext
    return MODULES[module](), lambda: region(recipe)


def run(module: nn.Module, call: Any, enter: Any, step: Step, count: int = 3) -> list[Tensor]:
    """Return outputs and gradients of steps after a first one, and the state after them."""
    module.train()
    for x in inputs(9):
        with enter():
            loss(module(x)).backward()
    out = []
    for number in range(count):
        out += [t.detach().clone() for t in step(module, call, enter, number)]
    state = module.state_dict()
    grads = [p.grad for p in module.parameters()]
    return [*out, *grads, *[state[name] for name in sorted(state)]]


def check(module: str, own: bool, step: Step, wrapped: Callable[[Any], Any]) -> None:
    """Compare a module with a twin whose calls are ``wrapped``."""
    plain, enter = twin_of(module, own)
    expected = run(plain, plain, enter, step)
    twin, enter = twin_of(module, own)
    ours = run(twin, wrapped(twin), enter, step)
    assert len(ours) == len(expected)
    for i, (a, b) in enumerate(zip(ours, expected, strict=True)):
        assert torch.equal(a, b), f"result {i} differs"


@pytest.mark.parametrize("own", [False, True], ids=["region", "own recipe"])
@pytest.mark.parametrize("step", STEPS)
@each_checkpoint
@pytest.mark.parametrize("module", MODULES)
def test_a_checkpoint_changes_nothing(module, checkpoint, step, own):
    run_twice = CHECKPOINTS[checkpoint]
    check(module, own, STEPS[step], lambda twin: lambda x: run_twice(twin, x))


@pytest.mark.parametrize("step", ["in a second region", "three regions, last first"])
@pytest.mark.parametrize("inner", CHECKPOINTS)
@pytest.mark.parametrize("outer", CHECKPOINTS)
def test_checkpoints_in_checkpoints(outer, inner, step):
    def wrapped(twin):
        first, activation, second = twin

        def whole(x):
            return second(CHECKPOINTS[inner](lambda t: activation(first(t)), x))

        return lambda x: CHECKPOINTS[outer](whole, x)

    check("stacked", False, STEPS[step], wrapped)


@pytest.mark.parametrize("own", [False, True], ids=["region", "own recipe"])
@each_checkpoint
def test_a_function_that_calls_a_layer_several_times_and_enters_regions(checkpoint, own):
    """Each region is a step, and each call of a layer with a recipe of its own."""

    def twice(twin, enter):
        def function(x):
            for _ in range(2):
                with enter():
                    x = torch.tanh(twin(x)) * 3
            return x

        return function

    def step(module, call, enter, number):
        xs = inputs(number, 2)
        ys = [call(x) for x in xs]
        each(ys)
        return ys + [x.grad for x in xs]

    plain, enter = twin_of("linear", own)
    expected = run(plain, twice(plain, enter), enter, step)
    twin, enter = twin_of("linear", own)
    function = twice(twin, enter)
    ours = run(twin, lambda x: CHECKPOINTS[checkpoint](function, x), enter, step)
    for a, b in zip(ours, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("checkpoint", ["ours", "ours reentrant", "torch reentrant"])
@pytest.mark.parametrize(
    ("module", "backend"),
    [
        ("linear", "aot_eager"),
        ("grouped", "aot_eager"),
        pytest.param("ops", "aot_eager", marks=WIDE),
        pytest.param("linear", "inductor", marks=WIDE),
    ],
)
def test_compiled_layers_in_a_checkpoint(module, checkpoint, step, backend):
    if (step, checkpoint, backend) == ("retained", "ours", "inductor"):
        pytest.skip(reason="torch compiles a backward pass that cannot run twice")
    run_twice = CHECKPOINTS[checkpoint]
    # Compiled code under torch's own checkpoint needs a recipe that does not depend on the region.
    own = checkpoint == "torch reentrant"

    def wrapped(twin):
        call = torch.compile(twin, backend=backend)
        return lambda x: run_twice(call, x)

    check(module, own, STEPS[step], wrapped)


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param("inductor", marks=pytest.mark.nightly(reason="another test runs inductor")),
    ],
)
@pytest.mark.parametrize("checkpoint", ["ours", "torch"])
def test_a_checkpoint_in_compiled_code(checkpoint, backend):
    run_twice = CHECKPOINTS[checkpoint]

    def wrapped(twin):
        return torch.compile(lambda x: run_twice(twin, x), backend=backend)

    for step in ("outside", "in a second region", "eval", "train, then eval"):
        check("layernorm_mlp", False, STEPS[step], wrapped)


@pytest.mark.parametrize("between", ["compiled", "eager"])
def test_compiled_code_never_computes_with_later_factors(between):
    """torch saves the state of the layer, instead of the factors, and refuses a later one."""
    grads = []
    for compiles in (False, True):
        module, enter = twin_of("linear", False)
        call = module
        if compiles:
            checkpointed = functools.partial(qtensor.checkpoint, module)
            call = torch.compile(checkpointed, backend="aot_eager")
        for x in inputs(0, 2):
            with enter():
                y = call(x)
            loss(y).backward()
        first, second = inputs(1, 2)
        with enter():
            y = call(first)
        with enter():
            (call if between == "compiled" else module)(second)
        # Dynamo of torch 2.11 leaves the checkpoint to eager code, which computes it.
        module.zero_grad()
        with contextlib.suppress(RuntimeError):
            loss(y).backward()
            grads.append(module.weight.grad)
    assert torch.equal(grads[0], grads[-1])


@pytest.mark.parametrize("checkpoint", [pytest.param("ours", marks=WIDE), "ours reentrant"])
def test_compiled_autograd(checkpoint):
    """Dynamo compiles the second run of a reentrant checkpoint by itself."""

    def step(module, call, enter, number):
        (x,) = inputs(number)
        with enter():
            y = call(x)
        with compiled_autograd._enable(torch.compile(backend="aot_eager")):
            loss(y).backward()
        return [y, x.grad]

    check("linear", False, step, lambda twin: lambda x: CHECKPOINTS[checkpoint](twin, x))


@pytest.mark.parametrize("checkpoint", ["ours", "ours reentrant", "torch"])
def test_a_second_run_that_calls_other_layers_is_refused(checkpoint):
    module, enter = twin_of("stacked", False)
    layers = iter([module[0], module[2]])
    (x,) = inputs(0)
    with enter():
        y = CHECKPOINTS[checkpoint](lambda x: next(layers)(x), x)
        with pytest.raises(qtensor.QTensorError, match="layers of the first run"):
            loss(y).backward()


@pytest.mark.parametrize("limit", ["MAX_CALLS", "MAX_STEPS"])
def test_more_calls_than_are_noted_are_refused(monkeypatch, limit):
    monkeypatch.setattr(recomputation, limit, 3)
    module, enter = twin_of("linear", False)
    ys = []
    for x in inputs(0, 4):
        with enter():
            ys.append(CHECKPOINTS["torch reentrant"](module, x))
    loss(ys[-1]).backward()
    with pytest.raises(qtensor.QTensorError, match=r"more than .*qtensor\.checkpoint"):
        loss(ys[0]).backward()


def test_our_checkpoint_needs_no_internals_of_torch(monkeypatch):
    monkeypatch.setattr(recomputation, "_run_of", lambda pack: None)
    monkeypatch.setattr(recomputation._Notes, "since", lambda notes, node: None)
    for checkpoint in ("ours", "ours reentrant"):
        run_twice = CHECKPOINTS[checkpoint]
        step = STEPS["three regions, last first"]
        check("stacked", False, step, lambda twin, f=run_twice: lambda x: f(twin, x))
    with pytest.raises(AssertionError, match="differs"):
        check("stacked", False, step, lambda twin: lambda x: CHECKPOINTS["torch"](twin, x))


def test_nothing_is_kept_longer_than_it_is_needed():
    module, enter = twin_of("linear", False)
    key = module._states["weight"].key

    def tapes():
        return [t for t in recomputation._OF_TORCH.values() if key in t.calls]

    with enter():
        ys = [CHECKPOINTS["torch"](module, x) for x in inputs(0, 2)]
        assert len(tapes()) == 2
        module(inputs(1)[0])
    assert key not in recomputation._NOTES
    del ys
    gc.collect()
    assert not tapes()
    with enter(), torch.no_grad():
        module(inputs(1)[0])
    assert key not in recomputation._NOTES
    with enter():
        for x in inputs(0, 2):
            CHECKPOINTS["torch reentrant"](module, x)
    calls = recomputation._NOTES[key].calls
    assert len({id(call.factors) for call in calls}) == 1, "calls of one step share their factors"
    del module, calls
    gc.collect()
    assert key not in recomputation._NOTES
