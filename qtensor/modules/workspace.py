"""Keep the quantized weight of a first microbatch for the following ones."""

from __future__ import annotations

from torch import Tensor

from qtensor.core.buffer_shapes import Shape
from qtensor.functional.grouped.args import GroupedFwdArgs
from qtensor.functional.linear.args import LinearFwdArgs
from qtensor.functional.linear.weight import is_valid_workspace
from qtensor.modules.state import LinearState


def use_workspace(
    args: LinearFwdArgs | GroupedFwdArgs,
    state: LinearState,
    shape: Shape,
    is_first_microbatch: bool,
    noop: Tensor | None,
) -> None:
    """Use the quantized weight of an earlier microbatch, or store this call's.

    The plan of ``args`` is set; each weight has the ``shape`` (N, K). If ``noop``, one element on
    the device, is non-zero, the stored weight stays as it is.
    """
    wanted = args.plan.weight
    if not wanted:
        return
    # A first microbatch without a noop flag allocates new buffers, so that its graph does not
    # depend on the stored weight.
    args.cache_weight = True
    if is_first_microbatch and noop is None:
        return
    valid = state.workspace is not None and is_valid_workspace(
        state.workspace_quantizer, state.workspace_shape, wanted, shape
    )
    if valid:
        args.cache_weight = False
        args.weight_workspace = state.workspace
        args.workspace_quantizer = state.workspace_quantizer
        args.update_workspace = is_first_microbatch
        args.noop = noop


def store_workspace(
    state: LinearState, buffers: list[Tensor], canonical: str, shape: Shape
) -> None:
    """Store the buffers of a weight that a call has quantized; ``buffers`` is [] if it has not.

    ``canonical`` is the text of their quantizer; ``shape`` is as for ``use_workspace``.
    """
    if buffers:
        state.workspace = [buffer.detach() for buffer in buffers]
        state.workspace_quantizer = canonical
        state.workspace_shape = tuple(shape)
