"""``Rounding``: how the codes and factors of a weight are chosen."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qtensor.api import quantize
from qtensor.core.errors import UnsupportedError, check, fail, is_number
from qtensor.quantizers import Quantizer
from qtensor.quantizers.methods import Grid
from qtensor.reference.blocks import spread
from qtensor.weights import calibration
from qtensor.weights.calibration import OP, LayerInputs
from qtensor.weights.compensation import Rounded, compensate
from qtensor.weights.layers import WeightLayer
from qtensor.weights.metrics import as_batches
from qtensor.weights.scale_search import best_factors

SCALES = ("nearest", "mse", "weighted_mse")


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
        number = is_number(self.damping) and 0 <= self.damping < math.inf
        rule = "damping is a number from 0 on"
        check(number, "Rounding", rule, repr(self.damping), "Use one, for example 0.01")

    @property
    def chooses(self) -> bool:
        """Whether codes or factors may differ from what ``quantize`` gives."""
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


def as_rounding(rounding: object, inputs: object) -> tuple[Rounding, list[Any]]:
    """Look up a rounding by its name, and return it with the list of its calibration inputs.

    A ``Rounding`` is returned as it is.
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
    return found, as_batches(OP, "calibration", inputs)


def check_grid(op: str, quantizer: Quantizer) -> None:
    """Refuse a quantizer whose tensors cannot be built from chosen codes and factors."""
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


@dataclass(frozen=True)
class Layer:
    """A layer to quantize, and the format of its weights."""

    name: str
    target: WeightLayer
    quantizer: Quantizer


def check_weight(layer: Layer, own: str, weight: Tensor, rounding: Rounding) -> None:
    """Refuse a weight or a format that only rounds to nearest.

    The weight is (N, K), or (E, N, K) for stacked experts; ``own`` is its name in the layer.
    """
    name = layer.name if layer.name.endswith(own) else f"{layer.name}.{own}"
    check_grid(OP, layer.quantizer)
    if rounding.needs_inputs and not layer.target.multiplies_inputs:
        rule = "a rounding that reads inputs needs layers whose inputs can be seen"
        got = f"{name}, of kind {layer.target.kind!r}"
        fix = 'Leave its kind out, and quantize it in a second call with "nearest" or "mse"'
        fail(OP, rule, got, fix)
    if weight.is_meta:
        rule = 'a weight must have values if rounding is not "nearest"'
        fail(OP, rule, f"{name} on the meta device", "Load the weights first")
    if not weight.isfinite().all():
        rule = 'a weight must be finite if rounding is not "nearest"'
        fail(OP, rule, f"NaN or inf in {name}", "Repair it, or leave it out with filter_fn")
    if layer.target.stacked and rounding.needs_inputs:
        rows = grid_of(layer.quantizer, weight).block[0]
        rule = "each expert must have factors of its own, because it has inputs of its own"
        fix = 'Choose a format with smaller blocks, or rounding="mse"'
        got = f"blocks of {rows} rows for the {weight.shape[1]} rows of an expert of {name}"
        check(weight.shape[1] % rows == 0, OP, rule, got, fix)


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
            for name, weight in zip(layer.target.parameters, layer.target.weights, strict=True):
                check_weight(layer, name, weight, rounding)
    if not rounding.needs_inputs:
        for layer in layers:
            layer.target.put([
                by_scales(w, layer.quantizer, rounding) for w in layer.target.weights
            ])
            yield layer, ""
        return
    named = {layer.name: layer for layer in layers}
    found = calibration.survey(model, {layer.name: layer.target for layer in layers}, batches)
    for group in calibration.groups(found):
        totals: list[Tensor] = []
        for name in group:
            layer, inputs, done = named[name], found[name], []
            matrices = Matrices(layer)
            for experts in calibration.expert_ranges(inputs):
                known = [inputs.squares[expert] for expert in experts]
                if rounding.compensate:
                    if layer.target.experts > 1 or not totals:
                        totals = []
                        totals = calibration.hessians(
                            model, name, layer.target, inputs, batches, experts
                        )
                    # The matrix is overwritten; the last layer that shares it needs no copy.
                    known = totals if name == group[-1] else [total.clone() for total in totals]
                done += [
                    rounded(matrices.grid(expert), rounding, own)
                    for expert, own in zip(experts, known, strict=True)
                ]
            layer.target.put(matrices.tensors(done))
            yield layer, _note(rounding, inputs, done)


