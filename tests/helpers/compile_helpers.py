"""Helpers of the compile tests: a compiler that counts graphs, inputs, comparison by bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config
from formats import FormatCase, assert_same_bytes, assert_same_tensor
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

import qtensor

# The cache on disk would serve graphs that another state of the library has lowered.
torch._functorch.config.enable_autograd_cache = False

BACKENDS = ["aot_eager", "inductor"]
backends = pytest.mark.parametrize("backend", BACKENDS)

INDUCTOR_FORMATS = ("fp8_delayed", "fp8_blockwise", "mxfp6", "nvfp4")
"""One of each kind of layout: state in, float32 factors in a grid, packed triples, tensor-wide
factor and nibbles.
"""

GENERAL_SHAPE = (33, 72)
"""Ragged against every block (16, 32, 128)."""


class Compiled:
    """A function that a fresh compiler compiles in one piece. It counts the graphs."""

    def __init__(self, function: Callable[..., Any], backend: str = "aot_eager", **options: Any):
        torch._dynamo.reset()
        counters.clear()
        self.counter = CompileCounterWithBackend(backend)
        self.function = torch.compile(function, backend=self.counter, fullgraph=True, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    @property
    def graphs(self) -> int:
        """The number of graphs that the backend has compiled so far."""
        return self.counter.frame_count

    def check_graphs(self, expected: int) -> None:
        """Assert ``expected`` graphs, each of a whole frame, by the backend's and Dynamo's
        counts."""
        assert self.graphs == expected, (
            f"{self.graphs} graphs, wanted {expected}; {recompile_reasons()}"
        )
        assert counters["stats"]["unique_graphs"] == expected
        assert not counters["graph_break"], dict(counters["graph_break"])


def recompile_reasons() -> str:
    """Return Dynamo's counters as text for messages."""
    return str({k: dict(v) for k, v in counters.items() if k in ("frames", "graph_break", "stats")})


def assert_same(got: Any, want: Any) -> None:
    """Assert equal structure and bytes of plain tensors, quantized tensors and collections."""
    got_leaves, got_spec = pytree.tree_flatten(got)
    want_leaves, want_spec = pytree.tree_flatten(want)
    assert got_spec == want_spec, f"{got_spec}, wanted {want_spec}"
    for i, (a, b) in enumerate(zip(got_leaves, want_leaves, strict=True)):
        if isinstance(b, qtensor.QuantizedTensor):
            assert_same_tensor(a, b)
        elif isinstance(b, Tensor):
            assert not isinstance(a, qtensor.QuantizedTensor), (
                f"leaf {i}: {a!r}, wanted a plain tensor"
            )
            assert_same_bytes(a, b, f"leaf {i}")
        else:
            assert a == b, f"leaf {i}"


def adversarial(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Normal values of many sizes, with zeros, signed zeros, subnormals, the largest finite values,
    infs and NaN.

    The bad values sit in some rows, so that blocks with and without them are both there.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(torch.randint(-20, 8, (*shape[:-1], 1), generator=generator).float())
    x = x.to(dtype)
    finfo = torch.finfo(dtype)
    rows = x.view(-1, shape[-1])
    specials = [0.0, -0.0, finfo.tiny, -finfo.tiny / 4, finfo.max, finfo.min, 6.0, 448.0, 0.5]
    for row, value in enumerate(specials):
        rows[row % len(rows), row % shape[-1] :: 5] = value
    rows[len(rows) // 2] = 0.0
    rows[-1, 0] = torch.nan
    rows[-2, -1] = torch.inf
    rows[-3, 1] = -torch.inf
    return x


def ordinary(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return normal values; each row has another size."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(
        torch.randint(-6, 6, (*shape[:-1], 1)[: len(shape)], generator=generator).float()
    )
    return x.to(dtype)


def quantizers(case: FormatCase) -> list[qtensor.Quantizer]:
    """Return each option on its own with both usages, and the defaults with one usage as well."""
    one = [case.quantizer(), case.quantizer(rowwise=False, columnwise=True)]
    return one + [case.quantizer(columnwise=True, **options) for options in case.each_option()]


def seeded(quantizer: qtensor.Quantizer, seed: Tensor) -> dict[str, Tensor]:
    """Return a ``generator=`` argument for quantizers that draw random bytes."""
    return {"generator": seed} if quantizer.stochastic_rounding else {}
