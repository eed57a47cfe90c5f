"""Consoles and tables of the commands."""

from __future__ import annotations

from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table

_LOG_WIDTH = 110
"""Columns for output to a file or a pipe, which have no width of their own."""


def make_console(*, stderr: bool = False) -> Console:
    """Return a console as wide as the terminal, or ``_LOG_WIDTH`` columns without a terminal."""
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _LOG_WIDTH)
    return console


def make_table(*columns: str) -> Table:
    """Return a table; a column whose name begins with ">" is aligned to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in columns:
        right = name.startswith(">")
        # Folded: in a narrow terminal a name would else end in "...".
        justify: JustifyMethod = "right" if right else "left"
        table.add_column(name.removeprefix(">"), justify=justify, overflow="fold")
    return table
