"""What a recipe means for one call of a GEMM module: canonical texts, by direction of use."""

from __future__ import annotations

from typing import NamedTuple, cast

from qtensor.core.errors import check, fail
from qtensor.core.quantizer_registry import QuantizerLike, parse, usage_part
from qtensor.quantizers import Quantizer
from qtensor.recipes import (
    CustomRecipe,
    DelayedScaling,
    compile_constant,
    parse_recipe,
    role_quantizers,
)
from qtensor.recipes.base import function_number


class Parts(NamedTuple):
    """A quantizer's buffers by the GEMMs that read them."""

    total: int
    """Buffers; a delayed-scaling amax comes behind them."""
    row: tuple[int, ...]
    """Places of the buffers whose blocks run along the last dim; () where there are none."""
    row_canonical: str
    column: tuple[int, ...]
    """Places of those whose blocks run along the leading dims."""
    column_canonical: str


class LinearPlan(NamedTuple):
    """Canonical texts of the quantizers of a call, "" for what stays in high precision."""

    input: str
    weight: str
    grad_output: str
    delayed: tuple[bool, bool, bool]
    """Which of the three take their factors from the state between steps."""
    stochastic: tuple[bool, bool, bool]
    backward_override: str | None
    saved_input: str = ""
    """Canonical string of the buffers that wgrad will read, "" if there are none to keep."""
    saved_weight: str = ""
    """Canonical string of the buffers that dgrad will read."""
    multiple: int = 1
    """The number that in_features and out_features must be multiples of."""


HIGH_PRECISION = LinearPlan("", "", "", (False,) * 3, (False,) * 3, None)


@compile_constant
def parts(canonical: str) -> Parts:
    """Return the parts of the tensor that ``canonical`` describes; "" is a plain tensor."""
    if not canonical:
        return Parts(1, (0,), "", (0,), "")
    total = len(parse(canonical).slots)
    return Parts(total, *usage_part(canonical, "rowwise"), *usage_part(canonical, "columnwise"))


def _saved(text: str, wanted: bool, override: str | None) -> str:
    """Return the canonical text of the buffers that backward reads of a quantized operand."""
    if not text or not wanted or override == "high_precision":
        return ""
    found = parts(text)
    if override == "dequantized":
        return found.row_canonical
    return found.column_canonical or text


def _text(quantizer: QuantizerLike | None, rowwise: bool, columnwise: bool) -> str:
    if quantizer is None or not (rowwise or columnwise):
        return ""
    return quantizer.with_usage(rowwise=rowwise, columnwise=columnwise).canonical


@compile_constant
def linear_plan(key: str, module: str, name: str, dgrad: bool, wgrad: bool) -> LinearPlan:
    """Return the plan of a call.

    Args:
        key: of the recipe; "" for high precision.
        module: "linear" or "grouped_linear", for the recipe's roles.
        name: of the module, for the recipe's roles.
        dgrad: the input needs a gradient.
        wgrad: the weight needs a gradient.
    """
    if not key:
        return HIGH_PRECISION
    override = parse_recipe(key).backward_override
    found = role_quantizers(key, module, name)
    quantizers = [found["input"], found["weight"], found["grad_output"]]
    plain_backward = override is not None
    texts = (
        _text(quantizers[0], True, wgrad and not plain_backward),
        _text(quantizers[1], True, dgrad and not plain_backward),
        "" if plain_backward else _text(quantizers[2], dgrad, wgrad),
    )
    plan = plan_of_texts(*texts, override, dgrad, wgrad)
    if any(plan.delayed) and delayed_options(key) is None:
        fail(
            f"recipe[{module}]",
            "delayed scaling needs its options: margin, history, algorithm",
            "a factory that returns a Float8Quantizer",
            "Pass CustomRecipe(factory=..., delayed_scaling=DelayedScaling())",
        )
    return plan


@compile_constant
def plan_of_texts(
    input: str, weight: str, grad_output: str, override: str | None, dgrad: bool, wgrad: bool
) -> LinearPlan:
    """Return the plan of operands with these canonical texts, and of the gradients wanted."""
    texts = (input, weight, grad_output)
    chosen = [parse(text) if text else None for text in texts]
    delayed = tuple(q is not None and q.needs_scale for q in chosen)
    stochastic = tuple(q is not None and getattr(q, "stochastic_rounding", False) for q in chosen)
    saved = _saved(input, wgrad, override), _saved(weight, dgrad, override)
    multiple = max(alignment(input), alignment(weight)) if input else 1
    return LinearPlan(*texts, delayed, stochastic, override, *saved, multiple)  # type: ignore[arg-type]


