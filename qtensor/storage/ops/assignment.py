"""Assign ``data`` between plain and quantized tensors.

``quantized.data = plain`` makes the quantized tensor a plain one (``become_plain``).

``plain.data = quantized`` is refused, although torch does not call the subclass for it. Torch would
give ``plain`` the memory of the wrapper, which has none: a later sum of ``plain`` would end the
process, and its NumPy array would show foreign memory. Before torch assigns, it calls
``aten::_has_compatible_shallow_copy_type``. The handler below is registered under a dispatch key
that only quantized tensors have, so assignments between other tensors skip it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from qtensor.core.errors import ArgumentTypeError, UnsupportedError, fail
from qtensor.core.torch_state import OWN_KEY, OWN_KEY_NAME, without_own_key
from qtensor.storage.base import QuantizedTensorStorage
from qtensor.storage.serialize import attributes_of

if TYPE_CHECKING:
    from qtensor.storage.tensor import QuantizedTensor

_COMPATIBLE = torch.ops.aten._has_compatible_shallow_copy_type.default
_LIBRARY = torch.library.Library("aten", "IMPL")


def _compatible(destination: Tensor, source: Tensor) -> bool:
    """Return True if torch can carry out ``destination.data = source``.

    Raises:
        ArgumentTypeError: the source is quantized and the destination is not.
    """
    if isinstance(source, QuantizedTensorStorage) and not isinstance(
        destination, QuantizedTensorStorage
    ):
        fail(
            f"data[{source._quantizer.format}]",
            "a plain tensor cannot take over the buffers of a quantized one",
            type(source).__name__,
            "Replace the parameter: module.weight = torch.nn.Parameter(quantized)",
            ArgumentTypeError,
        )
    # Without the key, the call reaches torch's own kernel instead of this function again.
    with without_own_key():
        answer: bool = _COMPATIBLE(destination, source)
    return answer


def install() -> None:
    """Register the handler; importing ``qtensor.storage.tensor`` calls this once."""
    if OWN_KEY is not None:
        _LIBRARY.impl("_has_compatible_shallow_copy_type", _compatible, OWN_KEY_NAME)


def become_plain(t: QuantizedTensor, value: Tensor) -> None:
    """Turn the object ``t`` into a plain tensor or parameter with the memory of ``value``.

    Its attributes, ``grad`` and ``requires_grad`` stay. A graph that saved ``t`` would compute its
    gradients with other values afterwards, so ``t`` cannot change while such a graph exists.

    Raises:
        UnsupportedError: ``t`` is a result of autograd, has hooks, or is held by a graph, a view or
            a weak reference.
    """
    if t.grad_fn is not None or t._backward_hooks or t._post_accumulate_grad_hooks:
        rule = "a tensor that becomes plain would lose its graph and its hooks"
        _refuse(t, rule, "Remove the hooks, or use the plain tensor in its place")
    plain = value.detach().requires_grad_(t.requires_grad)
    if getattr(t, "_is_param", False):
        plain = torch.nn.Parameter(plain, requires_grad=t.requires_grad)
    plain.grad = None if t.grad is None else t.grad.to(plain)
    vars(plain).update(attributes_of(t))
    # Inference mode hides the graphs that swap_tensors has to see.
    with torch.inference_mode(False):
        _swap(t, plain)


def _swap(t: QuantizedTensor, plain: Tensor) -> None:
    """Let the objects ``t`` and ``plain`` change places.

    Raises:
        UnsupportedError: a graph, a view or a weak reference holds ``t``.
    """
    refusal = None
    if t.requires_grad:
        # A graph that has saved no codes of ``t`` allows the swap, but its gradient would be lost.
        node = torch.autograd.graph.get_gradient_edge(t).node
        refusal = node.register_prehook(_refuse_gradient)
    try:
        torch.utils.swap_tensors(t, plain)
    except RuntimeError as error:
        if refusal is not None:
            refusal.remove()
        rule = "a tensor that a graph, a view or a weak reference holds cannot become plain"
        fix = "Call backward() or delete the outputs of the forward pass, and delete the views"
        _refuse(t, rule, fix, error)


def _refuse(t: QuantizedTensor, rule: str, fix: str, cause: Exception | None = None) -> NoReturn:
    try:
        fail(
            f"data[{t._quantizer.format}]",
            rule,
            f"{type(t).__name__} {tuple(t.shape)}",
            f"{fix}. Or replace the parameter: module.weight = torch.nn.Parameter(values)",
            UnsupportedError,
        )
    except UnsupportedError as error:
        raise error from cause


def _refuse_gradient(gradients: object) -> NoReturn:
    """Refuse a gradient for codes that have been replaced by plain values.

    Raises:
        UnsupportedError: always.
    """
    fail(
        "backward",
        "a graph cannot give its gradient to a parameter that has become plain in the meantime",
        "an assignment parameter.data = plain since the forward pass",
        "Call backward() before the assignment, or run the forward pass again",
        UnsupportedError,
    )
