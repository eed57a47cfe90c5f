"""Grouped linear: the rows of one matrix in groups, each with a weight of its own, and its three GEMMs.

``y_i = x_i @ w_i.T + b_i``. Each group is a matrix of its own, with factors, blocks and padding of its own, and has the bytes
that ``linear`` gives for it. Operands over all groups are flat buffers (``qtensor.library.ragged``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtensor.functional.grouped_args import (
    GroupedBwdArgs,
    GroupedFwdArgs,
    Splits,
    Weights,
)
from qtensor.functional.linear_args import DelayedCall
from qtensor.functional.operands import (
    Operand,
    column_part,
    plain_operand,
    quantize_operand,
    row_part,
)
from qtensor.functional.plan import parts
from qtensor.library.delayed import RECORD_GRADIENT_AMAX
from qtensor.library.grouped import (
    GROUPED_BIAS_GRAD,
    GROUPED_GEMM,
    GROUPED_POSTPONE,
    GROUPED_QUANTIZE,
    GROUPED_WGRAD,
    GROUPED_WGRAD_ACCUMULATE,
)
from qtensor.library.quantize import QUANTIZE_


class GroupedForward(NamedTuple):
    """What the forward computes."""

    out: Tensor
    new_weight_workspace: list[Tensor]
    """Buffers of the weights, where the caller asked to keep them."""
    tensors_to_save: list[Tensor | None]
    """None where ``ctx_attrs`` says that an input itself is saved."""
    ctx_attrs: dict[str, Any]
    """The plain values that backward needs beside them."""
    amaxes: list[Tensor]
    """Float32: of the inputs (groups,) and of each weight (1,) under delayed scaling."""


def _matrix(t: Tensor) -> Tensor:
    return t if t.ndim == 2 else t.reshape(-1, t.shape[-1])


def _scales(delayed: DelayedCall | None, role: int, groups: int) -> Tensor | None:
    return None if delayed is None else delayed.scales[role * groups : (role + 1) * groups]


def quantize_ragged(
    x: Tensor, canonical: str, splits: Splits, scale: Tensor | None, seed: Tensor | None
) -> tuple[Operand, Tensor | None]:
    """Quantize each group of the rows of ``x`` (M, K) on its own.

    Returns:
        The operand of flat buffers (a plain one for ""), and the maxima (groups,) where ``scale`` says delayed scaling.
    """
    if not canonical:
        return plain_operand(x), None
    buffers = GROUPED_QUANTIZE(x, canonical, *splits, scale, seed)
    if scale is None:
        return Operand(buffers, canonical, x.shape), None
    return Operand(buffers[:-1], canonical, x.shape), buffers[-1]


def _quantize_weights(args: GroupedFwdArgs) -> tuple[Weights, list[Tensor]]:
    """The weights from the workspace, or quantized anew; and their maxima under delayed scaling."""
    plan, groups = args.plan, args.splits.groups
    shape = args.weights[0].shape
    scales = _scales(args.delayed, 1, groups) if plan.delayed[1] else None
    seeds, kept = args.seeds[1], args.weight_workspace
    if kept is not None and not args.update_workspace:
        return Weights(kept, args.workspace_quantizer, shape), []
    count = 0 if kept is None else len(kept) // groups
    buffers: list[Tensor] = []
    amaxes: list[Tensor] = []
    for i, weight in enumerate(args.weights):
        scale = None if scales is None else scales[i : i + 1]
        seed = None if seeds is None else seeds[i : i + 1]
        if kept is None:
            operand, amax = quantize_operand(weight, plan.weight, scale, seed)
            buffers += operand.buffers
        else:
            out = kept[i * count : (i + 1) * count]
            # Zero, which no history notices, where the flag says that nothing is quantized.
            amax = None if scale is None else scale.new_zeros(1)
            into = out if amax is None else [*out, amax]
            text = args.workspace_quantizer
            QUANTIZE_(weight, text, into, scale, None, seed, args.noop)
            buffers += out
        if amax is not None:
            amaxes.append(amax)
    return Weights(buffers, args.workspace_quantizer if kept else plan.weight, shape), amaxes


def _part_of(weights: Weights, places: tuple[int, ...], total: int, canonical: str) -> Weights:
    if len(places) == total or not places:
        return weights
    starts = range(0, len(weights.buffers), total)
    buffers = [weights.buffers[start + place] for start in starts for place in places]
    return Weights(buffers, canonical, weights.shape)


def row_weights(weights: Weights) -> Weights:
    """What fprop reads."""
    found = parts(weights.canonical)
    return _part_of(weights, found.row, found.total, found.row_canonical)


def column_weights(weights: Weights) -> Weights:
    """What dgrad reads."""
    found = parts(weights.canonical)
    return _part_of(weights, found.column, found.total, found.column_canonical)


def _saved_input(args: GroupedFwdArgs, x: Operand) -> tuple[Operand, bool, bool]:
    """(what wgrad will read, whether it is the input itself, whether it is to be quantized again)."""
    override = args.plan.backward_override
    if override == "high_precision" or (args.save_original_input and override is None):
        return plain_operand(args.inp), True, override is None and bool(args.plan.input)
    if not args.plan.input:
        return x, True, False
    return (row_part(x) if override == "dequantized" else column_part(x)), False, False


def _saved_weights(args: GroupedFwdArgs, w: Weights) -> tuple[Weights, bool]:
    """(what dgrad will read, whether it is the weights themselves)."""
    override = args.plan.backward_override
    if override == "high_precision" or not w.canonical:
        return Weights(list(args.weights), "", w.shape), True
    return (row_weights(w) if override == "dequantized" else column_weights(w)), False


def _grouped_forward_impl(args: GroupedFwdArgs) -> GroupedForward:
    """The forward, pure: it writes nothing but a workspace that it is told to update."""
    plan, splits = args.plan, args.splits
    x_scale = _scales(args.delayed, 0, splits.groups) if plan.delayed[0] else None
    columnwise_later = args.save_original_input and plan.backward_override is None
    text = parts(plan.input).row_canonical if columnwise_later else plan.input
    x, x_amax = quantize_ragged(_matrix(args.inp), text, splits, x_scale, args.seeds[0])
    w, w_amaxes = _quantize_weights(args)
    rows, weights = row_part(x), row_weights(w)
    bias = list(args.biases) if args.biases else None
    out = GROUPED_GEMM(*rows, *weights, *splits, "TN", args.dtype, bias)
    if args.inp.ndim != 2:
        out = out.view(*args.inp.shape[:-1], out.shape[-1])

    to_save: list[Tensor | None] = []
    attrs: dict[str, Any] = {"rows_shape": x.shape, "n_inp": 0, "n_weight": 0}
    attrs |= {"inp_is_saved": False, "weights_are_saved": False}
    if args.wanted:
        saved, is_input, again = _saved_input(args, x)
        attrs |= {"n_inp": len(saved.buffers), "requantize_input": again}
        attrs |= {"inp_quantizer": saved.canonical, "inp_is_saved": is_input}
        to_save += [None] if is_input else saved.buffers
    if args.inp_requires_grad:
        kept, is_weight = _saved_weights(args, w)
        attrs |= {"n_weight": len(kept.buffers), "weight_quantizer": kept.canonical}
        attrs["weights_are_saved"] = is_weight
        to_save += [None] * splits.groups if is_weight else kept.buffers
    keep = args.cache_weight and args.weight_workspace is None and bool(w.canonical)
    amaxes = [*([] if x_amax is None else [x_amax]), *w_amaxes]
    return GroupedForward(out, list(w.buffers) if keep else [], to_save, attrs, amaxes)


def _grouped_setup_ctx(
    bwd: GroupedBwdArgs,
    fwd: GroupedFwdArgs,
    ctx_attrs: dict[str, Any],
    saved: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Fill ``bwd`` with the values that backward needs; returns the tensors for ``save_for_backward``."""
    n_inp = ctx_attrs["n_inp"]
    inp = [fwd.inp] if ctx_attrs["inp_is_saved"] else saved[:n_inp]
    weights = fwd.weights if ctx_attrs["weights_are_saved"] else saved[n_inp:]
    bwd.inp_requires_grad, bwd.wanted = fwd.inp_requires_grad, fwd.wanted
    bwd.bias_requires_grad = fwd.bias_requires_grad
    bwd.plan = fwd.plan
    bwd.inp_shape, bwd.rows_shape = fwd.inp.shape, ctx_attrs["rows_shape"]
    bwd.weight_shape = fwd.weights[0].shape
    bwd.dtype, bwd.weight_dtype = fwd.inp.dtype, fwd.weights[0].dtype
    bwd.bias_dtype = fwd.biases[0].dtype if fwd.biases else None
    bwd.n_inp, bwd.n_weight = n_inp, ctx_attrs["n_weight"]
    bwd.inp_quantizer = ctx_attrs.get("inp_quantizer", "")
    bwd.weight_quantizer = ctx_attrs.get("weight_quantizer", "")
    bwd.requantize_input = ctx_attrs.get("requantize_input", False)
    bwd.splits = Splits(fwd.splits.sizes, None, fwd.splits.groups)
    wgrad, delayed = fwd.wgrad, fwd.delayed
    main_grads: tuple[Tensor, ...] = ()
    token = None
    if wgrad is not None and fwd.wanted:
        main_grads, token = wgrad.main_grads, wgrad.token
        bwd.overwrite_main_grad, bwd.postpone_key = wgrad.overwrite, wgrad.key
    bwd.n_main_grad = len(main_grads)
    state = (None,) * 4 if delayed is None or not fwd.plan.delayed[2] else tuple(delayed)
    return [*inp, *weights, *main_grads, token, fwd.seeds[2], fwd.splits.tensor, *state]


