"""``grad_added_to_main_grad``: set by the backward that adds, in eager and compiled code, and by
nothing else.
"""

from __future__ import annotations

import copy
import pickle
import weakref

import pytest
import torch
from grouped_cases import K, N
from torch._dynamo import compiled_autograd
from training import MODULES, RECIPES, WIDTH, build, compiled, region

import qtensor
from qtensor.library.gradient import _LISTENERS

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

FUSED = {"fuse_wgrad_accumulation": True}
BACKENDS = (None, "aot_eager", "inductor")
WIDE = pytest.mark.nightly(reason="test_set_by_backward_and_not_before runs inductor")
backends = pytest.mark.parametrize(
    "backend", [*BACKENDS[:2], pytest.param(BACKENDS[2], marks=WIDE)]
)


def weights_of(module):
    """Those whose gradients are accumulated."""
    named = module.named_parameters()
    return [p for n, p in named if "weight" in n and "norm" not in n and p.requires_grad]


def ready(module, fill=0.0):
    for weight in weights_of(module):
        weight.main_grad = torch.full(weight.shape, fill)
        weight.grad_added_to_main_grad = False
    return module


def flags(module):
    return [weight.grad_added_to_main_grad for weight in weights_of(module)]


def traced(module, backend, **options):
    return (module, None) if backend is None else compiled(module, backend, **options)


def run(call, module, recipe="mxfp8", **arguments):
    """The loss of one forward."""
    with region(RECIPES[recipe]()):
        out = call(torch.randn(40, WIDTH), **arguments)
    return (out[0] if isinstance(out, tuple) else out).sum()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("module", MODULES)
def test_set_by_backward_and_not_before(module, backend):
    fused = ready(build(module, **FUSED))
    call, counter = traced(fused, backend)
    for _ in range(2):
        loss = run(call, fused)
        assert not any(flags(fused))
        loss.backward()
        assert all(flags(fused))
        for weight in weights_of(fused):
            assert weight.grad is None
            assert weight.main_grad.any()
            weight.grad_added_to_main_grad = False
    if counter is not None:
        assert counter.frame_count == 1


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe(recipe):
    fused = ready(build("linear", **FUSED))
    run(fused, fused, recipe).backward()
    assert flags(fused) == [True]


@backends
def test_microbatches(backend):
    """The flag holds from the first microbatch on, and comes back after a reset; the weight is
    quantized once.
    """
    fused, plain = ready(build("linear", **FUSED)), build("linear")
    call, counter = traced(fused, backend)
    for first in (True, False, False):
        torch.manual_seed(1)
        run(call, fused, is_first_microbatch=first).backward()
        torch.manual_seed(1)
        run(plain, plain).backward()
        assert flags(fused) == [True]
        if not first:
            fused.weight.grad_added_to_main_grad = False
    assert torch.equal(fused.weight.main_grad, plain.weight.grad)
    assert counter is None or counter.frame_count == 2


@backends
def test_overwritten(backend):
    fused, plain = ready(build("linear", **FUSED), 7.0), build("linear")
    fused.weight.overwrite_main_grad = True
    call, _ = traced(fused, backend)
    torch.manual_seed(1)
    run(call, fused).backward()
    torch.manual_seed(1)
    run(plain, plain).backward()
    assert flags(fused) == [True]
    assert torch.equal(fused.weight.main_grad, plain.weight.grad)


