"""Find tensors that hold the same values in different directions.

Two aliases, such as a parameter and the tensor that it was made of, may get different usages by
``update_usage``. A write through one of them cannot reach data that it does not hold, so it raises
an error as long as another tensor holds these data.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor
from torch.compiler import is_compiling
from torch.multiprocessing.reductions import StorageWeakRef

from qtensor.core.errors import UnsupportedError, fail
from qtensor.library.same_rows import has_data

if TYPE_CHECKING:
    from qtensor.storage.base import QuantizedTensorStorage


class _Partner(NamedTuple):
    """Two pieces of memory that hold the same values in different directions."""

    own: StorageWeakRef
    other: StorageWeakRef


_PARTNERS: dict[int, list[_Partner]] = {}
"""By the address of the first memory; empty in a program that never changes usages of aliases."""


def memory_of(buffers: Iterable[Tensor]) -> list[StorageWeakRef]:
    """Return the memory of each buffer that has some; a trace has none."""
    return [StorageWeakRef(b.untyped_storage()) for b in buffers if has_data(b)]


def note_partners(own: list[StorageWeakRef], others: list[StorageWeakRef]) -> None:
    """Note that ``others`` hold the values of ``own`` in another direction while they live."""
    for key, partners in list(_PARTNERS.items()):
        alive = [p for p in partners if not (p.own.expired() or p.other.expired())]
        if alive:
            _PARTNERS[key] = alive
        else:
            del _PARTNERS[key]
    for a in own:
        for b in others:
            if a.cdata != b.cdata and not b.expired():
                _PARTNERS.setdefault(a.cdata, []).append(_Partner(a, b))


def lacks_usage(t: QuantizedTensorStorage) -> bool:
    """Return whether another tensor holds values of ``t`` in a direction that ``t`` lacks."""
    if not _PARTNERS or t._parts:
        return False
    held = {buffer.untyped_storage()._cdata for buffer in t.buffers() if has_data(buffer)}
    return any(
        not (own.expired() or other.expired()) and other.cdata not in held
        for key in held & _PARTNERS.keys()
        for own, other in _PARTNERS[key]
    )


def check_usages(t: QuantizedTensorStorage, op: str = "copy_") -> None:
    """Refuse a write that would leave data of another tensor behind.

    Args:
        t: the tensor that is written.
        op: the write, for errors.

    Raises:
        UnsupportedError: another tensor holds these values in a direction that ``t`` lacks.
    """
    # In a compiled region the origin has the answer: ``__tensor_flatten__`` has found it.
    if t._origin.lacks_usage or (not is_compiling() and lacks_usage(t)):
        fail(
            f"{op}[{t._quantizer.format}]",
            "a write must reach all data of these values, and another tensor that shares them "
            "holds a direction that this one lacks, because update_usage changed one of them",
            t.get_usages(),
            "Write to the tensor with both usages, call update_usage on it too, or clone this one",
            UnsupportedError,
        )
