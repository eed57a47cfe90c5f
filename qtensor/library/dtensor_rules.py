"""Rules by which DTensor runs our ops: each rank calls the op on its parts.

``import qtensor.distributed`` imports this module, and so does ``qtensor.quantize`` of a DTensor
(``qtensor.core.dtensors.install_rules``). The rules are registered with
``torch.library.register_torch_dispatch``. ``register_sharding``, the other entry of torch, cannot
express a list of results or a maximum over ranks, and it caches placements without the strings
among the arguments, so that layout "NN" of a product would get those of "TN".

Ops over lists of buffers have no rule: scales and codes of a part are not shards of those of the
whole. They refuse DTensors. ``qtensor.quantize``, ``dequantize`` and ``gemm`` and the layers take
DTensors of quantized parts instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from qtensor.core.dtensors import from_part, part_of
from qtensor.core.errors import ArgumentTypeError, UnsupportedError, fail
from qtensor.library import dequantize, gemm
from qtensor.library.define import BODIES
from qtensor.library.gemm import output_shape

Placements = tuple[Placement, ...]
Kinds = Sequence[type]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Op(Protocol):
    """An op as torch passes it to a rule."""

    _opname: str

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the op."""


Rule = Callable[[type[DTensor], Op, Kinds, Args, Kwargs], Any]
"""``rule(cls, func, types, args, kwargs)`` answers a call of the op ``func`` with DTensors."""


def _same_mesh(op: str, tensors: Sequence[object]) -> DeviceMesh:
    """Return the mesh of the DTensors of a call.

    Raises:
        ArgumentTypeError: a plain tensor among them.
        QTensorError: several meshes.
    """
    found = [t for t in tensors if isinstance(t, Tensor)]
    mesh = next(t.device_mesh for t in found if isinstance(t, DTensor))
    for t in found:
        if not isinstance(t, DTensor):
            rule = "with one DTensor, all tensors must be DTensors"
            got = f"a plain tensor of {tuple(t.shape)}"
            fail(op, rule, got, "Make it one with DTensor.from_local", ArgumentTypeError)
        if t.device_mesh != mesh:
            rule = "all DTensors must be on one mesh"
            fail(op, rule, f"{t.device_mesh} and {mesh}", "Redistribute one of them")
    return mesh


def _local(t: DTensor, placements: Placements) -> Tensor:
    """Return this rank's part of a DTensor with other placements."""
    if t.placements != placements:
        t = t.redistribute(placements=placements)
    return t.to_local()


def _split_dim(placement: Placement, ndim: int) -> int | None:
    """Return the dim that is split, counted from the front; None if none is."""
    return cast(Shard, placement).dim % ndim if placement.is_shard() else None


# ---- ops over rows ------------------------------------------------------------------------------


class RowOp(NamedTuple):
    """An op that computes each row (..., K) by itself.

    Attributes:
        rows: number of leading arguments that have rows, which are split alike.
        statistics: indices of further arguments with one entry a row.
        outputs: "rows" for results that are split like the rows, "sum" for sums over all rows.
    """

    rows: int
    statistics: tuple[int, ...]
    outputs: tuple[str, ...]


ROW_OPS = {
    "norm": RowOp(1, (), ("rows", "rows", "rows")),
    "norm_backward": RowOp(2, (3, 4), ("rows", "sum", "sum")),
    "bias_grad": RowOp(1, (), ("sum",)),
    "activation": RowOp(1, (), ("rows",)),
    "activation_backward": RowOp(2, (), ("rows",)),
}
"""Name of an op -> how DTensor runs it."""


def _row_rule(op: RowOp) -> Rule:
    def rule(cls: type[DTensor], func: Op, types: Kinds, args: Args, kwargs: Kwargs) -> Any:
        mesh = _same_mesh(func._opname, args)
        # The gradient comes first; the split of the input decides.
        x = args[op.rows - 1]
        last = x.ndim - 1
        split = tuple([
            Replicate() if _split_dim(p, x.ndim) in (None, last) else p for p in x.placements
        ])
        whole: Placements = (Replicate(),) * mesh.ndim
        local = list(args)
        for i, value in enumerate(args):
            if isinstance(value, Tensor):
                # An absent statistic is empty on every rank.
                by_row = i < op.rows or (i in op.statistics and value.numel() > 0)
                local[i] = _local(cast(DTensor, value), split if by_row else whole)
        results = func(*local, **kwargs)
        single = isinstance(results, Tensor)
        summed: Placements = tuple([Partial() if p.is_shard() else p for p in split])
        done = []
        for result, kind in zip([results] if single else results, op.outputs, strict=True):
            if not result.numel():
                placements, shape = whole, tuple(result.shape)
            elif kind == "sum":
                placements, shape = summed, tuple(result.shape)
            else:
                tail = result.shape[last:]
                placements, shape = split, (*x.shape[:-1], *tail)
            done.append(from_part(result, mesh, placements, shape))
        return done[0] if single else tuple(done)

    return rule