def _restored(bwd: GroupedBwdArgs, saved: Sequence[Any], grad: Tensor | None) -> GroupedBwdArgs:
    """A copy of the arguments around the saved tensors."""
    *operands, token, seed, splits, scales, ticket, cell, cell_step = saved
    inp, rest = operands[: bwd.n_inp], operands[bwd.n_inp :]
    weights, main_grads = rest[: bwd.n_weight], rest[bwd.n_weight :]
    shape = bwd.rows_shape if bwd.inp_quantizer else bwd.inp_shape
    return dataclasses.replace(
        bwd,
        grad_output=grad,
        inp=Operand(inp, bwd.inp_quantizer, shape) if inp else None,
        weights=Weights(weights, bwd.weight_quantizer, bwd.weight_shape) if weights else None,
        main_grads=tuple(main_grads),
        token=token,
        seed=seed,
        splits=Splits(bwd.splits.sizes, splits, bwd.splits.groups),
        delayed=None if scales is None else DelayedCall(scales, ticket, cell, cell_step),
    )


def _wgrad_input(args: GroupedBwdArgs, saved: Operand) -> Operand:
    """The input as wgrad reads it."""
    if saved.canonical:
        return saved
    x = _matrix(saved.buffers[0])
    if not args.requantize_input:
        return plain_operand(x)
    text = parts(args.plan.input).column_canonical
    return quantize_ragged(x, text, args.splits, None, None)[0]


