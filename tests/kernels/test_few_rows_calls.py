"""Few rows: every way to call a product, strides of x, empty sizes, threads and scratch memory."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from typing import Any

import few_rows_oracle as oracle
import pytest
import torch
import torch.nn.functional as F
from few_rows_cases import quantized, same_bits
from native_cases import threads
from torch import Tensor

import qtensor
from benchmarks.memory import peak_mib
from qtensor.library.define import FILLS
from qtensor.library.native_ops import left_to_python, library
from qtensor.recipes import CustomRecipe

formats = pytest.mark.parametrize(
    "fmt", ["fp8", "fp8_rowwise", "fp8_blockwise", "mxfp8", "mxfp6", "mxfp4", "nvfp4"]
)
N, K = 130, 300

CALLS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "linear of a vector": lambda x, w: F.linear(x[0], w)[None],
    "mv": lambda x, w: torch.mv(w, x[0])[None],
    "w @ vector": lambda x, w: (w @ x[0])[None],
    "vector @ w.t()": lambda x, w: (x[0] @ w.t())[None],
    "x @ w.t()": lambda x, w: x @ w.t(),
    "w @ x.t()": lambda x, w: (w @ x.t()).t().contiguous(),
    "out=": lambda x, w: torch.mm(x, w.t(), out=torch.empty(len(x), N)),
    "strided out=": lambda x, w: torch.mm(x, w.t(), out=torch.empty(N, len(x)).t()).contiguous(),
}


@formats
def test_every_way_to_call(fmt: str):
    torch.manual_seed(0)
    w, x = quantized(N, K, fmt, {}), torch.randn(7, K)
    want = oracle.product(x, w)
    for name, call in CALLS.items():
        got = call(x, w)
        assert got.shape[1] == N, name
        same_bits(got, want[: len(got)])


@formats
def test_strides_of_x(fmt: str):
    torch.manual_seed(1)
    w = quantized(N, K, fmt, {})
    strided = {
        "columns": torch.randn(K, 7).t(),
        "every second": torch.randn(7, 2 * K)[:, ::2],
        "one row for all": torch.randn(1, K).expand(7, K),
        "one value a row": torch.randn(7, 1).expand(7, K),
        "not aligned": torch.randn(7, K + 1)[:, 1:],
    }
    for name, x in strided.items():
        assert x.data_ptr() % 8 or x.stride() != (K, 1), name
        same_bits(F.linear(x, w), oracle.product(x.clone(), w))
    batch = torch.randn(7, 2, K).transpose(0, 1)
    got = qtensor.gemm(batch, w, "TN")
    same_bits(got, oracle.product(batch.reshape(-1, K), w).view(2, 7, N))
    same_bits(F.linear(batch, w), got)


@formats
def test_empty_sizes(fmt: str):
    torch.manual_seed(2)
    w, x, bias = quantized(N, K, fmt, {}), torch.randn(3, K), torch.randn(N)
    assert F.linear(torch.empty(0, K), w).shape == (0, N)
    assert F.linear(torch.empty(2, 0, K), w).shape == (2, 0, N)
    no_columns = qtensor.quantize(torch.randn(N, 0), fmt)
    assert torch.equal(F.linear(torch.empty(3, 0), no_columns), torch.zeros(3, N))
    assert torch.equal(F.linear(torch.empty(3, 0), no_columns, bias), bias.expand(3, N))
    assert F.linear(x, qtensor.quantize(torch.randn(0, K), fmt)).shape == (3, 0)


def test_calls_from_several_threads():
    """Python threads share kernels and scratch memory; each product uses two threads of its own."""
    torch.manual_seed(3)
    names = ("mxfp4", "nvfp4", "fp8", "mxfp8", "fp8_blockwise")
    weights = [quantized(72, 512, fmt, {}) for fmt in names]
    lefts = [torch.randn(rows, 512).bfloat16() for rows in (1, 3, 17, 64)]
    want = {
        (i, j): oracle.product(x, w).bfloat16()
        for i, w in enumerate(weights)
        for j, x in enumerate(lefts)
    }
    wrong: list[str] = []

    def work(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(40):
            i, j = choose.choice(list(want))
            if not torch.equal(F.linear(lefts[j], weights[i]), want[i, j]):
                wrong.append(f"{names[i]}, {len(lefts[j])} rows")

    with threads(2):
        workers = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert not wrong


@pytest.mark.parametrize(
    ("weight", "left"),
    [("nvfp4", "mxfp8"), ("mxfp4", "mxfp4"), ("mxfp4", "fp8_rowwise"), ("mxfp8", "mxfp8")],
)
def test_both_quantized_by_a_recipe(weight: str, left: str):
    """The layers of a recipe with 4 or 8 bits for each operand have the oracle's sums."""
    torch.manual_seed(4)
    formats_of = {"weight": weight, "input": left}
    recipe = CustomRecipe(
        factory=lambda role: formats_of.get(role.tensor), backward_override="high_precision"
    )
    layer = qtensor.Linear(256, 512, bias=False, recipe=recipe)
    x = torch.randn(3, 256)
    stored, own = qtensor.quantize(x, left), None
    values = stored.dequantize(torch.float32)
    if left == "fp8_rowwise":
        own = stored._scale_inv
        values = torch.from_numpy(
            oracle.narrow_values(stored._data.view(torch.uint8).numpy(), "e4m3")
        )
    want = oracle.product(values, qtensor.quantize(layer.weight.detach(), weight), own=own)
    with torch.no_grad():
        same_bits(layer(x), want)


@pytest.mark.parametrize("in_cpp", [True, False])
@pytest.mark.parametrize("fmt", ["fp8", "fp8_rowwise", "fp8_blockwise", "mxfp8"])
def test_both_quantized_batches(fmt: str, in_cpp: bool, monkeypatch: pytest.MonkeyPatch):
    """Each row has the sums that it has beside any other rows, in Python and in C++."""
    torch.manual_seed(5)
    if in_cpp and library() is not None:
        monkeypatch.setitem(FILLS, "gemm", lambda *_: pytest.fail("the Python kernel"))
    w, x = (qtensor.quantize(torch.randn(3, rows, 160), fmt) for rows in (128, 5))
    with contextlib.nullcontext() if in_cpp else left_to_python():
        got = qtensor.gemm(x, w, "TN", dtype=torch.float32)
    for i in range(3):
        own, values = None, x[i].dequantize(torch.float32)
        if "block" not in fmt and not fmt.startswith("mx"):
            own = x[i]._scale_inv
            values = torch.from_numpy(
                oracle.narrow_values(x._data[i].view(torch.uint8).numpy(), "e4m3")
            )
        same_bits(got[i], oracle.product(values, w[i].clone(), own=own))


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4", "fp8", "mxfp8"])
def test_scratch_memory(fmt: str):
    """A call needs the result and one bfloat16 copy of x, whatever the size of the weight."""
    n, k, rows = 16384, 4096, 16
    small, weight = (
        qtensor.quantizer(fmt).make_empty((size, k), dtype=torch.bfloat16) for size in (64, n)
    )
    for buffer in (*small.buffers(), *weight.buffers()):
        buffer.zero_()
    x = torch.ones(rows, k, dtype=torch.bfloat16)
    limit = (rows * n + rows * k) * 2 / 2**20 + 0.5
    assert weight.nbytes / 2**20 > 10 * limit
    with threads(2):
        F.linear(x, small)
        # Other threads of the process may take memory meanwhile.
        assert min(peak_mib(lambda: F.linear(x, weight)) for _ in range(3)) < limit
