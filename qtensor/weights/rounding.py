"""``Rounding``: how the codes and factors of a weight are chosen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from qtensor.api import quantize
from qtensor.errors import ArgumentTypeError, UnsupportedError, check, fail
from qtensor.quantizers import Quantizer
from qtensor.quantizers.methods import Grid
from qtensor.reference.blocks import spread
from qtensor.weights import calibration
from qtensor.weights.compensation import Rounded, compensate
from qtensor.weights.layers import set_weight
from qtensor.weights.scale_search import best_factors

OP = "quantize_"
SCALES = ("nearest", "mse", "weighted_mse")

Progress = Callable[[int, int, str], None]
"""Called with (layers done, all layers, the name of the layer)."""


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """How the codes and factors of a weight are chosen; ``quantize_`` takes one, or its name.

    The result is an ordinary quantized tensor in each case. ``"nearest"``, ``"mse"``,
    ``"weighted_mse"``, ``"gptq"`` and ``"gptq_mse"`` name the usual roundings.

    Attributes:
        scales: how the factor of a block is chosen. ``"nearest"``: from its maximum, as
            ``quantize`` does. ``"mse"``: the candidate with the least squared error of the block's
            values; the per-tensor factor of NVFP4 is not searched.
            ``"weighted_mse"``: the same with each column weighted by the mean square of its input.
        compensate: round column by column and let the later columns make up for the error that
            the earlier ones cause in the layer's output (GPTQ, Frantar et al., 2022).
        damping: for ``compensate``: share of the mean square of the inputs that is added to the
            diagonal of the matrix of their products.
        activation_order: for ``compensate``: begin with the columns of the largest inputs. Blocks
            of columns move as a whole.
    """

    scales: str = "nearest"
    compensate: bool = False
    damping: float = 0.01
    activation_order: bool = False

    def __post_init__(self) -> None:
        if self.scales not in SCALES:
            fail("Rounding", f"scales is one of {', '.join(SCALES)}", repr(self.scales), "Use one")
        number = isinstance(self.damping, int | float) and 0 <= self.damping < math.inf
        rule = "damping is a number from 0 on"
        check(number, "Rounding", rule, repr(self.damping), "Use one, for example 0.01")

    @property
    def chooses(self) -> bool:
        """Whether codes or factors may differ from those of ``quantize``."""
        return self.compensate or self.scales != "nearest"

    @property
    def needs_inputs(self) -> bool:
        """Whether calibration inputs are needed."""
        return self.compensate or self.scales == "weighted_mse"


ROUNDINGS = {
    "nearest": Rounding(),
    "mse": Rounding(scales="mse"),
    "weighted_mse": Rounding(scales="weighted_mse"),
    "gptq": Rounding(compensate=True),
    "gptq_mse": Rounding(scales="mse", compensate=True),
}


def as_rounding(rounding: Any, inputs: Any) -> tuple[Rounding, list[Any]]:
    """Look up a rounding by its name, and return it with the list of its calibration inputs.

    A ``Rounding`` is returned as it is.

    Raises:
        QTensorError: the name is unknown; inputs are missing, empty, not needed, or not a list of
            inputs.
    """
    found = ROUNDINGS.get(rounding) if isinstance(rounding, str) else rounding
    if not isinstance(found, Rounding):
        rule = f"rounding is one of {', '.join(ROUNDINGS)}, or a Rounding"
        fail(OP, rule, repr(rounding), "Pass one of them")
    if not found.needs_inputs:
        rule = "calibration is for a rounding that reads the inputs of layers"
        fix = 'Leave it out, or use rounding="weighted_mse", "gptq" or "gptq_mse"'
        check(inputs is None, OP, rule, f"rounding={rounding!r}", fix)
        return found, []
    rule = f"rounding={rounding!r} needs calibration, a list of inputs of the model"
    fix = "Pass calibration=[batch, ...]: tensors, tuples of arguments, or dicts of them"
    check(inputs is not None, OP, rule, "none", fix)
    if isinstance(inputs, Tensor | Mapping | str) or not isinstance(inputs, Iterable):
        fail(OP, rule, f"a {type(inputs).__name__}", fix, ArgumentTypeError)
    batches = list(inputs)
    check(bool(batches), OP, "calibration must hold at least one input", "none", "Pass some")
    return found, batches


def check_grid(op: str, quantizer: Any) -> None:
    """Refuse a quantizer whose tensors cannot be built from chosen codes and factors.

    Raises:
        UnsupportedError: the format defines no grid.
        QTensorError: an option does not allow it.
    """
    if quantizer.grid_cls is None:
        rule = "the format must define a grid to choose its codes and factors"
        fix = 'Use rounding="nearest", or set grid_cls of the quantizer'
        fail(op, rule, quantizer.format, fix, UnsupportedError)
    derived = quantizer.two_dimensional or quantizer.spec.transpose_shares_bytes
    conditions = (
        (quantizer.rowwise, "the format has rowwise data", "Drop rowwise=False"),
        (
            derived or not quantizer.columnwise,
            "columnwise data must follow from rowwise data, not from the weight",
            "Drop columnwise=True, or choose square blocks",
        ),
        (
            quantizer.factors_are_local,
            "a rotated value does not depend on its own code alone",
            "Drop with_rht",
        ),
        (
            not quantizer.stochastic_rounding,
            "a weight cannot be rounded at random and by another method",
            "Drop stochastic_rounding",
        ),
    )
    for holds, rule, fix in conditions:
        if not holds:
            fail(op, rule, quantizer.canonical, f'{fix}, or use rounding="nearest"')


def check_weight(name: str, weight: Tensor, quantizer: Quantizer) -> None:
    """Refuse a weight or a format that only rounds to nearest.

    Raises:
        QTensorError: the format does not allow chosen codes, or the weight has NaN, inf or no
            values.
    """
    check_grid(OP, quantizer)
    if weight.is_meta:
        rule = 'a weight must have values if rounding is not "nearest"'
        fail(OP, rule, f"{name}.weight on the meta device", "Load the weights first")
    if not weight.isfinite().all():
        rule = 'a weight must be finite if rounding is not "nearest"'
        fail(OP, rule, f"NaN or inf in {name}.weight", "Repair it, or leave it out with filter_fn")


@dataclass(frozen=True)
class Layer:
    """A layer to quantize.

    Attributes:
        name: its name.
        module: the layer.
        quantizer: the format of its weight.
    """

    name: str
    module: Any
    quantizer: Quantizer


def round_weights(
    model: nn.Module, layers: Sequence[Layer], rounding: Rounding, batches: Sequence[Any]
) -> Iterator[tuple[Layer, str]]:
    """Quantize the weights of layers in place, and yield each finished layer with a note.

    Layers are compensated in the order in which the model uses them, each one for the inputs that
    it has with all layers before it quantized. The inputs of ``weighted_mse`` alone are those of
    the model in high precision.

    Raises:
        QTensorError: as ``check_weight`` and ``calibration.survey``; the model is unchanged.
    """
    for layer in layers:
        if rounding.chooses:
            check_weight(layer.name, layer.module.weight, layer.quantizer)
    if not rounding.needs_inputs:
        for layer in layers:
            set_weight(layer.module, by_scales(layer, rounding, None))
            yield layer, ""
        return
    named = {layer.name: layer for layer in layers}
    modules = {layer.name: layer.module for layer in layers}
    found = calibration.survey(OP, model, modules, batches)
    for group in calibration.groups(found):
        if not rounding.compensate:
            for name in group:
                inputs = found[name]
                set_weight(modules[name], by_scales(named[name], rounding, inputs.squares))
                yield named[name], ""
            continue
        first = group[0]
        total = calibration.hessian(OP, model, first, modules[first], found[first], batches)
        for name in group:
            own = total if name == group[-1] else total.clone()
            done, tensor = compensated(named[name], rounding, own)
            set_weight(modules[name], tensor)
            raised = done.damping > max(rounding.damping, 0)
            yield named[name], f", damping {done.damping:.0e}" if raised else ""


def by_scales(layer: Layer, rounding: Rounding, squares: Tensor | None) -> Tensor:
    """Return the weight rounded to nearest, with the factors of ``rounding.scales``."""
    weight = layer.module.weight.detach()
    if rounding.scales == "nearest":
        return quantize(weight, layer.quantizer)
    grid = grid_of(layer)
    factors = best_factors(grid, grid.matrix, squares)
    shape = (grid.matrix.shape[0], grid.matrix.shape[1])
    wide = grid.wide
    codes, _ = grid.round(grid.matrix, spread(factors, *grid.block, shape), wide)
    return grid.tensor(codes, factors)


def compensated(layer: Layer, rounding: Rounding, total: Tensor) -> tuple[Rounded, Tensor]:
    """Return the result of ``compensate``, and the quantized weight."""
    grid = grid_of(layer)

    def choose(x: Tensor, squares: Tensor) -> Tensor:
        if rounding.scales == "nearest":
            return grid.nearest(x)
        return best_factors(grid, x, squares if rounding.scales == "weighted_mse" else None)

    done = compensate(grid, total, rounding.damping, rounding.activation_order, choose)
    return done, grid.tensor(done.codes, done.factors)


def grid_of(layer: Layer) -> Grid:
    """Return the grid of a layer's weight."""
    grid: Grid = layer.quantizer.grid_cls(layer.quantizer, layer.module.weight)  # type: ignore[misc]
    return grid