def _weight_gradients(args: GroupedBwdArgs, dy: Operand) -> list[Tensor | None]:
    """wgrad, one a group: returned, added to ``main_grad``, or put off."""
    found: list[Tensor | None] = [None] * args.splits.groups
    if args.inp is None:
        return found
    left, right, splits = column_part(dy), _wgrad_input(args, args.inp), args.splits
    if args.token is not None:
        GROUPED_POSTPONE(args.token, args.postpone_key, *left, *right, *splits)
    elif args.main_grads:
        overwrite = args.overwrite_main_grad
        GROUPED_WGRAD_ACCUMULATE(
            list(args.main_grads), *left, *right, *splits, args.wanted, overwrite
        )
    else:
        grads = GROUPED_WGRAD(*left, *right, *splits, args.wanted, args.weight_dtype)
        for i, grad in zip(args.wanted, grads, strict=True):
            found[i] = grad
    return found


def _grouped_backward(
    args: GroupedBwdArgs, grad: Tensor
) -> tuple[list[Tensor | None], Tensor | None, list[Tensor | None]]:
    """(wgrads, dgrad, grad_biases); None for what nobody asked for."""
    matrix, splits = _matrix(grad), args.splits
    scale = _scales(args.delayed, 2, splits.groups) if args.plan.delayed[2] else None
    dy, amax = quantize_ragged(matrix, args.plan.grad_output, splits, scale, args.seed)
    if amax is not None and args.delayed is not None:
        state = args.delayed
        RECORD_GRADIENT_AMAX(state.cell, state.cell_step, [amax], state.ticket)
    dgrad = None
    if args.inp_requires_grad and args.weights is not None:
        dgrad = GROUPED_GEMM(*row_part(dy), *args.weights, *splits, "NN", args.dtype, None)
        if grad.ndim != 2:
            dgrad = dgrad.view(*grad.shape[:-1], dgrad.shape[-1])
    wgrads = _weight_gradients(args, dy)
    grad_biases: list[Tensor | None] = [None] * (splits.groups if args.bias_dtype else 0)
    if args.bias_requires_grad:
        found = GROUPED_BIAS_GRAD(matrix, *splits)
        same = args.bias_dtype == matrix.dtype
        grad_biases = [g if same else g.to(args.bias_dtype) for g in found]
    return wgrads, dgrad, grad_biases


