"""Operations under torch.compile and compiled autograd: one graph, no breaks, and the bytes of
eager code.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from ops_cases import BASIC, FUSED, WIDTH, Case, data, step
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from training import RECIPES, assert_same, compiled, every_recipe, region

from qtensor import ops, recipes

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

CASES: dict[str, Case] = {**BASIC, **{name: f.case for name, f in FUSED.items()}}
SIZES = (136, 264, 392)
"""Above a block of 128 rows: a dimension of one factor would be a constant of the graph."""
KINDS = (
    "L2Normalization",
    "Dropout",
    "Quantize",
    "ExtraInput",
    "GroupedLinear",
    "add_layernorm",
    "backward_linear_add",
    "mlp_with_biases",
)
"""Cases that together have each kind of operation and of fusion that Dynamo traces in a way of its
own; activations are one op, which takes their names.
"""
_OF_A_KIND = pytest.mark.nightly(reason="a case of KINDS has its operations")


def cases(names, others):
    """Parametrize with all cases; those beyond ``names`` get the mark ``others``."""
    rows = [pytest.param(name, marks=[] if name in names else others) for name in CASES]
    return pytest.mark.parametrize("name", rows)


@pytest.fixture(autouse=True)
def fresh_compiled_autograd():
    compiled_autograd.reset()
    counters.clear()
    yield
    compiled_autograd.reset()


@cases(KINDS, _OF_A_KIND)
@every_recipe
def test_one_graph_for_all_batch_sizes(name, recipe):
    case, chosen = CASES[name], RECIPES[recipe]()
    eager, traced = case.make(), case.make()
    call, counter = compiled(traced, dynamic=True)
    for number, rows in enumerate((*SIZES, *SIZES[:2])):
        x, extra = data(rows), case.extra(rows)
        expected = step(eager, eager, x, chosen, extra, seed=number)
        assert_same(step(call, traced, x, chosen, extra, seed=number), expected)
    assert counter.frame_count == 1
    assert not counters["graph_break"]


ANOTHER = pytest.mark.nightly(reason="three seconds a cell; another one is by day")


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, marks=ANOTHER),
        torch.bfloat16,
    ],
)
@pytest.mark.parametrize(
    "name", ["mlp", "mlp_with_biases", "linear_bias_scale_add", "Dropout", "L2Normalization"]
)
@pytest.mark.parametrize(
    "recipe", [pytest.param(r, marks=() if r == "current" else ANOTHER) for r in RECIPES]
)
def test_inductor_gives_the_bytes_of_eager_code(name, recipe, dtype):
    case, chosen = CASES[name], RECIPES[recipe]()
    eager, traced = case.make().to(dtype), case.make().to(dtype)
    call, counter = compiled(traced, "inductor")
    for seed in range(2):
        x, extra = data(dtype=dtype), case.extra(40)
        expected = step(eager, eager, x, chosen, extra, seed=seed)
        assert_same(step(call, traced, x, chosen, extra, seed=seed), expected)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["mlp_with_biases", "Dropout", "ExtraInput", "GroupedLinear"])
@every_recipe
def test_inference(name, recipe):
    case, chosen = CASES[name], RECIPES[recipe]()
    eager, traced = case.make().eval(), case.make().eval()
    call, counter = compiled(traced, dynamic=True)
    for rows in SIZES:
        x, extra = data(rows), case.extra(rows)
        with torch.no_grad(), region(chosen):
            torch.manual_seed(1)
            expected = eager(x, *extra)
            torch.manual_seed(1)
            assert_same([call(x, *extra)], [expected])
    assert counter.frame_count == 1


def run_enabled(call, sequence, x, recipe, extra, counter, seed):
    def compiler(graph):
        return torch.compile(graph, backend=counter, fullgraph=True, dynamic=True)

    with compiled_autograd._enable(compiler):
        return step(call, sequence, x, recipe, extra, seed=seed)


_OWN = ("Dropout", "ExtraInput", "GroupedLinear", "L2Normalization", "Quantize", "SwiGLU")
"""Operations whose backward has something of its own: randomness, channels, splits, norms,
gates.
"""
_FUSED = ("mlp_with_biases", "add_rmsnorm")
_WIDE = pytest.mark.nightly(reason="test_one_graph_for_all_batch_sizes runs its backward")


@pytest.mark.parametrize("forward", ["eager", "compiled"])
@cases((*_OWN, *_FUSED), _WIDE)
@every_recipe
def test_compiled_autograd(name, recipe, forward):
    case, chosen = CASES[name], RECIPES[recipe]()
    plain, traced = case.make(), case.make()
    counter = CompileCounterWithBackend("aot_eager")
    call = traced if forward == "eager" else compiled(traced, dynamic=True)[0]
    frames = []
    for number, rows in enumerate((*SIZES, *SIZES[:2])):
        x, extra = data(rows), case.extra(rows)
        expected = step(plain, plain, x, chosen, extra, seed=number)
        ours = run_enabled(call, traced, x, chosen, extra, counter, number)
        assert_same(ours, expected)
        frames.append(counter.frame_count)
    assert frames[2] == frames[-1]


@every_recipe
def test_no_recompiles_and_options_that_replan(recipe):
    case, chosen = FUSED["linear_bias_activation"].case, RECIPES[recipe]()
    eager, traced = case.make(), case.make()
    call, counter = compiled(traced)
    for seed in range(3):
        expected = step(eager, eager, data(), chosen, seed=seed)
        assert_same(step(call, traced, data(), RECIPES[recipe](), seed=seed), expected)
    assert counter.frame_count == 1


def test_options_changed_within_a_recipe():
    case, recipe = FUSED["linear_bias"].case, recipes.MXFP8BlockScaling()
    eager, traced = case.make(), case.make()
    call, counter = compiled(traced)
    for mode in ("rceil", "floor", "rceil", "floor"):
        recipe.scale_mode = mode
        assert_same(step(call, traced, data(), recipe), step(eager, eager, data(), recipe))
    assert counter.frame_count == 2


def test_switching_recipes_and_modes_compiles_each_once():
    case = FUSED["linear_bias_activation"].case
    eager, traced = case.make(), case.make()
    call, counter = compiled(traced)
    for _ in range(2):
        for recipe in ("mxfp8", "current", "high_precision"):
            chosen = RECIPES[recipe]()
            assert_same(step(call, traced, data(), chosen), step(eager, eager, data(), chosen))
        with torch.no_grad():
            assert torch.equal(call(data()), eager(data()))
    assert counter.frame_count == 4


def test_a_part_that_is_frozen():
    case = FUSED["mlp_with_biases"].case
    eager, traced = case.make(), case.make()
    for s in (eager, traced):
        s[1].requires_grad_(False)
        s[2].requires_grad_(False)
    call, counter = compiled(traced)
    for chosen in (RECIPES["mxfp8"](), RECIPES["nvfp4"]()):
        results = []
        for f, s in ((eager, eager), (call, traced)):
            torch.manual_seed(0)
            with region(chosen):
                f(data()).square().sum().backward()
            results.append([p.grad for p in s.parameters() if p.grad is not None])
            s.zero_grad()
        assert len(results[0]) == 2
        assert_same(*results)
    assert counter.frame_count == 2


def test_quantized_parameters():
    for recipe in ("current", "blockwise", "mxfp8", "nvfp4"):
        chosen = RECIPES[recipe]()
        options = {"bias": False, "quantized_params": True, "recipe": chosen}
        case = Case(lambda o=options: [ops.RMSNorm(WIDTH), ops.Linear(WIDTH, 96, **o)])
        torch._dynamo.reset()
        eager, traced = (ops.Sequential(*case.build()) for _ in range(2))
        traced.load_state_dict(eager.state_dict())
        call, counter = compiled(traced)
        for seed in range(3):
            x = data(seed=seed)
            expected = step(eager, eager, x, chosen, seed=seed)
            assert_same(step(call, traced, x, chosen, seed=seed), expected)
        assert counter.frame_count == 1


def test_the_region_inside_of_the_compiled_function():
    case = FUSED["linear_bias"].case
    eager, traced = case.make(), case.make()

    def inside(x):
        with region(RECIPES["mxfp8"]()):
            return traced(x)

    call, counter = compiled(inside)
    expected = step(eager, eager, data(), RECIPES["mxfp8"]())
    assert_same(step(call, traced, data(), None), expected)
    assert counter.frame_count == 1


# ---- operations of users -------------------------------------------------------------------------


class Split(ops.BasicOperation):
    """``x * sin(x)``, in the form that is traced."""

    def op_forward_compute(self, input, *, next_op_input_request=None):
        s = torch.sin(input)
        return input * s, s

    def op_forward_save_ctx(self, ctx, input, returned):
        ctx.save_for_backward(input, returned)

    def op_backward(self, ctx, grad_output):
        x, s = ctx.saved_tensors
        return grad_output * (s + x * torch.cos(x)), ()


class State(NamedTuple):
    """What compute of ``Stateful`` hands over beside a tensor."""

    sine: torch.Tensor
    factor: float
    names: dict[str, int]


class Stateful(Split):
    """``Split`` with plain values that compute chooses."""

    def op_forward_compute(self, input, *, next_op_input_request=None):
        state = State(torch.sin(input), 0.5 if input.shape[1] > 8 else 2.0, {"power": 2})
        return input * state.sine * state.factor, state

    def op_forward_save_ctx(self, ctx, input, returned):
        super().op_forward_save_ctx(ctx, input, returned.sine)
        ctx.factor, ctx.names = returned.factor, returned.names

    def op_backward(self, ctx, grad_output):
        assert ctx.names == {"power": 2}
        return super().op_backward(ctx, grad_output * ctx.factor)


class Single(ops.BasicOperation):
    """The same, with everything in one function."""

    def op_forward(self, ctx, input, *, next_op_input_request=None):
        ctx.save_for_backward(input)
        return input * torch.sin(input)

    def op_backward(self, ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output * (torch.sin(x) + x * torch.cos(x)), ()


def user_sequence(kind):
    torch.manual_seed(0)
    return ops.Sequential(ops.Linear(WIDTH, WIDTH), kind(), ops.Linear(WIDTH, 32))


@pytest.mark.parametrize("kind", [Split, Stateful])
@every_recipe
def test_the_split_form_of_a_user_is_traced(recipe, kind):
    eager, traced = user_sequence(kind), user_sequence(kind)
    call, counter = compiled(traced, dynamic=True)
    chosen = RECIPES[recipe]()
    for number, rows in enumerate(SIZES):
        x = data(rows)
        expected = step(eager, eager, x, chosen, seed=number)
        assert_same(step(call, traced, x, chosen, seed=number), expected)
    assert counter.frame_count == 1


def test_the_single_form_breaks_the_graph_and_says_so():
    sequence = user_sequence(Single)
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=r"(?s)Single \(operation 1\).*single form"
    ):
        torch.compile(sequence, backend="aot_eager", fullgraph=True)(data())
    torch._dynamo.reset()
    counters.clear()
    call = torch.compile(sequence, backend="aot_eager")
    eager = user_sequence(Single)
    for seed in range(3):
        x = data(seed=seed)
        expected = step(eager, eager, x, RECIPES["mxfp8"](), seed=seed)
        assert_same(step(call, sequence, x, RECIPES["mxfp8"](), seed=seed), expected)
    reasons = "".join(counters["graph_break"])
    assert "single form" in reasons
