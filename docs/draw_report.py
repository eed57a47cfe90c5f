"""Draw docs/report_light.png and docs/report_dark.png: the top of a report, in Chromium.

``python docs/draw_report.py`` needs the extra browser, and Chromium.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

import qtensor

FOLDER = Path(__file__).parent
WIDTH, BLOCKS = 256, 16


def weights() -> dict[str, Tensor]:
    """Return random weights of a small model; those of down_proj have an outlier channel."""
    torch.manual_seed(0)
    found = {}
    for block in range(BLOCKS):
        for part in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
            weight = torch.randn(WIDTH, WIDTH) * 0.02
            if part == "down_proj":
                weight[:, 3] *= 10 + 4 * block
            found[f"layers.{block}.{part}.weight"] = weight
    return found


def main() -> int:
    """Write both pictures."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - an extra

    program = shutil.which("chromium")
    if program is None:
        print("draw_report: needs chromium", file=sys.stderr)
        return 1
    originals = weights()
    quantized = {
        name: qtensor.quantize(weight, "mxfp8" if "o_proj" in name else "nvfp4")
        for name, weight in originals.items()
    }
    page = Path(tempfile.mkdtemp()) / "report.html"
    qtensor.model_report(quantized, against=originals).save(page)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            size = {"width": 1000, "height": 640}
            opened = browser.new_page(color_scheme=scheme, viewport=size)  # type: ignore[arg-type]
            opened.goto(page.as_uri())
            opened.screenshot(path=FOLDER / f"report_{scheme}.png")
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
