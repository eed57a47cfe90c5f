"""Ops over ragged groups: quantize each on its own, multiply each by a weight of its own.

The sizes of the groups are ``sizes`` (SymInt[]), or ([] there) ``splits``, an int64 tensor
(groups,) on the CPU that ``split_sizes`` has checked: shapes of results never depend on its values,
so that one graph serves all of them. Each op calls the bodies of the ops over one matrix, group by
group, and has their bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtensor.errors import check
from qtensor.layout import Shape
from qtensor.library.checks import check_seed
from qtensor.library.codec import parse
from qtensor.library.define import BODIES, FILLS, below_autograd, leaf_op
from qtensor.library.gemm import GemmArgs, check_layout, output_shape
from qtensor.library.gradient import OPERANDS, GemmAccumulateArgs, PostponeWgradArgs
from qtensor.library.norm import BiasGradArgs, check_tensor
from qtensor.library.quantize import check_input
from qtensor.library.ragged import (
    alloc_flat,
    check_groups,
    check_ragged,
    check_sizes,
    group_buffers,
    read_sizes,
)

Pair = tuple[list[Tensor], str, Shape, list[Tensor], str, Shape]
"""Buffers, canonical text and shape of both operands of a product."""

GROUPS = "SymInt[] sizes, Tensor? splits, int groups"


# ---- sizes


class SplitSizesArgs(NamedTuple):
    """Arguments of the op ``split_sizes``."""

    splits: Tensor
    rows: int
    label: str


def _split_sizes_alloc(args: SplitSizesArgs) -> Tensor:
    device = "meta" if args.splits.device.type == "meta" else "cpu"
    return torch.empty(args.splits.shape, dtype=torch.int64, device=device)


def _split_sizes_fill(out: Tensor, args: SplitSizesArgs) -> None:
    with below_autograd():
        out.copy_(args.splits)
        check_sizes(args.label, out.tolist(), args.rows)


SPLIT_SIZES = leaf_op(
    "split_sizes(Tensor splits, SymInt rows, str label) -> Tensor",
    SplitSizesArgs,
    _split_sizes_alloc,
    _split_sizes_fill,
)
"""Check group sizes, int64 (groups,) on any device, and copy them to the CPU."""


class ListedSizesArgs(NamedTuple):
    """Arguments of the op ``listed_sizes``."""

    sizes: Shape
    groups: int
    rows: int
    label: str


def _listed_sizes_alloc(args: ListedSizesArgs) -> Tensor:
    return torch.empty(len(args.sizes), dtype=torch.int64, device="cpu")


def _listed_sizes_fill(out: Tensor, args: ListedSizesArgs) -> None:
    rule = f"there must be {args.groups} group sizes, one for each weight"
    check(
        len(args.sizes) == args.groups,
        f"{args.label} m_splits",
        rule,
        len(args.sizes),
        "Pass 0 for empty groups",
    )
    check_sizes(args.label, args.sizes, args.rows)
    for i, size in enumerate(args.sizes):
        out[i] = size


LISTED_SIZES = leaf_op(
    "listed_sizes(SymInt[] sizes, int groups, SymInt rows, str label) -> Tensor",
    ListedSizesArgs,
    _listed_sizes_alloc,
    _listed_sizes_fill,
)
"""Check group sizes that are numbers, and return them as a tensor.

