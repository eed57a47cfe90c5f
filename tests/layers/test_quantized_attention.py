"""Attention through quantized operands: each product in float64 over decoded operands, the error
beside attention without quantization, and the choice of quantizers by recipes.
"""

from __future__ import annotations

import pytest
import torch
from attention_module_cases import (
    Mask,
    Sizes,
    attention64,
    first,
    gradients,
    last,
    module,
    sqnr,
    table,
)
from torch import Tensor

import qtensor
from qtensor import recipes
from qtensor.recipes import Role

FORMATS = ("sbhd", "bshd")
RECIPES = {
    "current": lambda **o: recipes.Float8CurrentScaling(fp8_dpa=True, **o),
    "current_e4m3": lambda **o: recipes.Float8CurrentScaling(fp8_dpa=True, fp8_format="E4M3", **o),
    "delayed": lambda **o: recipes.DelayedScaling(fp8_dpa=True, **o),
    "mxfp8": lambda **o: recipes.MXFP8BlockScaling(fp8_dpa=True, **o),
    "mxfp8_hybrid": lambda **o: recipes.MXFP8BlockScaling(fp8_dpa=True, fp8_format="HYBRID", **o),
    "custom": lambda **o: recipes.CustomRecipe(fp8_dpa=True, factory=chosen, **o),
}
FLIPS = 40.0
"""Decibels beside the same products in float64. The sums of float32 move a few values of P and dS
across a rounding boundary, each by one step of its format, which is 12 dB or more below the error
of rounding all of them; the least error of rounding is about 26 dB.
"""


def chosen(role: Role) -> str | None:
    """Other formats for attention; nothing for linear layers."""
    if role.module != "attention":
        return None
    return {"qkv": "mxfp8", "probabilities": "mxfp6", "grad_scores": "fp8"}.get(role.tensor)


def decoded(x: Tensor, recipe: recipes.Recipe, tensor: str, along: int) -> Tensor:
    """``x`` (B, M, K) after quantization with blocks along a dim: -1 or -2."""
    quantizer = recipe.quantizer(Role(tensor, "attention"))
    if quantizer is None or (recipe.backward_override and tensor.startswith("grad")):
        return x.double()
    if isinstance(quantizer, qtensor.Float8Quantizer):
        raise AssertionError("attention has no state")
    rowwise = quantizer.with_usage(rowwise=True, columnwise=False)
    if along == -1:
        return rowwise(x).dequantize().double()
    # Blocks along the other dim are those of the transpose.
    return rowwise(x.mT.contiguous()).dequantize().mT.double()


def padded(t: Tensor) -> Tensor:
    return torch.nn.functional.pad(t, (0, -t.shape[-1] % 32, 0, -t.shape[-2] % 32))


def oracle(inputs: list[Tensor], dy: Tensor, seen: Tensor, recipe: recipes.Recipe) -> list[Tensor]:
    """Output and gradients (heads first) of one head for each batch, by the six products."""
    q, k, v = (padded(t.detach()[:, 0]) for t in inputs)
    rows, columns = inputs[0].shape[2], inputs[1].shape[2]
    scale = inputs[0].shape[-1] ** -0.5
    override = recipe.backward_override
    scores = decoded(q, recipe, "qkv", -1) @ decoded(k, recipe, "qkv", -1).mT
    hidden = ~seen[:, 0]
    p = (scores[:, :rows, :columns] * scale).masked_fill(hidden, -1e30).softmax(-1)
    p = p.masked_fill(hidden, 0.0)
    p32 = padded(p.float())
    y = decoded(p32, recipe, "probabilities", -1) @ decoded(v, recipe, "qkv", -2)
    dy = padded(dy[:, 0])

    def again(x: Tensor, tensor: str, along: int, forward: int) -> Tensor:
        if override == "high_precision":
            return x.double()
        return decoded(x, recipe, tensor, forward if override else along)

    dp = decoded(dy, recipe, "grad_output", -1) @ again(v, "qkv", -1, -2).mT
    dv = again(p32, "probabilities", -2, -1).mT @ decoded(dy, recipe, "grad_output", -2)
    dp = dp[:, :rows, :columns].float().double()
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
    ds = padded(ds.float())
    dq = decoded(ds, recipe, "grad_scores", -1) @ again(k, "qkv", -2, -1)
    dk = decoded(ds, recipe, "grad_scores", -2).mT @ again(q, "qkv", -2, -1)
    results = ((y, rows, inputs[2]), (dq, rows, q), (dk, columns, k), (dv, columns, inputs[2]))
    return [t[:, :n, : inputs[0].shape[-1]].unsqueeze(1) for t, n, _ in results]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("override", [None, "high_precision", "dequantized"])
