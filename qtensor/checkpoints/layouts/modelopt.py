"""Read checkpoints of NVIDIA ModelOpt, which vLLM, SGLang and TensorRT-LLM load.

modelopt_writer.py writes them, and has the table of algorithms. All factors multiply.
"""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from qtensor import api
from qtensor.checkpoints import arithmetic
from qtensor.checkpoints.buffers import Parts, assemble
from qtensor.checkpoints.containers.base import TensorInfo
from qtensor.checkpoints.layout_base import (
    DenseOnly,
    Group,
    Layout,
    Loaded,
    Source,
    Target,
    Unreadable,
)
from qtensor.checkpoints.layouts.modelopt_writer import (
    ALGORITHMS,
    HF_CONFIG,
    METHOD,
    MIXED,
    PACKED,
    STACKED,
    Algorithm,
    ModelOptWriter,
)
from qtensor.checkpoints.nvfp4_factor import from_factors
from qtensor.core.buffer_shapes import ceil_div
from qtensor.quantizers import Float8BlockQuantizer
from qtensor.storage.tensor import QuantizedTensor

_BLOCKS = Float8BlockQuantizer(block_scaling_dim=2, force_pow_2_scales=False)
_FACTORS = ("weight_scale", "weight_scale_2", "input_scale", "k_scale", "v_scale")
_OTHERS = ("pre_quant_scale", "output_scale")
_EXPERTS = ("gate_up_proj", "down_proj", "gate_proj", "up_proj")
_INPUTS = {
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8_rowwise",
    "NVFP4": "nvfp4",
    "NVFP4_AWQ": "nvfp4",
    "MXFP8": "mxfp8",
}
"""Algorithms that quantize inputs too -> the format of the inputs."""
_FIX = "Check the config against the file, or download the missing shard"


