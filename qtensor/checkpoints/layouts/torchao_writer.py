"""Write torchao's safetensors form: tensors, and a JSON text for each name in the header."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from qtensor.api import quantizer_of
from qtensor.checkpoints.buffers import kind_of, rowwise_parts
from qtensor.checkpoints.layout_base import Writer
from qtensor.checkpoints.nvfp4_factor import expert_factors, factor_in
from qtensor.core.buffer_shapes import ceil_div
from qtensor.core.formats import PLAIN
from qtensor.quantizers import MXFP6Quantizer, NVFP4Quantizer
from qtensor.storage.tensor import QuantizedTensor

METHOD, NAMES, ACT = "torchao", "tensor_names", "act_per_tensor_scale"
FLOAT8, MX, NVFP4 = "Float8Tensor", "MXTensor", "NVFP4Tensor"
MX_ELEMENTS: dict[Any, tuple[str, str, str]] = {
    torch.float8_e4m3fn: ("mxfp8", "e4m3", "F8_E4M3"),
    torch.float8_e5m2: ("mxfp8", "e5m2", "F8_E5M2"),
    torch.float4_e2m1fn_x2: ("mxfp4", "e2m1", "U8"),
    "fp6_e2m3": ("mxfp6", "e2m3", "U8"),
    "fp6_e3m2": ("mxfp6", "e3m2", "U8"),
}
"""``elem_dtype`` -> (our format, our element, stored dtype)."""

Encoded = tuple[str, dict[str, Any], dict[str, Tensor]]
"""``_type``, ``_data`` and the tensors of a weight."""
_KEPT = {"mm_config", "act_quant_kwargs", "kernel_preference", "use_triton_kernel"}
_CONFIGS: dict[str, dict[str, Any]] = {
    FLOAT8: {"_type": "Float8WeightOnlyConfig", "_version": 2, "_data": {}},
    MX: {"_type": "MXDynamicActivationMXWeightConfig", "_version": 1, "_data": {}},
    NVFP4: {"_type": "NVFP4WeightOnlyConfig", "_version": 1, "_data": {}},
}


def stored_name(name: str, key: str) -> str:
    """Return the stored name of a tensor of a weight: ``a._weight_qdata`` of ``a.weight``."""
    module, _, last = name.rpartition(".")
    return f"{module}._{last}_{key}" if module else f"_{last}_{key}"


class TorchAOWriter(Writer):
    """Write safetensors that torchao's ``unflatten_tensor_state_dict`` reads."""

    layout = METHOD
    formats = ("fp8", "fp8_rowwise", "fp8_blockwise", "mxfp8", "mxfp6", "mxfp4", "nvfp4")
    swizzled = None

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._texts: dict[str, dict[str, Any]] = {}
        self._plain: set[str] = set()
        self._siblings: dict[str, set[str]] = {}
        """Module -> last parts of the names of its quantized tensors."""

    def encode(self, name: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
        """Return ``qdata``, ``scale`` and perhaps ``per_tensor_scale`` of a weight."""
        self._check_name(name)
        self._check_siblings(name)
        quantizer = quantizer_of(tensor)
        if not quantizer.rowwise or quantizer.columnwise_value or tensor.ndim < 2:
            got = f"{quantizer.canonical}, {tuple(tensor.shape)}"
            self.refuse(name, "the layout holds rowwise data of two dims or more", got)
        make = {"fp8": self._float8, "fp8_blockwise": self._float8, "nvfp4": self._nvfp4}
        kind, data, stored = make.get(quantizer.spec.name, self._mx)(name, tensor)
        self._texts[name] = {
            "_type": kind,
            "_data": {**data, **self._kept(name, kind, data)},
            "_tensor_data_names": list(stored),
        }
        return {stored_name(name, key): part for key, part in stored.items()}

    def _check_name(self, name: str) -> None:
        if "." not in name:
            rule = "names have a module, because torchao's loader splits them at the last dot"
            self.refuse(name, rule, repr(name), "Write layout 'qtensor'")

    def _check_siblings(self, name: str) -> None:
        """Refuse ``a.up`` beside ``a.up_b``: to its loader ``a._up_b_qdata`` is a part of both."""
        module, _, last = name.rpartition(".")
        siblings = self._siblings.setdefault(module, set())
        for other in siblings:
            if f"{other}_".startswith(f"{last}_") != f"{last}_".startswith(f"{other}_"):
                rule = "torchao's loader finds the parts of a weight by the beginning of names"
                self.refuse(name, rule, f"{other!r} in one module", "Write layout 'qtensor'")
        siblings.add(last)

    def _kept(self, name: str, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Return attributes of the file that was read, which our tensors do not hold."""
        entry = self._read_entry(name)
        found = entry.get("_data") if entry.get("_type") == kind else None
        keys = _KEPT & data.keys()
        return {k: v for k, v in found.items() if k in keys} if isinstance(found, dict) else {}

    def _read_entry(self, name: str) -> dict[str, Any]:
        for header in self.source.headers if self.source else ():
            if NAMES in header and name in header:
                return dict(json.loads(header[name]))
        return {}

    def _float8(self, name: str, tensor: QuantizedTensor) -> Encoded:
        quantizer, shape, parts = quantizer_of(tensor), tuple(tensor.shape), rowwise_parts(tensor)
        kind = kind_of(quantizer)
        block = shape
        if kind == "fp8_rowwise":
            block = (*(1,) * (tensor.ndim - 1), shape[-1])
        elif kind == "fp8_columns":
            if tensor.ndim > 2:
                self.refuse(name, "factors of columns belong to two dims", shape)
            block = (shape[0], 1)
        elif kind != "fp8":
            rows = 128 if kind == "fp8_blockwise" else 1
            block = (*(1,) * (tensor.ndim - 2), rows, 128)
            if any(n % size for n, size in zip(shape, block, strict=True)):
                rule = "torchao's loader decodes whole blocks of 128 alone"
                self.refuse(name, rule, shape, "Write layout 'qtensor'")
        grid = [ceil_div(n, max(size, 1)) for n, size in zip(shape, block, strict=True)]
        data = {
            "block_size": list(block),
            "mm_config": None,
            "act_quant_kwargs": None,
            "kernel_preference": _named("KernelPreference", "AUTO"),
            "dtype": _dtype(tensor.dtype),
        }
        dtype = torch.float8_e5m2 if quantizer.element.name == "e5m2" else torch.float8_e4m3fn
        return FLOAT8, data, {"qdata": parts.codes.view(dtype), "scale": parts.scale.reshape(grid)}

    def _factors(self, name: str, tensor: QuantizedTensor) -> tuple[Tensor, Tensor]:
        """Return the codes, and the factors as they lie: row-major, or in tiles."""
        shape, size = tuple(tensor.shape), 16 if tensor.quantizer.spec.name == "nvfp4" else 32
        if tensor.ndim > 3 or shape[-1] % size:
            self.refuse(name, f"2 or 3 dims and whole blocks of {size} columns", shape)
        if tensor.quantizer.scale_layout == PLAIN:
            parts = rowwise_parts(tensor)
            return parts.codes, parts.scale.reshape(*shape[:-1], -1)
        if tensor.ndim == 3 and shape[-2] % 128:
            rule = "swizzled experts have a multiple of 128 rows"
            self.refuse(name, rule, shape, "Pass swizzled=False")
        codes, scale = tensor.buffers()[:2]
        tiles = (32 * ceil_div(shape[-2], 128), 16 * ceil_div(shape[-1], 4 * size))
        return codes, scale.reshape(*shape[:-2], *tiles)

    def _mx(self, name: str, tensor: QuantizedTensor) -> Encoded:
        quantizer = quantizer_of(tensor)
        element = quantizer.element.name
        if isinstance(quantizer, MXFP6Quantizer) and quantizer.packed:
            self.refuse(name, "FP6 codes have a byte each", quantizer.canonical)
        codes, scale = self._factors(name, tensor)
        elem = next(key for key, (_, short, _) in MX_ELEMENTS.items() if short == element)
        if element in ("e4m3", "e5m2"):
            codes = codes.view(elem)
        data = {
            "elem_dtype": elem if isinstance(elem, str) else _dtype(elem),
            "block_size": 32,
            "orig_dtype": _dtype(tensor.dtype),
            "kernel_preference": _named("KernelPreference", "EMULATED"),
            "act_quant_kwargs": None,
            "is_swizzled_scales": quantizer.scale_layout != PLAIN,
        }
        return MX, data, {"qdata": codes, "scale": scale.view(torch.float8_e8m0fnu)}

    def _nvfp4(self, name: str, tensor: QuantizedTensor) -> Encoded:
        quantizer = cast(NVFP4Quantizer, tensor.quantizer)
        if quantizer.with_rht and quantizer.rht_side == "rowwise":
            self.refuse(name, "the values are not rotated", quantizer.canonical)
        codes, scale = self._factors(name, tensor)
        factor = factor_in(tensor, rowwise_parts(tensor))
        if quantizer.row_scaled:
            each = expert_factors(factor, tuple(tensor.shape))
            if each is None:
                self.refuse(name, "one factor for the tensor or for an expert", "one for each row")
            factor = each.reshape(-1, 1, 1)
        else:
            factor = factor.reshape(())
        stored = {"qdata": codes, "scale": scale.view(torch.float8_e4m3fn)}
        if self._has_factor(name, factor):
            stored = {"per_tensor_scale": factor, **stored}
        data = {
            "is_swizzled_scales": quantizer.swizzled,
            "use_triton_kernel": False,
            "act_quant_kwargs": None,
            "block_size": 16,
            "orig_dtype": _dtype(tensor.dtype),
        }
        return NVFP4, data, stored

    def _has_factor(self, name: str, factor: Tensor) -> bool:
        """Return False if the factor is 1 and left out; the second call repeats the first."""
        names = self._texts.get(name, self._read_entry(name)).get("_tensor_data_names")
        if isinstance(names, list) and (factor.is_meta or bool((factor == 1).all())):
            return "per_tensor_scale" in names
        return factor.is_meta or factor.ndim > 0 or bool(factor != 1)

    def plain(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the tensor; an activation factor of a pickle gets its name in safetensors."""
        self._check_name(name)
        module, _, last = name.rpartition(".")
        if last == ACT and "." in module:
            name = stored_name(module, ACT)
        self._plain.add(name)
        return {name: tensor}

    def metadata(self, names: Iterable[str]) -> dict[str, str]:
        """Return ``tensor_names`` and the text of each name."""
        texts: dict[str, dict[str, Any]] = {}
        for name in names:
            if name in self._texts:
                texts[name] = dict(self._texts[name])
                if texts[name]["_type"] == NVFP4 and stored_name(name, ACT) in self._plain:
                    texts[name]["_tensor_data_names"] = [ACT, *texts[name]["_tensor_data_names"]]
            elif not name.endswith(ACT):
                texts[name] = {"_type": "Tensor"}
        words = {name: json.dumps(text) for name, text in texts.items()}
        return {"format": "pt", NAMES: json.dumps(list(texts)), **words}

    def config(self) -> dict[str, Any]:
        """Return the config with an entry for transformers; the header alone decides the types."""
        kinds = [text["_type"] for text in self._texts.values()]
        if not kinds:
            return self.model_config
        entry = {"quant_method": METHOD, "quant_type": {"default": _CONFIGS[kinds[0]]}}
        return {**self.model_config, "quantization_config": entry}


def _named(kind: str, value: str) -> dict[str, str]:
    return {"_type": kind, "_data": value}


def _dtype(dtype: torch.dtype) -> dict[str, str]:
    return _named("torch.dtype", str(dtype).removeprefix("torch."))