@pytest.mark.parametrize("tokens", [64, 72])
def test_every_product_reads_quantized_operands(recipe, override, tokens):
    made = RECIPES[recipe](backward_override=override)
    sizes = Sizes(queries=tokens, keys=tokens + 8, heads=1, groups=1, size=32, values=32)
    mask = Mask("causal_bottom_right", (50, 0))
    layer = module(sizes, "bshd", **mask.options())
    inputs = sizes.draw("bshd")
    with qtensor.autocast(recipe=made):
        y = layer(*inputs)
    got = gradients(y, inputs)
    seen = table(mask, (tokens, tokens + 8), [(tokens, tokens + 8)] * 2)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    heads = [first(t, "bshd") for t in inputs]
    want = oracle(heads, dy.unflatten(-1, (1, -1)).transpose(1, 2), seen, made)
    plain = gradients(last(attention64(*heads, seen), "bshd"), inputs)
    for a, b, c in zip(got, want, plain, strict=True):
        b = b.transpose(1, 2)
        b = b.flatten(2) if a.ndim == 3 else b
        assert sqnr(a, b) > FLIPS
        assert 15 < sqnr(a, c) < FLIPS


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_groups_share_a_product_with_their_keys(recipe):
    """Grouped queries give the bytes of repeated keys; their gradients are sums over the queries.

    One factor per tensor, or blocks within a head, do not see the repetition.
    """
    sizes = Sizes(queries=32, keys=64, heads=4, groups=2)
    q, k, v = sizes.draw("bshd")
    repeated = [t.repeat_interleave(2, 2) for t in (k, v)]
    with qtensor.autocast(recipe=RECIPES[recipe]()):
        got = gradients(module(sizes, "bshd")(q, k, v), [q, k, v])
        want = gradients(module(sizes._replace(groups=4), "bshd")(q, *repeated), [q, k, v])
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    for a, b in zip(got[2:], want[2:], strict=True):
        assert sqnr(a, b) > 110


def test_recipes_choose_and_refuse():
    assert recipes.Float8CurrentScaling().fp8_dpa is False
    sizes = Sizes(queries=32, keys=32)
    inputs = sizes.draw("bshd")
    layer = module(sizes, "bshd")
    with qtensor.autocast(recipe=recipes.MXFP8BlockScaling()):
        assert torch.equal(layer(*inputs), module(sizes, "bshd")(*inputs))
    for cls in (recipes.Float8BlockScaling, recipes.NVFP4BlockScaling):
        with pytest.raises(qtensor.QTensorError, match="no quantizers for attention"):
            cls(fp8_dpa=True)
    hybrid = recipes.Float8CurrentScaling(fp8_dpa=True)
    elements = {
        tensor: hybrid.quantizer(Role(tensor, "attention")).dtype
        for tensor in ("qkv", "probabilities", "grad_scores", "grad_output")
    }
    assert elements == {
        "qkv": "e4m3",
        "probabilities": "e4m3",
        "grad_scores": "e5m2",
        "grad_output": "e5m2",
    }
    stateful = recipes.CustomRecipe(
        fp8_dpa=True,
        factory=lambda role: "fp8_delayed",
        delayed_scaling=recipes.DelayedScaling(),
    )
    with (
        qtensor.autocast(recipe=stateful),
        pytest.raises(qtensor.UnsupportedError, match=r"attention\[qkv\]"),
    ):
        layer(*inputs)
    replaced = recipes.MXFP8BlockScaling(fp8_dpa=True, overrides={"probabilities": None})
    with qtensor.autocast(recipe=replaced):
        plain = layer(*inputs)
    with qtensor.autocast(recipe=recipes.MXFP8BlockScaling(fp8_dpa=True)):
        assert not torch.equal(plain, layer(*inputs))


ERRORS = {
    # (recipe) -> least decibels of (output, dq, dk, dv), a step below the table in the docstring
    "plain": (45.0, 40.0, 40.0, 45.0),
    "current": (24.0, 20.0, 20.0, 20.0),
    "current_e4m3": (24.0, 20.0, 20.0, 24.0),
    "mxfp8": (24.0, 20.0, 20.0, 24.0),
    "mxfp8_hybrid": (24.0, 20.0, 20.0, 20.0),
}


def errors(recipe: str, tokens: int = 128) -> list[float]:
    """Decibels of output and gradients in bfloat16, beside float64 without quantization."""
    sizes = Sizes(queries=tokens, keys=tokens, size=64, values=64)
    layer = module(sizes, "bshd")
    if recipe != "plain":
        layer.recipe = RECIPES[recipe]()
    inputs = sizes.draw("bshd", dtype=torch.bfloat16)
    got = gradients(layer(*inputs), inputs)
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    heads = [first(t, "bshd") for t in inputs]
    y = last(attention64(*heads, seen), "bshd")
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    want = [y.detach(), *torch.autograd.grad(y, inputs, dy.double())]
    return [sqnr(a, b) for a, b in zip(got, want, strict=True)]


@pytest.mark.parametrize("recipe", ERRORS)
def test_errors_are_those_of_the_formats(recipe):
    found = errors(recipe)
    assert all(a > b for a, b in zip(found, ERRORS[recipe], strict=True)), found
