"""The structured arguments of grouped linear's two directions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.functional.linear_args import DelayedCall
from qtensor.functional.operands import Operand
from qtensor.functional.plan import HIGH_PRECISION, LinearPlan
from qtensor.layout import Shape


class Splits(NamedTuple):
    """Rows of each group, as the ops take them.

    Attributes:
        sizes: numbers, one a group; () where ``tensor`` holds them.
        tensor: int64 (groups,) on the CPU, checked.
        groups: how many there are.
    """

    sizes: Shape
    tensor: Tensor | None
    groups: int


NO_SPLITS = Splits((), None, 0)


class GroupedWgrad(NamedTuple):
    """What becomes of the weight gradients where they are not returned.

    Attributes:
        main_grads: they are added to these tensors, one for each weight that requires a gradient, or written into them.
        overwrite: for each of them: write instead of add.
        token: with ``key``: the operands are kept until ``backward_dw()``.
        key: of the module.
    """

    main_grads: tuple[Tensor, ...] = ()
    overwrite: tuple[bool, ...] = ()
    token: Tensor | None = None
    key: int = 0


@dataclass(slots=True)
class GroupedFwdArgs:
    """What the forward of grouped linear reads. Nothing writes to it."""

    # tensors
    inp: Tensor
    """(..., K); its rows in groups, one behind the other."""
    weights: tuple[Tensor, ...]
    """(N, K) each, plain or quantized."""
    biases: tuple[Tensor, ...]
    """(N,) each; () for none."""
    splits: Splits
    # flags, captured once from the live tensors
    inp_requires_grad: bool = False
    wanted: tuple[int, ...] = ()
    """Groups whose weight requires a gradient."""
    bias_requires_grad: bool = False
    # quantizers
    plan: LinearPlan = HIGH_PRECISION
    # numerical config
    dtype: torch.dtype = torch.float32
    """Of the output."""
    delayed: DelayedCall | None = None
    """``scales`` is (3 * groups,)."""
    seeds: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    """(groups,) each, for stochastic rounding of inputs, weights and gradients; drawn in forward."""
    # weight workspace
    weight_workspace: list[Tensor] | None = None
    """Buffers of the quantized weights, one weight behind the other, valid for this call."""
    workspace_quantizer: str = ""
    update_workspace: bool = False
    """Quantize the weights into the workspace first."""
    cache_weight: bool = False
    """Return the buffers of weights that are quantized here."""
    noop: Tensor | None = None
    """One element; non-zero leaves the workspace as it is."""
    # what is saved
    save_original_input: bool = False
    # weight-gradient scheduling
    wgrad: GroupedWgrad | None = None

    def with_tensors(
        self, inp: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor, ...]
    ) -> GroupedFwdArgs:
        """A copy around the tensors that autograd hands in."""
        return GroupedFwdArgs(
            inp,
            weights,
            biases,
            self.splits,
            self.inp_requires_grad,
            self.wanted,
            self.bias_requires_grad,
            self.plan,
            self.dtype,
            self.delayed,
            self.seeds,
            self.weight_workspace,
            self.workspace_quantizer,
            self.update_workspace,
            self.cache_weight,
            self.noop,
            self.save_original_input,
            self.wgrad,
        )


class Weights(NamedTuple):
    """Quantized (or plain) weights of all groups.

    Attributes:
        buffers: one weight's behind the other's.
        canonical: of each; "" for plain ones.
        shape: (N, K) of each.
    """

    buffers: list[Tensor]
    canonical: str
    shape: Shape


@dataclass(slots=True)
class GroupedBwdArgs:
    """What the backward of grouped linear reads; on the autograd context it holds values alone."""

    # tensors, restored from what was saved
    grad_output: Tensor | None = None
    inp: Operand | None = None
    weights: Weights | None = None
    main_grads: tuple[Tensor, ...] = ()
    token: Tensor | None = None
    delayed: DelayedCall | None = None
    seed: Tensor | None = None
    splits: Splits = NO_SPLITS
    # flags
    inp_requires_grad: bool = False
    wanted: tuple[int, ...] = ()
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
    n_main_grad: int = 0
    requantize_input: bool = False
    """The saved input is the original one."""
    # weight-gradient scheduling
    overwrite_main_grad: tuple[bool, ...] = ()
    postpone_key: int = 0