@compile_constant
def delayed_options(key: str) -> DelayedScaling | None:
    """Return the options of delayed scaling of a recipe, None without delayed scaling."""
    recipe = parse_recipe(key)
    if isinstance(recipe, DelayedScaling):
        return recipe
    return recipe.delayed_options if isinstance(recipe, CustomRecipe) else None


@compile_constant
def caller_functions(key: str) -> tuple[int, int]:
    """Return the numbers in ``FUNCTIONS`` of the recipe's own amax and factor algorithms, else -1.

    Dynamo cannot call a function that is a constant, but it can call one from ``FUNCTIONS``.
    """
    options = delayed_options(key)
    found = (
        () if options is None else (options.amax_compute_algo, options.scaling_factor_compute_algo)
    )
    numbers = [function_number(f) if callable(f) else -1 for f in found]
    return (numbers[0], numbers[1]) if numbers else (-1, -1)


@compile_constant
def largest_values(key: str, module: str, name: str) -> tuple[float, float, float]:
    """Return the largest code values of input, weight and gradient."""
    found = role_quantizers(key, module, name).values()
    return tuple(448.0 if q is None else q.element.max for q in found)  # type: ignore[return-value]


@compile_constant
def weight_canonical(stored: str, key: str, module: str, name: str, dgrad: bool) -> str:
    """Return the canonical text under which a layer reads a parameter that is stored quantized.

    Args:
        stored: canonical text of the parameter's quantizer.
        key: of the recipe in force, "" for high precision: the weight's values are read.
        module: for the recipe's roles.
        name: of the module.
        dgrad: the gradient of the input is needed, for which a recipe's backward reads columnwise
            data.

    Raises:
        QTensorError: the recipe reads weights in another format, or in a direction that the
            parameter lacks.
    """
    wanted = role_quantizers(key, module, name)["weight"] if key else None
    own = parse(stored)
    label = weight_label(module, name)
    if wanted is not None and wanted.spec is not own.spec:
        recipe = key.partition("(")[0]
        fail(
            label,
            f"{recipe} reads weights as {wanted.format}",
            f"a parameter stored as {own.format}",
            "Use the recipe that it was made with, or load its dequantized values into a plain "
            "parameter",
        )
    override = parse_recipe(key).backward_override if key else None
    if wanted is not None and override is None and dgrad:
        check(
            own.columnwise or own.spec.transpose_shares_bytes,
            label,
            "dgrad reads columnwise data of the weight",
            stored,
            "Quantize the parameter with columnwise=True",
        )
    return stored


@compile_constant
def stored_weight_plan(
    stored: str, key: str, module: str, name: str, dgrad: bool, wgrad: bool
) -> LinearPlan:
    """Return the plan of a call whose weight is stored quantized, and is read as it is.

    The arguments are those of ``linear_plan``, and the quantizer of the parameter as text.

    Raises:
        QTensorError: see ``weight_canonical``.
    """
    plan = linear_plan(key, module, name, dgrad, wgrad)
    weight = weight_canonical(stored, key, module, name, dgrad)
    texts = (plan.input, weight, plan.grad_output, plan.backward_override)
    return plan_of_texts(*texts, dgrad, wgrad)._replace(
        delayed=(plan.delayed[0], False, plan.delayed[2]),
        stochastic=(plan.stochastic[0], False, plan.stochastic[2]),
    )


def weight_label(module: str, name: str) -> str:
    """Return the name of a weight in messages."""
    return f"{module}[{name}] weight" if name else f"{module} weight"


@compile_constant
def covers(workspace: str, wanted: str) -> bool:
    """Return whether buffers of the quantizer ``workspace`` can stand for those of ``wanted``."""
    if not workspace or not wanted:
        return False
    have, want = parse(workspace), parse(wanted)
    return (
        have.with_usage(rowwise=True, columnwise=True)
        == want.with_usage(rowwise=True, columnwise=True)
        and have.rowwise >= want.rowwise
        and have.columnwise >= want.columnwise
    )


@compile_constant
def alignment(canonical: str) -> int:
    """Return the number that must divide features: 16 bytes of codes, and whole MX blocks."""
    if not canonical:
        return 1
    block = parse(canonical).spec.block
    return 32 if block is not None and block[1] == 32 else 16


@compile_constant
def assembly(canonical: str) -> tuple[str, tuple[str, ...]]:
    """Return the name of the tensor class of a canonical text, and the keywords of its buffers."""
    quantizer = cast(Quantizer, parse(canonical))
    return quantizer.tensor_cls.__qualname__, quantizer.keywords


@compile_constant
def is_requantization_safe(canonical: str) -> bool:
    """Return whether quantizing the same data again gives the same bytes."""
    return not canonical or parse(canonical).is_requantization_safe()
