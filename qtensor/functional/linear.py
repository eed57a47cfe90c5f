"""Linear with quantized operands: ``y_MN = x_MK @ w_NK.T + b`` and its three GEMMs.

| GEMM | reads |
|---|---|
| fprop | rowwise x, rowwise w |
| dgrad | rowwise dy, columnwise w |
| wgrad | columnwise dy, columnwise x |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtensor.functional.linear_args import DelayedCall, LinearBwdArgs, LinearFwdArgs
from qtensor.functional.operands import (
    Operand,
    Quantized,
    column_part,
    multiply,
    plain_operand,
    quantize_buffers,
    quantize_operand,
    row_part,
)
from qtensor.functional.parallel import (
    gather_gradient,
    gather_input,
    reduce_gradient,
    reduce_output,
)
from qtensor.functional.plan import assembly, parts
from qtensor.library.delayed import RECORD_GRADIENT_AMAX
from qtensor.library.direct import direct
from qtensor.library.gradient import GEMM_ACCUMULATE, POSTPONE
from qtensor.library.norm import BIAS_GRAD
from qtensor.library.quantize import QUANTIZE_
from qtensor.storage.registry import lookup

quantize_buffers_ = direct(QUANTIZE_, 0)
bias_gradient = direct(BIAS_GRAD, 0)


class LinearForward(NamedTuple):
    """What the forward computes."""

    out: Tensor
    new_weight_workspace: list[Tensor]
    """Buffers of the weight, where the caller asked to keep them."""
    tensors_to_save: list[Tensor | None]
    """None where ``ctx_attrs["saved_tensor_aliases"]`` names an input instead."""
    ctx_attrs: dict[str, Any]
    """The plain values that backward needs beside them."""
    amaxes: list[Tensor]
    """(1,) float32 each: of input and weight under delayed scaling."""


def _matrix(t: Tensor) -> Tensor:
    return t if t.ndim == 2 else t.reshape(-1, t.shape[-1])


def _scale(delayed: DelayedCall | None, role: int) -> Tensor | None:
    return None if delayed is None else delayed.scales[role : role + 1]


def quantize_weight_buffers(args: LinearFwdArgs) -> tuple[Operand, Tensor | None, bool]:
    """The weight as an operand: from the workspace, or quantized anew.

    Returns:
        The operand, its amax under delayed scaling, and whether its buffers are those of the workspace.
    """
    scale = _scale(args.delayed, 1) if args.plan.delayed[1] else None
    if args.weight_workspace is None:
        operand, amax = quantize_operand(args.weight, args.plan.weight, scale, args.seeds[1])
        return operand, amax, False
    amax = None
    if args.update_workspace:
        out = args.weight_workspace
        if scale is not None:
            # Zero, which no history notices, where the flag says that nothing is quantized.
            amax = scale.new_zeros(1)
            out = [*out, amax]
        quantize_buffers_(
            args.weight, args.workspace_quantizer, out, scale, None, args.seeds[1], args.noop
        )
    operand = Operand(args.weight_workspace, args.workspace_quantizer, args.weight.shape)
    return operand, amax, True


def _saved_input(args: LinearFwdArgs, x: Operand) -> tuple[Operand, bool, bool]:
    """(what wgrad will read, whether it is the input itself, whether it is to be quantized again).

    The input itself is what this rank was given; backward gathers it again where forward did.
    """
    override = args.plan.backward_override
    if override == "high_precision" or (args.save_original_input and override is None):
        return plain_operand(args.inp), True, override is None and bool(args.plan.input)
    if not args.plan.input:
        return plain_operand(args.inp), True, False
    return (row_part(x) if override == "dequantized" else column_part(x)), False, False


def _saved_weight(args: LinearFwdArgs, w: Operand) -> tuple[Operand, bool]:
    """(what dgrad will read, whether it is the weight itself)."""
    override = args.plan.backward_override
    if override == "high_precision" or not w.canonical:
        return plain_operand(args.weight), True
    return (row_part(w) if override == "dequantized" else column_part(w)), False


def _linear_forward_impl(args: LinearFwdArgs) -> LinearForward:
    """The forward, pure: it writes nothing but a workspace that it is told to update."""
    plan, parallel = args.plan, args.parallel
    made = args.made
    if made is None:
        source = gather_input(args.inp, parallel)
        x_scale = _scale(args.delayed, 0) if plan.delayed[0] else None
        columnwise_later = args.save_original_input and plan.backward_override is None
        text = parts(plan.input).row_canonical if columnwise_later else plan.input
        x, x_amax = quantize_operand(_matrix(source), text, x_scale, args.seeds[0])
        lead: Sequence[int] = source.shape[:-1]
    else:
        x, x_amax, lead = made.operand, made.amax, made.shape[:-1]
    w, w_amax, from_workspace = quantize_weight_buffers(args)
    last = parallel is not None and parallel.mode == "row"
    rows, bias = row_part(x), args.bias
    out = multiply(rows, row_part(w), "TN", args.dtype, None if last else bias)
    if len(lead) != 1:
        out = out.view(*lead, out.shape[-1])
    out = reduce_output(out, parallel)
    if last and bias is not None:
        out = out + bias.to(out.dtype)

    to_save: list[Tensor | None] = []
    aliases: list[str | None] = []
    attrs: dict[str, Any] = {"rows_shape": x.shape, "n_inp": 0, "n_weight": 0}
    if args.weight_requires_grad:
        saved, is_input, again = _saved_input(args, x)
        attrs |= {"n_inp": len(saved.buffers), "requantize_input": again}
        attrs["inp_quantizer"] = saved.canonical
        to_save += [None] if is_input else saved.buffers
        aliases += ["inp"] if is_input else [None] * len(saved.buffers)
    if args.inp_requires_grad:
        saved, is_weight = _saved_weight(args, w)
        attrs |= {"n_weight": len(saved.buffers), "weight_quantizer": saved.canonical}
        to_save += [None] if is_weight else saved.buffers
        aliases += ["weight"] if is_weight else [None] * len(saved.buffers)
    attrs["saved_tensor_aliases"] = tuple(aliases)
    keep = args.cache_weight and not from_workspace and bool(w.canonical)
    amaxes = [amax for amax in (x_amax, w_amax) if amax is not None]
    return LinearForward(out, list(w.buffers) if keep else [], to_save, attrs, amaxes)


def _linear_setup_ctx(
    bwd: LinearBwdArgs,
    fwd: LinearFwdArgs,
    out: Tensor,
    ctx_attrs: dict[str, Any],
    saved: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Fill ``bwd`` with the values that backward needs; returns the tensors for ``save_for_backward``.

    It sees the inputs, the output and what forward returned, and nothing else.
    """
    aliases = ctx_attrs["saved_tensor_aliases"]
    originals = {"inp": fwd.inp, "weight": fwd.weight}
    tensors = [t if a is None else originals[a] for t, a in zip(saved, aliases, strict=True)]
    bwd.inp_requires_grad = fwd.inp_requires_grad
    bwd.weight_requires_grad = fwd.weight_requires_grad
    bwd.bias_requires_grad = fwd.bias_requires_grad
    bwd.plan = fwd.plan
    inp = fwd.inp if fwd.made is None else fwd.made
    bwd.inp_shape, bwd.rows_shape = inp.shape, ctx_attrs["rows_shape"]
    bwd.weight_shape = fwd.weight.shape
    bwd.dtype, bwd.weight_dtype = inp.dtype, fwd.weight.dtype
    bwd.bias_dtype = None if fwd.bias is None else fwd.bias.dtype
    bwd.n_inp, bwd.n_weight = ctx_attrs["n_inp"], ctx_attrs["n_weight"]
    bwd.inp_quantizer = ctx_attrs.get("inp_quantizer", "")
    bwd.weight_quantizer = ctx_attrs.get("weight_quantizer", "")
    bwd.requantize_input = ctx_attrs.get("requantize_input", False)
    bwd.parallel = fwd.parallel
    wgrad, delayed = fwd.wgrad, fwd.delayed
    main_grad = token = None
    if wgrad is not None and fwd.weight_requires_grad:
        main_grad, token = wgrad.main_grad, wgrad.token
        bwd.overwrite_main_grad, bwd.postpone_key = wgrad.overwrite, wgrad.key
    state = (None,) * 4 if delayed is None or not fwd.plan.delayed[2] else tuple(delayed)
    return [*tensors, main_grad, token, fwd.seeds[2], *state]


