"""Packed sequences: tokens of all sequences one after another, and the padded form of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.core.errors import check, fail
from qtensor.functional.attention.masks import check_cumulative


def places_of(starts: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the sequence and the position in it of each of T tokens, both (T,) int64.

    ``starts`` (B,) has the place of the first token of each sequence.
    """
    places = torch.arange(tokens, device=starts.device)
    # Sequences without tokens share a start with the next one, which ``right`` finds.
    sequence = torch.searchsorted(starts, places, right=True) - 1
    return sequence, places - starts[sequence]


def starts_of(
    label: str, name: str, cu_seqlens: Tensor | None, padded: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the starts and the lengths of packed sequences, both (B,) int64; see ``packing``."""
    if cu_seqlens is None:
        rule, fix = f"qkv_format 'thd' needs cu_seqlens_{name}", "Pass sums of the lengths (B + 1,)"
        fail(label, rule, None, fix)
    for sums in (cu_seqlens, padded):
        if sums is not None:
            check_cumulative(label, f"cu_seqlens_{name}", sums)
    starts = cu_seqlens if padded is None else padded
    return starts.long()[:-1], cu_seqlens.long().diff()


class Packed(NamedTuple):
    """Where the tokens of packed sequences are.

    Attributes:
        starts: (B,) int64, the place of the first token of each sequence.
        lengths: (B,) int64.
        longest: tokens of the padded form; at least the greatest length.
    """

    starts: Tensor
    lengths: Tensor
    longest: int

    def padded(self, t: Tensor) -> Tensor:
        """Return tokens (T, ...) as padded sequences (B, longest, ...), with zeros behind them."""
        steps = torch.arange(self.longest, device=t.device)
        places = (self.starts.unsqueeze(1) + steps).clamp(max=t.shape[0] - 1)
        found = t.index_select(0, places.flatten()).unflatten(0, places.shape)
        return torch.where(_like(self.is_token(), found), found, 0.0)

    def is_token(self) -> Tensor:
        """Return (B, longest) bool: the place of the padded form is not padding."""
        return torch.arange(self.longest, device=self.lengths.device) < self.lengths.unsqueeze(1)

    def packed(self, t: Tensor, tokens: int) -> Tensor:
        """Return padded sequences (B, longest, ...) as tokens (T, ...); 0 between sequences."""
        sequence, position = places_of(self.starts, tokens)
        inside = position < self.lengths[sequence]
        flat = sequence * self.longest + position.clamp(max=self.longest - 1)
        found = t.flatten(0, 1).index_select(0, flat)
        return torch.where(_like(inside, found), found, 0.0)


def _like(chosen: Tensor, t: Tensor) -> Tensor:
    """Return ``chosen`` with further dims of size 1, as many as ``t`` has."""
    return chosen.reshape(*chosen.shape, *[1] * (t.ndim - chosen.ndim))


def packing(
    label: str, name: str, cu_seqlens: Tensor | None, padded: Tensor | None, longest: int | None
) -> Packed:
    """Return where tokens are, from the sums of the lengths (B + 1,).

    Args:
        label: the module, for errors.
        name: "q" or "kv".
        cu_seqlens: sums of the lengths, without padding between sequences.
        padded: the same with that padding; None if there is none.
        longest: the greatest length; None to read it from the device.

    Raises:
        QTensorError: the sums or the greatest length are missing or wrong.
    """
    starts, lengths = starts_of(label, name, cu_seqlens, padded)
    is_readable = lengths.device.type == "cpu" and not torch.compiler.is_compiling()
    if longest is None:
        if torch.compiler.is_compiling():
            rule = f"compiled code needs max_seqlen_{name}, which it cannot read from cu_seqlens"
            fail(label, rule, None, "Pass the greatest length")
        longest = int(lengths.max())
    elif is_readable and (most := int(lengths.max())) > longest:
        rule = f"max_seqlen_{name} must be at least the greatest length, {most}"
        fail(label, rule, longest, "Pass that length")
    rule = f"max_seqlen_{name} must be a positive number"
    check(longest > 0, label, rule, longest, "Pass the greatest length")
    return Packed(starts, lengths, longest)
