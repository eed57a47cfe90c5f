"""The arguments of linear's forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape
from qtensor.core.operand import Operand
from qtensor.functional.linear.layer_plan import HIGH_PRECISION, LinearPlan
from qtensor.functional.linear.saved import NOTHING_SAVED, SavedOperands
from qtensor.functional.operands import Quantized
from qtensor.functional.ranks.parallel import Parallel
from qtensor.functional.site import Site
from qtensor.library.delayed import RECORD_GRADIENT_AMAX, SEND_GRADIENT_AMAX


class DelayedCall(NamedTuple):
    """The state of delayed scaling in one call. All are tensors, so they can be saved for backward.

    Backward records the maximum of the gradient in ``cell`` and ``cell_step``. Compiled code has
    ``report`` instead, which brings the key of the layer: a compiled graph that writes a tensor
    which another graph has saved makes torch refuse the other backward pass.

    Attributes:
        scales: (3,) float32, the factors of input, weight and grad_output.
        ticket: (2,) int64 on the CPU, under which the maximum is recorded.
        cell: (1,) float32.
        cell_step: (1,) int64 on the CPU.
        report: (2,) int64 on the CPU.
    """

    scales: Tensor
    ticket: Tensor
    cell: Tensor | None = None
    cell_step: Tensor | None = None
    report: Tensor | None = None

    def record_gradient(self, amax: Tensor) -> None:
        """Record the maximum of the gradient, (1,) or (groups,) float32."""
        if self.report is None:
            RECORD_GRADIENT_AMAX(self.cell, self.cell_step, [amax], self.ticket)
        else:
            SEND_GRADIENT_AMAX(self.report, [amax], self.ticket)


class Wgrad(NamedTuple):
    """Where the weight gradient goes if backward does not return it.

    Attributes:
        main_grad: (N, K), to which the gradient is added: an alias with its own version counter.
        overwrite: write the gradient to ``main_grad`` instead of adding it.
        key: not 0: the backward only keeps the operands of wgrad under this key of the layer, and
            ``backward_dw()`` computes the gradient.
    """

    main_grad: Tensor | None = None
    overwrite: bool = False
    report: Tensor | None = None
    key: int = 0


@dataclass(slots=True)
class LinearFwdArgs:
    """The arguments of the forward of linear. Nothing writes to them.

    The first three fields are the tensors that autograd passes (``with_tensors``).
    """

    # tensors
    inp: Tensor
    """(..., K), plain or quantized."""
    weight: Tensor
    """(N, K), plain or quantized."""
    bias: Tensor | None = None
    """(N,)."""
    # flags, read once from the live tensors
    inp_requires_grad: bool = False
    weight_requires_grad: bool = False
    bias_requires_grad: bool = False
    # quantizers
    plan: LinearPlan = HIGH_PRECISION
    output_quantizer: str = ""
    """Canonical text, "" for a plain output."""
    # numerical config
    dtype: torch.dtype = torch.float32
    """The dtype of the output."""
    delayed: DelayedCall | None = None
    seeds: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    """(1,) int64 each, for stochastic rounding of input, weight and gradient.

    Forward draws all of them, so that every backward of the call gives the same bytes."""
    # weight workspace
    weight_workspace: list[Tensor] | None = None
    """Buffers of the quantized weight, valid for this call."""
    workspace_quantizer: str = ""
    """Canonical text of these buffers."""
    update_workspace: bool = False
    """Quantize the weight into the workspace first."""
    cache_weight: bool = False
    """Return the buffers of a weight that this call quantizes."""
    noop: Tensor | None = None
    """One element; if it is not zero, the workspace keeps its bytes."""
    # saved operands
    save_original_input: bool = False
    # parallelism
    parallel: Parallel | None = None
    # weight-gradient scheduling
    wgrad: Wgrad | None = None
    # hand-over from another operation
    quantized_input: Quantized | None = None
    """The input, already quantized by ``plan.input``. Then ``inp`` is not read."""
    site: Site | None = None
    """Where ``qtensor.debug`` records the tensors of this call."""


@dataclass(slots=True)
class LinearBwdArgs:
    """The arguments of the backward of linear.

    An autograd context keeps them without the tensors in the first eight fields, which go through
    ``save_for_backward`` (``restored`` puts them back): compiled autograd over a compiled forward
    loses tensors that are attributes of a context.
    """

    # tensors
    grad_output: Tensor | None = None
    """(..., N)."""
    inp: Operand | None = None
    weight: Operand | None = None
    main_grad: Tensor | None = None
    report: Tensor | None = None
    delayed: DelayedCall | None = None
    seed: Tensor | None = None
    """(1,) int64."""
    quantized_grad: Quantized | None = None
    """The gradient, already quantized by ``plan.grad_output``. Then ``grad_output`` is not read."""
    # flags
    inp_requires_grad: bool = False
    weight_requires_grad: bool = False
    bias_requires_grad: bool = False
    # quantizers
    plan: LinearPlan = HIGH_PRECISION
    # shapes and dtypes
    rows_shape: Shape = ()
    """(M, K) of the matrix that forward multiplied."""
    weight_shape: Shape = ()
    """(N, K)."""
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype = torch.float32
    bias_dtype: torch.dtype | None = None
    # saved operands
    saved: SavedOperands = NOTHING_SAVED
    # parallelism and weight-gradient scheduling
    parallel: Parallel | None = None
    overwrite_main_grad: bool = False
    postpone_key: int = 0
    # An attribute, though it holds tensors: a checkpoint that runs again after the recording must
    # save the same number of tensors.
    site: Site | None = None
