"""Small products on a CPU by programs: all that an op does in one call, in the bytes of the ops one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtensor.kernels.cpu.program import (
    SMALL,
    Builder,
    Operand,
    Program,
    Result,
    Source,
    available,
    serves,
)
from qtensor.layout import Shape
from qtensor.library.codec import parse

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PLAIN = (Tensor, torch.nn.Parameter)
_MOST = 4096

Expected = tuple[tuple[torch.Size, torch.dtype], ...]
"""Shape and dtype of each buffer that a call must bring."""


class _Product(NamedTuple):
    program: Program
    a: Expected
    b: Expected


_PRODUCTS: dict[tuple[Any, ...], _Product | None] = {}


def expected_buffers(operand: Operand | None) -> Expected:
    """What a call must bring of an operand."""
    if operand is None:
        return ()
    return tuple((size, dtype) for _, _, size, dtype in operand.site.slots)


def addresses(buffers: Sequence[Tensor], expected: Expected) -> list[int] | None:
    """Where buffers are; None where one is not that of a whole tensor."""
    found = []
    for buffer, (size, dtype) in zip(buffers, expected, strict=False):
        if (
            buffer.shape != size
            or buffer.dtype is not dtype
            or not (buffer.is_cpu and buffer.is_contiguous())
        ):
            return None
        found.append(buffer.data_ptr())
    return found


def product_sizes(a_shape: Shape, b_shape: Shape, layout: str) -> tuple[int, int, int]:
    """M, N and K of a product of matrices."""
    m, k = (a_shape[1], a_shape[0]) if layout == "NT" else (a_shape[0], a_shape[1])
    return m, b_shape[0] if layout == "TN" else b_shape[1], k


def multiply_(
    out: Tensor,
    a: Sequence[Tensor],
    a_quantizer: str,
    a_shape: Shape,
    b: Sequence[Tensor],
    b_quantizer: str,
    b_shape: Shape,
    layout: str,
    bias: Tensor | None,
) -> bool:
    """The fill of ``gemm`` for small matrices on a CPU; False, with nothing written, for others."""
    if bias is not None and not (bias.ndim == 1 and bias.is_cpu and bias.is_contiguous()):
        return False
    added = None if bias is None else (bias.dtype, bias.shape[0])
    left, right = (
        (a_quantizer, tuple(a_shape), a[0].dtype),
        (b_quantizer, tuple(b_shape), b[0].dtype),
    )
    key = (*left, *right, layout, out.dtype, added)
    try:
        found = _PRODUCTS[key]
    except KeyError:
        found = remember(_PRODUCTS, key, _new_product(left, right, layout, out.dtype, added))
    if found is None or not out.is_contiguous():
        return False
    a_at, b_at = addresses(a, found.a), addresses(b, found.b)
    if a_at is None or b_at is None:
        return False
    bias_at = () if bias is None else (bias.data_ptr(),)
    return found.program.run(*a_at, *b_at, out.data_ptr(), *bias_at)


def remember(known: dict[Any, Any], key: Any, value: Any) -> Any:
    if len(known) >= _MOST:
        known.clear()
    known[key] = value
    return value


def _new_product(
    left: tuple[str, tuple[int, ...], torch.dtype],
    right: tuple[str, tuple[int, ...], torch.dtype],
    layout: str,
    dtype: torch.dtype,
    bias: tuple[torch.dtype, int] | None,
) -> _Product | None:
    if len(left[1]) != 2 or len(right[1]) != 2 or not (left[0] or right[0]):
        return None
    sizes = product_sizes(left[1], right[1], layout)
    if not fits(*sizes) or dtype not in DTYPES or not available():
        return None
    if bias is not None and (bias[0] not in DTYPES or bias[1] != sizes[1]):
        return None
    builder = Builder()
    operands, expected = [], []
    for quantizer, shape, kind in (left, right):
        if not quantizer:
            if kind not in DTYPES:
                return None
            operands.append(Source(builder.given(), kind))
            expected.append(((torch.Size(shape), kind),))
            continue
        codec = parse(quantizer)
        site = serves(codec, shape)
        if site is None:
            return None
        operands.append(builder.operand(codec, site))
        expected.append(expected_buffers(operands[-1]))
    out = Source(builder.given(), dtype)
    added = None if bias is None else Source(builder.given(), bias[0])
    builder.multiply(*operands, Result(layout, sizes, out, added))
    return _Product(builder.build(), *expected)


def fits(m: int, n: int, k: int) -> bool:
    """Whether a product is small, and none whose sizes of 1 make ``torch.mm`` choose another routine."""
    return min(m, n, k) > 1 and max(m * n, n * k, m * k) <= SMALL
