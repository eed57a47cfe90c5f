"""Ways to come by a quantized tensor, as programs that run on plain tensors too.

An origin is a function of a ``World``. It makes tensors there, and returns the tensor under test
first, then the other tensors that may share memory with it. ``origin_sweep.py`` runs it in a world
of quantized tensors and in one of plain tensors: torch decides which of the plain tensors are
views of each other, and the quantized ones have to behave like them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from origin_worlds import (
    Holder,
    World,
    checkpoint_loaded,
    frozen,
    look,
    lower,
    right,
    saved,
    stepped,
    swap,
    unpickled,
    upper,
    use,
)
from torch import Tensor
from torch.nn import functional as F

import qtensor
from qtensor.storage.tensor import QuantizedTensor

Origin = Callable[[World], list[Any]]
ORIGINS: dict[str, Origin] = {}


def origin(function: Origin) -> Origin:
    ORIGINS[function.__name__.replace("_", " ")] = function
    return function


# ---- one tensor, then views or copies of it


def chain(make: Callable[[World], Any], *functions: Callable[[Any], Any]) -> Origin:
    """Return an origin that applies functions one after the other; it returns the last result
    first, and the tensors on the way.
    """

    def run(w: World) -> list[Any]:
        tensors = [make(w)]
        for function in functions:
            tensors.insert(0, function(tensors[0]))
        return tensors

    return run


SQUARE, STACK = World.square, World.stack
transposed = Tensor.mT.__get__  # type: ignore[attr-defined]
ORIGINS |= {
    "fresh": chain(SQUARE),
    "rows": chain(SQUARE, lower),
    "first rows": chain(SQUARE, upper),
    "columns": chain(SQUARE, right),
    "corner": chain(SQUARE, lower, right),
    "rows inside a block": chain(SQUARE, lambda t: t[3:43]),
    "one row": chain(SQUARE, lambda t: t[5]),
    "three dims": chain(SQUARE, lambda t: t.view(2, -1, t.shape[-1])),
    "flat": chain(SQUARE, lambda t: t.view(-1)),
    "matrix of a stack": chain(STACK, lambda t: t[1]),
    "transposed": chain(SQUARE, transposed),
    "part of transposed": chain(SQUARE, transposed, lower),
    "transposed part": chain(SQUARE, lower, transposed),
    "transposed stack": chain(STACK, transposed),
    "transposed stack, looked at": chain(STACK, lambda t: look(t.mT)),
    "matrix of a transposed stack": chain(STACK, transposed, lambda t: t[1]),
    "stack, transposed twice": chain(STACK, transposed, transposed),
    "detached": chain(SQUARE, Tensor.detach),
    "parameter": chain(SQUARE, frozen),
    "parameter of a part": chain(SQUARE, lower, frozen),
    "clone of a part": chain(SQUARE, lower, Tensor.clone),
    "contiguous columns": chain(SQUARE, right, lambda t: t.contiguous()),
    "contiguous transposed": chain(SQUARE, transposed, lambda t: t.contiguous()),
    "joined with itself": chain(SQUARE, lambda t: torch.cat([t, t])),
    "joined of its halves": chain(SQUARE, lambda t: torch.cat(t.chunk(2))),
    "picked rows": chain(SQUARE, lambda t: t.index_select(0, torch.arange(64).flip(0))),
    "picked matrices": chain(STACK, lambda t: t[[1, 0]]),
    "padded": chain(SQUARE, lambda t: F.pad(t, (0, 0, 0, t.shape[0]))),
    "part of padded": chain(SQUARE, lambda t: F.pad(t, (0, 0, 0, t.shape[0])), upper),
    "filled zeros": chain(SQUARE, lambda t: t.new_zeros(t.shape).copy_(t)),
    "part of filled zeros": chain(SQUARE, lambda t: t.new_zeros(t.shape).copy_(t), upper),
    "filled zeros inside a block": chain(SQUARE, lambda t: t.new_zeros(t.shape)[:40].copy_(t[:40])),
    "clone of transposed": chain(SQUARE, transposed, Tensor.clone),
    "clone of a transposed stack": chain(STACK, transposed, Tensor.clone),
    "filled": chain(SQUARE, lambda t: torch.empty_like(t).copy_(t)),
    "other dtype": chain(SQUARE, Tensor.bfloat16),
    "deep-copied": chain(SQUARE, copy.deepcopy),
    "deep-copied part": chain(SQUARE, lower, copy.deepcopy),
    "unpickled": chain(SQUARE, unpickled),
    "unpickled part": chain(SQUARE, lower, unpickled),
    "saved and loaded": chain(SQUARE, saved),
    "saved and loaded part": chain(SQUARE, lower, saved),
    "after an in-place op": chain(SQUARE, lambda t: t.mul_(0.5)),
    "part after an in-place op": chain(SQUARE, lower, lambda t: t.mul_(0.5)),
    "after a write to a part": chain(SQUARE, lambda t: (lower(t).mul_(0.5), t)[1]),
    "after a step": chain(SQUARE, stepped),
    "part after a step": chain(SQUARE, lower, stepped),
    "columnwise dropped": chain(SQUARE, lambda t: use(t, columnwise=False)),
    "columnwise derived": chain(SQUARE, lambda t: use(t, columnwise=True)),
    "alias without columnwise": chain(SQUARE, lambda t: use(t.detach(), columnwise=False)),
    "alias without rowwise": chain(SQUARE, lambda t: use(t.detach(), rowwise=False)),
    "alias with columnwise": chain(SQUARE, lambda t: use(t.detach(), columnwise=True)),
    "part without columnwise": chain(SQUARE, lower, lambda t: use(t, columnwise=False)),
    "part with columnwise": chain(SQUARE, lower, lambda t: use(t, columnwise=True)),
}


@origin
def part_of_zeros_filled_later(w: World) -> list[Any]:
    whole = w.square().new_zeros(2 * w.unit, 2 * w.unit)
    part = whole[:40]
    whole.copy_(w.values(*whole.shape))
    if isinstance(part, QuantizedTensor) and part._origin.is_copy:
        # Swizzled factors have no view of these rows, and a copy shows the values of before.
        raise qtensor.QTensorError("the part is a copy, and marked as one")
    return [part, whole]


# ---- two tensors, of which one takes the data of the other


@origin
def data_is_a_part(w: World) -> list[Any]:
    whole, t = w.square(), w.half()
    t.data = lower(whole)
    return [t, whole]


@origin
def data_of_a_part(w: World) -> list[Any]:
    whole, other = w.square(), w.half()
    t = lower(whole)
    t.data = other
    return [t, other, whole]


@origin
def data_is_a_whole(w: World) -> list[Any]:
    t, other = w.square(), w.square()
    t.data = other
    return [t, other]


@origin
def data_of_a_parameter(w: World) -> list[Any]:
    source, whole = w.half(), w.square()
    t = frozen(source)
    t.data = upper(whole)
    return [t, source, whole]


@origin
def data_is_a_transpose(w: World) -> list[Any]:
    whole = w.square()
    t = w.square().mT.clone()
    t.data = whole.mT
    return [t, whole]


@origin
def data_is_a_transposed_stack(w: World) -> list[Any]:
    stack = w.stack()
    t = stack.mT.clone()
    t.data = stack.mT
    return [t, stack]


@origin
def data_of_a_transposed_stack(w: World) -> list[Any]:
    stack = w.stack()
    t, other = stack.mT, stack.mT.clone()
    t.data = other
    return [t, other, stack]


@origin
def swapped_with_a_whole(w: World) -> list[Any]:
    t, other = w.square(), w.square()
    swap(t, other)
    return [t, other]


@origin
def swapped_with_a_part(w: World) -> list[Any]:
    whole, t = w.square(), w.half()
    part = lower(whole)
    swap(t, part)
    return [t, part, whole]


# ---- loaded


@origin
def loaded_by_copy(w: World) -> list[Any]:
    held, source = w.square(), w.square()
    return [Holder(held).load(source), held, source]


@origin
def loaded_by_assignment(w: World) -> list[Any]:
    held, source = w.square(), w.square()
    return [Holder(held).load(source, assign=True), held, source]


@origin
def loaded_into_a_part(w: World) -> list[Any]:
    whole, source = w.square(), w.half()
    return [Holder(lower(whole)).load(source), whole, source]


@origin
def loaded_from_a_checkpoint(w: World) -> list[Any]:
    t, source = w.square(), w.square()
    return [checkpoint_loaded(t, source), source]


@origin
def loaded_in_parts(w: World) -> list[Any]:
    source = w.square()
    t = source.new_zeros(source.shape)
    for part in (upper, lower):
        part(t).copy_(part(source))
    return [t, source]


# ---- compiled


@functools.cache
def _compiled(function: Callable[[Any], Any]) -> Any:
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def by_a_graph(function: Callable[[Any], Any]) -> Origin:
    """Return an origin: the result of a function, compiled where tensors are quantized."""

    def run(w: World) -> list[Any]:
        t = w.square()
        return [(function if w.config is None else _compiled(function))(t), t]

    return run


ORIGINS |= {
    "compiled alias": by_a_graph(lambda t: t.detach()),
    "compiled part": by_a_graph(lambda t: t[t.shape[0] // 2 :]),
    "compiled clone": by_a_graph(lambda t: t.clone()),
    "compiled in-place op": by_a_graph(lambda t: t.mul_(0.5)),
}


# ---- inference mode


def made_under_inference_mode(function: Origin) -> Origin:
    def run(w: World) -> list[Any]:
        with torch.inference_mode():
            return function(w)

    return run


ORIGINS["inference tensor"] = made_under_inference_mode(ORIGINS["fresh"])
ORIGINS["inference part"] = made_under_inference_mode(ORIGINS["rows"])
ORIGINS["used in inference mode"] = ORIGINS["fresh"]
ORIGINS["part used in inference mode"] = ORIGINS["rows"]
_UNDER_INFERENCE = [name for name in ORIGINS if "inference" in name]


def mode_of(name: str) -> contextlib.AbstractContextManager[Any]:
    """Return the mode in which the tensors of an origin are used."""
    return torch.inference_mode() if name in _UNDER_INFERENCE else torch.no_grad()
