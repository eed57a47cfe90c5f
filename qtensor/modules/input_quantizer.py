"""``InputQuantizer``: quantizes the input of a linear layer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from qtensor.core.errors import ArgumentTypeError, check, fail
from qtensor.core.quantizer_registry import parse
from qtensor.modules.input_hook import QUANTIZER, InputStep, set_input_step
from qtensor.modules.learned_factor import LearnedFactor
from qtensor.quantizers import NVFP4Quantizer, Quantizer
from qtensor.quantizers.call import constants_of, quantize_call, quantize_with_factor
from qtensor.storage.tensor import QuantizedTensor

NAME = QUANTIZER
_STATIC = {"fp8": {"dtype"}, "nvfp4": {"e4m3_max", "use_4over6", "err_mode", "swizzled"}}
"""Formats with a factor of the tensor -> the options that allow a calibrated factor."""


def input_format(op: str, format: str | Quantizer) -> Quantizer:
    """Return the quantizer of a layer's inputs.

    Raises:
        QTensorError: the format is not rowwise alone, rounds at random, or takes its scale from
            earlier steps.
    """
    found = cast(Quantizer, parse(format)) if isinstance(format, str) else format
    if not isinstance(found, Quantizer):
        rule = "the format of inputs is an id, a text or a quantizer"
        fail(op, rule, repr(format), 'Pass one, like "nvfp4"', ArgumentTypeError)
    plain = found.rowwise and not found.columnwise and not found.stochastic_rounding
    rule = "inputs are quantized rowwise, to nearest"
    fix = 'Pass a format such as "nvfp4", "fp8" or "mxfp8"'
    check(plain and not found.needs_scale, op, rule, found.canonical, fix)
    return found


def is_static(quantizer: Quantizer) -> bool:
    """Return True if the format has a factor of the whole tensor, which calibration measures.

    The others (MX, rows, blocks) take all factors from the tensor itself.
    """
    options = set(quantizer.changed_options()) - {"with_global_scale_inv"}
    return options <= _STATIC.get(quantizer.format, set()) and quantizer.format in _STATIC


def factor_from_amax(quantizer: Quantizer, amax: float) -> float:
    """Return the decode factor ``amax / largest_code``, rounded once to float32."""
    top = torch.tensor(quantizer.largest_code, dtype=torch.float32)
    return float(torch.tensor(amax, dtype=torch.float32) / top)


class InputQuantizer(InputStep):
    """Quantize the input of a linear layer.

    A layer with this submodule multiplies quantized inputs. "fp8" and "nvfp4" have a factor of the
    whole tensor, which is calibrated and stays; larger values saturate. FP8: codes are
    ``e4m3(x * fl(1 / scale_inv))``. NVFP4: codes and block factors are those of a tensor with the
    maximum ``amax`` (docs/numerics.md). Both decode with ``scale_inv``. All other formats, and
    these without a factor, take the factors from each input.

    Attributes:
        format: canonical text of the quantizer.
        amax: float32 (1,), the largest magnitude that is encoded, or None without a factor.
        scale_inv: float32 (1,), the factor that decodes, or None. It keeps its dtype in
            ``model.to(torch.bfloat16)``.
        factor: the factor while it is learned; ``amax`` and ``scale_inv`` are then None.
    """

    amax: Tensor | None
    scale_inv: Tensor | None
    factor: LearnedFactor | None

    def __init__(
        self,
        format: str | Quantizer,
        amax: float | None = None,
        scale_inv: float | None = None,
        device: torch.types.Device = None,
    ) -> None:
        """Make a quantizer of inputs.

        Args:
            format: an id such as ``"nvfp4"``, a canonical text or a quantizer.
            amax: the largest magnitude that is encoded; None to take it from each input.
            scale_inv: the decode factor; ``amax / 448`` (FP8) or ``amax / 2688`` (NVFP4) if None.
            device: device of the factor.

        Raises:
            QTensorError: ``amax`` is given for a format without a factor of the tensor, or a number
                is not positive and finite.
        """
        super().__init__()
        quantizer = input_format("InputQuantizer", format)
        if amax is not None:
            rule = 'a calibrated factor is for "fp8" and "nvfp4" with one factor for the tensor'
            check(is_static(quantizer), "InputQuantizer", rule, quantizer.canonical, "Drop amax")
            scale_inv = factor_from_amax(quantizer, amax) if scale_inv is None else scale_inv
            rule = "amax and scale_inv are positive and finite"
            fits = all(math.isfinite(v) and v > 0 for v in (amax, scale_inv))
            check(fits, "InputQuantizer", rule, f"{amax} and {scale_inv}", "Calibrate again")
        self.format = quantizer.canonical
        if amax is not None and isinstance(quantizer, NVFP4Quantizer):
            quantizer = dataclasses.replace(quantizer, with_global_scale_inv=True)
        self._canonical = quantizer.canonical
        for name, value in (("amax", amax), ("scale_inv", scale_inv)):
            tensor = None
            if amax is not None:
                tensor = torch.tensor([value], dtype=torch.float32, device=device)
            self.register_buffer(name, tensor)
        self.register_module("factor", None)

    def forward(self, x: Tensor) -> QuantizedTensor:
        """Return a quantized tensor of the shape of ``x`` (..., K)."""
        if self.factor is not None:
            quantized: QuantizedTensor = self.factor(x, x.shape[-1])
            return quantized
        quantizer = constants_of(self._canonical) if is_compiling() else parse(self._canonical)
        if self.amax is None or self.scale_inv is None:
            return quantize_call(quantizer, x)[0]
        return quantize_with_factor(quantizer, x, self.amax, self.scale_inv)

    def learn(self) -> None:
        """Let training change the calibrated factor."""
        quantizer = cast(Quantizer, parse(self._canonical))
        amax, device = cast(Tensor, self.amax), cast(Tensor, self.amax).device
        self.factor = LearnedFactor(quantizer, amax.item(), device)
        self.amax = self.scale_inv = None

    def freeze(self) -> None:
        """Keep the learned factor as it is now."""
        if self.factor is not None:
            device = self.factor.log2_amax.device
            amax, scale_inv = self.values()
            self.amax = torch.tensor([amax], dtype=torch.float32, device=device)
            self.scale_inv = torch.tensor([scale_inv], dtype=torch.float32, device=device)
            self.factor = None

    def values(self) -> tuple[float | None, float | None]:
        """Return the amax and the decode factor; None if each input has its own."""
        if self.factor is not None:
            return self.factor.values()
        amax, scale_inv = self.amax, self.scale_inv
        return (
            None if amax is None else amax.item(),
            None if scale_inv is None else scale_inv.item(),
        )

    def extra_repr(self) -> str:
        """Return the format and the amax for the repr of the module."""
        if self.amax is None or self.amax.is_meta:
            return self.format
        return f"{self.format}, amax={self.amax.item():.4g}"


@contextmanager
def without_input_quantizers(model: nn.Module) -> Iterator[None]:
    """Let the linear layers of a model take their inputs as they are inside the block."""
    steps = [m for m in model.modules() if isinstance(m._modules.get(NAME), InputQuantizer)]
    before = {module: dict(module._modules) for module in steps}
    for module in steps:
        del module._modules[NAME]
    try:
        yield
    finally:
        for module, own in before.items():
            module._modules.clear()
            module._modules.update(own)


def set_input_quantizer(layer: nn.Module, quantizer: InputQuantizer | None) -> None:
    """Let a linear layer quantize its inputs, or no longer if ``quantizer`` is None."""
    set_input_step(layer, NAME, quantizer)
