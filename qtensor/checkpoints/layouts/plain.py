"""Read and write files without factors: plain tensors, and float8 codes that are the values."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from qtensor import api
from qtensor.api import quantizer_of
from qtensor.checkpoints.buffers import Parts, assemble, kind_of, rowwise_parts
from qtensor.checkpoints.layout_base import Group, Layout, Loaded, Source, Writer
from qtensor.storage.tensor import QuantizedTensor

FLOAT8 = {"F8_E4M3": api.quantizer("fp8"), "F8_E5M2": api.quantizer("fp8", dtype="e5m2")}
"""Dtypes of codes that can be values without a factor -> quantizer."""
NARROW = (*FLOAT8, "U8", "I8", "U32", "F4")
"""Dtypes of codes."""
FACTORS = (
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_global_scale",
    "scale_weight",
    "scales",
    "scale",
    "qscale_weight",
)
"""Last name parts that stand beside codes in one layout or another."""
STACKED = ("_scale", "_scale_inv", "_scales_inv", "_weight_scale")
"""What follows the name of stacked experts in the name of their factor."""
PAIRS = {"_blocks": "_scales", "_qdata": "_scale", "_packed": "_scale"}
"""End of the name of codes -> end of the name of their factor: gpt-oss, torchao."""


class PlainWriter(Writer):
    """Write plain tensors, and of the quantized ones FP8 with a factor of 1."""

    layout = "plain"
    formats = ("fp8 with a factor of 1",)
    keeps_names = True

    def encode(self, name: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
        """Return the codes of an FP8 tensor, which are its values.

        Raises:
            CheckpointError: the tensor has another format, or a factor other than 1.
        """
        quantizer = quantizer_of(tensor)
        rule = f"plain files hold plain tensors, and {self.formats[0]}"
        fix = "Call .dequantize() first, or write layout 'qtensor'"
        if kind_of(quantizer) != "fp8" or not quantizer.rowwise:
            self.refuse(name, rule, quantizer.canonical, fix)
        parts = rowwise_parts(tensor)
        if not parts.scale.is_meta and parts.scale.item() != 1:
            self.refuse(name, rule, f"a factor of {parts.scale.item():g}", fix)
        dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[quantizer.element.name]
        return {name: parts.codes.view(dtype)}


class PlainLayout(Layout):
    """Read files without a quantization entry: plain tensors, and float8 codes with a factor of 1.

    Names alone do not settle a layout, because ``weight_scale`` means five different things. A file
    that has codes with a factor beside them, but no configuration, is therefore refused unless the
    caller passes ``layout=``.
    """

    name = "plain"
    rank = 900
    writer = PlainWriter

    @classmethod
    def recognises(cls, source: Source) -> bool:
        """Return True if nothing says that the weights are quantized."""
        if source.quantization or source.kind not in ("safetensors", "torch"):
            return False
        if source.extra.get("records"):
            return False
        return not any(_has_factor(source, name) for name in source.tensors)

    def groups(self) -> Iterable[Group]:
        """Return a group for each float8 tensor, unless the caller overrode the layout."""
        if not self.recognises(self.source):
            return
        dtype = self.source.model_dtype or torch.bfloat16
        for name, info in self.source.tensors.items():
            if info.dtype in FLOAT8 and info.shape:
                target, scheme = FLOAT8[info.dtype], f"{info.dtype} without a factor"
                yield Group(name, {"codes": info}, info.shape, dtype, target, scheme)

    def read(self, group: Group, stored: Loaded) -> QuantizedTensor:
        """Return an FP8 tensor with a factor of 1."""
        parts = Parts(stored["codes"], torch.ones(1, dtype=torch.float32))
        return assemble(group.quantizer, group.shape, group.dtype, parts)

    def decode(self, group: Group, stored: Loaded, dtype: torch.dtype) -> Tensor:
        """Return the codes as values: a cast."""
        return stored["codes"].to(dtype)


def _has_factor(source: Source, name: str) -> bool:
    """Return True if a tensor holds codes and a factor lies beside it."""
    info = source.tensors[name]
    if info.dtype not in NARROW:
        return False
    module = name.rpartition(".")[0]
    beside = [f"{module}.{factor}" for factor in FACTORS]
    beside += [name + suffix for suffix in STACKED]
    for codes, factor in PAIRS.items():
        if name.endswith(codes):
            beside.append(name.removesuffix(codes) + factor)
    return any(factor in source.tensors for factor in beside)
