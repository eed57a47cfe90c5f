"""Ops over ragged groups: quantize each on its own, multiply each by a weight of its own.

The sizes of the groups are ``sizes`` (SymInt[]), or ([] there) ``splits``, an int64 tensor (groups,) on the CPU that
``split_sizes`` has checked: shapes of results never depend on its values, so that one graph serves all of them. Each op calls
the bodies of the ops over one matrix, group by group, and has their bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qtensor.errors import check
from qtensor.layout import Shape
from qtensor.library.codec import parse
from qtensor.library.define import BODIES, FILLS, below_autograd, leaf_op
from qtensor.library.gemm import output_shape
from qtensor.library.gradient import OPERANDS
from qtensor.library.norm import check_tensor
from qtensor.library.quantize import check_input
from qtensor.library.ragged import alloc_flat, check_sizes, group_buffers, read_sizes

Ragged = tuple[list[Tensor], str, Shape]
"""(flat buffers, canonical text or "", (M, .))."""

GROUPS = "SymInt[] sizes, Tensor? splits, int groups"


# ---- sizes -------------------------------------------------------------------------------------


def _split_sizes_alloc(splits: Tensor, rows: int, label: str) -> Tensor:
    return torch.empty(splits.shape, dtype=torch.int64, device="cpu")


def _split_sizes_fill(out: Tensor, splits: Tensor, rows: int, label: str) -> None:
    with below_autograd():
        out.copy_(splits)
        check_sizes(label, out.tolist(), rows)


SPLIT_SIZES = leaf_op(
    "split_sizes(Tensor splits, SymInt rows, str label) -> Tensor",
    _split_sizes_alloc,
    _split_sizes_fill,
)
"""Group sizes, int64 (groups,) on any device -> a checked copy on the CPU, read once a call of a layer."""


def _listed_sizes_alloc(sizes: Shape, groups: int, rows: int, label: str) -> Tensor:
    return torch.empty(groups, dtype=torch.int64, device="cpu")


def _listed_sizes_fill(out: Tensor, sizes: Shape, groups: int, rows: int, label: str) -> None:
    rule = f"there must be {groups} group sizes, one for each weight"
    check(len(sizes) == groups, f"{label} m_splits", rule, len(sizes), "Pass 0 for empty groups")
    check_sizes(label, sizes, rows)
    for i, size in enumerate(sizes):
        out[i] = size


LISTED_SIZES = leaf_op(
    "listed_sizes(SymInt[] sizes, int groups, SymInt rows, str label) -> Tensor",
    _listed_sizes_alloc,
    _listed_sizes_fill,
)
"""The same for sizes that are numbers.

