"""Quantize weights and reuse workspaces, which the caller owns, passes and receives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qtensor.errors import ArgumentTypeError, fail
from qtensor.functional.linear import quantize_weight_buffers
from qtensor.functional.linear_args import DelayedCall, LinearFwdArgs
from qtensor.functional.operands import draw_seeds
from qtensor.functional.plan import HIGH_PRECISION, covers
from qtensor.layout import Shape
from qtensor.quantizers import Quantizer
from qtensor.storage.base import QuantizedTensorStorage


def is_valid_workspace(canonical: str, shape: Shape, wanted: str, wanted_shape: Shape) -> bool:
    """Return True if buffers of ``canonical`` and ``shape`` can serve as those that are wanted.

    They do with the same options, all the usages that are wanted (or more), and the same shape.
    """
    return covers(canonical, wanted) and tuple(shape) == tuple(wanted_shape)


def quantize_weight(
    weight: Tensor,
    quantizer: Quantizer,
    workspace: QuantizedTensorStorage | None = None,
    *,
    cache: bool = False,
    is_first_microbatch: bool | None = None,
    noop: Tensor | None = None,
    scale: Tensor | None = None,
) -> tuple[QuantizedTensorStorage, QuantizedTensorStorage | None]:
    """Quantize a weight, or take what an earlier microbatch made. Outside autograd.

    Args:
        weight: (N, K), plain.
        quantizer: with the usages that are needed.
        workspace: what an earlier call returned; one that lacks a usage, or has other options,
            another shape or device, is not used.
        cache: return what is made, to be passed in as ``workspace`` again.
        is_first_microbatch: True: quantize, into a valid workspace where there is one. False: take
            a valid workspace as it is, else quantize. None: quantize, and leave the workspace
            alone.
        noop: one element, with a valid workspace and ``is_first_microbatch=True``: non-zero leaves
            its bytes.
        scale: float32 (1,) encode factor, for delayed scaling.

    Returns:
        The quantized weight (bare: no autograd), and a new workspace or None where there is none.

    Raises:
        QTensorError: an argument is not a quantizer or storage, or delayed scaling has no scale.
    """
    if not isinstance(quantizer, Quantizer):
        rule = "the quantizer must be a quantizer object"
        fail(
            "quantize_weight",
            rule,
            repr(quantizer),
            'Pass qtensor.quantizer("mxfp8")',
            ArgumentTypeError,
        )
    if workspace is not None and not isinstance(workspace, QuantizedTensorStorage):
        fail(
            "quantize_weight",
            "the workspace must be what an earlier call returned",
            type(workspace).__name__,
            "Pass None at first",
            ArgumentTypeError,
        )
    if quantizer.needs_scale and scale is None:
        fail("quantize_weight", "delayed scaling needs scale=", "none", "Pass the factor, (1,)")
    weight = weight.detach()
    args = LinearFwdArgs(weight, weight)
    stochastic = (False, quantizer.stochastic_rounding, False)
    delayed = (False, quantizer.needs_scale, False)
    args.plan = HIGH_PRECISION._replace(
        weight=quantizer.canonical, delayed=delayed, stochastic=stochastic
    )
    if any(stochastic):
        args.seeds = draw_seeds(weight, torch.zeros(1, dtype=torch.int64, device="cpu"), stochastic)
    if scale is not None:
        none = torch.empty(0)
        args.delayed = DelayedCall(scale.reshape(1).expand(3), none, none, none)
    valid = (
        workspace is not None
        and is_first_microbatch is not None
        and workspace.device == weight.device
        and is_valid_workspace(
            workspace.quantizer.canonical, workspace.shape, quantizer.canonical, weight.shape
        )
    )
    kept: Any = workspace
    if valid:
        args.weight_workspace = kept.buffers()
        args.workspace_quantizer = kept.quantizer.canonical
        args.update_workspace, args.noop = bool(is_first_microbatch), noop
    with torch.no_grad():
        operand, _, reused = quantize_weight_buffers(args)
    if reused:
        return kept, None
    made = quantizer.assemble(operand.buffers, weight.shape, weight.dtype, bare=True)
    return made, made if cache else None
