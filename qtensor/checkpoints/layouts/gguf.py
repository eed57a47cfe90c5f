"""Read GGUF files, and write MXFP4 and NVFP4 weights to them.

An MXFP4 block is an E8M0 byte and 16 bytes with elements j and j + 16 in the low and the high
nibble of byte j. An NVFP4 block has 64 elements: four factors, unsigned e4m3, and for each run of
16 elements 8 bytes with elements j and j + 8 in byte j. Rearranging the nibbles is exact.

The tensor factor of an NVFP4 weight ``x.weight`` lies in a tensor of its own, ``x.scale``, which
llama.cpp applies to the product. ``open`` therefore gives both tensors as they lie in the file. The
name ``"x.weight times scale"`` gives the weight with its factor, and ``fold_scale=True`` reads
every weight so, without the tensors of factors.

The integer types of ``ggml_blocks`` have no format of ours: their weights are dense only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from qtensor import api
from qtensor.api import quantizer_of
from qtensor.checkpoints import arithmetic
from qtensor.checkpoints.buffers import Parts, assemble, rowwise_parts
from qtensor.checkpoints.containers.base import STORED_NAMES, TensorInfo
from qtensor.checkpoints.containers.gguf import (
    NUMBERS,
    TYPES,
    GGUFEntry,
    GGUFFileWriter,
    GGUFValue,
    gguf_value,
)
from qtensor.checkpoints.containers.gguf_split import KEYS
from qtensor.checkpoints.containers.safetensors import SafetensorsWriter, TensorSpec
from qtensor.checkpoints.errors import Place
from qtensor.checkpoints.ggml_blocks import DECODERS
from qtensor.checkpoints.layout_base import (
    DenseOnly,
    Group,
    Layout,
    Loaded,
    Source,
    Unreadable,
    Writer,
)
from qtensor.checkpoints.nvfp4_factor import TensorFactor, expert_factors, factor_in, from_factors
from qtensor.quantizers import NVFP4Quantizer
from qtensor.storage.tensor import QuantizedTensor

MXFP4, NVFP4 = "MXFP4", "NVFP4"
FOLDED = " times scale"
"""What follows the name of a weight in the name of its product with the tensor factor."""
AMAX = 2688.0
"""The amax whose NVFP4 decode factor, A / (6 * 448), is 1."""
FILE_TYPES = {MXFP4: 38, NVFP4: 39}
PLAIN_FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32}
PLAIN = tuple(kind.stored for kind in TYPES.values() if kind.stored)


class GGUFLayout(Layout):
    """Read GGUF files, with the names and the order of rows of the file.

    ``open`` takes ``fold_scale=True``: the factors ``x.scale`` of NVFP4 weights become part of the
    weights and are no longer tensors of their own.
    """

    name = "gguf"
    rank = 10
    factor_names = frozenset({"scale", "input_scale"})
    options = ("fold_scale",)
    conversion_options = MappingProxyType({"fold_scale": True})

    def __init__(self, source: Source, **options: object) -> None:
        super().__init__(source, **options)
        if source.kind != "gguf":
            self.refuse("", "the layout needs a GGUF file", source.kind, "Leave out layout=")
        self._fold = bool(options.get("fold_scale"))

    @classmethod
    def recognises(cls, source: Source) -> bool:
        """Return True for a GGUF file."""
        return source.kind == "gguf"

    def groups(self) -> Iterable[Group]:
        """Return a group for each quantized tensor; other types cannot be read."""
        types, shapes = self.source.extra["types"], self.source.extra["shapes"]
        for name, info in self.source.tensors.items():
            kind, shape = types[name], shapes[name]
            if kind in PLAIN:
                continue
            if kind in DECODERS:
                target = DenseOnly(f"no format holds type {kind}")
                yield Group(name, {"codes": info}, shape, torch.float32, target, kind)
                continue
            if kind not in FILE_TYPES:
                known = ", ".join((*FILE_TYPES, *DECODERS))
                reason = f"warning: type {kind} is not read; {known} are"
                yield Group(name, {"codes": info}, shape, torch.float32, Unreadable(reason), kind)
                continue
            quantizer = api.quantizer(kind.lower())
            group = Group(name, {"codes": info}, shape, torch.float32, quantizer, kind)
            factor = self._sidecar(group) if kind == NVFP4 else None
            if factor is None:
                yield group
                continue
            scheme = f"{kind}, times its factor .scale"
            folded = group._replace(roles={"codes": info, "factor": factor}, scheme=scheme)
            if self._fold:
                yield folded
            else:
                yield group._replace(scheme=f"{kind}, without its factor .scale")
                yield folded._replace(name=name + FOLDED, listed=False)

    def _sidecar(self, group: Group) -> TensorInfo | None:
        """Return the tensor with the factor of a weight: one, or one for each expert."""
        names = [f"{base}.scale" for base in _bases(group.name)]
        found = [self.source.tensors[name] for name in names if name in self.source.tensors]
        if len(found) > 1:
            rule, fix = "a weight has one tensor of factors", "Export the file again"
            self.refuse(group.name, rule, names, fix)
        if not found:
            return None
        legal: list[tuple[int, ...]] = [(1,), ()]
        if len(group.shape) == 3:
            legal += [group.shape[:1], (group.shape[0], 1, 1)]
        self.expect(found[0], legal, ["F32"], f"{group.name} {list(group.shape)}, {NVFP4},")
        return found[0]

    def read(self, group: Group, stored: Loaded) -> QuantizedTensor | DenseOnly:
        """Return the quantized tensor of a weight, with its nibbles in our order."""
        blocks, quantizer = stored["codes"], group.quantizer
        if quantizer.format == "mxfp4":
            codes = _elements_to_pairs(blocks[..., 1:], 16).flatten(-2)
            parts = Parts(codes, blocks[..., 0].contiguous())
            return assemble(quantizer, group.shape, group.dtype, parts)
        scale = blocks[..., :4]
        if bool((scale == 255).any()):
            return DenseOnly("a block factor of 0xFF, which ggml decodes to 480")
        # ggml ignores the sign of a factor, and decodes 0x7F, our NaN, to 0.
        scale = scale & 127
        scale = torch.where(scale == 127, 0, scale)
        codes = _elements_to_pairs(blocks[..., 4:], 8).flatten(-2)
        found = self._tensor_factor(group, stored)
        parts = Parts(codes, scale.flatten(-2), found.amax, found.factor)
        return assemble(found.quantizer, group.shape, group.dtype, parts)

    def _tensor_factor(self, group: Group, stored: Loaded) -> TensorFactor:
        """Return the amax of an NVFP4 weight from the factor in its sidecar; 2688 without one."""
        if "factor" not in stored:
            return TensorFactor(NVFP4Quantizer(), torch.tensor([AMAX], dtype=torch.float32))
        return from_factors(self._factor(group, stored), group.shape[-2])

    def _factor(self, group: Group, stored: Loaded) -> Tensor:
        """Return the tensor factors of a weight, checked."""
        rule = "tensor factors are finite and not negative"
        return self.tensor_factor(group, stored, rule, "Export the file again")

    def rows_apart(self, group: Group) -> bool:
        """Return True for types that are dense only: a row is whole blocks."""
        return group.scheme in DECODERS

    def decode(self, group: Group, stored: Loaded, dtype: torch.dtype) -> Tensor:
        """Return element times block factor in float32, as llama.cpp; a tensor factor rounds once.

        It is exact but for types with an offset, whose subtraction rounds.
        """
        blocks = stored["codes"]
        if group.scheme in DECODERS:
            return DECODERS[group.scheme](blocks).reshape(group.shape).to(dtype)
        if group.quantizer.format == "mxfp4":
            elements = arithmetic.e2m1(_elements_to_pairs(blocks[..., 1:], 16))
            factors = arithmetic.e8m0(blocks[..., :1])
        else:
            elements = arithmetic.e2m1(_elements_to_pairs(blocks[..., 4:], 8))
            elements = elements.unflatten(-1, (4, 16))
            factors = _e4m3_values()[blocks[..., :4].int()].unsqueeze(-1)
        values = (elements * factors).reshape(group.shape)
        if "factor" in stored:
            values *= arithmetic.broadcast(self._factor(group, stored))
        return values.to(dtype)


def _bases(name: str) -> list[str]:
    """Return what precedes ``.scale`` in the names of factors: one producer keeps ``.weight``."""
    return list(dict.fromkeys((name.removesuffix(".weight"), name)))


def _e4m3_values() -> Tensor:
    """Return the factor of each byte as in ggml: no sign, 0x7F is 0, and 0xFF is 480."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8) & 127
    values = arithmetic.float8(codes)
    values[127], values[255] = 0.0, 480.0
    return values


