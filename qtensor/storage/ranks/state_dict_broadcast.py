"""Broadcast quantized entries of a full state dict from rank 0: codes and scales.

``set_model_state_dict`` and ``set_optimizer_state_dict`` with ``broadcast_from_rank0`` tell the
other ranks the size and the dtype of each entry, and those ranks receive into a plain tensor: the
codes of a quantized tensor would be read as numbers. torch has no hook for the entries. Importing
``qtensor.distributed`` therefore replaces two functions of torch. In place of a quantized entry,
rank 0 gives torch two entries: a description, which torch sends with the names, and the bytes as a
plain uint8 tensor. Each rank rebuilds the entry as soon as its bytes arrive, so that one whole
tensor is in memory at a time. Other entries, and programs without quantized tensors, go through
torch's own code.

Without the import, the broadcast of a quantized tensor is an error: rank 0 cannot see that the
other ranks receive into plain tensors.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from qtensor.core.dtensors import is_dtensor, local_part, part_of
from qtensor.core.errors import QTensorError, UnsupportedError, check, fail
from qtensor.core.quantizer_registry import QuantizerLike, parse
from qtensor.core.texts import some
from qtensor.storage.base import is_quantized
from qtensor.storage.ranks.checkpoint_part import serves
from qtensor.storage.ranks.wire import pack, unpacked_buffers, wire_layout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from qtensor.storage.tensor import QuantizedTensor

Description = tuple[str, tuple[int, ...], torch.dtype]
"""Canonical string, shape and nominal dtype of a quantized entry."""

_TORCH = "torch.distributed._state_dict_utils"
_HELPERS = "torch.distributed.checkpoint.state_dict"
_BYTES, _DESCRIPTION = " (bytes of a quantized tensor)", " (quantizer, shape, dtype)"
_ARGUMENTS = {
    "_broadcast_state_dict": ("full_state_dict", "local_state_dict", "device", "pg", "strict"),
    "_broadcast_tensors": ("full_state_dict", "local_state_dict", "keys", "device", "pg"),
}
_ORIGINALS: dict[str, Callable[..., None]] = {}


class _Receiver(NamedTuple):
    """The entries of this rank during a broadcast.

    Attributes:
        sources: the quantized entries of the full state dict, on rank 0.
        targets: the tensors of this rank by name; torch removes those that it does not know.
        results: the entries that were received quantized.
        errors: one for each entry that this rank cannot take. They are raised after the last
            broadcast, so that no rank waits.
        cpu_offload: True if the caller wants results on the CPU.
    """

    sources: dict[str, Any]
    targets: dict[str, Any]
    results: dict[str, Any]
    errors: list[QTensorError]
    cpu_offload: bool


_RECEIVERS: list[_Receiver] = []


def install() -> None:
    """Replace the functions of torch once, if they have the arguments of torch 2.11 to 2.14.

    If they have others, a broadcast of quantized entries raises an error instead.
    """
    if _ORIGINALS:
        return
    module = importlib.import_module(_TORCH)
    found: dict[str, Any] = {name: getattr(module, name, None) for name in _ARGUMENTS}
    _ORIGINALS.update(found)
    own: dict[str, Callable[..., None]] = {
        "_broadcast_state_dict": broadcast_state_dict,
        "_broadcast_tensors": broadcast_tensors,
    }
    if not all(f is not None and _takes(f, _ARGUMENTS[name]) for name, f in found.items()):
        own = {"_broadcast_state_dict": _without_quantized(found["_broadcast_state_dict"])}
    for place in (module, sys.modules.get(_HELPERS)):
        for name, function in own.items():
            if hasattr(place, name):
                setattr(place, name, function)


def is_installed() -> bool:
    """Return whether the program has imported ``qtensor.distributed``."""
    return bool(_ORIGINALS)


def refuse_broadcast(t: QuantizedTensor) -> None:
    """Raise the error of a broadcast of ``t`` without the import.

    Raises:
        UnsupportedError: always.
    """
    fail(
        f"broadcast[{t._quantizer.format}]",
        "broadcasts of quantized tensors need qtensor.distributed, without which torch would read "
        "codes as numbers where a rank expects a plain tensor (broadcast_from_rank0)",
        f"a tensor {tuple(t.shape)} of {t._quantizer.canonical}, without the import",
        "Add `import qtensor.distributed` to the program",
        UnsupportedError,
    )


def _takes(function: Callable[..., None], arguments: tuple[str, ...]) -> bool:
    """Return whether the first parameters of a function have these names."""
    return tuple(inspect.signature(function).parameters)[: len(arguments)] == arguments


def _without_quantized(original: Callable[..., None]) -> Callable[..., None]:
    """Return ``original`` for other versions of torch: it refuses quantized entries."""

    @functools.wraps(original)
    def run(full_state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        quantized = [name for name, value in full_state_dict.items() if is_quantized(value)]
        rule = "entries of this version of torch must be plain: it would read codes as numbers"
        fix = "Use another version of torch, or load the state dict on each rank"
        check(not quantized, "broadcast_from_rank0", rule, some(quantized), fix, UnsupportedError)
        original(full_state_dict, *args, **kwargs)

    return run


def broadcast_state_dict(
    full_state_dict: dict[str, Any],
    local_state_dict: dict[str, Any],
    device: torch.device,
    pg: ProcessGroup | None = None,
    strict: bool = False,
    cpu_offload: bool = False,
) -> None:
    """Fill ``local_state_dict`` with the entries of rank 0, as torch's function does.

    Args:
        full_state_dict: names and whole tensors on rank 0; not read on other ranks.
        local_state_dict: tensors, quantized ones and DTensors of this rank by name. It is changed
            in place.
        device: of the tensors of this rank.
        pg: the process group; all ranks by default.
        strict: drop entries that rank 0 does not have.
        cpu_offload: put the results on the CPU.

    Raises:
        QTensorError: after all entries have travelled, if one was quantized on rank 0 and the
            tensor of this rank is plain, or has another quantizer or shape.
    """
    sources: dict[str, Any] = {}
    if torch.distributed.get_rank() == 0:
        quantized = {k: v for k, v in full_state_dict.items() if is_quantized(v)}
        sources.update(quantized)
        full_state_dict = dict(_entries_to_send(full_state_dict))
    receiver = _Receiver(sources, dict(local_state_dict), {}, [], cpu_offload)
    # torch expects a place for each entry that it receives; it removes those that rank 0 lacks.
    places = {name + _BYTES: torch.empty(0) for name in local_state_dict}
    local_state_dict.update(places)
    _RECEIVERS.append(receiver)
    try:
        _ORIGINALS["_broadcast_state_dict"](
            full_state_dict, local_state_dict, device, pg, strict, cpu_offload
        )
    finally:
        _RECEIVERS.remove(receiver)
    for key in [key for key in local_state_dict if key.endswith(_BYTES)]:
        received = local_state_dict.pop(key)
        if key not in places:  # the caller reports it as an entry that the model lacks
            local_state_dict[key.removesuffix(_BYTES)] = received
    local_state_dict.update(receiver.results)
    if receiver.errors:
        raise receiver.errors[0]


def _entries_to_send(full_state_dict: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in full_state_dict.items():
        if is_quantized(value):
            yield name + _DESCRIPTION, (value._quantizer.canonical, tuple(value.shape), value.dtype)
            nbytes = wire_layout(value._quantizer, value.shape).nbytes
            yield name + _BYTES, torch.empty(1, dtype=torch.uint8).expand(nbytes)
        elif isinstance(value, torch.Tensor) and not hasattr(value, "size"):
            yield name, value.as_subclass(torch.Tensor)  # the state of delayed scaling of a rank
        else:
            yield name, value


def broadcast_tensors(
    full_state_dict: dict[str, Any],
    local_state_dict: dict[str, Any],
    keys: list[str],
    device: torch.device,
    pg: ProcessGroup | None = None,
) -> None:
    """Broadcast entries with torch's function, and rebuild those that were quantized."""
    receiver = _RECEIVERS[-1] if _RECEIVERS else None
    names = {key: key.removesuffix(_BYTES) for key in keys if key.endswith(_BYTES)}
    if receiver is not None:
        sent = {key: pack(receiver.sources[n]) for key, n in names.items() if n in receiver.sources}
        full_state_dict = {**full_state_dict, **sent}
    _ORIGINALS["_broadcast_tensors"](full_state_dict, local_state_dict, keys, device, pg)
    if receiver is None:
        return
    for key, name in names.items():
        packed: Any = local_state_dict.get(key)
        local_state_dict[key] = torch.empty(0)
        if name in receiver.targets:
            _receive(receiver, name, packed, full_state_dict[name + _DESCRIPTION])


