"""GroupedLinear under torch.compile: the bytes of eager, one graph for all splits, compiled
autograd, export.
"""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from compile_helpers import Compiled, backends
from formats import assert_same_bytes
from grouped_cases import MAIN, RECIPES, K, N, assert_same_pair, inputs, run_grouped
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from training import REDRAWN

import qtensor

pytestmark = [
    # Dynamo makes an instance of every autograd.Function that it traces, and looks at .grad of
    # every input.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
    pytest.mark.usefixtures("fresh_dynamo"),
]

SPLITS = ([20, 30, 40, 10], [25, 26, 27, 22], [33, 0, 7, 60], [1, 2, 97, 0], [0, 0, 0, 100])

main_ids = pytest.mark.parametrize("name", MAIN)
each_form = pytest.mark.parametrize("form", ["list", "tensor"])
WIDE = pytest.mark.nightly(reason="compiles for a second; other cells hold each value")


def grouped(recipe: str, groups: int = 4, **options):
    return qtensor.GroupedLinear(groups, K, N, recipe=RECIPES[recipe](), **options)


def as_form(sizes, form):
    return torch.tensor(sizes) if form == "tensor" else list(sizes)


def assert_same_training(compiled, module, eager, runs, form):
    """Forward and backward of both over (rows, sizes), outputs, gradients and delayed state byte
    for byte.
    """
    for step, sizes in enumerate(runs):
        x, dy = inputs(sum(sizes), step)
        got = run_grouped(compiled, x, dy, as_form(sizes, form), seed=step)
        assert_same_pair(got, run_grouped(eager, x, dy, as_form(sizes, form), seed=step))
        assert_same_parameters(module, eager)


def assert_same_parameters(module, eager):
    for p, q in zip(module.parameters(), eager.parameters(), strict=True):
        assert_same_bytes(p.grad, q.grad)
    a, b = (m._states["weight"].delayed for m in (module, eager))
    assert_same_bytes(a.scale, b.scale)
    assert_same_bytes(a.merged(), b.merged())


def check_graphs_for_all_sizes(name: str, backend: str, form: str, graphs: int):
    module = grouped(name)
    eager = copy.deepcopy(module)
    compiled = Compiled(module, backend)
    assert_same_training(compiled, module, eager, SPLITS, form)
    compiled.check_graphs(graphs)


@backends
@main_ids
def test_a_tensor_of_sizes_is_one_graph(name: str, backend: str):
    check_graphs_for_all_sizes(name, backend, "tensor", 1)


@backends
@main_ids
def test_a_list_of_sizes_is_two_graphs(name: str, backend: str):
    """A static one, then one for all that follow, with the exact sizes of the groups."""
    check_graphs_for_all_sizes(name, backend, "list", 2)


BATCHES = ([20, 30, 40, 10], [25, 0, 27, 22], [3, 9, 7, 60], [0, 200, 0, 1])


@backends
@main_ids
@each_form
def test_dynamic_batches_are_one_graph(name: str, form: str, backend: str):
    module = grouped(name)
    eager = copy.deepcopy(module)
    compiled = Compiled(module, backend, dynamic=True)
    assert_same_training(compiled, module, eager, BATCHES, form)
    compiled.check_graphs(1)


@backends
@main_ids
@each_form
def test_inference(name: str, form: str, backend: str):
    module = grouped(name).eval()
    compiled = Compiled(module, backend, dynamic=True)
    with torch.no_grad():
        for step, sizes in enumerate(BATCHES):
            x, _ = inputs(sum(sizes), step)
            splits = as_form(sizes, form)
            torch.manual_seed(0)
            got = compiled(x, splits)
            torch.manual_seed(0)
            assert_same_bytes(got, module(x, splits))
    compiled.check_graphs(1)


@main_ids
def test_train_eval_train(name: str):
    """Two graphs, and the second is left again."""
    module = grouped(name)
    eager = copy.deepcopy(module)
    compiled = Compiled(module)
    for step, training in enumerate((True, False, True, False)):
        module.train(training)
        eager.train(training)
        x, dy = inputs(100, step)
        with contextlib.nullcontext() if training else torch.no_grad():
            splits = torch.tensor(SPLITS[step])
            torch.manual_seed(0)
            got = compiled(x, splits)
            torch.manual_seed(0)
            want = eager(x, splits)
        assert_same_bytes(got, want)
        if training:
            got.backward(dy)
            want.backward(dy)
            assert_same_parameters(module, eager)
    compiled.check_graphs(2)


@backends
@pytest.mark.parametrize("name", ["high_precision", "current", "nvfp4"])
def test_leading_dims_and_bias(name: str, backend: str):
    """(S, B, K); no bias, and biases that are returned."""
    for options in ({"bias": False}, {"return_bias": True}):
        module = grouped(name, **options)
        eager = copy.deepcopy(module)
        compiled = Compiled(module, backend)
        x, dy = inputs(100, 0)
        results = []
        for m in (compiled, eager):
            leaf = x.view(4, 25, K).clone().requires_grad_()
            torch.manual_seed(0)
            y = m(leaf, torch.tensor(SPLITS[2]))
            if "return_bias" in options:
                y, biases = y
                assert len(biases) == 4
                torch.stack(biases).sum().backward()
            y.backward(dy.view(4, 25, N))
            results.append((y.detach(), leaf.grad))
        assert_same_pair(*results)
        assert_same_parameters(module, eager)
        compiled.check_graphs(1)


