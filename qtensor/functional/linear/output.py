"""Choose the quantizer of a module's output."""

from __future__ import annotations

from qtensor.core.errors import fail
from qtensor.core.quantizer_registry import QuantizerLike, parse
from qtensor.recipes import Role, compile_constant, parse_recipe


@compile_constant
def output_canonical(key: str, asked: str, module: str, name: str) -> str:
    """Return the canonical text of a quantized output.

    Args:
        key: key of the active recipe, "" for none.
        asked: a canonical text, or "" for the recipe's "output" role.
        module: for the recipe's roles.
        name: name of the module.

    Raises:
        QTensorError: no recipe that could say, or a format that needs state.
    """
    label = f"{module}[{name}] output" if name else f"{module} output"
    if asked:
        found: QuantizerLike | None = parse(asked)
    elif key:
        found = parse_recipe(key).quantizer(Role("output", module, name))
        found = None if found is None else found.with_usage(rowwise=True, columnwise=False)
    else:
        found = None
    if found is None:
        rule = "a quantized output needs a recipe, or the format to take"
        fix = 'Pass a format, for example quantized_output="fp8", or enter qtensor.autocast'
        fail(label, rule, "neither", fix)
    if found.stochastic_rounding:
        # A seed would have to be drawn for it; the field rounds gradients at random, not outputs.
        rule = "an output is rounded to nearest"
        fail(label, rule, found.canonical, "Drop stochastic_rounding")
    if found.needs_scale:
        rule = "an output has no delayed-scaling state"
        fail(label, rule, found.canonical, 'Pass quantized_output="fp8"')
    return found.canonical
