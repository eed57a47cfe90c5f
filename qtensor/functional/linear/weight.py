"""Quantize weights and reuse workspaces, which the caller owns, passes and receives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape
from qtensor.core.errors import ArgumentTypeError, fail
from qtensor.functional.linear.args import DelayedCall, LinearFwdArgs
from qtensor.functional.linear.layer_plan import HIGH_PRECISION, covers
from qtensor.functional.linear.linear_function import quantize_weight_buffers
from qtensor.functional.operands import draw_seeds
from qtensor.quantizers import Quantizer
from qtensor.storage.base import QuantizedTensorStorage


def is_valid_workspace(canonical: str, shape: Shape, wanted: str, wanted_shape: Shape) -> bool:
    """Return True if buffers of ``canonical`` and ``shape`` can serve as those that are wanted.

    They can if they have the same options, at least the wanted usages, and the same shape.
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
    """Quantize a weight, or reuse the buffers of an earlier microbatch, without autograd.

    Args:
        weight: (N, K), plain.
        quantizer: with the usages that are needed.
        workspace: the second result of an earlier call. It is not used if it lacks a usage, or
            has other options, another shape or another device.
        cache: also return a newly quantized weight as a workspace.
        is_first_microbatch: True: quantize, into the workspace if that is valid. False: return a
            valid workspace as it is, else quantize. None: quantize, and leave the workspace alone.
        noop: one element. If it is not zero, a valid workspace keeps its bytes with
            ``is_first_microbatch=True``.
        scale: float32 (1,) encode factor, for delayed scaling.

    Returns:
        The quantized weight, a storage, and a new workspace or None.

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
            "the workspace must be a quantized weight that an earlier call returned",
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
        args.delayed = DelayedCall(scale.reshape(1).expand(3), torch.empty(0))
    valid = (
        workspace is not None
        and is_first_microbatch is not None
        and workspace.device == weight.device
        and is_valid_workspace(
            workspace.quantizer.canonical, workspace.shape, quantizer.canonical, weight.shape
        )
    )
    reused: Any = workspace
    if valid:
        args.weight_workspace = reused.buffers()
        args.workspace_quantizer = reused.quantizer.canonical
        args.update_workspace, args.noop = bool(is_first_microbatch), noop
    with torch.no_grad():
        operand, _, from_workspace = quantize_weight_buffers(args)
    if from_workspace:
        return reused, None
    quantized = quantizer.assemble(operand.buffers, weight.shape, weight.dtype, bare=True)
    return quantized, quantized if cache else None