An error in code that Dynamo traces reaches the caller as Dynamo's; one in an op is raised as it is, when the graph runs.
"""


# ---- quantize ---------------------------------------------------------------------------------------------


def _quantize_alloc(
    x: Tensor,
    quantizer: str,
    sizes: Shape,
    splits: Tensor | None,
    groups: int,
    scale: Tensor | None = None,
    seed: Tensor | None = None,
) -> list[Tensor]:
    codec = parse(quantizer)
    check_input(x, codec.format)
    outputs = alloc_flat(codec, x.shape, sizes if splits is None else None, groups, x.device)
    if codec.returns_amax:
        outputs.append(torch.empty(groups, dtype=torch.float32, device=x.device))
    return outputs


def _quantize_fill(
    outputs: list[Tensor],
    x: Tensor,
    quantizer: str,
    sizes: Shape,
    splits: Tensor | None,
    groups: int,
    scale: Tensor | None = None,
    seed: Tensor | None = None,
) -> None:
    codec = parse(quantizer)
    known = read_sizes(sizes, splits)
    with below_autograd():
        buffers = group_buffers(outputs, quantizer, known, x.shape[1])
        for i, rows in enumerate(x.split(known)):
            out = buffers[i]
            if codec.returns_amax:
                out = [*out, outputs[-1][i : i + 1]]
            factor = None if scale is None else scale[i : i + 1]
            number = None if seed is None else seed[i : i + 1]
            BODIES["quantize_"](rows, quantizer, out, factor, None, number)


GROUPED_QUANTIZE = leaf_op(
    f"grouped_quantize(Tensor x, str quantizer, {GROUPS}, Tensor? scale=None, Tensor? seed=None) -> Tensor[]",
    _quantize_alloc,
    _quantize_fill,
)
"""High-precision (M, K) -> flat buffers in slot order, then the maxima (groups,) for delayed scaling. ``scale`` and
``seed`` hold an entry for each group."""


# ---- matmul -----------------------------------------------------------------------------------------------


def _gemm_alloc(
    a: list[Tensor],
    a_quantizer: str,
    a_shape: Shape,
    b: list[Tensor],
    b_quantizer: str,
    b_shape: Shape,
    sizes: Shape,
    splits: Tensor | None,
    groups: int,
    layout: str,
    dtype: torch.dtype,
    bias: list[Tensor] | None = None,
) -> Tensor:
    return torch.empty(output_shape(a_shape, b_shape, layout), dtype=dtype, device=a[0].device)


def _gemm_fill(
    out: Tensor,
    a: list[Tensor],
    a_quantizer: str,
    a_shape: Shape,
    b: list[Tensor],
    b_quantizer: str,
    b_shape: Shape,
    sizes: Shape,
    splits: Tensor | None,
    groups: int,
    layout: str,
    dtype: torch.dtype,
    bias: list[Tensor] | None = None,
) -> None:
    known, count = read_sizes(sizes, splits), len(b) // groups
    with below_autograd():
        left = group_buffers(a, a_quantizer, known, a_shape[1])
        for i, part in enumerate(out.split(known)):
            if not known[i]:
                continue
            FILLS["gemm"](
                part,
                left[i],
                a_quantizer,
                (known[i], a_shape[1]),
                b[i * count : (i + 1) * count],
                b_quantizer,
                b_shape,
                layout,
                dtype,
                None if bias is None else bias[i],
            )


GROUPED_GEMM = leaf_op(
    f"grouped_gemm({OPERANDS}, {GROUPS}, str layout, ScalarType dtype, Tensor[]? bias=None) -> Tensor",
    _gemm_alloc,
    _gemm_fill,
)
"""Rows of each group times the group's own matrix, in the layouts TN and NN of ``gemm``. ``a`` is ragged, ``a_shape`` (M, .);
``b`` holds the buffers of one group after the other, all of ``b_shape``; ``bias`` one (N,) for each group."""


def _pairs(a: Ragged, b: Ragged, sizes: Shape, splits: Tensor | None) -> list[Any]:
    """Of each group, the operands of a product over its rows as the ops over one matrix take them: two ragged ones."""
    known = read_sizes(sizes, splits)
    left, right = (group_buffers(o[0], o[1], known, o[2][1]) for o in (a, b))
    return [
        (left[i], a[1], (rows, a[2][1]), right[i], b[1], (rows, b[2][1]))
        for i, rows in enumerate(known)
    ]


def _wgrad_alloc(
    a: list[Tensor],
    a_quantizer: str,
    a_shape: Shape,
    b: list[Tensor],
    b_quantizer: str,
    b_shape: Shape,
    sizes: Shape,
    splits: Tensor | None,
    groups: int,
    wanted: list[int],
    dtype: torch.dtype,
) -> list[Tensor]:
    shape = (a_shape[1], b_shape[1])
    return [torch.empty(shape, dtype=dtype, device=a[0].device) for _ in wanted]


def _wgrad_fill(
    outputs: list[Tensor],
    a: list[Tensor],
    a_quantizer: str,
    a_shape: Shape,
    b: list[Tensor],
    b_quantizer: str,
    b_shape: Shape,
    sizes: Shape,
    splits: Tensor | None,
    groups: int,
    wanted: list[int],
    dtype: torch.dtype,
) -> None:
    with below_autograd():
        pairs = _pairs((a, a_quantizer, a_shape), (b, b_quantizer, b_shape), sizes, splits)
        for out, i in zip(outputs, wanted, strict=True):
            FILLS["gemm"](out, *pairs[i], "NT", dtype, None)


GROUPED_WGRAD = leaf_op(
    f"grouped_wgrad({OPERANDS}, {GROUPS}, int[] wanted, ScalarType dtype) -> Tensor[]",
    _wgrad_alloc,
    _wgrad_fill,
)
"""``a_i.T @ b_i`` of the groups in ``wanted``; both ragged. A group without rows has a gradient of zeros."""


def _accumulate_fill(
    _: None,
    out: list[Tensor],
    a: list[Tensor],
    a_quantizer: str,
    a_shape: Shape,
    b: list[Tensor],
    b_quantizer: str,
    b_shape: Shape,
    sizes: Shape,
    splits: Tensor | None,
    groups: int,
    wanted: list[int],
    overwrite: list[bool],
) -> None:
    with below_autograd():
        pairs = _pairs((a, a_quantizer, a_shape), (b, b_quantizer, b_shape), sizes, splits)
        for target, i, over in zip(out, wanted, overwrite, strict=True):
            FILLS["gemm_accumulate_"](None, target, *pairs[i], "NT", over)


GROUPED_WGRAD_ACCUMULATE = leaf_op(
    f"grouped_wgrad_accumulate_(Tensor(a!)[] out, {OPERANDS}, {GROUPS}, int[] wanted, bool[] overwrite) -> ()",
    lambda *args, **kwargs: None,
    _accumulate_fill,
)
"""``out_j += a_i.T @ b_i``, or ``=`` where ``overwrite`` says so, for the groups i in ``wanted``."""


def _postpone_fill(
    _: None,
    token: Tensor,
    key: int,
    a: list[Tensor],
    a_quantizer: str,
    a_shape: Shape,
    b: list[Tensor],
    b_quantizer: str,
    b_shape: Shape,
    sizes: Shape,
    splits: Tensor | None,
    groups: int,
) -> None:
    for pair in _pairs((a, a_quantizer, a_shape), (b, b_quantizer, b_shape), sizes, splits):
        FILLS["postpone_wgrad_"](None, token, key, *pair)


GROUPED_POSTPONE = leaf_op(
    f"postpone_grouped_wgrad_(Tensor(a!) token, int key, {OPERANDS}, {GROUPS}) -> ()",
    lambda *args, **kwargs: None,
    _postpone_fill,
)
"""``postpone_wgrad_`` of each group, the first one first."""


# ---- bias -------------------------------------------------------------------------------------------------


def _bias_grad_alloc(dy: Tensor, sizes: Shape, splits: Tensor | None, groups: int) -> list[Tensor]:
    check_tensor("grouped_bias_grad", "dy", dy)
    return [torch.empty(dy.shape[-1:], dtype=dy.dtype, device=dy.device) for _ in range(groups)]


def _bias_grad_fill(
    outputs: list[Tensor], dy: Tensor, sizes: Shape, splits: Tensor | None, groups: int
) -> None:
    with below_autograd():
        for out, part in zip(outputs, dy.split(read_sizes(sizes, splits)), strict=True):
            FILLS["bias_grad"](out, part)


GROUPED_BIAS_GRAD = leaf_op(
    f"grouped_bias_grad(Tensor dy, {GROUPS}) -> Tensor[]", _bias_grad_alloc, _bias_grad_fill
)
"""``bias_grad`` of each group's rows of ``dy`` (M, N)."""
