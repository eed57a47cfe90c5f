"""Grouped linear: a matrix of rows in groups, a weight for each group, and the three GEMMs.

``y_i = x_i @ w_i.T + b_i``. Each group is a matrix of its own with its own factors, blocks and
padding, and has the bytes that ``linear`` gives for it. An operand over all groups is flat buffers
(``qtensor.library.ragged``). The weights are one operand too: the buffers of one weight after
another, and the shape (N, K) of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtensor.core.operand import Operand, plain_operand
from qtensor.functional.debugging import asks_for, tell_debug
from qtensor.functional.grouped.args import GroupedBwdArgs, GroupedFwdArgs, Splits
from qtensor.functional.linear.args import DelayedCall
from qtensor.functional.linear.layer_plan import parts
from qtensor.functional.linear.saved import (
    SavedOperands,
    restore_operands,
    save_operand,
    tensors_to_save,
    with_tensors,
)
from qtensor.functional.operands import (
    as_matrix,
    column_part,
    quantize_operand,
    row_part,
)
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
    """The results of a forward.

    Attributes:
        out: (..., N), in the dtype of the call.
        new_weight_workspace: buffers of the weights, if the caller asked for them.
        tensors_to_save: the tensors of the saved operands, None for each input of the call.
        saved: the records of these tensors.
        amaxes: under delayed scaling, float32: (groups,) of the inputs, (1,) of each weight.
    """

    out: Tensor
    new_weight_workspace: list[Tensor]
    tensors_to_save: list[Tensor | None]
    saved: SavedOperands
    amaxes: list[Tensor]


def _scales(delayed: DelayedCall | None, role: int, groups: int) -> Tensor | None:
    return None if delayed is None else delayed.scales[role * groups : (role + 1) * groups]


def quantize_ragged(
    x: Tensor, canonical: str, splits: Splits, scale: Tensor | None, seed: Tensor | None
) -> tuple[Operand, Tensor | None]:
    """Quantize each group of the rows of ``x`` (M, K) on its own.

    ``scale`` (groups,) float32 are the factors of delayed scaling; ``seed`` is (groups,) int64.

    Returns:
        The operand of flat buffers (a plain one for ""), and the maxima (groups,) under delayed
        scaling.
    """
    if not canonical:
        return plain_operand(x), None
    buffers = GROUPED_QUANTIZE(x, canonical, *splits, scale, seed)
    if scale is None:
        return Operand(buffers, canonical, x.shape), None
    return Operand(buffers[:-1], canonical, x.shape), buffers[-1]


def _quantize_weights(args: GroupedFwdArgs) -> tuple[Operand, list[Tensor]]:
    """Return the weights, quantized here or from the workspace, and their maxima (1,) each.

    Only delayed scaling has maxima.
    """
    plan, groups = args.plan, args.splits.groups
    shape = args.weights[0].shape
    scales = _scales(args.delayed, 1, groups) if plan.delayed[1] else None
    seeds, workspace = args.seeds[1], args.weight_workspace
    if workspace is not None and not args.update_workspace:
        return Operand(workspace, args.workspace_quantizer, shape), []
    count = 0 if workspace is None else len(workspace) // groups
    buffers: list[Tensor] = []
    amaxes: list[Tensor] = []
    for i, weight in enumerate(args.weights):
        scale = None if scales is None else scales[i : i + 1]
        seed = None if seeds is None else seeds[i : i + 1]
        if workspace is None:
            operand, amax = quantize_operand(weight, plan.weight, scale, seed)
            buffers += operand.buffers
        else:
            out = workspace[i * count : (i + 1) * count]
            # If the flag says that nothing is quantized, the amax stays zero, which no history
            # notices.
            amax = None if scale is None else scale.new_zeros(1)
            outputs = out if amax is None else [*out, amax]
            canonical = args.workspace_quantizer
            QUANTIZE_(weight, canonical, outputs, scale, None, seed, args.noop)
            buffers += out
        if amax is not None:
            amaxes.append(amax)
    return Operand(buffers, args.workspace_quantizer if workspace else plan.weight, shape), amaxes


def _saved_input(args: GroupedFwdArgs, x: Operand) -> tuple[Operand, bool, bool]:
    """Return the operand of wgrad, whether it is the input itself, whether wgrad quantizes it."""
    override = args.plan.backward_override
    if override == "high_precision" or (args.save_original_input and override is None):
        return plain_operand(args.inp), True, override is None and bool(args.plan.input)
    if not args.plan.input:
        return plain_operand(args.inp), True, False
    return (row_part(x) if override == "dequantized" else column_part(x)), False, False


def _saved_weights(args: GroupedFwdArgs, w: Operand) -> tuple[Operand, bool]:
    """Return the operand of dgrad, and whether it is the weights themselves."""
    override = args.plan.backward_override
    if override == "high_precision" or not w.canonical:
        return Operand(list(args.weights), "", w.shape), True
    return (row_part(w) if override == "dequantized" else column_part(w)), False


def grouped_forward_impl(args: GroupedFwdArgs) -> GroupedForward:
    """Compute the forward. It is pure: it writes only a workspace that it is told to update."""
    plan, splits = args.plan, args.splits
    tell_debug(args, "input", args.inp, splits)
    for i, weight in enumerate(args.weights):
        tell_debug(args, "weight", weight, group=i)
    x_scale = _scales(args.delayed, 0, splits.groups) if plan.delayed[0] else None
    columnwise_later = args.save_original_input and plan.backward_override is None
    canonical = parts(plan.input).row_canonical if columnwise_later else plan.input
    x, x_amax = quantize_ragged(as_matrix(args.inp), canonical, splits, x_scale, args.seeds[0])
    w, w_amaxes = _quantize_weights(args)
    bias = list(args.biases) if args.biases else None
    out = GROUPED_GEMM(*row_part(x), *row_part(w), *splits, "TN", args.dtype, bias)
    if args.inp.ndim != 2:
        out = out.view(*args.inp.shape[:-1], out.shape[-1])
    tell_debug(args, "output", out, splits)

    tensors: list[Tensor | None] = []
    saved_input = saved_weight = None
    requantize = False
    if args.wanted:
        operand, is_input, requantize = _saved_input(args, x)
        saved_input, tensors = save_operand(operand, is_input)
    if args.inp_requires_grad:
        saved_weight, buffers = save_operand(*_saved_weights(args, w))
        tensors = tensors + buffers
    saved = SavedOperands(saved_input, saved_weight, requantize)
    returns_weights = args.cache_weight and args.weight_workspace is None and bool(w.canonical)
    workspace = list(w.buffers) if returns_weights else []
    amaxes = [*([] if x_amax is None else [x_amax]), *w_amaxes]
    return GroupedForward(out, workspace, tensors, saved, amaxes)


def grouped_setup_ctx(
    bwd: GroupedBwdArgs, fwd: GroupedFwdArgs, result: GroupedForward
) -> list[Tensor | None]:
    """Fill ``bwd`` with the values that backward needs.

    Returns:
        The tensors for ``save_for_backward``, which ``restored`` reads.
    """
    bwd.inp_requires_grad, bwd.wanted = fwd.inp_requires_grad, fwd.wanted
    bwd.bias_requires_grad = fwd.bias_requires_grad
    bwd.plan, bwd.saved, bwd.site = fwd.plan, result.saved, fwd.site
    bwd.dtype, bwd.weight_dtype = fwd.inp.dtype, fwd.weights[0].dtype
    bwd.bias_dtype = fwd.biases[0].dtype if fwd.biases else None
    bwd.splits = Splits(fwd.splits.sizes, None, fwd.splits.groups)
    wgrad, delayed = fwd.wgrad, fwd.delayed
    main_grads: tuple[Tensor, ...] = ()
    report = None
    if wgrad is not None and fwd.wanted:
        main_grads, report = wgrad.main_grads, wgrad.report
        bwd.overwrite_main_grad, bwd.postpone_key = wgrad.overwrite, wgrad.key
    bwd.n_main_grad = len(main_grads)
    state = (None,) * 5 if delayed is None or not fwd.plan.delayed[2] else tuple(delayed)
    tensors = tensors_to_save(result.saved, result.tensors_to_save, [fwd.inp], fwd.weights)
    return [*tensors, *main_grads, report, fwd.seeds[2], fwd.splits.tensor, *state]


def restored(
    bwd: GroupedBwdArgs, tensors: Sequence[Tensor | None], grad: Tensor | None
) -> GroupedBwdArgs:
    """Return a copy of the arguments with the gradient ``grad`` (..., N) and the saved tensors.

    ``tensors`` are those that ``grouped_setup_ctx`` returned.
    """
    inp, weights, rest = restore_operands(bwd.saved, tensors)
    main_grads, rest = tuple(rest[: bwd.n_main_grad]), rest[bwd.n_main_grad :]
    report, seed, sizes, scales, *state = rest
    delayed = None if scales is None else DelayedCall._make((scales, *state))
    splits = Splits(bwd.splits.sizes, sizes, bwd.splits.groups)
    return with_tensors(bwd, grad, inp, weights, main_grads, report, delayed, seed, splits)


def _wgrad_input(args: GroupedBwdArgs, saved: Operand) -> Operand:
    """Return the input (M, K) as wgrad reads it."""
    if saved.canonical:
        return saved
    x = as_matrix(saved.buffers[0])
    if not args.saved.requantize_input:
        return plain_operand(x)
    canonical = parts(args.plan.input).column_canonical
    return quantize_ragged(x, canonical, args.splits, None, None)[0]


def _weight_gradients(args: GroupedBwdArgs, dy: Operand) -> list[Tensor | None]:
    """Return one wgrad (N, K) for each group; None if it goes to ``main_grad`` or is delayed."""
    wgrads: list[Tensor | None] = [None] * args.splits.groups
    if args.inp is None:
        return wgrads
    left, right, splits = column_part(dy), _wgrad_input(args, args.inp), args.splits
    if not args.main_grads and not args.postpone_key:
        grads = GROUPED_WGRAD(*left, *right, *splits, args.wanted, args.weight_dtype)
        for i, grad in zip(args.wanted, grads[: len(args.wanted)], strict=True):
            wgrads[i] = grad
        return wgrads
    if asks_for(args, "grad_weight"):
        grads = GROUPED_WGRAD(*left, *right, *splits, args.wanted, torch.float32)
        for i, grad in zip(args.wanted, grads[: len(args.wanted)], strict=True):
            tell_debug(args, "grad_weight", grad, group=i)
    if args.main_grads:
        overwrite = args.overwrite_main_grad
        GROUPED_WGRAD_ACCUMULATE(
            list(args.main_grads), *left, *right, *splits, args.wanted, overwrite
        )
    else:
        GROUPED_POSTPONE(args.postpone_key, *left, *right, *splits)
    return wgrads


def grouped_backward(
    args: GroupedBwdArgs, grad: Tensor
) -> tuple[list[Tensor | None], Tensor | None, list[Tensor | None]]:
    """Return (wgrads (N, K) each, dgrad (..., K), grad_biases (N,) each) of ``grad`` (..., N).

    None stands for a gradient that is not needed.
    """
    matrix, splits = as_matrix(grad), args.splits
    tell_debug(args, "grad_output", grad, splits)
    scale = _scales(args.delayed, 2, splits.groups) if args.plan.delayed[2] else None
    dy, amax = quantize_ragged(matrix, args.plan.grad_output, splits, scale, args.seed)
    if amax is not None and args.delayed is not None:
        args.delayed.record_gradient(amax)
    dgrad = None
    if args.inp_requires_grad and args.weights is not None:
        dgrad = GROUPED_GEMM(*row_part(dy), *args.weights, *splits, "NN", args.dtype, None)
        if grad.ndim != 2:
            dgrad = dgrad.view(*grad.shape[:-1], dgrad.shape[-1])
    tell_debug(args, "grad_input", dgrad, splits)
    wgrads = _weight_gradients(args, dy)
    grad_biases: list[Tensor | None] = [None] * (splits.groups if args.bias_dtype else 0)
    if args.bias_requires_grad:
        sums = GROUPED_BIAS_GRAD(matrix, *splits)[: splits.groups]
        same = args.bias_dtype == matrix.dtype
        grad_biases = [g if same else g.to(args.bias_dtype) for g in sums]
    return wgrads, dgrad, grad_biases


class GroupedLinearFunction(torch.autograd.Function):
    """Grouped linear as a function of autograd, for eager and compiled code alike."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, args: GroupedFwdArgs, *parameters: Tensor) -> Any:
        """Return (out (..., N), *buffers of a new workspace, *amaxes).

        ``parameters`` are the weights (N, K), then the biases (N,).
        """
        groups = args.splits.groups
        args = with_tensors(args, inp, parameters[:groups], parameters[groups:])
        result = grouped_forward_impl(args)
        bwd = GroupedBwdArgs()
        ctx.save_for_backward(*grouped_setup_ctx(bwd, args, result))
        ctx.args = bwd
        extra = (*result.new_weight_workspace, *result.amaxes)
        if extra:
            ctx.mark_non_differentiable(*extra)
        return (result.out, *extra)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Any:
        """Return the gradients of (inp (..., K), args, *weights (N, K), *biases (N,))."""
        args = restored(ctx.args, ctx.saved_tensors, grad)
        if grad is None:
            return (None,) * (2 + args.splits.groups * (2 if args.bias_dtype else 1))
        wgrads, dgrad, grad_biases = grouped_backward(args, grad)
        return dgrad, None, *wgrads, *grad_biases


def run_grouped_linear(args: GroupedFwdArgs) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return (output (..., N), new workspace, amaxes), with autograd if a gradient is needed."""
    if args.inp_requires_grad or args.wanted or args.bias_requires_grad:
        out, *extra = GroupedLinearFunction.apply(args.inp, args, *args.weights, *args.biases)
    else:
        result = grouped_forward_impl(args)
        out, extra = result.out, [*result.new_weight_workspace, *result.amaxes]
    count = 0
    if args.delayed is not None:
        fresh = args.weight_workspace is None or args.update_workspace
        count = args.plan.delayed[0] + args.splits.groups * (args.plan.delayed[1] and fresh)
    split = len(extra) - count
    return out, list(extra[:split]), list(extra[split:])
