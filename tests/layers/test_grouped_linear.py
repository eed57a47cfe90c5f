"""GroupedLinear: the bytes of separate layers, for every recipe, splits of every kind, and every
way to call it.
"""

from __future__ import annotations

import copy

import pytest
import torch
from formats import assert_same_bytes
from grouped_cases import (
    MAIN,
    RECIPES,
    K,
    N,
    assert_same_gradients,
    assert_same_pair,
    inputs,
    run_grouped,
    run_separate,
    separate,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import qtensor

SPLITS = ([33, 0, 7, 60], [1, 2, 97, 0], [100, 0, 0, 0], [25, 32, 16, 27])

recipe_ids = pytest.mark.parametrize("name", RECIPES)
main_ids = pytest.mark.parametrize("name", MAIN)
forms = pytest.mark.parametrize("form", ["list", "tensor"])


def grouped(name: str, groups: int = 4, **options):
    return qtensor.GroupedLinear(groups, K, N, recipe=RECIPES[name](), **options)


def as_form(sizes, form):
    return torch.tensor(sizes) if form == "tensor" else list(sizes)


@recipe_ids
@forms
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
def test_bytes_of_separate_layers(name: str, form: str, bias: bool):
    """Output and all gradients over four steps, so that delayed factors move; some groups are
    empty.
    """
    module = grouped(name, bias=bias)
    layers = separate(module)
    for step, sizes in enumerate(SPLITS):
        x, dy = inputs(100, step)
        got = run_grouped(module, x, dy, as_form(sizes, form), seed=step)
        assert_same_pair(got, run_separate(layers, x, dy, sizes, seed=step))
        assert_same_gradients(module, layers)


@main_ids
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("params_dtype", [None, torch.bfloat16], ids=["f32_params", "bf16_params"])
def test_dtypes(name: str, dtype: torch.dtype, params_dtype: torch.dtype | None):
    module = grouped(name, params_dtype=params_dtype)
    layers = separate(module)
    x, dy = inputs(100, 0, dtype)
    got = run_grouped(module, x, dy, SPLITS[0])
    assert got[0].dtype == got[1].dtype == dtype
    assert_same_pair(got, run_separate(layers, x, dy, SPLITS[0]))
    assert_same_gradients(module, layers)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=5),
    st.sampled_from(MAIN),
    st.booleans(),
)
def test_any_splits(sizes: list[int], name: str, tensor: bool):
    module = grouped(name, len(sizes))
    layers = separate(module)
    x, dy = inputs(sum(sizes), len(sizes))
    got = run_grouped(module, x, dy, as_form(sizes, "tensor" if tensor else "list"))
    assert_same_pair(got, run_separate(layers, x, dy, sizes))
    assert_same_gradients(module, layers)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
def test_high_precision_is_a_loop_over_linear(bias: bool):
    """Float32 sums of K products in another order: a relative error of K ulps of the sum of
    magnitudes.
    """
    module = grouped("high_precision", bias=bias)
    x, dy = inputs(100, 3)
    y, dx = run_grouped(module, x, dy, SPLITS[0])
    starts = torch.tensor(SPLITS[0]).cumsum(0) - torch.tensor(SPLITS[0])
    for i, (start, size) in enumerate(zip(starts.tolist(), SPLITS[0], strict=True)):
        w = getattr(module, f"weight{i}")
        b = getattr(module, f"bias{i}")
        part, grad = x[start : start + size], dy[start : start + size]
        want = torch.nn.functional.linear(part.double(), w.double(), b.double() if bias else None)
        bound = part.abs().double() @ w.abs().double().t() + 1
        assert ((y[start : start + size] - want).abs() <= K * 2**-23 * bound).all()
        bound = grad.abs().double() @ w.abs().double()
        want = grad.double() @ w.double()
        assert ((dx[start : start + size] - want).abs() <= N * 2**-23 * bound + 1e-30).all()
        want = grad.double().t() @ part.double()
        bound = grad.abs().double().t() @ part.abs().double()
        assert ((w.grad - want).abs() <= 100 * 2**-23 * bound + 1e-30).all()
        if bias:
            want = grad.double().sum(0)
            assert ((b.grad - want).abs() <= 100 * 2**-23 * grad.abs().sum(0) + 1e-30).all()


