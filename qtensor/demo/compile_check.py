"""Pass quantized tensors into and out of a compiled function, and count graphs and equal bytes."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo as dynamo
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters
from torch._inductor.exc import InductorError

import qtensor
from qtensor import QuantizedTensor
from qtensor.core.errors import fail
from qtensor.demo.sweep import call_options

BATCHES = (8, 24, 40)
"""Batch sizes of the calls of one compiled function; one graph must serve all of them."""
_ENOUGH = 32
"""Rows and columns of at least one whole block of every MX format."""


@dataclass(frozen=True)
class CompileResult:
    """One format in and out of ``torch.compile(fullgraph=True)``."""

    format: str
    matrix: str
    """Name of the weight that was passed in."""
    backend: str
    batches: tuple[int, ...]
    graphs: int
    graph_breaks: int
    bytes_equal: int
    bytes_total: int
    seconds: float

    @property
    def ok(self) -> bool:
        """True if there was one graph, no break, and every byte equals eager."""
        whole = self.graphs == 1 and self.graph_breaks == 0
        return whole and self.bytes_equal == self.bytes_total > 0


def pick_matrix(weights: Mapping[str, Tensor]) -> str:
    """Return the name of the smallest matrix with at least 32 rows and columns, or of the smallest.

    Compiling takes the same time for every size, and a small matrix keeps the other calls fast.
    """
    big = {name: weight for name, weight in weights.items() if min(weight.shape) >= _ENOUGH}
    candidates = big or weights
    return min(candidates, key=lambda name: candidates[name].numel())


def cross(
    weight: QuantizedTensor, x_hp: Tensor, fmt: str, options: dict[str, Tensor]
) -> tuple[Any, Any]:
    """Return a weight (N, K) unchanged, and ``x_hp @ weight.T`` (M, N), both quantized."""
    return weight.detach(), qtensor.quantize(F.linear(x_hp, weight), fmt, **options)


def check_compile(name: str, weight: Tensor, fmt: str, backend: str) -> CompileResult:
    """Run ``cross`` in eager and compiled code for all ``BATCHES``, and compare all buffers."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(m, weight.shape[1], generator=generator) for m in BATCHES]
    inputs = [x.to(weight.dtype) for x in inputs]
    quantized = qtensor.quantize(weight, fmt, **call_options(weight, fmt))
    options = call_options(F.linear(inputs[0], weight), fmt)
    graphs = equal = total = 0

    def counting(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return lookup_backend(backend)(graph, examples)

    dynamo.reset()
    counters.clear()
    compiled = torch.compile(cross, fullgraph=True, backend=counting)
    start = time.perf_counter()
    for x in inputs:
        dynamo.mark_dynamic(x, 0)
        expected = cross(quantized, x, fmt, options)
        try:
            actual = compiled(quantized, x, fmt, options)
        except (TorchDynamoException, InductorError) as error:
            rule = "the function must compile as one graph"
            fix = "Run with --no-compile, or with the other --backend"
            fail(f"demo[{fmt}]", rule, f"{type(error).__name__}: {error}", fix)
        total += sum(one.nbytes for one in expected)
        equal += sum(map(equal_bytes, expected, actual))
    breaks, seconds = sum(counters["graph_break"].values()), time.perf_counter() - start
    return CompileResult(fmt, name, backend, BATCHES, graphs, breaks, equal, total, seconds)


def equal_bytes(expected: QuantizedTensor, actual: Tensor) -> int:
    """Return the number of equal bytes of two tensors, 0 if one is plain or has another layout."""
    if not isinstance(actual, QuantizedTensor) or _layout(expected) != _layout(actual):
        return 0
    pairs = zip(expected.buffers(), actual.buffers(), strict=True)
    return sum(int((_bytes(one) == _bytes(other)).sum()) for one, other in pairs)


def _layout(q: QuantizedTensor) -> tuple[object, ...]:
    buffers = [(buffer.shape, buffer.dtype) for buffer in q.buffers()]
    return type(q), q.shape, q.dtype, q.__tensor_flatten__(), buffers


def _bytes(buffer: Tensor) -> Tensor:
    return buffer.contiguous().reshape(-1).view(torch.uint8)