@backends
@pytest.mark.parametrize("name", [n for n in MAIN if n != "high_precision"])
def test_microbatches(name: str, backend: str):
    """Weights change between steps and between microbatches: two graphs, and no stale workspace."""
    module = grouped(name)
    eager = copy.deepcopy(module)
    compiled = Compiled(module, backend)
    for step in range(3):
        for k, first in enumerate((True, False, False)):
            x, dy = inputs(100, 3 * step + k)
            splits = torch.tensor(SPLITS[k])
            got = run_grouped(compiled, x, dy, splits, seed=k, is_first_microbatch=first)
            want = run_grouped(eager, x, dy, splits, seed=k, is_first_microbatch=first)
            assert_same_pair(got, want)
            assert_same_parameters(module, eager)
            with torch.no_grad():
                for p in (*module.parameters(), *eager.parameters()):
                    p.mul_(1.25)
    compiled.check_graphs(2)


@backends
@pytest.mark.parametrize("name", ["current", "mxfp8", "nvfp4"])
def test_quantized_parameters(name: str, backend: str):
    module = grouped(name, quantized_params=True)
    eager = copy.deepcopy(module)
    compiled = Compiled(module, backend)
    assert_same_training(compiled, module, eager, SPLITS[:3], "tensor")
    compiled.check_graphs(1)


@backends
@pytest.mark.parametrize("name", ["high_precision", "delayed", "nvfp4"])
@each_form
def test_fused_accumulation(name: str, form: str, backend: str):
    module = grouped(name, fuse_wgrad_accumulation=True)
    eager = grouped(name, fuse_wgrad_accumulation=True)
    eager.load_state_dict(module.state_dict())
    for m in (module, eager):
        for i in range(4):
            getattr(m, f"weight{i}").main_grad = torch.full((N, K), 0.5)
    compiled = Compiled(module, backend)
    for step, sizes in enumerate(SPLITS[:3]):
        x, dy = inputs(100, step)
        got = run_grouped(compiled, x, dy, as_form(sizes, form), seed=step)
        assert_same_pair(got, run_grouped(eager, x, dy, as_form(sizes, form), seed=step))
        for i in range(4):
            own, other = (getattr(m, f"weight{i}") for m in (module, eager))
            assert_same_bytes(own.main_grad, other.main_grad)
            assert own.grad is None
            assert_same_bytes(getattr(module, f"bias{i}").grad, getattr(eager, f"bias{i}").grad)
    compiled.check_graphs(1 if form == "tensor" else 2)


@backends
@pytest.mark.parametrize("name", ["high_precision", "delayed", "nvfp4"])
def test_delayed_wgrad(name: str, backend: str):
    module = grouped(name, delay_wgrad_compute=True)
    eager = copy.deepcopy(module)
    compiled = Compiled(module, backend)
    for step, sizes in enumerate(SPLITS[:3]):
        x, dy = inputs(100, step)
        splits = torch.tensor(sizes)
        got = run_grouped(compiled, x, dy, splits, seed=step)
        assert_same_pair(got, run_grouped(eager, x, dy, splits, seed=step))
        module.backward_dw()
        eager.backward_dw()
        assert_same_parameters(module, eager)
    compiled.check_graphs(1)


@main_ids
@pytest.mark.parametrize(
    ("forward", "form"),
    [
        pytest.param("eager", "list", marks=WIDE),
        ("compiled", "tensor"),
        pytest.param("compiled", "list", marks=WIDE),
    ],
)
@pytest.mark.parametrize("way", ["enable", pytest.param("config", marks=WIDE)])
def test_compiled_autograd(name: str, forward: str, form: str, way: str):
    """The backward pass is captured; no graph is added from the third iteration on."""
    module = grouped(name)
    eager = copy.deepcopy(module)
    captured = []
    with contextlib.ExitStack() as stack:
        if way == "config":
            stack.enter_context(torch._dynamo.config.patch(compiled_autograd=True))
        backend = "aot_eager"
        model = Compiled(module, backend, dynamic=True) if forward == "compiled" else module
        # The option counts where a compiled function runs: there must be one around the backward
        # pass.
        backward = torch.compile(lambda y, dy: y.backward(dy), backend=backend)
        counters.clear()
        for step, sizes in enumerate(BATCHES):
            x, dy = inputs(sum(sizes), step)
            splits = as_form(sizes, form)
            leaf = x.clone().requires_grad_()
            torch.manual_seed(step)
            y = model(leaf, splits)
            if way == "enable":
                compiler = torch.compile(backend=backend, dynamic=True)
                with compiled_autograd._enable(compiler):
                    y.backward(dy)
            else:
                backward(y, dy)
            captured.append(counters["compiled_autograd"]["captures"])
            want = run_grouped(eager, x, dy, splits, seed=step)
            assert_same_pair((y.detach(), leaf.grad), want)
            assert_same_parameters(module, eager)
    assert captured[0] >= 1
    assert captured[-1] == captured[2], captured


