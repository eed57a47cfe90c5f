"""Gradients through quantize and dequantize under compile, compiled autograd and checkpointing."""

from __future__ import annotations

import contextlib

import pytest
import torch
from compile_helpers import Compiled, adversarial, assert_same, backends, ordinary
from formats import DTYPES, FORMATS, FormatCase, formats
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import qtensor

pytestmark = [
    # Dynamo makes an instance of every autograd.Function that it traces, and looks at .grad of
    # every input.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
]


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


@backends
@formats
def test_straight_through_gradient(case: FormatCase, backend: str):
    """The gradient of dequantize(quantize(x)) is the incoming one, in every bit and in x's dtype,
    NaN input or not.
    """
    q = case.quantizer(columnwise=True)

    def region(xs, state):
        return [q.quantize(x, **state).dequantize() for x in xs]

    inputs = [adversarial((33, 72), dtype) for dtype in DTYPES]
    gradients = [ordinary((33, 72), dtype, seed=5) for dtype in DTYPES]
    compiled = Compiled(region, backend)
    ours, theirs = ([leaf(x) for x in inputs] for _ in range(2))
    got, want = compiled(ours, case.call()), region(theirs, case.call())
    assert_same([y.detach() for y in got], [y.detach() for y in want])
    torch.autograd.backward(got, gradients)
    torch.autograd.backward(want, gradients)
    assert_same([x.grad for x in ours], gradients)
    assert_same([x.grad for x in theirs], gradients)
    compiled.check_graphs(1)


@backends
@formats
def test_quantized_output_with_a_gradient(case: FormatCase, backend: str):
    """A quantized tensor leaves a region, is decoded outside or in a second region, and the
    gradient comes back plain.
    """
    q = case.quantizer(columnwise=True)
    x = ordinary((33, 72), torch.bfloat16)

    def first(x, state):
        return q.quantize(x * 2, **state)

    def second(t):
        return t.dequantize() * 4

    for outside in (second, torch.compile(second, backend=backend, fullgraph=True)):
        compiled = Compiled(first, backend)
        mine = leaf(x)
        t = compiled(mine, case.call())
        assert type(t) is q.tensor_cls
        assert t.requires_grad
        assert_same(t.detach(), first(x, case.call()))
        y = outside(t)
        assert_same(y.detach(), second(first(x, case.call())))
        gradient = ordinary((33, 72), torch.bfloat16, seed=3)
        y.backward(gradient)
        assert type(mine.grad) is Tensor
        assert_same(mine.grad, gradient * 8)
        assert compiled.graphs == 1
        assert not counters["graph_break"]


@backends
@formats
def test_gradient_reaches_a_quantized_input(case: FormatCase, backend: str):
    """A quantized leaf that requires grad gets a plain gradient of its values."""
    compiled = Compiled(lambda t, x: (t.dequantize() * x).sum(), backend)
    x = ordinary((33, 72), seed=2)
    t = case.quantize(ordinary((33, 72))).requires_grad_()
    compiled(t, x).backward()
    assert type(t.grad) is Tensor
    assert_same(t.grad, x)
    compiled.check_graphs(1)


def test_coerced_tangents_are_plain():
    """What quantized outputs lean on in AOTAutograd; to be watched on every torch version."""
    for case in FORMATS:
        t = case.quantize(ordinary((5, 7), torch.float16))
        tangent = t.__coerce_tangent_metadata__()
        assert type(tangent) is Tensor
        assert (tangent.shape, tangent.dtype) == (t.shape, torch.float16)
        assert tangent.__tensor_flatten__() == ([], None)


@formats
def test_the_amax_has_no_gradient(case: FormatCase):
    q = case.quantizer()
    if not q.returns_amax:
        with pytest.raises(qtensor.UnsupportedError, match="only delayed scaling returns the amax"):
            q.quantize_with_amax(torch.ones(2, 2), scale=torch.ones(1))
        return

    def region(x, scale):
        t, amax = q.quantize_with_amax(x, scale=scale)
        return t.dequantize(), amax

    compiled = Compiled(region)
    x = leaf(ordinary((33, 72)))
    y, amax = compiled(x, torch.ones(1))
    assert not amax.requires_grad
    y.sum().backward()
    assert_same(x.grad, torch.ones_like(x))
    compiled.check_graphs(1)


