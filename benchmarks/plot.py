"""Plot the throughput of each format and the copy bandwidth from existing results.

``python -m benchmarks.plot [--quick] [--output DIR]``
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks import machine, report
from benchmarks.report import Report, Row
from benchmarks.settings import RESULTS

PANELS = (
    ("quantize", "Quantize: bfloat16 in, outputs reused", "input, GB/s"),
    ("dequantize", "Dequantize: bfloat16 out, output reused", "output, GB/s"),
)
DTYPE = "bfloat16"
BAR, FLOOR, LINE = "#4477aa", "#222222", "#cc3311"


def chosen(results: Report) -> tuple[str, list[Row]]:
    """Return the largest bfloat16 size, and its rows with rowwise data and default options."""
    rows = [row for row in results.rows if row["dtype"] == DTYPE and "(" not in row["case"]]
    size = max((row["size"] for row in rows), key=_elements, default="")
    return size, [row for row in rows if row["size"] == size]


def _elements(size: str) -> int:
    rows, cols = size.split("x")
    return int(rows) * int(cols)


def draw(panel: Any, results: Report, title: str, label: str) -> None:
    """Draw bars by format, with the bound of each as a mark and the copy as a line."""
    size, rows = chosen(results)
    names = [row["case"] for row in rows]
    panel.barh(names, [row["throughput_gbs"] for row in rows], color=BAR, label="measured")
    floors = [row["floor_gbs"] for row in rows]
    panel.plot(
        floors, names, "|", color=FLOOR, markersize=16, label="bytes that must move, at copy"
    )
    copies = sorted(row["copy_gbs"] for row in rows)
    if copies:
        panel.axvline(copies[len(copies) // 2], color=LINE, label="copy, read + written")
    widest = max([*floors, *copies, *(row["throughput_gbs"] for row in rows)], default=0)
    for name, row in zip(names, rows, strict=True):
        text = f" {row['throughput_gbs']:.2g}  ({100 * row['share']:.0f}%)"
        # Inside of the bar no mark hides the text, if the bar is long enough.
        inside = row["throughput_gbs"] > 0.25 * widest
        where, color = (0, "white") if inside else (row["throughput_gbs"], FLOOR)
        panel.text(where, name, text, va="center", fontsize=9, color=color)
    unmeasured = [
        case
        for case in dict.fromkeys(row["case"] for row in results.rows)
        if "(" not in case and case not in names
    ]
    left_out = f"\nnot measured at this size: {', '.join(unmeasured)}" if unmeasured else ""
    panel.set_title(f"{title}, {size}{left_out}", fontsize=10)
    panel.set_xlabel(label)
    panel.set_ylabel("format")
    panel.invert_yaxis()


def make(folder: Path, quick: bool) -> list[Path]:
    """Write a PNG and an SVG of this machine's results.

    Raises:
        FileNotFoundError: there are no results of either benchmark.
    """
    machine_here = machine.identity()
    found = {panel: report.data_path(folder, panel[0], quick, machine_here) for panel in PANELS}
    found = {panel: path for panel, path in found.items() if path.exists()}
    if not found:
        raise FileNotFoundError(
            f"no results of this machine in {folder}: run benchmarks.quantize first"
        )
    figure = Figure(figsize=(6 * len(found), 4.5), layout="constrained")
    reports = [report.read(path) for path in found.values()]
    for position, (results, (_, title, label)) in enumerate(zip(reports, found, strict=True)):
        draw(figure.add_subplot(1, len(found), position + 1), results, title, label)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
    here = reports[0].environment
    note = f"{here['cpu']}, {here['threads']} threads, torch {here['torch']}, {here['date']}"
    figure.suptitle(f"{note}, quick run" if quick else note, fontsize=9)
    (name, _, _), path = next(iter(found.items()))
    stem = path.stem.replace(name, "throughput", 1)
    paths = [folder / f"{stem}.{kind}" for kind in ("png", "svg")]
    with mpl.rc_context({"svg.hashsalt": "qtensor"}):
        # Opaque, so that the text can be read on a dark page as well.
        figure.savefig(paths[0], dpi=120, facecolor="white")
        figure.savefig(paths[1], facecolor="white", metadata={"Date": None})
    return paths


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the plot and print its path."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="from the results of a quick run")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    for path in make(options.output, options.quick):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
