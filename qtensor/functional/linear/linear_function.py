"""Linear with quantized operands: ``y_MN = x_MK @ w_NK.T + b`` and its three GEMMs.

| GEMM | reads |
|---|---|
| fprop | rowwise x, rowwise w |
| dgrad | rowwise dy, columnwise w |
| wgrad | columnwise dy, columnwise x |

A forward takes one of three paths, which give the same bytes:

| path | code | runs when |
|---|---|---|
| one op | ``_forward_in_one_op`` | the recipe quantizes input and weight |
| one op, answered by tensors | ``library.linear.forward_of_quantized`` | one is quantized already |
| single ops | ``_forward_by_ops`` | all other calls |

All other calls are those with an operand that stays in high precision, comes from another
operation already quantized, is split over ranks, or is a weight from a workspace. Compiled code
takes the same paths: Dynamo sees ``qtensor_composite::linear`` (one_op.py), which the compiler
decomposes into one of them. Backward takes one op, or single ops also if the weight gradient goes
to ``main_grad`` or is delayed, and in a graph if there is one gradient alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape
from qtensor.core.linear_plans import backward_text, forward_text
from qtensor.core.operand import Operand, plain_operand
from qtensor.core.torch_state import has_modes
from qtensor.functional.debugging import asks_for, tell_debug
from qtensor.functional.linear.args import DelayedCall, LinearBwdArgs, LinearFwdArgs
from qtensor.functional.linear.layer_plan import assembly, parts
from qtensor.functional.linear.saved import (
    SavedOperands,
    restore_operands,
    save_operand,
    tensors_to_save,
    with_tensors,
)
from qtensor.functional.operands import (
    Quantized,
    as_matrix,
    column_part,
    multiply,
    quantize_operand,
    row_part,
)
from qtensor.functional.ranks.code_gather import gather_rows
from qtensor.functional.ranks.parallel import (
    gathers_gradient,
    gathers_input,
    reduce_gradient,
    reduce_output,
)
from qtensor.library.gradient import GEMM_ACCUMULATE, POSTPONE
from qtensor.library.linear import LINEAR_BACKWARD, LINEAR_FORWARD
from qtensor.library.norm import BIAS_GRAD
from qtensor.library.quantize import QUANTIZE, QUANTIZE_
from qtensor.storage.registry import lookup
from qtensor.storage.tensor import QuantizedTensor

_ABSENT = Operand([], "", ())


class LinearForward(NamedTuple):
    """The results of a forward.

    Attributes:
        out: (..., N), in the dtype of the call.
        new_weight_workspace: buffers of the weight, if the caller asked for them.
        tensors_to_save: the tensors of the saved operands, None for each input of the call.
        saved: the records of these tensors.
        rows_shape: (M, K) of the matrix that was multiplied.
        amaxes: under delayed scaling, (1,) float32 each, of input and weight.
    """

    out: Tensor
    new_weight_workspace: list[Tensor]
    tensors_to_save: list[Tensor | None]
    saved: SavedOperands
    rows_shape: Shape
    amaxes: list[Tensor]


class _Products(NamedTuple):
    """What forward computes before ranks exchange anything.

    Attributes:
        out: (M, N).
        input: the operand of wgrad, or None to save the input itself.
        weight: the operand of dgrad, or None to save the weight itself.
        workspace: new buffers of the weight that the caller keeps.
        amaxes: see ``LinearForward``.
    """

    out: Tensor
    input: Operand | None
    weight: Operand | None
    workspace: list[Tensor]
    amaxes: list[Tensor]


class _Gradients(NamedTuple):
    """What backward computes before ranks exchange anything; None for a gradient without a use.

    Attributes:
        wgrad: (N, K).
        dgrad: (M, K), of the matrix that forward multiplied.
        bias: (N,).
        amax: (1,) float32 of the gradient under delayed scaling.
    """

    wgrad: Tensor | None
    dgrad: Tensor | None
    bias: Tensor | None
    amax: Tensor | None


def _scale(delayed: DelayedCall | None, role: int) -> Tensor | None:
    return None if delayed is None else delayed.scales[role : role + 1]


def quantize_weight_buffers(args: LinearFwdArgs) -> tuple[Operand, Tensor | None, bool]:
    """Return the weight (N, K) as an operand, quantized here or taken from the workspace.

    Returns:
        The operand, its amax (1,) under delayed scaling, and True if its buffers are those of the
        workspace.
    """
    scale = _scale(args.delayed, 1) if args.plan.delayed[1] else None
    if args.weight_workspace is None:
        operand, amax = quantize_operand(args.weight, args.plan.weight, scale, args.seeds[1])
        return operand, amax, False
    amax = None
    if args.update_workspace:
        out = args.weight_workspace
        if scale is not None:
            # If the flag says that nothing is quantized, the amax stays zero, which no history
            # notices.
            amax = scale.new_zeros(1)
            out = [*out, amax]
        QUANTIZE_(args.weight, args.workspace_quantizer, out, scale, None, args.seeds[1], args.noop)
    operand = Operand(args.weight_workspace, args.workspace_quantizer, args.weight.shape)
    return operand, amax, True


def _saves_input_itself(args: LinearFwdArgs) -> bool:
    return args.save_original_input and args.plan.backward_override is None


def _makes_graph() -> bool:
    """Return whether this call becomes part of a graph.

    No op of a graph may return a list of one tensor: code that Inductor writes with the option
    ``cpp_wrapper`` takes the list for the tensor, and crashes.
    """
    return torch.compiler.is_compiling() or has_modes()


def _has_many_results(args: LinearBwdArgs) -> bool:
    """Return whether backward by one op returns several tensors."""
    gradients = (args.inp_requires_grad, args.weight_requires_grad, args.bias_requires_grad)
    return sum(gradients) + args.plan.delayed[2] > 1


def _forward_in_one_op(args: LinearFwdArgs, x: Tensor) -> _Products:
    """Quantize and multiply ``x`` (M, K) and the weight (N, K) in one op."""
    plan, seeds = args.plan, args.seeds
    x_kept = "" if _saves_input_itself(args) else plan.saved_input
    weight_kept = plan.weight if args.cache_weight else plan.saved_weight
    x_quantizer = plan.input if x_kept else parts(plan.input).row_canonical
    scales = None if args.delayed is None else args.delayed.scales
    is_alone = not (x_kept or weight_kept or any(plan.delayed[:2]))
    returned = x_quantizer if is_alone and _makes_graph() else x_kept
    text = forward_text(x_quantizer, returned, plan.weight, weight_kept, args.dtype)
    out, *rest = LINEAR_FORWARD(x, args.weight, args.bias, text, scales, seeds[0], seeds[1])
    x_count, weight_count = (parts(c).total if c else 0 for c in (returned, weight_kept))
    x_buffers, rest = rest[:x_count], rest[x_count:]
    weight_buffers, amaxes = rest[:weight_count], rest[weight_count:]
    saved_input = Operand(x_buffers, x_kept, x.shape) if x_kept else None
    weight = Operand(weight_buffers, weight_kept, args.weight.shape) if plan.saved_weight else None
    if not args.cache_weight:
        return _Products(out, saved_input, weight, [], amaxes)
    if weight is not None:
        weight = column_part(weight) if plan.backward_override is None else row_part(weight)
    return _Products(out, saved_input, weight, weight_buffers, amaxes)


def _input_quantizer(args: LinearFwdArgs) -> tuple[str, Tensor | None]:
    """Return the canonical text of the input's quantizer, and its factor (1,) if it is delayed."""
    scale = _scale(args.delayed, 0) if args.plan.delayed[0] else None
    canonical = args.plan.input
    return (parts(canonical).row_canonical if _saves_input_itself(args) else canonical), scale


