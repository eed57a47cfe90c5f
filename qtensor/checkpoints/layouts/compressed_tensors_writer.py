"""Write compressed-tensors checkpoints: the tensors, and the entry of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from qtensor.api import quantizer_of
from qtensor.checkpoints.buffers import kind_of, rowwise_parts
from qtensor.checkpoints.ignoring import REGEX
from qtensor.checkpoints.input_transforms import ROTATION
from qtensor.checkpoints.layout_base import DIVISOR, FACTOR, Writer
from qtensor.checkpoints.nvfp4_factor import divisor_of
from qtensor.quantizers import MXFP6Quantizer, NVFP4Quantizer
from qtensor.storage.tensor import QuantizedTensor

METHOD = "compressed-tensors"
FP8, NVFP4, MXFP4, MXFP6, MXFP8 = (
    "float-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp6-pack-quantized",
    "mxfp8-quantized",
)


class CompressedTensorsWriter(Writer):
    """Write compressed-tensors checkpoints."""

    layout = METHOD
    formats = ("fp8", "fp8_rowwise", "fp8_blockwise", "nvfp4", "mxfp4", "mxfp6 (e2m3)", "mxfp8")
    input_factors: ClassVar[Mapping[str, Any]] = {
        "nvfp4": ("input_global_scale", DIVISOR),
        "": ("input_scale", FACTOR),
    }
    factor_shape = (1,)
    takes_rotations = True
    tensor_factor = DIVISOR
    ignore_style = REGEX

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._weights: dict[str, str] = {}
        """Module -> key of ``_WEIGHTS``."""
        self._rotated: dict[str, int] = {}
        """Module -> size of the blocks of its inputs that are rotated."""

    def encode(self, name: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
        """Return weight, weight_scale and so on of the module that ``name`` belongs to."""
        module, _, last = name.rpartition(".")
        if last != "weight" or tensor.ndim != 2:
            rule = "quantized tensors are the 2-D 'weight' of a module"
            self.refuse(name, rule, f"{tuple(tensor.shape)} named {name!r}")
        kind = self._kind(name, tensor)
        codes, scale, amax, factor = rowwise_parts(tensor)
        self._weights[module] = kind
        if kind in _FP8_SCHEMES:
            scale = self.narrowed(module, scale, tensor.dtype)
        if kind in (*_FP8_SCHEMES, MXFP8):
            codes = codes.view(torch.float8_e4m3fn)
            return {f"{module}.weight": codes, f"{module}.weight_scale": scale}
        stored = {f"{module}.weight_packed": codes, f"{module}.weight_scale": scale}
        if amax is not None:
            divisor = divisor_of(cast(NVFP4Quantizer, tensor.quantizer), amax, factor)
            if not divisor.is_meta and not bool(torch.isfinite(divisor)):
                fix = "Leave the weight plain"
                self.refuse(name, "the amax of an NVFP4 weight is not 0", amax.item(), fix)
            stored[f"{module}.weight_scale"] = scale.view(torch.float8_e4m3fn)
            stored[f"{module}.weight_global_scale"] = divisor
        return stored

    def _kind(self, name: str, tensor: QuantizedTensor) -> str:
        """Return the scheme that holds a tensor."""
        quantizer = quantizer_of(tensor)
        canonical, kind = quantizer.canonical, kind_of(quantizer)
        self.need_rowwise(name, tensor)
        spec, element = quantizer.spec.name, quantizer.element.name
        wanted = {"mxfp4": "e2m1", "nvfp4": "e2m1", "mxfp6": "e2m3"}.get(spec, "e4m3")
        if element != wanted:
            self.refuse(name, f"the elements of {spec} are {wanted}", canonical)
        if kind == "fp8_columns":
            self.refuse(name, "factors belong to rows", canonical)
        if kind == "fp8_groups" and tensor.shape[1] % 128:
            self.refuse(name, "its loader decodes whole groups of 128", tuple(tensor.shape))
        if isinstance(quantizer, NVFP4Quantizer) and (quantizer.row_scaled or quantizer.with_rht):
            self.refuse(name, "NVFP4 has one factor for the tensor and no rotation", canonical)
        if isinstance(quantizer, MXFP6Quantizer) and not quantizer.packed:
            self.refuse(name, "FP6 codes are packed", canonical, "Quantize with packed=True")
        return _KINDS[kind]

    def plain(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the stored tensors of a plain tensor; rotations of inputs go into the config."""
        module, _, last = name.rpartition(".")
        if last == ROTATION:
            self._rotated[module] = int(tensor)
            return {}
        return super().plain(name, tensor)

    def config(self) -> dict[str, Any]:
        """Return the config with ``quantization_config``.

        Raises:
            CheckpointError: inputs are rotated, and no weight is quantized: the loader reads the
                rotations only beside quantized weights.
        """
        if not self._weights:
            if self._rotated:
                rule = "a config with rotations describes quantized weights"
                self.refuse(next(iter(self._rotated)), rule, "plain weights alone")
            return self.model_config
        kinds = list(dict.fromkeys(self._weights.values()))
        groups = {}
        for i, kind in enumerate(kinds):
            modules = [module for module, its in self._weights.items() if its == kind]
            groups[f"group_{i}"] = {
                "format": _format_of(kind),
                "targets": ["Linear"] if len(kinds) == 1 else modules,
                "weights": _WEIGHTS[kind],
                "input_activations": self._activations(kind, modules),
                "output_activations": None,
            }
        formats = {_format_of(kind) for kind in kinds}
        entry = {
            "quant_method": METHOD,
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "config_groups": groups,
            "ignore": self.ignored(self._weights),
            "kv_cache_scheme": self._kv_scheme(),
            "quantization_status": "compressed",
            "version": "0.20.0",
        }
        if self._rotated:
            entry["transform_config"] = {"config_groups": self._rotations()}
        return {**self.model_config, "quantization_config": entry}

    def _rotations(self) -> dict[str, Any]:
        """Return the groups of ``transform_config``: inputs are rotated, and weights were."""
        groups = {}
        for size in sorted(set(self._rotated.values())):
            targets = [module for module, its in self._rotated.items() if its == size]
            places = (("input", False), ("weight_input", True))
            groups[f"hadamard_{size}"] = {
                "type": "hadamard",
                "apply": [
                    {"targets": targets, "location": location, "inverse": inverse, "ignore": []}
                    for location, inverse in places
                ],
                "randomize": False,
                "requires_grad": False,
                "head_dim": size,
                "precision": "torch.float32",
            }
        return groups

    def _kv_scheme(self) -> dict[str, Any] | None:
        if not any(name.endswith((".k_scale", ".v_scale")) for name in self.plain_dims):
            return None
        return {**_args(8, "tensor"), "dynamic": False}

    def _activations(self, kind: str, modules: list[str]) -> dict[str, Any] | None:
        """Return how activations are quantized; static only if the factors are there."""
        has = {
            last: all(f"{module}.{last}" in self.plain_dims for module in modules)
            for last in ("input_scale", "input_global_scale")
        }
        if kind == NVFP4:
            dynamic = {**_args(4, "tensor_group", group_size=16), "dynamic": "local"}
            return dynamic if has["input_global_scale"] else None
        if kind in ("tensor", "channel"):
            if has["input_scale"]:
                return {**_args(8, "tensor"), "dynamic": False}
            return {**_args(8, "token"), "dynamic": True}
        if kind in _FP8_SCHEMES:
            return {**_args(8, "group", group_size=128), "dynamic": True}
        formats = {self.input_formats.get(module) for module in modules}
        if kind == MXFP8 or (kind in _MX and formats == {_MX[kind]}):
            return {**_WEIGHTS[kind], "dynamic": True}
        return None