def _note(rounding: Rounding, inputs: LayerInputs, done: Sequence[Rounded]) -> str:
    """Return what the report says about a layer: raised damping, and experts without inputs."""
    damping = max(part.damping for part in done)
    note = f", damping {damping:.0e}" if damping > max(rounding.damping, 0) else ""
    idle = [str(expert) for expert, rows in enumerate(inputs.rows) if not rows]
    if idle:
        shown = ", ".join(idle[:5]) + (", ..." if len(idle) > 5 else "")
        note += f", {len(idle)} of {len(inputs.rows)} experts had no inputs ({shown})"
    return note


def by_scales(weight: Tensor, quantizer: Quantizer, rounding: Rounding) -> Tensor:
    """Return a weight (..., K) rounded to nearest, with the factors of ``rounding.scales``."""
    if rounding.scales == "nearest":
        return quantize(weight, quantizer)
    grid = grid_of(quantizer, weight)
    done = rounded(grid, rounding, None)
    return grid.tensor(done.codes, done.factors)


def rounded(grid: Grid, rounding: Rounding, known: Tensor | None) -> Rounded:
    """Return the codes and factors of a weight (M, K).

    ``known`` is about the inputs: for ``compensate`` the mean of ``x x^T``, float64 (K, K), which
    is overwritten; otherwise the sums of squares (K,), or None for equal weights.
    """

    def choose(x: Tensor, squares: Tensor | None) -> Tensor:
        if rounding.scales == "nearest":
            return grid.nearest(x)
        return best_factors(grid, x, squares if rounding.scales == "weighted_mse" else None)

    if rounding.compensate and known is not None:
        return compensate(grid, known, rounding.damping, rounding.activation_order, choose)
    factors = choose(grid.matrix, known)
    shape = (grid.matrix.shape[0], grid.matrix.shape[1])
    codes, _ = grid.round(grid.matrix, spread(factors, *grid.block, shape), grid.wide)
    return Rounded(codes, factors, 0.0)


class Matrices:
    """The matrices (N, K) of a layer: one, or one for each expert."""

    def __init__(self, layer: Layer) -> None:
        """Read the weights of a layer."""
        self._quantizer, self._stacked = layer.quantizer, layer.target.stacked
        self._weights = layer.target.weights
        self._grids = [grid_of(layer.quantizer, weight) for weight in self._weights]

    def grid(self, expert: int) -> Grid:
        """Return the grid of one matrix. Stacked experts share the factor of the tensor."""
        if not self._stacked:
            return self._grids[expert]
        whole, own = self._grids[0], self._weights[0][expert]
        grid = grid_of(self._quantizer, own)
        first, last = expert * len(own), (expert + 1) * len(own)
        grid.wide = whole.wide if len(whole.wide) == 1 else whole.wide[first:last]
        return grid

    def tensors(self, done: Sequence[Rounded]) -> list[Tensor]:
        """Return the quantized weights that hold codes and factors of all matrices."""
        if self._stacked:
            codes = torch.cat([part.codes for part in done])
            return [self._grids[0].tensor(codes, torch.cat([part.factors for part in done]))]
        pairs = zip(self._grids, done, strict=True)
        return [grid.tensor(part.codes, part.factors) for grid, part in pairs]


def grid_of(quantizer: Quantizer, weight: Tensor) -> Grid:
    """Return the grid of a weight (..., K)."""
    grid: Grid = quantizer.grid_cls(quantizer, weight)  # type: ignore[misc]
    return grid
