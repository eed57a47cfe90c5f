"""Read compressed-tensors checkpoints, as vLLM and llm-compressor make them.

compressed_tensors_writer.py writes them. docs/checkpoints.md has the table of formats. FP8 factors
multiply; the NVFP4 tensor factor divides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from qtensor import api
from qtensor.checkpoints import arithmetic
from qtensor.checkpoints.buffers import Parts, assemble
from qtensor.checkpoints.containers.base import STORED_TYPES, TensorInfo
from qtensor.checkpoints.input_transforms import ROTATED
from qtensor.checkpoints.layout_base import (
    DIVISOR,
    FACTOR,
    DenseOnly,
    Group,
    Layout,
    Loaded,
    Source,
    Target,
)
from qtensor.checkpoints.layouts.compressed_tensors_rotations import online_rotations
from qtensor.checkpoints.layouts.compressed_tensors_writer import (
    FP8,
    METHOD,
    MXFP4,
    MXFP6,
    MXFP8,
    NVFP4,
    CompressedTensorsWriter,
)
from qtensor.checkpoints.nvfp4_factor import from_divisor
from qtensor.checkpoints.patterns import Pattern
from qtensor.core.buffer_shapes import ceil_div
from qtensor.modules.input_transform import InputTransform
from qtensor.quantizers import Float8BlockQuantizer, MXFP6Quantizer
from qtensor.storage.tensor import QuantizedTensor

_FORMATS = {
    FP8: FP8,
    "naive-quantized": FP8,
    NVFP4: NVFP4,
    MXFP4: MXFP4,
    MXFP6: MXFP6,
    MXFP8: MXFP8,
}
"""Formats that are read -> how their tensors lie."""
_BITS = {FP8: 8, NVFP4: 4, MXFP4: 4, MXFP6: 6, MXFP8: 8}
_SIZES = {NVFP4: (16, 32), MXFP4: (32,), MXFP6: (32,), MXFP8: (32,)}
"""Legal ``group_size``; the first one holds where the config gives none."""
_INPUTS = {
    (8, "tensor", 0): "fp8",
    (8, "token", 0): "fp8_rowwise",
    (8, "group", 128): "fp8_blockwise(force_pow_2_scales=False)",
    (8, "group", 32): "mxfp8",
    (6, "group", 32): "mxfp6(packed=True)",
    (4, "group", 32): "mxfp4",
    (4, "tensor_group", 16): "nvfp4",
}
"""Bits, strategy and group size of inputs -> our format."""
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
    size: int = 0
    """Elements along K that share a factor of NVFP4 and MX, or 0."""
    inputs: str = ""
    """Format of the inputs, "" for high precision, or "?" for one that we do not have."""
    is_dynamic: bool = False
    """True if inputs have factors of their own, and the file has none."""

    @property
    def of_weights(self) -> tuple[Any, ...]:
        """Return what decides how the weights lie."""
        return self[1:5]

    def names(self, module: str) -> bool:
        """Return True if a target names the module, exactly or by a ``re:`` pattern."""
        return any(
            target.matches(module) if isinstance(target, Pattern) else target == module
            for target in self.targets
        )

    def is_default(self) -> bool:
        """Return True if a target is the class of linear layers, which names come before."""
        return any(isinstance(t, str) and t.endswith("Linear") for t in self.targets)


class CompressedTensorsLayout(Layout):
    """Read compressed-tensors checkpoints.

    ``open`` takes ``accept_rotated=True`` to read the rotated weights of a checkpoint with a
    ``transform_config`` as they are stored.
    """

    name = METHOD
    rank = 60
    methods = (METHOD,)
    factor_names = frozenset({"input_scale", "input_global_scale", "k_scale", "v_scale"})
    input_factors: ClassVar[Mapping[str, Any]] = {
        "input_scale": FACTOR,
        "input_global_scale": DIVISOR,
    }

    def __init__(self, source: Source, **options: object) -> None:
        super().__init__(source, **options)
        config = source.quantization
        if config.get("transform_config") and not options.get(ROTATED):
            rule = "weights that a transform rotated are right only for rotated inputs"
            fix = (
                "Load the model with qtensor.integrations.transformers, which applies it, or pass "
                "accept_rotated=True and call qtensor.checkpoints.apply_transforms(path, model)"
            )
            self.refuse("", rule, "transform_config", fix)
        sparsity = config.get("sparsity_config") or {}
        if isinstance(sparsity, dict) and sparsity.get("format") not in _DENSE:
            self._refuse_format(sparsity.get("format"))
        groups = config.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            got = type(groups).__name__
            self.refuse("", "the config has config_groups", got, "Check config.json")
        found = [self._scheme(group, config.get("format")) for group in groups.values()]
        self._schemes = [scheme for scheme in found if scheme is not None]

    def _refuse_format(self, name: object) -> None:
        fix = "Read it with compressed-tensors, or export it in one of these formats"
        self.refuse("", f"the formats that are read are {', '.join(_FORMATS)}", repr(name), fix)

    def _scheme(self, group: Any, default: Any) -> Scheme | None:
        """Return an entry of ``config_groups`` after checking it, or None if weights stay plain."""
        targets = group.get("targets") if isinstance(group, dict) else None
        weights = group.get("weights") if isinstance(group, dict) else ""
        if weights is None and isinstance(targets, list):
            return None  # it quantizes activations alone, such as those of attention
        if not isinstance(weights, dict) or not isinstance(targets, list):
            rule = "a config group has targets and weights"
            self.refuse("", rule, repr(group), "Check config.json")
        name = group.get("format") or default
        kind = str(weights.get("type") or "float").lower()
        if not isinstance(name, str) or name not in _FORMATS or kind != "float":
            self._refuse_format(f"{name} of type {kind}")
        fmt, strategy = _FORMATS[name], _strategy(weights)
        if weights.get("num_bits") not in (None, _BITS[fmt]):
            rule = f"the weights of {name} have {_BITS[fmt]} bits"
            self.refuse("", rule, repr(weights["num_bits"]), "Check config.json")
        block = self._fp8_block(strategy, weights) if fmt == FP8 else None
        size = 0 if fmt == FP8 else self._size(name, weights.get("group_size"))
        patterns = tuple(
            Pattern(text[3:], self.place()) if text.startswith("re:") else text
            for text in map(str, targets)
        )
        inputs = _inputs(group.get("input_activations"))
        return Scheme(patterns, fmt, strategy, block, size, *inputs)

    def inputs_are_dynamic(self, group: Group) -> bool:
        """Return True if the config says so."""
        return bool(group.options.is_dynamic)

    def input_format(self, group: Group) -> str:
        """Return the format of the inputs of a module by its config group."""
        found: str = group.options.inputs
        if found == "?":
            rule = f"inputs are quantized in one of {', '.join(sorted(set(_INPUTS.values())))}"
            fix = "Leave the inputs in high precision"
            self.refuse(group.name, rule, "other input_activations in the config", fix)
        return found

    def _fp8_block(self, strategy: str, weights: Mapping[str, Any]) -> tuple[int, int] | None:
        """Return the block of an FP8 scheme, or None for one factor a tensor or a row."""
        rule = "block_structure or group_size gives two positive sizes"
        if strategy == "block":
            sizes = weights.get("block_structure")
            if isinstance(sizes, str):  # older versions wrote "128x128"
                sizes = [int(n) if n.isdecimal() and len(n) < 10 else 0 for n in sizes.split("x")]
            return self.pair(sizes, rule)
        if strategy == "group":
            return self.pair([1, weights.get("group_size")], rule)
        if strategy not in ("tensor", "channel"):
            rule = "the strategies of FP8 weights are tensor, channel, block and group"
            self.refuse("", rule, repr(strategy), "Check config.json")
        return None

    def _size(self, name: str, size: object) -> int:
        """Return the group size of NVFP4 and MX."""
        legal = _SIZES[_FORMATS[name]]
        if size is None:
            return legal[0]
        if type(size) is not int or size not in legal:
            rule = f"the group_size of {name} is {' or '.join(map(str, legal))}"
            self.refuse("", rule, repr(size), "Check config.json, or export it in such groups")
        return size

    def input_transforms(self) -> dict[str, InputTransform]:
        """Return the rotations of inputs that ``transform_config`` asks for, by module."""
        return online_rotations(self)

    def groups(self) -> Iterable[Group]:
        """Return a group for each module that has a factor."""
        tensors = self.source.tensors
        used: set[str] = set()
        modules = {
            name.rpartition(".")[0] for name in tensors if name.rpartition(".")[2] in _SUFFIXES
        }
        for module in sorted(modules):
            stored = {s: tensors.get(_joined(module, s)) for s in _SUFFIXES}
            found = {s: info for s, info in stored.items() if info is not None}
            if "weight_packed" in found and "weight" in found:
                got = "both weight and weight_packed"
                self.refuse(found["weight"].name, "a module has one weight", got, "Export it again")
            weight = found.get("weight_packed") or found.get("weight")
            if weight is None:
                fix = "Download the missing shard"
                self.refuse(next(iter(found.values())).name, "a factor has a weight", "none", fix)
            roles = {role: found[s] for s, role in _ROLES.items() if s in found}
            if "scale" in roles:
                used.update(info.name for info in found.values())
                yield self._group(module, {"codes": weight, **roles})
            elif roles or "weight_packed" in found or weight.dtype in ("F8_E4M3", "F8_E5M2"):
                fix = "Download the missing shard, or export the checkpoint again"
                self.refuse(weight.name, "a quantized weight has weight_scale", "none", fix)
        self.refuse_leftovers(used)

    def _group(self, module: str, roles: dict[str, TensorInfo]) -> Group:
        """Return the group of a module after checking its shapes."""
        weight = roles["codes"]
        for name in ("weight_zero_point", "weight_g_idx"):
            if _joined(module, name) in self.source.tensors:
                fix = "Read it with compressed-tensors"
                self.refuse(weight.name, "weights are symmetric and in order", name, fix)
        if len(weight.shape) != 2:
            rule = "a weight has two dims"
            self.refuse(weight.name, rule, list(weight.shape), "Export each expert by itself")
        found = self._found_format(weight, roles)
        scheme = self._scheme_of(module, weight, found, roles["scale"])
        make = self._fp8 if found == FP8 else self._blocks
        return make(_joined(module, "weight"), roles, scheme)

    def _found_format(self, weight: TensorInfo, roles: Mapping[str, TensorInfo]) -> str:
        """Return the format that the dtypes and shapes of a module show."""
        scale = roles["scale"]
        if "divisor" in roles:
            return NVFP4
        if not weight.name.endswith("weight_packed"):
            return MXFP8 if scale.dtype in ("U8", "F8_E8M0") else FP8
        if scale.dtype == "F8_E4M3":
            fix = "Download the missing shard, or export the checkpoint again"
            self.refuse(weight.name, "an NVFP4 weight has a weight_global_scale", "none", fix)
        packed = {s.format for s in self._schemes} & {MXFP4, MXFP6}
        if len(packed) == 1:
            return packed.pop()
        blocks = scale.shape[-1] if scale.shape else 0
        return MXFP6 if blocks and weight.shape[1] > 16 * blocks else MXFP4

    def _scheme_of(self, module: str, weight: TensorInfo, found: str, scale: TensorInfo) -> Scheme:
        """Return the scheme of a module: by name, or the only one of the format that it shows."""
        fitting = [s for s in self._schemes if s.format == found]
        if found == FP8:
            fitting = [
                s for s in fitting if scale.shape in _factor_shapes(s, weight.shape)
            ] or fitting
        if len({s[1:] for s in fitting}) > 1:
            # The tensors do not tell the schemes apart, so the names of the targets decide.
            named = [s for s in fitting if s.names(module)]
            fitting = named or [s for s in fitting if s.is_default()]
        if len({s.of_weights for s in fitting}) != 1:
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
        cols = width
        if scheme.format != MXFP8:
            cols = width * 4 // 3 if scheme.format == MXFP6 else width * 2
            if scheme.format == MXFP6 and width % 3:
                rule = "packed FP6 has three bytes for four codes"
                self.refuse(weight.name, rule, list(weight.shape), "Export it again")
        if scheme.format == NVFP4:
            factors = ["F8_E4M3"]
            shapes: list[tuple[int, ...]] = [(1,), ()]
            self.expect(roles["divisor"], shapes, ["F32"], "NVFP4")
        codes = "F8_E4M3" if scheme.format == MXFP8 else "U8"
        self.expect(weight, [weight.shape], [codes], scheme.format)
        why = f"{weight.name} {list(weight.shape)}, {scheme.format}"
        self.expect(scale, [(rows, ceil_div(cols, scheme.size))], factors, why)
        target: Target = _TARGETS[scheme.format]
        if scheme.format == NVFP4 and scheme.size != 16:
            target = DenseOnly(f"NVFP4 in groups of {scheme.size}; ours are groups of 16")
        return Group(name, roles, (rows, cols), torch.bfloat16, target, scheme.format, scheme)

    def read(self, group: Group, stored: Loaded) -> QuantizedTensor | DenseOnly:
        """Return the quantized tensor of a module."""
        if group.options.format != NVFP4:
            return super().read(group, stored)
        found = from_divisor(self._divisor(group, stored))
        if found is None:
            return DenseOnly("the reciprocal of weight_global_scale is not a normal float32")
        parts = Parts(stored["codes"], stored["scale"], found.amax, found.factor)
        return assemble(found.quantizer, group.shape, group.dtype, parts)

    def _divisor(self, group: Group, stored: Loaded) -> Tensor:
        """Return the global scale of an NVFP4 weight."""
        divisor = stored["divisor"]
        if not bool(torch.isfinite(divisor) & (divisor > 0)):
            rule = "weight_global_scale is positive and finite"
            fix = "Calibrate the module (an expert that saw no token?) and export it again"
            self.refuse(group.roles["divisor"].name, rule, divisor.item(), fix)
        return divisor

    def rows_apart(self, group: Group) -> bool:
        """Return True unless blocks have another height than 1 or 128."""
        return group.options.block is None or group.options.block[0] in (1, 128)

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
            factors = arithmetic.spread(factors, (1, group.options.size), shape)
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


def _joined(module: str, last: str) -> str:
    """Return the name of a tensor of a module; "" is the name of the whole model."""
    return f"{module}.{last}" if module else last


def _strategy(weights: Mapping[str, Any]) -> str:
    """Return the strategy; without one, the group size tells, as in the origin."""
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy is not None:
        return str(strategy).lower()
    if size is None:
        return "tensor"
    return "channel" if size == -1 else "group"


def _inputs(inputs: Any) -> tuple[str, bool]:
    """Return the format of the inputs that a config group describes, and if they are dynamic."""
    if not isinstance(inputs, dict) or str(inputs.get("type") or "float").lower() != "float":
        return ("" if inputs is None else "?"), False
    bits, size = inputs.get("num_bits"), inputs.get("group_size")
    if type(bits) is not int:
        return "?", False
    key = (bits, _strategy(inputs), size if type(size) is int and size > 0 else 0)
    return _INPUTS.get(key, "?"), inputs.get("dynamic") is True


_BLOCKS = {
    (128, 128): Float8BlockQuantizer(block_scaling_dim=2, force_pow_2_scales=False),
    (1, 128): Float8BlockQuantizer(force_pow_2_scales=False),
}
_TARGETS: dict[str, Target] = {
    NVFP4: api.quantizer("nvfp4"),
    MXFP4: api.quantizer("mxfp4"),
    MXFP6: MXFP6Quantizer(packed=True),
    MXFP8: api.quantizer("mxfp8"),
}


def _fp8_target(scheme: Scheme) -> Target:
    """Return the quantizer of an FP8 scheme, or why there is none."""
    if scheme.block is None:
        return api.quantizer("fp8_rowwise" if scheme.strategy == "channel" else "fp8")
    if scheme.block not in _BLOCKS:
        rows, cols = scheme.block
        return DenseOnly(f"FP8 blocks of {rows}x{cols}; ours are 128x128 and 1x128")
    return _BLOCKS[scheme.block]


def _factor_shapes(scheme: Scheme, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the legal shapes of the FP8 factors of a weight."""
    rows, cols = shape
    if scheme.block:
        return [(ceil_div(rows, scheme.block[0]), ceil_div(cols, scheme.block[1]))]
    return [(rows, 1)] if scheme.strategy == "channel" else [(1,), ()]


CompressedTensorsLayout.writer = CompressedTensorsWriter
