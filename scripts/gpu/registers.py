"""Print registers, spills and occupancy of every Triton kernel, compiled here: no GPU is needed.

``python scripts/gpu/registers.py [--target 90] [--only WORD]``. The last column is the occupancy
that registers, shared memory and warps allow: the share of the warps that a multiprocessor holds.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/helpers"))

from triton_registers import FORMATS, WARPS, attention_usages, float_usages, usages


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=int, default=90, choices=sorted(WARPS))
    parser.add_argument("--only", default="", help="rows with this word in their name")
    options = parser.parse_args()
    rows = [
        (
            f"{name} {given or ''}",
            lambda name=name, given=given: usages(name, given, options.target),
        )
        for name, given in FORMATS
    ]
    rows += [
        ("norms, swiglu", lambda: float_usages(options.target)),
        ("attention, mxfp8", lambda: attention_usages(options.target)),
    ]
    print("| call | kernel | warps | registers | spilled | shared | occupancy |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for title, measure in rows:
        if options.only not in title:
            continue
        for usage in dict.fromkeys(measure()):
            share = f"{usage.occupancy(options.target):.0%}"
            print(
                f"| {title} | {usage.kernel} | {usage.warps} | {usage.registers} "
                f"| {usage.spilled} | {usage.shared} | {share} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
