"""What the benchmarks of a model's quality share: their options, and rows that a file keeps."""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Sequence
from pathlib import Path

from benchmarks import settings
from benchmarks.report import Row


def parser(name: str, text: str | None, parts: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return a parser with the options ``--model``, ``--rows`` and, if there are any, ``--parts``.

    Args:
        name: of the benchmark.
        text: its description.
        parts: what ``--parts`` may choose.
    """
    command = settings.parser(name, text)
    command.add_argument("--model", type=Path, default=Path("small_gpt.pt"), help="of small_gpt.py")
    command.add_argument("--rows", type=Path, help="file that keeps rows of an interrupted run")
    if parts:
        command.add_argument(
            "--parts", nargs="*", default=parts, choices=parts, help="(default: all)"
        )
    command.set_defaults(peers="none")
    # torch warns about functions that the tokenizer and the models call.
    warnings.filterwarnings("ignore", category=FutureWarning)
    return command


class Rows:
    """Measured rows, and a file of JSON lines from which an interrupted run goes on."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self.measured: list[Row] = [json.loads(line) for line in lines]

    def has(self, row: Row) -> bool:
        """Return whether a measured row has these entries."""
        return any(row.items() <= done.items() for done in self.measured)

    def add(self, row: Row) -> None:
        """Print a row, and append it to the file."""
        self.measured.append(row)
        print(row, flush=True)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")
