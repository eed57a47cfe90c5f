"""Read torchao checkpoints: safetensors with header texts, and pickles of its subclasses.

The header text ``tensor_names`` is a JSON list of names, and each name has a JSON text
``{"_type", "_data", "_tensor_data_names"}``. The tensors of ``a.b.weight`` are stored as
``a.b._weight_qdata`` and so on. In a pickle, a subclass is a record with the same attributes.
torchao_writer.py writes the safetensors form.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from qtensor.checkpoints import arithmetic
from qtensor.checkpoints.buffers import Parts, assemble
from qtensor.checkpoints.containers.base import TensorInfo
from qtensor.checkpoints.containers.safetensors import parse_json
from qtensor.checkpoints.containers.torch_pickle import Call, holds_tensor
from qtensor.checkpoints.layout_base import DenseOnly, Group, Layout, Loaded, Source, Target
from qtensor.checkpoints.layouts.torchao_writer import (
    ACT,
    FLOAT8,
    METHOD,
    MX,
    MX_ELEMENTS,
    NAMES,
    NVFP4,
    TorchAOWriter,
    stored_name,
)
from qtensor.checkpoints.nvfp4_factor import TensorFactor, from_experts, from_factor
from qtensor.core.buffer_shapes import buffer_shape, ceil_div, round_up, rows_cols
from qtensor.core.errors import QTensorError
from qtensor.core.quantizer_registry import quantizer_class
from qtensor.reference.blocks import unswizzle
from qtensor.storage.rebuild import FLOATING
from qtensor.storage.tensor import QuantizedTensor

_TENSORS = {
    FLOAT8: (("qdata", "scale"), ()),
    MX: (("qdata", "scale"), ()),
    NVFP4: (("qdata", "scale"), ("per_tensor_scale", ACT)),
}
"""``_type`` -> (names of its tensors, names of optional ones)."""
_FP8 = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2"}
_TILE = 128
"""Size of FP8 blocks, which alone may be larger than the weight."""
_AGAIN = "Save the model again with torchao"


class Weight(NamedTuple):
    """Describe a weight as a header text or a record does: its type, tensors and attributes."""

    name: str
    kind: str
    tensors: Mapping[str, TensorInfo]
    data: Mapping[str, Any]


class Options(NamedTuple):
    """Hold what decoding needs besides the tensors."""

    kind: str
    element: str
    block: tuple[int, ...]
    """Elements that share a factor, for each dim."""
    swizzled: bool = False
    transposed: bool = False
    """True if the tensors of a pickle are the transpose of what they describe."""


class TorchAOLayout(Layout):
    """Read torchao checkpoints."""

    name = METHOD
    rank = 30
    methods = (METHOD,)
    writer = TorchAOWriter
    factor_names = frozenset({ACT, f"_weight_{ACT}"})

    @classmethod
    def recognises(cls, source: Source) -> bool:
        """Return True for the header text, for records of torchao, and for ``quant_method``."""
        if any(NAMES in header for header in source.headers) or source.method == METHOD:
            return True
        records: Mapping[str, Call] = source.extra.get("records", {})
        return any(call.function.startswith(f"{METHOD}.") for call in records.values())

    def groups(self) -> Iterable[Group]:
        """Return a group for each tensor subclass."""
        count = 0
        for weight in (*self._described(), *self._recorded()):
            count += 1
            yield {FLOAT8: self._float8, MX: self._mx, NVFP4: self._nvfp4}[weight.kind](weight)
        told = any(NAMES in header for header in self.source.headers)
        if not count and not told:
            rule = "a torchao file has the header text tensor_names, or records in a pickle"
            self.refuse("", rule, "neither", _AGAIN)

    # ---- descriptions

    def _described(self) -> Iterable[Weight]:
        """Yield the weights of the header texts."""
        seen: dict[str, str] = {}
        for header in self.source.headers:
            for name in self._names(header):
                text = header.get(name)
                if text is None:
                    self.refuse(name, "each of tensor_names has a text", "none", _AGAIN)
                if seen.setdefault(name, text) != text:
                    self.refuse(name, "the texts of all shards agree", "two", _AGAIN)
        for name, text in seen.items():
            entry = parse_json(text.encode("utf-8", "surrogatepass"), self.place(name))
            kind = self._kind(name, entry.get("_type"))
            if kind == "Tensor":
                self._stored(name, name)
                continue
            data, names = entry.get("_data"), entry.get("_tensor_data_names")
            if not isinstance(data, dict) or not isinstance(names, list):
                rule = f"a {kind} has _data and _tensor_data_names"
                self.refuse(name, rule, f"{sorted(entry)}", _AGAIN)
            keys = self._keys(name, kind, names)
            tensors = {key: self._stored(name, stored_name(name, key)) for key in keys}
            yield Weight(name, kind, tensors, {k: _value(v) for k, v in data.items()})

    def _names(self, header: Mapping[str, str]) -> list[str]:
        text = header.get(NAMES)
        try:
            names = [] if text is None else json.loads(text)
        except (ValueError, RecursionError) as error:
            self.refuse("", f"{NAMES} is JSON", error, _AGAIN)
        if not isinstance(names, list) or any(type(n) is not str for n in names):
            self.refuse("", f"{NAMES} is a list of names", type(names).__name__, _AGAIN)
        if len(set(names)) != len(names):
            self.refuse("", f"{NAMES} has each name once", "a name twice", _AGAIN)
        return names

    def _kind(self, name: str, kind: object) -> str:
        if kind == "Tensor" or (isinstance(kind, str) and kind in _TENSORS):
            return kind
        rule = f"the types that are read are Tensor, {', '.join(_TENSORS)}"
        self.refuse(name, rule, repr(kind), "Read it with torchao, or quantize to one of these")

    def _keys(self, name: str, kind: str, names: list[Any]) -> list[str]:
        """Return the names of the tensors of a weight after checking them."""
        needed, optional = _TENSORS[kind]
        known = all(isinstance(key, str) and key in (*needed, *optional) for key in names)
        if not known or not set(needed) <= set(names) or len(set(names)) != len(names):
            rule = f"a {kind} has the tensors {', '.join(needed)}"
            rule += f" and perhaps {', '.join(optional)}" if optional else ""
            self.refuse(name, rule, names, _AGAIN)
        return names

    def _stored(self, name: str, stored: str) -> TensorInfo:
        if stored not in self.source.tensors:
            fix = "Download the missing shard, and open the index of all shards"
            self.refuse(name, f"the file has the tensor {stored!r}", "none", fix)
        return self.source.tensors[stored]

    def _recorded(self) -> Iterable[Weight]:
        """Yield the weights of the records of a pickle."""
        records: Mapping[str, Call] = self.source.extra.get("records", {})
        for name, call in records.items():
            state = call.state if type(call.state) is dict else {}
            held = {k: v for k, v in state.items() if isinstance(v, TensorInfo)}
            if not holds_tensor(call):
                continue  # a configuration
            kind = self._kind(name, call.function.rpartition(".")[2])
            data = {k: v for k, v in state.items() if k not in held}
            if kind == FLOAT8 and len(call.args) > 1:
                data.setdefault("dtype", call.args[1])
            yield Weight(name, kind, {k: held[k] for k in self._keys(name, kind, [*held])}, data)

    def _group(
        self, weight: Weight, shape: tuple[int, ...], target: Target, options: Options
    ) -> Group:
        """Return the group of a weight; activation factors stay plain tensors."""
        key = "dtype" if weight.kind == FLOAT8 else "orig_dtype"
        dtype = weight.data.get(key)
        if dtype not in FLOATING:
            rule = f"{key} is a floating-point dtype"
            self.refuse(weight.name, rule, repr(dtype)[:60], _AGAIN)
        roles = {k: v for k, v in weight.tensors.items() if k != ACT}
        if options.transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
            target = DenseOnly("the tensors are stored as a transpose")
        return Group(weight.name, roles, shape, cast(Any, dtype), target, weight.kind, options)

    def _float8(self, weight: Weight) -> Group:
        codes, scale = weight.tensors["qdata"], weight.tensors["scale"]
        shape = codes.shape
        self.expect(codes, [shape], list(_FP8), "a Float8Tensor")
        block = weight.data.get("block_size") or shape
        legal = isinstance(block, (list, tuple)) and len(block) == len(shape)
        if not legal or any(type(n) is not int or n < 0 for n in block):
            rule = f"block_size has a positive size for each dim of {list(shape)}"
            self.refuse(weight.name, rule, repr(block)[:60], _AGAIN)
        if any(b == 0 and n != 0 for b, n in zip(block, shape, strict=True)):
            self.refuse(weight.name, "block_size has positive sizes", list(block), _AGAIN)
        if any(b > n and b != _TILE for b, n in zip(block, shape, strict=True)):
            rule = f"a block of {list(block)} lies inside the weight, or has sizes of {_TILE}"
            self.refuse(codes.name, rule, list(shape), _AGAIN)
        grid = tuple(ceil_div(n, max(b, 1)) for n, b in zip(shape, block, strict=True))
        shapes: list[tuple[int, ...]] = [grid]
        if all(n == 1 for n in grid):
            shapes += [(), (1,)]
        why = f"{weight.name} {list(shape)} in blocks of {list(block)}"
        self.expect(scale, shapes, ["F32", "BF16"], why)
        options = Options(FLOAT8, _FP8[codes.dtype], tuple(block))
        return self._group(weight, shape, _float8_target(shape, grid, options), options)

    def _mx(self, weight: Weight) -> Group:
        element = weight.data.get("elem_dtype")
        if not isinstance(element, (str, torch.dtype)) or element not in MX_ELEMENTS:
            rule = f"elem_dtype is one of {', '.join(str(e) for e in MX_ELEMENTS)}"
            self.refuse(weight.name, rule, repr(element)[:60], _AGAIN)
        fmt, short, stored = MX_ELEMENTS[element]
        size = self._size(weight, 32)
        shape, options = self._codes(weight, Options(MX, short, (size,)), stored, fmt == "mxfp4")
        self._factors(weight, shape, options, ["F8_E8M0"])
        target = DenseOnly(f"MX blocks of {size}; ours are 32")
        if size == 32:
            more = {} if fmt == "mxfp4" else {"dtype": short}
            target = quantizer_class(fmt)(swizzled=options.swizzled, **more)
        return self._group(weight, shape, target, options)

    def _nvfp4(self, weight: Weight) -> Group:
        size = self._size(weight, 16)
        shape, options = self._codes(weight, Options(NVFP4, "e2m1", (size,)), "U8", True)
        self._factors(weight, shape, options, ["F8_E4M3"])
        factor = weight.tensors.get("per_tensor_scale")
        if factor is not None:
            shapes: list[tuple[int, ...]] = [(), (1,)]
            if len(shape) == 3:
                shapes.append((shape[0], 1, 1))
            self.expect(factor, shapes, ["F32"], f"the factor of {weight.name} {list(shape)}")
        target = DenseOnly(f"NVFP4 blocks of {size}; ours are 16")
        if size == 16:
            target = quantizer_class("nvfp4")(swizzled=options.swizzled)
        return self._group(weight, shape, target, options)

    def _size(self, weight: Weight, default: int) -> int:
        size = weight.data.get("block_size", default)
        if type(size) is not int or size <= 0:
            self.refuse(weight.name, "block_size is positive", repr(size)[:60], _AGAIN)
        return size

    def _codes(
        self, weight: Weight, options: Options, dtype: str, packed: bool
    ) -> tuple[tuple[int, ...], Options]:
        """Return the shape of an MX or NVFP4 weight, row-major, and its options."""
        codes, swizzled = weight.tensors["qdata"], weight.data.get("is_swizzled_scales", False)
        self.expect(codes, [codes.shape], [dtype], f"a {weight.kind} of {options.element}")
        if len(codes.shape) not in (2, 3) or type(swizzled) is not bool:
            rule = f"a {weight.kind} has 2 or 3 dims, and is_swizzled_scales is true or false"
            self.refuse(codes.name, rule, f"{list(codes.shape)}, {swizzled!r:.40}", _AGAIN)
        strides = self.source.extra.get("strides", {}).get(codes.name, (1, 0))
        transposed = strides[-2] < strides[-1]
        shape = _flipped(codes.shape) if transposed else codes.shape
        if packed:
            shape = (*shape[:-1], 2 * shape[-1])
        if shape[-1] % options.block[0]:
            rule = f"the columns are whole blocks of {options.block[0]}"
            self.refuse(codes.name, rule, list(shape), _AGAIN)
        return shape, options._replace(swizzled=swizzled, transposed=transposed)

    def _factors(
        self, weight: Weight, shape: tuple[int, ...], options: Options, dtypes: list[str]
    ) -> None:
        """Check the factors of blocks along K."""
        *lead, rows, cols = shape
        blocks = cols // options.block[0]
        size: tuple[int, ...] = (*lead, rows, blocks)
        why = f"{weight.name} {list(shape)} in blocks of {options.block[0]}"
        if options.swizzled:
            why += ", swizzled,"
            size = (*lead, 32 * ceil_div(rows, 128), 16 * ceil_div(blocks, 4))
            if lead and lead[0] > 1 and rows % 128:
                rule = "swizzled experts have a multiple of 128 rows"
                self.refuse(weight.name, rule, list(shape), _AGAIN)
        if options.transposed:
            size = _flipped(size)
        self.expect(weight.tensors["scale"], [size], dtypes, why)

    def read(self, group: Group, stored: Loaded) -> QuantizedTensor | DenseOnly:
        """Return the quantized tensor of a weight."""
        quantizer, options = cast(Any, group.target), cast(Options, group.options)
        found = TensorFactor(quantizer, None)  # type: ignore[arg-type]
        if options.kind == NVFP4:
            factor = stored.get("per_tensor_scale", torch.ones((), dtype=torch.float32))
            if not bool((torch.isfinite(factor) & (factor > 0)).all()):
                return DenseOnly("per_tensor_scale is not positive and finite")
            rows = group.shape[-2]
            found = from_factor(factor) if factor.ndim < 3 else from_experts(factor, rows)
            quantizer = quantizer_class("nvfp4")(**{
                **found.quantizer.changed_options(),
                "swizzled": options.swizzled,
            })
        codes, scale = stored["qdata"], stored["scale"]
        if not options.swizzled:
            parts = Parts(codes, scale, found.amax, found.factor)
            return assemble(quantizer, group.shape, group.dtype, parts)
        # The tiles lie as in our own buffer.
        buffers = [codes.contiguous().view(torch.uint8)]
        full = buffer_shape(quantizer.slots[1].dims, group.shape)
        buffers.append(scale.contiguous().view(torch.uint8).reshape(full))
        buffers += [part for part in (found.amax, found.factor) if part is not None]
        tensor: QuantizedTensor = quantizer.assemble(buffers, group.shape, group.dtype)
        return tensor

    def decode(self, group: Group, stored: Loaded, dtype: torch.dtype) -> Tensor:
        """Return the values by torchao's arithmetic; a factor of 255 is NaN there."""
        options = cast(Options, group.options)
        codes, scale = stored["qdata"], stored["scale"]
        if options.kind == FLOAT8:
            elements = arithmetic.float8(codes, codes.dtype)
            return arithmetic.product(elements, _each(scale, options.block, group.shape), dtype)
        shape = group.shape
        if options.transposed:
            codes, scale, shape = codes.mT, scale.mT, _flipped(shape)
        codes, scale = codes.contiguous(), scale.contiguous()
        if options.swizzled:
            scale = _row_major(scale, shape, options.block[0])
        elements = _elements(options.element, codes)
        if options.kind == MX:
            factors = scale.view(torch.float8_e8m0fnu).float()
            factors = arithmetic.spread(factors, (1, options.block[0]), shape)
            values = arithmetic.in_dtype(elements, factors, dtype)
        else:
            factor = stored.get("per_tensor_scale", torch.ones((), dtype=torch.float32))
            scales = scale.view(torch.float8_e4m3fn).float()
            size = options.block[0]
            values = arithmetic.scales_first(elements, scales, factor, size, dtype)
        return values.mT if options.transposed else values


