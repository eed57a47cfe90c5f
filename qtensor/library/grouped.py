"""Ops over ragged groups: quantize each on its own, multiply each by a weight of its own.

The sizes of the groups are ``sizes`` (SymInt[]), or ([] there) ``splits``, an int64 tensor
(groups,) on the CPU that ``split_sizes`` has checked: shapes of results never depend on its values,
so that one graph serves all of them. Each op calls the bodies of the ops over one matrix, group by
group, and has their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape
from qtensor.core.errors import check
from qtensor.core.operand import Operand
from qtensor.core.quantizer_registry import parse
from qtensor.kernels.products.problem import Pair
from qtensor.kernels.products.stacks import matrix_of, stack_refusal
from qtensor.library.checks import check_operand, check_seed
from qtensor.library.define import (
    BODIES,
    FILLS,
    SymInt,
    WrittenList,
    empty,
    leaf_op,
    never_alone,
)
from qtensor.library.gemm import GemmArgs, check_layout, output_shape
from qtensor.library.gradient import GemmAccumulateArgs, postpone
from qtensor.library.norm import BiasGradArgs, check_tensor
from qtensor.library.quantize import alloc_amax, check_input
from qtensor.library.ragged import Groups, alloc_flat, check_ragged, check_sizes, groups_of

# ---- sizes


class _SplitSizesArgs(NamedTuple):
    splits: Tensor
    rows: SymInt
    label: str


def _split_sizes_alloc(args: _SplitSizesArgs) -> Tensor:
    device = "meta" if args.splits.device.type == "meta" else "cpu"
    return torch.empty(args.splits.shape, dtype=torch.int64, device=device)


def _split_sizes_fill(out: Tensor, args: _SplitSizesArgs) -> None:
    out.copy_(args.splits)
    check_sizes(args.label, out.tolist(), args.rows)


SPLIT_SIZES = leaf_op(
    "split_sizes", _SplitSizesArgs, "Tensor", _split_sizes_alloc, _split_sizes_fill
)
"""Check group sizes, int64 (groups,) on any device, and copy them to the CPU."""


class _ListedSizesArgs(NamedTuple):
    sizes: Shape
    groups: int
    rows: SymInt
    label: str


def _listed_sizes_alloc(args: _ListedSizesArgs) -> Tensor:
    # The shape does not depend on `sizes`, so that a graph with a wrong number of them is traced
    # to its end and raises this op's error when it runs.
    rule = "the number of group sizes must be from 1 to 2**31"
    op = f"{args.label} m_splits"
    check(0 < args.groups <= 1 << 31, op, rule, args.groups, "Pass the number of weights")
    return torch.empty(args.groups, dtype=torch.int64, device="cpu")


def _listed_sizes_fill(out: Tensor, args: _ListedSizesArgs) -> None:
    rule = f"there must be {args.groups} group sizes, one for each weight"
    fits, op = len(args.sizes) == args.groups, f"{args.label} m_splits"
    check(fits, op, rule, len(args.sizes), "Pass 0 for empty groups")
    check_sizes(args.label, args.sizes, args.rows)
    for i, size in enumerate(args.sizes):
        out[i] = size


LISTED_SIZES = leaf_op(
    "listed_sizes", _ListedSizesArgs, "Tensor", _listed_sizes_alloc, _listed_sizes_fill
)
"""Check group sizes that are numbers, and return them as a tensor.

An error in code that Dynamo traces reaches the caller as Dynamo's; one in an op is raised as it is,
when the graph runs.
"""


# ---- quantize


class _GroupedQuantizeArgs(NamedTuple):
    x: Tensor
    quantizer: str
    split: Groups
    scale: Tensor | None = None
    seed: Tensor | None = None


def _quantize_alloc(args: _GroupedQuantizeArgs) -> list[Tensor]:
    op, quantizer, groups = "grouped_quantize", parse(args.quantizer), args.split.groups
    check_input(args.x, quantizer.format)
    args.split.check(op)
    check_seed(op, quantizer, args.seed, groups)
    rule = f"scale must be a vector of {groups} values"
    fits = args.scale is None or args.scale.shape == (groups,)
    check(fits, op, rule, getattr(args.scale, "shape", None), "Pass such a scale")
    check(args.x.ndim == 2, op, "x must be a matrix", args.x.shape, "Reshape it")
    buffers = alloc_flat(quantizer, args.x.shape, args.split, args.x.device)
    return [*buffers, *alloc_amax(quantizer, args.x.device, groups)]


def _quantize_fill(outputs: list[Tensor], args: _GroupedQuantizeArgs) -> None:
    quantizer, sizes = parse(args.quantizer), args.split.read("grouped_quantize")
    groups = groups_of(Operand(outputs, args.quantizer, args.x.shape), sizes)
    for i, rows in enumerate(args.x.split(sizes)):
        out = groups[i].buffers
        if quantizer.returns_amax:
            out = [*out, outputs[-1][i : i + 1]]
        factor = None if args.scale is None else args.scale[i : i + 1]
        number = None if args.seed is None else args.seed.reshape(-1)[i : i + 1]
        BODIES["quantize_"](rows, args.quantizer, out, factor, None, number)


GROUPED_QUANTIZE = leaf_op(
    "grouped_quantize", _GroupedQuantizeArgs, "Tensor[]", _quantize_alloc, _quantize_fill
)
"""Quantize (M, K) to flat buffers in slot order, then the maxima (groups,) of delayed scaling.