def _forward_by_ops(args: LinearFwdArgs, source: Tensor | Quantized) -> _Products:
    """Quantize each operand by an op of its own, if it is not quantized yet, and multiply them.

    ``source`` is the input (M, K), or one (..., K) that is quantized already.
    """
    plan, parallel = args.plan, args.parallel
    if isinstance(source, Quantized):
        x, x_amax = source.operand, source.amax
    else:
        canonical, scale = _input_quantizer(args)
        x, x_amax = quantize_operand(source, canonical, scale, args.seeds[0])
    w, w_amax, from_workspace = quantize_weight_buffers(args)
    # The ranks of a row-parallel layer sum their products first, and then add the bias.
    bias = None if parallel is not None and parallel.mode == "row" else args.bias
    out = multiply(row_part(x), row_part(w), "TN", args.dtype, bias)
    saved = row_part if plan.backward_override == "dequantized" else column_part
    plain = plan.backward_override == "high_precision"
    returns_weight = args.cache_weight and not from_workspace and bool(w.canonical)
    return _Products(
        out,
        None if plain or _saves_input_itself(args) or not plan.input else saved(x),
        None if plain or not w.canonical else saved(w),
        list(w.buffers) if returns_weight else [],
        [amax for amax in (x_amax, w_amax) if amax is not None],
    )


