"""The inputs of a model's linear layers: which of them share inputs, and the sums of products.

No activation is kept. ``survey`` runs the model once over all inputs. ``hessians`` runs it once for
each group of layers that share an input, up to the group, and more often for many experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qtensor.core.errors import check, fail
from qtensor.weights.layers import WeightLayer
from qtensor.weights.metrics import run, same_random_numbers
from qtensor.weights.visits import Finish, See, visiting

OP = "quantize_"
ROWS = 8192
"""Rows of an input that are multiplied at a time."""
MATRICES_BYTES = 1 << 30
"""Most bytes of the matrices of one run, if there is more than one matrix."""


@dataclass
class LayerInputs:
    """Statistics of the inputs of a layer.

    Attributes:
        calls: for each batch, the numbers of the inputs of the layer's calls. Calls of several
            layers in a row with one tensor have one number.
        rows: rows of all inputs together, for each expert; a layer without experts has one.
        squares: float64 (K,) for each expert: sums of the squares of each channel.
    """

    calls: list[tuple[int, ...]]
    rows: list[int]
    squares: list[Tensor]


class _Reached(BaseException):
    """Ends a run of the model once a layer has its inputs; no handler of the model catches it."""


def run_all(
    op: str,
    model: Callable[..., Any],
    layers: Mapping[str, WeightLayer],
    batches: Sequence[Any],
    watch: tuple[See, Finish, Callable[[], None]],
    what: str = "calibration",
) -> None:
    """Run a model on all inputs, and show the inputs of its layers.

    ``watch`` has the functions ``see`` and ``finish`` of ``visiting``, and one that is called after
    each run. ``what`` is the caller's argument that holds the inputs, for errors.
    """
    see, finish, after = watch
    with visiting(op, layers, see, finish) as padding:
        for index, batch in enumerate(batches):
            padding(batch)
            run(op, f"{what}[{index}]", model, batch)
            after()


def survey(
    model: nn.Module, layers: Mapping[str, WeightLayer], batches: Sequence[Any], op: str = OP
) -> dict[str, LayerInputs]:
    """Run the model on all inputs, and return what each layer received, in the order of first use.

    The model is in eval mode; the caller turns gradients off. ``op`` begins the texts of errors.
    """
    found: dict[str, LayerInputs] = {}
    numbers: dict[str, list[int]] = {name: [] for name in layers}
    last: list[Any] = [None, 0]

    def see(name: str, expert: int, rows: Tensor) -> None:
        if name not in found:
            count = layers[name].experts
            zeros = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
            found[name] = LayerInputs([], [0] * count, [zeros.clone() for _ in range(count)])
        found[name].rows[expert] += len(rows)
        for part in rows.split(ROWS):
            found[name].squares[expert] += part.double().square().sum(0)

    def finish(name: str, x: Tensor | None) -> None:
        # The last input is held: no other tensor can then have its identity.
        version = -1 if x is None or x.is_inference() else x._version
        if last[0] is None or last[0][0] is not x or last[0][1] != version or version < 0:
            last[:] = [(x, version), last[1] + 1]
        numbers[name].append(last[1])

    calls: dict[str, list[tuple[int, ...]]] = {name: [] for name in layers}

    def after() -> None:
        for name, made in numbers.items():
            calls[name].append(tuple(made))
            made.clear()

    with same_random_numbers(model):
        run_all(op, model, layers, batches, (see, finish, after))
    for name in layers:
        rule = "the calibration inputs must reach each layer"
        fix = f"Add inputs that run {name}, or leave it out with filter_fn"
        check(name in found and sum(found[name].rows) > 0, op, rule, f"no input of {name}", fix)
        check_finite(name, found[name].squares, op)
        found[name].calls = calls[name]
    return found


def groups(found: Mapping[str, LayerInputs]) -> list[tuple[str, ...]]:
    """Return the names of layers that share all inputs, in the order of first use.

    Layers with experts share none: each of them has groups of its own.
    """
    members: dict[Any, list[str]] = {}
    for name, inputs in found.items():
        key = tuple(inputs.calls) if len(inputs.rows) == 1 else name
        members.setdefault(key, []).append(name)
    return [tuple(group) for group in members.values()]


def hessians(
    model: nn.Module,
    name: str,
    layer: WeightLayer,
    inputs: LayerInputs,
    batches: Sequence[Any],
    experts: range,
) -> list[Tensor]:
    """Return the mean of ``x x^T`` over the inputs x of a layer, float64 (K, K), for each expert.

    The model runs on each batch until the layer has had as many calls as in the survey. Products
    are float32, their sums over parts of ``ROWS`` rows float64. ``inputs`` come from ``survey``;
    ``experts`` is ``range(1)`` for a layer without experts.
    """
    squares = inputs.squares[0]
    size = len(squares)
    totals = [squares.new_zeros((size, size)) for _ in experts]
    counts, left = [0] * len(experts), [0]

    def see(name: str, expert: int, rows: Tensor) -> None:
        if expert not in experts:
            return
        index = expert - experts.start
        counts[index] += len(rows)
        for part in rows.split(ROWS):
            totals[index].add_(part.t() @ part)

    def finish(name: str, x: Tensor | None) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise _Reached

    with visiting(OP, {name: layer}, see, finish) as padding, same_random_numbers(model):
        for index, (batch, calls) in enumerate(zip(batches, inputs.calls, strict=True)):
            if calls:
                left[0] = len(calls)
                padding(batch)
                with suppress(_Reached):
                    run(OP, f"calibration[{index}]", model, batch)
    check_finite(name, [total.diagonal() for total in totals])
    return [total.div_(max(1, count)) for total, count in zip(totals, counts, strict=True)]


def expert_ranges(inputs: LayerInputs) -> list[range]:
    """Return the experts whose matrices are computed in one run of the model, for each run."""
    count, size = len(inputs.rows), len(inputs.squares[0])
    step = max(1, MATRICES_BYTES // (8 * size * size))
    return [range(first, min(first + step, count)) for first in range(0, count, step)]


def check_finite(name: str, squares: Sequence[Tensor], op: str = OP) -> None:
    """Refuse inputs whose sum of squares is not finite."""
    for sums in squares:
        bad = (~sums.isfinite()).nonzero().flatten().tolist()
        if bad:
            rule = "the inputs of a layer must be finite, and their squares too"
            got = f"NaN or inf in the input of {name}, channel {bad[0]}"
            fix = "Check the calibration inputs; qtensor.debug.record finds the first NaN"
            fail(op, rule, got, fix)
