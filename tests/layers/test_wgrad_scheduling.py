"""Weight gradients that are added to main_grad, put off, or computed from the input itself."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch._dynamo import compiled_autograd
from training import (
    RECIPES,
    REDRAWN,
    WIDTH,
    assert_same,
    build,
    compiled,
    every_recipe,
    region,
    step,
)

import qtensor
from qtensor import QTensorError

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BACKENDS = (None, "aot_eager", "inductor")
WIDE = pytest.mark.nightly(reason="aot_eager has the same ops; other tests run inductor")
cells = pytest.mark.parametrize(
    ("recipe", "backend"),
    [
        *((recipe, backend) for recipe in RECIPES for backend in BACKENDS[:2]),
        pytest.param("delayed", "inductor", marks=WIDE),
        pytest.param("nvfp4", "inductor", marks=WIDE),
    ],
)
"""Inductor sees the same opaque ops for every recipe: one with state and one with random numbers
stand for all.
"""


def traced(module, backend):
    return module if backend is None else compiled(module, backend)[0]


def backward(call, x, recipe, seed=0):
    torch.manual_seed(seed)
    with region(recipe):
        y = call(x)
    (y * torch.linspace(-1, 1, y.shape[-1])).sum().backward()


@cells
def test_main_grad(recipe, backend):
    chosen = RECIPES[recipe]()
    plain, fused = build("linear"), build("linear", fuse_wgrad_accumulation=True)
    fused.weight.main_grad = torch.ones(96, WIDTH)
    call = traced(fused, backend)
    xs = [torch.randn(40, WIDTH) for _ in range(3)]
    for number, x in enumerate(xs):
        backward(plain, x, chosen, number)
        if number == 0:
            expected = torch.ones(96, WIDTH) + plain.weight.grad
        else:
            expected = expected + plain.weight.grad
        plain.weight.grad = None
        backward(call, x, chosen, number)
        assert fused.weight.grad is None
        assert torch.equal(fused.weight.main_grad, expected)
    assert torch.equal(fused.bias.grad, plain.bias.grad)


def test_main_grad_can_be_overwritten_and_must_be_there():
    module = build("linear", fuse_wgrad_accumulation=True)
    x = torch.randn(8, WIDTH)
    with pytest.raises(
        QTensorError, match=r"linear weight: fuse_wgrad_accumulation adds to weight.main_grad"
    ):
        module(x)
    module.weight.main_grad = torch.full((96, WIDTH), 7.0)
    module.weight.overwrite_main_grad = True
    backward(module, x, None)
    plain = build("linear")
    backward(plain, x, None)
    assert torch.equal(module.weight.main_grad, plain.weight.grad)


@pytest.mark.parametrize("backend", [None, "inductor"])
def test_main_grad_may_change_between_forward_and_backward(backend):
    """In eager code by any means. A compiled forward saves main_grad itself, so there only through
    ``.data``.
    """
    module = build("linear", fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.zeros(96, WIDTH)
    call = traced(module, backend)
    if backend is not None:
        y = call(torch.randn(24, WIDTH))
        module.weight.main_grad.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    xs = [torch.randn(24, WIDTH) for _ in range(3)]
    outs = []
    with region(RECIPES["mxfp8"]()):
        outs = [call(x) for x in xs]
    (module.weight.main_grad if backend is None else module.weight.main_grad.data).zero_()
    for y in outs:
        y.sum().backward()
    plain = build("linear")
    total = torch.zeros(96, WIDTH)
    for x in xs:
        with region(RECIPES["mxfp8"]()):
            plain(x).sum().backward()
        total += plain.weight.grad
        plain.weight.grad = None
    assert torch.equal(module.weight.main_grad, total)


@pytest.mark.parametrize("module", ["linear", "swiglu_mlp"])
@cells
def test_delayed_wgrad(recipe, module, backend):
    chosen = RECIPES[recipe]()
    plain, later = build(module), build(module, delay_wgrad_compute=True)
    call = traced(later, backend)
    xs = [torch.randn(40, WIDTH) for _ in range(2)]
    for number, x in enumerate(xs):
        backward(plain, x, chosen, number)
        backward(call, x, chosen, number)
    for name, p in later.named_parameters():
        assert (p.grad is None) == (name.endswith("weight") and "norm" not in name), name
    for _ in xs:
        later.backward_dw()
    for ours, theirs in zip(later.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    with pytest.raises(QTensorError, match="backward_dw: a backward pass must have gone before"):
        later.backward_dw()


def test_delayed_wgrad_into_main_grad():
    module = build("linear", delay_wgrad_compute=True, fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.zeros(96, WIDTH)
    x, plain = torch.randn(16, WIDTH), build("linear")
    backward(module, x, RECIPES["current"]())
    backward(plain, x, RECIPES["current"]())
    assert not module.weight.main_grad.any()
    module.backward_dw()
    assert torch.equal(module.weight.main_grad, plain.weight.grad)


@every_recipe
def test_save_original_input(recipe):
    chosen = RECIPES[recipe]()
    x = torch.randn(40, WIDTH)
    module = build("linear", save_original_input=True)
    plain = build("linear")
    if recipe == "delayed":
        with region(chosen), pytest.raises(QTensorError, match="Linear input: save_original_input"):
            module(x)
        return
    expected = step(plain, plain, x, chosen)
    assert_same(step(module, module, x, chosen), expected)
    call, _ = compiled(module)
    assert_same(step(call, module, x, chosen), expected)
    saved = saved_tensors(module, x, chosen)
    assert any(t.shape == x.shape and t.dtype == x.dtype for t in saved)


def saved_tensors(module, x, recipe):
    saved = []

    def keep(t):
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), region(recipe):
        module(x.clone().requires_grad_())
    return saved


# ---- what is saved -------------------------------------------------------------------------------

SAVED = {
    "current": 40 * WIDTH + 4 + 96 * WIDTH + 4,
    "blockwise": 40 * WIDTH + 1 * WIDTH * 4 + 96 * WIDTH + 1 * 4 * 4,
    "mxfp8": 40 * WIDTH + 4 * 128 + 96 * WIDTH + 4 * 128,
    "nvfp4": 48 * WIDTH // 2 + 128 * 4 + 4 + 96 * WIDTH // 2 + 128 * 8 + 4 + 8,
}
"""Bytes of the columnwise input and weight: codes, padded factors, tensor-wide factors (and the
gradient's seed).
"""


@pytest.mark.parametrize("recipe", SAVED)
def test_saved_bytes_are_those_of_the_quantized_operands(recipe):
    module, x = build("linear"), torch.randn(40, WIDTH)
    saved = saved_tensors(module, x, RECIPES[recipe]())
    assert sum(t.nbytes for t in saved) == SAVED[recipe]


def test_high_precision_saves_its_inputs_themselves():
    module = build("linear")
    x = torch.randn(40, WIDTH, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        module(x)
    assert {t.data_ptr() for t in saved} == {x.data_ptr(), module.weight.data_ptr()}


@every_recipe
def test_a_backward_frees_what_was_saved_unless_it_is_retained(recipe):
    chosen = RECIPES[recipe]()
    for backend in (None, "inductor"):
        with torch._functorch.config.patch(donated_buffer=False):
            module = build("linear")
            call = traced(module, backend)
            x = torch.randn(40, WIDTH).requires_grad_()
            with region(chosen):
                y = call(x).sum()
            y.backward(retain_graph=True)
            first = [x.grad.clone(), module.weight.grad.clone(), module.bias.grad.clone()]
            x.grad = None
            module.zero_grad()
            y.backward()
            assert_same([x.grad, module.weight.grad, module.bias.grad], first)
            with pytest.raises(RuntimeError, match="second time"):
                y.backward()
        torch._dynamo.reset()


def test_double_backward_is_a_clear_error():
    module = build("linear")
    x = torch.randn(8, WIDTH, requires_grad=True)
    with region(RECIPES["current"]()):
        y = module(x)
    (g,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()


@cells
def test_activations_offloaded_to_the_cpu(recipe, backend):
    chosen = RECIPES[recipe]()
    plain, module = build("layernorm_mlp"), build("layernorm_mlp")
    call = traced(module, backend)
    x = torch.randn(40, WIDTH)

    def offloaded(t):
        with torch.autograd.graph.save_on_cpu():
            return call(t)

    assert_same(step(offloaded, module, x, chosen), step(plain, plain, x, chosen))


@pytest.mark.parametrize("reentrant", [False, True])
@cells
def test_checkpointing(recipe, backend, reentrant):
    if recipe == "nvfp4" and backend is not None:
        pytest.skip(reason=REDRAWN)
    chosen = RECIPES[recipe]()
    plain, module = build("layernorm_mlp"), build("layernorm_mlp")

    def run(t):
        return qtensor.checkpoint(module, t, use_reentrant=reentrant)

    call = run if backend is None else compiled(run, backend)[0]
    for number in range(3):
        x = torch.randn(40, WIDTH) * (number + 1)
        expected = step(plain, plain, x, chosen, seed=number)
        assert_same(step(call, module, x, chosen, seed=number), expected)
    for weight, state in plain._states.items():
        twin = module._states[weight].delayed
        for name in ("scale", "history", "steps", "cell"):
            ours, theirs = getattr(twin, name), getattr(state.delayed, name)
            if name == "steps":
                ours, theirs = ours - ours[0], theirs - theirs[0]
            assert torch.equal(ours, theirs), f"{weight}.{name} advanced twice"


@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_own_checkpoint_inside_of_the_region(reentrant):
    """Backward inside of the region: no help needed."""
    plain, module = build("linear"), build("linear")
    x = torch.randn(40, WIDTH)
    expected = step(plain, plain, x, RECIPES["mxfp8"]())
    leaf = x.clone().requires_grad_()
    with region(RECIPES["mxfp8"]()):
        y = torch.utils.checkpoint.checkpoint(module, leaf, use_reentrant=reentrant)
        (y * torch.linspace(-1, 1, 96)).sum().backward()
    assert_same([y.detach(), leaf.grad, *[p.grad for p in module.parameters()]], expected)


@contextlib.contextmanager
def enabled():
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        yield


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_main_grad_and_delayed_wgrad_under_compiled_autograd(backend):
    chosen = RECIPES["mxfp8"]()
    x = torch.randn(40, WIDTH)
    plain = build("linear")
    backward(plain, x, chosen)
    fused = build("linear", fuse_wgrad_accumulation=True)
    fused.weight.main_grad = torch.zeros(96, WIDTH)
    later = build("linear", delay_wgrad_compute=True)
    with enabled():
        backward(traced(fused, backend), x, chosen)
        backward(traced(later, backend), x, chosen)
    later.backward_dw()
    assert torch.equal(fused.weight.main_grad, plain.weight.grad)
    assert torch.equal(later.weight.grad, plain.weight.grad)
