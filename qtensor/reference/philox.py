"""Random bytes for stochastic rounding from Philox4x32-10 (Salmon et al., SC 2011).

The generator is counter-based and needs no state: the bytes of element i depend only on the seed
and on i. A CPU, a GPU and a compiled graph that get the same seed round in the same way.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return the high and low 32 bits of ``word * factor``, as int64.

    The words are uint32 values in int64 tensors, whose own product would overflow.
    """
    low = (word & 0xFFFF) * factor
    high = (word >> 16) * factor + (low >> 16)
    return high >> 16, (high << 16 | low & 0xFFFF) & _MASK


def philox4x32(counter: list[Tensor], key: list[Tensor]) -> list[Tensor]:
    """Return four output words after ten rounds.

    ``counter`` is four words and ``key`` two: int64 tensors of one shape that hold uint32 values.
    """
    for _ in range(10):
        high0, low0 = _multiply(counter[0], _MULTIPLIERS[0])
        high1, low1 = _multiply(counter[2], _MULTIPLIERS[1])
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(k + w) & _MASK for k, w in zip(key, _WEYL, strict=True)]
    return counter


def random_words(seed: Tensor, count: int, stream: int) -> Tensor:
    """Return ``count`` random 32-bit words as int64.

    Each counter (g, g >> 32, 0, stream) with g = 0, 1, ... gives four words.

    Args:
        seed: int64 of shape (1,).
        count: number of words.
        stream: number that separates several uses of one seed.
    """
    groups = torch.arange((count + 3) // 4, device=seed.device)
    zero = torch.zeros_like(groups)
    words = philox4x32(
        [groups & _MASK, groups >> 32, zero, zero + stream], [seed & _MASK, (seed >> 32) & _MASK]
    )
    return torch.stack(words, dim=-1).flatten()[:count]


def random_bytes(seed: Tensor, count: int, stream: int) -> Tensor:
    """Return ``count`` random bytes as uint8: the bytes of the words, the lowest first.

    Args:
        seed: int64 of shape (1,).
        count: number of bytes.
        stream: number that separates several uses of one seed (0 rowwise, 1 columnwise).
    """
    words = random_words(seed, 4 * ((count + 15) // 16), stream)
    shifts = torch.arange(0, 32, 8, device=seed.device)
    return (words[:, None] >> shifts & 0xFF).flatten()[:count].to(torch.uint8)
