"""Read and write checkpoints of AMD Quark.

docs/checkpoints.md has the table of schemes. All factors multiply.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtensor.api import quantizer_of
from qtensor.checkpoints import arithmetic
from qtensor.checkpoints.buffers import kind_of, rowwise_parts
from qtensor.checkpoints.containers.base import STORED_TYPES, TensorInfo
from qtensor.checkpoints.ignoring import WILDCARD
from qtensor.checkpoints.layout_base import DenseOnly, Group, Layout, Loaded, Source, Target, Writer
from qtensor.core.buffer_shapes import ceil_div
from qtensor.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8RowwiseQuantizer,
    MXFP4Quantizer,
    MXFP6Quantizer,
    Quantizer,
)
from qtensor.storage.tensor import QuantizedTensor

METHOD = "quark"
_FLOATS = ("F32", "BF16", "F16")
_CODES = ("F8_E4M3", "F8_E5M2", "U8", "I8")
_SECOND = (
    "weight_2",
    "weight_scale_scale",
    "weight_zero_point",
    *(
        f"{part}_{kind}_2"
        for part in ("weight", "input", "output")
        for kind in ("scale", "zero_point")
    ),
)
"""Last name parts of a second level of factors, and of factors that are not symmetric."""
_FIX = "Check config.json against the file, or download the missing shard"
_READ = "fp4, fp6_e2m3 and fp6_e3m2 (per_group 32, e8m0), fp8_e4m3 (per_tensor, per_channel on axis"
_READ += " 0, per_block)"


class Scheme(NamedTuple):
    """Describe the ``weight`` entry of a quantization config.

    Attributes:
        dtype: ``"fp4"``, ``"fp6_e2m3"``, ``"fp6_e3m2"`` or ``"fp8_e4m3"``.
        qscheme: ``"per_group"``, ``"per_tensor"``, ``"per_channel"`` or ``"per_block"``.
        block: (rows, columns) that share a factor of ``per_block``, or None.
    """

    dtype: str
    qscheme: str
    block: tuple[int, int] | None = None


class Problem(NamedTuple):
    """Say which entry is not read."""

    text: str


_BLOCKS = Float8BlockQuantizer(block_scaling_dim=2, force_pow_2_scales=False)
_QUANTIZERS: dict[tuple[str, str], Quantizer] = {
    ("fp4", "per_group"): MXFP4Quantizer(),
    ("fp6_e2m3", "per_group"): MXFP6Quantizer(packed=True),
    ("fp6_e3m2", "per_group"): MXFP6Quantizer(dtype="e3m2", packed=True),
    ("fp8_e4m3", "per_tensor"): Float8CurrentScalingQuantizer(),
    ("fp8_e4m3", "per_channel"): Float8RowwiseQuantizer(),
    ("fp8_e4m3", "per_block"): _BLOCKS,
}
_BYTES = {"fp4": 16, "fp6_e2m3": 24, "fp6_e3m2": 24, "fp8_e4m3": 32}
"""Bytes of the codes of 32 elements."""


class QuarkLayout(Layout):
    """Read Quark checkpoints."""

    name = METHOD
    rank = 65
    methods = (METHOD,)
    kv_factors = ("k_proj.output_scale", "v_proj.output_scale")
    factor_names = frozenset({"input_scale", "output_scale", "k_scale", "v_scale"})

    def __init__(self, source: Source, **options: object) -> None:
        super().__init__(source, **options)
        config = source.quantization
        self._fake = self._table("export").get("weight_format") == "fake_quantized"
        self._default = _scheme(config.get("global_quant_config"))
        if isinstance(self._default, Problem):
            self._refuse_scheme("", self._default)
        layers = self._table("layer_quant_config")
        self._layers = {name: _scheme(entry) for name, entry in layers.items()}
        self._patterns = [name for name in self._layers if set(name) & set("*?[")]
        types = self._table("layer_type_quant_config")
        self._types = [_scheme(e) for name, e in types.items() if name.endswith("Linear")]

    def _table(self, key: str) -> Mapping[str, Any]:
        table = self.source.quantization.get(key) or {}
        if not isinstance(table, dict):
            self.refuse("", f"{key} is an object", repr(table), "Check config.json")
        return table

    def _refuse_scheme(self, tensor: str, problem: Problem) -> None:
        fix = "Read it with Quark, or export it in one of these schemes"
        self.refuse(tensor, f"the weights that are read are {_READ}", problem.text, fix)

    def _scheme_of(self, weight: TensorInfo) -> Scheme:
        """Return the scheme of a weight that is stored as codes: its own, its type's, the global.

        An entry without ``weight`` leaves the weight to the next one.
        """
        module = weight.name.removesuffix("weight").removesuffix(".")
        own = self._layers.get(module)
        if own is None:
            fits = (p for p in self._patterns if fnmatch.fnmatchcase(module, p))
            own = next((self._layers[p] for p in fits if self._layers[p]), None)
        found = own or next(filter(None, self._types), None) or self._default
        if isinstance(found, Problem):
            self._refuse_scheme(weight.name, found)
        if self._fake or not isinstance(found, Scheme):
            rule = 'weight_format "fake_quantized" means dense weights'
            if not self._fake:
                rule = "the config has a scheme for each quantized weight"
            got = f"{weight.dtype} {list(weight.shape)}"
            self.refuse(weight.name, rule, got, "Check config.json against the file")
        return found

    def groups(self) -> Iterable[Group]:
        """Return a group for each module that has a factor."""
        tensors = self.source.tensors
        used: set[str] = set()
        for name, weight in tensors.items():
            if name.rpartition(".")[2] != "weight":
                continue
            factor = tensors.get(f"{name}_scale")
            if weight.dtype not in _CODES and (factor is None or self._fake):
                used |= {f"{name}_scale"} if self._fake else set()
                continue
            scheme = self._scheme_of(weight)
            for last in _SECOND:
                if name.removesuffix("weight") + last in tensors:
                    rule = "weights and activations have one level of symmetric factors"
                    self.refuse(name, rule, last, "Read it with Quark")
            if factor is None:
                self.refuse(name, "a quantized weight has a weight_scale", "none", _FIX)
            used |= {name, factor.name}
            yield self._group(weight, factor, scheme)
        self.refuse_leftovers(used)
        for name, info in tensors.items():
            if name.rpartition(".")[2] == "weight_scale" and name not in used:
                got = f"a factor {list(info.shape)} without one"
                self.refuse(name, "each factor has a weight", got, _FIX)

    def _group(self, weight: TensorInfo, factor: TensorInfo, scheme: Scheme) -> Group:
        """Return the group of a weight after checking its shapes."""
        if len(weight.shape) != 2:
            rule = "a weight has two dims"
            self.refuse(weight.name, rule, list(weight.shape), "Export each expert by itself")
        is_fp8 = scheme.dtype == "fp8_e4m3"
        what = f"{scheme.dtype} {scheme.qscheme}"
        self.expect(weight, [weight.shape], ["F8_E4M3" if is_fp8 else "U8"], what)
        rows, width = weight.shape
        if scheme.dtype.startswith("fp6") and width % 3:
            rule = "packed FP6 has three bytes for four codes"
            self.refuse(weight.name, rule, list(weight.shape), "Export it again")
        cols = width * 32 // _BYTES[scheme.dtype]
        legal: list[tuple[int, ...]] = [(), (1,)]
        dtypes: tuple[str, ...] = _FLOATS
        target: Target = _QUANTIZERS[scheme.dtype, scheme.qscheme]
        if scheme.qscheme == "per_group":
            legal, dtypes = [(rows, ceil_div(cols, 32))], ("U8", "F8_E8M0")
        elif scheme.qscheme == "per_channel":
            legal = [(rows,)]
        elif scheme.block is not None:
            height, breadth = scheme.block
            what += f" {height}x{breadth}"
            legal = [(ceil_div(rows, height), ceil_div(cols, breadth))]
            if scheme.block != (128, 128):
                target = DenseOnly(f"FP8 blocks of {height}x{breadth}; ours are 128x128")
        self.expect(factor, legal, dtypes, f"{weight.name} {list(weight.shape)}, {what},")
        half = STORED_TYPES[factor.dtype].torch_dtype if factor.dtype in _FLOATS[1:] else None
        dtype = self.source.model_dtype or half or torch.bfloat16
        roles = {"codes": weight, "scale": factor}
        return Group(weight.name, roles, (rows, cols), dtype, target, what, scheme)

    def rows_apart(self, group: Group) -> bool:
        """Return True unless blocks have another height than 1 or 128."""
        return group.options.block is None or group.options.block[0] in (1, 128)

    def decodes_as_ours(self, group: Group, dtype: torch.dtype) -> bool:
        """Return True: the layout rounds the product once."""
        return True

    def decode(self, group: Group, stored: Loaded, dtype: torch.dtype) -> Tensor:
        """Return code times factor in float32, rounded once to ``dtype`` (class P)."""
        codes, scale, scheme = stored["codes"], stored["scale"], group.options
        if scheme.dtype == "fp8_e4m3":
            factors = scale.reshape(-1, 1)
            if scheme.block is not None:
                factors = arithmetic.spread(scale.float(), scheme.block, group.shape)
            return arithmetic.product(arithmetic.float8(codes), factors, dtype)
        factors = arithmetic.spread(arithmetic.e8m0(scale), (1, 32), group.shape)
        if scheme.dtype == "fp4":
            elements = arithmetic.e2m1(codes)
        else:
            elements = arithmetic.fp6(codes, 2 if scheme.dtype == "fp6_e2m3" else 3)
        return arithmetic.product(elements, factors, dtype)


def _scheme(entry: object) -> Scheme | Problem | None:
    """Return the scheme of the weights of an entry, why it is not read, or None for dense."""
    if entry is None:
        return None
    if not isinstance(entry, dict):
        return Problem(f"an entry that is {entry!r}")
    weight = entry.get("weight")
    if weight is None:
        return None
    if not isinstance(weight, dict):
        return Problem(
            f"a weight of {len(weight)} levels" if isinstance(weight, list) else "no dict"
        )
    dtype, qscheme = str(weight.get("dtype")), str(weight.get("qscheme"))
    named = {
        key: weight.get(key) for key in ("group_size", "ch_axis", "block_size", "scale_format")
    }
    found = f"dtype {dtype}, {qscheme}, " + ", ".join(f"{k} {v!r}" for k, v in named.items())
    if (dtype, qscheme) not in _QUANTIZERS:
        return Problem(found)
    if qscheme == "per_group":
        fits = weight.get("group_size") == 32 and weight.get("scale_format") == "e8m0"
        return Scheme(dtype, qscheme) if fits else Problem(found)
    if qscheme == "per_channel":
        return Scheme(dtype, qscheme) if weight.get("ch_axis") == 0 else Problem(found)
    if qscheme == "per_tensor":
        return Scheme(dtype, qscheme)
    block = weight.get("block_size") or weight.get("group_size")
    if not isinstance(block, list) or len(block) != 2:
        return Problem(found)
    if any(type(n) is not int or not 0 < n < 2**31 for n in block):
        return Problem(found)
    return Scheme(dtype, qscheme, (block[0], block[1]))


class QuarkWriter(Writer):
    """Write Quark checkpoints."""

    layout = METHOD
    ignore_style = WILDCARD
    formats = ("fp8", "fp8_rowwise", "fp8_blockwise (128x128)", "mxfp4", "mxfp6 (packed)")

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._weights: dict[str, Scheme] = {}

    def encode(self, name: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
        """Return the codes and the factors of a weight."""
        if not name.endswith(".weight") or tensor.ndim != 2:
            rule = "quantized tensors are the 2-D 'weight' of a module"
            self.refuse(name, rule, f"{tuple(tensor.shape)} named {name!r}")
        self.need_rowwise(name, tensor)
        scheme = self._scheme(name, tensor)
        self._weights[name.removesuffix(".weight")] = scheme
        codes, scale, *_ = rowwise_parts(tensor)
        if scheme.dtype == "fp8_e4m3":
            codes = codes.view(torch.float8_e4m3fn)
            if scheme.qscheme != "per_block":
                scale = self.narrowed(name, scale, tensor.dtype)
                scale = scale.reshape(() if scheme.qscheme == "per_tensor" else -1)
        return {name: codes, f"{name}_scale": scale}

    def _scheme(self, name: str, tensor: QuantizedTensor) -> Scheme:
        """Return the scheme that holds a tensor."""
        quantizer = quantizer_of(tensor)
        kind, canonical = kind_of(quantizer), quantizer.canonical
        if kind == "mxfp4":
            return Scheme("fp4", "per_group")
        if isinstance(quantizer, MXFP6Quantizer):
            if not quantizer.packed:
                self.refuse(name, "FP6 codes are packed", canonical, "Quantize with packed=True")
            return Scheme(f"fp6_{quantizer.element.name}", "per_group")
        if not kind.startswith("fp8") or quantizer.element.name != "e4m3":
            self.refuse(name, f"the layout holds {_READ}", canonical)
        if kind == "fp8_groups":
            self.refuse(name, "the blocks of FP8 are 128x128", canonical)
        if kind == "fp8_columns":
            self.refuse(name, "factors belong to rows", canonical)
        if kind == "fp8_blockwise":
            return Scheme("fp8_e4m3", "per_block", (128, 128))
        return Scheme("fp8_e4m3", "per_tensor" if kind == "fp8" else "per_channel")

    def _entry(self, scheme: Scheme, modules: list[str]) -> dict[str, Any]:
        """Return the config of the modules of a scheme."""
        inputs = outputs = None
        if all(f"{module}.output_scale" in self.plain_dims for module in modules):
            outputs = _tensor_config(Scheme("fp8_e4m3", "per_tensor"))
        if all(f"{module}.input_scale" in self.plain_dims for module in modules):
            inputs = _tensor_config(Scheme("fp8_e4m3", "per_tensor"))
        return {
            "bias": None,
            "input_tensors": inputs,
            "output_tensors": outputs,
            "target_device": None,
            "weight": _tensor_config(scheme),
        }

    def config(self) -> dict[str, Any]:
        """Return the config with ``quantization_config``; the global scheme is the commonest."""
        if not self._weights:
            return self.model_config
        ((common, _),) = Counter(self._weights.values()).most_common(1)
        # Loaders look for the factors of the KV cache in the entries of these modules.
        cache = [m for m in self._weights if f"{m}.output_scale" in self.plain_dims]
        modules = [m for m, s in self._weights.items() if s == common and m not in cache]
        layers = {
            module: self._entry(scheme, [module])
            for module, scheme in self._weights.items()
            if scheme != common or module in cache
        }
        entry: dict[str, Any] = {
            "quant_method": METHOD,
            "algo_config": None,
            "exclude": self.ignored(self._weights),
            "export": {
                "kv_cache_group": cache,
                "min_kv_scale": 0.0,
                "pack_method": "reorder",
                "weight_format": "real_quantized",
                "weight_merge_groups": None,
            },
            "global_quant_config": self._entry(common, modules or list(self._weights)),
            "kv_cache_quant_config": {},
            "layer_quant_config": layers,
            "layer_type_quant_config": {},
            "quant_mode": "eager_mode",
            "softmax_quant_spec": None,
            "version": "0.13",
        }
        return {**self.model_config, "quantization_config": entry}


def _tensor_config(scheme: Scheme) -> dict[str, Any]:
    """Return the entry of one tensor as Quark writes it."""
    groups = scheme.qscheme == "per_group"
    observers = {
        "per_group": "PerBlockMXObserver",
        "per_tensor": "PerTensorMinMaxObserver",
        "per_channel": "PerChannelMinMaxObserver",
        "per_block": "PerBlock2DMinMaxObserver",
    }
    return {
        "block_size": list(scheme.block) if scheme.block else None,
        "ch_axis": {"per_group": -1, "per_channel": 0}.get(scheme.qscheme),
        "dtype": scheme.dtype,
        "group_size": 32 if groups else None,
        "is_dynamic": False,
        "is_scale_quant": False,
        "mx_element_dtype": None,
        "observer_cls": observers[scheme.qscheme],
        "qscheme": scheme.qscheme,
        "round_method": "half_even",
        "scale_calculation_mode": "even" if groups else None,
        "scale_format": "e8m0" if groups else None,
        "scale_type": "float",
        "symmetric": None if groups else True,
        "zero_point_type": "int32",
    }


QuarkLayout.writer = QuarkWriter
