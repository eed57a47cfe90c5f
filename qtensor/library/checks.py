"""Checks of the arguments that ops share: buffers of quantized tensors, seeds and amaxes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qtensor.errors import DtypeError, fail
from qtensor.layout import Shape
from qtensor.registry import QuantizerLike, check_buffers, parse


def check_operand(op: str, buffers: Sequence[Tensor], canonical: str, shape: Shape) -> None:
    """Refuse buffers that are not those of a tensor of ``shape``, or of a slice with that shape.

    Args:
        op: for the message.
        buffers: in slot order; (canonical "") one plain tensor of ``shape``.
        canonical: text of the quantizer, or "".
        shape: logical shape, known as numbers.

    Raises:
        QTensorError: number, shape or dtype of the buffers; the message names the first that
            differs.
    """
    if canonical:
        quantizer = parse(canonical)
        check_buffers(f"{op}[{quantizer.format}]", quantizer, buffers, shape)
        return
    if len(buffers) != 1 or buffers[0].shape != tuple(shape):
        got = [tuple(t.shape) for t in buffers]
        fail(op, f"a plain operand is one tensor of shape {tuple(shape)}", got, "Pass that")
    if not buffers[0].is_floating_point():
        fail(op, "a plain operand must be floating", buffers[0].dtype, "Convert it", DtypeError)


def check_one(
    op: str, name: str, tensor: Tensor | None, dtype: torch.dtype | None, count: int = 1
) -> None:
    """Refuse a ``tensor`` that does not hold ``count`` values of ``dtype`` (None: of any).

    No tensor at all passes.

    Raises:
        QTensorError: the message names the argument.
    """
    if tensor is not None and (tensor.numel() != count or dtype not in (None, tensor.dtype)):
        rule = f"{name} must hold {count} value{'s' * (count > 1)}{f' of {dtype}' * bool(dtype)}"
        fail(op, rule, f"{tensor.dtype} {tuple(tensor.shape)}", f"Pass such a {name}")


def check_seed(op: str, quantizer: QuantizerLike, seed: Tensor | None, count: int = 1) -> None:
    """Refuse stochastic rounding without a seed, which kernels would round in different ways.

    Raises:
        QTensorError: no seed, or one of another dtype or size.
    """
    if seed is None:
        if quantizer.stochastic_rounding:
            rule = "stochastic rounding needs a seed"
            fix = "Pass seed=torch.ops.qtensor.random_seed(x)"
            fail(f"{op}[{quantizer.format}]", rule, "no seed", fix)
        return
    check_one(f"{op}[{quantizer.format}]", "seed", seed, torch.int64, count)
