"""GroupedLinear: where weight gradients go, what is saved, parameters and checkpoints, and what is
refused.
"""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from formats import BY_NAME, FormatCase, assert_same_bytes, formats
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
from torch import nn

import qtensor
from qtensor.core.buffer_shapes import buffer_shapes, flat_bound, flat_sizes
from qtensor.core.operand import Operand
from qtensor.library.ragged import Groups, alloc_flat, groups_of

SPLITS = ([33, 0, 7, 60], [1, 2, 97, 0], [100, 0, 0, 0])

main_ids = pytest.mark.parametrize("name", MAIN)
quantized_ids = pytest.mark.parametrize("name", [n for n in MAIN if n != "high_precision"])
forms = pytest.mark.parametrize("form", ["list", "tensor"])


def grouped(recipe: str, groups: int = 4, **options):
    return qtensor.GroupedLinear(groups, K, N, recipe=RECIPES[recipe](), **options)


def as_form(sizes, form):
    return torch.tensor(sizes) if form == "tensor" else list(sizes)


# ---- weight gradients ----------------------------------------------------------------------------


def give_main_grads(module, layers, frozen=()):
    """float32 main_grad with values in it; the last one is overwritten."""
    for i, layer in enumerate(layers):
        weight = getattr(module, f"weight{i}")
        if i in frozen:
            weight.requires_grad_(False)
            layer.weight.requires_grad_(False)
            continue
        weight.main_grad = torch.full((N, K), 0.5)
        layer.weight.main_grad = weight.main_grad.clone()
        weight.overwrite_main_grad = layer.weight.overwrite_main_grad = i == 3


@main_ids
@forms
@pytest.mark.parametrize("frozen", [(), (1,)], ids=["all", "one_frozen"])
def test_fused_accumulation(name: str, form: str, frozen: tuple[int, ...]):
    module = grouped(name, fuse_wgrad_accumulation=True)
    layers = separate(module, fuse_wgrad_accumulation=True)
    give_main_grads(module, layers, frozen)
    for step, sizes in enumerate(SPLITS):
        x, dy = inputs(100, step)
        got = run_grouped(module, x, dy, as_form(sizes, form), seed=step)
        assert_same_pair(got, run_separate(layers, x, dy, sizes, seed=step))
        for i, layer in enumerate(layers):
            weight = getattr(module, f"weight{i}")
            assert weight.grad is None
            if i not in frozen:
                assert_same_bytes(weight.main_grad, layer.weight.main_grad)