An error in code that Dynamo traces reaches the caller as Dynamo's; one in an op is raised as it is,
when the graph runs.
"""


def _read_groups(op: str, args: Any) -> list[int]:
    """Return the sizes of the groups as numbers, one for each group."""
    check_groups(op, args.sizes, args.splits, args.groups)
    known = read_sizes(args.sizes, args.splits)
    rule = f"there must be {args.groups} group sizes, one for each group, none negative"
    fits = len(known) == args.groups > 0 and all(type(n) is int and n >= 0 for n in known)
    check(fits, op, rule, known, "Pass sizes, or int64 splits")
    return known


# ---- quantize


class GroupedQuantizeArgs(NamedTuple):
    """Arguments of the op ``grouped_quantize``."""

    x: Tensor
    quantizer: str
    sizes: Shape
    splits: Tensor | None
    groups: int
    scale: Tensor | None = None
    seed: Tensor | None = None


def _quantize_alloc(args: GroupedQuantizeArgs) -> list[Tensor]:
    codec = parse(args.quantizer)
    check_input(args.x, codec.format)
    check_groups("grouped_quantize", args.sizes, args.splits, args.groups)
    check_seed("grouped_quantize", codec, args.seed, args.groups)
    rule = f"scale must be a vector of {args.groups} values"
    fits = args.scale is None or args.scale.shape == (args.groups,)
    check(fits, "grouped_quantize", rule, getattr(args.scale, "shape", None), "Pass such a scale")
    check(args.x.ndim == 2, "grouped_quantize", "x must be a matrix", args.x.shape, "Reshape it")
    outputs = alloc_flat(
        codec, args.x.shape, args.sizes if args.splits is None else None, args.groups, args.x.device
    )
    if codec.returns_amax:
        outputs.append(torch.empty(args.groups, dtype=torch.float32, device=args.x.device))
    return outputs


def _quantize_fill(outputs: list[Tensor], args: GroupedQuantizeArgs) -> None:
    codec = parse(args.quantizer)
    known = _read_groups("grouped_quantize", args)
    with below_autograd():
        buffers = group_buffers(outputs, args.quantizer, known, args.x.shape[1])
        for i, rows in enumerate(args.x.split(known)):
            out = buffers[i]
            if codec.returns_amax:
                out = [*out, outputs[-1][i : i + 1]]
            factor = None if args.scale is None else args.scale[i : i + 1]
            number = None if args.seed is None else args.seed.reshape(-1)[i : i + 1]
            BODIES["quantize_"](rows, args.quantizer, out, factor, None, number)


GROUPED_QUANTIZE = leaf_op(
    f"grouped_quantize(Tensor x, str quantizer, {GROUPS}, Tensor? scale=None, Tensor? seed=None) "
    "-> Tensor[]",
    GroupedQuantizeArgs,
    _quantize_alloc,
    _quantize_fill,
)
"""Quantize (M, K) to flat buffers in slot order, then the maxima (groups,) of delayed scaling.

``scale`` and ``seed`` have one entry for each group.
"""


# ---- matmul


class GroupedGemmArgs(NamedTuple):
    """Arguments of the op ``grouped_gemm``."""

    a: list[Tensor]
    a_quantizer: str
    a_shape: Shape
    b: list[Tensor]
    b_quantizer: str
    b_shape: Shape
    sizes: Shape
    splits: Tensor | None
    groups: int
    layout: str
    dtype: torch.dtype
    bias: list[Tensor] | None = None


def _gemm_alloc(args: GroupedGemmArgs) -> Tensor:
    check_groups("grouped_gemm", args.sizes, args.splits, args.groups)
    check_ragged("grouped_gemm", args.a, args.a_quantizer, args.a_shape)
    check_layout(args.layout)
    rule = "b must be matrices, and layout TN or NN"
    fits = len(args.b_shape) == 2 and args.layout != "NT"
    check(fits, "grouped_gemm", rule, f"{args.b_shape}, {args.layout}", "Pass their shape")
    return torch.empty(
        output_shape(args.a_shape, args.b_shape, args.layout),
        dtype=args.dtype,
        device=args.a[0].device,
    )


def _gemm_fill(out: Tensor, args: GroupedGemmArgs) -> None:
    known = _read_groups("grouped_gemm", args)
    count = len(args.b) // args.groups
    rule = f"b must hold as many buffers for each of the {args.groups} groups, bias one tensor"
    biases = args.groups if args.bias is None else len(args.bias)
    fits = count * args.groups == len(args.b) and biases == args.groups
    got = f"{len(args.b)} buffers, {biases} biases"
    check(fits, "grouped_gemm", rule, got, "Pass the buffers of one group after the other")
    with below_autograd():
        left = group_buffers(args.a, args.a_quantizer, known, args.a_shape[1])
        for i, part in enumerate(out.split(known)):
            if not known[i]:
                continue
            FILLS["gemm"](
                part,
                GemmArgs(
                    left[i],
                    args.a_quantizer,
                    (known[i], args.a_shape[1]),
                    args.b[i * count : (i + 1) * count],
                    args.b_quantizer,
                    args.b_shape,
                    args.layout,
                    args.dtype,
                    None if args.bias is None else args.bias[i],
                ),
            )


GROUPED_GEMM = leaf_op(
    f"grouped_gemm({OPERANDS}, {GROUPS}, str layout, ScalarType dtype, Tensor[]? bias=None) -> "
    "Tensor",
    GroupedGemmArgs,
    _gemm_alloc,
    _gemm_fill,
)
"""Rows of each group times the group's own matrix, in the layouts TN and NN of ``gemm``.