def linear_forward_impl(args: LinearFwdArgs) -> LinearForward:
    """Compute the forward. It is pure: it writes only a workspace that it is told to update."""
    plan, parallel = args.plan, args.parallel
    tell_debug(args, "input", args.inp)
    tell_debug(args, "weight", args.weight)
    source: Tensor | Quantized = args.inp
    if args.quantized_input is not None:
        source = args.quantized_input
    elif parallel is not None and gathers_input(parallel):
        source = gather_rows(args.inp, *_input_quantizer(args), parallel)
    if isinstance(source, Quantized):
        matrix, rows_shape = None, source.operand.shape
    else:
        matrix = as_matrix(source)
        rows_shape = matrix.shape
    if (
        matrix is not None
        and plan.input
        and plan.weight
        and parallel is None
        and args.weight_workspace is None
    ):
        products = _forward_in_one_op(args, matrix)
    else:
        products = _forward_by_ops(args, source if matrix is None else matrix)
    out = products.out
    if source.ndim != 2:
        out = out.view(*source.shape[:-1], out.shape[-1])
    if parallel is not None:
        out = reduce_output(out, parallel)
        if parallel.mode == "row" and args.bias is not None:
            out = out + args.bias.to(out.dtype)

    tensors: list[Tensor | None] = []
    saved_input = saved_weight = None
    if args.weight_requires_grad:
        operand = plain_operand(args.inp) if products.input is None else products.input
        saved_input, tensors = save_operand(operand, products.input is None)
    if args.inp_requires_grad:
        operand = plain_operand(args.weight) if products.weight is None else products.weight
        saved_weight, buffers = save_operand(operand, products.weight is None)
        tensors = tensors + buffers
    requantize = args.weight_requires_grad and _saves_input_itself(args) and bool(plan.input)
    saved = SavedOperands(saved_input, saved_weight, requantize)
    return LinearForward(out, products.workspace, tensors, saved, rows_shape, products.amaxes)


def linear_setup_ctx(
    bwd: LinearBwdArgs, fwd: LinearFwdArgs, result: LinearForward
) -> list[Tensor | None]:
    """Fill ``bwd`` with the values that backward needs, from the arguments and results of forward.

    Returns:
        The tensors for ``save_for_backward``, which ``restored`` reads.
    """
    bwd.inp_requires_grad = fwd.inp_requires_grad
    bwd.weight_requires_grad = fwd.weight_requires_grad
    bwd.bias_requires_grad = fwd.bias_requires_grad
    bwd.plan, bwd.saved, bwd.site = fwd.plan, result.saved, fwd.site
    bwd.rows_shape, bwd.weight_shape = result.rows_shape, fwd.weight.shape
    bwd.dtype = (fwd.inp if fwd.quantized_input is None else fwd.quantized_input).dtype
    bwd.weight_dtype = fwd.weight.dtype
    bwd.bias_dtype = None if fwd.bias is None else fwd.bias.dtype
    bwd.parallel = fwd.parallel
    wgrad, delayed = fwd.wgrad, fwd.delayed
    main_grad = report = None
    if wgrad is not None and fwd.weight_requires_grad:
        main_grad, report = wgrad.main_grad, wgrad.report
        bwd.overwrite_main_grad, bwd.postpone_key = wgrad.overwrite, wgrad.key
    state = (None,) * 5 if delayed is None or not fwd.plan.delayed[2] else tuple(delayed)
    tensors = tensors_to_save(result.saved, result.tensors_to_save, [fwd.inp], [fwd.weight])
    return [*tensors, main_grad, report, fwd.seeds[2], *state]