def _value(value: object) -> Any:
    """Return a value of ``_data``: the dtype or the name that it stands for."""
    if not isinstance(value, dict) or not isinstance(value.get("_data"), str):
        return value
    found = getattr(torch, value["_data"], None) if value.get("_type") == "torch.dtype" else None
    return found if isinstance(found, torch.dtype) else value["_data"]


def _flipped(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])


def _float8_target(shape: tuple[int, ...], grid: tuple[int, ...], options: Options) -> Any:
    """Return the quantizer of a Float8Tensor, or why there is none."""
    block, name, more = options.block, "", {}
    if all(n == 1 for n in grid):
        name = "fp8"
    elif grid[-1] == 1 and grid[:-1] == shape[:-1]:
        name = "fp8_rowwise"
    elif len(shape) == 2 and grid == (1, shape[1]):
        name, more = "fp8_rowwise", {"axis": 0}
    elif block[-1] == 128 and grid[:-1] == shape[:-1]:
        name, more = "fp8_blockwise", {"block_scaling_dim": 1, "force_pow_2_scales": False}
    elif block[-2:] == (128, 128) and grid[:-2] == shape[:-2]:
        name, more = "fp8_blockwise", {"block_scaling_dim": 2, "force_pow_2_scales": False}
        if len(shape) > 2 and shape[-2] % 128:
            return DenseOnly("blocks of 128 rows do not fit the experts")
    if not name:
        return DenseOnly(f"FP8 blocks of {'x'.join(map(str, block))} in {list(shape)}")
    try:
        return quantizer_class(name)(dtype=options.element, **more)
    except QTensorError:
        return DenseOnly(f"{name} has no {options.element}")


def _each(scale: Tensor, block: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """Return factors that broadcast against ``shape``, from one for each block."""
    factors = scale.float()
    if factors.numel() == 1:
        return factors.reshape(())
    for dim, (size, count) in enumerate(zip(block, shape, strict=True)):
        if factors.shape[dim] not in (1, count):
            factors = factors.repeat_interleave(size, dim).narrow(dim, 0, count)
    return factors


def _elements(element: str, codes: Tensor) -> Tensor:
    """Return the float32 values of MX or NVFP4 codes."""
    if element in ("e4m3", "e5m2"):
        return arithmetic.float8(codes, codes.dtype)
    if element == "e2m1":
        return arithmetic.e2m1(codes)
    return arithmetic.fp6_codes(codes, 2 if element == "e2m3" else 3)


def _row_major(scale: Tensor, shape: tuple[int, ...], size: int) -> Tensor:
    """Return swizzled factors as (..., N, K / size)."""
    rows, cols = rows_cols(shape)
    blocks = cols // size
    full = (round_up(rows, 128), round_up(blocks, 4))
    plain = unswizzle(scale.view(torch.uint8).reshape(full))[:rows, :blocks]
    return plain.reshape(*shape[:-1], blocks)