class ModelOptLayout(Layout):
    """Read ModelOpt checkpoints, described by config.json or by hf_quant_config.json.

    Stacked experts are stored (E, K, N), with blocks along K. Their dense values have this shape,
    and the quantized tensors are (E, N, K). FP8 has no blocks: its experts stay (E, K, N).
    """

    name = METHOD
    rank = 62
    methods = (METHOD,)
    kv_factors = ("k_proj.k_scale", "v_proj.v_scale")
    factor_names = frozenset({
        *_FACTORS,
        *_OTHERS,
        *(f"{expert}_input_scale" for expert in _EXPERTS),
    })

    def __init__(self, source: Source, **options: object) -> None:
        super().__init__(source, **options)
        configs = self._configs()
        self._layers = self._listed(configs)
        self._wild = [pattern for pattern in self._layers if "*" in pattern]
        self._with_lora = _owners_of_lora(source.tensors)
        name = self._agreed("quant_algo", [_upper(config.get("quant_algo")) for config in configs])
        if name == MIXED and not self._layers:
            self.refuse("", f"{MIXED} has quantized_layers", "none", "Check the config")
        self._mixed = name == MIXED or (name is None and bool(self._layers))
        self._default: Algorithm | None = None
        if name is not None and not self._mixed:
            size = self._agreed("group_size", [_group_size(config) for config in configs])
            self._default = self._algorithm("", name, size)

    @classmethod
    def recognises(cls, source: Source) -> bool:
        """Return True for ``quant_method: "modelopt"``, or for hf_quant_config.json alone."""
        return source.method == METHOD or (not source.method and HF_CONFIG in source.files)

    # ---- the configuration

    def _configs(self) -> list[Mapping[str, Any]]:
        """Return the dicts that describe the quantization: of config.json, of the other file."""
        found = [self.source.quantization] if self.source.quantization else []
        if HF_CONFIG in self.source.files:
            entry = self.source.files[HF_CONFIG].get("quantization")
            if not isinstance(entry, dict):
                rule = f"{HF_CONFIG} has an object 'quantization'"
                self.refuse("", rule, repr(entry), "Export the checkpoint again")
            found.append(entry)
        if not found:
            rule = f"config.json has a quantization_config, or the folder has {HF_CONFIG}"
            self.refuse("", rule, "neither", "Copy the file from the checkpoint's origin")
        return found

    def _agreed(self, key: str, values: list[Any]) -> Any:
        """Return the value that the files agree on, or None if none has it."""
        given = [value for value in values if value is not None]
        if any(value != given[0] for value in given):
            rule = f"config.json and {HF_CONFIG} give one {key}"
            self.refuse("", rule, " and ".join(map(repr, given)), "Export the checkpoint again")
        return given[0] if given else None

    def _listed(self, configs: list[Mapping[str, Any]]) -> dict[str, Algorithm | None]:
        """Return ``quantized_layers``: module -> algorithm, or None for dense."""
        tables = []
        for config in configs:
            layers = config.get("quantized_layers") or {}
            if not isinstance(layers, dict) or any(type(v) is not dict for v in layers.values()):
                rule = "quantized_layers maps modules to objects"
                self.refuse("", rule, repr(layers), "Export the checkpoint again")
            table = {}
            for module, entry in layers.items():
                name = _upper(entry.get("quant_algo"))
                table[module] = name and self._algorithm(module, name, entry.get("group_size"))
            tables.append(table or None)
        return self._agreed("quantized_layers", tables) or {}

    def _algorithm(self, module: str, name: str, size: object) -> Algorithm:
        """Return an algorithm with its group size, after checking both."""
        where = f" of module {module}" if module else ""
        known = ALGORITHMS.get(name)
        if known is None:
            rule = f"the algorithms that are read are {', '.join(ALGORITHMS)} and {MIXED}"
            self.refuse("", rule, f"quant_algo {name!r}{where}", "Export it in one of them")
        if not known.size or size in (None, 0, known.size):
            return known
        if known.format != "nvfp4" or type(size) is not int or size not in (16, 32):
            legal = "16 or 32" if known.format == "nvfp4" else str(known.size)
            rule = f"the group_size of {name} is {legal}"
            self.refuse("", rule, f"{size!r}{where}", "Check the config")
        return known._replace(size=size)

    def _algorithm_of(self, weight: TensorInfo) -> Algorithm:
        """Return the algorithm of a weight with a factor: its own, its parent's, or the default."""
        module = weight.name.removesuffix(".weight")
        parts = module.split(".")
        for i in range(len(parts), 0, -1):
            if ".".join(parts[:i]) in self._layers:
                found = self._layers[".".join(parts[:i])]
                break
        else:
            pattern = next((p for p in self._wild if fnmatch.fnmatchcase(module, p)), None)
            found = self._default if pattern is None else self._layers[pattern]
        if found is None:
            rule = "a module that quantized_layers does not list is dense"
            if not self._mixed:
                rule = "the config names the quant_algo of each module with factors"
            got = f"factors of module {module}, {weight.dtype} {list(weight.shape)}"
            self.refuse(weight.name, rule, got, "Check the config against the file")
        return found

    def groups(self) -> Iterable[Group]:
        """Return a group for each weight that has a factor."""
        tensors = self.source.tensors
        used: set[str] = set()
        scaled = 0
        for name, weight in tensors.items():
            if name.endswith((*_FACTORS, *_OTHERS)):
                continue
            prefix = f"{name}_" if name.endswith(".weight") else f"{name}_weight_"
            scale, second = tensors.get(f"{prefix}scale"), tensors.get(f"{prefix}scale_2")
            if scale is None:
                self._check_dense(weight, second)
                continue
            roles = {"codes": weight, "scale": scale}
            if second is not None:
                roles["factor"] = second
            used.update(info.name for info in roles.values())
            group = self._group(roles)
            scaled += "pre_quant_scale" in group.scheme
            yield group
        for name in tensors:
            if name.endswith(("weight_scale", "weight_scale_2")) and name not in used:
                self.refuse(name, "a factor has a weight", "none", _FIX)
        self.refuse_leftovers(used)
        if scaled:
            text = f"{self.place()}: {scaled} weights have a pre_quant_scale (AWQ). It multiplies "
            text += "the activations, and is not folded into the weight. "
            fix = "qtensor.checkpoints.apply_transforms(path, model) lets a model multiply by it."
            if self.warns:
                warnings.warn(text + fix, stacklevel=2)

    def _check_dense(self, weight: TensorInfo, second: TensorInfo | None) -> None:
        """Refuse codes without their factors."""
        last = weight.name.rpartition(".")[2]
        packed = weight.dtype in ("U8", "I8") and (last == "weight" or last in _EXPERTS)
        if weight.dtype in ("F8_E4M3", "F8_E5M2") or packed or second is not None:
            got = f"{weight.dtype} {list(weight.shape)} without it"
            self.refuse(weight.name, "a quantized weight has a weight_scale", got, _FIX)

    def _group(self, roles: dict[str, TensorInfo]) -> Group:
        """Return the group of a weight after checking its shapes."""
        weight = roles["codes"]
        algorithm = self._algorithm_of(weight)
        stacked = not weight.name.endswith(".weight")
        if len(weight.shape) != 2 + stacked:
            rule = "a weight is 2-D and ends in '.weight', and stacked experts are 3-D"
            self.refuse(weight.name, rule, list(weight.shape), "Export the checkpoint again")
        if stacked and algorithm.format not in STACKED:
            rule = f"stacked experts are one of {', '.join(STACKED)}"
            self.refuse(weight.name, rule, algorithm.name, "Export each expert by itself")
        turned = stacked and algorithm.size > 0
        packed = algorithm.format in PACKED
        what = f"{algorithm.name} weight"
        self.expect(weight, [weight.shape], ["U8" if packed else "F8_E4M3"], what)
        shape = list(weight.shape)
        shape[-2 if turned else -1] *= 2 if packed else 1
        self._check_factors(roles, algorithm, shape, turned)
        blocks = algorithm.format == "fp8_blockwise"
        target: Target = _BLOCKS if blocks else api.quantizer(algorithm.format)
        if algorithm.format == "nvfp4" and algorithm.size != 16:
            target = DenseOnly(f"NVFP4 in groups of {algorithm.size}; ours are groups of 16")
        scheme = f"{algorithm.name}{' experts' if stacked else ''}"
        if not stacked:
            target, scheme = self._companions(weight, shape, target, scheme)
        dtype = self.source.model_dtype or torch.bfloat16
        return Group(
            weight.name, roles, tuple(shape), dtype, target, scheme, algorithm, transposed=turned
        )

    def _check_factors(
        self, roles: Mapping[str, TensorInfo], algorithm: Algorithm, shape: list[int], turned: bool
    ) -> None:
        """Refuse factors of another shape or dtype than the algorithm's."""
        weight, scale, second = roles["codes"], roles["scale"], roles.get("factor")
        *lead, rows, cols = shape
        if turned:
            rows, cols = cols, rows
        why = f"{weight.name} {list(weight.shape)}, {algorithm.name},"
        legal: list[tuple[int, ...]] = [(), (1,)]
        dtypes = ["F32"]
        if algorithm.format == "fp8_rowwise":
            legal = [(rows,)]
        elif algorithm.format == "fp8_blockwise":
            grid = (ceil_div(rows, 128), ceil_div(cols, 128))
            legal = [(grid[0], 1, grid[1], 1), grid, tuple(n for n in grid if n != 1)]
        elif algorithm.size:
            blocks = ceil_div(cols, algorithm.size)
            legal = [(*lead, blocks, rows) if turned else (*lead, rows, blocks)]
            dtypes = ["F8_E4M3"] if algorithm.format == "nvfp4" else ["U8", "F8_E8M0"]
        self.expect(scale, legal, dtypes, why)
        if algorithm.format == "nvfp4":
            if second is None:
                self.refuse(weight.name, "an NVFP4 weight has a weight_scale_2", "none", _FIX)
            experts = [(lead[0],)] if lead else []
            self.expect(second, [(), (1,), *experts], ["F32"], why)
        elif second is not None:
            rule = f"{algorithm.name} has one level of factors"
            self.refuse(second.name, rule, "weight_scale_2", "Check the config")

    def _companions(
        self, weight: TensorInfo, shape: list[int], target: Target, scheme: str
    ) -> tuple[Target, str]:
        """Return the target and the scheme of a 2-D weight with regard to AWQ and SVD tensors."""
        tensors, module = self.source.tensors, weight.name.removesuffix("weight")
        if module in self._with_lora:
            reason = "svdquant_lora_a and _b: the weight is the decoded part plus b @ a"
            return Unreadable(reason), scheme
        pre = tensors.get(f"{module}pre_quant_scale")
        if pre is not None:
            why = f"{weight.name} of {shape[-1]} inputs"
            self.expect(pre, [(shape[-1],)], ["F32", "BF16", "F16"], why)
            scheme += ", pre_quant_scale multiplies the activations"
        return target, scheme

    def input_format(self, group: Group) -> str:
        """Return the format of the inputs of a weight by its algorithm."""
        name = group.options.name
        if name == "MXFP4" or name.startswith("W4A8"):
            rule = "the algorithm names one format of the inputs that we have"
            self.refuse(group.name, rule, name, "Leave the inputs in high precision")
        return _INPUTS.get(name, "")

    def read(self, group: Group, stored: Loaded) -> QuantizedTensor | DenseOnly:
        """Return the quantized tensor of a weight; codes of turned experts are copied."""
        shape = group.shape
        codes, scale = stored["codes"], stored["scale"]
        if group.transposed:
            codes, scale = codes.transpose(1, 2), scale.transpose(1, 2)
            shape = (shape[0], shape[2], shape[1])
        if group.options.format != "nvfp4":
            return assemble(group.quantizer, shape, group.dtype, Parts(codes, scale))
        found = from_factors(self._factor(group, stored), shape[-2])
        parts = Parts(codes, scale, found.amax, found.factor)
        return assemble(found.quantizer, shape, group.dtype, parts)

    def _factor(self, group: Group, stored: Loaded) -> Tensor:
        """Return ``weight_scale_2``, checked."""
        fix = "Calibrate the module (an expert that saw no token?) and export it again"
        return self.tensor_factor(group, stored, "weight_scale_2 is finite and not negative", fix)

    def rows_apart(self, group: Group) -> bool:
        """Return True: factors belong to rows, to 128 of them, or to the weight."""
        return True

    def decodes_as_ours(self, group: Group, dtype: torch.dtype) -> bool:
        """Return True for MX, and for FP8 in float32, where class D is class P."""
        if group.options.format.startswith("mx"):
            return not group.transposed
        return bool(group.options.format.startswith("fp8")) and dtype == torch.float32

    def decode(self, group: Group, stored: Loaded, dtype: torch.dtype) -> Tensor:
        """Return the dense values: FP8 in the dtype (class D), NVFP4 scales first, MX a product."""
        algorithm, codes, scale = group.options, stored["codes"], stored["scale"]
        if algorithm.format.startswith("fp8"):
            factors = scale.reshape(-1, 1) if algorithm.format == "fp8_rowwise" else scale
            if algorithm.format == "fp8_blockwise":
                grid = [ceil_div(n, 128) for n in group.shape]
                factors = arithmetic.spread(scale.reshape(grid), (128, 128), group.shape)
            elif algorithm.format == "fp8":
                factors = scale.reshape(())
            return arithmetic.in_dtype(arithmetic.float8(codes), factors, dtype)
        if group.transposed:
            codes, scale = (t.transpose(1, 2).contiguous() for t in (codes, scale))
        packed = algorithm.format in PACKED
        elements = arithmetic.e2m1(codes) if packed else arithmetic.float8(codes)
        if algorithm.format == "nvfp4":
            factor = arithmetic.broadcast(self._factor(group, stored))
            args = (elements, scale.float(), factor, algorithm.size, dtype)
            values = arithmetic.scales_first(*args)
        else:
            factors = arithmetic.spread(arithmetic.e8m0(scale), (1, 32), elements.shape)
            values = arithmetic.product(elements, factors, dtype)
        return values.transpose(1, 2).contiguous() if group.transposed else values


def _owners_of_lora(names: Iterable[str]) -> set[str]:
    """Return the prefixes, each with its last dot, of tensors that SVDQuant adds to a weight."""
    owners: set[str] = set()
    for name in names:
        head, mark, _ = name.rpartition("svdquant_lora_")
        if mark:
            parts = head.split(".")
            owners.update(".".join(parts[:i]) + "." for i in range(1, len(parts)))
    return owners


def _upper(name: object) -> str | None:
    """Return ``quant_algo`` in upper case; null stays None."""
    return None if name is None else str(name).upper()


def _group_size(config: Mapping[str, Any]) -> Any:
    """Return the group size that a config gives, or None."""
    groups = config.get("config_groups")
    entries = [config, *(groups.values() if isinstance(groups, dict) else ())]
    entries += [entry.get("weights") for entry in entries if isinstance(entry, dict)]
    sizes = [entry.get("group_size") for entry in entries if isinstance(entry, dict)]
    return next((size for size in sizes if size), None)


ModelOptLayout.writer = ModelOptWriter
