"""Choose one option of each group so that the errors are least and the bytes fit: exactly.

This is the multiple-choice knapsack problem. The groups are added one after another to the set of
(bytes, error) pairs that no other pair beats in both (G. Nemhauser and Z. Ullmann, "Discrete
dynamic programming and capital allocation", 1969). No pair is rounded or dropped for another
reason, so the answer is the best one, and the last set is the whole trade-off curve.

The number of pairs is at most the number of different sums of bytes. The sizes of a model's layers
are multiples of a large number, which keeps it small.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qtensor.core.errors import fail

MAX_PAIRS = 20_000_000
"""Most pairs that are compared at a time, about 1 GB."""


class Option(NamedTuple):
    """One way to store a group."""

    bytes: int
    error: float


class Front(NamedTuple):
    """The pairs that no other pair beats, by rising bytes and falling error."""

    bytes: NDArray[np.int64]
    errors: NDArray[np.float64]
    steps: list[tuple[NDArray[np.int32], NDArray[np.int32]]]
    """For each group: the pair before it that each pair came from, and its option."""

    def choice(self, index: int) -> list[int]:
        """Return the option of each group that leads to a pair."""
        options = []
        for before, option in reversed(self.steps):
            options.append(int(option[index]))
            index = int(before[index])
        return options[::-1]


def front(groups: Sequence[Sequence[Option]], limit: int) -> Front:
    """Return the pairs within ``limit`` bytes that no other pair beats.

    There is none if even the smallest options need more than ``limit``.
    """
    least_after = np.cumsum([min(o.bytes for o in group) for group in groups[::-1]])[::-1]
    sizes, errors = np.zeros(1, np.int64), np.zeros(1)
    steps = []
    for number, group in enumerate(groups):
        if len(sizes) * len(group) > MAX_PAIRS:
            rule = f"at most {MAX_PAIRS:,} combinations are compared at a time"
            got = f"{len(sizes):,} sums of bytes and {len(group)} formats"
            fail("search", rule, got, "Put layers into groups, or leave formats out")
        rest = least_after[number + 1] if number + 1 < len(groups) else 0
        all_sizes = (sizes[:, None] + np.array([o.bytes for o in group])).ravel()
        all_errors = (errors[:, None] + np.array([o.error for o in group])).ravel()
        order = np.lexsort((all_errors, all_sizes))
        order = order[all_sizes[order] + rest <= limit]
        # Of the pairs with at most these bytes, only a smaller error than all before it is kept.
        sorted_errors = all_errors[order]
        best_before = np.minimum.accumulate(np.concatenate([[np.inf], sorted_errors]))[:-1]
        kept = order[sorted_errors < best_before]
        sizes, errors = all_sizes[kept], all_errors[kept]
        steps.append(((kept // len(group)).astype(np.int32), (kept % len(group)).astype(np.int32)))
    return Front(sizes, errors, steps)