``scale`` and ``seed`` have one entry for each group.
"""


# ---- matmul


class _GroupedGemmArgs(NamedTuple):
    operands: Pair
    split: Groups
    layout: str
    dtype: torch.dtype
    bias: list[Tensor] | None = None


def _gemm_alloc(args: _GroupedGemmArgs) -> Tensor:
    a, b = args.operands
    args.split.check("grouped_gemm")
    check_ragged("grouped_gemm", a)
    check_layout(args.layout)
    rule = "b must be matrices or a stack of one for each group, and layout TN or NN"
    fits = len(b.shape) == 2 or (len(b.shape) == 3 and b.shape[0] == args.split.groups)
    fits = fits and args.layout != "NT"
    check(fits, "grouped_gemm", rule, f"{b.shape}, {args.layout}", "Pass their shape")
    return empty(a.buffers[0], output_shape(a.shape, b.shape[-2:], args.layout), args.dtype)


def _matrices(b: Operand, groups: int) -> Callable[[int], Operand]:
    """Return a function from a group to its matrix, of the right operand of ``grouped_gemm``.

    Raises:
        QTensorError: ``b`` does not hold the buffers of all groups.
    """
    op = "grouped_gemm"
    if len(b.shape) == 3:
        check_operand(op, b)
        reason = stack_refusal(b.canonical, tuple(b.shape))
        rule = "the buffers of each matrix of a stack must be views of those of the stack"
        check(reason is None, op, rule, reason, "Pass the buffers of one group after the other")
        return lambda i: matrix_of(b, i)
    count = len(b.buffers) // groups
    rule = f"b must hold as many buffers for each of the {groups} groups"
    fix = "Pass the buffers of one group after the other"
    check(count * groups == len(b.buffers), op, rule, f"{len(b.buffers)} buffers", fix)
    return lambda i: b._replace(buffers=b.buffers[i * count : (i + 1) * count])


def _gemm_fill(out: Tensor, args: _GroupedGemmArgs) -> None:
    (a, b), groups, sizes = args.operands, args.split.groups, args.split.read("grouped_gemm")
    matrix = _matrices(b, groups)
    biases = groups if args.bias is None else len(args.bias)
    rule = f"bias must hold one tensor for each of the {groups} groups"
    check(biases == groups, "grouped_gemm", rule, f"{biases} biases", "Pass one a group")
    left = groups_of(a, sizes)
    for i, part in enumerate(out.split(sizes)):
        if sizes[i]:
            bias = None if args.bias is None else args.bias[i]
            group = Pair(left[i], matrix(i))
            FILLS["gemm"](part, GemmArgs(group, args.layout, args.dtype, bias))


GROUPED_GEMM = leaf_op("grouped_gemm", _GroupedGemmArgs, "Tensor", _gemm_alloc, _gemm_fill)
"""Rows of each group times the group's own matrix, in the layouts TN and NN of ``gemm``.

``a`` is ragged, ``a_shape`` (M, .); ``b`` holds the buffers of one group after the other, all of
``b_shape``, or those of a stack of ``b_shape`` (groups, ., .); ``bias`` one (N,) for each group.
Matrices of groups without rows are not read.
"""


# ---- F.scaled_grouped_mm, whose module is imported by the first call


class ScaledGroupedArgs(NamedTuple):
    """Arguments of the op ``scaled_grouped_gemm``.

    Attributes:
        operands: a (rows, K) or (groups, rows, K), b likewise; rowwise data alone. The first buffer
            holds codes, the others the factors of all groups.
        offs: int32 (groups,), where each group of a matrix ends; None for two stacks. Two matrices
            have groups along K, a matrix beside a stack along its rows.
        dtype: of the result.
    """

    operands: Pair
    offs: Tensor | None
    dtype: torch.dtype


def _scaled_alloc(args: ScaledGroupedArgs) -> Tensor:
    from qtensor.library import scaled_grouped  # noqa: PLC0415

    return scaled_grouped.allocate(args)


def _scaled_fill(out: Tensor, args: ScaledGroupedArgs) -> None:
    from qtensor.library import scaled_grouped  # noqa: PLC0415

    scaled_grouped.fill(out, args)


SCALED_GROUPED_GEMM = leaf_op(
    "scaled_grouped_gemm", ScaledGroupedArgs, "Tensor", _scaled_alloc, _scaled_fill
)
"""The product of each group, in the shapes of ``torch.nn.functional.scaled_grouped_mm``.

