"""Hold the records of a recording, and show them as a table, as columns and as lines of JSON."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TextIO

from qtensor.core.errors import check
from qtensor.core.texts import aligned, html_table, some
from qtensor.debug.statistics import Totals

ROLES = ("input", "weight", "output", "grad_output", "grad_input", "grad_weight")
"""The tensors of a layer that are recorded, in the order in which a step computes them."""
SORT_KEYS = ("sqnr_db", "saturated", "flushed_to_zero", "amax", "outlier_channels")
"""Columns by which a table can be sorted."""


@dataclass(frozen=True)
class Record:
    """The statistics of one tensor of one layer in one step, over all calls of that step.

    Shares are between 0 and 1. A value that does not apply is NaN: a tensor that is not quantized
    has no SQNR, and the high-precision values behind a stored weight are unknown.
    """

    step: int
    layer: str
    role: str
    """input, weight, output, grad_output, grad_input or grad_weight."""
    quantizer: str
    """Canonical text of the quantizer; "" for a tensor that stays in high precision."""
    calls: int
    """Number of calls in this step."""
    shape: tuple[int, ...]
    """Shape in the last call."""
    amax: float
    """Largest finite magnitude."""
    sqnr_db: float
    """10 log10(sum x^2 / sum (x - q)^2) of the values before and after quantization."""
    saturated: float
    """Share of values beyond the largest code of their block."""
    flushed_to_zero: float
    """Share of values that are not zero and became zero."""
    scale_min: float
    """Smallest decode factor of an element."""
    scale_max: float
    zero_blocks: float
    """Share of blocks whose values are all zero after quantization."""
    dead_columns: int
    """Columns (last dim) that are zero in every row of every call."""
    outlier_channels: int
    """Columns whose maximum is more than 10 times the median of the columns' maxima."""
    columns: int
    nan: int
    inf: int
    note: str = ""
    """The reason if a quantizer refused the tensor."""
    not_finite_at: int = -1
    """Place of the first call with a NaN or an infinity among all calls of the step, -1 if none.

    Of all tensors of a step, the one with the smallest place is where they appeared first.
    """

    @property
    def is_finite(self) -> bool:
        """Whether the tensor has no NaN and no infinity."""
        return not (self.nan or self.inf)


COLUMNS = tuple(field.name for field in fields(Record))


@dataclass
class Entry:
    """The running statistics of one tensor of a layer within a step."""

    totals: Totals
    quantizer: str
    shape: tuple[int, ...]
    note: str
    not_finite_at: int
    calls: int = 1

    def plus(self, later: Entry) -> Entry:
        """Return the statistics of both, with the shape of the later call."""
        at = later.not_finite_at if self.not_finite_at < 0 else self.not_finite_at
        totals, calls = self.totals.plus(later.totals), self.calls + later.calls
        return replace(later, totals=totals, not_finite_at=at, calls=calls)

    def record(self, step: int, layer: str, role: str) -> Record:
        """Return the entry as a record."""
        t = self.totals
        return Record(
            step=step,
            layer=layer,
            role=role,
            quantizer=self.quantizer,
            calls=self.calls,
            shape=self.shape,
            amax=t.amax,
            sqnr_db=t.sqnr_db,
            saturated=_share(t.saturated, t.numel),
            flushed_to_zero=_share(t.flushed, t.numel),
            scale_min=t.scale_min if t.scale_min < math.inf else math.nan,
            scale_max=t.scale_max if t.scale_max > -math.inf else math.nan,
            zero_blocks=_share(t.zero_blocks, t.blocks),
            dead_columns=int(t.dead_columns),
            outlier_channels=int(t.outlier_channels),
            columns=int(t.columns),
            nan=int(t.nan),
            inf=int(t.inf),
            note=self.note,
            not_finite_at=self.not_finite_at,
        )


def _share(count: float, total: float) -> float:
    return count / total if total else math.nan


