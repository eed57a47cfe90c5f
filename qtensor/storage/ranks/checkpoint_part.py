"""Read and write rectangles of quantized tensors, for ``torch.distributed.checkpoint``.

torch saves each rank's shard. When it loads, it copies the rectangles in which a saved shard and a
wanted shard overlap. A copy between plain views would keep the tensor-wide factors of the
destination, and so change every value. ``CheckpointPart`` copies codes and factors together, and
raises an error where that is not exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from qtensor.core.buffer_shapes import ceil_div, rows_cols
from qtensor.core.errors import QTensorError, UnsupportedError, fail
from qtensor.core.formats import Slot
from qtensor.core.quantizer_registry import QuantizerLike
from qtensor.core.torch_state import no_torch_function
from qtensor.storage import geometry
from qtensor.storage.base import is_quantized
from qtensor.storage.ops.table import Args, Kwargs, Op
from qtensor.storage.ops.write import begin_write
from qtensor.storage.rebuild import tensor_of

if TYPE_CHECKING:
    from qtensor.storage.tensor import QuantizedTensor

Rectangle = tuple[tuple[int, int], ...]
"""(start, end) along each dim."""

_OP = "distributed checkpoint"
_SAME = ("aten::detach", "aten::alias")
_VALUES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _rows(t: QuantizedTensor, area: Rectangle) -> tuple[int, int]:
    """Return the rows of the (M, K) view that a rectangle covers.

    Raises:
        UnsupportedError: they are not consecutive.
    """
    lead = list(zip(area[:-1], t.shape[:-1], strict=True))
    if any(r != (0, n) for r, n in lead[1:]):
        rule = "blocks run along the flattened leading dims, so only the first can be cut"
        _refuse(t, rule, f"{area} of {tuple(t.shape)}")
    inner = math.prod(n for _, n in lead[1:])
    start, end = lead[0][0] if lead else (0, 1)
    return start * inner, end * inner


def _refuse(t: QuantizedTensor, rule: str, got: object) -> NoReturn:
    fix = "Choose shards that begin and end at blocks, or save a dequantized tensor"
    fail(f"{_OP}[{t._quantizer.format}]", rule, got, fix, UnsupportedError)


def slot_area(t: QuantizedTensor, slot: Slot, area: Rectangle) -> Rectangle:
    """Return the entries of the buffer of ``slot`` that belong to a rectangle of ``t``.

    Swizzled scales are counted in tiles.

    Raises:
        UnsupportedError: the rectangle cuts a block.
    """
    result: list[tuple[int, int]] = []
    for axis in slot.dims:
        if axis.axis == "one":
            result.append((0, 1))
            continue
        if axis.axis == "lead":
            result += area[:-1]
            continue
        is_row = axis.axis == "m"
        start, end = _rows(t, area) if is_row else (area[-1] if area else (0, 1))
        total = rows_cols(t.shape)[0 if is_row else 1]
        granule = geometry.granule(slot, axis)
        if start % granule or (end % granule and end != total):
            kind = "rows" if is_row else "columns"
            dim = 0 if is_row else len(area) - 1
            rule = (
                f"shards are cut at a multiple of {granule} {kind} (Shard({dim}), for {slot.name})"
            )
            _refuse(t, rule, f"{start}:{end} of {total}")
        units = 1 if slot.swizzled else axis.units
        step = granule if slot.swizzled else axis.per
        result.append((start // step * units, ceil_div(end, step) * units))
    return tuple(result)


def _view(t: QuantizedTensor, slot: Slot, area: Rectangle) -> Tensor:
    """Return the entries ``area`` of a buffer, as a view."""
    buffer = getattr(t, slot.name)
    if slot.swizzled:
        tiles = geometry.as_tiles(slot, buffer)
        area = area if slot.dims[0].pad == geometry.TILE[0] else area[::-1]
        return tiles[tuple(slice(*r) for r in area)]
    return buffer[tuple(slice(*r) for r in area)]


def _overlap(a: Rectangle, b: Rectangle) -> Rectangle | None:
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return None if any(start >= end for start, end in both) else both


class CheckpointPart(torch.Tensor):
    """Show a rectangle of a quantized tensor to ``torch.distributed.checkpoint``.

    Attributes:
        whole: the quantized tensor.
        area: the rectangle, in the coordinates of ``whole``.
        entry: the entry of the state_dict, for errors.
    """

    whole: QuantizedTensor
    area: Rectangle
    entry: str

    @staticmethod
    def __new__(
        cls: type[CheckpointPart],
        whole: QuantizedTensor,
        area: Rectangle | None = None,
        entry: str = "",
    ) -> CheckpointPart:
        """Make a part; the whole tensor if ``area`` is None."""
        area = tuple((0, n) for n in whole.shape) if area is None else area
        shape = [end - start for start, end in area]
        self = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=whole.dtype, device=whole.device
        )
        self.whole, self.area, self.entry = whole, area, entry
        return self

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"CheckpointPart({self.area} of {self.whole!r})"

    def storage(self) -> NoReturn:
        """Refuse safetensors, with which ``HuggingFaceStorageWriter`` writes."""
        fail(
            f"{_OP}[{self.whole._quantizer.format}]",
            "a safetensors file has no quantized tensors; only torch's own files hold them",
            f"{self.entry or 'a tensor'} of shape {tuple(self.whole.shape)}",
            "Save with dcp.FileSystemWriter, or write safetensors with qtensor.checkpoints.save",
            UnsupportedError,
        )

    data_ptr = storage  # safetensors asks for both

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return whole_part, (self.whole.detach(),)

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Op, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        name, part = func._schema.name, args[0]
        if name == "aten::copy_":
            return _copy(*args[:2])
        if name in _SAME:
            return CheckpointPart(part.whole, part.area, part.entry)
        if name == "aten::clone":
            return CheckpointPart(part.whole.clone(), part.area, part.entry)
        if name == "aten::_to_copy":
            return CheckpointPart(func(part.whole, **(kwargs or {})), part.area, part.entry)
        if name == "aten::slice":
            return _slice(*args)
        rule = "only copies and slices of a part are defined"
        fail(_OP, rule, str(func), "Load into the quantized tensor", UnsupportedError)


def whole_part(whole: QuantizedTensor) -> CheckpointPart:
    """Return the part that is a whole tensor; saved shards are rebuilt by this function."""
    if not is_quantized(whole):
        fail(_OP, "a part belongs to a quantized tensor", type(whole).__name__, "Save it again")
    return CheckpointPart(whole)


torch.serialization.add_safe_globals([whole_part])


def _slice(
    part: CheckpointPart, dim: int = 0, start: int | None = None, end: int | None = None
) -> CheckpointPart:
    first, last = part.area[dim]
    size = last - first
    begin, stop = min(start or 0, size), size if end is None else min(end, size)
    area = (*part.area[:dim], (first + begin, first + max(begin, stop)), *part.area[dim + 1 :])
    return CheckpointPart(part.whole, area, part.entry)


def _copy(to: Tensor, source: Tensor) -> Tensor:
    """Copy a rectangle, codes and factors together, and return ``to``.

    Raises:
        QTensorError: see ``_copy_exactly``; the message names the entry of the state_dict.
    """
    try:
        _copy_exactly(to, source)
    except QTensorError as error:
        if not isinstance(to, CheckpointPart) or not to.entry:
            raise
        raise type(error)(f"{to.entry}: {error}") from error
    return to


def _copy_exactly(to: Tensor, source: Tensor) -> None:
    """Copy a rectangle, codes and factors together.

    Raises:
        QTensorError: one side is plain, the source has codes alone, the quantizers differ, or the
            parts of a tensor have different factors.
    """
    if not isinstance(to, CheckpointPart):
        # torch gives the destination without its name.
        canonical = cast(CheckpointPart, source).whole._quantizer.canonical
        fail(
            _OP,
            "a tensor that was saved quantized is loaded into a quantized one",
            f"a plain tensor of shape {tuple(to.shape)} for {canonical}",
            f"Load into quantizer({canonical!r}).quantize(torch.zeros(shape)) and dequantize that",
            UnsupportedError,
        )
    if is_quantized(source):
        source = CheckpointPart(source)
    if not isinstance(source, CheckpointPart):
        if source.dtype not in _VALUES:
            fail(
                f"{_OP}[{to.whole._quantizer.format}]",
                "a quantized tensor is loaded from floating-point values, or as it was saved",
                f"a plain {source.dtype} tensor: codes without their factors",
                "Load checkpoints of quantized weights with qtensor.checkpoints.load_state_dict",
            )
        _quantize_into(to, source)
        return
    quantizer, saved = to.whole._quantizer, source.whole._quantizer
    if not serves(saved, quantizer):
        fail(
            f"{_OP}[{quantizer.format}]",
            "a tensor is loaded with the quantizer that it was saved with",
            f"{quantizer.canonical} for {saved.canonical}, shape {tuple(to.whole.shape)}",
            "Load into a tensor of that quantizer, dequantize it and quantize the values",
        )
    _write(to, source)


def serves(saved: QuantizerLike, wanted: QuantizerLike) -> bool:
    """Return True if ``saved`` has all buffers of ``wanted``."""
    if saved == wanted:
        return True
    if (wanted.rowwise and not saved.rowwise) or (wanted.columnwise and not saved.columnwise):
        return False
    usages = {"rowwise": wanted.rowwise, "columnwise": wanted.columnwise}
    return bool(saved.format == wanted.format and saved.with_usage(**usages) == wanted)


def _quantize_into(to: CheckpointPart, values: Tensor) -> None:
    """Quantize plain values from a checkpoint into a part.

    Raises:
        UnsupportedError: the values are not the whole tensor, and decide its factors.
    """
    whole = to.whole
    if tuple(to.shape) == tuple(whole.shape):
        whole.copy_(values)
        return
    if whole._quantizer.needs_scale or any(
        all(d.axis in ("one", "k") for d in s.dims) or all(d.axis in ("one", "m") for d in s.dims)
        for s in whole._quantizer.slots
    ):
        _refuse(whole, "plain values from several shards cannot decide one factor", to.area)
    _write(to, CheckpointPart(whole._quantizer.quantize(values.to(whole.device))))


def _write(to: CheckpointPart, source: CheckpointPart) -> None:
    to, source = _of_tensors(to, source)
    whole, slots = to.whole, to.whole._quantizer.slots
    shared = begin_write(whole)
    areas = [(slot_area(whole, s, to.area), slot_area(source.whole, s, source.area)) for s in slots]
    loaded, copies = _loaded_before(to), []
    for slot, (own, theirs) in zip(slots, areas, strict=True):
        target, new = _view(whole, slot, own), _view(source.whole, slot, theirs)
        copies.append((target, new))
        if slot.name in shared and not torch.equal(target, new):
            rule = f"a part of a tensor is loaded with values that have its {slot.name}"
            _refuse(whole, rule, f"other factors for {to.area} of {tuple(whole.shape)}")
        for other in loaded:
            _check_equal(whole, slot, own, slot_area(whole, slot, other), new, to.area)
    for target, new in copies:
        target.copy_(new)
    covered = sum(math.prod(end - start for start, end in area) for area in (*loaded, to.area))
    if covered >= whole.numel():
        begin_load(whole)
    else:
        _LOADED[whole] = (*loaded, to.area)


def _of_tensors(
    to: CheckpointPart, source: CheckpointPart
) -> tuple[CheckpointPart, CheckpointPart]:
    """Return the parts of the tensors in reshaped views, such as weights of convolutions.

    Raises:
        UnsupportedError: one side is a view and the other side is not, or not all of it is loaded.
    """
    inner = tensor_of(to.whole), tensor_of(source.whole)
    if inner[0] is to.whole and inner[1] is source.whole:
        return to, source
    wholes = all(tuple(part.shape) == tuple(part.whole.shape) for part in (to, source))
    if not wholes or inner[0].shape != inner[1].shape:
        rule = "the weight of a convolution is loaded whole, as it was saved"
        _refuse(to.whole, rule, f"{source.area} of {tuple(source.whole.shape)}")
    return CheckpointPart(inner[0], entry=to.entry), CheckpointPart(inner[1])


_LOADED: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The rectangles of each tensor that the current load has written."""


