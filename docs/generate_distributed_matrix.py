"""Write docs/distributed_matrix.md: which feature of torch's engine works with which format.

Two processes with gloo run every cell of ``distributed_cells.table.SECTIONS``. docs/
distributed_matrix.json holds the outcomes for programs. ``--check`` writes nothing and fails if
the files are out of date, ``--only TEXT ...`` runs some cells and keeps the other outcomes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))  # the started processes read it, too

from distributed_cells import table  # noqa: E402 - see above
from ranks import RankError, Ranks  # noqa: E402

DOCUMENT = ROOT / "docs" / "distributed_matrix.md"
RESULTS = ROOT / "docs" / "distributed_matrix.json"
PATIENCE = 60
"""Seconds that a rank waits for the other."""

Outcome = tuple[str, str]
Outcomes = dict[str, dict[str, dict[str, Outcome]]]
"""feature -> mode -> format or recipe -> (pass, error or fail, reason)."""


def run_cell(ranks: Ranks, feature: str, mode: str, column: str) -> Outcome:
    """Run a cell on both ranks, and restart them after a failure.

    A cell passes, or is an error, only if it does so on every rank.
    """
    try:
        found = ranks.run(table.run_cell, feature, mode, column)
    except RankError as error:  # a rank is gone, or waits for the other without end
        return "fail", " ".join(str(error).split())[:300]
    kinds = {kind for kind, _ in found}
    if kinds == {"pass"} or kinds == {"error"}:
        return found[0]
    ranks.stop(kill=True)
    wrong = [f"rank {rank}: {kind} {text}" for rank, (kind, text) in enumerate(found)]
    failed = [text for kind, text in found if kind == "fail" and "Timed out" not in text]
    return "fail", failed[0] if len(failed) == table.SIZE else "; ".join(wrong)


def run(cells: Iterable[tuple[str, str, str]], echo: bool = False) -> Outcomes:
    """Return the outcome of every cell."""
    outcomes: Outcomes = {}
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(Path(folder), table.SIZE, PATIENCE)
        try:
            for feature, mode, column in cells:
                outcome = run_cell(ranks, feature, mode, column)
                outcomes.setdefault(feature, {}).setdefault(mode, {})[column] = outcome
                if echo:
                    print(feature, mode, column, *outcome, sep=" | ", file=sys.stderr, flush=True)
        finally:
            ranks.stop(kill=True)
    return outcomes


def render(outcomes: Outcomes) -> str:
    """Return the document."""
    reasons: list[str] = []
    lines = [
        "# Distributed matrix",
        "",
        "This page tells which features of `torch.distributed` work with which format or recipe. "
        "`python docs/generate_distributed_matrix.py` writes it after running every cell on two "
        "processes with gloo, and `make test-all` runs them again. Do not edit it. "
        "[distributed.md](distributed.md) explains the features.",
        "",
        "- **pass**: every rank has the bytes of one process. Quantized tensors stay quantized.",
        "- **error**: every rank raises a `QTensorError`. The number stands for its text, below.",
        "- **fail**: another value, another exception, or a rank that waits for ever.",
        "",
        f"The formats are {', '.join(table.FORMATS)}; the recipes {', '.join(table.RECIPES)}. "
        "Tensors have 256 x 256 values and both usages. Training means two steps of AdamW on two "
        "layers. Under `aot_eager`, the block (or the call) is compiled. Features without "
        "`aot_eager` have nothing to compile, because torch runs these calls between its "
        "graphs, or are not compiled by torch "
        "([distributed.md](distributed.md#what-torch-does-not-allow)).",
        "",
    ]
    for title, rows in table.SECTIONS.items():
        lines += [f"## {title}", "", *_section(rows, outcomes, reasons)]
    lines += ["## Reasons", ""]
    lines += [f"{number}. {_escape(text)}" for number, text in enumerate(reasons, 1)]
    lines += ["", "## Count", "", *_count(outcomes), ""]
    return "\n".join(lines)


def _section(rows: Sequence[table.Feature], outcomes: Outcomes, reasons: list[str]) -> list[str]:
    """Return lists of the features that behave alike in every column, and a table of the others."""
    columns = rows[0].columns
    alike: dict[str, list[str]] = {}
    others: list[str] = []
    for row in rows:
        modes_of: dict[str, list[str]] = {}  # modes with equal outcomes share a line
        for mode in row.modes:
            words = " | ".join(_word(outcomes[row.name][mode][c], reasons) for c in columns)
            modes_of.setdefault(words, []).append(mode)
        for words, modes in modes_of.items():
            word, *more = set(words.split(" | "))
            if word == "pass" and not more:
                alike.setdefault(f"Pass in mode {' and '.join(modes)}", []).append(row.name)
            elif word.startswith("error") and not more:
                names = alike.setdefault(f"Error in mode {' and '.join(modes)}", [])
                names.append(f"{row.name}: {word}")
            else:
                others.append(f"| {row.name} | {', '.join(modes)} | {words} |")
    lines: list[str] = []
    for outcome, names in alike.items():
        lines += [f"{outcome} with {_every(columns)}:", "", *(f"- {name}" for name in names), ""]
    if others:
        lines += [f"| feature | mode | {' | '.join(columns)} |"]
        lines += [f"|---|---|{'---|' * len(columns)}", *others, ""]
    return lines


def _every(columns: tuple[str, ...]) -> str:
    """Return the columns in words."""
    words = {table.FORMATS: "every format", tuple(table.RECIPES): "every recipe"}
    return words.get(columns, ", ".join(columns))


def _escape(text: str) -> str:
    return f"`{text.replace('`', chr(39))}`"


def _word(outcome: Outcome, reasons: list[str]) -> str:
    kind, text = outcome
    if kind == "pass":
        return kind
    if text not in reasons:
        reasons.append(text)
    return f"{'**fail**' if kind == 'fail' else kind} {reasons.index(text) + 1}"


def _count(outcomes: Outcomes) -> list[str]:
    lines = ["| section | pass | error | fail |", "|---|---:|---:|---:|"]
    total: Counter[str] = Counter()
    for title, rows in table.SECTIONS.items():
        found = Counter(
            kind
            for row in rows
            for mode in outcomes[row.name].values()
            for kind, _ in mode.values()
        )
        total += found
        lines.append(f"| {title} | {found['pass']} | {found['error']} | {found['fail']} |")
    return [*lines, f"| all | {total['pass']} | {total['error']} | {total['fail']} |"]


def as_json(outcomes: Outcomes) -> str:
    """Return the outcomes as text: ``pass``, or the kind and the reason."""
    words: dict[str, Any] = {
        feature: {
            mode: {column: ": ".join(filter(None, outcome)) for column, outcome in cells.items()}
            for mode, cells in modes.items()
        }
        for feature, modes in outcomes.items()
    }
    return json.dumps(words, indent=1) + "\n"


def read() -> Outcomes:
    """Return the outcomes that the file holds."""
    if not RESULTS.exists():
        return {}
    found: Outcomes = {}
    for feature, modes in json.loads(RESULTS.read_text()).items():
        for mode, cells in modes.items():
            for column, word in cells.items():
                kind, _, reason = word.partition(": ")
                found.setdefault(feature, {}).setdefault(mode, {})[column] = (kind, reason)
    return found


def in_order(outcomes: Outcomes) -> Outcomes:
    """Return the outcomes of the cells of the table, in its order."""
    found: Outcomes = {}
    for feature in table.features().values():
        for mode in feature.modes:
            for column in feature.columns:
                outcome = outcomes.get(feature.name, {}).get(mode, {}).get(column)
                outcome = outcome or ("fail", "this cell has not been run")
                found.setdefault(feature.name, {}).setdefault(mode, {})[column] = outcome
    return found


def main() -> int:
    """Write the files, or compare them with ``--check``, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if out of date")
    parser.add_argument(
        "--only",
        metavar="TEXT",
        nargs="+",
        default=[],
        help="run the cells whose name contains one of these texts",
    )
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    texts = arguments.only or [""]
    chosen = [c for c in table.cells() if any(text in " ".join(c) for text in texts)]
    new = run(chosen, echo=not arguments.check)
    outcomes = read() if arguments.only else {}
    for feature, modes in new.items():
        for mode, cells in modes.items():
            outcomes.setdefault(feature, {}).setdefault(mode, {}).update(cells)
    outcomes = in_order(outcomes)
    files = {DOCUMENT: render(outcomes), RESULTS: as_json(outcomes)}
    stale = [p for p, text in files.items() if not p.exists() or p.read_text() != text]
    if not arguments.check:
        for path, text in files.items():
            path.write_text(text)
    elif stale:
        names = ", ".join(f"docs/{path.name}" for path in stale)
        print(
            f"{names}: out of date. Run: python docs/generate_distributed_matrix.py",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
