"""Compare files with templates before ``BroadcastingTorchSaveReader`` broadcasts entries.

The reader of ``torch.distributed.checkpoint`` loads a file of ``torch.save`` on one rank, and
broadcasts each entry. The other ranks receive into tensors like their templates: a plain template
would take codes for numbers, and ranks with a DTensor would wait. torch has no hook there, so
importing ``qtensor.distributed`` replaces the method that reads: every rank raises an error before
the first entry is broadcast.
"""

from __future__ import annotations

import functools
import importlib
import zipfile
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from qtensor.core.dtensors import local_part, part_of
from qtensor.core.errors import UnsupportedError, fail
from qtensor.storage.base import QuantizedTensorStorage

_TOOLS = "torch.distributed.checkpoint.format_utils"


def install() -> None:
    """Replace the method of torch; importing ``qtensor.distributed`` calls this once."""
    reader = importlib.import_module(_TOOLS).BroadcastingTorchSaveReader
    original = reader.read_data

    @functools.wraps(original)
    def read_data(self: Any, plan: object, planner: DefaultLoadPlanner) -> object:
        found: list[Any] = [_misfit(self.checkpoint_id, planner) if self.is_coordinator else None]
        dist.broadcast_object_list(found, src=self.coordinator_rank)
        if found[0] is not None:
            _refuse(*found[0])
        return original(self, plan, planner)

    reader.read_data = read_data


def _misfit(file: str, planner: DefaultLoadPlanner) -> tuple[str, str, str] | None:
    """Return the name of an entry, what the file has and what the template is; None if all fit."""
    mapped = zipfile.is_zipfile(file)  # torch cannot map files of its older format
    entries = torch.load(file, map_location="cpu", weights_only=False, mmap=mapped)
    if planner.flatten_state_dict:
        entries, _ = importlib.import_module(_TOOLS).flatten_state_dict(entries)
    for name, template in planner.state_dict.items():
        saved, wanted = _described(entries.get(name)), _described(template)
        if saved != wanted and (_is_quantized(entries.get(name)) or _is_quantized(template)):
            return name, saved, wanted
    return None


def _is_quantized(value: object) -> bool:
    return isinstance(local_part(value), QuantizedTensorStorage)


def _described(value: Any) -> str:
    """Return the kind of a tensor as text."""
    local = local_part(value)
    if not hasattr(local, "shape"):
        return type(value).__name__
    kind = local._quantizer.canonical if _is_quantized(value) else "a plain tensor"
    if local is not value:
        kind = f"a DTensor ({part_of(value.placements)}) of {kind}"
    return f"{kind}, {value.dtype}, {tuple(value.shape)}"


def _refuse(name: str, saved: str, wanted: str) -> None:
    rule = f"the template must be {saved}, as in the file: torch's reader broadcasts whole tensors"
    fix = (
        "Convert the file with torch_save_to_dcp, and load the folder with dcp.load, which reads "
        "into shards"
    )
    fail(f"{name}: BroadcastingTorchSaveReader", rule, wanted, fix, UnsupportedError)