class Log:
    """The records of a recording; ``str()`` shows the worst tensors first.

    Attributes:
        layers: names of the layers that are recorded.
        dropped: number of old records that were removed because of ``keep``. A JSON lines file has
            them all.
    """

    def __init__(self, layers: Sequence[str], keep: int) -> None:
        self.layers = tuple(layers)
        self.dropped = 0
        self._records: deque[Record] = deque(maxlen=keep)
        self._first: Record | None = None
        self._current: Callable[[], list[Record]] = list
        self._advance: Callable[[], None] | None = None
        self._lines: TextIO | None = None

    @property
    def records(self) -> list[Record]:
        """The records in the order of their first calls, the current step included."""
        return [*self._records, *self._current()]

    @property
    def first_not_finite(self) -> Record | None:
        """The record of the first tensor with a NaN or an infinity; None if all are finite."""
        return _first_not_finite(self._current()) if self._first is None else self._first

    def step(self) -> None:
        """End a step: later records belong to the next step.

        Raises:
            QTensorError: the recording is over or has not begun, or forward calls count its steps.
        """
        rule = "a step can be ended only inside `with qtensor.debug.record(...) as log:`"
        fix = "Call it inside the block"
        check(self._advance is not None, "log.step", rule, "a closed recording", fix)
        if self._advance is not None:
            self._advance()

    def to_dict(self) -> dict[str, list[Any]]:
        """Return the records as columns: name -> list of values, for ``pandas.DataFrame(...)``."""
        records = self.records
        return {name: [getattr(r, name) for r in records] for name in COLUMNS}

    def table(
        self, rows: int | None = 20, *, sort: str = "sqnr_db", role: str | None = None
    ) -> str:
        """Return a table with one row for each layer and role, the worst first.

        The row of a tensor shows its worst step, by ``sort``.

        Args:
            rows: the largest number of rows; None for all.
            sort: "sqnr_db" (lowest first), "saturated", "flushed_to_zero", "amax" or
                "outlier_channels" (highest first).
            role: only this role; None for all.

        Raises:
            QTensorError: ``sort`` or ``role`` is unknown.
        """
        shown, more = self._worst(rows, sort, role)
        lines = aligned([_HEADER, *map(_cells, shown)], numbers_from=3)
        return "\n".join(lines + ([_more(more)] if more else []))

    def _worst(self, rows: int | None, sort: str, role: str | None) -> tuple[list[Record], int]:
        """Return the records that ``table`` shows, and the number of those that it leaves out."""
        rule = f"sort must be one of {', '.join(SORT_KEYS)}"
        check(sort in SORT_KEYS, "log.table", rule, repr(sort), "Choose one")
        if role is not None:
            known_role("log.table", role)
        worst: dict[tuple[str, str], Record] = {}
        for record in self.records:
            key = (record.layer, record.role)
            if role in (None, record.role):
                old = worst.get(key)
                worst[key] = record if old is None else min(old, record, key=_badness(sort))
        chosen = sorted(worst.values(), key=_badness(sort))
        shown = chosen if rows is None else chosen[:rows]
        return shown, len(chosen) - len(shown)

    def __str__(self) -> str:
        return "\n".join([*self._summary(), self.table()])

    def _repr_html_(self) -> str:
        """Return the summary and the table as HTML, for notebooks."""
        shown, more = self._worst(20, "sqnr_db", None)
        lines = self._summary() + ([_more(more)] if more else [])
        return html_table([_HEADER, *map(_cells, shown)], "\n".join(lines))

    def _summary(self) -> list[str]:
        """Return lines about all records."""
        records = self.records
        steps = len({record.step for record in records})
        ran = {record.layer for record in records}
        lines = [f"{len(records)} records of {len(ran)} layers in {steps} steps"]
        never = [name for name in self.layers if name not in ran]
        if records and never:
            lines.append(f"{len(never)} layers did not run: {some(never)}")
        if self.dropped:
            lines.append(f"{self.dropped} older records were removed, because keep is reached")
        first = self.first_not_finite
        if first is not None:
            lines.append(
                f"first not finite: {first.layer} {first.role} in step {first.step} "
                f"({first.nan} NaN, {first.inf} inf)"
            )
        return lines

    def append(self, records: Iterable[Record]) -> None:
        """Add the records of a finished step, and write their lines."""
        records = list(records)
        if self._first is None:
            self._first = _first_not_finite(records)
        for record in records:
            self.dropped += len(self._records) == self._records.maxlen
            self._records.append(record)
            if self._lines is not None:
                self._lines.write(json_line(record))
        if self._lines is not None:
            self._lines.flush()

    def attach(
        self, current: Callable[[], list[Record]], advance: Callable[[], None], lines: TextIO | None
    ) -> None:
        """Connect the log to a recorder that begins.

        ``current`` returns the records of the unfinished step, ``advance`` ends it, and ``lines``
        is an open file.
        """
        self._current, self._advance, self._lines = current, advance, lines

    def detach(self) -> None:
        """Disconnect the log from its recorder, and close the file."""
        lines = self._lines
        self._current, self._advance, self._lines = list, None, None
        if lines is not None:
            lines.close()


def _more(count: int) -> str:
    return f"... and {count} more tensors"


def _first_not_finite(records: Iterable[Record]) -> Record | None:
    """Return the record of a step whose tensor was the first that was not finite."""
    found = [record for record in records if not record.is_finite]
    return min(found, key=lambda record: record.not_finite_at, default=None)


def known_role(op: str, role: object) -> str:
    """Return ``role`` if it is the name of a role."""
    rule = f"a role is one of {', '.join(ROLES)}"
    check(role in ROLES, op, rule, repr(role), "Choose one")
    return str(role)


def json_line(record: Record) -> str:
    """Return a record as a line of strict JSON: NaN is null, and infinities are strings."""
    values = {name: _plain(getattr(record, name)) for name in COLUMNS}
    return json.dumps(values, allow_nan=False) + "\n"


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def _badness(sort: str) -> Callable[[Record], tuple[bool, float]]:
    """Return a sort key: the worst first, and records without the value last."""
    sign = 1.0 if sort == "sqnr_db" else -1.0

    def key(record: Record) -> tuple[bool, float]:
        value = float(getattr(record, sort))
        # A NaN or an infinity in the tensor is worse than any error.
        if not record.is_finite:
            return False, -math.inf
        return (True, 0.0) if math.isnan(value) else (False, sign * value)

    return key


_HEADER = (
    "layer",
    "role",
    "quantizer",
    "step",
    "SQNR dB",
    "amax",
    "saturated",
    "to zero",
    "zero blocks",
    "scales",
    "dead",
    "outliers",
    "NaN/inf",
)


def _cells(r: Record) -> tuple[str, ...]:
    scales = "-" if math.isnan(r.scale_min) else f"{r.scale_min:.3g}"
    if r.scale_max > r.scale_min:
        scales += f"..{r.scale_max:.3g}"
    return (
        r.layer or "(model)",
        r.role,
        r.quantizer or (f"({r.note})" if r.note else "-"),
        str(r.step),
        _number(r.sqnr_db, ".2f"),
        f"{r.amax:.4g}",
        _number(r.saturated, ".3%"),
        _number(r.flushed_to_zero, ".3%"),
        _number(r.zero_blocks, ".2%"),
        scales,
        f"{r.dead_columns}/{r.columns}",
        f"{r.outlier_channels}/{r.columns}",
        "-" if r.is_finite else f"{r.nan}/{r.inf}",
    )


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)
