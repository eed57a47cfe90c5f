"""Let the stacked experts of transformers quantize the inputs of their products."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qtensor.core.operand import plain_operand
from qtensor.library.grouped import GROUPED_WGRAD
from qtensor.library.ragged import Groups
from qtensor.modules.in_place import empty_of, plain_class, with_base
from qtensor.modules.input_quantizer import NAME, InputQuantizer
from qtensor.storage.ops.grouped import group_sizes

_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}
"""Classes of experts by their own class."""


class QuantizedInputExperts:
    """Base class of experts that quantize the inputs of their products.

    The submodule ``input_quantizer`` holds an ``InputQuantizer`` for each stack of weights whose
    inputs are quantized. The rows of all experts are quantized together: those of the first product
    before they are sent to experts. Decoded to float32, they are multiplied by the weights of their
    experts, with float32 sums. All else is as in ``grouped_mm`` of transformers, which cannot be
    called: it rounds rows to the dtype of the weights, to which decoded inputs need not belong.
    """

    class_before: type[nn.Module]

    def __reduce_ex__(self: Any, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (empty_of(plain_class(self).class_before),), self.__dict__


def _forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Return the weighted sum of the outputs of the chosen experts, (T, K).

    Args:
        self: the experts.
        hidden_states: (T, K) of all tokens.
        top_k_index: (T, k), numbers of experts.
        top_k_weights: (T, k), factors of their outputs.
    """
    tokens, chosen = top_k_index.shape
    numbers, order = torch.sort(top_k_index.reshape(-1), stable=True)
    every = torch.arange(self.num_experts, device=numbers.device)
    ends = torch.searchsorted(numbers, every, right=True).to(torch.int32)
    dtype = hidden_states.dtype

    def product(own: str, rows: Tensor) -> Tensor:
        weight = getattr(self, own)
        if type(weight) in (Tensor, nn.Parameter):
            matrices = weight if self.is_transposed else weight.mT
            out = F.grouped_mm(rows.to(dtype), matrices, offs=ends)
        else:
            out = _Product.apply(rows, weight, ends, self.is_transposed, dtype)
        return out + getattr(self, f"{own}_bias")[numbers] if self.has_bias else out

    first = "gate_up_proj" if self.has_gate else "up_proj"
    rows = _quantized(self, first, hidden_states)[order // chosen]
    rows = product(first, rows)
    rows = self._apply_gate(rows) if self.has_gate else self.act_fn(rows)
    rows = product("down_proj", _quantized(self, "down_proj", rows))
    if self.has_post_expert_norm:
        rows = self.post_expert_norm(rows)
    rows = rows * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.argsort(order)
    return rows[back].view(tokens, chosen, -1).sum(1).to(dtype)


class _Product(torch.autograd.Function):
    """The product of each expert's rows, float32, with its quantized matrix.

    The backward pass of torch's ``grouped_mm`` would need rows and gradients of one dtype, which is
    bfloat16 in compiled code.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor, transposed: bool, dtype: torch.dtype
    ) -> Tensor:
        """Return (S, N) of rows (S, K) and matrices (E, N, K), or (E, K, N) if transposed."""
        ctx.save_for_backward(rows, weight, ends)
        ctx.is_transposed = transposed
        matrices = weight if transposed else weight.transpose(-2, -1)
        return F.grouped_mm(rows, matrices, offs=ends, out_dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the rows and of the matrices."""
        rows, weight, ends = ctx.saved_tensors
        matrices = weight.transpose(-2, -1) if ctx.is_transposed else weight
        to_rows = F.grouped_mm(grad, matrices, offs=ends, out_dtype=rows.dtype)
        if not ctx.needs_input_grad[1]:
            return to_rows, None, None, None, None
        experts = weight.shape[0]
        groups = Groups([], group_sizes(ends, rows.shape[0], "experts"), experts)
        pair = (*plain_operand(grad.to(rows.dtype)), *plain_operand(rows))
        each = GROUPED_WGRAD(*pair, *groups, list(range(experts)), weight.dtype)
        to_weight = torch.stack(each[:experts])
        return to_rows, to_weight.mT if ctx.is_transposed else to_weight, None, None, None


def _quantized(experts: Any, own: str, x: Tensor) -> Tensor:
    """Return the values that quantizing an input leaves, float32; or ``x`` if it is not."""
    steps = experts._modules[NAME]
    return steps[own](x).dequantize(torch.float32) if own in steps else x


def expert_quantizers(module: nn.Module) -> dict[str, InputQuantizer]:
    """Return the quantizers of inputs of experts, by the names of their weights."""
    found = module._modules.get(NAME)
    return dict(found.items()) if isinstance(found, nn.ModuleDict) else {}  # type: ignore[arg-type]


def set_expert_quantizers(module: nn.Module, quantizers: Mapping[str, InputQuantizer]) -> None:
    """Let experts quantize the inputs of some stacks of weights, or of none if it is empty."""
    module._modules.pop(NAME, None)
    own = plain_class(module)
    before = getattr(own, "class_before", None) if _has_base(own) else None
    if quantizers:
        module.add_module(NAME, nn.ModuleDict(quantizers))
    if quantizers and before is None:
        module.__class__ = with_base(type(module), own, _class_of(own))
    if not quantizers and before is not None:
        module.__class__ = with_base(type(module), own, before)


def _has_base(own: type[Any]) -> bool:
    return issubclass(own, QuantizedInputExperts)


def _class_of(own: type[nn.Module]) -> type[nn.Module]:
    """Return a class like ``own`` that quantizes inputs."""
    if own not in _CLASSES:
        # A calibration unwraps the forward to the loop over experts.
        members: dict[str, Any] = {"forward": _wrapped(own.forward)}
        members |= {"__module__": own.__module__, "__doc__": own.__doc__, "class_before": own}
        bases = (QuantizedInputExperts, own)
        _CLASSES[own] = type(f"QuantizedInput{own.__name__}", bases, members)
    return _CLASSES[own]


def _wrapped(forward: Any) -> Any:
    @functools.wraps(forward)
    def quantized(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return _forward(self, *args, **kwargs)

    return quantized


def _rebuild(before: nn.Module) -> nn.Module:
    """Return empty experts, whose state pickle sets; ``before`` has their class of before."""
    made = _class_of(type(before))
    return made.__new__(made)
