"""Read and write old ComfyUI checkpoints: a ``scaled_fp8`` marker, and ``p.scale_weight``.

The marker has no elements, or two for full precision products; its dtype is that of the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from qtensor.api import quantizer_of
from qtensor.checkpoints import arithmetic
from qtensor.checkpoints.buffers import kind_of, rowwise_parts
from qtensor.checkpoints.containers.base import STORED_TYPES, TensorInfo
from qtensor.checkpoints.layout_base import Group, Layout, Loaded, Source, Writer
from qtensor.quantizers import Float8CurrentScalingQuantizer
from qtensor.storage.tensor import QuantizedTensor

MARKER, FACTOR = "scaled_fp8", "scale_weight"
_TARGETS = {
    "F8_E4M3": Float8CurrentScalingQuantizer(),
    "F8_E5M2": Float8CurrentScalingQuantizer(dtype="e5m2"),
}
_DTYPES = {"F8_E4M3": "F8_E4M3", "F8_E5M2": "F8_E5M2", "F32": "F8_E4M3"}
"""Dtype of the marker -> dtype of the weights."""
_FIX = "Export the file again, or download it again"


class ComfyUIScaledFP8Layout(Layout):
    """Read old ComfyUI checkpoints. Layers without ``scale_weight`` are plain."""

    name = "comfyui-scaled-fp8"
    rank = 41
    factor_names = frozenset({"scale_input"})

    @classmethod
    def recognises(cls, source: Source) -> bool:
        """Return True for a tensor whose last name part is ``scaled_fp8``."""
        return any(name.rpartition(".")[2] == MARKER for name in source.tensors)

    def groups(self) -> Iterable[Group]:
        """Return a group for each layer with a factor; it needs a marker and a weight."""
        tensors = self.source.tensors
        markers = {
            name.removesuffix(MARKER): info
            for name, info in tensors.items()
            if name.rpartition(".")[2] == MARKER
        }
        for marker in markers.values():
            if torch.Size(marker.shape).numel() not in (0, 2) or marker.dtype not in _DTYPES:
                rule = f"{MARKER} has no or two elements of {', '.join(_DTYPES)}"
                got = f"{marker.dtype} of shape {list(marker.shape)}"
                self.refuse(marker.name, rule, got, _FIX)
        for name, factor in tensors.items():
            module, _, last = name.rpartition(".")
            if last == "weight_scale":
                rule, got = f"factors of old files are named {FACTOR}", "a factor of current files"
                self.refuse(name, rule, got, "Convert the file in ComfyUI, which renames factors")
            if last != FACTOR:
                continue
            weight = tensors.get(f"{module}.weight")
            if weight is None:
                self.refuse(name, "a factor has a weight", "none", _FIX)
            yield self._group(weight, factor, markers)

    def _group(
        self, weight: TensorInfo, factor: TensorInfo, markers: Mapping[str, TensorInfo]
    ) -> Group:
        """Return the group of a layer; the marker with the longest prefix of its name decides."""
        prefixes = [prefix for prefix in markers if weight.name.startswith(prefix)]
        if not prefixes:
            rule = f"a scaled layer lies under the prefix of a {MARKER} tensor"
            self.refuse(weight.name, rule, ", ".join(markers) or "none", _FIX)
        marker = markers[max(prefixes, key=len)]
        dtype = _DTYPES[marker.dtype]
        why = f"{MARKER} of dtype {marker.dtype}"
        self.expect(weight, [weight.shape], [dtype, "U8"], why)
        self.expect(factor, [(), (1,)], ["F32", "BF16", "F16"], f"{weight.name}, one factor,")
        if not weight.shape:
            self.refuse(weight.name, "a weight has dims", "none", _FIX)
        roles = {"codes": weight, "scale": factor, "marker": marker}
        scheme = f"{MARKER} {dtype}" + (", full precision products" if marker.nbytes else "")
        nominal = self.source.model_dtype or torch.bfloat16
        return Group(weight.name, roles, weight.shape, nominal, _TARGETS[dtype], scheme, dtype)

    def decode(self, group: Group, stored: Loaded, dtype: torch.dtype) -> Tensor:
        """Return code times factor, each rounded to ``dtype`` first (class D)."""
        elements = arithmetic.float8(stored["codes"], STORED_TYPES[group.options].torch_dtype)
        return arithmetic.in_dtype(elements, stored["scale"].reshape(()), dtype)


class ComfyUIScaledFP8Writer(Writer):
    """Write old ComfyUI checkpoints: e4m3 weights under one marker without a prefix."""

    layout = "comfyui-scaled-fp8"
    formats = ("fp8 (e4m3 or e5m2, one for the file)",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._marker: tuple[str, str] | None = None
        """The weight that brings the marker, and the element of every weight."""

    def encode(self, name: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
        """Return the weight and its factor; the first weight brings the marker."""
        quantizer = quantizer_of(tensor)
        module, _, last = name.rpartition(".")
        if not module or last != "weight":
            self.refuse(name, "quantized tensors are the 'weight' of a module", repr(name))
        element = quantizer.element.name
        if kind_of(quantizer) != "fp8" or not quantizer.rowwise:
            self.refuse(name, f"the layout holds {self.formats[0]}", quantizer.canonical)
        self._marker = self._marker or (name, element)
        if self._marker[1] != element:
            self.refuse(name, f"the layout holds {self.formats[0]}", quantizer.canonical)
        dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[element]
        parts = rowwise_parts(tensor)
        stored = {name: parts.codes.view(dtype), f"{module}.{FACTOR}": parts.scale.reshape(())}
        if self._marker[0] == name:
            stored[MARKER] = torch.empty(0, dtype=dtype)
        return stored


ComfyUIScaledFP8Layout.writer = ComfyUIScaledFP8Writer
