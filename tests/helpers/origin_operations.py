"""Operations on the tensor under test of an origin, as programs for quantized and plain tensors.

Each takes a ``World`` and the tensor. It returns a new tensor, a list of them, or None.
"""

from __future__ import annotations

import copy
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
    plain_values,
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

Operation = Callable[[World, Any], Any]


def of_tensor(function: Callable[[Any], Any]) -> Operation:
    return lambda w, t: function(t)


READS: dict[str, Operation] = {
    name: of_tensor(function)
    for name, function in {
        "t[half:]": lower,
        "t[:half]": upper,
        "t[3:19]": lambda t: t[3:19],
        "t[:, half:]": right,
        "t[:, 3:19]": lambda t: t[..., 3:19],
        "t[1]": lambda t: t[1] if t.ndim > 1 else t[1:2],  # one element is read, as a copy
        "t[..., 1]": lambda t: t[..., 1] if t.ndim > 1 else t[..., 1:],
        "t[half:].detach()": lambda t: lower(t).detach(),
        "t[half:][:half]": lambda t: upper(lower(t)),
        "chunk": lambda t: t.chunk(2),
        "split": lambda t: t.split(t.shape[0] // 2),
        "unbind": lambda t: t.unbind()[-1],
        "view": lambda t: t.view(t.shape),
        "view(-1)": lambda t: t.view(-1),
        "view(-1).view": lambda t: t.view(-1).view(t.shape),
        "unsqueeze": lambda t: t.unsqueeze(0),
        "mT": lambda t: t.mT,
        "mT.mT": lambda t: t.mT.mT,
        "detach": Tensor.detach,
        "data": lambda t: t.data,
        "expand": lambda t: t.expand(t.shape),
        "contiguous": lambda t: t.contiguous(),
        "mT.contiguous": lambda t: t.mT.contiguous(),
        "mT.reshape": lambda t: t.mT.reshape(-1, t.shape[-2]),
        "columns.contiguous": lambda t: right(t).contiguous(),
        "clone": Tensor.clone,
        "clone of rows": lambda t: lower(t).clone(),
        "cat with itself": lambda t: torch.cat([t, t]),
        "cat of chunks": lambda t: torch.cat(t.chunk(2)),
        "cat of clones": lambda t: torch.cat([upper(t).clone(), lower(t).clone()]),
        "cat along the last dim": lambda t: torch.cat([t, t], -1),
        "index_select": lambda t: t.index_select(0, torch.tensor([1, 0])),
        "t[[1, 0]]": lambda t: t[[1, 0]],
        "pad": lambda t: F.pad(t, (0, 0, 0, t.shape[-2])),
        "new_zeros": lambda t: t.new_zeros(t.shape),
        "bfloat16": lambda t: t.to(torch.bfloat16),
        "float": lambda t: t.float(),
        "deepcopy": copy.deepcopy,
        "pickle": unpickled,
        "save and load": saved,
        "Parameter": frozen,
        "state_dict": lambda t: Holder(t).state_dict()["weight"],
        "look": lambda t: (look(t), None)[1],
        "t + t": lambda t: t + t,
        "dequantize": lambda t: plain_values(t).clone(),
    }.items()
}
"""Views, copies and reads: nothing may change."""


def _from_quantized(w: World, t: Any) -> None:
    t.copy_(w.tensor(*t.shape))


def _from_own_quantizer(w: World, t: Any) -> None:
    values = w.values(*t.shape)
    if hasattr(t, "quantizer"):
        call = {"scale": torch.tensor([32.0])} if t.quantizer.needs_scale else {}
        values = t.quantizer.quantize(values, **call)
    t.copy_(values)


def _from_a_part(w: World, t: Any) -> None:
    rows, *others = t.shape
    t.copy_(lower(w.tensor(2 * rows, *others)))


def _quantize_(w: World, t: Any) -> None:
    values = w.values(*t.shape)
    t.quantize_(values) if hasattr(t, "quantize_") else t.copy_(values)


def _masked_fill_(w: World, t: Any) -> None:
    """Keep the largest value of each block, which decides its factor."""
    values = plain_values(t)
    t.masked_fill_(values.abs() < values.abs().max(), values.abs().max().item() / 2)


def _foreach(w: World, t: Any) -> None:
    torch._foreach_mul_([t], 0.5)


def _out(w: World, t: Any) -> None:
    torch.mul(w.values(*t.shape), 0.5, out=t)


def _cat_out(w: World, t: Any) -> None:
    torch.cat([w.values(*t.shape)], out=t)


def _set_rows(w: World, t: Any) -> None:
    rows = t.shape[0] // 2
    t[rows:] = w.values(t.shape[0] - rows, *t.shape[1:])


def _set_rows_inside(w: World, t: Any) -> None:
    t[3:19] = w.values(*t[3:19].shape)


def _set_columns(w: World, t: Any) -> None:
    t[..., t.shape[-1] // 2 :] = w.values(*right(t).shape)


def _set_row(w: World, t: Any) -> None:
    t[1] = w.values(*t.shape[1:])


def _set_by_index(w: World, t: Any) -> None:
    t[[1, 0]] = w.values(2, *t.shape[1:])


def _transposed_copy(w: World, t: Any) -> None:
    t.mT.copy_(w.values(*t.mT.shape))


def _transpose_itself(w: World, t: Any) -> None:
    """torch refuses this for plain tensors."""
    t.copy_(t.mT if w.config else t.mT.clone())


def _load_state_dict(w: World, t: Any) -> None:
    Holder(t).load(w.tensor(*t.shape))


def _load_checkpoint(w: World, t: Any) -> None:
    checkpoint_loaded(t, w.tensor(*t.shape))


WRITES: dict[str, Operation] = {
    "copy_ plain": lambda w, t: t.copy_(w.values(*t.shape)),
    "copy_ quantized": _from_quantized,
    "copy_ of its own quantizer": _from_own_quantizer,
    "copy_ of a part": _from_a_part,
    "copy_ broadcast": lambda w, t: t.copy_(w.values(t.shape[-1])),
    "copy_ transposed values": lambda w, t: t.copy_(w.values(*t.mT.shape).mT),
    "copy_ of its own transpose": _transpose_itself,
    "copy_ of itself": lambda w, t: t.copy_(t),
    "larger values": lambda w, t: t.copy_(8 * w.values(*t.shape)),
    "quantize_": _quantize_,
    "fill_": lambda w, t: t.fill_(2.0**-w.step),
    "zero_": lambda w, t: t.zero_(),
    "mul_": lambda w, t: t.mul_(0.5),
    "sub_ of itself": lambda w, t: t.sub_(t, alpha=0.5),
    "neg_": lambda w, t: t.neg_(),
    "masked_fill_": _masked_fill_,
    "_foreach_mul_": _foreach,
    "mul(out=)": _out,
    "cat(out=)": _cat_out,
    "t[half:].mul_": lambda w, t: lower(t).mul_(0.5),
    "t[:, half:].mul_": lambda w, t: right(t).mul_(0.5),
    "t[half:] =": _set_rows,
    "t[3:19] =": _set_rows_inside,
    "t[:, half:] =": _set_columns,
    "t[1] =": _set_row,
    "t[[1, 0]] =": _set_by_index,
    "mT.copy_": _transposed_copy,
    "detach().copy_": lambda w, t: t.detach().copy_(w.values(*t.shape)),
    "optimizer": lambda w, t: (stepped(t), None)[1],
    "load_state_dict": _load_state_dict,
    "checkpoint": _load_checkpoint,
}
"""Writes to the tensor, or to a part of it."""


def _data_is_fresh(w: World, t: Any) -> Any:
    other = w.tensor(*t.shape)
    t.data = other
    return other


def _data_is_a_part(w: World, t: Any) -> Any:
    rows, *others = t.shape
    whole = w.tensor(2 * rows, *others)
    t.data = lower(whole)
    return whole


def _data_is_plain(w: World, t: Any) -> Any:
    values = w.values(*t.shape)
    t.data = values
    return values


def _data_of_another(w: World, t: Any) -> Any:
    other = w.tensor(*t.shape)
    other.data = t
    return other


def _part_is_data_of_another(w: World, t: Any) -> Any:
    part = lower(t)
    other = w.tensor(*part.shape)
    other.data = part
    return other


def _load_by_assignment(w: World, t: Any) -> Any:
    source = w.tensor(*t.shape)
    return [Holder(t).load(source, assign=True), source]


def _swap(w: World, t: Any) -> Any:
    other = w.tensor(*t.shape)
    swap(t, other)
    return other


CHANGES: dict[str, Operation] = {
    "data = fresh": _data_is_fresh,
    "data = part": _data_is_a_part,
    "data = plain": _data_is_plain,
    "other.data = t": _data_of_another,
    "other.data = t[half:]": _part_is_data_of_another,
    "load_state_dict(assign=True)": _load_by_assignment,
    "swap_tensors": _swap,
    "drop columnwise": lambda w, t: (use(t, columnwise=False), None)[1],
    "drop rowwise": lambda w, t: (use(t, rowwise=False), None)[1],
    "derive columnwise": lambda w, t: (use(t, columnwise=True), None)[1],
    "alias without columnwise": lambda w, t: use(t.detach(), columnwise=False),
}
"""What changes the memory or the usages of the tensor, and no value of another one."""

OPERATIONS = {**READS, **WRITES, **CHANGES}
