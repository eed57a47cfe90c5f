"""Find the rows (..., K) that the weight of a layer multiplies in a call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qtensor.core.errors import ArgumentTypeError, fail
from qtensor.storage.base import QuantizedTensorStorage
from qtensor.weights.layers import WeightLayer

Given = dict[str, Any]
"""The arguments of a call by name."""

_ROLES = {"q_proj_weight": "query", "k_proj_weight": "key", "v_proj_weight": "value"}


def inputs_of(
    op: str, name: str, layer: WeightLayer, args: tuple[Any, ...], given: Given
) -> tuple[Iterable[Tensor], Tensor | None]:
    """Return the tensors (..., K) that a layer's weight multiplies, and the input they come from.

    Args:
        op: for errors.
        name: of the layer, for errors.
        layer: not one of stacked experts.
        args: arguments of the call of its module, or of the attention that it belongs to.
        given: keyword arguments of the call.

    Returns:
        The tensors, and one that is the same object for all layers that multiply the same rows, or
        None if no other layer does.

    Raises:
        ArgumentTypeError: an input is not a floating tensor.
    """
    if layer.attention is not None:
        given = dict(zip(("query", "key", "value"), args, strict=False)) | given
        own = layer.parameters[0]
        if own == "weight":
            return [_checked(op, name, _before_output(layer.attention, args, given))], None
        roles = [_ROLES[own]] if own in _ROLES else list(_ROLES.values())
        found = {id(given[role]): _checked(op, name, given[role]) for role in roles}
        return list(found.values()), next(iter(found.values())) if len(found) == 1 else None
    # nn.Linear names its argument "input", and Conv1D names it "x".
    x = args[0] if args else given.get("input", given.get("x"))
    values = _checked(op, name, x)
    if layer.kind == "convolution":
        return patches_of(layer.modules[0], values), None
    return [values], x


def _checked(op: str, name: str, x: object) -> Tensor:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        rule = "the input of a linear layer is a floating tensor"
        fix = "Leave the layer out with filter_fn"
        fail(op, rule, f"{type(x).__name__} for {name}", fix, ArgumentTypeError)
    return x.dequantize() if isinstance(x, QuantizedTensorStorage) else x


def patches_of(module: Any, x: Tensor) -> Iterator[Tensor]:
    """Yield the patches that a convolution multiplies by its rows, of an image and a group.

    Args:
        module: ``nn.Conv1d``, ``nn.Conv2d`` or ``nn.Conv3d``.
        x: (B, C, *size), or (C, *size).

    Yields:
        (patches, C / groups * prod(kernel)) for each image and each group.
    """
    images = x if x.ndim == len(module.kernel_size) + 2 else x.unsqueeze(0)
    for image in images:
        yield from _patches(module, image)


def _patches(module: Any, image: Tensor) -> Tensor:
    """Return the patches (groups, patches, C / groups * prod(kernel)) of an image (C, *size)."""
    rank = image.ndim - 1
    sides: list[int] = []
    for i in reversed(range(rank)):
        span = module.dilation[i] * (module.kernel_size[i] - 1)
        if module.padding == "same":
            sides += [span // 2, span - span // 2]
        else:
            sides += [0 if module.padding == "valid" else module.padding[i]] * 2
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    windows = F.pad(image.unsqueeze(0), sides, mode)[0]
    for i in range(rank):
        span = module.dilation[i] * (module.kernel_size[i] - 1) + 1
        windows = windows.unfold(1 + i, span, module.stride[i])[..., :: module.dilation[i]]
    groups = windows.unflatten(0, (module.groups, -1))
    # (groups, channels, *places, *kernel) -> (groups, *places, channels, *kernel)
    places, kernel = range(2, 2 + rank), range(2 + rank, 2 + 2 * rank)
    ordered = groups.permute(0, *places, 1, *kernel)
    size = image.shape[0] // module.groups * torch.Size(module.kernel_size).numel()
    return ordered.reshape(module.groups, -1, size)


def _before_output(attention: Any, args: tuple[Any, ...], given: Given) -> Tensor:
    """Return the input of ``attention.out_proj``, which attention multiplies itself.

    With the identity in place of the projection, the output of attention is that input.
    """
    keywords = {key: value for key, value in given.items() if key not in _ROLES.values()}
    roles = [given[role] for role in _ROLES.values()]
    with _identity(attention.out_proj), torch.no_grad():
        output: Tensor = attention.forward(*roles, *args[3:], **keywords)[0]
    return output


@contextmanager
def _identity(projection: Any) -> Iterator[None]:
    """Let a linear layer return its input inside the block."""
    own = projection.weight, projection.bias
    like = own[0].detach()
    eye = torch.eye(like.shape[0], dtype=like.dtype, device=like.device)
    try:
        projection.weight = nn.Parameter(eye, requires_grad=False)
        if own[1] is not None:
            projection.bias = nn.Parameter(torch.zeros_like(own[1]), requires_grad=False)
        yield
    finally:
        projection.weight, projection.bias = own