# ---- products -----------------------------------------------------------------------------------


class _Dims(NamedTuple):
    """Dims of the operands of a product: contracted, and those of M and N."""

    a_k: int
    a_m: int
    b_k: int
    b_n: int


def _product_dims(a: DTensor, b: DTensor, layout: str) -> _Dims:
    a_last, b_last = a.ndim - 1, b.ndim - 1
    a_k, a_m = (a_last - 1, a_last) if layout == "NT" else (a_last, a_last - 1)
    b_k, b_n = (b_last, b_last - 1) if layout == "TN" else (b_last - 1, b_last)
    return _Dims(a_k, a_m, b_k, b_n)


def _product_placements(
    a: DTensor, b: DTensor, layout: str
) -> tuple[Placements, Placements, Placements]:
    """Return the placements of a, b and the local product."""
    dims, last = _product_dims(a, b, layout), a.ndim - 1
    rows: list[tuple[Placement, Placement, Placement]] = []
    for p, q in zip(a.placements, b.placements, strict=True):
        own, other = _split_dim(p, a.ndim), _split_dim(q, b.ndim)
        if other == dims.b_n:
            rows.append((Replicate(), q, Shard(last)))
        elif other == dims.b_k:
            rows.append((Shard(dims.a_k), q, Partial()))
        elif own is None or own == dims.a_k or (b.ndim > 2 and own != dims.a_m and own != other):
            rows.append((Replicate(), Replicate(), Replicate()))
        else:
            # M is the last dim but one of the product in every layout.
            rows.append((p, q if own == other else Replicate(), Shard(min(own, last - 1))))
    return tuple(zip(*rows, strict=True))  # type: ignore[return-value]


def _gemm_rule(cls: type[DTensor], func: Op, types: Kinds, args: Args, kwargs: Kwargs) -> DTensor:
    signature = inspect.signature(gemm.gemm_plain).bind(*args, **kwargs)
    signature.apply_defaults()
    a, b, layout, dtype, bias = signature.arguments.values()
    mesh = _same_mesh("gemm", (a, b, bias))
    of_a, of_b, of_out = _product_placements(a, b, layout)
    out_shape = output_shape(a.shape, b.shape, layout)
    own = None
    if bias is not None and not any([p.is_partial() for p in of_out]):
        last = len(out_shape) - 1
        split = [
            Shard(bias.ndim - 1) if p.is_shard(last) and bias.shape[-1] > 1 else Replicate()
            for p in of_out
        ]
        own, bias = _local(bias, tuple(split)), None
    product = func(_local(a, of_a), _local(b, of_b), layout, dtype, own)
    out = from_part(product, mesh, of_out, out_shape)
    if bias is None:
        return out
    # The products are summed over ranks first, as a layer with parallel_mode="row" does.
    summed = out.redistribute(placements=[Replicate() if p.is_partial() else p for p in of_out])
    return summed + bias.to(summed.dtype)


# ---- decoding -----------------------------------------------------------------------------------


def _dequantize_rule(
    cls: type[DTensor], func: Op, types: Kinds, args: Args, kwargs: Kwargs
) -> DTensor:
    x = args[0]
    dtype = args[1] if len(args) > 1 else kwargs.get("dtype")
    values = dequantize.DEQUANTIZE_TENSOR(x.to_local(), dtype)
    return from_part(values, x.device_mesh, x.placements, x.shape)


# ---- everything else ----------------------------------------------------------------------------

_INSTEAD = "qtensor.quantize, dequantize or gemm on the DTensor itself, or a layer of qtensor"


def _refuse_rule(
    cls: type[DTensor], func: Op, types: Kinds, args: Args, kwargs: Kwargs
) -> NoReturn:
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    first = next(t for t in leaves if isinstance(t, DTensor))
    rule = "this op takes no DTensors, because its buffers are not shards of those of the whole"
    got = f"one of {tuple(first.shape)} with {part_of(first.placements)}"
    fail(func._opname, rule, got, f"Call {_INSTEAD}, or pass to_local()", UnsupportedError)


def _register() -> None:
    rules: dict[str, Rule] = {f"qtensor::{name}": _refuse_rule for name in BODIES}
    rules |= {f"qtensor::{name}": _row_rule(op) for name, op in ROW_OPS.items()}
    rules["qtensor::gemm_tensor"] = _gemm_rule
    rules["qtensor::dequantize_tensor"] = _dequantize_rule
    rules["aten::dequantize.self"] = _dequantize_rule
    for name, rule in rules.items():
        torch.library.register_torch_dispatch(name, DTensor, rule)


_register()
