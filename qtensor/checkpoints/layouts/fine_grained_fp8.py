"""Read and write fine-grained FP8: DeepSeek, transformers' ``fp8`` and Mistral.

The factor multiplies, although its name is ``weight_scale_inv``. docs/checkpoints.md has the table
of variants.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from qtensor import api
from qtensor.api import quantizer_of
from qtensor.checkpoints import arithmetic
from qtensor.checkpoints.buffers import Parts, assemble, kind_of, rowwise_parts
from qtensor.checkpoints.containers.base import STORED_TYPES, TensorInfo
from qtensor.checkpoints.layout_base import (
    FACTOR,
    DenseOnly,
    Group,
    Layout,
    Loaded,
    Source,
    Target,
    Writer,
)
from qtensor.core.buffer_shapes import ceil_div
from qtensor.quantizers import Float8BlockQuantizer
from qtensor.storage.tensor import QuantizedTensor

METHODS = ("fp8", "mxfp8")
Block = tuple[int, int]
_FACTORS = ("weight_scale_inv", "scale", "qscale_weight")
"""Last name part of the factor of ``x.weight``."""
_STACKED = ("_scale_inv", "_scales_inv")
"""What follows the name of stacked experts in the name of their factor."""
_FLOATS = ("F32", "BF16", "F16")
_POWERS = ("U8", "F8_E8M0")
_BLOCKS = {(128, 128): 2, (1, 128): 1}
"""Block -> ``block_scaling_dim`` of its quantizer."""
_FIX = "Check config.json against the file, or download the missing shard"


class FineGrainedFP8Layout(Layout):
    """Read checkpoints with ``quant_method`` fp8 or mxfp8."""

    name = "fine-grained-fp8"
    rank = 61
    methods = METHODS
    factor_names = frozenset({
        "input_scale",
        "activation_scale",
        "qscale_act",
        "k_scale",
        "v_scale",
    })
    input_factors: ClassVar[Mapping[str, Any]] = dict.fromkeys(
        ("input_scale", "activation_scale", "qscale_act"), FACTOR
    )

    def __init__(self, source: Source, **options: object) -> None:
        super().__init__(source, **options)
        config = source.quantization
        block = config.get("weight_block_size")
        rule = "weight_block_size is null or two positive sizes"
        self.block: Block | None = None if block is None else self.pair(block, rule)
        if block is None and source.method == "mxfp8":
            self.block = (1, 32)
        self._told = "weight_block_size" in config or self.block is not None
        """False if the config does not have the key; the origin's default is then 128x128."""
        if config.get("fmt") not in (None, "e4m3", "float8_e4m3fn"):
            fix = "Export the checkpoint in e4m3"
            self.refuse("", "the elements that are read are e4m3", repr(config["fmt"]), fix)
        parts = (config, source.config, source.config.get("text_config"))
        dtypes = (part.get("expert_dtype") for part in parts if isinstance(part, dict))
        said = {str(dtype) for dtype in dtypes if dtype is not None}
        self._experts = "fp4" if "fp4" in said or not said else min(said)

    def groups(self) -> Iterable[Group]:
        """Return a group for each float8 or packed FP4 weight; each needs its factor."""
        used: set[str] = set()
        for name, weight in self.source.tensors.items():
            if weight.dtype not in ("F8_E4M3", "I8") or self._is_factor(name):
                continue
            if weight.dtype == "I8" and not name.endswith(".weight"):
                continue
            factors = self._factors(name)
            if len(factors) != 1:
                got = [info.name for info in factors] or "none"
                self.refuse(name, "a float8 or packed FP4 weight has one factor", got, _FIX)
            used |= {name, factors[0].name}
            yield self._group(weight, factors[0])
        self.refuse_leftovers(used)
        for name, info in self.source.tensors.items():
            if name not in used and name.endswith((*_STACKED, "qscale_weight")):
                rule = "each factor has a float8 weight"
                self.refuse(name, rule, f"a factor {list(info.shape)} without one", _FIX)

    def _is_factor(self, name: str) -> bool:
        last = name.rpartition(".")[2]
        return last in _FACTORS or last in self.factor_names or last.endswith(_STACKED)

    def _factors(self, name: str) -> list[TensorInfo]:
        """Return the factors beside a weight; a ``.scale`` counts beside a ``.weight`` alone."""
        names = [name + suffix for suffix in _STACKED]
        if name.endswith(".weight"):
            names = [name.removesuffix("weight") + factor for factor in _FACTORS]
        return [self.source.tensors[n] for n in names if n in self.source.tensors]

    def _group(self, weight: TensorInfo, factor: TensorInfo) -> Group:
        """Return the group of a weight after checking its shapes."""
        shape, block = weight.shape, self.block
        if not self._told and len(factor.shape) > 1:
            block = (128, 128)
        if weight.dtype == "I8":
            if self._experts != "fp4":
                rule = 'I8 weights are packed FP4, which expert_dtype "fp4" says'
                self.refuse(weight.name, rule, repr(self._experts), _FIX)
            shape, block = (*shape[:-1], 2 * shape[-1] if shape else 0), (1, 32)
        if len(shape) not in (2, 3):
            rule = "a weight has two dims, and stacked experts three"
            self.refuse(weight.name, rule, list(shape), "Export the checkpoint again")
        lead = shape[:-2]
        if block is None:
            legal: list[tuple[int, ...]] = [(), (1,)] + [(*lead, 1, 1), lead] * bool(lead)
            why = f"{weight.name} {list(shape)}, one factor a tensor,"
        else:
            legal = [(*lead, ceil_div(shape[-2], block[0]), ceil_div(shape[-1], block[1]))]
            why = f"{weight.name} {list(shape)} in blocks of {block[0]}x{block[1]}"
        dtypes = _POWERS if weight.dtype == "I8" else (*_FLOATS, *_POWERS)
        self.expect(factor, legal, dtypes, why)
        roles = {"codes": weight, "scale": factor}
        target = self._target(shape, block, weight, factor)
        kind = "per tensor" if block is None else f"{block[0]}x{block[1]}"
        scheme = f"{'fp4' if weight.dtype == 'I8' else 'fp8'} {kind}, {factor.dtype} factors"
        return Group(weight.name, roles, shape, self._dtype(factor), target, scheme, block)

    def _dtype(self, factor: TensorInfo) -> torch.dtype:
        """Return the model's dtype, else the factor's if it is a float of 16 bits or more."""
        own = STORED_TYPES[factor.dtype].torch_dtype if factor.dtype in _FLOATS else torch.bfloat16
        return self.source.model_dtype or own

    def _target(
        self, shape: tuple[int, ...], block: Block | None, weight: TensorInfo, factor: TensorInfo
    ) -> Target:
        """Return the quantizer of a weight, or why there is none."""
        powers = factor.dtype in _POWERS
        if weight.dtype == "I8":
            return api.quantizer("mxfp4")
        if block is None:
            one = torch.Size(factor.shape).numel() == 1
            return (
                api.quantizer("fp8") if one else DenseOnly("one factor for each expert of a stack")
            )
        if block == (1, 32) and powers:
            return api.quantizer("mxfp8")
        if block not in _BLOCKS:
            kind = "E8M0" if powers else "float"
            return DenseOnly(f"FP8 blocks of {block[0]}x{block[1]} with {kind} factors")
        if len(shape) == 3 and shape[1] % block[0]:
            return DenseOnly(f"{shape[1]} rows of an expert are not whole blocks of {block[0]}")
        pow2 = powers or self.source.quantization.get("scale_fmt") == "ue8m0"
        return Float8BlockQuantizer(block_scaling_dim=_BLOCKS[block], force_pow_2_scales=pow2)

    def read(self, group: Group, stored: Loaded) -> QuantizedTensor | DenseOnly:
        """Return the quantized tensor of a weight."""
        codes, scale = stored["codes"], stored["scale"]
        if group.quantizer.format.startswith("fp8"):
            scale = _widened(scale)
        return assemble(group.quantizer, group.shape, group.dtype, Parts(codes, scale))

    def rows_apart(self, group: Group) -> bool:
        """Return True unless blocks have another height than 1 or 128."""
        return group.options is None or group.options[0] in (1, 128)

    def decodes_as_ours(self, group: Group, dtype: torch.dtype) -> bool:
        """Return True: the layout rounds the product once."""
        return True

    def decode(self, group: Group, stored: Loaded, dtype: torch.dtype) -> Tensor:
        """Return code times factor in float32, rounded once to ``dtype`` (class P)."""
        codes, scale = stored["codes"], stored["scale"]
        is_fp4 = group.roles["codes"].dtype == "I8"
        elements = arithmetic.e2m1(codes) if is_fp4 else arithmetic.float8(codes)
        powers = group.roles["scale"].dtype in _POWERS
        factors = arithmetic.e8m0(scale) if powers else scale.float()
        if group.options is not None:
            factors = arithmetic.spread(factors, group.options, group.shape)
        else:
            factors = arithmetic.broadcast(factors)
        return arithmetic.product(elements, factors, dtype)


