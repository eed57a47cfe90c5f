"""Compiled linear layers: what they save for backward, and the bytes of eager code; a layer of
torch with a quantized weight, compiled by itself.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from training import RECIPES, WIDTH, assert_same, build, compiled, region, step, twins

import qtensor
from tests.layers.test_wgrad_scheduling import SAVED

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
every_recipe = pytest.mark.parametrize(
    "recipe", ["current", "blockwise", "mxfp8", "nvfp4", "delayed"]
)
KEPT = SAVED | {"delayed": SAVED["current"] + 3 * 4 + 2 * 8 + 2 * 8}
"""Bytes that a layer keeps; under delayed scaling also the fields of its ``DelayedCall``."""


@every_recipe
def test_a_compiled_layer_keeps_its_operands_and_frees_them(recipe):
    module, x = build("linear"), torch.randn(40, WIDTH)
    call, _ = compiled(module)
    saved, codes = [], []

    def keep(t: torch.Tensor) -> torch.Tensor:
        saved.append(t.nbytes)
        if t.dtype == torch.uint8:
            codes.append(weakref.ref(t))
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), region(RECIPES[recipe]()):
        out = call(x.clone().requires_grad_())
    assert sum(saved) == KEPT[recipe]
    assert len(codes) >= 2
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    del out
    gc.collect()
    assert all(ref() is None for ref in codes)


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param("inductor", marks=pytest.mark.nightly(reason="aot_eager is stricter")),
    ],
)
@pytest.mark.parametrize("module", ["linear", "layernorm_linear", "layernorm_mlp"])
@pytest.mark.parametrize("written", ["maxima", "postponed wgrad"])
def test_several_forwards_before_a_backward(written, module, backend):
    """No backward pass changes a tensor that the graph of another forward has saved."""
    postponed = written != "maxima"
    recipe = RECIPES["mxfp8" if postponed else "delayed"]()
    eager, traced = twins(module, delay_wgrad_compute=postponed)
    results = []

    def backward(layer, loss, **options):
        loss.backward(**options)
        if postponed:
            layer.backward_dw()

    for layer, call in ((eager, eager), (traced, torch.compile(traced, backend=backend))):
        out = []
        for number in range(2):
            g = torch.Generator().manual_seed(number)
            xs = [torch.randn(40, WIDTH, generator=g) * (1 + 5 * i) for i in range(3)]
            ys = []
            for x in xs:
                with region(recipe):
                    ys.append(call(x.requires_grad_()))
            for y in ys[::-1]:
                backward(layer, y.square().sum(), retain_graph=backend == "aot_eager")
            if backend == "aot_eager":
                backward(layer, ys[1].sum())
            out += [*[y.detach() for y in ys], *[x.grad for x in xs]]
        state = layer.state_dict()
        grads = [p.grad for p in layer.parameters()]
        results.append([*out, *grads, *[state[name] for name in sorted(state)]])
    assert_same(*results)


@every_recipe
@pytest.mark.parametrize("shape", [(40, WIDTH), (2, 5, WIDTH), (WIDTH,), (0, WIDTH)])
def test_shapes(recipe, shape):
    eager, traced = twins("linear")
    call, _ = compiled(traced)
    x = torch.randn(shape)
    chosen = RECIPES[recipe]()
    assert_same(step(call, traced, x, chosen), step(eager, eager, x, chosen))


@pytest.mark.parametrize("frozen", ["input", "weight", "bias"])
def test_what_needs_no_gradient(frozen):
    eager, traced = twins("linear")
    results = []
    for module, call in ((eager, eager), (traced, compiled(traced)[0])):
        if frozen != "input":
            getattr(module, frozen).requires_grad_(False)
        x = torch.linspace(-2, 2, 40 * WIDTH).view(40, WIDTH).requires_grad_(frozen != "input")
        with region(RECIPES["current"]()):
            out = call(x)
        (out * out).sum().backward()
        grads = [t.grad for t in (x, module.weight, module.bias)]
        results.append([out.detach(), *(g for g in grads if g is not None)])
        assert len(results[-1]) == 3
    assert_same(*results)


@pytest.mark.parametrize("wanted", ["nothing", "input", "weight"])
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_no_op_of_a_graph_returns_a_list_of_one_tensor(recipe, wanted):
    """Code that Inductor writes with the option cpp_wrapper takes such a list for a tensor."""
    results = []

    def look(graph: torch.fx.GraphModule, _: object) -> object:
        values = [node.meta.get("val") for node in graph.graph.nodes]
        results.extend(len(value) for value in values if isinstance(value, (list, tuple)))
        return make_boxed_func(graph.forward)

    module, x = build("linear"), torch.randn(32, WIDTH)
    x.requires_grad_(wanted == "input")
    module.weight.requires_grad_(wanted == "weight")
    module.bias.requires_grad_(False)
    call = torch.compile(module, fullgraph=True, backend=aot_autograd(fw_compiler=look))
    with region(RECIPES[recipe]()):
        out, expected = call(x), module(x)
        assert_same([out], [expected])
        if wanted != "nothing":
            tensor = x if wanted == "input" else module.weight
            grads = [torch.autograd.grad(y.sum(), tensor) for y in (out, expected)]
            assert_same(list(grads[0]), list(grads[1]))
    assert results
    assert 1 not in results


def test_no_op_returns_a_list_of_one_tensor():
    """Neither the maximum of a tensor nor the gradients of one group are alone in their list."""
    ops, x = torch.ops.qtensor, torch.randn(32, 64)
    maximum, *rest = ops.amax(x, "fp8")
    assert torch.equal(maximum, x.abs().max().view(1))
    assert [t.numel() for t in rest] == [0]
    operand, groups = ([x], "", [32, 64]), ([20, 12], None, 2)
    gradient, *rest = ops.grouped_wgrad(*operand, *operand, *groups, [1], torch.float32)
    assert torch.equal(gradient, x[20:].t() @ x[20:])
    assert [t.numel() for t in rest] == [0]
    total, *rest = ops.grouped_bias_grad(x, [32], None, 1)
    assert torch.equal(total, ops.bias_grad(x))
    assert [t.numel() for t in rest] == [0]


@pytest.mark.nightly(reason="g++ compiles the graphs for half a minute")
@pytest.mark.parametrize("wanted", ["nothing", "weight"])
def test_calls_that_inductor_writes_in_cpp(wanted):
    module, x = build("linear"), torch.randn(32, WIDTH)
    module.bias.requires_grad_(False)
    call = torch.compile(module, fullgraph=True, options={"cpp_wrapper": True})
    with region(RECIPES["mxfp8"]()), torch.set_grad_enabled(wanted == "weight"):
        out, expected = call(x), module(x)
        assert_same([out], [expected])
        if wanted == "weight":
            grads = [torch.autograd.grad(y.sum(), module.weight) for y in (out, expected)]
            assert_same(list(grads[0]), list(grads[1]))


@pytest.mark.nightly(reason="g++ compiles the graphs for half a minute")
def test_one_gradient_of_a_group_that_inductor_writes_in_cpp():
    """The code that calls the op for one gradient crashed."""
    module, x = qtensor.GroupedLinear(2, 64, 32), torch.randn(32, 64)
    wanted = [module.weight1, module.bias0, module.bias1]
    module.weight0.requires_grad_(False)
    call = torch.compile(module, fullgraph=True, options={"cpp_wrapper": True})
    with region(RECIPES["mxfp8"]()):
        results = [function(x, [20, 12]) for function in (call, module)]
    grads = [torch.autograd.grad(y.sum(), wanted) for y in results]
    assert_same([results[0], *grads[0]], [results[1], *grads[1]])


def test_a_layer_of_torch_compiled_by_itself():
    """Dynamo skips the code of such a layer, and would compile the frames below it: ours."""
    torch.manual_seed(4)
    layer = nn.Linear(64, 32)
    weight = qtensor.quantize(torch.randn(32, 64), "mxfp8", columnwise=True)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    x = torch.randn(8, 64, requires_grad=True)
    y = layer(x)
    (wanted,) = torch.autograd.grad(y.square().sum(), x)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layer.compile(backend="aot_eager")
    compiled = layer(x)
    assert torch.equal(compiled, y)
    assert torch.equal(torch.autograd.grad(compiled.square().sum(), x)[0], wanted)
    assert not torch._dynamo.utils.counters["graph_break"]
