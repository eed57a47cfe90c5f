"""Read and write compressed-tensors checkpoints, as vLLM and llm-compressor make them.

docs/checkpoints.md has the table of formats. FP8 factors multiply; the NVFP4 tensor factor divides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from qtensor.checkpoints import arithmetic
from qtensor.checkpoints.buffers import Parts, assemble, rowwise_parts
from qtensor.checkpoints.containers.base import STORED_TYPES, TensorInfo
from qtensor.checkpoints.layout import (
    DIVISOR,
    FACTOR,
    DenseOnly,
    Group,
    Layout,
    Loaded,
    Source,
    Writer,
)
from qtensor.checkpoints.nvfp4_factor import divisor_of, from_divisor
from qtensor.checkpoints.patterns import Pattern
from qtensor.layout import ceil_div
from qtensor.quantizers import Quantizer
from qtensor.registry import parse
from qtensor.storage.tensor import QuantizedTensor

METHOD = "compressed-tensors"
FP8, NVFP4, MXFP4, MXFP6, MXFP8 = (
    "float-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp6-pack-quantized",
    "mxfp8-quantized",
)
_FORMATS = {
    FP8: FP8,
    "naive-quantized": FP8,
    NVFP4: NVFP4,
    MXFP4: MXFP4,
    MXFP6: MXFP6,
    MXFP8: MXFP8,
}
"""Formats that are read -> how their tensors lie."""
_DENSE = ("dense", None)
_FLOATS = ("F32", "BF16", "F16")
_SUFFIXES = ("weight_packed", "weight_scale", "weight_global_scale", "weight")
_ROLES = {"weight_scale": "scale", "weight_global_scale": "divisor"}


class Scheme(NamedTuple):
    """Describe one entry of ``config_groups``."""

    targets: tuple[str | Pattern, ...]
    format: str
    strategy: str
    block: tuple[int, int] | None
    """(rows, columns) that share an FP8 factor, or None."""

    def names(self, module: str) -> bool:
        """Return True if a target names the module, exactly or by a ``re:`` pattern."""
        return any(
            target.matches(module) if isinstance(target, Pattern) else target == module
            for target in self.targets
        )


class CompressedTensorsLayout(Layout):
    """Read compressed-tensors checkpoints.

    ``open`` takes ``accept_rotated=True`` to read the rotated weights of a checkpoint with a
    ``transform_config`` as they are stored.
    """

    name = METHOD
    rank = 60
    factor_names = frozenset({"input_scale", "input_global_scale", "k_scale", "v_scale"})
    input_factors: ClassVar[Mapping[str, Any]] = {
        "input_scale": FACTOR,
        "input_global_scale": DIVISOR,
    }
    rows_apart = True
    options = ("accept_rotated",)

    def __init__(self, source: Source, **options: Any) -> None:
        super().__init__(source, **options)
        config = source.quantization
        if config.get("transform_config") and not options.get("accept_rotated"):
            fix = "Pass accept_rotated=True to read the rotated values"
            self.refuse("", "weights that a transform rotated are refused", "transform_config", fix)
        sparsity = config.get("sparsity_config") or {}
        if isinstance(sparsity, dict) and sparsity.get("format") not in _DENSE:
            self._refuse_format(sparsity.get("format"))
        groups = config.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            got = type(groups).__name__
            self.refuse("", "the config has config_groups", got, "Check config.json")
        self._schemes = [self._scheme(key, config.get("format")) for key in groups.values()]

    @classmethod
    def recognises(cls, source: Source) -> bool:
        """Return True for ``quant_method: "compressed-tensors"``."""
        return source.method == METHOD

    def _refuse_format(self, name: object) -> None:
        fix = "Read it with compressed-tensors, or export it in one of these formats"
        self.refuse("", f"the formats that are read are {', '.join(_FORMATS)}", repr(name), fix)

    def _scheme(self, group: Any, default: Any) -> Scheme:
        """Return an entry of ``config_groups`` after checking it."""
        weights = group.get("weights") if isinstance(group, dict) else None
        targets = group.get("targets") if isinstance(group, dict) else None
        if not isinstance(weights, dict) or not isinstance(targets, list):
            rule = "a config group has targets and weights"
            self.refuse("", rule, repr(group), "Check config.json")
        name = group.get("format") or default
        if (
            not isinstance(name, str)
            or name not in _FORMATS
            or weights.get("type", "float") != "float"
        ):
            self._refuse_format(f"{name} of type {weights.get('type', 'float')}")
        strategy, block = str(weights.get("strategy")), None
        if _FORMATS[name] == FP8:
            if strategy == "block":
                block = self._block(weights.get("block_structure"))
            elif strategy == "group":
                block = self._block([1, weights.get("group_size")])
            elif strategy not in ("tensor", "channel"):
                rule = "the strategies of FP8 weights are tensor, channel, block and group"
                self.refuse("", rule, repr(strategy), "Check config.json")
        patterns = tuple(
            Pattern(text[3:], self.place()) if text.startswith("re:") else text
            for text in map(str, targets)
        )
        return Scheme(patterns, _FORMATS[name], strategy, block)

    def _block(self, sizes: Any) -> tuple[int, int]:
        ok = isinstance(sizes, list) and len(sizes) == 2
        if not ok or any(type(n) is not int or not 0 < n < 2**31 for n in sizes):
            rule = "block_structure or group_size gives two positive sizes"
            self.refuse("", rule, repr(sizes), "Check config.json")
        return sizes[0], sizes[1]

    # ---- groups

    def groups(self) -> Iterable[Group]:
        """Return a group for each module that has a factor."""
        tensors = self.source.tensors
        modules = {
            name.rpartition(".")[0] for name in tensors if name.rpartition(".")[2] in _SUFFIXES
        }
        for module in sorted(modules):
            found = {s: tensors[f"{module}.{s}"] for s in _SUFFIXES if f"{module}.{s}" in tensors}
            if "weight_packed" in found and "weight" in found:
                got = "both weight and weight_packed"
                self.refuse(f"{module}.weight", "a module has one weight", got, "Export it again")
            weight = found.get("weight_packed") or found.get("weight")
            if weight is None:
                fix = "Download the missing shard"
                self.refuse(next(iter(found.values())).name, "a factor has a weight", "none", fix)
            roles = {role: found[s] for s, role in _ROLES.items() if s in found}
            if "scale" in roles:
                yield self._group(module, {"codes": weight, **roles})
            elif roles or "weight_packed" in found or weight.dtype == "F8_E4M3":
                fix = "Download the missing shard, or export the checkpoint again"
                self.refuse(weight.name, "a quantized weight has weight_scale", "none", fix)

    def _group(self, module: str, roles: dict[str, TensorInfo]) -> Group:
        """Return the group of a module after checking its shapes."""
        weight = roles["codes"]
        for name in ("weight_zero_point", "weight_g_idx"):
            if f"{module}.{name}" in self.source.tensors:
                fix = "Read it with compressed-tensors"
                self.refuse(weight.name, "weights are symmetric and in order", name, fix)
        if len(weight.shape) != 2:
            rule = "a weight has two dims"
            self.refuse(weight.name, rule, list(weight.shape), "Export each expert by itself")
        found = self._found_format(weight, roles)
        scheme = self._scheme_of(module, weight, found, roles["scale"])
        make = self._fp8 if found == FP8 else self._blocks
        return make(f"{module}.weight", roles, scheme)

    def _found_format(self, weight: TensorInfo, roles: Mapping[str, TensorInfo]) -> str:
        """Return the format that the dtypes and shapes of a module show."""
        scale = roles["scale"]
        if "divisor" in roles:
            return NVFP4
        if not weight.name.endswith("weight_packed"):
            return MXFP8 if scale.dtype in ("U8", "F8_E8M0") else FP8
        wide = len(scale.shape) == 2 and weight.shape[1] == 24 * scale.shape[1]
        return MXFP6 if wide and scale.shape[1] else MXFP4

    def _scheme_of(self, module: str, weight: TensorInfo, found: str, scale: TensorInfo) -> Scheme:
        """Return the scheme of a module: by name, or the only one of the format that it shows."""
        fitting = [s for s in self._schemes if s.format == found]
        if found == FP8:
            fitting = [
                s for s in fitting if scale.shape in _factor_shapes(s, weight.shape)
            ] or fitting
        if len({s[1:] for s in fitting}) > 1:
            # The tensors do not tell the schemes apart, so the names of the targets decide.
            fitting = [s for s in fitting if s.names(module)]
        if len({s[1:] for s in fitting}) != 1:
            said = ", ".join(sorted({f"{s.format} ({s.strategy})" for s in self._schemes}))
            got = f"the tensors of {found}, factors {scale.dtype} {list(scale.shape)}"
            rule = f"the config says {said}, and one of its groups must fit"
            self.refuse(weight.name, rule, got, "Check config.json against the file")
        return fitting[0]

    def _fp8(self, name: str, roles: dict[str, TensorInfo], scheme: Scheme) -> Group:
        weight, scale = roles["codes"], roles["scale"]
        self.expect(weight, [weight.shape], ["F8_E4M3"], "an FP8 weight")
        why = f"{weight.name} {list(weight.shape)}, strategy {scheme.strategy}"
        if scheme.block:
            why += " {}x{}".format(*scheme.block)
        self.expect(scale, _factor_shapes(scheme, weight.shape), _FLOATS, why)
        dtype = STORED_TYPES[scale.dtype].torch_dtype
        target = _fp8_target(scheme)
        label = f"{FP8} {scheme.strategy}"
        return Group(name, roles, weight.shape, dtype, target, label, scheme)

    def _blocks(self, name: str, roles: dict[str, TensorInfo], scheme: Scheme) -> Group:
        """Return the group of an NVFP4 or MX weight."""
        weight, scale = roles["codes"], roles["scale"]
        rows, width = weight.shape
        factors = ["U8", "F8_E8M0"]
        cols, size = width, 32
        if scheme.format != MXFP8:
            cols = width * 4 // 3 if scheme.format == MXFP6 else width * 2
            if scheme.format == MXFP6 and width % 3:
                rule = "packed FP6 has three bytes for four codes"
                self.refuse(weight.name, rule, list(weight.shape), "Export it again")
        if scheme.format == NVFP4:
            size, factors = 16, ["F8_E4M3"]
            shapes: list[tuple[int, ...]] = [(1,), ()]
            self.expect(roles["divisor"], shapes, ["F32"], "NVFP4")
        codes = "F8_E4M3" if scheme.format == MXFP8 else "U8"
        self.expect(weight, [weight.shape], [codes], scheme.format)
        why = f"{weight.name} {list(weight.shape)}, {scheme.format}"
        self.expect(scale, [(rows, ceil_div(cols, size))], factors, why)
        target: Any = parse(_TARGETS[scheme.format])
        return Group(name, roles, (rows, cols), torch.bfloat16, target, scheme.format, scheme)

    # ---- reading

    def read(self, group: Group, stored: Loaded) -> QuantizedTensor | DenseOnly:
        """Return the quantized tensor of a module."""
        codes, scale = stored["codes"], stored["scale"]
        if group.options.format != NVFP4:
            quantizer = cast(Quantizer, group.target)
            return assemble(quantizer, group.shape, group.dtype, Parts(codes, scale))
        found = from_divisor(self._divisor(group, stored))
        if found is None:
            return DenseOnly("the reciprocal of weight_global_scale is not a normal float32")
        parts = Parts(codes, scale, found.amax, found.factor)
        return assemble(found.quantizer, group.shape, group.dtype, parts)

    def _divisor(self, group: Group, stored: Loaded) -> Tensor:
        """Return the global scale of an NVFP4 weight.

        Raises:
            CheckpointError: it is not a positive, finite number.
        """
        divisor = stored["divisor"]
        if not bool(torch.isfinite(divisor) & (divisor > 0)):
            rule = "weight_global_scale is positive and finite"
            fix = "Calibrate the module (an expert that saw no token?) and export it again"
            self.refuse(group.roles["divisor"].name, rule, divisor.item(), fix)
        return divisor

    def decodes_as_ours(self, group: Group, dtype: torch.dtype) -> bool:
        """Return True for the product class, where the result has the layout's own dtype."""
        if group.options.format == FP8:
            return group.dtype in (dtype, torch.float32)
        return group.options.format != NVFP4 and dtype == torch.bfloat16

    def decode(self, group: Group, stored: Loaded, dtype: torch.dtype) -> Tensor:
        """Return the dense values: rounded to the layout's own dtype, then converted."""
        codes, scale = stored["codes"], stored["scale"]
        kind, shape = group.options.format, group.shape
        if kind == NVFP4:
            factors = scale.float() / self._divisor(group, stored)
            factors = arithmetic.spread(factors, (1, 16), shape)
            values = arithmetic.product(arithmetic.e2m1(codes), factors, torch.bfloat16)
        elif kind == FP8:
            block = group.options.block
            factors = arithmetic.spread(scale, block, shape) if block else scale
            values = arithmetic.product(arithmetic.float8(codes), factors, scale.dtype)
        else:
            elements = {
                MXFP8: lambda: arithmetic.float8(codes),
                MXFP6: lambda: arithmetic.fp6(codes, 2),
                MXFP4: lambda: arithmetic.e2m1(codes),
            }[kind]()
            factors = arithmetic.spread(arithmetic.e8m0(scale), (1, 32), shape)
            values = arithmetic.product(elements, factors, torch.bfloat16)
        return values.to(dtype)