def _elements_to_pairs(codes: Tensor, half: int) -> Tensor:
    """Return packed codes, low nibble first, from bytes with elements j and j + half in byte j."""
    runs = codes.unflatten(-1, (-1, half))
    low, high = runs & 15, runs >> 4
    first, second = (n[..., 0::2] | n[..., 1::2] << 4 for n in (low, high))
    return torch.cat((first, second), -1).flatten(-2)


def _pairs_to_elements(codes: Tensor, half: int) -> Tensor:
    """Invert ``_elements_to_pairs``."""
    runs = codes.unflatten(-1, (-1, half))
    first, second = runs[..., : half // 2], runs[..., half // 2 :]
    low, high = (torch.stack((n & 15, n >> 4), -1).flatten(-2) for n in (first, second))
    return (low | high << 4).flatten(-2)


class GGUFLayoutWriter(Writer):
    """Write a GGUF file.

    Key-values come from the open checkpoint that is written again, and from those keys of
    ``config`` that have a dot, such as ``"general.architecture"``.
    """

    layout = "gguf"
    formats = ("mxfp4 (K a multiple of 32)", "nvfp4 (K a multiple of 64)")
    suffix = ".gguf"
    factor_shape = (1,)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._entries: dict[str, GGUFEntry] = {}

    def encode(self, name: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
        """Return the blocks of a weight, and its tensor factor if that is not 1."""
        quantizer = quantizer_of(tensor)
        kind, shape = quantizer.spec.name.upper(), tuple(tensor.shape)
        if kind not in FILE_TYPES:
            rule = f"the layout holds {', '.join(self.formats)}"
            self.refuse(name, rule, quantizer.canonical)
        self.need_rowwise(name, tensor)
        size = TYPES[NUMBERS[kind]].block
        if not shape or shape[-1] % size:
            self.refuse(name, f"K is a multiple of {size}", shape, "Leave the weight plain")
        parts = rowwise_parts(tensor)
        codes, scale = parts.codes, parts.scale
        self._entries[name] = GGUFEntry(kind, shape)
        blocks = (*shape[:-1], shape[-1] // size)
        if kind == MXFP4:
            data = _pairs_to_elements(codes.reshape(*blocks, 16), 16)
            return {name: torch.cat((scale.reshape(*blocks, 1), data), -1)}
        if isinstance(quantizer, NVFP4Quantizer) and quantizer.with_rht:
            self.refuse(name, "NVFP4 has no rotation", quantizer.canonical)
        if not scale.is_meta and bool((scale > 126).any()):
            fix = "Leave the weight plain"
            self.refuse(name, "block factors are not negative or NaN", "such a factor", fix)
        data = _pairs_to_elements(codes.reshape(*blocks, 32), 8)
        stored = {name: torch.cat((scale.reshape(*blocks, 4), data), -1)}
        factors = factor_in(tensor, parts)
        if factors.is_meta or not bool((factors == 1).all()):
            stored |= self._sidecar(name, tensor, factors)
        return stored

    def _sidecar(self, name: str, tensor: QuantizedTensor, factors: Tensor) -> dict[str, Tensor]:
        """Return the tensor with the factor of a weight: one, or one for each expert."""
        found = factors if factors.numel() == 1 else expert_factors(factors, tuple(tensor.shape))
        if found is None:
            rule = "NVFP4 has one factor for the tensor, or one for each expert of a stack"
            self.refuse(name, rule, tensor.quantizer.canonical)
        names = [f"{base}.scale" for base in _bases(name)]
        known = self.source.tensors if self.source is not None else {}
        own = next((n for n in names if n in known), names[0])
        info = known.get(own)
        if info is not None and torch.Size(info.shape).numel() == found.numel():
            found = found.reshape(info.shape)
        self._entries[own] = GGUFEntry("F32", tuple(found.shape))
        return {own: found}

    def plain(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the tensor as it is."""
        kind = STORED_NAMES.get(tensor.dtype, str(tensor.dtype))
        if kind not in PLAIN:
            rule = f"plain tensors are {', '.join(PLAIN)}"
            self.refuse(name, rule, tensor.dtype, "Convert the tensor")
        self._entries[name] = GGUFEntry(kind, tuple(tensor.shape))
        return {name: tensor}

    def open_file(
        self, path: str, specs: Iterable[TensorSpec], names: Iterable[str]
    ) -> SafetensorsWriter:
        """Return an open GGUF file."""
        return GGUFFileWriter(path, specs, self._entries, self._key_values())

    def _key_values(self) -> dict[str, GGUFValue]:
        """Return the key-values; ``general.file_type`` says which type is the most frequent."""
        kinds = [entry.type for entry in self._entries.values()]
        pairs: dict[str, Any] = {"general.architecture": "unknown"}
        if self.source is not None and self.source.kind == "gguf":
            pairs |= self.source.extra["key_values"]
        pairs |= {key: value for key, value in self.model_config.items() if "." in key}
        for key in ("general.alignment", *KEYS):
            pairs.pop(key, None)
        quantized = [kind for kind in kinds if kind in FILE_TYPES]
        if quantized:
            pairs["general.file_type"] = FILE_TYPES[max(FILE_TYPES, key=quantized.count)]
            pairs.setdefault("general.quantization_version", 2)
        else:
            plain = {kind for kind in kinds if kind in PLAIN_FILE_TYPES} - {"F32"}
            pairs["general.file_type"] = PLAIN_FILE_TYPES[min(plain, default="F32")]
        place = Place("", "", self.layout)
        return {key: gguf_value(value, place) for key, value in pairs.items()}

    def notes(self) -> list[str]:
        """Return whose names a model of transformers has in the file."""
        if "model_type" not in self.model_config:
            return []
        return ["names are the source's; qtensor.integrations.gguf.save_gguf writes llama.cpp's"]

    def config(self) -> dict[str, Any]:
        """Return no config.json: a GGUF file holds its key-values."""
        return {}


GGUFLayout.writer = GGUFLayoutWriter
