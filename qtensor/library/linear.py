"""Define ``linear_forward`` and ``linear_backward``, each a whole direction in one call.

They compute what ``quantize``, ``gemm`` and ``bias_grad`` compute one after the other, with the
same bytes, and return the buffers that backward needs beside the products. A layer that splits over
ranks, keeps a workspace or postpones a gradient calls the single ops instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor

from qtensor.core.errors import fail
from qtensor.core.linear_plans import ForwardPlan, backward_plan, forward_plan
from qtensor.core.operand import Operand
from qtensor.core.quantizer_registry import (
    alloc_outputs,
    alloc_slots,
    parse,
    readable_part,
    slots_within,
    usage_part,
)
from qtensor.kernels.products.problem import Pair
from qtensor.library.checks import check_seed
from qtensor.library.define import FILLS, SymInt, empty, leaf_op
from qtensor.library.gemm import GEMM, GemmArgs
from qtensor.library.norm import BiasGradArgs
from qtensor.library.quantize import QUANTIZE, QuantizeArgs, alloc_amax, check_input


class LinearForwardArgs(NamedTuple):
    """The arguments of ``linear_forward``.

    Attributes:
        x: input (M, K), float32, bfloat16 or float16.
        weight: (N, K), float32, bfloat16 or float16.
        bias: (N,), or None.
        plan: text of a ``ForwardPlan``.
        scales: (2,) float32 or longer: factors of input and weight under delayed scaling.
        x_seed: (1,) int64 for stochastic rounding.
        weight_seed: (1,) int64 for stochastic rounding.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    plan: str
    scales: Tensor | None = None
    x_seed: Tensor | None = None
    weight_seed: Tensor | None = None


class LinearBackwardArgs(NamedTuple):
    """The arguments of ``linear_backward``.

    Attributes:
        dy: gradient (M, N) of the product, float32, bfloat16 or float16.
        saved: the kept buffers of the input, then those of the weight.
        columns: K.
        plan: text of a ``BackwardPlan``.
        scales: (3,) float32 under delayed scaling; the third is that of ``dy``.
        seed: (1,) int64 for stochastic rounding.
    """

    dy: Tensor
    saved: list[Tensor]
    columns: SymInt
    plan: str
    scales: Tensor | None = None
    seed: Tensor | None = None


class _Unquantized(NamedTuple):
    """A tensor of a linear layer in high precision, and how the op quantizes it.

    Attributes:
        value: (M, K), (N, K) or (M, N); float32, bfloat16 or float16.
        quantizer: canonical text.
        kept: canonical text of the buffers that are outputs of the op, "" for none.
        seed: (1,) int64 for stochastic rounding, or None.
        scales: factors of the layer under delayed scaling, or None.
        role: index of the tensor's factor: 0 input, 1 weight, 2 gradient.
    """

    value: Tensor
    quantizer: str
    kept: str
    seed: Tensor | None
    scales: Tensor | None
    role: int

    @property
    def kept_slots(self) -> tuple[int, ...]:
        """Return the slots of the kept buffers."""
        return slots_within(self.quantizer, self.kept)

    @property
    def scale(self) -> Tensor | None:
        """Return the factor (1,) of the tensor; None if its quantizer takes none."""
        if self.scales is None or not parse(self.quantizer).needs_scale:
            return None
        return self.scales[self.role : self.role + 1]

    def quantize(self, kept: Sequence[Tensor], amaxes: Iterator[Tensor]) -> list[Tensor]:
        """Quantize the tensor and return all its buffers, among them ``kept``, which are written.

        Under delayed scaling its amax is written to the next one of ``amaxes``.
        """
        x, quantizer = self.value, parse(self.quantizer)
        existing = dict(zip(self.kept_slots, kept, strict=True))
        buffers = [
            existing[i] if i in existing else alloc_slots([slot], x.shape, x.device)[0]
            for i, slot in enumerate(quantizer.slots)
        ]
        outputs = [*buffers, next(amaxes)] if quantizer.returns_amax else buffers
        args = QuantizeArgs(x, self.quantizer, self.scale, None, self.seed)
        FILLS["quantize"](outputs, args)
        return buffers

    def operand(self, buffers: Sequence[Tensor], part: tuple[tuple[int, ...], str]) -> Operand:
        """Return the part (slots, canonical text) of the buffers as an operand of a product."""
        slots, canonical = part
        return Operand([buffers[i] for i in slots], canonical, self.value.shape)


def _inputs(args: LinearForwardArgs, plan: ForwardPlan) -> tuple[_Unquantized, _Unquantized]:
    """Return input and weight."""
    x = _Unquantized(args.x, plan.x_quantizer, plan.x_kept, args.x_seed, args.scales, 0)
    seed, scales = args.weight_seed, args.scales
    return x, _Unquantized(args.weight, plan.weight_quantizer, plan.weight_kept, seed, scales, 1)


def _forward_alloc(args: LinearForwardArgs) -> list[Tensor]:
    x, weight, plan = args.x, args.weight, forward_plan(args.plan)
    if x.ndim != 2 or weight.ndim != 2:
        got = f"{tuple(x.shape)} and {tuple(weight.shape)}"
        fail("linear_forward", "x and weight must be matrices", got, "Reshape them")
    tensors = _inputs(args, plan)
    for t in tensors:
        quantizer = parse(t.quantizer)
        check_seed("linear_forward", quantizer, t.seed)
        slots_within(t.quantizer, t.kept)
        check_input(t.value, quantizer.format)
    kept: list[Tensor] = []
    for t in tensors:
        kept += alloc_outputs(parse(t.kept), t.value) if t.kept else []
    amaxes = [amax for t in tensors for amax in alloc_amax(parse(t.quantizer), x.device)]
    return [empty(x, (x.shape[0], weight.shape[0]), plan.dtype), *kept, *amaxes]


