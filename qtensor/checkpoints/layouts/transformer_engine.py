"""Read state dicts of Transformer Engine, which torch.save wrote.

A quantized parameter is a recorded call of one of four functions, whose arguments are our buffers,
one to one; docs/checkpoints.md has the table. An ``_extra_state`` is no weight: it is passed on as
bytes, and ``inner`` reads the tensors that lie in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

from qtensor.checkpoints import arithmetic
from qtensor.checkpoints.containers.base import TensorInfo, checked_shape
from qtensor.checkpoints.containers.torch_pickle import Call, holds_tensor
from qtensor.checkpoints.containers.torch_zip import pickled_tensors
from qtensor.checkpoints.errors import CheckpointError
from qtensor.checkpoints.layout_base import Group, Layout, Loaded, Source
from qtensor.core.buffer_shapes import buffer_shapes
from qtensor.core.quantizer_registry import quantizer_class
from qtensor.quantizers import Quantizer
from qtensor.storage.rebuild import FLOATING
from qtensor.storage.tensor import QuantizedTensor

PACKAGE = "transformer_engine"
EXTRA = "_extra_state"
_BOTH = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
_ARGUMENTS = {
    "float8_tensor": ("data", "fp8_dtype", "scale_inv", "dtype", "shape", "data_transpose"),
    "mxfp8_tensor": (*_BOTH, "fp8_dtype", "dtype", "shape", "quantizer", "swizzled"),
    "nvfp4_tensor": (
        "shape",
        *_BOTH,
        "amax_rowwise",
        "amax_columnwise",
        "fp4_dtype",
        "dtype",
        "quantizer",
        "swizzled",
        "row_scaled",
        "use_4over6",
        "e4m3_max",
    ),
    "float8_blockwise_tensor": (
        "shape",
        *_BOTH,
        "fp8_dtype",
        "dtype",
        "quantizer",
        "is_2D",
        "data_format",
    ),
}
"""Module of a constructor -> its arguments in order."""
_CLASSES = {
    "Float8Tensor": "float8_tensor",
    "MXFP8Tensor": "mxfp8_tensor",
    "NVFP4Tensor": "nvfp4_tensor",
    "Float8BlockwiseQTensor": "float8_blockwise_tensor",
}
_NEW = re.compile(r"transformer_engine\.pytorch\.tensor\.(\w+)\._make_(\w+)_in_reduce_ex")
_OLD = re.compile(r"transformer_engine\.pytorch\.(?:\w+\.)*(\w+)\._make_in_reduce_ex")
_ELEMENTS = {6: "e4m3", 7: "e4m3", 8: "e5m2"}
"""Value of the enum -> element. E4M3 was 6 before 2025-05 and is 7 since; weights are never E5M2,
which was 7 before."""
_STORED = {torch.uint8: "U8", torch.float32: "F32"}
_AGAIN = "Save the state dict again"


class TransformerEngineLayout(Layout):
    """Read state dicts of Transformer Engine."""

    name = "transformer-engine"
    rank = 20

    @classmethod
    def recognises(cls, source: Source) -> bool:
        """Return True for a torch file with its records, or for any plain file with extra states.

        A safetensors file that says anything about quantization has another layout.
        """
        has_extra = any(_is_extra(name) for name in source.tensors)
        if source.kind == "torch":
            calls = _records(source).values()
            return has_extra or any(call.function.startswith(PACKAGE) for call in calls)
        told = source.quantization or source.files or source.config.get("quantization")
        told = told or any(header.keys() - {"format"} for header in source.headers)
        codes = any(
            info.dtype in ("F8_E4M3", "F8_E5M2", "I8", "F4")
            or (info.dtype == "U8" and not _is_extra(info.name))
            for info in source.tensors.values()
        )
        return has_extra and source.kind == "safetensors" and not told and not codes

    def groups(self) -> Iterable[Group]:
        """Return a group for each recorded parameter."""
        for name, call in _records(self.source).items():
            form = _form(call.function)
            if form is not None:
                yield self._group(name, form, call)
            elif holds_tensor(call):
                rule = f"the tensors that are read are {', '.join(_CLASSES)}"
                fix = "Dequantize it where it was made, and save it again"
                self.refuse(name, rule, call.function, fix)

    def _group(self, name: str, form: str, call: Call) -> Group:
        """Return the group of a parameter after checking its arguments."""
        names = _ARGUMENTS[form]
        if not 4 < len(call.args) <= len(names):
            rule = f"{form} has the arguments {', '.join(names)}"
            self.refuse(name, rule, f"{len(call.args)} of them", _AGAIN)
        args = dict.fromkeys(names)
        args.update(zip(names, call.args, strict=False))
        shape, dtype = args["shape"], args["dtype"]
        if not isinstance(dtype, torch.dtype) or dtype not in FLOATING:
            dtype = None
        if not isinstance(shape, tuple | list) or dtype is None:
            rule = "a parameter has a shape and a floating-point dtype"
            got = f"{type(shape).__name__}, {args['dtype']!r:.60}"
            self.refuse(name, rule, got, _AGAIN)
        shape = checked_shape(list(shape), self.source.path, name, self.name)
        if form == "float8_tensor" and args["data"] is None:
            return self._transposed(name, args, shape, dtype)
        quantizer = self._quantizer(name, form, args)
        roles = {}
        for slot, size in zip(quantizer.slots, buffer_shapes(quantizer.slots, shape), strict=True):
            sizes = [size, ()] if size == (1,) and form == "float8_tensor" else [size]
            why = f"{slot.keyword} of {quantizer.canonical}, shape {list(shape)},"
            info = self._buffer(name, args, slot.keyword)
            self.expect(info, sizes, [_STORED[slot.dtype]], why)
            roles[slot.keyword] = info
        return Group(name, roles, shape, dtype, quantizer, form)

    def _transposed(
        self, name: str, args: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype
    ) -> Group:
        """Return the group of an FP8 tensor that only has its transpose, (K, ...)."""
        roles = {key: self._buffer(name, args, key) for key in ("data_transpose", "scale_inv")}
        size = (*shape[-1:], *shape[:-1])
        self.expect(roles["data_transpose"], [size], ["U8"], f"the transpose of {list(shape)}")
        self.expect(roles["scale_inv"], [(1,), ()], ["F32"], "FP8")
        quantizer = self._quantizer(name, "float8_tensor", args)
        return Group(name, roles, shape, dtype, quantizer, "float8_tensor, transposed")

    def _buffer(self, name: str, args: dict[str, Any], keyword: str) -> TensorInfo:
        info = args.get(keyword)
        if not isinstance(info, TensorInfo):
            got = "None" if info is None else type(info).__name__
            self.refuse(name, f"{keyword} is a tensor", got, _AGAIN)
        return info

    def _quantizer(self, name: str, form: str, args: dict[str, Any]) -> Quantizer:
        """Return the quantizer that describes the buffers of a parameter."""
        options: dict[str, Any] = {}
        if form != "float8_tensor":
            options["rowwise"] = args["rowwise_data"] is not None
            options["columnwise"] = args["columnwise_data"] is not None
            if not options["rowwise"] and not options["columnwise"]:
                self.refuse(name, "a parameter has rowwise or columnwise data", "none", _AGAIN)
        if form in ("mxfp8_tensor", "nvfp4_tensor"):
            options["swizzled"] = self._flag(name, args, "swizzled")
        if form == "nvfp4_tensor":
            options["row_scaled"] = self._flag(name, args, "row_scaled")
            options["use_4over6"] = self._flag(name, args, "use_4over6")
            options["e4m3_max"] = self._e4m3_max(name, args["e4m3_max"])
            return cast(Quantizer, quantizer_class("nvfp4")(**options))
        element = self._element(name, args["fp8_dtype"])
        if form == "float8_blockwise_tensor":
            options["block_scaling_dim"] = 2 if self._flag(name, args, "is_2D") else 1
            options["force_pow_2_scales"] = False
        formats = {"float8_tensor": "fp8", "mxfp8_tensor": "mxfp8"}
        cls = quantizer_class(formats.get(form, "fp8_blockwise"))
        return cast(Quantizer, cls(dtype=element, **options))

    def _flag(self, name: str, args: dict[str, Any], key: str) -> bool:
        value = args[key]
        if value not in (None, True, False) or type(value) not in (bool, type(None)):
            self.refuse(name, f"{key} is True or False", type(value).__name__, _AGAIN)
        return bool(value)

    def _e4m3_max(self, name: str, value: object) -> float:
        if value is None:
            return 448.0
        if type(value) not in (int, float) or value not in (448, 256):
            self.refuse(name, "e4m3_max is 448 or 256", repr(value)[:60], _AGAIN)
        return float(value)

    def _element(self, name: str, value: object) -> str:
        """Return the element that an enum names: a call with its value, or its state (older)."""
        number = value
        if isinstance(value, Call):
            number = value.args[0] if len(value.args) == 1 else value.state
        if type(number) is not int or number not in _ELEMENTS:
            rule = "fp8_dtype is 6 or 7 (E4M3) or 8 (E5M2)"
            self.refuse(name, rule, repr(number)[:60], _AGAIN)
        return _ELEMENTS[number]

    def read(self, group: Group, stored: Loaded) -> QuantizedTensor:
        """Return the tensor around its buffers."""
        found = dict(stored)
        if "data_transpose" in found:
            found["data"] = found["data_transpose"].movedim(0, -1)
        if "scale_inv" in found:
            found["scale_inv"] = found["scale_inv"].reshape(1)
        buffers = [found[keyword].contiguous() for keyword in group.quantizer.keywords]
        return group.quantizer.assemble(buffers, group.shape, group.dtype)

    def decode(self, group: Group, stored: Loaded, dtype: torch.dtype) -> Tensor:
        """Return the values by our own arithmetic, which equals the arithmetic of the origin."""
        if group.scheme == "mxfp8_tensor":
            direction = "rowwise" if "rowwise_scale_inv" in stored else "columnwise"
            arithmetic.e8m0(stored[f"{direction}_scale_inv"])  # refuses 255
        return self.read(group, stored).dequantize(dtype)

    # ---- extra states

    def inner_names(self) -> Iterable[str]:
        """Return the names of the tensors inside the extra states that can be read."""
        for name in self.source.tensors:
            if _is_extra(name):
                try:
                    yield from (f"{name}.{key}" for key in self._inside(name))
                except CheckpointError:
                    continue  # its bytes are kept

    def inner(self, name: str) -> Tensor | None:
        """Return a tensor inside an extra state, ``fc._extra_state.scale_fwd``, or None."""
        outer, found, key = name.rpartition(f"{EXTRA}.")
        state = f"{outer}{EXTRA}"
        if not found or state not in self.source.tensors:
            return None
        return self._inside(state).get(key)

    def _inside(self, name: str) -> dict[str, Tensor]:
        if self.source.read is None:
            return {}
        data = self.source.read(name)
        if data.dtype != torch.uint8:
            self.refuse(name, "an extra state is uint8", data.dtype, _AGAIN)
        return pickled_tensors(bytes(data.contiguous().numpy()), self.place(name))


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == EXTRA


def _records(source: Source) -> dict[str, Call]:
    return dict(source.extra.get("records", {}))


def _form(function: str) -> str | None:
    """Return the module of a constructor, or None for another function."""
    new, old = _NEW.fullmatch(function), _OLD.fullmatch(function)
    if new is not None:
        names = (new[2], f"{new[2]}_tensor")
        return new[1] if new[1] in _ARGUMENTS and new[1] in names else None
    return _CLASSES.get(old[1]) if old is not None else None