@main_ids
@forms
def test_empty_groups_have_zero_gradients(name: str, form: str):
    module = grouped(name)
    x, dy = inputs(10, 0)
    run_grouped(module, x, dy, as_form([0, 10, 0, 0], form))
    for i in (0, 2, 3):
        assert not getattr(module, f"weight{i}").grad.any()
        assert not getattr(module, f"bias{i}").grad.any()
    assert module.weight1.grad.any()


@main_ids
@forms
def test_no_tokens_at_all(name: str, form: str):
    module = grouped(name)
    layers = separate(module)
    x, dy = inputs(0, 0)
    got = run_grouped(module, x, dy, as_form([0] * 4, form))
    assert got[0].shape == (0, N)
    assert got[1].shape == (0, K)
    assert_same_pair(got, run_separate(layers, x, dy, [0] * 4))
    assert all(not p.grad.any() for p in module.parameters())


@main_ids
@forms
def test_leading_dims_and_strides(name: str, form: str):
    """(S, B, K), and rows that are not contiguous, as the same rows in one matrix."""
    template = grouped(name)
    x, dy = inputs(24, 0)
    splits = as_form([3, 0, 20, 1], form)
    plain = copy.deepcopy(template)
    want = run_grouped(plain, x, dy, splits)
    wide = torch.zeros(24, 2 * K)
    wide[:, ::2] = x
    for view in (x.view(4, 6, K), wide[:, ::2]):
        module = copy.deepcopy(template)
        got = run_grouped(module, view, dy.view(*view.shape[:-1], N), splits)
        assert got[0].shape == (*view.shape[:-1], N)
        assert_same_pair([t.reshape(24, -1) for t in got], want)
        for p, q in zip(module.parameters(), plain.parameters(), strict=True):
            assert_same_bytes(p.grad, q.grad)


@main_ids
def test_only_some_gradients(name: str):
    """Frozen weights, frozen biases, an input without gradient: what is left has the same bytes."""
    x, dy = inputs(100, 0)
    for frozen in ((), (1,), (0, 1, 2, 3)):
        module = grouped(name)
        for i in frozen:
            getattr(module, f"weight{i}").requires_grad_(False)
        layers = separate(module)
        got = run_grouped(module, x, dy, SPLITS[0])
        assert_same_pair(got, run_separate(layers, x, dy, SPLITS[0]))
        assert_same_gradients(module, layers)
    module = grouped(name)
    layers = separate(module)
    for each in (module, *layers):
        each.requires_grad_(False)
    module.weight2.requires_grad_()
    layers[2].weight.requires_grad_()
    torch.manual_seed(0)
    y = module(x, SPLITS[0])
    y.backward(dy)
    torch.manual_seed(0)
    run_separate(layers, x, dy, SPLITS[0])
    assert_same_gradients(module, layers)


@main_ids
def test_inference(name: str):
    """Without gradients, in eval mode: the state of delayed scaling stays."""
    module = grouped(name).eval()
    layers = [layer.eval() for layer in separate(module)]
    x, _ = inputs(100, 0)
    with torch.no_grad():
        y = module(x, SPLITS[0])
        parts = [f(p) for f, p in zip(layers, x.split(SPLITS[0]), strict=True)]
    assert_same_bytes(y, torch.cat(parts))
    assert not module._states["weight"].delayed.used
    with torch.inference_mode():
        assert_same_bytes(module(x, torch.tensor(SPLITS[0])), y)


@recipe_ids
def test_microbatches(name: str):
    """The first quantizes and keeps a workspace for each weight; the others use it, whatever the
    weights are then.
    """
    module = grouped(name)
    layers = separate(module)
    for step in range(2):
        for k, first in enumerate((True, False, False)):
            x, dy = inputs(100, 3 * step + k)
            call = {"is_first_microbatch": first}
            got = run_grouped(module, x, dy, SPLITS[k], seed=k, **call)
            assert_same_pair(got, run_separate(layers, x, dy, SPLITS[k], seed=k, **call))
            assert_same_gradients(module, layers)
            with torch.no_grad():
                for i, layer in enumerate(layers):
                    getattr(module, f"weight{i}").mul_(1.5)
                    layer.weight.mul_(1.5)