@main_ids
@forms
@pytest.mark.parametrize("fused", [False, True], ids=["grad", "main_grad"])
def test_delayed_wgrad(name: str, form: str, fused: bool):
    """Two backward passes, then their weight gradients, the older ones first."""
    options = {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": fused}
    module = grouped(name, **options)
    layers = separate(module, **options)
    if fused:
        give_main_grads(module, layers)
    for step, sizes in enumerate(SPLITS[:2]):
        x, dy = inputs(100, step)
        got = run_grouped(module, x, dy, as_form(sizes, form), seed=step)
        assert_same_pair(got, run_separate(layers, x, dy, sizes, seed=step))
        assert all(getattr(module, f"weight{i}").grad is None for i in range(4))
    for _ in range(2):
        module.backward_dw()
        for layer in layers:
            layer.backward_dw()
        assert_same_gradients(module, layers)
        if fused:
            for i, layer in enumerate(layers):
                assert_same_bytes(getattr(module, f"weight{i}").main_grad, layer.weight.main_grad)
    with pytest.raises(qtensor.QTensorError, match="a backward pass must have gone before"):
        module.backward_dw()


def test_delayed_wgrad_of_frozen_weights():
    """A frozen weight's operands are dropped; the others meet their own weights."""
    module = grouped("mxfp8", delay_wgrad_compute=True)
    layers = separate(module, delay_wgrad_compute=True)
    module.weight1.requires_grad_(False)
    layers[1].weight.requires_grad_(False)
    x, dy = inputs(100, 0)
    run_grouped(module, x, dy, SPLITS[0])
    run_separate(layers, x, dy, SPLITS[0])
    module.backward_dw()
    for layer in (layers[0], layers[2], layers[3]):
        layer.backward_dw()
    assert_same_gradients(module, layers)


def test_backward_dw_without_delay():
    with pytest.raises(qtensor.UnsupportedError, match=r"GroupedLinear: backward_dw is for"):
        grouped("mxfp8").backward_dw()


def test_fused_accumulation_needs_main_grad():
    module = grouped("mxfp8", fuse_wgrad_accumulation=True, name="moe")
    module.weight0.main_grad = torch.zeros(N, K)
    x, _ = inputs(100, 0)
    with pytest.raises(qtensor.QTensorError, match=r"GroupedLinear\[moe\] weight1: .*main_grad"):
        module(x, SPLITS[0])


@pytest.mark.parametrize("name", ["high_precision", "current", "block", "mxfp8", "nvfp4"])
@forms
def test_save_original_input(name: str, form: str):
    module = grouped(name, save_original_input=True)
    layers = separate(module, save_original_input=True)
    x, dy = inputs(100, 0)
    got = run_grouped(module, x, dy, as_form(SPLITS[0], form))
    assert_same_pair(got, run_separate(layers, x, dy, SPLITS[0]))
    assert_same_gradients(module, layers)
    assert saved_bytes(module, x, as_form(SPLITS[0], form))[x.dtype, x.shape] == x.nbytes


def test_save_original_input_needs_equal_bytes():
    module = grouped("delayed", save_original_input=True)
    with pytest.raises(qtensor.UnsupportedError, match="save_original_input quantizes"):
        module(inputs(100, 0)[0], SPLITS[0])


# ---- memory --------------------------------------------------------------------------------------


def saved_bytes(module, x, *call) -> dict:
    """(dtype, shape) -> bytes that a forward saves for backward."""
    found: dict = {}

    def pack(t):
        key = (t.dtype, t.shape)
        found[key] = found.get(key, 0) + t.nbytes
        return t

    x = x.detach().clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        module(x, *call)
    return found


@pytest.mark.parametrize(
    "name", ["current", "block", "mxfp8", "mxfp8_2d", "nvfp4", "mxfp6", "rows"]
)
def test_saved_bytes_are_the_quantized_ones(name: str):
    """Exactly the columnwise buffers of each group and weight, and never a high-precision
    matrix.
    """
    module = grouped(name)
    layers = separate(module)
    x, _ = inputs(100, 0)
    for sizes in SPLITS:
        ours = saved_bytes(module, x, list(sizes))
        theirs = [
            saved_bytes(layer, part) for layer, part in zip(layers, x.split(sizes), strict=True)
        ]
        want = sum(itertools.chain.from_iterable(f.values() for f in theirs))
        assert sum(ours.values()) == want
        assert (x.dtype, x.shape) not in ours


@pytest.mark.parametrize("name", ["current", "block", "mxfp8", "nvfp4"])
def test_saved_bytes_of_a_tensor_are_bounded(name: str):
    """The same for all splits; what padding of four groups can add, and no more."""
    module = grouped(name)
    x, _ = inputs(100, 0)
    exact = [sum(saved_bytes(module, x, list(s)).values()) for s in SPLITS]
    bounds = {sum(saved_bytes(module, x, torch.tensor(s)).values()) for s in SPLITS}
    assert len(bounds) == 1
    splits = 4 * 8
    assert bounds.pop() - splits >= max(exact)


@formats
@pytest.mark.parametrize("columnwise", [False, True], ids=["row", "column"])
def test_flat_bound(case: FormatCase, columnwise: bool):
    """No splits need more, and for each number of groups some need all of it: found by trying them
    all, by period.
    """
    for options in case.each_option():
        q = case.quantizer(rowwise=not columnwise, columnwise=columnwise, **options)
        for slot in q.slots:
            for unit, groups in ((1, 1), (1, 3), (33, 3), (130, 4)):
                rows = unit * groups
                bound = flat_bound(slot, rows, K, groups)
                needs = [
                    flat_sizes([slot], sizes, K)[0]
                    for sizes in partitions(rows, groups, max(1, rows // 20))
                ]
                assert max(needs) <= bound
                # Groups of one row but for one: the most periods that can be begun.
                worst = [1] * (groups - 1) + [rows - groups + 1]
                assert flat_sizes([slot], worst, K)[0] <= bound
                per = max((d.per * d.pad for d in slot.dims if d.axis in ("m", "lead")), default=1)
                if per == 1:
                    assert set(needs) == {bound}


def partitions(rows: int, groups: int, step: int):
    """Ways to cut ``rows`` into ``groups``, in steps."""
    if groups == 1:
        yield [rows]
        return
    for first in (*range(0, rows, step), rows):
        for rest in partitions(rows - first, groups - 1, step):
            yield [first, *rest]


@formats
def test_group_buffers_are_those_of_separate_tensors(case: FormatCase):
    """Group by group the bytes of a quantizer's own tensor, from the flat buffers of either kind of
    splits.
    """
    sizes = [33, 0, 7, 60]
    x, _ = inputs(100, 0)
    for options in case.each_option():
        q = case.quantizer(columnwise=True, **options)
        scale = case.call().get("scale")
        scales = None if scale is None else scale * torch.tensor([1.0, 2.0, 4.0, 8.0])
        seeds = torch.tensor([3, 4, 5, 6]) if q.stochastic_rounding else None
        for splits in (None, torch.tensor(sizes)):
            known = sizes if splits is None else []
            flat = torch.ops.qtensor.grouped_quantize(
                x, q.canonical, known, splits, 4, scales, seeds
            )
            groups = groups_of(Operand(flat, q.canonical, x.shape), sizes)
            for i, (part, group) in enumerate(zip(x.split(sizes), groups, strict=True)):
                own = {} if scales is None else {"scale": scales[i : i + 1]}
                if seeds is not None:
                    own["generator"] = seeds[i : i + 1]
                want = q.quantize(part, **own).buffers()
                for a, b in zip(group.buffers, want, strict=True):
                    assert_same_bytes(a, b)
            totals = [math.prod(s) for g in sizes for s in buffer_shapes(q.slots, (g, K))]
            if splits is None:
                assert sum(b.numel() for b in flat[: len(q.slots)]) == sum(totals)


def test_flat_padding_is_zero():
    q = BY_NAME["mxfp8"].quantizer(columnwise=True)
    groups = Groups([], torch.empty(4, dtype=torch.int64), 4)
    for buffer in alloc_flat(q, (100, K), groups, torch.device("cpu"))[1::2]:
        assert not buffer.any()


# ---- parameters and state ------------------------------------------------------------------------


def test_parameters_are_named_as_in_transformer_engine():
    module = grouped("mxfp8", 3)
    names = [n for i in range(3) for n in (f"weight{i}", f"bias{i}")]
    assert [n for n, _ in module.named_parameters()] == names
    assert list(module.state_dict()) == names
    assert [n for n, _ in grouped("mxfp8", 2, bias=False).named_parameters()] == [
        "weight0",
        "weight1",
    ]
    assert all(p.shape == ((N, K) if n[0] == "w" else (N,)) for n, p in module.named_parameters())
    assert "num_gemms=3, in_features=64, out_features=96, bias=True" in repr(module)


def test_initial_values_are_those_of_separate_layers():
    torch.manual_seed(5)
    module = grouped("mxfp8", 3)
    torch.manual_seed(5)
    for i in range(3):
        layer = nn.Linear(K, N)
        assert_same_bytes(getattr(module, f"weight{i}"), layer.weight)
        assert_same_bytes(getattr(module, f"bias{i}"), layer.bias)


def test_meta_device_then_reset():
    module = grouped("delayed", 2, device="meta")
    assert module.weight1.is_meta
    module.to_empty(device="cpu")
    torch.manual_seed(5)
    module.reset_parameters()
    torch.manual_seed(5)
    twin = grouped("delayed", 2)
    x, dy = inputs(100, 0)
    want = run_grouped(twin, x, dy, [30, 70])
    assert_same_pair(run_grouped(module, x, dy, [30, 70]), want)


def test_own_initialisation_and_dtype():
    module = grouped("mxfp8", 2, init_method=lambda w: w.fill_(2.0), dtype=torch.bfloat16)
    assert module.weight1.dtype == module.bias1.dtype == torch.bfloat16
    assert (module.weight1 == 2.0).all()


def test_delayed_state_is_saved_and_restored():
    module = grouped("delayed")
    for step, sizes in enumerate(SPLITS):
        run_grouped(module, *inputs(100, step), sizes)
    state = module.state_dict()
    assert state["_delayed_scaling.weight.scale"].shape == (12,)
    other = grouped("delayed")
    other.load_state_dict(state)
    copied = copy.deepcopy(module)
    module.zero_grad()
    x, dy = inputs(100, 9)
    want = run_grouped(module, x, dy, SPLITS[0])
    assert_same_pair(run_grouped(other, x, dy, SPLITS[0]), want)
    assert_same_pair(run_grouped(copied, x, dy, SPLITS[0]), want)


def test_delayed_columns():
    """Inputs, weights, gradients, a column for each group."""
    module = grouped("delayed")
    x, dy = inputs(100, 0)
    run_grouped(module, x, dy, SPLITS[0])
    row = module._states["weight"].delayed.merged()[0]
    for role, parts in enumerate((x.split(SPLITS[0]), None, dy.split(SPLITS[0]))):
        for i in range(4):
            t = getattr(module, f"weight{i}") if parts is None else parts[i]
            want = t.abs().max() if t.numel() else torch.tensor(0.0)
            assert row[4 * role + i] == want


def test_amax_algorithm_of_the_caller():
    """A function sees all columns: the default's rule, written as one, gives the same bytes."""
    own = qtensor.recipes.DelayedScaling(amax_compute_algo=lambda history: history.amax(0))
    module = qtensor.GroupedLinear(4, K, N, recipe=own)
    twin = grouped("delayed")
    twin.load_state_dict(module.state_dict())
    for step, sizes in enumerate(SPLITS):
        x, dy = inputs(100, step)
        assert_same_pair(run_grouped(module, x, dy, sizes), run_grouped(twin, x, dy, sizes))


def test_return_bias():
    module = grouped("mxfp8", return_bias=True)
    x, _ = inputs(100, 0)
    y, biases = module(x, SPLITS[0])
    assert [b is getattr(module, f"bias{i}") for i, b in enumerate(biases)] == [True] * 4
    plain = copy.deepcopy(module)
    plain.use_bias = False
    assert_same_bytes(y, plain(x, SPLITS[0])[0])


def test_roles_of_recipes():
    """A factory sees "grouped_linear" and the name."""
    seen = set()

    def factory(role):
        seen.add((role.tensor, role.module, role.name))
        return "mxfp8"

    module = qtensor.GroupedLinear(
        2, K, N, recipe=qtensor.recipes.CustomRecipe(factory=factory), name="moe"
    )
    x, dy = inputs(10, 0)
    run_grouped(module, x, dy, [4, 6])
    tensors = ("input", "weight", "grad_output")
    assert {(t, "grouped_linear", "moe") for t in tensors} <= seen


def test_autocast():
    module = grouped("high_precision")
    twin = grouped("mxfp8")
    twin.load_state_dict(module.state_dict())
    x, dy = inputs(100, 0)
    with qtensor.autocast(recipe=RECIPES["mxfp8"]()):
        got = run_grouped(module, x, dy, SPLITS[0])
    assert_same_pair(got, run_grouped(twin, x, dy, SPLITS[0]))
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x, SPLITS[0]).dtype == torch.bfloat16


# ---- bad input -----------------------------------------------------------------------------------


BAD = {
    "sum": ([33, 0, 7, 59], r"m_splits must sum to the rows of the input, 100; got a sum of 99"),
    "negative": ([120, -20, 0, 0], r"zero or more rows; got -20 for group 1"),
}


@pytest.mark.parametrize("case", BAD)
@forms
def test_sizes_that_are_no_partition(case: str, form: str):
    sizes, message = BAD[case]
    module = grouped("mxfp8", name="moe")
    x, _ = inputs(100, 0)
    with pytest.raises(qtensor.QTensorError, match=r"GroupedLinear\[moe\] m_splits: .*" + message):
        module(x, as_form(sizes, form))


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ([50, 50], "there must be 4 group sizes"),
        (torch.tensor([50, 50]), r"must have the shape \(4,\); got \(2,\)"),
        (torch.tensor([[25, 25], [25, 25]]), r"must have the shape \(4,\); got \(2, 2\)"),
        (torch.tensor([25, 25, 25, 25], dtype=torch.int32), "must be int64; got torch.int32"),
        (torch.tensor([25.0, 25, 25, 25]), "must be int64; got torch.float32"),
        ([25.0, 25, 25, 25], "must be ints; got 25.0"),
        ([True, 25, 25, 49], "must be ints; got True"),
        (100, "must be a list of ints or an int64 tensor; got int"),
        (None, "must be a list of ints or an int64 tensor; got NoneType"),
    ],
    ids=str,
)
def test_splits_that_are_none(splits, message: str):
    module = grouped("mxfp8", name="moe")
    x, _ = inputs(100, 0)
    with pytest.raises(qtensor.QTensorError, match=r"GroupedLinear\[moe\] m_splits: .*" + message):
        module(x, splits)


