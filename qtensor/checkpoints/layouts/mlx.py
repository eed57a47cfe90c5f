"""Read and write MLX checkpoints in the modes mxfp4, mxfp8 and nvfp4.

A module ``m`` has ``m.weight``, U32 words whose little-endian bytes hold the codes, low code first,
and ``m.scales``, one U8 factor for each group along K. config.json has ``quantization``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtensor import api
from qtensor.api import quantizer_of
from qtensor.checkpoints import arithmetic
from qtensor.checkpoints.buffers import Parts, assemble, rowwise_parts
from qtensor.checkpoints.containers.base import TensorInfo
from qtensor.checkpoints.layout_base import Group, Layout, Loaded, Source, Writer
from qtensor.checkpoints.nvfp4_factor import factor_in
from qtensor.quantizers import NVFP4Quantizer
from qtensor.storage.tensor import QuantizedTensor

KEYS = ("quantization", "quantization_config")
"""Keys of config.json with the same entry; MLX writes both."""
AMAX = 2688.0
"""The amax whose NVFP4 decode factor, A / (6 * 448), is 1: MLX has no factor of the tensor."""


class Mode(NamedTuple):
    """Describe how the weights of a module are quantized."""

    mode: str
    bits: int
    group_size: int


MODES = {
    "mxfp4": Mode("mxfp4", 4, 32),
    "mxfp8": Mode("mxfp8", 8, 32),
    "nvfp4": Mode("nvfp4", 4, 16),
}
_READ = ", ".join(f"{m.mode} ({m.bits} bits, groups of {m.group_size})" for m in MODES.values())
_FIX = "Convert the model with mlx_lm in one of these modes, or dequantize it there"


class MLXLayout(Layout):
    """Read MLX checkpoints."""

    name = "mlx"
    rank = 50

    def __init__(self, source: Source, **options: object) -> None:
        super().__init__(source, **options)
        entry = source.config.get("quantization")
        if not isinstance(entry, dict):
            rule = "config.json has quantization: {group_size, bits, mode}"
            self.refuse("", rule, type(entry).__name__, "Check config.json")
        self._base = {k: v for k, v in entry.items() if k in Mode._fields}
        self._entries = {k: v for k, v in entry.items() if isinstance(v, dict | bool)}

    @classmethod
    def recognises(cls, source: Source) -> bool:
        """Return True for ``quantization`` in config.json and tensors ``*.scales``."""
        entry = source.config.get("quantization")
        known = isinstance(entry, dict) and bool(set(Mode._fields) & set(entry))
        return known and any(name.endswith(".scales") for name in source.tensors)

    def _mode(self, module: str, weight: str) -> Mode:
        """Return the mode of a module: its own entry of the config, else the one of the model."""
        own = self._entries.get(module, True)
        found = {**self._base, **own} if isinstance(own, dict) else self._base
        name = str(found.get("mode", "affine"))
        # MLX takes the numbers of the mode where the config has none.
        usual = MODES.get(name, Mode(name, 0, 0))
        bits, size = found.get("bits"), found.get("group_size")
        bits = usual.bits if bits is None else bits
        mode = Mode(name, bits, usual.group_size if size is None else size)
        if own is False or MODES.get(name) != mode:
            got = f"{name!r} ({mode.bits!r} bits, groups of {mode.group_size!r})"
            got = "false, but tensors with factors" if own is False else got
            self.refuse(weight, f"the modes that are read are {_READ}", got, _FIX)
        return mode

    def groups(self) -> Iterable[Group]:
        """Return a group for each module with ``.scales``; a module without them is dense."""
        tensors = self.source.tensors
        for name, info in tensors.items():
            module, _, last = name.rpartition(".")
            if last == "biases" and f"{module}.scales" in tensors:
                got = "biases, which mode 'affine' has"
                self.refuse(name, f"the modes that are read are {_READ}", got, _FIX)
            if last == "scales" and f"{module}.weight" not in tensors:
                self.refuse(name, "factors have a weight", "none", "Download the missing shard")
            if last != "weight":
                continue
            scale = tensors.get(f"{module}.scales")
            if scale is not None:
                yield self._group(module, info, scale)
            elif info.dtype == "U32":
                rule = "a packed weight has factors, <module>.scales"
                self.refuse(name, rule, "none", "Download the missing shard")

    def _group(self, module: str, weight: TensorInfo, scale: TensorInfo) -> Group:
        mode = self._mode(module, weight.name)
        if len(weight.shape) < 2:
            rule = "a weight has two dims, and stacked experts three"
            self.refuse(weight.name, rule, list(weight.shape), "Export the model again")
        self.expect(weight, [weight.shape], ["U32"], f"mode {mode.mode}")
        shape = (*weight.shape[:-1], weight.shape[-1] * 32 // mode.bits)
        why = f"{weight.name} {list(shape)} in groups of {mode.group_size}"
        if shape[-1] % mode.group_size:
            self.refuse(weight.name, why, "a partial group", "Export the model again")
        self.expect(scale, [(*shape[:-1], shape[-1] // mode.group_size)], ["U8"], why)
        dtype = self.source.model_dtype or torch.bfloat16
        roles = {"codes": weight, "scale": scale}
        target = api.quantizer(mode.mode)
        return Group(weight.name, roles, shape, dtype, target, f"mlx {mode.mode}", mode)

    def read(self, group: Group, stored: Loaded) -> QuantizedTensor:
        """Return the quantized tensor of a module, whose codes are the bytes of the words."""
        codes = stored["codes"].view(torch.uint8)
        amax = torch.tensor([AMAX], dtype=torch.float32) if group.options.mode == "nvfp4" else None
        parts = Parts(codes, stored["scale"], amax)
        return assemble(group.quantizer, group.shape, group.dtype, parts)

    def decode(self, group: Group, stored: Loaded, dtype: torch.dtype) -> Tensor:
        """Return element times factor, each rounded to ``dtype`` first (class D)."""
        codes, scale = stored["codes"].view(torch.uint8), stored["scale"]
        mode = group.options
        elements = arithmetic.float8(codes) if mode.bits == 8 else arithmetic.e2m1(codes)
        decode = arithmetic.float8 if mode.mode == "nvfp4" else arithmetic.e8m0
        factors = arithmetic.spread(decode(scale), (1, mode.group_size), group.shape)
        return arithmetic.in_dtype(elements, factors, dtype)


class MLXWriter(Writer):
    """Write MLX checkpoints."""

    layout = "mlx"
    formats = ("mxfp4", "mxfp8", "nvfp4 (amax 2688)")

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__({k: v for k, v in config.items() if k not in KEYS})
        self._modes: dict[str, Mode] = {}

    def encode(self, name: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
        """Return the words and the factors of a module."""
        quantizer = quantizer_of(tensor)
        canonical = quantizer.canonical
        module, _, last = name.rpartition(".")
        mode = MODES.get(quantizer.spec.name)
        if mode is None or quantizer.element.name not in ("e2m1", "e4m3"):
            self.refuse(name, f"the layout holds {', '.join(self.formats)}", canonical)
        self.need_rowwise(name, tensor)
        if last != "weight" or tensor.ndim < 2:
            rule = "quantized tensors are the 'weight' of a module, with two dims or more"
            self.refuse(name, rule, f"{tuple(tensor.shape)} named {name!r}")
        if tensor.shape[-1] % mode.group_size:
            fix = "Leave the weight plain"
            rule = f"K is a multiple of {mode.group_size}"
            self.refuse(name, rule, tuple(tensor.shape), fix)
        parts = rowwise_parts(tensor)
        if parts.amax is not None:
            self._check_factor(name, tensor, parts)
        self._modes[module] = mode
        lead = tuple(tensor.shape[:-1])
        words = parts.codes.reshape(*lead, -1).contiguous().view(torch.uint32)
        return {name: words, f"{module}.scales": parts.scale.reshape(*lead, -1).contiguous()}

    def _check_factor(self, name: str, tensor: QuantizedTensor, parts: Parts) -> None:
        """Refuse an NVFP4 tensor whose tensor factor is not 1."""
        quantizer = tensor.quantizer
        if isinstance(quantizer, NVFP4Quantizer) and quantizer.with_rht:
            self.refuse(name, "NVFP4 has no rotation", quantizer.canonical)
        factor = factor_in(tensor, parts)
        if not factor.is_meta and not bool((factor == 1).all()):
            fix = "Quantize again with an amax of 2688, or write mode mxfp4"
            got = f"a factor of {factor.flatten()[0].item():g}"
            self.refuse(name, "NVFP4 in MLX has no factor of the tensor", got, fix)

    def metadata(self, names: Iterable[str]) -> dict[str, str]:
        """Return the header text that MLX writes."""
        return {"format": "mlx"}

    def config(self) -> dict[str, Any]:
        """Return the config with ``quantization``; modules of another mode have their own entry."""
        if not self._modes:
            return self.model_config
        modes = list(self._modes.values())
        base = max(dict.fromkeys(modes), key=modes.count)
        entry: dict[str, Any] = base._asdict()
        entry |= {m: mode._asdict() for m, mode in self._modes.items() if mode != base}
        return {**self.model_config, **dict.fromkeys(KEYS, entry)}


MLXLayout.writer = MLXWriter
