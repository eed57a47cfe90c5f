"""What a recipe means for one call of attention: canonical texts of the operands."""

from __future__ import annotations

from typing import NamedTuple

from qtensor.core.errors import UnsupportedError, check
from qtensor.core.quantizer_registry import QuantizerLike, parse
from qtensor.functional.linear.layer_plan import alignment
from qtensor.recipes import Role, compile_constant, parse_recipe


class ProductPlan(NamedTuple):
    """The operands of a product ``a @ b`` of activations, forward and backward.

    Attributes:
        a: canonical text of the left operand (..., M, K), "" for high precision.
        b: of the right operand: (..., N, K) in layout TN, (..., K, N) in layout NN.
        gradient: of the gradient of the product (..., M, N).
        layout: "TN" or "NN".
        override: ``backward_override`` of the recipe.
    """

    a: str
    b: str
    gradient: str
    layout: str
    override: str | None


class AttentionPlan(NamedTuple):
    """The products of attention, ``scores = q @ k.mT`` and ``output = probabilities @ v``.

    Attributes:
        scores: of q and k; its gradient is that of the scores.
        output: of the probabilities and v; its gradient is that of the output.
        multiple: of this number sequences and heads are padded, so that blocks are whole.
    """

    scores: ProductPlan
    output: ProductPlan
    multiple: int


def _text(quantizer: QuantizerLike | None) -> str:
    if quantizer is None:
        return ""
    return quantizer.with_usage(rowwise=True, columnwise=True).canonical


@compile_constant
def attention_plan(key: str, name: str) -> AttentionPlan | None:
    """Return the plan of a call; None if the recipe leaves attention in high precision.

    Args:
        key: of the recipe; "" for high precision.
        name: of the module, for the recipe's roles.

    Raises:
        UnsupportedError: a quantizer that needs state or seeds.
    """
    if not key or not parse_recipe(key).fp8_dpa:
        return None
    recipe = parse_recipe(key)
    tensors = ("qkv", "probabilities", "grad_scores", "grad_output")
    found = [recipe.quantizer(Role(tensor, "attention", name)) for tensor in tensors]
    for tensor, quantizer in zip(tensors, found, strict=True):
        random = getattr(quantizer, "stochastic_rounding", False)
        rule = "attention quantizes with factors of the tensor itself, rounded to nearest"
        fits = quantizer is None or not (quantizer.needs_scale or random)
        fix = "Return another quantizer, for example mxfp8, or None for this role"
        check(fits, f"attention[{tensor}]", rule, quantizer, fix, UnsupportedError)
    qkv, probabilities, grad_scores, grad_output = map(_text, found)
    override = recipe.backward_override
    if override is not None:
        grad_scores = grad_output = ""
    return AttentionPlan(
        ProductPlan(qkv, qkv, grad_scores, "TN", override),
        ProductPlan(probabilities, qkv, grad_output, "NN", override),
        max(alignment(text) for text in (qkv, probabilities, grad_scores, grad_output)),
    )


@compile_constant
def usage_text(canonical: str, rowwise: bool, columnwise: bool) -> str:
    """Return the text of a quantizer with these usages; "" for high precision or no usage."""
    if not canonical or not (rowwise or columnwise):
        return ""
    return parse(canonical).with_usage(rowwise=rowwise, columnwise=columnwise).canonical