def restored(
    bwd: LinearBwdArgs,
    tensors: Sequence[Tensor | None],
    grad: Tensor | None,
    quantized_grad: Quantized | None = None,
) -> LinearBwdArgs:
    """Return a copy of the arguments with the tensors that ``linear_setup_ctx`` returned.

    The gradient is ``grad`` (..., N), or ``quantized_grad`` if another operation has quantized it.
    """
    inp, weight, rest = restore_operands(bwd.saved, tensors)
    main_grad, report, seed, scales, *state = rest
    delayed = None if scales is None else DelayedCall._make((scales, *state))
    return with_tensors(bwd, grad, inp, weight, main_grad, report, delayed, seed, quantized_grad)


def _wgrad_input(args: LinearBwdArgs) -> Operand:
    """Return the input (M, K) as wgrad reads it."""
    saved = args.inp
    if saved is None or saved.canonical:
        return saved  # type: ignore[return-value]
    source: Tensor | Quantized = saved.buffers[0]
    canonical = parts(args.plan.input).column_canonical if args.saved.requantize_input else ""
    if args.parallel is not None and gathers_input(args.parallel):
        source = gather_rows(saved.buffers[0], canonical, None, args.parallel)
    if isinstance(source, Quantized):
        return source.operand
    return quantize_operand(as_matrix(source), canonical)[0]


def _weight_gradient(args: LinearBwdArgs, dy: Operand) -> Tensor | None:
    """Return wgrad (N, K); None if it goes to ``main_grad`` or is delayed. ``dy`` is (M, N)."""
    left, right = column_part(dy), _wgrad_input(args)
    if args.main_grad is None and not args.postpone_key:
        return multiply(left, right, "NT", args.weight_dtype)
    if asks_for(args, "grad_weight"):
        tell_debug(args, "grad_weight", multiply(left, right, "NT", torch.float32))
    if args.main_grad is not None:
        GEMM_ACCUMULATE(args.main_grad, *left, *right, "NT", args.overwrite_main_grad)
    else:
        POSTPONE(args.postpone_key, *left, *right)
    return None


def _gradient_scale(args: LinearBwdArgs) -> Tensor | None:
    return _scale(args.delayed, 2) if args.plan.delayed[2] else None


def _backward_by_ops(args: LinearBwdArgs, source: Tensor | Quantized) -> _Gradients:
    """Compute the gradients by one op after another.

    ``source`` is the gradient (M, N), or one (..., N) that is quantized already.
    """
    if isinstance(source, Quantized):
        dy, amax, matrix = source.operand, source.amax, None
    else:
        matrix, scale = source, _gradient_scale(args)
        dy, amax = quantize_operand(matrix, args.plan.grad_output, scale, args.seed)
    dgrad = None
    if args.inp_requires_grad and args.weight is not None:
        dgrad = multiply(row_part(dy), args.weight, "NN", args.dtype)
    wgrad = _weight_gradient(args, dy) if args.weight_requires_grad else None
    has_bias = args.bias_requires_grad and matrix is not None
    return _Gradients(wgrad, dgrad, BIAS_GRAD(matrix) if has_bias else None, amax)


def _backward_in_one_op(args: LinearBwdArgs, matrix: Tensor) -> _Gradients:
    """Compute the gradients by one op from ``matrix`` (M, N)."""
    inp = args.inp if args.weight_requires_grad and args.inp is not None else _ABSENT
    weight = args.weight if args.inp_requires_grad and args.weight is not None else _ABSENT
    scales = args.delayed.scales if args.delayed is not None and args.plan.delayed[2] else None
    text = backward_text(
        *(args.plan.grad_output, inp.canonical, weight.canonical),
        *(args.dtype, args.weight_dtype, args.bias_requires_grad),
    )
    buffers = [*inp.buffers, *weight.buffers]
    gradients = LINEAR_BACKWARD(matrix, buffers, args.weight_shape[1], text, scales, args.seed)
    second = 1 if weight.canonical else 0
    third = second + 1 if inp.canonical else second
    fourth = third + 1 if args.bias_requires_grad else third
    return _Gradients(
        gradients[second] if third > second else None,
        gradients[0] if second else None,
        gradients[third] if fourth > third else None,
        gradients[fourth] if fourth < len(gradients) else None,
    )


