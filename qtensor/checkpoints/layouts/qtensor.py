"""Read and write our own layout: every buffer of a quantized tensor, and its quantizer.

docs/checkpoints.md has the layout byte for byte. The header text ``qtensor`` of each file is a JSON
object: ``{"version": 1, "tensors": {name: {"quantizer", "shape", "dtype", "buffers"}}}``. The
weight of a convolution also has ``"matrix"``, the shape (N, K) in which it is quantized.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from qtensor.api import parsed
from qtensor.checkpoints.containers.base import TensorInfo, checked_shape
from qtensor.checkpoints.containers.safetensors import parse_json
from qtensor.checkpoints.input_transforms import PRE_SCALE, ROTATION
from qtensor.checkpoints.layout_base import DIVISOR, FACTOR, Group, Layout, Loaded, Source, Writer
from qtensor.core.buffer_shapes import buffer_shapes
from qtensor.core.errors import QTensorError
from qtensor.storage.rebuild import FLOATING, reshaped, tensor_of
from qtensor.storage.tensor import QuantizedTensor

KEY = "qtensor"
VERSION = 1
NOTE = "qtensor: import qtensor.integrations.transformers before from_pretrained"
"""Says in a file and in config.json what is missing where a loader does not know the layout.

Such a loader would leave the weights as they were initialized, with a warning at most. A tensor
under the name of each weight makes it stop at the shape (``label``). transformers stops before, at
a name under ``fusion_config`` of config.json that it does not know, and shows the name.
"""
_ONES = (1, 1, 1, 1, 1)
"""The first dims of a label; no weight has six dims."""
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATING}
_STORED = {torch.uint8: "U8", torch.float32: "F32"}


class QTensorWriter(Writer):
    """Write every buffer as it is, in any format and with any option."""

    layout = "qtensor"
    formats = ("any format",)
    keeps_names = True
    takes_scales = takes_rotations = True
    swizzled = None
    tensor_factor = ""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._entries: dict[str, dict[str, Any]] = {}
        self._noted = ""
        self._transforms = False
        """Whether layers scale or rotate their inputs."""

    def encode(self, name: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
        """Return the buffers, each under the name of the tensor, a dot and the keyword.

        The label of the weight has the name itself. The first weight brings an empty tensor with
        the name ``NOTE``.
        """
        inner = tensor_of(tensor)
        stored = {
            f"{name}.{keyword}": buffer
            for keyword, buffer in zip(tensor.quantizer.keywords, inner.buffers(), strict=True)
        }
        self._entries[name] = {
            "quantizer": tensor.quantizer.canonical,
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "buffers": dict(zip(tensor.quantizer.keywords, stored, strict=True)),
        }
        if inner is not tensor:
            self._entries[name]["matrix"] = list(inner.shape)
        self._noted = self._noted or name
        note = {NOTE: torch.empty(0, dtype=torch.uint8)} if name == self._noted else {}
        return {**stored, name: label(tensor.quantizer.canonical), **note}

    def plain(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the tensor; weights for scaled or rotated inputs need our loader, as codes do."""
        self._transforms |= name.rpartition(".")[2] in (PRE_SCALE, ROTATION)
        return super().plain(name, tensor)

    def metadata(self, names: Iterable[str]) -> dict[str, str]:
        """Return the entries of the quantized tensors among ``names``."""
        entries = {name: self._entries[name] for name in names if name in self._entries}
        text = json.dumps({"version": VERSION, "tensors": entries}, separators=(",", ":"))
        return {"format": "pt", KEY: text}

    def config(self) -> dict[str, Any]:
        """Return the config with ``quantization_config.quant_method: "qtensor"``."""
        if not self._entries and not self._transforms:
            return self.model_config
        config = {
            **self.model_config,
            "quantization_config": {"quant_method": KEY, "version": VERSION},
        }
        if "model_type" in config:  # one of transformers
            config["fusion_config"] = {**(config.get("fusion_config") or {}), NOTE: False}
        return config


def label(canonical: str) -> Tensor:
    """Return the canonical text of a quantizer as a tensor that has the shape of no weight."""
    return torch.tensor(list(canonical.encode()), dtype=torch.uint8).view(*_ONES, -1)


def read_label(tensor: Tensor) -> str | None:
    """Return the text of a label, or None for any other tensor."""
    if tensor.dtype != torch.uint8 or tuple(tensor.shape[:-1]) != _ONES:
        return None
    return bytes(tensor.flatten().tolist()).decode()


