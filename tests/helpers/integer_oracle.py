"""Integer products in the order of docs/numerics.md, block by block in numpy.

It shares no code with the kernels: codes and factors are decoded from the stored bytes here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from few_rows_oracle import Array, fused, narrow_values, unpacked
from torch import Tensor


def _factor_codes(stored: Array, quantizer: Any, across: bool, lines: int, blocks: int) -> Array:
    """Codes (lines, blocks) of the factors of blocks."""
    line, block = np.arange(lines)[:, None], np.arange(blocks)[None, :]
    if quantizer.scale_layout.startswith("swizzled"):
        tiles = -(-blocks // 4)
        tile = line // 128 * tiles + block // 4
        at = tile * 512 + line % 32 * 16 + line // 32 % 4 * 4 + block % 4
        return stored.reshape(-1)[at]
    return stored[block, line] if across else stored[line, block]


def lines(q: Any, columnwise: bool) -> tuple[Array, Array, Array]:
    """Return values (lines, K), factors (lines, blocks) and factors that follow the sums."""
    quantizer, side = q.quantizer, "_columnwise" if columnwise else "_rowwise"
    element, block = quantizer.element.name, quantizer.spec.block[1]
    each = 2 if element == "e2m1" else 4 if getattr(quantizer, "packed", False) else 1
    codes = getattr(q, f"{side}_data").view(torch.uint8).numpy()
    rows = int(np.prod(q.shape[:-1]))
    across = columnwise and block == 32
    count, length = (q.shape[-1], rows) if columnwise else (rows, q.shape[-1])
    codes = codes.T if across else codes.reshape(count, -1)
    values = narrow_values(unpacked(np.ascontiguousarray(codes), length, each), element)
    stored = getattr(q, f"{side}_scale_inv").view(torch.uint8).numpy()
    found = _factor_codes(stored, quantizer, across, count, -(-length // block))
    if block == 16:
        amax = getattr(q, f"_amax{side}").numpy().reshape(-1)
        own = amax / np.float32(6.0 * quantizer.e4m3_max)
        return values, narrow_values(found, "e4m3"), own
    powers = np.where(found == 255, np.nan, np.exp2(found.astype(np.float64) - 127))
    return values, powers.astype(np.float32), np.ones(0, np.float32)


def product(a: Any, b: Any, layout: str, bias: Tensor | None = None) -> Tensor:
    """Return the product as float32 (M, N), to be rounded to the dtype of a result."""
    left, a_factors, a_own = lines(a, layout == "NT")
    right, b_factors, b_own = lines(b, layout != "TN")
    block = a.quantizer.spec.block[1]
    total = np.zeros((len(left), len(right)), np.float32)
    with np.errstate(all="ignore"):
        for i in range(a_factors.shape[1]):
            part = slice(i * block, (i + 1) * block)
            # Sums of 32 products of small multiples of 1/8 are exact in float64 and in float32.
            exact = left[:, part].astype(np.float64) @ right[:, part].astype(np.float64).T
            scaled = exact.astype(np.float32) * b_factors[None, :, i]
            total = fused(scaled, np.broadcast_to(a_factors[:, None, i], scaled.shape), total)
        if len(a_own):
            total = total * (a_own[:, None] * b_own[None, :])
        if bias is not None:
            total = total + bias.float().numpy()
    return torch.from_numpy(np.ascontiguousarray(total))
