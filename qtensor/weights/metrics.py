"""How far a model's outputs are from those in high precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qtensor.core.buffer_shapes import rows_cols
from qtensor.core.errors import ArgumentTypeError, QTensorError, check, fail
from qtensor.debug.error_report import kl_divergences
from qtensor.debug.logits import rows_in_chunks

Metric = Callable[[Tensor, Tensor], float]


def kl(reference: Tensor, output: Tensor) -> float:
    """Return the mean of ``kl_divergences`` of outputs (..., classes), in nats."""
    chunks = rows_in_chunks(reference, output)
    total = math.fsum(float(kl_divergences(p, q).sum()) for p, q in chunks)
    rows, _ = rows_cols(reference.shape)
    return total / rows if rows else math.nan


def noise(reference: Tensor, output: Tensor) -> float:
    """Return ``sum (x - y)^2 / sum x^2``, which is ``10^(-SQNR / 10)``, in float64."""
    noise, signal = 0.0, 0.0
    for x, y in rows_in_chunks(reference, output):
        noise += float((x - y).square().sum())
        signal += float(x.square().sum())
    return noise / signal if signal else math.nan


METRICS: dict[str, Metric] = {"kl": kl, "sqnr": noise}


def named_metric(metric: str | Metric) -> tuple[str, Metric]:
    """Return the name and the function of a metric."""
    if isinstance(metric, str) and metric in METRICS:
        return metric, METRICS[metric]
    if isinstance(metric, str) or not callable(metric):
        rule = f"metric is one of {', '.join(METRICS)}, or a function of two tensors"
        fix = "Pass a function (reference, output) -> float; less is better"
        fail("search", rule, repr(metric), fix, ArgumentTypeError)
    return getattr(metric, "__name__", type(metric).__name__), metric


def fingerprint(name: str, metric: Metric, reference: Tensor) -> list[str]:
    """Return the values of a metric for three changed copies of an output, as texts.

    Two functions with one name are told apart by their results: the source of a function does not
    show the values that it closes over, and a callable object has none.
    """
    values = reference.flatten()
    step = values.abs().mean() / 2
    changes: tuple[Callable[[], Tensor], ...] = (
        lambda: torch.where(step > 0, (values / step).round() * step, values),
        lambda: values.roll(1),
        lambda: values.flip(0) / 2,
    )
    outputs = (change().view_as(reference) for change in changes)
    return [measured(name, metric, reference, output).hex() for output in outputs]


def run(op: str, place: str, model: Callable[..., Any], batch: Any) -> Any:
    """Run a model on a tensor, a tuple or list of arguments, or a mapping of keyword arguments.

    ``place`` says which input it is, for errors: ``"calibration[3]"``.

    Raises:
        QTensorError: the model raises an exception, which is the cause of this one.
    """
    try:
        if isinstance(batch, Mapping):
            return model(**batch)
        return model(*batch) if isinstance(batch, tuple | list) else model(batch)
    except QTensorError as error:
        error.add_note(f"This happened in {op}, at {place}.")
        raise
    except Exception as error:
        rule = f"the model must run on each input; {place} failed"
        got = f"{type(error).__name__}: {str(error).rstrip('.')}"
        raise QTensorError(
            f"{op}: {rule}; got {got}. Check this input; a tensor is one argument, a tuple holds "
            "arguments, a dict keyword arguments."
        ) from error


@contextmanager
def same_random_numbers(model: nn.Module) -> Iterator[None]:
    """Restore the state of torch's generators after the block.

    Each run of a model over its inputs then draws the same random numbers, and none is used up.
    """
    devices = {parameter.device for parameter in model.parameters()}
    cuda = [device for device in devices if device.type == "cuda"]
    with torch.random.fork_rng(devices=cuda):
        yield


def call(op: str, place: str, model: nn.Module, batch: Any) -> Tensor:
    """Run a model on one input and return its output tensor, without padding.

    If a mapping has an ``attention_mask`` (B, T), only positions with a mask of 1 are returned.

    Returns:
        The logits (``.logits``), ``.last_hidden_state``, the first item of a tuple, or the tensor
        itself; (positions, V) if padding was removed.

    Raises:
        ArgumentTypeError: the output is not such a value.
    """
    output = run(op, place, model, batch)
    for name in ("logits", "last_hidden_state"):
        output = getattr(output, name, output) if not isinstance(output, Tensor) else output
    if isinstance(output, tuple | list) and output:
        output = output[0]
    if not isinstance(output, Tensor) or not output.is_floating_point():
        rule = "the model must return a floating tensor, logits or last_hidden_state, or a tuple"
        fix = "Wrap the model in a module that returns the tensor to compare"
        fail(op, rule, type(output).__name__, fix, ArgumentTypeError)
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if isinstance(mask, Tensor) and mask.shape == output.shape[:2]:
        return output[mask.bool()]
    return output


def as_batches(op: str, what: str, inputs: object) -> list[Any]:
    """Return a list of inputs."""
    rule = f"{what} is a list of inputs of the model"
    fix = f"Pass {what}=[batch, ...]: tensors, tuples of arguments, or dicts of them"
    if isinstance(inputs, Tensor | Mapping | str) or not isinstance(inputs, Iterable):
        fail(op, rule, f"a {type(inputs).__name__}", fix, ArgumentTypeError)
    batches = list(inputs)
    check(bool(batches), op, f"{what} must hold at least one input", "none", "Pass some")
    return batches


def measured(name: str, metric: Metric, reference: Tensor, output: Tensor) -> float:
    """Return the error that a metric gives an output."""
    error: Any = metric(reference, output)
    number = error.numel() == 1 if isinstance(error, Tensor) else hasattr(error, "__float__")
    if not number:
        got = f"{tuple(error.shape)}" if isinstance(error, Tensor) else type(error).__name__
        rule = "a metric returns one number for an input"
        fail("search", rule, f"{got} from {name}", "Return for example a mean", ArgumentTypeError)
    return float(error)
