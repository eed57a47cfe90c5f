"""Check what ``BroadcastingTorchSaveReader`` of torch broadcasts.

The reader loads a file of ``torch.save`` on one rank, and broadcasts each entry to the other ranks.
It tells neither side what the other has: with a quantized entry and a template of another kind,
ranks would wait for each other without end. The rank that reads the file can see the template of
its own state dict. torch offers no hook there, so that the template comes from the reader's frame.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtensor.dtensor import is_dtensor, part_of
from qtensor.errors import UnsupportedError, fail
from qtensor.storage.base import QuantizedTensorStorage
from qtensor.storage.wire import HASH_BYTES, pack

_READER = "torch.distributed.checkpoint.format_utils"
_DEPTH = 16
"""Python frames between the reader and the handler of ``broadcast``: six in torch 2.13."""


class Entry(NamedTuple):
    """An entry that the reader broadcasts from the file.

    Attributes:
        name: of the entry in the state dict.
        template: the tensor to load into.
    """

    name: str
    template: Any


def broadcast_entry() -> Entry | None:
    """Return the entry that torch's reader broadcasts from a file on this rank, or None."""
    if _READER not in sys.modules:
        return None
    frame = sys._getframe(1)
    for _ in range(_DEPTH):
        if frame.f_globals.get("__name__") == _READER:
            found = frame.f_locals
            try:
                name = found["req"].storage_index.fqn
                is_source = found["self"].is_coordinator
                return Entry(name, found["planner"].state_dict[name]) if is_source else None
            except (KeyError, AttributeError):
                return None  # another torch: its reader is not checked
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def stand_in(entry: Entry, t: Any) -> Tensor | None:
    """Return what to broadcast in place of an entry that does not fit, so that no rank waits.

    Args:
        entry: an entry of the file, and its template.
        t: the quantized tensor of the file.

    Returns:
        None if the template has the quantizer, dtype and shape of ``t``; no bytes (0,) if the other
        ranks raise an error before they receive; bytes that a quantized template refuses; or NaNs
        in the shape of a plain template.
    """
    template = entry.template
    if is_dtensor(template):
        return torch.empty(0)
    if not isinstance(template, QuantizedTensorStorage):
        number = float("nan") if template.is_floating_point() else 0
        return torch.full_like(template, number)
    same = (template._quantizer, template.dtype, template.shape) == (t._quantizer, t.dtype, t.shape)
    if same:
        return None
    packed = pack(template)
    packed[:HASH_BYTES].bitwise_not_()
    return packed


def refuse(entry: Entry, t: Any) -> None:
    """Raise the error of an entry that does not fit its template.

    Raises:
        UnsupportedError: always.
    """
    template = entry.template
    got = f"a plain tensor of {tuple(template.shape)}"
    if is_dtensor(template):
        got = f"a DTensor ({part_of(template.placements)})"
    elif isinstance(template, QuantizedTensorStorage):
        got = f"{template._quantizer.canonical} of {template.dtype}, {tuple(template.shape)}"
    fail(
        f"{entry.name}: BroadcastingTorchSaveReader[{t._quantizer.format}]",
        f"the template must be a tensor of {t._quantizer.canonical}, {t.dtype}, {tuple(t.shape)}, "
        "as the file has it, and not a DTensor: torch's reader broadcasts whole tensors",
        got,
        "Convert the file with torch_save_to_dcp, and load the folder with dcp.load, which reads "
        "into shards",
        UnsupportedError,
    )
