"""Linear with quantized operands: ``y_MN = x_MK @ w_NK.T + b`` and its three GEMMs.

| GEMM | reads |
|---|---|
| fprop | rowwise x, rowwise w |
| dgrad | rowwise dy, columnwise w |
| wgrad | columnwise dy, columnwise x |
"""

from __future__ import annotations

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
from qtensor.library.gradient import GEMM_ACCUMULATE, POSTPONE
from qtensor.library.linear import (
    LINEAR_BACKWARD,
    LINEAR_FORWARD,
    backward_text,
    forward_text,
)
from qtensor.library.norm import BIAS_GRAD
from qtensor.library.quantize import QUANTIZE, QUANTIZE_
from qtensor.storage.registry import lookup

_ABSENT = Operand([], "", ())


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
        QUANTIZE_(args.weight, args.workspace_quantizer, out, scale, None, args.seeds[1], args.noop)
    operand = Operand(args.weight_workspace, args.workspace_quantizer, args.weight.shape)
    return operand, amax, True


_Products = tuple[Tensor, Operand | None, Operand | None, list[Tensor], list[Tensor]]
"""What forward computes before anything is reduced over ranks: the product; what wgrad will read, None for the input itself;
what dgrad will read, None for the weight itself; the new workspace of the weight; amaxes."""


def _reads_input_itself(args: LinearFwdArgs) -> bool:
    return args.save_original_input and args.plan.backward_override is None


def _in_one_call(args: LinearFwdArgs, x: Tensor) -> _Products:
    """Quantize and multiply both operands by one op: ``x`` (M, K) and the weight (N, K).

    With ``args.packs`` the buffers that backward reads share one tensor, which stands as the first buffer of the input, or of
    the weight if nothing of the input is kept.
    """
    plan, seeds = args.plan, args.seeds
    x_kept = "" if _reads_input_itself(args) else plan.saved_input
    weight_kept = plan.weight if args.cache_weight else plan.saved_weight
    x_text = plan.input if x_kept else parts(plan.input).row_canonical
    scales = None if args.delayed is None else args.delayed.scales
    text = forward_text(x_text, x_kept, plan.weight, weight_kept, args.dtype, args.packs)
    out, *rest = LINEAR_FORWARD(x, args.weight, args.bias, text, scales, seeds[0], seeds[1])
    if args.packs:
        counts = (1, 0) if x_kept else (0, 1)
    else:
        counts = tuple(parts(text).total if text else 0 for text in (x_kept, weight_kept))  # type: ignore[assignment]
    x_buffers, rest = rest[: counts[0]], rest[counts[0] :]
    weight_buffers, amaxes = rest[: counts[1]], rest[counts[1] :]
    kept_input = Operand(x_buffers, x_kept, x.shape) if x_kept else None
    weight = Operand(weight_buffers, weight_kept, args.weight.shape) if plan.saved_weight else None
    if not args.cache_weight:
        return out, kept_input, weight, [], amaxes
    if weight is not None:
        weight = column_part(weight) if plan.backward_override is None else row_part(weight)
    return out, kept_input, weight, weight_buffers, amaxes


def _input_operand(args: LinearFwdArgs, matrix: Tensor | None) -> tuple[Operand, Tensor | None]:
    """The input as fprop and wgrad read it, and its amax."""
    if matrix is None:
        made: Any = args.made
        return made.operand, made.amax
    scale = _scale(args.delayed, 0) if args.plan.delayed[0] else None
    text = args.plan.input
    text = parts(text).row_canonical if _reads_input_itself(args) else text
    return quantize_operand(matrix, text, scale, args.seeds[0])


def _one_by_one(args: LinearFwdArgs, matrix: Tensor | None) -> _Products:
    """Operands that stay in high precision or are quantized already, or a bias that waits for a reduction."""
    plan, parallel = args.plan, args.parallel
    x, x_amax = _input_operand(args, matrix)
    w, w_amax, from_workspace = quantize_weight_buffers(args)
    last = parallel is not None and parallel.mode == "row"
    out = multiply(row_part(x), row_part(w), "TN", args.dtype, None if last else args.bias)
    saved = row_part if plan.backward_override == "dequantized" else column_part
    plain = plan.backward_override == "high_precision"
    keep = args.cache_weight and not from_workspace and bool(w.canonical)
    return (
        out,
        None if plain or _reads_input_itself(args) or not plan.input else saved(x),
        None if plain or not w.canonical else saved(w),
        list(w.buffers) if keep else [],
        [amax for amax in (x_amax, w_amax) if amax is not None],
    )


