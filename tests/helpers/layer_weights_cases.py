"""Calls of the ops ``convolution`` and ``used_rows``, for the tests of all ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from formats import FormatCase

Sample = tuple[tuple[Any, ...], dict[str, Any]]


def convolution(case: FormatCase) -> Iterator[Sample]:
    q = case.quantizer()
    weight, call = case.quantize(torch.randn(8, 36)).buffers(), ([1], [0], [1])
    x, bias = torch.randn(2, 4, 5, 6), torch.randn(8)
    sizes = ([8, 36], [8, 4, 3, 3])
    yield (x, weight, q.canonical, *sizes, bias, *call, False, [0], 1), {}
    last = x.bfloat16().to(memory_format=torch.channels_last)
    steps = ([2, 1], [1, 1], [1, 2], False, [0, 0], 1)
    yield (last, weight, q.canonical, *sizes, None, *steps), {}
    steps = ([2], [1], [1], True, [1], 2)
    turned = torch.randn(2, 8, 5)
    yield (turned, weight, q.canonical, [8, 36], [8, 12, 3], None, *steps), {}


def used_rows(case: FormatCase) -> Iterator[Sample]:
    q = case.quantizer()
    table = case.quantize(torch.randn(40, 48)).buffers()
    for index in (torch.tensor([3, 7, 3, 39]), torch.tensor([[1, 0], [2, 1]], dtype=torch.int32)):
        yield (table, q.canonical, [40, 48], index, 3, torch.bfloat16), {}
    yield (table, q.canonical, [40, 48], torch.empty(0, dtype=torch.int64), -1, torch.float32), {}


def quantized(
    make: Any, rows: int, columns: int, turned: bool = False
) -> tuple[list[torch.Tensor], str]:
    """Return the buffers and the text of a quantized matrix (rows, columns), or its transpose."""
    shape, canonical = (columns, rows) if turned else (rows, columns), ""
    while not canonical:
        weight, canonical = make.operand(*shape, columnwise=False)
    return weight, canonical


def _make_convolution(make: Any) -> dict[str, Any]:
    rank, groups = make.random.choice((1, 2, 3)), make.groups
    kernel = [make.random.choice((1, 2, 3)) for _ in range(rank)]
    size = [8 * groups, make.random.choice((1, 4, 16)), *kernel]
    transposed = make.random.random() < 0.3
    channels = size[0] if transposed else size[1] * groups
    shape = [size[0], torch.Size(size[1:]).numel()]
    weight, canonical = quantized(make, *shape)
    return {
        "x": make.floats(2, channels, *[6] * rank, dtype=torch.float32),
        **{"weight": weight, "weight_quantizer": canonical, "weight_shape": shape, "size": size},
        "bias": make.maybe(make.floats(size[1] * groups if transposed else size[0]).float()),
        **{"stride": [1], "padding": [1] * rank, "dilation": [1] * rank},
        **{"transposed": transposed, "output_padding": [0] * rank, "groups": groups},
    }


def _make_used_rows(make: Any) -> dict[str, Any]:
    weight, canonical = quantized(make, make.rows, make.columns)
    index = torch.randint(make.rows, (2, 5), generator=make.generator)
    return {
        **{"weight": weight, "weight_quantizer": canonical},
        "weight_shape": [make.rows, make.columns],
        **{"indices": index, "padding": make.random.choice((-1, 0)), "dtype": make.dtype},
    }


MAKERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "convolution": _make_convolution,
    "used_rows": _make_used_rows,
}
"""Op -> a function that makes the arguments of a valid call by a ``Maker``."""
