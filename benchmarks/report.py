"""Results as data and as a document: rows of named values, and the columns that show them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine

Row = dict[str, Any]
"""Values by column key, and others (quartiles) without a column. None: not measured."""


@dataclass(frozen=True)
class Column:
    """One column of the tables."""

    key: str
    title: str
    digits: int | None = None
    """Digits after the decimal point; None for text."""
    percent: bool = False

    def show(self, row: Row) -> str:
        """Return the cell's text; empty for None."""
        value = row.get(self.key)
        if value is None:
            return ""
        if self.percent:
            return f"{100 * value:.{self.digits or 0}f}%"
        return f"`{value}`" if self.digits is None else f"{value:.{self.digits}f}"


@dataclass(frozen=True)
class Report:
    """The results of one benchmark."""

    name: str
    """Stem of the file names."""
    title: str
    text: str
    """Markdown that explains the measurement and the columns."""
    environment: Mapping[str, Any]
    columns: tuple[Column, ...]
    groups: tuple[str, ...]
    """Keys that divide the rows into tables; their values are the heading."""
    rows: tuple[Row, ...]
    absent: tuple[str, ...] = ()
    """Cases that were not measured, with the reason."""


def to_json(report: Report) -> str:
    """Return everything as JSON, for ``from_json``."""
    return json.dumps(dataclasses.asdict(report), indent=1) + "\n"


def from_json(text: str) -> Report:
    """Return the report that ``to_json`` wrote."""
    data = json.loads(text)
    data["columns"] = tuple(Column(**column) for column in data["columns"])
    for key in ("groups", "rows", "absent"):
        data[key] = tuple(data[key])
    return Report(**data)


def markdown(report: Report) -> str:
    """Return the document: environment, a table for each group, missing cases."""
    lines = [f"# {report.title}", "", machine.sentence(report.environment), "", report.text, ""]
    for heading, rows in _grouped(report):
        lines += [f"## {heading}", ""] if heading else []
        lines += [*table(report.columns, rows), ""]
    if report.absent:
        lines += [
            "Not measured, or measured with a substitute:",
            "",
            *(f"- {text}" for text in report.absent),
            "",
        ]
    lines += [f"Written by `python -m benchmarks.{report.name}`.", ""]
    return "\n".join(lines)


def table(columns: Sequence[Column], rows: Sequence[Row]) -> list[str]:
    """Return a table as lines of Markdown, without columns that are empty in all rows."""
    shown = [column for column in columns if any(column.show(row) for row in rows)]
    align = ("---" if column.digits is None and not column.percent else "---:" for column in shown)
    lines = [_line(column.title for column in shown), f"|{'|'.join(align)}|"]
    return [*lines, *(_line(column.show(row) for column in shown) for row in rows)]


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def _grouped(report: Report) -> Iterator[tuple[str, list[Row]]]:
    """Yield (heading, rows) in the order in which the groups first appear."""
    tables: dict[str, list[Row]] = {}
    for row in report.rows:
        tables.setdefault(", ".join(str(row[key]) for key in report.groups), []).append(row)
    yield from tables.items()


def data_path(folder: Path, name: str, quick: bool, here: Mapping[str, Any]) -> Path:
    """Return the JSON file of a machine's results; the Markdown is beside it.

    Args:
        folder: of the results.
        name: of the benchmark.
        quick: a quick run never overwrites a full one.
        here: an environment. ``NAME_cpu`` has the results of the first machine; every other one has
            a file that ends in the machine, so that no file mixes or loses results.
    """
    end = "_quick.json" if quick else ".json"
    first = folder / f"{name}_cpu{end}"
    if not first.exists() or machine.is_same(_environment(first), here):
        return first
    return folder / f"{name}_cpu_{machine.slug(here)}{end}"


def _environment(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())["environment"]
    return found


def write(report: Report, folder: Path, quick: bool) -> Path:
    """Write JSON and Markdown files, and return the path of the Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    path = data_path(folder, report.name, quick, report.environment)
    path.write_text(to_json(report))
    path.with_suffix(".md").write_text(markdown(report))
    return path.with_suffix(".md")


def read(path: Path) -> Report:
    """Read a JSON file that ``write`` wrote."""
    return from_json(path.read_text())
