"""Draw docs/formats.png: one weight with an outlier in three formats, and the error of each.

``python docs/draw_formats.py`` needs the extra plot.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from matplotlib.colors import SymLogNorm
from matplotlib.figure import Figure
from torch import Tensor

import qtensor

ROWS, COLS = 16, 64
PANELS = (
    ("fp8 for the whole tensor", "fp8", None),
    ("mxfp4: a factor for 32 values", "mxfp4", 32),
    ("nvfp4: a factor for 16 values", "nvfp4", 16),
)


def weight() -> Tensor:
    """Return normal values (16, 64) with smooth sizes of columns, and one outlier."""
    torch.manual_seed(0)
    sizes = 0.02 * (1 + 0.5 * torch.sin(torch.arange(COLS) / 5))
    found = torch.randn(ROWS, COLS) * sizes
    found[7, 37] = 0.6
    return found


def draw(panel: Any, values: Tensor, norm: Any, colors: str, block: int | None) -> Any:
    """Draw values (16, 64) as a heat map with the borders of blocks."""
    image = panel.imshow(values, norm=norm, cmap=colors, aspect="auto", interpolation="nearest")
    for edge in range(block, COLS, block) if block else ():
        panel.axvline(edge - 0.5, color="black", linewidth=0.8)
    panel.set_xticks([])
    panel.set_yticks([])
    return image


def main() -> int:
    """Write the picture."""
    x = weight()
    figure = Figure(figsize=(9, 6.2), layout="constrained", facecolor="white")
    panels = figure.subplots(4, 2)
    values = SymLogNorm(0.01, vmin=-0.6, vmax=0.6)
    errors = SymLogNorm(0.002, vmin=-0.05, vmax=0.05)
    image = draw(panels[0][0], x, values, "RdBu_r", None)
    panels[0][0].set_title("weight in float32, with one outlier of 0.6", fontsize=10)
    panels[0][1].axis("off")
    for (title, fmt, block), (left, right) in zip(PANELS, panels[1:], strict=True):
        q = qtensor.quantize(x, fmt)
        report = qtensor.error_report(x, q)
        draw(left, q.dequantize(), values, "RdBu_r", block)
        error = draw(right, q.dequantize() - x, errors, "PuOr", block)
        left.set_title(title, fontsize=10)
        right.set_title(f"error: SQNR {report.sqnr_db:.1f} dB", fontsize=10)
    figure.colorbar(image, ax=panels[:, 0], shrink=0.5, label="value")
    figure.colorbar(error, ax=panels[:, 1], shrink=0.5, label="error")
    figure.savefig(Path(__file__).with_name("formats.png"), dpi=110)
    return 0


if __name__ == "__main__":
    sys.exit(main())