class Block(nn.Module):
    """Quantize, use, decode: what a layer with fake quantization does. All neighbours are exact or
    deterministic.
    """

    def __init__(self, case: FormatCase):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(72, 72))
        self.q = case.quantizer(columnwise=True)
        self.case = case

    def forward(self, x: Tensor, state: dict[str, Tensor]) -> Tensor:
        x = self.q.quantize(x, **state).dequantize()
        weight = self.q.quantize(self.weight, **state).dequantize()
        return torch.relu(x @ weight)


def step(block: Block, run, x: Tensor) -> list[Tensor]:
    x = leaf(x)
    block.zero_grad()
    y = run(x, block.case.call())
    y.square().sum().backward()
    return [y.detach(), x.grad, block.weight.grad.clone()]


@contextlib.contextmanager
def autograd_compiled():
    """Compiled autograd around backward calls made in eager mode."""
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        yield


@formats
@pytest.mark.parametrize("forward", ["eager", "aot_eager"])
def test_compiled_autograd(case: FormatCase, forward: str):
    block, x = Block(case), ordinary((33, 72))
    want = step(block, block, x)
    torch._dynamo.reset()
    compiled_autograd.reset()
    run = block if forward == "eager" else torch.compile(block, backend=forward, fullgraph=True)
    counters.clear()
    with autograd_compiled():
        for _ in range(3):
            assert_same(step(block, run, x), want)
    assert counters["compiled_autograd"]["captures"] == 1, dict(counters["compiled_autograd"])
    assert not counters["graph_break"]


@formats
def test_compiled_autograd_by_config(case: FormatCase):
    block, x = Block(case), ordinary((33, 72))
    want = step(block, block, x)
    torch._dynamo.reset()
    compiled_autograd.reset()
    counters.clear()
    # The setting is read when torch.compile is called.
    with torch._dynamo.config.patch(compiled_autograd=True):
        whole = torch.compile(
            lambda x: block(x, case.call()).square().sum().backward(), backend="aot_eager"
        )
        for _ in range(2):
            mine = leaf(x)
            block.zero_grad()
            whole(mine)
            assert_same([mine.grad, block.weight.grad], want[1:])
    assert counters["compiled_autograd"]["captures"] == 1, dict(counters["compiled_autograd"])


@formats
def test_quantized_output_under_compiled_autograd(case: FormatCase):
    """The tangent of a quantized output is plain there too."""
    q, x = case.quantizer(), ordinary((33, 72))

    def run(compiled):
        mine = leaf(x)
        (compiled(mine, case.call()).dequantize() * 4).sum().backward()
        return mine.grad

    compiled = Compiled(lambda x, state: q.quantize(x * 2, **state))
    compiled_autograd.reset()
    counters["compiled_autograd"].clear()
    with autograd_compiled():
        assert_same(run(compiled), torch.full_like(x, 8))
    assert counters["compiled_autograd"]["captures"] == 1
    assert compiled.graphs == 1


@formats
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_checkpointing(case: FormatCase, reentrant: bool):
    """Recomputation gives the same gradients: around a compiled block, and inside a compiled region
    where torch can.
    """
    block, x = Block(case), ordinary((33, 72))
    want = step(block, block, x)

    def wrapped(inner):
        return lambda x, state: checkpoint(inner, x, state, use_reentrant=reentrant)

    assert_same(step(block, wrapped(block), x), want)
    compiled = Compiled(block)
    assert_same(step(block, wrapped(compiled), x), want)
    # Reentrant checkpointing runs the forward without grad, then with: two graphs, each whole.
    compiled.check_graphs(2 if reentrant else 1)
    if not reentrant:
        compiled = Compiled(wrapped(block))
        assert_same(step(block, compiled, x), want)
        compiled.check_graphs(1)


def test_stochastic_rounding_is_recomputed_alike():
    """Checkpointing restores the generator, so the recomputed draws are the first ones, in eager
    and compiled.
    """
    q = qtensor.NVFP4Quantizer(stochastic_rounding=True)
    x = ordinary((33, 72))

    def inner(x):
        return q.quantize(x).dequantize().square()

    gradients = []
    for run in (inner, Compiled(inner)):
        mine = leaf(x)
        torch.manual_seed(5)
        y = checkpoint(run, mine, use_reentrant=False)
        y.sum().backward()
        # d(v^2)/dv = 2v at the rounded value: it tells whether the recomputed rounding was the
        # same.
        assert_same(mine.grad.square() / 4, y.detach())
        gradients.append(mine.grad)
    assert_same(gradients[0], gradients[1])
