"""The result of ``convert_`` and ``revert_``: layers that were swapped or skipped."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass

from qtensor.core.texts import aligned

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_TITLES = ("layer", "in -> out", "count", "note")
_DENSE_TITLES = ("module", "class", "count", "share of the values, each")


@dataclass(frozen=True)
class LayerReport:
    """One linear layer of a model.

    Attributes:
        name: its path in the model. If it stands in several places, the path of the first.
        features: ``"64 -> 128"``: in_features and out_features.
        note: for a swapped layer, further changes; for a skipped layer, the reason.
    """

    name: str
    features: str
    note: str = ""


@dataclass(frozen=True, repr=False)
class Conversion:
    """The linear layers of a model after ``convert_`` or ``revert_``. Its repr is a table.

    Attributes:
        title: the conversion and its recipe.
        swapped: layers that were replaced, or got another recipe.
        skipped: unchanged layers; each note gives the reason.
        dense: every module with plain parameters of its own, linear or not; each note gives their
            share of the values of the model. ``quantize_`` alone lists them.
    """

    title: str
    swapped: tuple[LayerReport, ...]
    skipped: tuple[LayerReport, ...]
    dense: tuple[LayerReport, ...] = ()

    @property
    def heading(self) -> str:
        """The title and the counts, in one line."""
        total = len(self.swapped) + len(self.skipped)
        return f"{self.title}: {len(self.swapped)} of {total} layers"

    def __str__(self) -> str:
        lines = [self.heading]
        for what, titles, reports in self._tables():
            table = aligned([titles, *_rows(reports)])
            lines += ["", what, *[f"  {line}" for line in table]]
        return "\n".join(lines)

    def _tables(self) -> list[tuple[str, tuple[str, ...], tuple[LayerReport, ...]]]:
        """Return the heading, the titles of the columns and the rows of each table."""
        tables = [
            ("swapped", _TITLES, self.swapped),
            ("skipped", _TITLES, self.skipped),
            ("plain", _DENSE_TITLES, self.dense),
        ]
        return [(f"{what} ({len(rows)})", titles, rows) for what, titles, rows in tables if rows]

    __repr__ = __str__

    def print(self) -> None:
        """Print the tables, formatted by rich if it is installed (extra ``cli``)."""
        if importlib.util.find_spec("rich") is None:
            print(self)
        else:
            _print_rich(self)


def _rows(reports: Sequence[LayerReport]) -> list[tuple[str, str, str, str]]:
    """Return (name, features, count, note) of each row.

    Layers whose names differ only in a number, as in a stack of blocks, share a row.
    """
    counts: dict[tuple[str, str, str], list[LayerReport]] = {}
    for report in reports:
        key = (_NUMBER.sub("*", report.name), report.features, report.note)
        counts.setdefault(key, []).append(report)
    return [
        (group[0].name if len(group) == 1 else pattern, features, str(len(group)), note)
        for (pattern, features, note), group in counts.items()
    ]


def _print_rich(conversion: Conversion) -> None:
    # The extra is optional, and importing qtensor must not import it.
    from rich import box  # noqa: PLC0415
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console = Console(highlight=False)
    console.print(Text(conversion.heading))
    for what, titles, reports in conversion._tables():
        table = Table(title=what, box=box.SIMPLE, title_justify="left")
        for title in titles:
            table.add_column(title, overflow="fold")
        for row in _rows(reports):
            table.add_row(*map(Text, row))
        console.print(table)
