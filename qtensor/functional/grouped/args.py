"""The arguments of the forward and backward of grouped linear."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape
from qtensor.core.operand import Operand
from qtensor.functional.linear.args import DelayedCall
from qtensor.functional.linear.layer_plan import HIGH_PRECISION, LinearPlan
from qtensor.functional.linear.saved import NOTHING_SAVED, SavedOperands
from qtensor.functional.site import Site


class Splits(NamedTuple):
    """The number of rows in each group, as the ops take it.

    Attributes:
        sizes: one number for each group; () if ``tensor`` holds them.
        tensor: int64 (groups,) on the CPU, checked.
        groups: the number of groups.
    """

    sizes: Shape
    tensor: Tensor | None
    groups: int


NO_SPLITS = Splits((), None, 0)


class GroupedWgrad(NamedTuple):
    """Where the weight gradients go if backward does not return them.

    Attributes:
        main_grads: (N, K) each, one for each weight that requires a gradient, to which its gradient
            is added.
        overwrite: for each of them, True to write the gradient instead of adding it.
        key: not 0: the backward only keeps the operands of wgrad under this key of the layer, and
            ``backward_dw()`` computes the gradients.
    """

    main_grads: tuple[Tensor, ...] = ()
    overwrite: tuple[bool, ...] = ()
    report: Tensor | None = None
    key: int = 0


@dataclass(slots=True)
class GroupedFwdArgs:
    """The arguments of the forward of grouped linear. Nothing writes to them.

    The first three fields are the tensors that autograd passes (``with_tensors``).
    """

    # tensors
    inp: Tensor
    """(..., K); the rows of each group follow those of the group before."""
    weights: tuple[Tensor, ...]
    """(N, K) each, plain or quantized."""
    biases: tuple[Tensor, ...]
    """(N,) each; () without biases."""
    splits: Splits
    # flags, read once from the live tensors
    inp_requires_grad: bool = False
    wanted: tuple[int, ...] = ()
    """The groups whose weights require a gradient."""
    bias_requires_grad: bool = False
    # quantizers
    plan: LinearPlan = HIGH_PRECISION
    # numerical config
    dtype: torch.dtype = torch.float32
    """The dtype of the output."""
    delayed: DelayedCall | None = None
    """Here ``scales`` is (3 * groups,)."""
    seeds: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    """(groups,) int64 each, for stochastic rounding of inputs, weights and gradients.

    Forward draws all of them."""
    # weight workspace
    weight_workspace: list[Tensor] | None = None
    """Buffers of the quantized weights, those of one weight after another, valid for this call."""
    workspace_quantizer: str = ""
    """Canonical text of these buffers."""
    update_workspace: bool = False
    """Quantize the weights into the workspace first."""
    cache_weight: bool = False
    """Return the buffers of weights that this call quantizes."""
    noop: Tensor | None = None
    """One element; if it is not zero, the workspace keeps its bytes."""
    # saved operands
    save_original_input: bool = False
    # weight-gradient scheduling
    wgrad: GroupedWgrad | None = None
    site: Site | None = None
    """Where ``qtensor.debug`` records the tensors of this call."""


@dataclass(slots=True)
class GroupedBwdArgs:
    """The arguments of the backward of grouped linear.

    An autograd context keeps them without the tensors in the first eight fields, which go through
    ``save_for_backward`` (``restored`` puts them back).
    """

    # tensors
    grad_output: Tensor | None = None
    """(..., N)."""
    inp: Operand | None = None
    weights: Operand | None = None
    """The buffers of one weight after another; ``shape`` is (N, K), that of each."""
    main_grads: tuple[Tensor, ...] = ()
    report: Tensor | None = None
    delayed: DelayedCall | None = None
    seed: Tensor | None = None
    """(groups,) int64."""
    splits: Splits = NO_SPLITS
    # flags
    inp_requires_grad: bool = False
    wanted: tuple[int, ...] = ()
    """The groups whose weights require a gradient."""
    bias_requires_grad: bool = False
    # quantizers
    plan: LinearPlan = HIGH_PRECISION
    # dtypes
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype = torch.float32
    bias_dtype: torch.dtype | None = None
    # saved operands
    saved: SavedOperands = NOTHING_SAVED
    n_main_grad: int = 0
    # weight-gradient scheduling
    overwrite_main_grad: tuple[bool, ...] = ()
    postpone_key: int = 0
    # See ``LinearBwdArgs``.
    site: Site | None = None
