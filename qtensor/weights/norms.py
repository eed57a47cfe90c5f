"""Find the weights that read the output of a norm, by running the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from qtensor.core.graphs import without_graphs
from qtensor.storage.base import QuantizedTensorStorage
from qtensor.weights.layers import STACKS, is_experts
from qtensor.weights.metrics import run


@dataclass
class NormReaders:
    """A norm, and the parameters that multiply its output.

    Attributes:
        name: of the norm.
        norm: has a ``weight`` (K,), and a ``bias`` (K,) or None.
        offset: 1.0 where the norm multiplies by ``1 + weight``, as in Gemma; else 0.0.
        centers: whether the norm subtracts a mean (LayerNorm).
        readers: name of a parameter -> the parameter, (N, K), (E, N, K) or (E, K, N).
        dims: name of a parameter -> its dim of size K, -1 or -2.
    """

    name: str
    norm: nn.Module
    offset: float
    centers: bool
    readers: dict[str, nn.Parameter] = field(default_factory=dict)
    dims: dict[str, int] = field(default_factory=dict)

    @property
    def scale(self) -> Tensor:
        """Factors by which the norm multiplies the channels, float64 (K,)."""
        weight: Any = self.norm.weight
        return weight.detach().double() + self.offset

    def set_scale(self, scale: Tensor) -> None:
        """Let the norm multiply the channels by other factors, and scale its bias in proportion."""
        weight: Any = self.norm.weight
        bias: Any = getattr(self.norm, "bias", None)
        if isinstance(bias, Tensor):
            bias.copy_(bias.double() * scale / self.scale)
        weight.copy_(scale - self.offset)


def _as_norm(name: str, module: nn.Module) -> NormReaders | None:
    """Return a norm over the last dim with a weight of its own, or None for other modules."""
    kind, weight = type(module).__name__, module._parameters.get("weight")
    if not kind.endswith(("RMSNorm", "LayerNorm")) or weight is None or weight.ndim != 1:
        return None
    x = torch.linspace(1.0, 2.0, weight.numel(), dtype=weight.dtype, device=weight.device)[None]
    zeros = {own: torch.zeros_like(p) for own, p in module.named_parameters()}
    at_zero = functional_call(module, zeros, (x,))
    offset = 1.0 if bool(at_zero.any()) else 0.0
    ones = zeros | {"weight": torch.full_like(weight, 1.0 - offset)}
    plain, shifted = (functional_call(module, ones, (x + shift,)) for shift in (0.0, 4.0))
    return NormReaders(name, module, offset, bool(torch.allclose(plain, shifted, atol=1e-2)))


class _Readers(TorchFunctionMode):
    """Record the weights of products ``linear(x, weight)`` whose x is the output of a norm."""

    def __init__(self, norm_of: Callable[[Tensor], NormReaders | None], model: nn.Module) -> None:
        super().__init__()
        self._norm_of = norm_of
        self._names = {id(p): name for name, p in model.named_parameters()}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.linear and len(args) > 1 and id(args[1]) in self._names:
            norm = self._norm_of(args[0])
            if norm is not None:
                name = self._names[id(args[1])]
                norm.readers[name], norm.dims[name] = args[1], -1
        return func(*args, **(kwargs or {}))


def find_norms(op: str, model: nn.Module, batch: Any) -> list[NormReaders]:
    """Run the model on one input, and return the norms whose output linear layers read.

    Other code may read the output too, which this cannot see: callers compare outputs.
    """
    norms = {n: norm for n, m in model.named_modules() if (norm := _as_norm(n, m)) is not None}
    last: list[tuple[Tensor, NormReaders]] = []

    def norm_of(x: Tensor) -> NormReaders | None:
        if isinstance(x, QuantizedTensorStorage):
            return None  # a layer quantizes its inputs
        here = x.untyped_storage().data_ptr()
        return next((n for t, n in last if t.untyped_storage().data_ptr() == here), None)

    def made(norm: NormReaders) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            # The list holds the output, so that no other tensor gets its memory.
            last.append((output, norm))
            del last[:-4]

        return hook

    def experts(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            norm = norm_of(args[0]) if args else None
            for own in STACKS[:2]:
                parameter = module._parameters.get(own)
                if norm is not None and parameter is not None:
                    norm.readers[f"{name}.{own}"] = parameter
                    norm.dims[f"{name}.{own}"] = -2 if module.is_transposed else -1

        return hook

    with ExitStack() as stack:
        for norm in norms.values():
            stack.callback(norm.norm.register_forward_hook(made(norm)).remove)
        for name, module in model.named_modules():
            if is_experts(module):
                stack.callback(module.register_forward_pre_hook(experts(name)).remove)
        stack.enter_context(without_graphs())
        stack.enter_context(_Readers(norm_of, model))
        run(op, "calibration[0]", model, batch)
    return [norm for norm in norms.values() if norm.readers]
