"""The quantized weight that a module keeps over the microbatches of a step."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from training import RECIPES, WIDTH, assert_same, build, compiled, region, step, twins

import qtensor
from qtensor.functional.linear.weight import quantize_weight

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

QUANTIZED = [name for name in RECIPES if name != "high_precision"]
quantized_recipes = pytest.mark.parametrize("recipe", QUANTIZED)


class Quantizations(TorchDispatchMode):
    """Counts the tensors of a shape that are quantized."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.__name__ in ("quantize.default", "quantize_.default"):
            self.count += tuple(args[0].shape) == self.shape
        if func.__name__ == "linear_forward.default":
            self.count += tuple(args[1].shape) == self.shape
        return func(*args, **(kwargs or {}))


def forward(module, x, recipe, first, **arguments):
    with Quantizations((96, WIDTH)) as seen, region(recipe):
        y = module(x, is_first_microbatch=first, **arguments)
    return y, seen.count


@quantized_recipes
def test_the_weight_is_quantized_once_a_step(recipe):
    module, chosen = build("linear"), RECIPES[recipe]()
    x = torch.randn(32, WIDTH, requires_grad=True)
    module.eval()  # the factors of delayed scaling stay
    y, count = forward(module, x, chosen, True)
    assert count == 1
    with torch.no_grad():
        module.weight.mul_(2.0)
    again, count = forward(module, x, chosen, False)
    assert count == 0
    assert torch.equal(again, y), "a later microbatch reads the weight of the first"
    fresh, count = forward(module, x, chosen, None)
    assert count == 1
    assert not torch.equal(fresh, y)
    again, count = forward(module, x, chosen, False)
    assert count == 0
    assert torch.equal(again, y), "None leaves what is kept"
    second, count = forward(module, x, chosen, True)
    assert count == 1
    assert not torch.equal(second, y)


@quantized_recipes
def test_gradients_come_from_the_kept_weight(recipe):
    module, reference, chosen = build("linear"), build("linear"), RECIPES[recipe]()
    x = torch.randn(32, WIDTH)
    for layer in (module, reference):
        step(layer, layer, x, chosen, is_first_microbatch=True)
    with torch.no_grad():
        module.weight.mul_(3.0)
    expected = step(reference, reference, x, chosen, is_first_microbatch=False)
    assert_same(step(module, module, x, chosen, is_first_microbatch=False), expected)


@quantized_recipes
def test_a_workspace_without_columns_is_made_anew_for_backward(recipe):
    module, chosen = build("linear"), RECIPES[recipe]()
    x = torch.randn(32, WIDTH, requires_grad=True)
    with torch.no_grad():
        forward(module, x, chosen, True)
    y, count = forward(module, x, chosen, False)
    assert count == 1
    y.sum().backward()
    assert x.grad is not None
    with torch.no_grad():
        _, count = forward(module, x, chosen, False)
    assert count == 0, "one with columns serves a forward without gradient"


def test_a_workspace_of_another_recipe_or_option_is_made_anew():
    module = build("linear")
    x = torch.randn(32, WIDTH)
    forward(module, x, RECIPES["mxfp8"](), True)
    for name in ("nvfp4", "blockwise", "current", "mxfp8"):
        _, count = forward(module, x, RECIPES[name](), False)
        assert count == 1, name
        _, count = forward(module, x, RECIPES[name](), False)
        assert count == 0, name
    other = RECIPES["mxfp8"]()
    other.scale_mode = "floor"
    _, count = forward(module, x, other, False)
    assert count == 1


def test_loading_or_moving_drops_the_workspace():
    module, chosen = build("linear"), RECIPES["mxfp8"]()
    x = torch.randn(32, WIDTH)
    y, _ = forward(module, x, chosen, True)
    module.load_state_dict({k: -v for k, v in module.state_dict().items()})
    new, count = forward(module, x, chosen, False)
    assert count == 1
    assert torch.equal(new, -y)
    module.double().float()
    _, count = forward(module, x, chosen, False)
    assert count == 1


