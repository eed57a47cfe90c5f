"""Products of small integers by one kernel: sums are exact, and every bit of a result is known."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import ceil_div
from qtensor.cutlass_gemm.autotune import random_tensors
from qtensor.cutlass_gemm.launch import Kernel, Launcher, Tensors
from qtensor.cutlass_gemm.spec import KernelSpec

_E2M1 = (12, 10, 0, 2, 4)  # codes of -2, -1, 0, 1, 2
_FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def integer_codes(rows: int, k: int, element: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return codes (rows, K), two a byte for E2M1, of integers from -2 to 2; and the integers."""
    x = torch.randint(-2, 3, (rows, k), device=device)
    if element == "e2m1":
        codes = torch.tensor(_E2M1, dtype=torch.uint8, device=device)[x + 2]
        return codes[:, ::2] | codes[:, 1::2] << 4, x.double()
    return x.float().to(_FP8[element]).view(torch.uint8), x.double()


def _block_factors(
    spec: KernelSpec, given: Tensors, name: str, size: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return stored factors, 1 or 2 for each block, and those of the elements (rows, K).

    The padding, which must not count, is NaN.
    """
    rows, k = size
    block = 1 if name == "sfa" else spec.block[1]
    shape = ceil_div(rows, block), ceil_div(k, 128)
    grid = torch.randint(0, 2, shape, device=given.a.device).float() + 1
    stored = torch.full_like(getattr(given, name), float("nan"))
    part = grid.t() if block == 1 else grid
    stored[: part.shape[0], : part.shape[1]] = part
    spread = grid.repeat_interleave(block, 0)[:rows].repeat_interleave(128, 1)[:, :k]
    return stored, spread.double()


def check_kernel(
    kernel: Kernel,
    spec: KernelSpec,
    size: tuple[int, int, int],
    device: torch.device,
    processors: int | None = None,
) -> None:
    """Launch a kernel on (M, N, K), and compare every bit of its result.

    Codes, factors of blocks, rows and columns, the bias and the accumulation take part.

    Raises:
        AssertionError: a bit is wrong.
        QTensorError: the launch failed.
    """
    m, n, k = size
    torch.manual_seed(m + n + k)
    a, x = integer_codes(m, k, spec.a, device)
    b, y = integer_codes(n, k, spec.b, device)
    given = random_tensors(spec, size, device)
    factors = {}
    if spec.block:
        factors["sfa"], spread = _block_factors(spec, given, "sfa", (m, k))
        x = x * spread
        factors["sfb"], spread = _block_factors(spec, given, "sfb", (n, k))
        y = y * spread
    major_a, major_b = spec.majors
    scale_a = 2.0 ** torch.randint(-2, 3, (m,), device=device).float()
    scale_b = 2.0 ** torch.randint(-2, 3, (n,), device=device).float()
    bias = torch.randint(-8, 9, (n,), device=device).float()
    beta = 1.0 if spec.accumulates else 0.0
    out = torch.full_like(given.out, 3.0 if beta else float("nan"))
    tensors = dataclasses.replace(
        given,
        a=a if major_a == "k" else a.t().contiguous(),
        b=b if major_b == "k" else b.t().contiguous(),
        out=out,
        scale_a=scale_a,
        scale_b=scale_b,
        bias=bias,
        **factors,
    )
    Launcher(kernel, (1, *size), device, processors=processors)(tensors, beta)
    want = x @ y.t() * scale_a.double()[:, None] * scale_b.double() + bias.double() + 3.0 * beta
    wrong = int((out != want.to(out.dtype)).sum())
    assert not wrong, f"{spec.name}: {wrong} of {out.numel()} results are wrong"
