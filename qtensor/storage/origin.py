"""The origin of a quantized tensor: how its bytes relate to those of other tensors and ranks.

Each function that makes a tensor out of another one (``rebuild.py``) asks for the origin of the
result: ``FRESH`` for memory of its own, the origin of the source for an alias, and what
``rebuild.part`` derives for a part. An op therefore cannot lose what a later write needs to know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from qtensor.core.encoding import decode_list, encode_list

if TYPE_CHECKING:
    from qtensor.storage.tensor import QuantizedTensor


class Split(NamedTuple):
    """A split of a tensor over a process group.

    Attributes:
        group: name of the process group.
        axis: "m" if the rows are split, "k" if the last dim is.
        rows: the number of rows of each rank, where it is known.
    """

    group: str
    axis: str
    rows: tuple[int, ...] = ()


class Padded(NamedTuple):
    """A tensor that ends with padding along a dim, for the part of it before the padding.

    Attributes:
        whole: the tensor with the padding.
        dim: the dim.
        cuts_a_block: the part ends inside a block, so it can be written while padding follows.
    """

    whole: QuantizedTensor
    dim: int
    cuts_a_block: bool = False


TURNED = (-1,)
"""Stands for the strides (1, M) of the transpose of a row-major (M, K) tensor."""


class Origin(NamedTuple):
    """How a tensor relates to the tensor that it was made from.

    Attributes:
        is_part: the tensor shows a part of a larger one, so its buffers may lack padding.
        shared: names of buffers that also serve values outside this tensor. A write leaves them
            unchanged, except factors of 0, with which every value is 0.
        is_copy: the tensor is a copy where torch has a view, so a write would not reach the whole.
        lacks_usage: another tensor holds these values in a direction that this one does not hold,
            so a write would not reach it (``usages.py``).
        strides: the strides of the same view of a plain tensor, if that is not in row-major order;
            ``TURNED`` for the transpose of a row-major matrix, () where they are unknown. torch
            itself always sees row-major order.
        layout: how a tensor without buffers shows its parts (``lazy_view.py``); "" with buffers.
        may_be_padded: the tensor may end with padding, which a collective or ``new_zeros`` left.
        split: how ranks split the tensor of which this is a rank's shard; None if unknown.
        shard_of: the shape of the weight that ``fully_shard`` has split into shards like this one.
        padded: the tensor that padding follows, for a part that ends inside a block before it.
            While the padding is zeros, every factor encodes it, so a write may choose factors.
    """

    is_part: bool = False
    shared: tuple[str, ...] = ()
    is_copy: bool = False
    lacks_usage: bool = False
    strides: tuple[int, ...] | None = None
    layout: str = ""
    may_be_padded: bool = False
    split: tuple[Split, ...] | None = None
    shard_of: tuple[int, ...] | None = None
    padded: Padded | None = None

    def suffix(self) -> str:
        """Return what a flatten context holds of the origin, as the tail of a scale layout.

        The tail holds what a write in a compiled graph needs to know.
        """
        words = [f"shared={name}" for name in self.shared]
        words += [name for name in _FLAGS if getattr(self, name)]
        # Sizes would make a graph of each batch size.
        if self.strides is not None:
            words.append("turned" if self.strides == TURNED else "strided")
        if self.layout:
            words.append(f"layout={self.layout}")
        for split in self.split or ():
            words.append(f"split={split.axis}:{split.group}")
        return f";{encode_list(words, ';')}" if words else ""

    @staticmethod
    def parse(tail: str) -> Origin:
        """Return the origin that the tail of a scale layout holds."""
        if not tail:
            return FRESH
        words = decode_list(tail, ";")
        values = [word.partition("=") for word in words]
        splits = [value.partition(":") for name, _, value in values if name == "split"]
        return Origin(
            shared=tuple([value for name, _, value in values if name == "shared"]),
            strides=TURNED if "turned" in words else () if "strided" in words else None,
            layout=next((value for name, _, value in values if name == "layout"), ""),
            split=tuple([Split(group, axis) for axis, _, group in splits]) or None,
            is_part="is_part" in words,
            is_copy="is_copy" in words,
            lacks_usage="lacks_usage" in words,
        )


_FLAGS = ("is_part", "is_copy", "lacks_usage")
FRESH = Origin()
"""The origin of a tensor with memory of its own."""


def of_copy(origin: Origin) -> Origin:
    """Return the origin of a copy, which keeps what collectives and ``fully_shard`` need."""
    if origin.may_be_padded or origin.shard_of is not None:
        return Origin(may_be_padded=origin.may_be_padded, shard_of=origin.shard_of)
    return FRESH