@quantized_recipes
def test_a_noop_flag_keeps_the_bytes(recipe):
    module, chosen = build("linear").eval(), RECIPES[recipe]()
    x = torch.randn(32, WIDTH)
    y, _ = forward(module, x, chosen, True)
    with torch.no_grad():
        module.weight.mul_(2.0)
    skip, take = torch.ones(1), torch.zeros(1)
    kept, _ = forward(module, x, chosen, True, skip_weight_update=skip)
    assert torch.equal(kept, y)
    taken, count = forward(module, x, chosen, True, skip_weight_update=take)
    assert count == 1
    assert not torch.equal(taken, y)
    again, count = forward(module, x, chosen, False)
    assert count == 0
    assert torch.equal(again, taken)


@quantized_recipes
def test_two_graphs_under_compile_and_no_stale_constant(recipe):
    eager, traced = twins("layernorm_mlp")
    call, counter = compiled(traced)
    chosen = RECIPES[recipe]()
    for number in range(3):
        for microbatch in range(3):
            x = torch.randn(40, WIDTH)
            first = {"is_first_microbatch": microbatch == 0, "seed": number}
            expected = step(eager, eager, x, chosen, **first)
            assert_same(step(call, traced, x, chosen, **first), expected)
        for module in (eager, traced):
            with torch.no_grad():
                for p in module.parameters():
                    p.mul_(1.5)
    assert counter.frame_count == 2


FORMATS = ("fp8", "fp8_delayed", "fp8_rowwise", "fp8_blockwise", "mxfp8", "mxfp6", "mxfp4", "nvfp4")


@pytest.mark.parametrize("fmt", FORMATS)
def test_quantize_weight(fmt):
    """The caller owns the cache: a miss returns a new workspace, a hit none."""
    call = {"scale": torch.full((1,), 2.0)} if fmt == "fp8_delayed" else {}
    rows = qtensor.quantizer(fmt)
    both = rows.with_usage(columnwise=True)
    weight = torch.randn(96, WIDTH)
    expected = both.quantize(weight, **call)

    def same(storage, values=expected):
        return all(
            torch.equal(a, b) for a, b in zip(storage.buffers(), values.buffers(), strict=True)
        )

    made, kept = quantize_weight(weight, both, None, cache=True, is_first_microbatch=True, **call)
    assert made is kept
    assert same(made)
    assert quantize_weight(weight, both, None, **call)[1] is None
    later, new = quantize_weight(-weight, both, kept, cache=True, is_first_microbatch=False, **call)
    assert later is kept
    assert new is None
    assert same(kept)
    less, new = quantize_weight(-weight, rows, kept, is_first_microbatch=False, **call)
    assert less is kept, "one with more usages serves"
    skip = torch.ones(1)
    again, new = quantize_weight(-weight, both, kept, is_first_microbatch=True, noop=skip, **call)
    assert again is kept
    assert same(kept)
    again, new = quantize_weight(-weight, both, kept, is_first_microbatch=True, **call)
    assert again is kept, "a first microbatch writes into what is valid"
    assert new is None
    assert same(kept, both.quantize(-weight, **call))

    missing = quantize_weight(weight, rows, None, cache=True, is_first_microbatch=True, **call)[1]
    other_shape = quantize_weight(weight[:32], both, None, cache=True, **call)[1]
    other = qtensor.quantizer("mxfp4" if fmt != "mxfp4" else "mxfp8", columnwise=True)
    other_format = quantize_weight(weight, other, None, cache=True)[1]
    for invalid in (missing, other_shape, other_format):
        made, new = quantize_weight(
            weight, both, invalid, cache=True, is_first_microbatch=False, **call
        )
        assert new is made
        assert made is not invalid
        assert same(made)


def test_quantize_weight_refuses():
    weight = torch.randn(32, 32)
    with pytest.raises(
        qtensor.QTensorError, match="quantizer must be a quantizer object; got 'mxfp8'"
    ):
        quantize_weight(weight, "mxfp8")
    with pytest.raises(qtensor.QTensorError, match="that an earlier call returned; got Tensor"):
        quantize_weight(weight, qtensor.quantizer("mxfp8"), weight)
    with pytest.raises(qtensor.QTensorError, match="delayed scaling needs scale="):
        quantize_weight(weight, qtensor.quantizer("fp8_delayed"))
