"""Read and write files without quantized weights: every tensor is plain."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from qtensor.checkpoints.layout import DenseOnly, Group, Layout, Loaded, Source, Writer
from qtensor.storage.tensor import QuantizedTensor

NARROW = ("F8_E4M3", "F8_E5M2", "U8", "I8", "F4")
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


class PlainWriter(Writer):
    """Write plain tensors, and quantized ones not at all."""

    layout = "plain"
    formats = ()
    keeps_names = True

    def encode(self, name: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
        """Refuse a quantized tensor.

        Raises:
            CheckpointError: always.
        """
        fix = "Call .dequantize() first, or write layout 'qtensor'"
        self.refuse(name, "plain files hold plain tensors", tensor.quantizer.canonical, fix)


class PlainLayout(Layout):
    """Read files without a quantization entry as plain tensors.

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
        if source.quantization or source.kind != "safetensors":
            return False
        return not any(_has_factor(source, name) for name in source.tensors)

    def groups(self) -> Iterable[Group]:
        """Return no group."""
        return ()

    def read(self, group: Group, stored: Loaded) -> QuantizedTensor | DenseOnly:
        """Say that there are no groups."""
        return DenseOnly("plain files have no quantized weights")

    def decode(self, group: Group, stored: Loaded, dtype: torch.dtype) -> Any:
        """Refuse: there are no groups.

        Raises:
            CheckpointError: always.
        """
        self.refuse(group.name, "plain files have no quantized weights", group.scheme, "Report it")


def _has_factor(source: Source, name: str) -> bool:
    """Return True if a tensor holds codes and a factor lies beside it."""
    info = source.tensors[name]
    if info.dtype not in NARROW:
        return False
    module = name.rpartition(".")[0]
    return any(f"{module}.{factor}" in source.tensors for factor in FACTORS)