def test_bad_inputs_and_options():
    module = grouped("mxfp8", name="moe")
    with pytest.raises(
        qtensor.QTensorError, match=r"GroupedLinear\[moe\] input: .*in_features, 64"
    ):
        module(torch.randn(100, 65), SPLITS[0])
    with pytest.raises(qtensor.QTensorError, match="num_gemms must be a positive integer; got 0"):
        qtensor.GroupedLinear(0, K, N)
    odd = qtensor.GroupedLinear(2, 40, 64, recipe=RECIPES["mxfp8"]())
    with pytest.raises(
        qtensor.QTensorError, match=r"GroupedLinear input\[mxfp8\]: .*multiples of 32"
    ):
        odd(torch.randn(4, 40), [2, 2])
    with pytest.raises(qtensor.QTensorError, match="quantized_params needs a recipe"):
        qtensor.GroupedLinear(2, K, N, quantized_params=True)


def test_weights_stored_differently():
    module = grouped("mxfp8", quantized_params=True)
    module.weight2 = nn.Parameter(torch.randn(N, K))
    x, _ = inputs(100, 0)
    with pytest.raises(qtensor.QTensorError, match="must be stored alike; got weight0 as mxfp8"):
        module(x, SPLITS[0])


@quantized_ids
def test_recipe_that_does_not_fit_quantized_weights(name: str):
    module = grouped("mxfp8" if name != "mxfp8" else "nvfp4", quantized_params=True, name="moe")
    x, _ = inputs(100, 0)
    with (
        qtensor.autocast(recipe=RECIPES[name]()),
        pytest.raises(
            qtensor.QTensorError, match=r"grouped_linear\[moe\] weight: .* reads weights as"
        ),
    ):
        module(x, SPLITS[0])
