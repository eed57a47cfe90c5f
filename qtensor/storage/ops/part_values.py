"""Read parts by Python indices that cut blocks: plain values, which refuse to be written to."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

import torch
from torch import Tensor

from qtensor.core.errors import UnsupportedError, fail
from qtensor.core.torch_state import no_torch_function

if TYPE_CHECKING:
    from qtensor.storage.tensor import QuantizedTensor

SMALL = 256
"""The most values of a part of several dims that is read where codes cannot be cut."""
_ALIGNED = 128
"""Every format lets rows be cut at multiples of this number."""


class PartValues(torch.Tensor):
    """Plain values of a part of a quantized tensor: a copy, not a view.

    It behaves as a plain tensor, and ops return plain tensors, but in-place ops raise an error,
    because they would not reach the quantized tensor. ``clone()`` returns values to write to.
    """

    def scaled_mm_args(self, side: str = "a", *, codes: bool = False) -> NoReturn:
        """Raise an error: the values of a part have no codes and factors.

        Raises:
            UnsupportedError: always.
        """
        _refuse_codes("scaled_mm_args", self)

    def scaled_grouped_mm_args(self, side: str = "a", **options: Any) -> NoReturn:
        """Raise an error, as ``scaled_mm_args`` does.

        Raises:
            UnsupportedError: always.
        """
        _refuse_codes("scaled_grouped_mm_args", self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.clone())

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return no_torch_function(Tensor.clone, (), (self,), {}).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        written = [kwargs.get("out")]
        if args and _is_in_place(name):
            # The functions of torch._foreach_ take lists.
            written += args[0] if isinstance(args[0], list | tuple) else [args[0]]
        if any(isinstance(t, cls) for t in written):
            _refuse(name)
        result = no_torch_function(func, types, args, kwargs)
        source = args[0] if args and isinstance(args[0], cls) else None
        if source is None:
            return result
        if isinstance(result, tuple | list) and all(type(r) is Tensor for r in result):
            return type(result)(_marked(r, source) for r in result)
        return _marked(result, source) if type(result) is Tensor else result


_HARMLESS = ("requires_grad_", "share_memory_", "rename_")


def _is_in_place(name: str) -> bool:
    """Return whether a method of that name changes the values of its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name in _IN_PLACE)
    return name.endswith("_") and name not in _HARMLESS


_IN_PLACE = {
    f"__i{op}__"
    for op in (
        *("add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow"),
        *("and", "or", "xor", "lshift", "rshift"),
    )
}


def _marked(result: Tensor, source: Tensor) -> Tensor:
    """Return a view of the values as ``PartValues`` too, and another result as it is."""
    memory = [
        no_torch_function(Tensor.untyped_storage, (), (t,), {})._cdata for t in (result, source)
    ]
    return result.as_subclass(PartValues) if memory[0] == memory[1] else result


def _refuse(name: str) -> NoReturn:
    fail(
        name,
        "a part that cuts blocks was read as plain values, and a write to these would not reach "
        "the quantized tensor",
        "values of a part",
        "Write to values.clone(), or dequantize the tensor, change the values and quantize again",
        UnsupportedError,
    )


def _refuse_codes(name: str, values: Tensor) -> NoReturn:
    fail(
        name,
        "a part that cuts blocks was read as plain values, which have no codes and factors",
        f"values {tuple(values.shape)} of a part",
        "Slice the tensor at whole blocks, or quantize the values",
        UnsupportedError,
    )


def _is_integer(part: object) -> bool:
    return isinstance(part, int | torch.SymInt) and not isinstance(part, bool)


def _reads_values(t: QuantizedTensor, index: Any) -> bool:
    """Return whether an index names a row, a column or elements of one, or a small part."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(p is None or p is Ellipsis or isinstance(p, slice) or _is_integer(p) for p in parts):
        return False
    shape = torch.empty(t.shape, device="meta")[index].shape
    is_line = any(map(_is_integer, parts)) and len(shape) <= 1
    return is_line or math.prod(shape) <= SMALL


def read_values(t: QuantizedTensor, index: Any) -> PartValues | None:
    """Return ``t.dequantize()[index]`` as a copy that cannot be written to.

    Only the rows that are needed are decoded, if rows can be cut out. The gradient reaches ``t``.

    Args:
        t: quantized, (d0, ..., dn), from which ``index`` cannot cut codes.
        index: of any kind.

    Returns:
        The values of one row, one column or a piece of these, named by integers, or of a part of at
        most ``SMALL`` values. None for larger parts, for an index with other parts than integers,
        slices, None and ``...``, and for tensors that a compiler traces, because writes to the
        values could not be refused.
    """
    if not _reads_values(t, index):
        return None
    parts = index if isinstance(index, tuple) else (index,)
    first: Any = parts[0]
    if t.ndim > 1 and (_is_integer(first) or isinstance(first, slice)):
        rows = range(t.shape[0])[first]
        chosen = range(rows, rows + 1) if isinstance(rows, int) else rows
        start = min(chosen, default=0) // _ALIGNED * _ALIGNED
        stop = -(-(max(chosen, default=0) + 1) // _ALIGNED) * _ALIGNED
        try:
            t = torch.Tensor.__getitem__(t, slice(start, stop))  # type: ignore[assignment]
        except UnsupportedError:
            start = 0
        moved = slice(chosen.start - start, chosen.stop - start, chosen.step)
        parts = (rows - start if isinstance(rows, int) else moved, *parts[1:])
    values = t.dequantize()[parts]
    return values.clone().as_subclass(PartValues) if type(values) is Tensor else None