def _forward_fill(outputs: list[Tensor], args: LinearForwardArgs) -> None:
    plan = forward_plan(args.plan)
    operands: list[Operand] = []
    saved = outputs[1:]
    tensors = _inputs(args, plan)
    ends = list(accumulate(len(t.kept_slots) for t in tensors))
    amaxes = iter(saved[ends[-1] :])
    for t, end in zip(tensors, ends, strict=True):
        buffers = t.quantize(saved[end - len(t.kept_slots) : end], amaxes)
        operands.append(t.operand(buffers, usage_part(t.quantizer, "rowwise")))
    FILLS["gemm"](outputs[0], GemmArgs(Pair(*operands), "TN", plan.dtype, args.bias))


LINEAR_FORWARD = leaf_op(
    "linear_forward", LinearForwardArgs, "Tensor[]", _forward_alloc, _forward_fill
)
"""``x @ weight.T + bias`` of quantized operands: see ``LinearForwardArgs`` and ``ForwardPlan``.

Returns [product (M, N), the kept buffers of ``x`` and of ``weight``, the amaxes (1,) of delayed
scaling].
"""


def forward_of_quantized(*args: Any, **kwargs: Any) -> list[Tensor]:
    """Return the results of ``linear_forward`` for quantized tensors, by single ops.

    Quantized tensors answer the single ops themselves.
    """
    call = LinearForwardArgs(*args, **kwargs)
    plan = forward_plan(call.plan)
    operands: list[Operand] = []
    kept, amaxes = [], []
    for t in _inputs(call, plan):
        buffers = QUANTIZE(t.value, t.quantizer, t.scale, None, t.seed)
        if parse(t.quantizer).returns_amax:
            *buffers, amax = buffers
            amaxes.append(amax)
        operands.append(t.operand(buffers, usage_part(t.quantizer, "rowwise")))
        kept += [buffers[i] for i in t.kept_slots]
    x, weight = operands
    return [GEMM(*x, *weight, "TN", plan.dtype, call.bias), *kept, *amaxes]


def _backward_alloc(args: LinearBackwardArgs) -> list[Tensor]:
    dy, columns, plan = args.dy, args.columns, backward_plan(args.plan)
    check_input(dy, parse(plan.quantizer).format)
    check_seed("linear_backward", parse(plan.quantizer), args.seed)
    if dy.ndim != 2:
        fail("linear_backward", "dy must be a matrix (M, N)", tuple(dy.shape), "Reshape it")
    outputs = []
    if plan.weight_kept:
        outputs.append(empty(dy, (dy.shape[0], columns), plan.dtype))
    if plan.x_kept:
        outputs.append(empty(dy, (dy.shape[1], columns), plan.weight_dtype))
    if plan.bias:
        outputs.append(empty(dy, dy.shape[1:]))
    return [*outputs, *alloc_amax(parse(plan.quantizer), dy.device)]


def _kept_operands(args: LinearBackwardArgs) -> tuple[Operand, Operand]:
    """Return input and weight as forward has kept them, without buffers where it kept none."""
    plan, saved = backward_plan(args.plan), args.saved
    x_count, weight_count = (
        len(parse(canonical).slots) if canonical else 0
        for canonical in (plan.x_kept, plan.weight_kept)
    )
    if len(saved) != x_count + weight_count:
        rule = f"saved must hold {x_count} buffers of the input and {weight_count} of the weight"
        fix = "Pass the buffers that linear_forward returned"
        fail("linear_backward", rule, f"{len(saved)} tensors", fix)
    (rows, width), columns = args.dy.shape, args.columns
    return (
        Operand(saved[:x_count], plan.x_kept, (rows, columns)),
        Operand(saved[x_count:], plan.weight_kept, (width, columns)),
    )


def _backward_fill(outputs: list[Tensor], args: LinearBackwardArgs) -> None:
    plan = backward_plan(args.plan)
    x, weight = _kept_operands(args)
    dy = _Unquantized(args.dy, plan.quantizer, "", args.seed, args.scales, 2)
    buffers, results = dy.quantize((), iter(outputs[-1:])), iter(outputs)
    if weight.buffers:
        left = dy.operand(buffers, usage_part(plan.quantizer, "rowwise"))
        FILLS["gemm"](next(results), GemmArgs(Pair(left, weight), "NN", plan.dtype))
    if x.buffers:
        left = dy.operand(buffers, readable_part(plan.quantizer, "columnwise"))
        FILLS["gemm"](next(results), GemmArgs(Pair(left, x), "NT", plan.weight_dtype))
    if plan.bias:
        FILLS["bias_grad"](next(results), BiasGradArgs(args.dy))


LINEAR_BACKWARD = leaf_op(
    "linear_backward", LinearBackwardArgs, "Tensor[]", _backward_alloc, _backward_fill
)
"""Gradients of a linear layer from its quantized ``dy``: see ``LinearBackwardArgs``.

Returns [gradient of x (M, K) where buffers of the weight are kept, gradient of the weight (N, K)
where buffers of x are kept, gradient of the bias (N,) if asked for, amax (1,) of delayed scaling].
"""