@pytest.mark.parametrize("name", [n for n in MAIN if n != "high_precision"])
def test_skipped_weight_update(name: str):
    """A non-zero flag leaves what is kept; zero renews it in place. As separate layers do."""
    module = grouped(name)
    layers = separate(module)
    kept = None
    for step, flag in enumerate((None, 1.0, 0.0)):
        skip = None if flag is None else torch.tensor([flag])
        call = {"is_first_microbatch": True, "skip_weight_update": skip}
        x, dy = inputs(100, step)
        before = None if kept is None else [b.clone() for b in kept]
        got = run_grouped(module, x, dy, SPLITS[0], seed=step, **call)
        assert_same_pair(got, run_separate(layers, x, dy, SPLITS[0], seed=step, **call))
        workspace = module._states["weight"].workspace
        if kept is not None:
            assert workspace is kept
            same = [torch.equal(a, b) for a, b in zip(kept, before, strict=True)]
            assert all(same) == (flag == 1.0)
        kept = workspace
        with torch.no_grad():
            for i, layer in enumerate(layers):
                getattr(module, f"weight{i}").mul_(3.0)
                layer.weight.mul_(3.0)
    if name == "delayed":
        history = module._states["weight"].delayed.merged()
        assert_same_bytes(history[:, 4], layers[0]._states["weight"].delayed.merged()[:, 1])


@pytest.mark.parametrize("name", [n for n in MAIN if n != "high_precision"])
def test_quantized_parameters(name: str):
    module = grouped(name, quantized_params=True)
    assert all(
        isinstance(module.get_parameter(f"weight{i}"), qtensor.QuantizedTensor) for i in range(4)
    )
    layers = separate(module)
    for step, sizes in enumerate(SPLITS[:2]):
        x, dy = inputs(100, step)
        got = run_grouped(module, x, dy, sizes, seed=step)
        assert_same_pair(got, run_separate(layers, x, dy, sizes, seed=step))
        assert_same_gradients(module, layers)


@pytest.mark.parametrize("name", [n for n in MAIN if n != "high_precision"])
def test_quantized_input_is_dequantized(name: str):
    module = grouped(name)
    twin = copy.deepcopy(module)
    q = qtensor.quantize(inputs(96, 0)[0], "mxfp8")
    with torch.no_grad():
        y = module(q, [32, 0, 60, 4])
        assert_same_bytes(y, twin(q.dequantize(), [32, 0, 60, 4]))


@main_ids
@forms
def test_retain_graph_and_freed_tensors(name: str, form: str):
    module = grouped(name)
    x, dy = inputs(100, 0)
    x.requires_grad_()
    splits = as_form(SPLITS[0], form)
    y = module(x, splits)
    splits[0] = 99  # what backward needs was taken in forward
    parameters = [x, *module.parameters()]
    first = torch.autograd.grad(y, parameters, dy, retain_graph=True)
    second = torch.autograd.grad(y, parameters, dy)
    for a, b in zip(first, second, strict=True):
        assert_same_bytes(a, b)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, parameters, dy)


def test_double_backward_is_refused():
    module = grouped("mxfp8")
    x, dy = inputs(100, 0)
    dy.requires_grad_()
    y = module(x.requires_grad_(), SPLITS[0])
    (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@main_ids
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not_reentrant"])
def test_checkpointing(name: str, reentrant: bool):
    """The same bytes, and delayed state moves once a step."""
    module = grouped(name)
    twin = copy.deepcopy(module)
    for step, sizes in enumerate(SPLITS[:3]):
        x, dy = inputs(100, step)
        want = run_grouped(twin, x, dy, sizes, seed=step)
        leaf = x.clone().requires_grad_()
        torch.manual_seed(step)
        y = checkpoint(module, leaf, list(sizes), use_reentrant=reentrant)
        y.backward(dy)
        assert_same_pair((y.detach(), leaf.grad), want)
        for a, b in zip(module.parameters(), twin.parameters(), strict=True):
            assert_same_bytes(a.grad, b.grad)
    a, b = (m._states["weight"].delayed for m in (module, twin))
    assert_same_bytes(a.scale, b.scale)
    assert_same_bytes(a.merged(), b.merged())
