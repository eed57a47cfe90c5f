"""Read and write ComfyUI checkpoints: layers with a ``comfy_quant`` text, or a header text for all.

NVFP4 codes lie high nibble first, factors of blocks lie in 128x4 tiles, and weights are padded to
whole tiles. The file does not tell the size before padding: ``open`` takes ``shape=``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from qtensor import api
from qtensor.api import quantizer_of
from qtensor.checkpoints import arithmetic
from qtensor.checkpoints.buffers import Parts, assemble, kind_of, rowwise_parts
from qtensor.checkpoints.containers.base import TensorInfo
from qtensor.checkpoints.containers.safetensors import parse_json
from qtensor.checkpoints.errors import shorten
from qtensor.checkpoints.layout_base import DenseOnly, Group, Layout, Loaded, Source, Target, Writer
from qtensor.checkpoints.nvfp4_factor import expert_factors, factor_in, from_factors
from qtensor.core.buffer_shapes import ceil_div, round_up
from qtensor.quantizers import NVFP4Quantizer
from qtensor.reference.blocks import swizzle, unswizzle
from qtensor.storage.tensor import QuantizedTensor

METADATA = "_quantization_metadata"
DESCRIPTION = "comfy_quant"
MAX_DESCRIPTION = 65_536
"""Most bytes of a ``comfy_quant`` text."""
NVFP4, MXFP8 = "nvfp4", "mxfp8"
FP8 = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
"""FP8 formats -> dtype of their codes."""
PADDING = {NVFP4: 16, MXFP8: 32}
"""Rows and columns of a weight are multiples of these; they are also the sizes of blocks."""
FORMATS = (*FP8, NVFP4, MXFP8)
FLOATS = ("F32", "BF16", "F16")
_TARGETS: dict[str, Target] = {
    "float8_e4m3fn": api.quantizer("fp8"),
    "float8_e5m2": api.quantizer("fp8", dtype="e5m2"),
    NVFP4: api.quantizer("nvfp4", swizzled=True),
    MXFP8: api.quantizer("mxfp8", swizzled=True),
}
_FIX = "Export the file again, or download it again"
Shape = tuple[int, ...]


class ComfyUILayout(Layout):
    """Read ComfyUI checkpoints.

    ``open`` takes ``shape={"p.weight": (N, K)}``, the sizes of padded weights before padding;
    a weight that it does not name keeps its padding. A file without any description is read if the
    caller passes ``layout="comfyui"``; the dtypes of its tensors then tell the formats.
    """

    name = "comfyui"
    rank = 40
    factor_names = frozenset({"input_scale", "pre_quant_scale", "scale_input"})
    options = ("shape",)

    def __init__(self, source: Source, **options: object) -> None:
        super().__init__(source, **options)
        self._shapes = self._checked_shapes(options.get("shape"))

    def _checked_shapes(self, shapes: Any) -> dict[str, Shape]:
        """Return the option ``shape``: weight -> its shape before padding."""
        if shapes is None:
            return {}
        ok = isinstance(shapes, Mapping) and all(
            isinstance(shape, (tuple, list)) and all(type(n) is int and n > 0 for n in shape)
            for shape in shapes.values()
        )
        if not ok:
            rule = "shape= maps names of weights to their shapes before padding"
            self.refuse("", rule, repr(shapes), 'Pass shape={"p.weight": (N, K)}')
        return {str(name): tuple(shape) for name, shape in shapes.items()}

    @classmethod
    def recognises(cls, source: Source) -> bool:
        """Return True for the header text, or a tensor ``*.comfy_quant``."""
        if any(METADATA in header for header in source.headers):
            return True
        return any(name.endswith(f".{DESCRIPTION}") for name in source.tensors)

    # ---- descriptions

    def _descriptions(self) -> dict[str, Mapping[str, Any]]:
        """Return the description of each layer, by the name of the module."""
        found: dict[str, Mapping[str, Any]] = {}
        for header in self.source.headers:
            if METADATA in header:
                found |= self._header_layers(header[METADATA])
        for name, info in self.source.tensors.items():
            module, _, last = name.rpartition(".")
            if last != DESCRIPTION:
                continue
            own = self._own_description(info)
            if module in found and found[module].get("format") != own.get("format"):
                got = f"{own.get('format')!r} against {found[module].get('format')!r}"
                self.refuse(name, f"{DESCRIPTION} and {METADATA} agree", got, _FIX)
            found[module] = own
        return found

    def _header_layers(self, text: str) -> dict[str, Mapping[str, Any]]:
        """Return the layers of ``_quantization_metadata``."""
        about = parse_json(text.encode("utf-8", "surrogatepass"), self.place())
        layers, version = about.get("layers"), about.get("format_version", "1.0")
        if version != "1.0" or not isinstance(layers, dict):
            rule = f'{METADATA} has format_version "1.0" and layers'
            self.refuse("", rule, f"version {version!r}, layers {type(layers).__name__}", _FIX)
        for module, layer in layers.items():
            if not isinstance(layer, dict):
                self.refuse(f"{module}.weight", "a layer is a JSON object", repr(layer), _FIX)
        return layers

    def _own_description(self, info: TensorInfo) -> dict[str, Any]:
        """Return the JSON object in a ``comfy_quant`` tensor."""
        if info.dtype != "U8" or len(info.shape) != 1 or info.nbytes > MAX_DESCRIPTION:
            rule = f"{DESCRIPTION} is a text: U8 in one dim, at most {MAX_DESCRIPTION} bytes"
            self.refuse(info.name, rule, f"{info.dtype} {list(info.shape)}", _FIX)
        text = cast(Any, self.source.read)(info.name)
        return parse_json(bytes(text.numpy()), self.place(info.name))

    def _format(self, weight: str, about: Mapping[str, Any]) -> str:
        name = about.get("format")
        if not isinstance(name, str) or name not in FORMATS:
            fix = "Export the model in one of these formats, or dequantize it in ComfyUI"
            self.refuse(weight, f"the formats that are read are {', '.join(FORMATS)}", name, fix)
        return name

    def _guessed(self, module: str) -> dict[str, Any] | None:
        """Return the description of a layer that has none, from the dtypes of its tensors."""
        tensors = self.source.tensors
        weight, scale = tensors.get(f"{module}.weight"), tensors.get(f"{module}.weight_scale")
        if weight is None or scale is None:
            return None
        if weight.dtype == "U8" and f"{module}.weight_scale_2" in tensors:
            return {"format": NVFP4}
        if weight.dtype == "F8_E4M3" and scale.dtype in ("U8", "F8_E8M0"):
            return {"format": MXFP8}
        names = {dtype: name for name, dtype in FP8.items()}
        return {"format": names[weight.dtype]} if weight.dtype in names else None

    def groups(self) -> Iterable[Group]:
        """Return a group for each described layer; each needs its weight and its factors."""
        described = self._descriptions()
        recognised = self.recognises(self.source)
        shapes = dict(self._shapes)
        for name, info in self.source.tensors.items():
            module, _, last = name.rpartition(".")
            if last == "scale_weight":
                rule = "factors of current files are named weight_scale"
                fix = "Convert the file in ComfyUI, which renames old factors"
                self.refuse(name, rule, "a factor of old files", fix)
            if last != "weight_scale" or module in described:
                continue
            guessed = self._guessed(module)
            if recognised or guessed is None:
                rule = f"factors belong to a layer with a {DESCRIPTION} text and a weight"
                fix = "Add the text to the file, or leave the factors out"
                self.refuse(name, rule, f"{info.dtype} {list(info.shape)} without them", fix)
            described[module] = guessed
        for module, about in described.items():
            yield self._group(module, about, shapes.pop(f"{module}.weight", None))
        for name in shapes:
            rule = "shape= names quantized weights of the file"
            self.refuse(name, rule, "another name", "Check the name")

    def _group(self, module: str, about: Mapping[str, Any], shape: Shape | None) -> Group:
        """Return the group of a layer after checking its shapes."""
        tensors, name = self.source.tensors, f"{module}.weight"
        kind = self._format(name, about)
        wanted = {"codes": "weight", "scale": "weight_scale"}
        if kind == NVFP4:
            wanted["factor"] = "weight_scale_2"
        roles = {role: tensors.get(f"{module}.{last}") for role, last in wanted.items()}
        missing = [wanted[role] for role, info in roles.items() if info is None]
        if missing:
            rule = f"a layer of format {kind} has {', '.join(wanted.values())}"
            self.refuse(name, rule, f"no {', '.join(missing)}", "Download or export it again")
        found = {role: cast(TensorInfo, info) for role, info in roles.items()}
        if f"{module}.{DESCRIPTION}" in tensors:
            found["about"] = tensors[f"{module}.{DESCRIPTION}"]
        self._check_experts(found["codes"], about.get("num_experts"))
        make = self._fp8 if kind in FP8 else self._blocks
        group = make(name, kind, found, shape)
        scheme = kind
        if about.get("full_precision_matrix_mult"):
            scheme += ", full precision products"
        if f"{module}.pre_quant_scale" in tensors:
            scheme += ", activations times pre_quant_scale"
        return group._replace(scheme=f"{scheme}{group.scheme}")

    def _check_experts(self, weight: TensorInfo, experts: object) -> None:
        if experts is not None and (len(weight.shape) != 3 or weight.shape[0] != experts):
            rule = f"num_experts {experts!r} needs a weight ({experts!r}, N, K)"
            self.refuse(weight.name, rule, list(weight.shape), _FIX)

    def _fp8(
        self, name: str, kind: str, roles: dict[str, TensorInfo], shape: Shape | None
    ) -> Group:
        weight = roles["codes"]
        self.expect(weight, [weight.shape], [FP8[kind]], f"format {kind}")
        if shape not in (None, weight.shape):
            fix = "Leave the weight out of shape="
            self.refuse(name, f"format {kind} has no padding: {list(weight.shape)}", shape, fix)
        legal: list[Shape] = [(), (1,)]
        if len(weight.shape) == 3:
            legal += [weight.shape[:1], (weight.shape[0], 1, 1)]
        self.expect(roles["scale"], legal, FLOATS, f"{name} {list(weight.shape)}, {kind},")
        target = _TARGETS[kind]
        if torch.Size(roles["scale"].shape).numel() != 1:
            target = DenseOnly("one FP8 factor for each expert of a stack")
        elif not weight.shape:
            target = DenseOnly("a weight without dims")
        return Group(name, roles, weight.shape, self._dtype(), target, "", (kind, weight.shape))

    def _blocks(
        self, name: str, kind: str, roles: dict[str, TensorInfo], shape: Shape | None
    ) -> Group:
        """Return the group of an NVFP4 or MXFP8 weight, whose shapes are padded."""
        weight, size = roles["codes"], PADDING[kind]
        if len(weight.shape) not in (2, 3):
            rule = "a weight has two dims, and stacked experts three"
            self.refuse(name, rule, list(weight.shape), _FIX)
        codes, factors = (
            (["U8"], ["F8_E4M3"]) if kind == NVFP4 else (["F8_E4M3"], ["U8", "F8_E8M0"])
        )
        self.expect(weight, [weight.shape], codes, f"format {kind}")
        *lead, rows, width = weight.shape
        cols = width * 2 if kind == NVFP4 else width
        if rows % size or cols % size:
            rule = f"weights of format {kind} are padded to multiples of {size} rows and columns"
            self.refuse(name, rule, [*lead, rows, cols], "Check layout=, or export it again")
        why = f"{name} {[*lead, rows, cols]}, {kind} with tiled factors,"
        tiled = (*lead, round_up(rows, 128), round_up(cols // size, 4))
        self.expect(roles["scale"], [tiled], factors, why)
        if kind == NVFP4:
            legal: list[Shape] = [(), (1,), *([(lead[0],), (lead[0], 1, 1)] if lead else [])]
            self.expect(roles["factor"], legal, ["F32"], why)
        padded = (*lead, rows, cols)
        scheme = ""
        if shape is None:
            shape, scheme = padded, ", with padding (pass shape=)"
        elif (*shape[:-2], *(round_up(n, size) for n in shape[-2:])) != padded:
            rule = f"shape= of {list(padded)} differs from it by the padding to {size}"
            self.refuse(name, rule, list(shape), "Pass the shape that the model has")
        return Group(name, roles, shape, self._dtype(), _TARGETS[kind], scheme, (kind, padded))

    def _dtype(self) -> torch.dtype:
        return self.source.model_dtype or torch.bfloat16

    def read(self, group: Group, stored: Loaded) -> QuantizedTensor | DenseOnly:
        """Return the quantized tensor of a layer, without padding if ``shape=`` gave its shape."""
        kind, shape = group.options[0], group.shape
        if kind in FP8:
            return super().read(group, stored)
        codes, scale = _cropped(stored, group)
        if kind == MXFP8:
            return assemble(group.quantizer, shape, group.dtype, Parts(codes, scale))
        found = from_factors(self._factor(group, stored), shape[-2])
        quantizer = dataclasses.replace(found.quantizer, swizzled=True)
        parts = Parts(_swapped(codes), scale, found.amax, found.factor)
        return assemble(quantizer, shape, group.dtype, parts)

    def _factor(self, group: Group, stored: Loaded) -> Tensor:
        """Return the tensor factor of an NVFP4 weight, or the factors of its experts, checked."""
        return self.tensor_factor(group, stored, "weight_scale_2 is finite and not negative", _FIX)

    def decode(self, group: Group, stored: Loaded, dtype: torch.dtype) -> Tensor:
        """Return the values as comfy-kitchen decodes them.

        FP8 and NVFP4 round every step to ``dtype``; MXFP8 rounds the product once.
        """
        kind, shape = group.options[0], group.shape
        if kind in FP8:
            factor = arithmetic.broadcast(stored["scale"])
            return arithmetic.in_dtype(stored["codes"].float(), factor, dtype)
        codes, scale = _cropped(stored, group)
        if kind == MXFP8:
            # comfy-kitchen decodes the code 0 to 0, and not to 2^-127.
            factors = torch.where(scale == 0, 0.0, arithmetic.e8m0(scale))
            factors = arithmetic.spread(factors, (1, 32), shape)
            return arithmetic.product(arithmetic.float8(codes), factors, dtype)
        factor = arithmetic.broadcast(self._factor(group, stored))
        factors = arithmetic.in_dtype(arithmetic.float8(scale), factor, dtype)
        factors = arithmetic.spread(factors, (1, 16), shape)
        elements = arithmetic.e2m1(codes, high_first=True)[..., : shape[-1]]
        return arithmetic.in_dtype(elements, factors, dtype)


def _cropped(stored: Loaded, group: Group) -> tuple[Tensor, Tensor]:
    """Return the codes, and the row-major factors as uint8, without padding."""
    kind, padded = group.options
    *_, rows, cols = group.shape
    size, width = PADDING[kind], ceil_div(cols, 2) if kind == NVFP4 else cols
    scale = stored["scale"].view(torch.uint8)
    plain = unswizzle(scale.reshape(-1, scale.shape[-1])).reshape(scale.shape)
    plain = plain[..., :rows, : ceil_div(cols, size)].contiguous()
    codes = stored["codes"]
    return (codes if group.shape == padded else codes[..., :rows, :width].contiguous()), plain


def _swapped(codes: Tensor) -> Tensor:
    """Return packed codes with the two codes of each byte in the other order."""
    return (codes << 4) | (codes >> 4)


class ComfyUIWriter(Writer):
    """Write ComfyUI checkpoints with a ``comfy_quant`` text for each layer."""

    layout = "comfyui"
    takes_scales = True
    formats = ("fp8 (e4m3, e5m2)", "nvfp4", "mxfp8")
    swizzled = True

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._padded: dict[str, None] = {}

    def notes(self) -> list[str]:
        """Return which weights are padded: the file does not hold their shapes."""
        if not self._padded:
            return []
        names = shorten(", ".join(self._padded))
        return [f"the file does not hold the shapes of padded weights; pass shape= for {names}"]

    def encode(self, name: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
        """Return the weight, its factors and its ``comfy_quant`` text."""
        module, _, last = name.rpartition(".")
        if not module or last != "weight":
            self.refuse(name, "quantized tensors are the 'weight' of a module", repr(name))
        kind, parts = self._kind(name, tensor), rowwise_parts(tensor)
        codes, scale = parts.codes, parts.scale
        if kind in FP8:
            codes = codes.view(getattr(torch, kind))
            stored = {"weight": codes, "weight_scale": self._as_stored(module, scale)}
        else:
            size = PADDING[kind]
            *lead, rows = tensor.shape[:-1]
            scale = scale.reshape(*lead, rows, -1)
            if kind == NVFP4:
                codes, size = _swapped(codes), 8
            codes = F.pad(codes, (0, -codes.shape[-1] % size, 0, -rows % PADDING[kind]))
            if codes.shape[-2] != rows or tensor.shape[-1] % PADDING[kind]:
                self._padded[name] = None
            stored = {"weight": codes, "weight_scale": _tiled(scale)}
            if kind == MXFP8:
                stored["weight"] = codes.view(torch.float8_e4m3fn)
            else:
                stored["weight_scale"] = stored["weight_scale"].view(torch.float8_e4m3fn)
                factor = factor_in(tensor, parts)
                stored["weight_scale_2"] = self._nvfp4_factor(name, tensor, factor)
        stored[DESCRIPTION] = self._description(module, kind, tensor)
        return {f"{module}.{key}": value for key, value in stored.items()}

    def plain(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the tensor as it is; ``scale_input`` of old files becomes ``input_scale``.

        A ``scale_input`` of 1 stands for none and is left out: an ``input_scale`` of 1 would make
        ComfyUI quantize the activations with it.
        """
        module, _, last = name.rpartition(".")
        if last != "scale_input":
            return {name: tensor}
        none = not tensor.is_meta and tensor.numel() == 1 and tensor.item() == 1
        return {} if none else {f"{module}.input_scale": tensor}

    def _kind(self, name: str, tensor: QuantizedTensor) -> str:
        """Return the format that holds a tensor."""
        quantizer = quantizer_of(tensor)
        spec, element, canonical = kind_of(quantizer), quantizer.element.name, quantizer.canonical
        self.need_rowwise(name, tensor)
        if spec == "fp8" and element in ("e4m3", "e5m2"):
            return "float8_e4m3fn" if element == "e4m3" else "float8_e5m2"
        if (spec, element) not in ((NVFP4, "e2m1"), (MXFP8, "e4m3")):
            self.refuse(name, f"the layout holds {', '.join(self.formats)}", canonical)
        if isinstance(quantizer, NVFP4Quantizer) and quantizer.with_rht:
            self.refuse(name, "NVFP4 has no rotation", canonical)
        if tensor.ndim not in (2, 3):
            rule = "a weight has two dims, and stacked experts three"
            self.refuse(name, rule, tuple(tensor.shape), "Reshape it")
        return spec

    def _as_stored(self, module: str, scale: Tensor) -> Tensor:
        """Return an FP8 factor without dims, or as the open checkpoint stores it."""
        info = self.source.tensors.get(f"{module}.weight_scale") if self.source else None
        if info is None or info.shape not in ((), (1,)) or info.dtype not in FLOATS:
            return scale.reshape(())
        return scale.reshape(info.shape).to(
            {"BF16": torch.bfloat16, "F16": torch.float16}.get(info.dtype, torch.float32)
        )

    def _nvfp4_factor(self, name: str, tensor: QuantizedTensor, factor: Tensor) -> Tensor:
        """Return the tensor factor: without dims, or one for each expert."""
        if factor.numel() == 1:
            return factor.reshape(())
        found = expert_factors(factor, tuple(tensor.shape))
        if found is None:
            rule = "NVFP4 has one factor for the tensor, or one for each expert of a stack"
            self.refuse(name, rule, tensor.quantizer.canonical)
        return found

    def _description(self, module: str, kind: str, tensor: QuantizedTensor) -> Tensor:
        """Return the ``comfy_quant`` text of a layer: the source's own text if there is one."""
        text = f"{module}.{DESCRIPTION}"
        if self.source is not None and self.source.read and text in self.source.tensors:
            stored = self.source.read(text)
            if f'"{kind}"' in bytes(stored.numpy()).decode("utf-8", "replace"):
                return stored
        about: dict[str, Any] = {"format": kind}
        if tensor.ndim == 3 and kind not in FP8:
            about["num_experts"] = tensor.shape[0]
        return torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)


def _tiled(scale: Tensor) -> Tensor:
    """Return factors (..., N, blocks) in 128x4 tiles, with zeros as padding."""
    rows, blocks = scale.shape[-2:]
    padded = F.pad(scale, (0, -blocks % 4, 0, -rows % 128))
    return swizzle(padded.reshape(-1, padded.shape[-1])).reshape(padded.shape)


ComfyUILayout.writer = ComfyUIWriter
