"""The inputs of a model's linear layers: which of them share inputs, and the sums of products.

No activation is kept. ``survey`` runs the model once over all inputs, and ``hessian`` runs it once
for each group of layers that share an input, up to the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qtensor.errors import ArgumentTypeError, check, fail
from qtensor.storage.base import QuantizedTensorStorage
from qtensor.weights.metrics import run

ROWS = 8192
"""Rows of an input that are multiplied at a time."""


@dataclass
class LayerInputs:
    """What the inputs of a layer were like.

    Attributes:
        calls: for each batch, the numbers of the inputs of the layer's calls. Calls of several
            layers in a row with one tensor have one number.
        rows: rows of all inputs together.
        squares: float64 (K,), sums of the squares of each channel.
    """

    calls: list[tuple[int, ...]]
    rows: int
    squares: Tensor


class _Reached(BaseException):
    """Ends a run of the model once a layer has its inputs; no handler of the model catches it."""


Visit = Callable[[str, Tensor, Tensor], None]
"""Called before a layer runs, with its name, its input, and the rows (R, K) without padding."""


def survey(
    op: str, model: nn.Module, layers: Mapping[str, Any], batches: Sequence[Any]
) -> dict[str, LayerInputs]:
    """Run the model on all inputs, and return what each layer received, in the order of first use.

    Args:
        op: the caller's name, for errors.
        model: in eval mode; the caller turns gradients off.
        layers: linear layers by name.
        batches: inputs of the model.

    Raises:
        QTensorError: a layer did not run, or had an input that is not finite.
    """
    found: dict[str, LayerInputs] = {}
    numbers: dict[str, list[int]] = {name: [] for name in layers}
    last: list[Any] = [None, 0]

    def visit(name: str, x: Tensor, rows: Tensor) -> None:
        # The last input is held, so that no other tensor can have its identity.
        version = -1 if x.is_inference() else x._version
        if last[0] is None or last[0][0] is not x or last[0][1] != version or version < 0:
            last[:] = [(x, version), last[1] + 1]
        numbers[name].append(last[1])
        if name not in found:
            zeros = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
            found[name] = LayerInputs([], 0, zeros)
        found[name].rows += len(rows)
        for part in rows.split(ROWS):
            found[name].squares += part.double().square().sum(0)

    with _visiting(op, layers, visit) as padding:
        calls: dict[str, list[tuple[int, ...]]] = {name: [] for name in layers}
        for batch in batches:
            padding(batch)
            run(model, batch)
            for name, made in numbers.items():
                calls[name].append(tuple(made))
                made.clear()
    for name in layers:
        rule = "the calibration inputs must reach each layer"
        fix = f"Add inputs that run {name}, or leave it out with filter_fn"
        check(name in found and found[name].rows > 0, op, rule, f"no input of {name}", fix)
        check_finite(op, name, found[name].squares)
        found[name].calls = calls[name]
    return found


def groups(found: Mapping[str, LayerInputs]) -> list[tuple[str, ...]]:
    """Return the names of layers that share all inputs, in the order of first use."""
    members: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for name, inputs in found.items():
        members.setdefault(tuple(inputs.calls), []).append(name)
    return [tuple(group) for group in members.values()]


def hessian(
    op: str, model: nn.Module, name: str, layer: Any, inputs: LayerInputs, batches: Sequence[Any]
) -> Tensor:
    """Return the mean of ``x x^T`` over the inputs x of a layer, float64 (K, K).

    The model runs on each batch until the layer has had as many calls as in the survey. Products
    are float32, their sums over parts of ``ROWS`` rows float64.

    Raises:
        QTensorError: an input is not finite.
    """
    size = len(inputs.squares)
    total = torch.zeros((size, size), dtype=torch.float64, device=inputs.squares.device)
    state = {"left": 0, "rows": 0}

    def visit(name: str, x: Tensor, rows: Tensor) -> None:
        state["rows"] += len(rows)
        state["left"] -= 1
        for part in rows.split(ROWS):
            total.add_(part.t() @ part)
        if state["left"] == 0:
            raise _Reached

    with _visiting(op, {name: layer}, visit) as padding:
        for batch, calls in zip(batches, inputs.calls, strict=True):
            if calls:
                state["left"] = len(calls)
                padding(batch)
                with suppress(_Reached):
                    run(model, batch)
    check_finite(op, name, total.diagonal())
    return total.div_(max(1, state["rows"]))


def check_finite(op: str, name: str, squares: Tensor) -> None:
    """Refuse inputs whose sum of squares is not finite.

    Raises:
        QTensorError: the sum of a channel is NaN or inf.
    """
    bad = (~squares.isfinite()).nonzero().flatten().tolist()
    if bad:
        rule = "the inputs of a layer must be finite, and their squares too"
        got = f"NaN or inf in the input of {name}, channel {bad[0]}"
        fix = "Check the calibration inputs; qtensor.debug.record finds the first NaN"
        fail(op, rule, got, fix)


@contextmanager
def _visiting(op: str, layers: Mapping[str, Any], visit: Visit) -> Iterator[Callable[[Any], None]]:
    """Call ``visit`` before each call of the layers.

    Yields:
        A function that takes the batch that runs next; its attention mask tells padding.
    """
    masks: list[Tensor | None] = [None]

    def padding(batch: Any) -> None:
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        masks[0] = mask if isinstance(mask, Tensor) else None

    def hook_of(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs.get("input")
            if not isinstance(x, Tensor) or not x.is_floating_point():
                rule = "the input of a linear layer is a floating tensor"
                fix = "Leave the layer out with filter_fn"
                fail(op, rule, f"{type(x).__name__} for {name}", fix, ArgumentTypeError)
            values = x.dequantize() if isinstance(x, QuantizedTensorStorage) else x
            mask = masks[0]
            # As for the metrics of a search, positions that are padding do not count.
            if mask is not None and values.ndim == 3 and mask.shape == values.shape[:2]:
                values = values[mask.bool()]
            visit(name, x, values.detach().flatten(0, -2).float())

        return hook

    with ExitStack() as stack:
        for name, layer in layers.items():
            hook = layer.register_forward_pre_hook(hook_of(name), with_kwargs=True)
            stack.callback(hook.remove)
        # Hooks do not run in graphs that were compiled without them.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield padding