def _args(bits: int, strategy: str, **more: object) -> dict[str, Any]:
    """Return quantization arguments as compressed-tensors writes them."""
    return {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy, **more}


_FP8_SCHEMES = ("tensor", "channel", "block 128x128", "block 1x128")
_KINDS = {
    **dict(zip(("fp8", "fp8_rowwise", "fp8_blockwise", "fp8_groups"), _FP8_SCHEMES, strict=True)),
    **{"nvfp4": NVFP4, "mxfp4": MXFP4, "mxfp6": MXFP6, "mxfp8": MXFP8},
}
"""Our format -> key of ``_WEIGHTS``."""
_MX = {MXFP4: "mxfp4", MXFP6: "mxfp6(packed=True)"}
"""Formats whose inputs are quantized only on request -> the format of the inputs."""
_GROUP: dict[str, Any] = {"group_size": 32, "scale_dtype": "torch.uint8"}
_WEIGHTS: dict[str, dict[str, Any]] = {
    "tensor": _args(8, "tensor"),
    "channel": _args(8, "channel"),
    "block 128x128": _args(8, "block", block_structure=[128, 128]),
    "block 1x128": _args(8, "group", group_size=128),
    NVFP4: _args(4, "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn"),
    MXFP4: _args(4, "group", **_GROUP),
    MXFP6: _args(6, "group", **_GROUP),
    MXFP8: _args(8, "group", **_GROUP),
}


def _format_of(kind: str) -> str:
    return FP8 if kind in _FP8_SCHEMES else kind
