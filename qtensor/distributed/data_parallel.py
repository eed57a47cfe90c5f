"""Broadcast the parameters and buffers of a module: codes and scales of quantized ones.

``DistributedDataParallel`` joins tensors of one dtype in C++ before it broadcasts them. A quantized
tensor has several buffers of other dtypes and cannot be joined: it raises an error there. Models
that hold one are broadcast by the function below.
"""

from __future__ import annotations

from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn

from qtensor.api import quantizer_of
from qtensor.core.errors import ArgumentTypeError, fail
from qtensor.storage.base import QuantizedTensorStorage

_OP = "broadcast_parameters"


def broadcast_parameters(
    module: nn.Module, group: dist.ProcessGroup | None = None, src: int = 0
) -> None:
    """Give the parameters and buffers of a module the bytes that they have on one rank.

    Call it on every rank before ``DistributedDataParallel(module, init_sync=False)``, which then
    has nothing to broadcast. Quantized tensors keep their quantizer: codes and scales travel.

    Args:
        module: has the same parameters and buffers on every rank. They are changed in place.
        group: the process group; all ranks by default.
        src: the rank, within ``group``, whose bytes all ranks get.

    Raises:
        ArgumentTypeError: ``module`` is not a ``torch.nn.Module``.
        QTensorError: on every rank, before anything travels, if the ranks have different
            parameters, shapes, dtypes or quantizers.
    """
    if not isinstance(module, nn.Module):
        rule = "module must be a torch.nn.Module"
        fail(_OP, rule, type(module).__name__, "Pass one", ArgumentTypeError)
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    _check_alike(tensors, group)
    for t in tensors.values():
        dist.broadcast(t.detach(), group=group, group_src=src)
        # A collective does not tell autograd that it has written to the tensor.
        torch.autograd.graph.increment_version(t)


def _check_alike(tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Compare the layout of all tensors over the ranks of ``group``."""
    own = [f"{name}: {_described(t)}" for name, t in tensors.items()]
    of_ranks: list[list[str]] = [[]] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, own, group=group)
    for rank, entries in enumerate(of_ranks):
        if entries != own:
            pairs = zip_longest(own, entries, fillvalue="none")
            mine, theirs = next(pair for pair in pairs if pair[0] != pair[1])
            rule = "all ranks must have the same parameters and buffers, quantized alike"
            got = f"{mine} on this rank, and {theirs} on rank {rank}"
            fail(_OP, rule, got, "Build the model with the same recipe and formats on every rank")


def _described(t: Tensor) -> str:
    """Return the quantizer, shape and dtype of a tensor."""
    format = quantizer_of(t).canonical if isinstance(t, QuantizedTensorStorage) else "plain"
    return f"{format} {tuple(t.shape)} {t.dtype}"
