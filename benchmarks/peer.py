"""Other libraries ("peers") that do the same jobs: one module each, listed in ``MODULES``.

A peer's module imports its library and defines ``PEER``. The report names libraries that are not
installed, and formats or options that a peer does not have, with the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

MODULES: Mapping[str, str] = {
    "torchao": "benchmarks.peer_torchao",
    "compressed-tensors": "benchmarks.peer_compressed_tensors",
}
"""Name on the command line -> the module that defines ``PEER``."""


@dataclass(frozen=True)
class Job:
    """A peer's functions for one format; None for a function that it does not have."""

    quantize: Callable[[Tensor], Any]
    dequantize: Callable[[Any, torch.dtype], Tensor] | None = None
    linear: Callable[[Tensor, Any], Tensor] | None = None
    """Weight-only linear of activations (M, K) and a quantized weight (N, K)."""


@dataclass(frozen=True)
class Peer:
    """A library and its public functions."""

    name: str
    version: str
    eager: Mapping[str, Job]
    """Canonical string of our quantizer -> the job."""
    compiled: Mapping[str, Job] = field(default_factory=dict)
    """Functions for ``torch.compile``, if they differ from the eager ones."""
    construct: Callable[[Any], Callable[[], Any]] | None = None
    """Takes its MXFP8 tensor; returns a call that builds the wrapper around existing buffers."""
    notes: tuple[str, ...] = ()
    """Notes on functions that could not be measured here, and on substitutes."""

    def job(self, canonical: str, compiled: bool = False) -> Job | None:
        """Return its functions for the quantizer with this canonical string."""
        job = self.eager.get(canonical)
        return self.compiled.get(canonical, job) if compiled else job


def load(names: Iterable[str]) -> tuple[list[Peer], dict[str, str]]:
    """Return the installed peers, and the reasons why others are missing.

    Raises:
        ValueError: a name that is not in ``MODULES``.
    """
    peers, absent = [], {}
    for name in names:
        if name not in MODULES:
            raise ValueError(f"unknown peer {name!r}; known: {', '.join(MODULES)}")
        try:
            peers.append(importlib.import_module(MODULES[name]).PEER)
        except ImportError as error:
            absent[name] = f"not installed ({error})"
    return peers, absent