``a`` is ragged, ``a_shape`` (M, .);
``b`` holds the buffers of one group after the other, all of ``b_shape``; ``bias`` one (N,) for each
group."""


def _pairs(args: Any) -> list[Pair]:
    """Return the six operand arguments of ``gemm`` for each group of two ragged operands."""
    known = _read_groups("grouped_wgrad", args)
    a_columns, b_columns = args.a_shape[1], args.b_shape[1]
    left = group_buffers(args.a, args.a_quantizer, known, a_columns)
    right = group_buffers(args.b, args.b_quantizer, known, b_columns)
    return [
        (
            left[i],
            args.a_quantizer,
            (rows, a_columns),
            right[i],
            args.b_quantizer,
            (rows, b_columns),
        )
        for i, rows in enumerate(known)
    ]


class GroupedWgradArgs(NamedTuple):
    """Arguments of the op ``grouped_wgrad``."""

    a: list[Tensor]
    a_quantizer: str
    a_shape: Shape
    b: list[Tensor]
    b_quantizer: str
    b_shape: Shape
    sizes: Shape
    splits: Tensor | None
    groups: int
    wanted: list[int]
    dtype: torch.dtype


def _check_wgrad(op: str, args: Any) -> None:
    """Refuse two ragged operands whose number of groups, buffers or dims is wrong."""
    check_groups(op, args.sizes, args.splits, args.groups)
    check_ragged(op, args.a, args.a_quantizer, args.a_shape)
    check_ragged(op, args.b, args.b_quantizer, args.b_shape)


def _check_wanted(op: str, args: Any) -> None:
    """Refuse indices of groups that do not exist."""
    rule = f"wanted must hold indices from 0 to {args.groups - 1}"
    fits = all([0 <= i < args.groups for i in args.wanted])
    check(fits, op, rule, args.wanted, "Name groups that exist")


def _wgrad_alloc(args: GroupedWgradArgs) -> list[Tensor]:
    _check_wgrad("grouped_wgrad", args)
    _check_wanted("grouped_wgrad", args)
    shape = (args.a_shape[1], args.b_shape[1])
    return [torch.empty(shape, dtype=args.dtype, device=args.a[0].device) for _ in args.wanted]


def _wgrad_fill(outputs: list[Tensor], args: GroupedWgradArgs) -> None:
    with below_autograd():
        pairs = _pairs(args)
        for out, i in zip(outputs, args.wanted, strict=True):
            FILLS["gemm"](out, GemmArgs(*pairs[i], "NT", args.dtype))


GROUPED_WGRAD = leaf_op(
    f"grouped_wgrad({OPERANDS}, {GROUPS}, int[] wanted, ScalarType dtype) -> Tensor[]",
    GroupedWgradArgs,
    _wgrad_alloc,
    _wgrad_fill,
)
"""``a_i.T @ b_i`` of the groups in ``wanted``; both ragged.