def _receive(receiver: _Receiver, name: str, packed: Tensor, described: Description) -> None:
    """Write a whole quantized tensor into the entry ``name`` of this rank."""
    target = receiver.targets[name]
    canonical, shape, dtype = described
    saved = parse(canonical)
    try:
        wanted = _wanted(name, target, saved, shape)
        buffers = dict(zip(saved.keywords, unpacked_buffers(packed, saved, shape), strict=True))
        whole = wanted._assemble([buffers[k] for k in wanted.keywords], shape, dtype)
        if is_dtensor(target):
            place: dict[str, Any] = {name: (target, whole)}
            # torch's function takes this rank's part of the whole.
            sys.modules[_TORCH]._distribute_tensors(place, [name], whole.device)
            result = place[name]
        else:
            result = whole.clone()  # in memory of its own
        receiver.results[name] = result.cpu() if receiver.cpu_offload else result
    except QTensorError as error:
        receiver.errors.append(error)


def _wanted(
    name: str, target: object, saved: QuantizerLike, shape: tuple[int, ...]
) -> QuantizerLike:
    """Return the quantizer of this rank's entry.

    Raises:
        UnsupportedError: the entry is plain, or has another quantizer or shape.
    """
    local = local_part(target)
    quantized = is_quantized(local)
    same_shape = tuple(getattr(target, "shape", ())) == tuple(shape)
    if quantized and same_shape and serves(saved, local._quantizer):
        return local._quantizer
    got = f"{local._quantizer.canonical}" if quantized else "a plain tensor"
    if is_dtensor(target):
        got = f"a DTensor ({part_of(target.placements)}) of {got}"
    fail(
        f"{name}: broadcast_from_rank0[{saved.format}]",
        f"a tensor that rank 0 has as {saved.canonical}, {tuple(shape)}, is loaded into one of "
        "the same quantizer and shape",
        f"{got}, {tuple(getattr(target, 'shape', ()))}",
        "Build the model with the recipe and formats of the state dict, or dequantize the entry",
        UnsupportedError,
    )
