"""Record the weight gradients that do not pass through autograd."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qtensor.debug.op import Sink
from qtensor.dtensor import local_part
from qtensor.library.define import BODIES, below_autograd
from qtensor.library.gradient import GemmAccumulateArgs, PostponeWgradArgs
from qtensor.modules.base import QuantizedModule


class Watched(NamedTuple):
    """A weight (N, K) whose gradient is recorded."""

    module: nn.Module
    weight: str
    site: int
    quantizer: str
    """Canonical text of the format to compare with, or ""."""


class WeightGradients:
    """A watcher of ``fuse_wgrad_accumulation`` and ``delay_wgrad_compute``.

    The key of a layer identifies the weight of a postponed gradient. The address of ``main_grad``
    identifies the weight of a gradient that is added to it; this fails where a compiler passes a
    copy of ``main_grad`` (aot_eager). The gradient is computed once more, in float32.
    """

    def __init__(self, sink: Sink, watched: list[Watched]) -> None:
        self._sink, self._watched = sink, watched
        self._by_address: dict[int, Watched] = {}
        self._postponed: set[int] = set()
        groups: dict[int, list[Watched]] = {}
        for entry in watched:
            states = entry.module._states if isinstance(entry.module, QuantizedModule) else {}
            # The weights of GroupedLinear share a state, and are postponed in their order.
            state = states.get(entry.weight, states.get("weight"))
            if state is not None:
                groups.setdefault(state.key, []).append(entry)
        self._by_key: dict[int, Iterator[Watched]] = {
            key: itertools.cycle(entries) for key, entries in groups.items()
        }

    def __call__(self, args: GemmAccumulateArgs | PostponeWgradArgs) -> None:
        """Record the gradient ``a.T @ b`` of grad_output (M, N) and the input (M, K)."""
        if isinstance(args, PostponeWgradArgs):
            entries = self._by_key.get(args.key)
            entry = None if entries is None else next(entries)
            self._postponed |= set() if entry is None else {entry.site}
        else:
            entry = self._find(args.out)
            if entry is not None and entry.site in self._postponed:
                return
        if entry is None or not getattr(entry.module, entry.weight).requires_grad:
            return
        if self._sink.wants(entry.site, "grad_weight"):
            with below_autograd():
                gradient = BODIES["gemm"](*args.operands, "NT", torch.float32)
                self._sink.receive(entry.site, "grad_weight", gradient, entry.quantizer, None)

    def _find(self, out: Tensor) -> Watched | None:
        """Return the weight to whose ``main_grad`` a gradient is added, or None."""
        address = out.data_ptr()
        entry = self._by_address.get(address)
        if entry is None or _address(entry) != address:
            # The caller may have set other tensors since.
            self._by_address = {_address(each): each for each in self._watched}
            entry = self._by_address.get(address)
        return entry


def _address(entry: Watched) -> int:
    main_grad: Any = getattr(getattr(entry.module, entry.weight), "main_grad", None)
    return 0 if main_grad is None else int(local_part(main_grad).data_ptr())
