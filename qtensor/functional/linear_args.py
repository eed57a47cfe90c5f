"""The structured arguments of linear's two directions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.functional.operands import Operand, Quantized
from qtensor.functional.parallel import Parallel
from qtensor.functional.plan import HIGH_PRECISION, LinearPlan
from qtensor.layout import Shape


class DelayedCall(NamedTuple):
    """Delayed scaling in one call: tensors alone, so that they can be saved for backward.

    Attributes:
        scales: (3,) float32: input, weight, grad_output; of this call.
        ticket: (2,) int64 on the CPU, for the gradient's maximum.
        cell: (1,) float32, written by backward.
        cell_step: (1,) int64 on the CPU, written by backward.
    """

    scales: Tensor
    ticket: Tensor
    cell: Tensor
    cell_step: Tensor


class Wgrad(NamedTuple):
    """What becomes of the weight gradient where it is not returned.

    Attributes:
        main_grad: it is added to this tensor (an alias with a version counter of its own), or written into it.
        overwrite: write instead of add.
        token: with ``key``: its operands are kept until ``backward_dw()``.
        key: of the module.
    """

    main_grad: Tensor | None = None
    overwrite: bool = False
    token: Tensor | None = None
    key: int = 0


@dataclass(slots=True)
class LinearFwdArgs:
    """What the forward of linear reads. Nothing writes to it."""

    # tensors
    inp: Tensor
    """(..., K)."""
    weight: Tensor
    """(N, K), plain or quantized."""
    bias: Tensor | None = None
    """(N,)."""
    # flags, captured once from the live tensors
    inp_requires_grad: bool = False
    weight_requires_grad: bool = False
    bias_requires_grad: bool = False
    # quantizers
    plan: LinearPlan = HIGH_PRECISION
    output_quantizer: str = ""
    """Canonical text, "" for a plain output."""
    # numerical config
    dtype: torch.dtype = torch.float32
    """Of the output."""
    delayed: DelayedCall | None = None
    seeds: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    """For stochastic rounding of input, weight and gradient; drawn in forward, so that every backward is the same."""
    # weight workspace
    weight_workspace: list[Tensor] | None = None
    """Buffers of the quantized weight, valid for this call."""
    workspace_quantizer: str = ""
    update_workspace: bool = False
    """Quantize the weight into the workspace first."""
    cache_weight: bool = False
    """Return the buffers of a weight that is quantized here."""
    noop: Tensor | None = None
    """One element; non-zero leaves the workspace as it is."""
    # what is saved
    save_original_input: bool = False
    packs: bool = False
    """What is kept of both operands lies in one tensor: the fewer, the less a compiled program does about them."""
    # parallelism
    parallel: Parallel | None = None
    # weight-gradient scheduling
    wgrad: Wgrad | None = None
    # hand-over
    made: Quantized | None = None
    """The input, quantized by who made it as ``plan.input`` says; ``inp`` is not read then."""

    def with_tensors(self, inp: Tensor, weight: Tensor, bias: Tensor | None) -> LinearFwdArgs:
        """A copy around the tensors that autograd hands in."""
        return LinearFwdArgs(
            inp,
            weight,
            bias,
            self.inp_requires_grad,
            self.weight_requires_grad,
            self.bias_requires_grad,
            self.plan,
            self.output_quantizer,
            self.dtype,
            self.delayed,
            self.seeds,
            self.weight_workspace,
            self.workspace_quantizer,
            self.update_workspace,
            self.cache_weight,
            self.noop,
            self.save_original_input,
            self.packs,
            self.parallel,
            self.wgrad,
            self.made,
        )


@dataclass(slots=True)
class LinearBwdArgs:
    """What the backward of linear reads.

    On the autograd context it holds values alone: every tensor goes through ``save_for_backward``, because compiled autograd
    over a compiled forward loses tensors that are attributes of a context.
    """

    # tensors, restored from what was saved
    grad_output: Tensor | None = None
    inp: Operand | None = None
    weight: Operand | None = None
    main_grad: Tensor | None = None
    token: Tensor | None = None
    delayed: DelayedCall | None = None
    seed: Tensor | None = None
    made: Quantized | None = None
    """The gradient, quantized by who made it as ``plan.grad_output`` says; ``grad_output`` is not read then."""
    # flags
    inp_requires_grad: bool = False
    weight_requires_grad: bool = False
    bias_requires_grad: bool = False
    # quantizers
    plan: LinearPlan = HIGH_PRECISION
    # shapes and dtypes
    inp_shape: Shape = ()
    """Of the input as it was given."""
    rows_shape: Shape = ()
    """Of the matrix that was multiplied."""
    weight_shape: Shape = ()
    inp_quantizer: str = ""
    weight_quantizer: str = ""
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype = torch.float32
    bias_dtype: torch.dtype | None = None
    # what was saved
    n_inp: int = 0
    n_weight: int = 0
    requantize_input: bool = False
    """The saved input is the original one."""
    packed: bool = False
    """What was saved of both operands is the one buffer of the first."""
    # parallelism and weight-gradient scheduling
    parallel: Parallel | None = None
    overwrite_main_grad: bool = False
    postpone_key: int = 0

    def with_tensors(
        self,
        grad_output: Tensor | None,
        inp: Operand | None,
        weight: Operand | None,
        rest: tuple[
            Tensor | None, Tensor | None, DelayedCall | None, Tensor | None, Quantized | None
        ],
    ) -> LinearBwdArgs:
        """A copy around the saved tensors; ``rest``: main_grad, token, delayed, seed, made."""
        return LinearBwdArgs(
            grad_output,
            inp,
            weight,
            *rest,
            self.inp_requires_grad,
            self.weight_requires_grad,
            self.bias_requires_grad,
            self.plan,
            self.inp_shape,
            self.rows_shape,
            self.weight_shape,
            self.inp_quantizer,
            self.weight_quantizer,
            self.dtype,
            self.weight_dtype,
            self.bias_dtype,
            self.n_inp,
            self.n_weight,
            self.requantize_input,
            self.packed,
            self.parallel,
            self.overwrite_main_grad,
            self.postpone_key,
        )