A group without rows has a gradient of zeros.
"""


class GroupedWgradAccumulateArgs(NamedTuple):
    """Arguments of the op ``grouped_wgrad_accumulate_``."""

    out: list[Tensor]
    a: list[Tensor]
    a_quantizer: str
    a_shape: Shape
    b: list[Tensor]
    b_quantizer: str
    b_shape: Shape
    sizes: Shape
    splits: Tensor | None
    groups: int
    wanted: list[int]
    overwrite: list[bool]


def _accumulate_check(args: GroupedWgradAccumulateArgs) -> None:
    _check_wgrad("grouped_wgrad_accumulate_", args)
    _check_wanted("grouped_wgrad_accumulate_", args)


def _accumulate_fill(_: None, args: GroupedWgradAccumulateArgs) -> None:
    with below_autograd():
        pairs = _pairs(args)
        for target, i, over in zip(args.out, args.wanted, args.overwrite, strict=True):
            FILLS["gemm_accumulate_"](None, GemmAccumulateArgs(target, *pairs[i], "NT", over))


GROUPED_WGRAD_ACCUMULATE = leaf_op(
    f"grouped_wgrad_accumulate_(Tensor(a!)[] out, {OPERANDS}, {GROUPS}, int[] wanted, bool[] "
    "overwrite) -> ()",
    GroupedWgradAccumulateArgs,
    _accumulate_check,
    _accumulate_fill,
)
"""Add ``a_i.T @ b_i`` to ``out_j``, or write it if ``overwrite``, for the groups in ``wanted``."""


class PostponeGroupedWgradArgs(NamedTuple):
    """Arguments of the op ``postpone_grouped_wgrad_``."""

    token: Tensor
    key: int
    a: list[Tensor]
    a_quantizer: str
    a_shape: Shape
    b: list[Tensor]
    b_quantizer: str
    b_shape: Shape
    sizes: Shape
    splits: Tensor | None
    groups: int


def _postpone_check(args: PostponeGroupedWgradArgs) -> None:
    _check_wgrad("postpone_grouped_wgrad_", args)


def _postpone_fill(_: None, args: PostponeGroupedWgradArgs) -> None:
    for pair in _pairs(args):
        FILLS["postpone_wgrad_"](None, PostponeWgradArgs(args.token, args.key, *pair))


GROUPED_POSTPONE = leaf_op(
    f"postpone_grouped_wgrad_(Tensor(a!) token, int key, {OPERANDS}, {GROUPS}) -> ()",
    PostponeGroupedWgradArgs,
    _postpone_check,
    _postpone_fill,
)
"""``postpone_wgrad_`` of each group, the first one first."""


# ---- bias


class GroupedBiasGradArgs(NamedTuple):
    """Arguments of the op ``grouped_bias_grad``."""

    dy: Tensor
    sizes: Shape
    splits: Tensor | None
    groups: int


def _bias_grad_alloc(args: GroupedBiasGradArgs) -> list[Tensor]:
    check_tensor("grouped_bias_grad", "dy", args.dy)
    check_groups("grouped_bias_grad", args.sizes, args.splits, args.groups)
    return [
        torch.empty(args.dy.shape[-1:], dtype=args.dy.dtype, device=args.dy.device)
        for _ in range(args.groups)
    ]


def _bias_grad_fill(outputs: list[Tensor], args: GroupedBiasGradArgs) -> None:
    with below_autograd():
        known = _read_groups("grouped_bias_grad", args)
        for out, part in zip(outputs, args.dy.split(known), strict=True):
            FILLS["bias_grad"](out, BiasGradArgs(part))


GROUPED_BIAS_GRAD = leaf_op(
    f"grouped_bias_grad(Tensor dy, {GROUPS}) -> Tensor[]",
    GroupedBiasGradArgs,
    _bias_grad_alloc,
    _bias_grad_fill,
)
"""``bias_grad`` of each group's rows of ``dy`` (M, N)."""