def _linear_forward_impl(args: LinearFwdArgs) -> LinearForward:
    """The forward, pure: it writes nothing but a workspace that it is told to update."""
    plan, parallel = args.plan, args.parallel
    made = args.made
    if made is None:
        source: Any = args.inp if parallel is None else gather_input(args.inp, parallel)
        matrix = source if source.ndim == 2 else _matrix(source)
        rows_shape: Any = matrix.shape
    else:
        source, matrix, rows_shape = made, None, made.operand.shape
    quantizes = matrix is not None and plan.input and plan.weight
    at_once = quantizes and parallel is None and args.weight_workspace is None
    found = _in_one_call(args, matrix) if at_once else _one_by_one(args, matrix)  # type: ignore[arg-type]
    out, kept_inp, kept_weight, workspace, amaxes = found
    if source.ndim != 2:
        out = out.view(*source.shape[:-1], out.shape[-1])
    if parallel is not None:
        out = reduce_output(out, parallel)
        if parallel.mode == "row" and args.bias is not None:
            out = out + args.bias.to(out.dtype)

    to_save: list[Tensor | None] = []
    aliases: list[str | None] = []
    attrs: dict[str, Any] = {"rows_shape": rows_shape, "n_inp": 0, "n_weight": 0}
    if args.weight_requires_grad:
        saved = kept_inp
        attrs["n_inp"] = 1 if saved is None else len(saved.buffers)
        attrs["inp_quantizer"] = "" if saved is None else saved.canonical
        attrs["requantize_input"] = _reads_input_itself(args) and bool(plan.input)
        to_save += [None] if saved is None else saved.buffers
        aliases += ["inp"] if saved is None else [None] * len(saved.buffers)
    if args.inp_requires_grad:
        saved = kept_weight
        attrs["n_weight"] = 1 if saved is None else len(saved.buffers)
        attrs["weight_quantizer"] = "" if saved is None else saved.canonical
        to_save += [None] if saved is None else saved.buffers
        aliases += ["weight"] if saved is None else [None] * len(saved.buffers)
    attrs["saved_tensor_aliases"] = tuple(aliases)
    return LinearForward(out, workspace, to_save, attrs, amaxes)


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
    bwd.parallel, bwd.packed = fwd.parallel, fwd.packs
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
    inp, weight, kept = operands[: bwd.n_inp], operands[bwd.n_inp :], bwd.weight_quantizer
    shape = bwd.inp_shape if bwd.inp_quantizer == "" else bwd.rows_shape
    delayed = None if scales is None else DelayedCall(scales, ticket, cell, cell_step)
    return bwd.with_tensors(
        grad,
        Operand(inp, bwd.inp_quantizer, shape) if inp else None,
        Operand(weight, kept, bwd.weight_shape) if weight or kept else None,
        (main_grad, token, delayed, seed, made),
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


def _gradients(
    args: LinearBwdArgs, matrix: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """(wgrad, dgrad of the matrix that was multiplied, bias gradient, amax), by the single ops."""
    if matrix is None:
        made: Any = args.made
        dy, amax = made.operand, made.amax
    else:
        scale = _scale(args.delayed, 2) if args.plan.delayed[2] else None
        dy, amax = quantize_operand(matrix, args.plan.grad_output, scale, args.seed)
    dgrad = None
    if args.inp_requires_grad and args.weight is not None:
        dgrad = multiply(row_part(dy), args.weight, "NN", args.dtype)
    wgrad = _weight_gradient(args, dy) if args.weight_requires_grad else None
    has_bias = args.bias_requires_grad and matrix is not None
    return wgrad, dgrad, BIAS_GRAD(matrix) if has_bias else None, amax


def _gradients_at_once(
    args: LinearBwdArgs, matrix: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return what ``_gradients`` returns, by one op."""
    kept = args.inp if args.weight_requires_grad and args.inp is not None else _ABSENT
    weight = args.weight if args.inp_requires_grad and args.weight is not None else _ABSENT
    scales = args.delayed.scales if args.delayed is not None and args.plan.delayed[2] else None
    buffers = [*kept.buffers, *weight.buffers]
    text = backward_text(
        *(args.plan.grad_output, kept.canonical, weight.canonical),
        *(args.dtype, args.weight_dtype, args.bias_requires_grad, args.packed),
    )
    gradients = LINEAR_BACKWARD(matrix, buffers, args.weight_shape[1], text, scales, args.seed)
    second = 1 if weight.canonical else 0
    third = second + 1 if kept.canonical else second
    fourth = third + 1 if args.bias_requires_grad else third
    return (
        gradients[second] if third > second else None,
        gradients[0] if second else None,
        gradients[third] if fourth > third else None,
        gradients[fourth] if fourth < len(gradients) else None,
    )


def _linear_backward(
    args: LinearBwdArgs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(wgrad, dgrad, grad_bias), None for what nobody asked for."""
    grad, made = args.grad_output, args.made
    if grad is None and made is None:
        return None, None, None
    parallel = args.parallel
    if made is None:
        full: Any = grad if parallel is None else gather_gradient(grad, parallel)  # type: ignore[arg-type]
        matrix = full if full.ndim == 2 else _matrix(full)
    else:
        full, matrix = made, None
    at_once = (
        matrix is not None
        and parallel is None
        and args.plan.grad_output
        and (args.inp is None or args.inp.canonical)
        and (args.weight is None or args.weight.canonical)
        and args.main_grad is None
        and args.token is None
    )
    found = _gradients_at_once(args, matrix) if at_once else _gradients(args, matrix)  # type: ignore[arg-type]
    wgrad, dgrad, grad_bias, amax = found
    if amax is not None and args.delayed is not None:
        state = args.delayed
        RECORD_GRADIENT_AMAX(state.cell, state.cell_step, [amax], state.ticket)
    if dgrad is not None:
        if full.ndim != 2:
            dgrad = dgrad.view(*full.shape[:-1], dgrad.shape[-1])
        if parallel is not None:
            dgrad = reduce_gradient(dgrad, parallel)
    if grad_bias is not None and args.bias_dtype is not None and grad_bias.dtype != args.bias_dtype:
        grad_bias = grad_bias.to(args.bias_dtype)
    return wgrad, dgrad, grad_bias


def quantized_output(out: Tensor, canonical: str, seed: Tensor | None = None) -> Any:
    """The output as a tensor subclass."""
    name, keywords = assembly(canonical)
    buffers = QUANTIZE(out, canonical, None, None, seed)
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
