"""Run a model with some of its layers quantized, and compare its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from qtensor.api import quantize
from qtensor.quantizers import Quantizer
from qtensor.weights.layers import replaced
from qtensor.weights.metrics import Metric, call


class Measurement:
    """The outputs of a model in high precision, and the error of other weights.

    The outputs for all inputs are kept in memory.
    """

    def __init__(
        self, model: nn.Module, batches: Sequence[Any], metric: Metric, activations: bool
    ) -> None:
        """Run the model once, in high precision.

        Args:
            model: in eval mode; the caller turns gradients off.
            batches: the inputs.
            metric: ``(reference, output) -> float``.
            activations: whether the inputs of a quantized layer are quantized as well.
        """
        self.model = model
        self.batches = batches
        self.metric = metric
        self.activations = activations
        self.references = [call(model, batch) for batch in batches]

    def __call__(self, choice: Mapping[Any, Quantizer | None]) -> float:
        """Return the mean error over the inputs with some layers quantized.

        Args:
            choice: layers and the quantizers of their weights; None leaves a layer as it is.
        """
        layers = [layer for layer, quantizer in choice.items() if quantizer is not None]
        weights = (quantize(layer.weight.detach(), choice[layer]) for layer in layers)  # type: ignore[arg-type]
        with ExitStack() as stack:
            stack.enter_context(replaced(layers, weights))
            if self.activations:
                for layer in layers:
                    hook = layer.register_forward_pre_hook(quantize_input(choice[layer]))
                    stack.callback(hook.remove)
            pairs = zip(self.references, self.batches, strict=True)
            errors = [float(self.metric(ref, call(self.model, batch))) for ref, batch in pairs]
        return sum(errors) / len(errors)


def quantize_input(quantizer: Any) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    """Return a forward pre-hook that quantizes the first argument of a layer."""

    def hook(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (quantize(args[0], quantizer), *args[1:])

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


def stored_bytes(weight: Tensor, quantizer: Quantizer | None) -> int:
    """Return the bytes of a weight's buffers in a format; None is high precision."""
    if quantizer is None:
        return weight.numel() * weight.element_size()
    return int(quantize(weight.detach().to("meta"), quantizer).nbytes)
