"""Record the weight gradients that do not pass through autograd."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qtensor.debug.op import Sink
from qtensor.kernels.gemm.problem import Pair
from qtensor.library.define import BODIES, below_autograd
from qtensor.modules.base import QuantizedModule
from qtensor.modules.grouped_linear import GroupedLinear


class Watched(NamedTuple):
    """A weight (N, K) whose gradient is recorded."""

    module: nn.Module
    weight: str
    site: int
    quantizer: str
    """Canonical text of the format to compare with, or ""."""


class WeightGradients:
    """A watcher of ``fuse_wgrad_accumulation`` and ``delay_wgrad_compute``.

    The key of a layer and the index of a group identify the weight. The gradient is computed once
    more, in float32.
    """

    def __init__(self, sink: Sink, watched: list[Watched]) -> None:
        self._sink = sink
        self._found: dict[tuple[int, int], Watched] = {}
        for entry in watched:
            module, group = entry.module, 0
            if not isinstance(module, QuantizedModule):
                continue
            name = entry.weight
            if isinstance(module, GroupedLinear):
                # The weights share a state.
                name, group = "weight", int(name.removeprefix("weight"))
            self._found[module._states[name].key, group] = entry

    def __call__(self, key: int, group: int, pair: Pair) -> None:
        """Record the gradient ``a.T @ b`` of grad_output (M, N) and the input (M, K)."""
        entry = self._found.get((key, group))
        if entry is None or not getattr(entry.module, entry.weight).requires_grad:
            return
        if self._sink.wants(entry.site, "grad_weight"):
            with below_autograd():
                gradient = BODIES["gemm"](*pair, "NT", torch.float32)
                self._sink.receive(entry.site, "grad_weight", gradient, entry.quantizer, None)


def gradient_hooks(parameter: Any, record: Any) -> list[Any]:
    """Make autograd hand the gradient of a parameter to ``record``, and return the hooks.

    The gradient of a sharded parameter (FSDP2) does not come from autograd: FSDP sets ``grad`` and
    calls the hooks that run after accumulation. So those hooks record if the other one did not run.
    """
    passed = False

    def from_autograd(grad: Tensor | None) -> None:
        nonlocal passed
        passed = True
        if grad is not None:  # it does not pass through autograd: WeightGradients
            record(grad)

    def from_fsdp(leaf: Tensor) -> None:
        nonlocal passed
        if not passed and leaf.grad is not None:
            record(leaf.grad)
        passed = False

    hooks = [parameter.register_hook(from_autograd)]
    if hasattr(parameter, "placements"):
        hooks.append(parameter.register_post_accumulate_grad_hook(from_fsdp))
    return hooks