_BLOCKS_2D = "fp8_blockwise(block_scaling_dim=2,force_pow_2_scales=False)"
_BLOCKS_1D = "fp8_blockwise(force_pow_2_scales=False)"
_BLOCKS = {(128, 128): _BLOCKS_2D, (1, 128): _BLOCKS_1D}
_TARGETS = {NVFP4: "nvfp4", MXFP4: "mxfp4", MXFP6: "mxfp6(packed=True)", MXFP8: "mxfp8"}


def _fp8_target(scheme: Scheme) -> Any:
    """Return the quantizer of an FP8 scheme, or why there is none."""
    if scheme.block is None:
        return parse("fp8_rowwise" if scheme.strategy == "channel" else "fp8")
    if scheme.block not in _BLOCKS:
        rows, cols = scheme.block
        return DenseOnly(f"FP8 blocks of {rows}x{cols}; ours are 128x128 and 1x128")
    return parse(_BLOCKS[scheme.block])


def _factor_shapes(scheme: Scheme, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the legal shapes of the FP8 factors of a weight."""
    rows, cols = shape
    if scheme.block:
        return [(ceil_div(rows, scheme.block[0]), ceil_div(cols, scheme.block[1]))]
    return [(rows, 1)] if scheme.strategy == "channel" else [(1,), ()]


class CompressedTensorsWriter(Writer):
    """Write compressed-tensors checkpoints."""

    layout = METHOD
    formats = ("fp8", "fp8_rowwise", "fp8_blockwise", "nvfp4", "mxfp4", "mxfp6 (e2m3)", "mxfp8")
    input_factors: ClassVar[Mapping[str, Any]] = {
        "nvfp4": ("input_global_scale", DIVISOR),
        "": ("input_scale", FACTOR),
    }
    factor_shape = (1,)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._weights: dict[str, str] = {}
        """Module -> key of ``_WEIGHTS``."""
        self._narrow: dict[str, bool] = {}
        """Module -> True if its FP8 factors are stored in the nominal dtype."""
        self._plain: dict[str, Tensor] = {}

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
            scale = self._narrowed(module, scale, tensor.dtype)
        if kind in (*_FP8_SCHEMES, MXFP8):
            codes = codes.view(torch.float8_e4m3fn)
            return {f"{module}.weight": codes, f"{module}.weight_scale": scale}
        stored = {f"{module}.weight_packed": codes, f"{module}.weight_scale": scale}
        if amax is not None:
            quantizer: Any = tensor.quantizer
            divisor = divisor_of(quantizer, amax, factor)
            if not divisor.is_meta and not bool(torch.isfinite(divisor)):
                fix = "Leave the weight plain"
                self.refuse(name, "the amax of an NVFP4 weight is not 0", amax.item(), fix)
            stored[f"{module}.weight_scale"] = scale.view(torch.float8_e4m3fn)
            stored[f"{module}.weight_global_scale"] = divisor
        return stored

    def _narrowed(self, module: str, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return factors in the nominal dtype if that is exact, as the origin stores them."""
        if module not in self._narrow:
            half = dtype in (torch.bfloat16, torch.float16) and not scale.is_meta
            self._narrow[module] = half and torch.equal(scale.to(dtype).float(), scale)
        return scale.to(dtype) if self._narrow[module] else scale

    def _kind(self, name: str, tensor: QuantizedTensor) -> str:
        """Return the scheme that holds a tensor."""
        quantizer: Any = tensor.quantizer
        canonical, spec, element = quantizer.canonical, quantizer.spec.name, quantizer.element.name
        if not quantizer.rowwise or quantizer.columnwise_value:
            self.refuse(name, "the layout holds rowwise data", canonical)
        wanted = {"mxfp4": "e2m1", "nvfp4": "e2m1", "mxfp6": "e2m3"}.get(spec, "e4m3")
        if element != wanted:
            self.refuse(name, f"the elements of {spec} are {wanted}", canonical)
        if spec == "fp8":
            if not quantizer.per_tensor and quantizer.axis != -1:
                self.refuse(name, "factors belong to rows", canonical)
            return "tensor" if quantizer.per_tensor else "channel"
        if spec == "fp8_blockwise":
            groups = quantizer.block_scaling_dim == 1
            if groups and tensor.shape[1] % 128:
                self.refuse(name, "its loader decodes whole groups of 128", tuple(tensor.shape))
            return "block 1x128" if groups else "block 128x128"
        if spec == "nvfp4" and (quantizer.row_scaled or quantizer.with_rht):
            self.refuse(name, "NVFP4 has one factor for the tensor and no rotation", canonical)
        if spec == "mxfp6" and not quantizer.packed:
            self.refuse(name, "FP6 codes are packed", canonical, "Quantize with packed=True")
        return {"nvfp4": NVFP4, "mxfp4": MXFP4, "mxfp6": MXFP6, "mxfp8": MXFP8}[spec]

    def plain(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the tensor as it is; its name decides what the config ignores."""
        self._plain[name] = tensor.to("meta")
        return {name: tensor}

    def config(self) -> dict[str, Any]:
        """Return the config with ``quantization_config``."""
        if not self._weights:
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
            "ignore": self._ignored(),
            "kv_cache_scheme": self._kv_scheme(),
            "quantization_status": "compressed",
            "version": "0.20.0",
        }
        return {**self.model_config, "quantization_config": entry}

    def _ignored(self) -> list[str]:
        """Return the modules whose 2-D weight is plain."""
        return [
            name.removesuffix(".weight")
            for name, tensor in self._plain.items()
            if name.endswith(".weight") and tensor.ndim == 2
        ]

    def _kv_scheme(self) -> dict[str, Any] | None:
        if not any(name.endswith((".k_scale", ".v_scale")) for name in self._plain):
            return None
        return {**_args(8, "tensor"), "dynamic": False}

    def _activations(self, kind: str, modules: list[str]) -> dict[str, Any] | None:
        """Return how activations are quantized; static only if the factors are there."""
        has = {
            last: all(f"{module}.{last}" in self._plain for module in modules)
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
        if kind == MXFP8:
            return {**_WEIGHTS[MXFP8], "dynamic": True}
        return None


def _args(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    """Return quantization arguments as compressed-tensors writes them."""
    return {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy, **more}


_FP8_SCHEMES = ("tensor", "channel", "block 128x128", "block 1x128")
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


CompressedTensorsLayout.writer = CompressedTensorsWriter
