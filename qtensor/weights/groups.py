"""Layers that get the same format: parts of one projection, and the experts of one block."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from qtensor.core.errors import ArgumentTypeError, fail
from qtensor.weights.layers import match

TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("to_q", "to_k", "to_v"),
    ("wq", "wk", "wv"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
"""Names of layers that servers fuse into one matrix, which must have one format."""

_EXPERT = re.compile(r"\bexperts\.\d+\b")


def layer_groups(
    op: str, names: Sequence[str], groups: Iterable[Sequence[str]] | None
) -> list[tuple[str, ...]]:
    """Return the names of each group; every layer is in one.

    Args:
        op: for errors.
        names: all layers, in the model's order.
        groups: for each group, names or globs of its layers; layers that none names are groups of
            their own. None: the layers of ``TOGETHER`` under one parent form a group, and so do the
            same layers of all experts of a block.
    """
    keys: dict[str, str] = {}
    if groups is None:
        keys = {name: _key(name) for name in names}
    elif not isinstance(groups, Iterable):
        rule, fix = "groups is a list of lists of names", 'Pass for example [["*.q", "*.k"]]'
        fail(op, rule, repr(groups), fix, ArgumentTypeError)
    else:
        for number, patterns in enumerate(groups):
            if isinstance(patterns, str) or not isinstance(patterns, Iterable):
                rule = "each group is a list of names or patterns"
                fix = f"Pass groups=[[{patterns!r}, ...]]"
                fail(op, rule, repr(patterns), fix, ArgumentTypeError)
            for name in match(op, patterns, names, "groups"):
                if name in keys:
                    rule = "a layer is in one group only"
                    fail(op, rule, f"{name} in two", "Make the patterns narrower")
                keys[name] = f"group {number}"
    members: dict[str, list[str]] = {}
    for name in names:
        members.setdefault(keys.get(name, name), []).append(name)
    return [tuple(group) for group in members.values()]


def _key(name: str) -> str:
    """Return a text that is the same for all layers of a group."""
    parent, _, leaf = _EXPERT.sub("experts.*", name).rpartition(".")
    together = next((t for t in TOGETHER if leaf in t), (leaf,))
    return f"{parent}.{'/'.join(together)}"
