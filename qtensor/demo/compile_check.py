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
from qtensor.demo.report import CompileResult
from qtensor.demo.sweep import call_options
from qtensor.errors import check, fail

BACKENDS = ("aot_eager", "inductor")
BATCHES = (8, 24, 40)
"""Batch sizes of the calls of one compiled function; one graph must serve all of them."""
_ENOUGH = 32
"""Rows and columns of at least one whole block of every MX format."""


@dataclass
class CountingBackend:
    """A compiler backend that counts the graphs that it compiles."""

    name: str
    graphs: int = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        """Count the graph and compile it with the backend ``name``."""
        self.graphs += 1
        return lookup_backend(self.name)(graph, inputs)


def check_backend(name: str) -> None:
    """Check that the demo supports a backend.

    Raises:
        QTensorError: ``name`` is not in ``BACKENDS``.
    """
    check(
        name in BACKENDS,
        op="demo",
        rule="--backend must be a backend of torch.compile that the demo counts graphs in",
        got=f"'{name}'",
        fix=f"Choose from {', '.join(BACKENDS)}, or --no-compile",
    )


def pick_matrix(weights: Mapping[str, Tensor]) -> str:
    """Return the name of the smallest matrix with at least 32 rows and columns.

    If there is none, return that of the smallest matrix.

    Compiling takes the same time for every size, and a small matrix keeps the other calls fast.
    """
    big = {name: weight for name, weight in weights.items() if min(weight.shape) >= _ENOUGH}
    candidates = big or weights
    return min(candidates, key=lambda name: candidates[name].numel())


def cross(
    weight: QuantizedTensor, x_hp: Tensor, fmt: str, options: dict[str, Tensor]
) -> tuple[Any, Any]:
    """Return a quantized weight unchanged, and a quantized product that is made inside.

    Args:
        weight: (N, K) quantized.
        x_hp: (M, K) float.
        fmt: format of the result.
        options: further arguments of ``qtensor.quantize`` for this format.

    Returns:
        The weight (N, K) and ``x_hp @ weight.T`` (M, N), both quantized.
    """
    return weight.detach(), qtensor.quantize(F.linear(x_hp, weight), fmt, **options)


def check_compile(name: str, weight: Tensor, fmt: str, backend: str) -> CompileResult:
    """Run ``cross`` in eager and compiled code for all ``BATCHES``, and compare all buffers.

    Args:
        name: name of the weight, for the report.
        weight: (N, K) float.
        fmt: a name of ``qtensor.formats()``.
        backend: one of ``BACKENDS``.

    Raises:
        QTensorError: the function did not compile as one graph.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(m, weight.shape[1], generator=generator) for m in BATCHES]
    inputs = [x.to(weight.dtype) for x in inputs]
    quantized = qtensor.quantize(weight, fmt, **call_options(weight, fmt))
    options = call_options(F.linear(inputs[0], weight), fmt)
    counting = CountingBackend(backend)
    dynamo.reset()
    counters.clear()
    compiled = torch.compile(cross, fullgraph=True, backend=counting)
    start = time.perf_counter()
    equal = total = 0
    for x in inputs:
        dynamo.mark_dynamic(x, 0)
        expected = cross(quantized, x, fmt, options)
        actual = _call(compiled, quantized, x, fmt, options)
        for one, other in zip(expected, actual, strict=True):
            same, size = compare_bytes(one, other)
            equal, total = equal + same, total + size
    return CompileResult(
        format=fmt,
        matrix=name,
        backend=backend,
        batches=BATCHES,
        graphs=counting.graphs,
        graph_breaks=sum(counters["graph_break"].values()),
        bytes_equal=equal,
        bytes_total=total,
        seconds=time.perf_counter() - start,
    )


def _call(
    compiled: Callable[..., tuple[Any, Any]], *args: Tensor | str | dict[str, Tensor]
) -> tuple[Any, Any]:
    """Call a compiled function, and turn compiler errors into a ``QTensorError``."""
    try:
        return compiled(*args)
    except (TorchDynamoException, InductorError) as error:
        fail(
            op=f"demo[{args[2]}]",
            rule="the function must compile as one graph",
            got=f"{type(error).__name__}: {error}",
            fix="Run with --no-compile, or with the other --backend",
        )


def compare_bytes(expected: QuantizedTensor, actual: Tensor) -> tuple[int, int]:
    """Compare two quantized tensors buffer by buffer.

    Returns:
        (equal bytes, expected bytes). No byte is equal if ``actual`` is a plain tensor or differs
        in class, flatten context, buffer name, shape or dtype.
    """
    total = sum(buffer.nbytes for buffer in _buffers(expected).values())
    if not isinstance(actual, QuantizedTensor) or _layout(expected) != _layout(actual):
        return 0, total
    others = _buffers(actual)
    pairs = ((buffer, others[name]) for name, buffer in _buffers(expected).items())
    return sum(int((_bytes(one) == _bytes(other)).sum()) for one, other in pairs), total


def _layout(q: QuantizedTensor) -> tuple[object, ...]:
    _, context = q.__tensor_flatten__()
    inner = [(name, buffer.shape, buffer.dtype) for name, buffer in _buffers(q).items()]
    return type(q), q.shape, q.dtype, context, inner


def _buffers(q: QuantizedTensor) -> dict[str, Tensor]:
    names, _ = q.__tensor_flatten__()
    return {name: getattr(q, name) for name in names}


def _bytes(buffer: Tensor) -> Tensor:
    return buffer.contiguous().reshape(-1).view(torch.uint8)