@pytest.mark.parametrize("enabled", [False, True], ids=["eager", "compiled_autograd"])
@backends
def test_grouped(backend, enabled):
    """Each weight that is trained has its flag; one graph."""
    torch.manual_seed(0)
    module = qtensor.GroupedLinear(3, K, N, **FUSED)
    module.weight1.requires_grad_(False)
    module.weight1.grad_added_to_main_grad = False
    ready(module)
    call, counter = traced(module, backend)
    splits = torch.tensor([24, 0, 16])
    with region(RECIPES["mxfp8"]()):
        loss = call(torch.randn(40, K), splits).sum()
    if enabled:
        with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
            loss.backward()
    else:
        loss.backward()
    assert flags(module) == [True, True]
    assert not module.weight1.grad_added_to_main_grad
    assert counter is None or counter.frame_count == 1


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(None, marks=pytest.mark.nightly(reason="a part of the compiled one")),
        "aot_eager",
    ],
)
def test_under_compiled_autograd(backend):
    fused = ready(build("swiglu_mlp", **FUSED))
    call, _ = traced(fused, backend)
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        run(call, fused).backward()
    assert flags(fused) == [True, True]


@backends
def test_put_off(backend):
    """Set where the gradient is there: by ``backward_dw``."""
    module = ready(build("linear", delay_wgrad_compute=True, **FUSED))
    run(traced(module, backend)[0], module).backward()
    assert flags(module) == [False]
    module.backward_dw()
    assert flags(module) == [True]


def test_put_off_grouped():
    module = ready(qtensor.GroupedLinear(2, K, N, delay_wgrad_compute=True, **FUSED))
    module(torch.randn(40, K), [8, 32]).sum().backward()
    assert flags(module) == [False, False]
    module.backward_dw()
    assert flags(module) == [True, True]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant):
    fused = ready(build("layernorm_mlp", **FUSED))
    x = torch.randn(40, WIDTH, requires_grad=True)
    with region(RECIPES["delayed"]()):
        loss = qtensor.checkpoint(fused, x, use_reentrant=reentrant).sum()
    assert not any(flags(fused))
    loss.backward()
    assert all(flags(fused))


@backends
def test_quantized_output(backend):
    fused = ready(build("linear", **FUSED))
    call, _ = traced(fused, backend)
    with region(RECIPES["mxfp8"]()):
        out = call(torch.randn(32, WIDTH), quantized_output=True)
    assert isinstance(out, qtensor.MXFP8Tensor)
    out.dequantize().sum().backward()
    assert flags(fused) == [True]


def test_plain_modules_and_frozen_weights_set_nothing():
    plain = build("linear")
    run(plain, plain).backward()
    assert not hasattr(plain.weight, "grad_added_to_main_grad")
    frozen = ready(build("linear", **FUSED))
    frozen.weight.requires_grad_(False)
    run(frozen, frozen).backward()
    assert not frozen.weight.grad_added_to_main_grad
    with torch.no_grad():
        run(ready(build("linear", **FUSED)), frozen)
    assert not frozen.weight.grad_added_to_main_grad


def test_the_gradient_is_there_where_megatrons_hook_reads_the_flag():
    """Its hook on the accumulation node, which runs although there is no gradient to accumulate."""
    fused = ready(build("linear", **FUSED))
    node = fused.weight.view_as(fused.weight).grad_fn.next_functions[0][0]
    seen = []

    def look(*_):
        seen.append((fused.weight.grad_added_to_main_grad, bool(fused.weight.main_grad.any())))

    node.register_hook(look)
    run(fused, fused).backward()
    assert seen == [(True, True)]


def test_copies_report_to_their_own_weights():
    fused = ready(build("linear", **FUSED))
    for twin in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        ready(twin)
        run(twin, twin).backward()
        assert flags(twin) == [True]
        assert flags(fused) == [False]
    run(fused, fused).backward()
    assert flags(fused) == [True]


def test_a_replaced_weight_hears_it():
    fused = build("linear", **FUSED)
    fused.weight = torch.nn.Parameter(fused.weight.detach().clone())
    ready(fused)
    run(fused, fused).backward()
    assert flags(fused) == [True]


def test_a_module_that_is_gone_is_forgotten():
    fused = build("linear", **FUSED)
    key, alive = fused._states["weight"].key, weakref.ref(fused)
    assert key in _LISTENERS
    del fused
    assert alive() is None
    assert key not in _LISTENERS