class GroupedLinearFunction(torch.autograd.Function):
    """The one place where grouped linear meets autograd, in eager and compiled code alike."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, args: GroupedFwdArgs, *parameters: Tensor) -> Any:
        """(out, *new workspace, *amaxes); ``parameters`` are the weights, then the biases."""
        groups = args.splits.groups
        args = args.with_tensors(inp, parameters[:groups], parameters[groups:])
        result = _grouped_forward_impl(args)
        bwd = GroupedBwdArgs()
        saved = _grouped_setup_ctx(bwd, args, result.ctx_attrs, result.tensors_to_save)
        ctx.save_for_backward(*saved)
        ctx.args = bwd
        extra = (*result.new_weight_workspace, *result.amaxes)
        if extra:
            ctx.mark_non_differentiable(*extra)
        return (result.out, *extra)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Any:
        """Gradients of (inp, args, *weights, *biases)."""
        args = _restored(ctx.args, ctx.saved_tensors, grad)
        if grad is None:
            return (None,) * (2 + args.splits.groups * (2 if args.bias_dtype else 1))
        wgrads, dgrad, grad_biases = _grouped_backward(args, grad)
        return dgrad, None, *wgrads, *grad_biases


def run_grouped_linear(args: GroupedFwdArgs) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """(output, new workspace, amaxes) of a call, with autograd where a gradient was asked for."""
    if args.inp_requires_grad or args.wanted or args.bias_requires_grad:
        out, *extra = GroupedLinearFunction.apply(args.inp, args, *args.weights, *args.biases)
    else:
        result = _grouped_forward_impl(args)
        out, extra = result.out, [*result.new_weight_workspace, *result.amaxes]
    count = 0
    if args.delayed is not None:
        fresh = args.weight_workspace is None or args.update_workspace
        count = args.plan.delayed[0] + args.splits.groups * (args.plan.delayed[1] and fresh)
    split = len(extra) - count
    return out, list(extra[:split]), list(extra[split:])