def _widened(scale: Tensor) -> Tensor:
    """Return factors as float32; E8M0 codes become powers of two, and 255 becomes NaN."""
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return scale.view(torch.float8_e8m0fnu).float()
    return scale.float()


class FineGrainedFP8Writer(Writer):
    """Write fine-grained FP8 with the names that transformers and DeepSeek V3 use.

    MXFP4 experts are written as DeepSeek V4 stores them: I8 codes with a ``.scale``.
    """

    layout = "fine-grained-fp8"
    formats = ("fp8", "fp8_blockwise (128x128)", "mxfp8", "mxfp4 (experts)")
    input_factors: ClassVar[Mapping[str, Any]] = {"": ("activation_scale", FACTOR)}

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._blocks: dict[str, list[int] | None] = {}
        self._fp4_names: list[str] = []
        self._has_activations = False
        self._names: dict[str, str] = {}
        """Weight -> name of its factor."""

    def encode(self, name: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
        """Return the codes and the factor of a weight or of stacked experts."""
        quantizer = quantizer_of(tensor)
        spec, canonical = quantizer.spec.name, quantizer.canonical
        self.need_rowwise(name, tensor)
        if spec != "mxfp4" and quantizer.element.name != "e4m3":
            self.refuse(name, "the elements of FP8 are e4m3", canonical)
        parts = rowwise_parts(tensor)
        if spec == "mxfp4":
            return self._fp4(name, tensor, parts)
        block, scale = self._block_and_factor(name, tensor, parts)
        self._blocks[name] = block
        if not name.endswith(".weight") and (tensor.ndim != 3 or block is None):
            rule = "a weight ends in '.weight', and stacked experts have three dims"
            self.refuse(name, rule, f"{tuple(tensor.shape)} named {name!r}")
        factor = self._factor_name(name, f"{name}_scale_inv", tensor)
        return {name: parts.codes.view(torch.float8_e4m3fn), factor: scale}

    def _factor_name(self, name: str, default: str, tensor: QuantizedTensor) -> str:
        """Return the name of a factor; a copy keeps the name in the source."""
        if name not in self._names:
            stored = self.copied.tensors if self.copied and not tensor.is_meta else {}
            names = [name + suffix for suffix in _STACKED]
            if name.endswith(".weight"):
                names = [name.removesuffix("weight") + last for last in _FACTORS]
            self._names[name] = next((n for n in names if n in stored), default)
        return self._names[name]

    def _block_and_factor(
        self, name: str, tensor: QuantizedTensor, parts: Parts
    ) -> tuple[list[int] | None, Tensor]:
        """Return the block of the config and the factor of a weight."""
        kind, shape = kind_of(quantizer_of(tensor)), tuple(tensor.shape)
        if kind == "fp8":
            return None, parts.scale.reshape(())
        if kind == "fp8_blockwise":
            if len(shape) == 3 and shape[1] % 128:
                rule = "the rows of each expert are whole blocks of 128"
                self.refuse(name, rule, shape)
            rows, cols = ceil_div(shape[-2], 128), ceil_div(shape[-1], 128)
            return [128, 128], parts.scale.reshape(*shape[:-2], rows, cols)
        if kind == "mxfp8":
            return [1, 32], parts.scale.reshape(*shape[:-1], -1)
        rule = f"the layout holds {', '.join(self.formats)}"
        self.refuse(name, rule, tensor.quantizer.canonical)

    def _fp4(self, name: str, tensor: QuantizedTensor, parts: Parts) -> dict[str, Tensor]:
        if not name.endswith(".weight"):
            self.refuse(name, "an FP4 expert is the 'weight' of a module", name)
        self._fp4_names.append(name)
        scale = parts.scale.reshape(*tensor.shape[:-1], -1)
        factor = self._factor_name(name, f"{name.removesuffix('weight')}scale", tensor)
        return {name: parts.codes.view(torch.int8), factor: scale.view(torch.float8_e8m0fnu)}

    def plain(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the tensor as it is."""
        self._has_activations |= name.endswith((".activation_scale", ".qscale_act"))
        return super().plain(name, tensor)

    def config(self) -> dict[str, Any]:
        """Return the config with ``quantization_config``."""
        if not self._blocks and not self._fp4_names:
            return self.model_config
        blocks = {str(block): block for block in self._blocks.values()}
        if len(blocks) > 1:
            rule = "one checkpoint has one weight_block_size"
            self.refuse("", rule, " and ".join(blocks), "Quantize all weights to one format")
        # The origin reads static factors beside weights with one factor alone.
        static = self._has_activations and set(blocks) == {"None"}
        entry = {
            "quant_method": "fp8",
            "activation_scheme": "static" if static else "dynamic",
            "fmt": "e4m3",
            "weight_block_size": next(iter(blocks.values()), [128, 128]),
            "modules_to_not_convert": self.ignored((*self._blocks, *self._fp4_names)),
        }
        if self._fp4_names:
            entry["expert_dtype"] = "fp4"
        said = self.copied.quantization.get("scale_fmt") if self.copied else None
        if said in ("float", "ue8m0"):
            entry["scale_fmt"] = said
        return {**self.model_config, "quantization_config": entry}


FineGrainedFP8Layout.writer = FineGrainedFP8Writer