def _restored(
    bwd: LinearBwdArgs, saved: Sequence[Any], grad: Tensor | None, made: Quantized | None = None
) -> LinearBwdArgs:
    """A copy of the arguments around the saved tensors."""
    *operands, main_grad, token, seed, scales, ticket, cell, cell_step = saved
    inp, weight = operands[: bwd.n_inp], operands[bwd.n_inp :]
    shape = bwd.inp_shape if bwd.inp_quantizer == "" else bwd.rows_shape
    delayed = None if scales is None else DelayedCall(scales, ticket, cell, cell_step)
    return dataclasses.replace(
        bwd,
        grad_output=grad,
        inp=Operand(inp, bwd.inp_quantizer, shape) if inp else None,
        weight=Operand(weight, bwd.weight_quantizer, bwd.weight_shape) if weight else None,
        main_grad=main_grad,
        token=token,
        seed=seed,
        delayed=delayed,
        made=made,
    )


def _wgrad_input(args: LinearBwdArgs) -> Operand:
    """The input as wgrad reads it."""
    saved = args.inp
    if saved is None or saved.canonical:
        return saved  # type: ignore[return-value]
    x = _matrix(gather_input(saved.buffers[0], args.parallel))
    if not args.requantize_input:
        return plain_operand(x)
    return quantize_operand(x, parts(args.plan.input).column_canonical)[0]