@backends
@main_ids
def test_checkpointing(name: str, backend: str):
    if name == "nvfp4":
        pytest.skip(reason=REDRAWN)
    module = grouped(name)
    eager = copy.deepcopy(module)
    compiled = Compiled(lambda x, s: checkpoint(module, x, s, use_reentrant=False), backend)
    assert_same_training(compiled, module, eager, SPLITS[:3], "tensor")


@backends
def test_retained_backward(backend: str):
    module = grouped("mxfp8")
    compiled = Compiled(module, backend)
    x, dy = inputs(100, 0)
    with torch._functorch.config.patch(donated_buffer=False):
        y = compiled(x.requires_grad_(), torch.tensor(SPLITS[0]))
        parameters = [x, *module.parameters()]
        first = torch.autograd.grad(y, parameters, dy, retain_graph=True)
        second = torch.autograd.grad(y, parameters, dy)
    for a, b in zip(first, second, strict=True):
        assert_same_bytes(a, b)


BAD = {
    "sum": ([20, 30, 40, 11], r"must sum to the rows of the input, 100; got a sum of 101\."),
    "negative": ([50, -10, 40, 20], r"must have zero or more rows; got -10 for group 1\."),
    "count": ([60, 40], r"there must be 4 group sizes, one for each weight; got 2\."),
}


@backends
@pytest.mark.parametrize("name", ["mxfp8", pytest.param("delayed", marks=WIDE)])
@pytest.mark.parametrize("form", ["tensor", pytest.param("list", marks=WIDE)])
def test_bad_sizes(form: str, name: str, backend: str):
    """The error of eager code, raised in the graph; good calls before and after it share theirs."""
    module = grouped(name, name="moe")
    eager = copy.deepcopy(module)
    compiled = Compiled(module, backend, dynamic=True)
    runs = SPLITS[:2]
    assert_same_training(compiled, module, eager, runs[:1], form)
    x, _ = inputs(100, 0)
    for bad, (sizes, message) in BAD.items():
        if (form, bad) == ("tensor", "count"):
            # The shape of a tensor is known, and refused, when Dynamo traces; see
            # test_what_is_refused_at_the_trace.
            continue
        for call in (compiled, compiled, eager):
            with pytest.raises(
                qtensor.QTensorError, match=rf"GroupedLinear\[moe\] m_splits: .*{message}"
            ):
                call(x.clone().requires_grad_(), as_form(sizes, form))
        graphs = compiled.graphs
        assert_same_training(compiled, module, eager, runs, form)
        compiled.check_graphs(graphs)


@backends
def test_bad_sizes_in_the_first_call(backend: str):
    module = grouped("mxfp8", name="moe")
    compiled = Compiled(module, backend)
    x, _ = inputs(100, 0)
    for sizes, message in BAD.values():
        with pytest.raises(qtensor.QTensorError, match=message):
            compiled(x, sizes)
    assert compiled(x, SPLITS[0]).shape == (100, N)


REFUSED = {
    "floats": ([20.0, 30.0, 40.0, 10.0], "group sizes must be ints"),
    "dtype": (torch.tensor(SPLITS[0], dtype=torch.int32), "a tensor of group sizes must be int64"),
    "shape": (torch.tensor([60, 40]), r"a tensor of group sizes must have the shape \(4,\)"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_at_the_trace(what: str):
    """What Dynamo knows before there are values, and no op takes: fullgraph raises Dynamo's error,
    which names ours.

    Without fullgraph Dynamo leaves the frame to eager code, which raises the error itself.
    """
    splits, message = REFUSED[what]
    module = grouped("mxfp8", name="moe")
    x, _ = inputs(100, 0)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"[Tt]ypeError|QTensorError"):
        Compiled(module)(x, splits)
    torch._dynamo.reset()
    with pytest.raises(qtensor.QTensorError, match=rf"GroupedLinear\[moe\] m_splits: {message}"):
        torch.compile(module, backend="eager")(x, splits)


@main_ids
@pytest.mark.parametrize("strict", [True, False])
def test_export(name: str, strict: bool, tmp_path):
    """A dynamic batch with a tensor of sizes, through a file."""
    module = grouped(name).eval()
    x, _ = inputs(100, 0)
    rows = torch.export.Dim("rows", min=2, max=4096)
    with torch.no_grad():
        program = torch.export.export(
            module,
            (x, torch.tensor(SPLITS[0])),
            dynamic_shapes=({0: rows}, None),
            strict=strict,
        )
        torch.export.save(program, tmp_path / "grouped.pt2")
        loaded = torch.export.load(tmp_path / "grouped.pt2").module()
        for step, sizes in enumerate(BATCHES):
            x, _ = inputs(sum(sizes), step)
            torch.manual_seed(0)
            got = loaded(x, torch.tensor(sizes))
            torch.manual_seed(0)
            assert_same_bytes(got, module(x, torch.tensor(sizes)))
