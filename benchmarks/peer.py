"""Other libraries that do the same jobs: one entry in ``MODULES`` each, one module with its functions.

The module of a peer imports it, and holds ``PEER``. A library that is not installed is named as absent
with the reason; so is a format or option that it does not have.
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
"""Name on the command line to the module that holds ``PEER``."""


@dataclass(frozen=True)
class Job:
    """What a peer does with one format; None for what it has no path for."""

    quantize: Callable[[Tensor], Any]
    dequantize: Callable[[Any, torch.dtype], Tensor] | None = None
    linear: Callable[[Tensor, Any], Tensor] | None = None
    """Activations (M, K) and a quantized weight (N, K): weight-only."""


@dataclass(frozen=True)
class Peer:
    """A library, by its public functions."""

    name: str
    version: str
    eager: Mapping[str, Job]
    """Canonical string of our quantizer to the job."""
    compiled: Mapping[str, Job] = field(default_factory=dict)
    """The functions that ``torch.compile`` is given, where they differ from the eager ones."""
    construct: Callable[[Any], Callable[[], Any]] | None = None
    """From its MXFP8 tensor: a call that builds the wrapper around buffers that exist."""
    notes: tuple[str, ...] = ()
    """What of it could not be measured here, and what stands in."""

    def job(self, canonical: str, compiled: bool = False) -> Job | None:
        """Its functions for our quantizer of that name."""
        job = self.eager.get(canonical)
        return self.compiled.get(canonical, job) if compiled else job


def load(names: Iterable[str]) -> tuple[list[Peer], dict[str, str]]:
    """The peers that are installed, and why each other one is absent.

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