A group has the bytes of ``gemm`` in layout TN. Rows behind the last group are zeros.
"""


# ---- gradients of the weights


def _pairs(op: str, ragged: Pair, split: Groups) -> list[Pair]:
    """Return the operands (rows of the group, .) of each group of two ragged operands."""
    sizes = split.read(op)
    left, right = groups_of(ragged.a, sizes), groups_of(ragged.b, sizes)
    return [Pair(a, b) for a, b in zip(left, right, strict=True)]


def _check_wgrad(op: str, ragged: Pair, split: Groups, wanted: Sequence[int] = ()) -> None:
    """Refuse two ragged operands or indices of groups that do not fit the groups."""
    split.check(op)
    check_ragged(op, ragged.a)
    check_ragged(op, ragged.b)
    rule = f"wanted must hold indices from 0 to {split.groups - 1}"
    fits = all([0 <= i < split.groups for i in wanted])
    check(fits, op, rule, wanted, "Name groups that exist")


class _GroupedWgradArgs(NamedTuple):
    operands: Pair
    split: Groups
    wanted: list[int]
    dtype: torch.dtype


def _wgrad_alloc(args: _GroupedWgradArgs) -> list[Tensor]:
    a, b = args.operands
    _check_wgrad("grouped_wgrad", args.operands, args.split, args.wanted)
    shape = a.shape[1], b.shape[1]
    return never_alone([empty(a.buffers[0], shape, args.dtype) for _ in args.wanted])


def _wgrad_fill(outputs: list[Tensor], args: _GroupedWgradArgs) -> None:
    pairs = _pairs("grouped_wgrad", args.operands, args.split)
    for out, i in zip(outputs[: len(args.wanted)], args.wanted, strict=True):
        FILLS["gemm"](out, GemmArgs(pairs[i], "NT", args.dtype))


GROUPED_WGRAD = leaf_op("grouped_wgrad", _GroupedWgradArgs, "Tensor[]", _wgrad_alloc, _wgrad_fill)
"""``a_i.T @ b_i`` of the groups in ``wanted``; ``a`` (M, N) and ``b`` (M, K) are ragged.

A group without rows has a gradient of zeros. An empty tensor follows a gradient that is alone.
"""


class _GroupedWgradAccumulateArgs(NamedTuple):
    out: WrittenList
    operands: Pair
    split: Groups
    wanted: list[int]
    overwrite: list[bool]


def _accumulate_check(args: _GroupedWgradAccumulateArgs) -> None:
    _check_wgrad("grouped_wgrad_accumulate_", args.operands, args.split, args.wanted)


def _accumulate_fill(_: None, args: _GroupedWgradAccumulateArgs) -> None:
    pairs = _pairs("grouped_wgrad_accumulate_", args.operands, args.split)
    for target, i, over in zip(args.out, args.wanted, args.overwrite, strict=True):
        FILLS["gemm_accumulate_"](None, GemmAccumulateArgs(target, pairs[i], "NT", over))


GROUPED_WGRAD_ACCUMULATE = leaf_op(
    "grouped_wgrad_accumulate_",
    _GroupedWgradAccumulateArgs,
    "()",
    _accumulate_check,
    _accumulate_fill,
)
"""Add ``a_i.T @ b_i`` to ``out_j`` (N, K), or write it if ``overwrite``, for groups ``wanted``."""


class _PostponeGroupedWgradArgs(NamedTuple):
    key: int
    operands: Pair
    split: Groups


def _postpone_check(args: _PostponeGroupedWgradArgs) -> None:
    _check_wgrad("postpone_grouped_wgrad_", args.operands, args.split)


def _postpone_fill(_: None, args: _PostponeGroupedWgradArgs) -> None:
    pairs = _pairs("postpone_grouped_wgrad_", args.operands, args.split)
    for pair in pairs:
        postpone(args.key, pair)


GROUPED_POSTPONE = leaf_op(
    "postpone_grouped_wgrad_", _PostponeGroupedWgradArgs, "()", _postpone_check, _postpone_fill
)
"""``postpone_wgrad_`` of each group, the first one first."""
torch.fx.has_side_effect(GROUPED_POSTPONE)


# ---- bias


class _GroupedBiasGradArgs(NamedTuple):
    dy: Tensor
    split: Groups


def _bias_grad_alloc(args: _GroupedBiasGradArgs) -> list[Tensor]:
    check_tensor("grouped_bias_grad", "dy", args.dy)
    args.split.check("grouped_bias_grad")
    return never_alone([empty(args.dy, args.dy.shape[-1:]) for _ in range(args.split.groups)])


def _bias_grad_fill(outputs: list[Tensor], args: _GroupedBiasGradArgs) -> None:
    sizes = args.split.read("grouped_bias_grad")
    for out, part in zip(outputs[: len(sizes)], args.dy.split(sizes), strict=True):
        FILLS["bias_grad"](out, BiasGradArgs(part))


GROUPED_BIAS_GRAD = leaf_op(
    "grouped_bias_grad", _GroupedBiasGradArgs, "Tensor[]", _bias_grad_alloc, _bias_grad_fill
)
"""``bias_grad`` of each group's rows of ``dy`` (M, N).

An empty tensor follows one that is alone.
"""
