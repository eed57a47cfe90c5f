"""Broadcast the buffers of quantized tensors where torch broadcasts parameters in one piece.

``DistributedDataParallel`` gives the parameters and buffers of a module to
``torch.distributed._broadcast_coalesced``, which joins tensors of one dtype with ``view(-1)`` and
``cat`` in C++. A quantized tensor has several buffers of other dtypes, and joining its values would
need their dequantization. The function below passes torch the buffers instead, so that codes and
scales travel and rank 0's bytes arrive. Calls without quantized tensors go on unchanged.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qtensor.errors import fail
from qtensor.storage.base import QuantizedTensorStorage
from qtensor.texts import some

_NAME = "_broadcast_coalesced"
_OP = "broadcast of parameters"


def _described(tensors: Sequence[Tensor]) -> list[str]:
    """Return the quantizer and the shape of each quantized tensor."""
    return [
        f"{t._quantizer.canonical} {tuple(t.shape)}"
        for t in tensors
        if isinstance(t, QuantizedTensorStorage)
    ]


def _check_equal_layouts(group: Any, tensors: Sequence[Tensor]) -> None:
    """Compare the quantizers over the ranks of ``group``, before bytes of another layout arrive.

    Raises:
        QTensorError: on every rank, if the quantizers differ.
    """
    described = _described(tensors)
    digest = hashlib.sha256("\n".join(described).encode()).digest()[:7]
    device = next(t.device for t in tensors if isinstance(t, QuantizedTensorStorage))
    own = torch.tensor([int.from_bytes(digest, "big")], device=device)
    of_ranks = [torch.empty_like(own) for _ in range(group.size())]
    torch.distributed.all_gather(of_ranks, own, group=group)
    words = [int(word) for word in of_ranks]
    others = [rank for rank, word in enumerate(words) if word != words[group.rank()]]
    if others:
        fail(
            _OP,
            f"all ranks must quantize the parameters alike, and ranks {others} differ from this",
            some(described, 4),
            "Build the model with the same recipe and formats on every rank",
        )


def _with_buffers(broadcast: Callable[..., None]) -> Callable[..., None]:
    """Return ``broadcast`` with each quantized tensor replaced by its buffers."""

    @functools.wraps(broadcast)
    def run(group: Any, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
        quantized = [t for t in tensors if isinstance(t, QuantizedTensorStorage)]
        if not quantized:
            return broadcast(group, tensors, *args, **kwargs)
        _check_equal_layouts(group, tensors)
        flat: list[Tensor] = []
        for t in tensors:
            flat += t.buffers() if isinstance(t, QuantizedTensorStorage) else [t]
        broadcast(group, flat, *args, **kwargs)
        for t in quantized:
            # The call wrote to the buffers only; autograd must know that the tensor changed.
            torch.autograd.graph.increment_version(t)

    return run


def install() -> None:
    """Replace torch's function; importing ``qtensor.storage.tensor`` calls this once."""
    broadcast = getattr(torch.distributed, _NAME, None)
    # Builds of torch without distributed packages lack the function.
    if broadcast is not None and not hasattr(broadcast, "__wrapped__"):
        torch.distributed._broadcast_coalesced = _with_buffers(broadcast)