def _weight_gradient(args: LinearBwdArgs, dy: Operand) -> Tensor | None:
    """wgrad: returned, added to ``main_grad``, or put off."""
    left, right = column_part(dy), _wgrad_input(args)
    if args.token is not None:
        POSTPONE(
            args.token,
            args.postpone_key,
            left.buffers,
            left.canonical,
            left.shape,
            right.buffers,
            right.canonical,
            right.shape,
        )
        return None
    if args.main_grad is None:
        return multiply(left, right, "NT", args.weight_dtype)
    GEMM_ACCUMULATE(
        args.main_grad,
        left.buffers,
        left.canonical,
        left.shape,
        right.buffers,
        right.canonical,
        right.shape,
        "NT",
        args.overwrite_main_grad,
    )
    return None


def _quantized_gradient(
    args: LinearBwdArgs, grad: Tensor | None
) -> tuple[Operand, Tensor | None, Tensor | None, Sequence[Any]]:
    """(the gradient as operand, its amax, its matrix in high precision where there is one, its leading dims)."""
    if grad is None:
        made: Any = args.made
        return made.operand, made.amax, None, made.shape[:-1]
    full = gather_gradient(grad, args.parallel)
    matrix = _matrix(full)
    scale = _scale(args.delayed, 2) if args.plan.delayed[2] else None
    dy, amax = quantize_operand(matrix, args.plan.grad_output, scale, args.seed)
    return dy, amax, matrix, full.shape[:-1]


def _linear_backward(
    args: LinearBwdArgs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(wgrad, dgrad, grad_bias), None for what nobody asked for."""
    if args.grad_output is None and args.made is None:
        return None, None, None
    dy, amax, matrix, lead = _quantized_gradient(args, args.grad_output)
    if amax is not None and args.delayed is not None:
        state = args.delayed
        RECORD_GRADIENT_AMAX(state.cell, state.cell_step, [amax], state.ticket)
    wgrad = dgrad = grad_bias = None
    if args.inp_requires_grad and args.weight is not None:
        dgrad = multiply(row_part(dy), args.weight, "NN", args.dtype)
        if len(lead) != 1:
            dgrad = dgrad.view(*lead, dgrad.shape[-1])
        dgrad = reduce_gradient(dgrad, args.parallel)
    if args.weight_requires_grad:
        wgrad = _weight_gradient(args, dy)
    if args.bias_requires_grad and matrix is not None:
        grad_bias = bias_gradient(matrix)
        if args.bias_dtype is not None and grad_bias.dtype != args.bias_dtype:
            grad_bias = grad_bias.to(args.bias_dtype)
    return wgrad, dgrad, grad_bias


def quantized_output(out: Tensor, canonical: str) -> Any:
    """The output as a tensor subclass."""
    name, keywords = assembly(canonical)
    buffers = quantize_buffers(out, canonical, None, None, None)
    named = dict(zip(keywords, buffers, strict=True))
    return lookup(name)(out.shape, out.dtype, canonical, **named)


class LinearFunction(torch.autograd.Function):
    """The one place where linear meets autograd, in eager and compiled code alike."""

    @staticmethod
    def forward(
        ctx: Any, inp: Tensor, weight: Tensor, bias: Tensor | None, args: LinearFwdArgs
    ) -> Any:
        """(out, *new workspace, *amaxes)."""
        args = args.with_tensors(inp, weight, bias)
        result = _linear_forward_impl(args)
        bwd = LinearBwdArgs()
        saved = _linear_setup_ctx(bwd, args, result.out, result.ctx_attrs, result.tensors_to_save)
        ctx.save_for_backward(*saved)
        ctx.args = bwd
        extra = (*result.new_weight_workspace, *result.amaxes)
        if extra:
            ctx.mark_non_differentiable(*extra)
        out = result.out
        if args.output_quantizer:
            out = quantized_output(out, args.output_quantizer)
        return (out, *extra)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Any:
        """Gradients of (inp, weight, bias, args)."""
        args = _restored(ctx.args, ctx.saved_tensors, grad)
        wgrad, dgrad, grad_bias = _linear_backward(args)
        return dgrad, wgrad, grad_bias, None


def run_linear(args: LinearFwdArgs) -> tuple[Any, list[Tensor], list[Tensor]]:
    """(output, new workspace, amaxes) of a call, with autograd where a gradient was asked for."""
    needed = args.inp_requires_grad or args.weight_requires_grad or args.bias_requires_grad
    if needed:
        out, *extra = LinearFunction.apply(args.inp, args.weight, args.bias, args)
    else:
        result = _linear_forward_impl(args)
        out, extra = result.out, [*result.new_weight_workspace, *result.amaxes]
        if args.output_quantizer:
            out = quantized_output(out, args.output_quantizer)
    count = 0
    if args.delayed is not None:
        count = args.plan.delayed[0] + (
            args.plan.delayed[1] and (args.weight_workspace is None or args.update_workspace)
        )
    split = len(extra) - count
    return out, list(extra[:split]), list(extra[split:])