def linear_backward(
    args: LinearBwdArgs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return (wgrad (N, K), dgrad (..., K), grad_bias (N,)); None for one that is not needed."""
    parallel = args.parallel
    full: Tensor | Quantized | None = args.quantized_grad
    if full is None:
        full = args.grad_output
    if full is None:
        return None, None, None
    tell_debug(args, "grad_output", full)
    if parallel is not None and gathers_gradient(parallel) and not isinstance(full, Quantized):
        # The gradient of the bias is a sum of values.
        canonical = "" if args.bias_requires_grad else args.plan.grad_output
        full = gather_rows(full, canonical, _gradient_scale(args), parallel)
    matrix = None
    if not isinstance(full, Quantized):
        matrix = as_matrix(full)
    if (
        matrix is not None
        and parallel is None
        and args.plan.grad_output
        and (args.inp is None or args.inp.canonical)
        and (args.weight is None or args.weight.canonical)
        and args.main_grad is None
        and not args.postpone_key
        and (_has_many_results(args) or not _makes_graph())
    ):
        gradients = _backward_in_one_op(args, matrix)
    else:
        gradients = _backward_by_ops(args, full if matrix is None else matrix)
    wgrad, dgrad, grad_bias, amax = gradients
    if amax is not None and args.delayed is not None:
        args.delayed.record_gradient(amax)
    if dgrad is not None:
        if full.ndim != 2:
            dgrad = dgrad.view(*full.shape[:-1], dgrad.shape[-1])
        if parallel is not None:
            dgrad = reduce_gradient(dgrad, parallel)
    tell_debug(args, "grad_input", dgrad)
    if grad_bias is not None and args.bias_dtype is not None and grad_bias.dtype != args.bias_dtype:
        grad_bias = grad_bias.to(args.bias_dtype)
    return wgrad, dgrad, grad_bias


def quantized_output(out: Tensor, canonical: str, seed: Tensor | None = None) -> QuantizedTensor:
    """Return ``out`` (..., N) as a quantized tensor of the same shape; ``seed`` is (1,) int64."""
    name, keywords = assembly(canonical)
    buffers = QUANTIZE(out, canonical, None, None, seed)
    named = dict(zip(keywords, buffers, strict=True))
    tensor: QuantizedTensor = lookup(name)(out.shape, out.dtype, canonical, **named)
    return tensor


class LinearFunction(torch.autograd.Function):
    """Linear as a function of autograd, for eager and compiled code alike."""

    @staticmethod
    def forward(
        ctx: Any, inp: Tensor, weight: Tensor, bias: Tensor | None, args: LinearFwdArgs
    ) -> Any:
        """Return (out (..., N), *buffers of a new workspace, *amaxes)."""
        args = with_tensors(args, inp, weight, bias)
        result = linear_forward_impl(args)
        bwd = LinearBwdArgs()
        ctx.save_for_backward(*linear_setup_ctx(bwd, args, result))
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
        """Return the gradients of (inp (..., K), weight (N, K), bias (N,), args)."""
        args = restored(ctx.args, ctx.saved_tensors, grad)
        wgrad, dgrad, grad_bias = linear_backward(args)
        return dgrad, wgrad, grad_bias, None


def run_linear(args: LinearFwdArgs) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return (output (..., N), new workspace, amaxes), with autograd if a gradient is needed."""
    needed = args.inp_requires_grad or args.weight_requires_grad or args.bias_requires_grad
    if needed:
        out, *extra = LinearFunction.apply(args.inp, args.weight, args.bias, args)
    else:
        result = linear_forward_impl(args)
        out, extra = result.out, [*result.new_weight_workspace, *result.amaxes]
        if args.output_quantizer:
            out = quantized_output(out, args.output_quantizer)
    tell_debug(args, "output", out)
    count = 0
    if args.delayed is not None:
        count = args.plan.delayed[0] + (
            args.plan.delayed[1] and (args.weight_workspace is None or args.update_workspace)
        )
    split = len(extra) - count
    return out, list(extra[:split]), list(extra[split:])
