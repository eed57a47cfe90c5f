"""Read the recording of a run: for each layer and role, the worst step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from qtensor.core.errors import fail
from qtensor.debug.log import COLUMNS, ROLES, Log, Record

OP = "model_report"
_TEXTS = ("layer", "role", "quantizer", "note")
_COUNTS = (
    "step",
    "calls",
    "dead_columns",
    "outlier_channels",
    "columns",
    "nan",
    "inf",
    "not_finite_at",
)


@dataclass(frozen=True)
class Recorded:
    """Describe one role of a layer over all recorded steps; each number is that of its worst step.

    Attributes:
        layer: the layer, as ``qtensor.debug.record`` names it.
        role: input, weight, output, grad_output, grad_input or grad_weight.
        quantizer: canonical text; "" for a tensor in high precision.
        steps: number of steps with a record.
        step: the step with the lowest SQNR; the last one if no SQNR is known.
        sqnr_db: the lowest SQNR; NaN if none is known.
        amax: the largest finite magnitude.
        saturated: the largest share of values beyond the largest code.
        flushed: the largest share of non-zero values that became zero.
        outlier_channels: the largest number of outlier channels.
        not_finite: NaN and infinities of all steps together.
        first_not_finite: the first step with one of them, or None.
    """

    layer: str
    role: str
    quantizer: str
    steps: int
    step: int
    sqnr_db: float
    amax: float
    saturated: float
    flushed: float
    outlier_channels: int
    not_finite: int
    first_not_finite: int | None


def recorded(log: Log | Iterable[Record] | str | os.PathLike[str]) -> tuple[Recorded, ...]:
    """Return the layers and roles of a recording, in the order of their first records.

    Args:
        log: a ``Log``, its records, or the path of a file that ``record(jsonl=...)`` wrote.

    Raises:
        QTensorError: the file cannot be read or is not such a file, or it has no records.
    """
    if isinstance(log, str | os.PathLike):
        records: Iterable[Record] = _lines(os.fspath(log))
        name = os.fspath(log)
    else:
        records, name = (log.records if isinstance(log, Log) else log), "no records"
    found: dict[tuple[str, str], Recorded] = {}
    for record in records:
        key = (record.layer, record.role)
        new = _of(record)
        found[key] = _joined(found[key], new) if key in found else new
    if not found:
        fix = 'Record a step with qtensor.debug.record(model, jsonl="run.jsonl")'
        fail(OP, "the log must have a record", repr(name), fix)
    return tuple(found.values())


def _of(record: Record) -> Recorded:
    bad = record.nan + record.inf
    return Recorded(
        layer=record.layer,
        role=record.role,
        quantizer=record.quantizer,
        steps=1,
        step=record.step,
        sqnr_db=record.sqnr_db,
        amax=record.amax,
        saturated=record.saturated,
        flushed=record.flushed_to_zero,
        outlier_channels=record.outlier_channels,
        not_finite=bad,
        first_not_finite=record.step if bad else None,
    )


def _joined(old: Recorded, new: Recorded) -> Recorded:
    # A comparison with NaN is false: a step whose SQNR is unknown replaces only another one.
    worse = new.sqnr_db < old.sqnr_db or math.isnan(old.sqnr_db)
    first = old.first_not_finite
    return Recorded(
        layer=old.layer,
        role=old.role,
        quantizer=new.quantizer,
        steps=old.steps + 1,
        step=new.step if worse else old.step,
        sqnr_db=new.sqnr_db if worse else old.sqnr_db,
        amax=max(old.amax, new.amax),
        saturated=_larger(old.saturated, new.saturated),
        flushed=_larger(old.flushed, new.flushed),
        outlier_channels=max(old.outlier_channels, new.outlier_channels),
        not_finite=old.not_finite + new.not_finite,
        first_not_finite=new.first_not_finite if first is None else first,
    )


def _larger(a: float, b: float) -> float:
    return b if math.isnan(a) else a if math.isnan(b) else max(a, b)


def _lines(path: str) -> Iterator[Record]:
    """Yield the records of a file of JSON lines."""
    rule = "the log must be a file that qtensor.debug.record(jsonl=...) wrote"
    fix = "Pass such a file"
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    record = _record(json.loads(line))
                except (ValueError, TypeError, KeyError, AttributeError) as error:
                    fail(OP, rule, f"{path!r}, line {number} ({error})", fix)
                yield record
    except UnicodeDecodeError as error:
        fail(OP, rule, f"{path!r} ({error})", fix)
    except OSError as error:
        fail(OP, "the log must be readable", f"{path!r} ({error.strerror})", fix)


def _record(fields: dict[str, Any]) -> Record:
    """Return the record of one line.

    Raises:
        KeyError: a field is missing.
        ValueError: a field has another type.
    """
    known: dict[str, Any] = {}
    for name in COLUMNS:
        value = fields[name]
        if name in _TEXTS:
            known[name] = str(value)
        elif name == "shape":
            known[name] = tuple(int(size) for size in value)
        elif name in _COUNTS:
            known[name] = int(value)
        else:
            known[name] = math.nan if value is None else float(value)
    if known["role"] not in ROLES:
        raise ValueError(f"{known['role']!r} is not a role")
    return Record(**known)
