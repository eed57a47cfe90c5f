"""Write ModelOpt checkpoints: the tensors, and the entries of config.json and hf_quant_config.json.

The table of algorithms is here, because reader and writer share it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtensor.api import quantizer_of
from qtensor.checkpoints.buffers import Parts, kind_of, rowwise_parts
from qtensor.checkpoints.ignoring import WILDCARD
from qtensor.checkpoints.layout_base import Writer
from qtensor.checkpoints.nvfp4_factor import expert_factors, factor_in
from qtensor.quantizers import NVFP4Quantizer
from qtensor.storage.tensor import QuantizedTensor

METHOD = "modelopt"
HF_CONFIG = "hf_quant_config.json"
MIXED = "MIXED_PRECISION"


class Algorithm(NamedTuple):
    """Describe how the weights of one ``quant_algo`` lie.

    Attributes:
        name: ``quant_algo`` in upper case.
        format: the format id: ``"nvfp4"``.
        size: elements along K that share a factor, or 0.
    """

    name: str
    format: str
    size: int


ALGORITHMS = {
    name: Algorithm(name, fmt, size)
    for fmt, size, names in (
        ("fp8", 0, ("FP8",)),
        ("fp8_rowwise", 0, ("FP8_PER_CHANNEL_PER_TOKEN",)),
        ("fp8_blockwise", 128, ("FP8_PB_WO", "FP8_PB_REAL")),
        ("nvfp4", 16, ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "NVFP4_SVD")),
        ("nvfp4", 32, ("W4A8_NVFP4_FP8",)),
        ("mxfp8", 32, ("MXFP8",)),
        ("mxfp4", 32, ("MXFP4", "W4A8_MXFP4_FP8")),
    )
    for name in names
}
_WRITTEN = {found.format: found.name for found in reversed(ALGORITHMS.values())}
"""Format id -> the first algorithm of it."""
STACKED = ("fp8", "nvfp4", "mxfp8", "mxfp4")
"""Formats in which stacked experts occur."""
PACKED = ("nvfp4", "mxfp4")
_KV = (".k_scale", ".v_scale")


class ModelOptWriter(Writer):
    """Write ModelOpt checkpoints, with config.json and hf_quant_config.json.

    Quantized stacked experts are (E, N, K), as they are read, and are stored (E, K, N); FP8 ones
    are stored as they are.
    """

    layout = METHOD
    takes_scales = True
    ignore_style = WILDCARD
    formats = ("fp8", "fp8_rowwise", "fp8_blockwise (128x128)", "nvfp4", "mxfp8", "mxfp4")

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._weights: dict[str, str] = {}
        """Module -> format id."""

    def encode(self, name: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
        """Return the codes and factors of a weight or of stacked experts."""
        kind = self._kind(name, tensor)
        self._weights[name.removesuffix(".weight")] = kind
        parts, prefix = rowwise_parts(tensor), f"{name}_"
        codes, scale = parts.codes, parts.scale
        if not name.endswith(".weight"):
            prefix = f"{name}_weight_"
        if kind not in PACKED:
            codes = codes.view(torch.float8_e4m3fn)
        if kind == "nvfp4":
            scale = scale.view(torch.float8_e4m3fn)
        if kind.startswith("fp8"):
            scale = scale if kind == "fp8_blockwise" else scale.flatten()
            scale = scale.reshape(()) if kind == "fp8" else scale
        elif tensor.ndim == 3:
            scale = scale.reshape(*tensor.shape[:2], -1).transpose(1, 2).contiguous()
            codes = codes.transpose(1, 2).contiguous()
        stored = {name: codes, f"{prefix}scale": scale}
        if parts.amax is not None:
            stored[f"{prefix}scale_2"] = self._factor(name, tensor, parts)
        return stored

    def _kind(self, name: str, tensor: QuantizedTensor) -> str:
        """Return the format id of a tensor that the layout holds."""
        quantizer = quantizer_of(tensor)
        canonical, spec = quantizer.canonical, kind_of(quantizer)
        self.need_rowwise(name, tensor)
        if spec == "fp8_columns":
            self.refuse(name, "factors belong to rows", canonical)
        if spec == "fp8_groups":
            self.refuse(name, "the blocks of FP8 are 128x128", canonical)
        if spec not in _WRITTEN:
            self.refuse(name, f"the layout holds {', '.join(self.formats)}", canonical)
        if quantizer.element.name != ("e2m1" if spec in PACKED else "e4m3"):
            self.refuse(name, "the elements of FP8 are e4m3", canonical)
        stacked = not name.endswith(".weight")
        if tensor.ndim != 2 + stacked or (stacked and spec not in STACKED):
            rule = f"a '.weight' is 2-D; stacked experts are 3-D, one of {', '.join(STACKED)}"
            self.refuse(name, rule, f"{spec} {tuple(tensor.shape)} named {name!r}")
        if isinstance(quantizer, NVFP4Quantizer) and (
            quantizer.with_rht or (quantizer.row_scaled and not stacked)
        ):
            rule = "NVFP4 has one factor for a weight or an expert, and no rotation"
            self.refuse(name, rule, canonical)
        return spec

    def _factor(self, name: str, tensor: QuantizedTensor, parts: Parts) -> Tensor:
        """Return ``weight_scale_2``: (), or (E,) for experts with a factor each."""
        factor, quantizer = factor_in(tensor, parts), tensor.quantizer
        row_scaled = isinstance(quantizer, NVFP4Quantizer) and quantizer.row_scaled
        each = expert_factors(factor, tensor.shape) if row_scaled else factor.reshape(())
        if each is None or not (each.is_meta or bool(torch.isfinite(each).all())):
            rule = "a weight, and each expert, has one finite amax"
            self.refuse(name, rule, "others", "Quantize with one amax an expert, or leave it plain")
        return each.contiguous()

    def _algorithm(self, module: str) -> str:
        """Return the ``quant_algo`` of a module."""
        kind = self._weights[module]
        if kind != "nvfp4":
            return _WRITTEN[kind]
        if f"{module}.pre_quant_scale" in self.plain_dims:
            return "NVFP4_AWQ"
        static = any(f"{module}{mark}input_scale" in self.plain_dims for mark in "._")
        return "NVFP4" if static else "W4A16_NVFP4"

    def _entry(self) -> dict[str, Any]:
        """Return the keys that both files share."""
        modules = {module: self._algorithm(module) for module in self._weights}
        names = set(modules.values())
        if len(names) == 1:
            (name,) = names
            return {"quant_algo": name, "group_size": ALGORITHMS[name].size or None}
        layers = {
            module: {"quant_algo": name, "group_size": ALGORITHMS[name].size or None}
            for module, name in modules.items()
        }
        return {"quant_algo": MIXED, "group_size": None, "quantized_layers": layers}

    def config(self) -> dict[str, Any]:
        """Return the config with ``quantization_config``."""
        if not self._weights:
            return self.model_config
        entry = {"quant_method": METHOD, **self._entry(), "ignore": self.ignored(self._weights)}
        if any(name.endswith(_KV) for name in self.plain_dims):
            entry["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
        return {**self.model_config, "quantization_config": {**entry, "producer": _PRODUCER}}

    def files(self) -> dict[str, dict[str, Any]]:
        """Return hf_quant_config.json."""
        if not self._weights:
            return {}
        kv = "FP8" if any(name.endswith(_KV) for name in self.plain_dims) else None
        entry = {
            **self._entry(),
            "kv_cache_quant_algo": kv,
            "exclude_modules": self.ignored(self._weights),
        }
        return {HF_CONFIG: {"producer": _PRODUCER, "quantization": entry}}


_PRODUCER = {"name": "modelopt", "version": "0.47.0"}
"""Loaders look for this name; the version is the one whose files the tests compare with."""
