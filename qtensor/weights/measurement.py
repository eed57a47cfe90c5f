"""Run a model with some of its layers quantized, and compare its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from qtensor.api import quantize
from qtensor.quantizers import Quantizer
from qtensor.weights.layers import WeightLayer, replaced
from qtensor.weights.metrics import Metric, call, measured, same_random_numbers


class Measurement:
    """The outputs of a model in high precision, and the error of other weights.

    The outputs for all inputs are kept in memory.
    """

    def __init__(
        self, model: nn.Module, batches: Sequence[Any], metric: Metric, activations: bool
    ) -> None:
        """Run the model once, in high precision.

        The model is in eval mode; the caller turns gradients off.
        """
        self.model = model
        self.batches = batches
        self.metric = metric
        self.name = getattr(metric, "__name__", type(metric).__name__)
        self.activations = activations
        with same_random_numbers(model):
            self.references = [self._output(index) for index in range(len(batches))]

    def _output(self, index: int) -> Tensor:
        return call("search", f"inputs[{index}]", self.model, self.batches[index])

    def __call__(self, choice: Mapping[WeightLayer, Quantizer | None]) -> float:
        """Return the mean error over the inputs with some layers quantized.

        None leaves a layer as it is.
        """
        chosen = {layer: quantizer for layer, quantizer in choice.items() if quantizer is not None}
        weights = ([quantize(w, q) for w in layer.weights] for layer, q in chosen.items())
        with ExitStack() as stack:
            stack.enter_context(replaced(chosen, weights))
            if self.activations:
                for layer, quantizer in chosen.items():
                    for module in layer.modules:
                        hook = quantize_input(quantizer)
                        handle = module.register_forward_pre_hook(hook, with_kwargs=True)
                        stack.callback(handle.remove)
            stack.enter_context(same_random_numbers(self.model))
            errors = [
                measured(self.name, self.metric, reference, self._output(index))
                for index, reference in enumerate(self.references)
            ]
        return sum(errors) / len(errors)


def quantize_input(quantizer: Quantizer) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Return a forward pre-hook that quantizes the input of an ``nn.Linear``."""

    def hook(
        layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        x = args[0] if args else kwargs["input"]
        return (quantize(x, quantizer),), {}

    return hook


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode inside the block, and each module back into its own mode after."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def restorer(parameters: Iterable[Tensor]) -> Callable[[], None]:
    """Return a function that gives parameters the bytes that they have now.

    The caller turns gradients off.
    """
    before = [(parameter, parameter.detach().clone()) for parameter in parameters]

    def restore() -> None:
        for parameter, values in before:
            parameter.copy_(values)

    return restore


def stored_bytes(weight: Tensor, quantizer: Quantizer | None) -> int:
    """Return the bytes of a weight's buffers in a format; None is high precision."""
    if quantizer is None:
        return weight.numel() * weight.element_size()
    return int(quantize(weight.detach().to("meta"), quantizer).nbytes)