def begin_load(whole: QuantizedTensor) -> None:
    """Forget what earlier loads have written, which may have been interrupted."""
    _LOADED.pop(whole, None)


def _loaded_before(to: CheckpointPart) -> tuple[Rectangle, ...]:
    """Return the parts that the same load has written; a part that comes again begins a new one."""
    loaded: tuple[Rectangle, ...] = _LOADED.get(to.whole, ())
    again = any(_overlap(to.area, other) is not None for other in loaded)
    return () if again else loaded


def _check_equal(
    whole: QuantizedTensor,
    slot: Slot,
    own: Rectangle,
    other: Rectangle,
    new: Tensor,
    area: Rectangle,
) -> None:
    """Refuse factors that another part of the same load has set to other values.

    Raises:
        QTensorError: the factors differ.
    """
    both = _overlap(own, other)
    if both is None:
        return
    within = tuple((a - o, b - o) for (a, b), (o, _) in zip(both, own, strict=True))
    if slot.swizzled and slot.dims[0].pad != geometry.TILE[0]:
        within = within[::-1]
    if not torch.equal(_view(whole, slot, both), new[tuple(slice(*r) for r in within)]):
        fail(
            f"{_OP}[{whole._quantizer.format}]",
            f"the saved shards of one tensor must have the same {slot.name}",
            f"other values for {area} of {tuple(whole.shape)}",
            "Load each shard into a tensor of its own, or quantize the shards with the maximum "
            "over ranks (amax_reduction_group) before saving. After a load that stopped, load into "
            "a new tensor",
        )