def without_note(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json without the note for loaders that do not know the layout."""
    left = dict(config)
    if NOTE in (left.get("fusion_config") or {}):
        fusions = {k: v for k, v in left.pop("fusion_config").items() if k != NOTE}
        left |= {"fusion_config": fusions} if fusions else {}
    return left


class QTensorLayout(Layout):
    """Read our own layout."""

    name = "qtensor"
    rank = 5
    factor_names = frozenset({
        "input_quantizer",
        "input_rotation",
        "pre_quant_scale",
        "input_scale",
        "input_global_scale",
        "k_scale",
        "v_scale",
    })
    input_factors: ClassVar[Mapping[str, Any]] = {
        "input_scale": FACTOR,
        "input_global_scale": DIVISOR,
    }
    writer = QTensorWriter

    @classmethod
    def recognises(cls, source: Source) -> bool:
        """Return True if a header has the text ``qtensor``."""
        return any(KEY in header for header in source.headers)

    def input_format(self, group: Group) -> str:
        """Return the format of inputs whose factor has the name that another layout gave it."""
        module = group.name.removesuffix("weight")
        if any(f"{module}{last}" in self.source.tensors for last in self.input_factors):
            return "nvfp4" if group.quantizer.format == "nvfp4" else "fp8"
        return ""

    def groups(self) -> Iterable[Group]:
        """Return the quantized tensors that the headers describe."""
        seen: dict[str, Any] = {}
        for header in self.source.headers:
            text = header.get(KEY)
            if text is None:
                continue
            # The text came out of a JSON string, so it may hold lone surrogates.
            about = parse_json(text.encode("utf-8", "surrogatepass"), self.place())
            if about.get("version") != VERSION:
                fix = "Install a newer qtensor"
                rule = f"this qtensor reads version {VERSION} of the layout"
                self.refuse("", rule, f"version {about.get('version')!r}", fix)
            entries = about.get("tensors")
            if not isinstance(entries, dict):
                rule = 'the header text has "tensors": {name: entry}'
                self.refuse("", rule, type(entries).__name__, "Write the file again")
            for name, entry in entries.items():
                # transformers writes the entries of all shards into each of them.
                if name not in seen or seen[name] != entry:
                    yield self._group(name, entry)
                seen[name] = entry

    def _group(self, name: str, entry: object) -> Group:
        """Return the group of an entry after checking it against the stored tensors."""
        keys = {"quantizer", "shape", "dtype", "buffers"}
        if not isinstance(entry, dict) or not keys <= set(entry):
            got = sorted(entry) if isinstance(entry, dict) else repr(entry)
            self.refuse(name, f"an entry has {sorted(keys)}", got, "Write the file again")
        shape = checked_shape(entry["shape"], self.source.path, name, self.name)
        if not isinstance(entry["dtype"], str) or entry["dtype"] not in _DTYPES:
            rule = f"the nominal dtype is one of {', '.join(_DTYPES)}"
            self.refuse(name, rule, repr(entry["dtype"]), "Write the file again")
        if not isinstance(entry["quantizer"], str):
            rule = "the quantizer is its canonical text"
            self.refuse(name, rule, repr(entry["quantizer"]), "Write the file again")
        try:
            quantizer = parsed(entry["quantizer"])
        except QTensorError as error:
            fix = "Or install the version of qtensor that wrote the file"
            self.refuse(name, "the quantizer must be known", str(error).rstrip("."), fix)
        names = entry["buffers"]
        if not isinstance(names, dict) or tuple(names) != quantizer.keywords:
            rule = f"{quantizer.canonical} has the buffers {list(quantizer.keywords)}"
            self.refuse(name, rule, repr(names), "Write the file again")
        roles = {keyword: self._stored(name, names[keyword]) for keyword in names}
        matrix = None
        if entry.get("matrix") is not None:
            matrix = checked_shape(entry["matrix"], self.source.path, name, self.name)
            if len(matrix) != 2 or math.prod(matrix) != math.prod(shape):
                rule = f"the matrix of a weight {list(shape)} has as many values"
                self.refuse(name, rule, list(matrix), "Write the file again")
        sizes = buffer_shapes(quantizer.slots, matrix or shape)
        for slot, size in zip(quantizer.slots, sizes, strict=True):
            info = roles[slot.keyword]
            # The buffers of a part of a tensor may lack padding; assemble checks the lower bound.
            fits = len(info.shape) == len(size) and all(
                n <= most for n, most in zip(info.shape, size, strict=True)
            )
            if info.dtype != _STORED[slot.dtype] or not fits:
                why = f"{slot.name} of {quantizer.canonical}, {tuple(shape)},"
                self.expect(info, [tuple(size)], [_STORED[slot.dtype]], why)
        for key in (name, NOTE):
            stored = self.source.tensors.get(key)
            if stored is not None and (key == NOTE or stored.shape[:-1] == _ONES):
                roles[f"label {key}"] = stored
        dtype = _DTYPES[entry["dtype"]]
        scheme = quantizer.canonical
        return Group(name, roles, shape, dtype, quantizer, scheme, matrix=matrix)

    def _stored(self, name: str, stored: object) -> TensorInfo:
        if not isinstance(stored, str) or stored not in self.source.tensors:
            fix = "Write the file again; shards must lie in one folder"
            self.refuse(name, "the file has each buffer of the entry", repr(stored), fix)
        return self.source.tensors[stored]

    def read(self, group: Group, stored: Loaded) -> QuantizedTensor:
        """Return the tensor around the buffers of the file."""
        buffers = [stored[keyword] for keyword in group.quantizer.keywords]
        if group.matrix is None:
            return group.quantizer.assemble(buffers, group.shape, group.dtype)
        matrix = group.quantizer.assemble(buffers, group.matrix, group.dtype)
        return reshaped(matrix, group.shape)

    def decodes_as_ours(self, group: Group, dtype: torch.dtype) -> bool:
        """Return True: we are the origin."""
        return True

    def decode(self, group: Group, stored: Loaded, dtype: torch.dtype) -> Tensor:
        """Return the values as ``dequantize`` does: we are the origin."""
        return self.read(group, stored).dequantize(dtype)
