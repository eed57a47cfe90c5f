"""Read the recording of a run: for each layer and role, the worst step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from qtensor.core.errors import fail
from qtensor.debug.log import ROLES, Log, Record

OP = "model_report"
_READ: dict[Any, Callable[[Any], Any]] = {
    "str": str,
    "int": int,
    "float": lambda value: math.nan if value is None else float(value),
    "tuple[int, ...]": lambda sizes: tuple(map(int, sizes)),
}
"""Type of a field of a record -> how its value is read."""


@dataclass(frozen=True)
class Recorded:
    """Describe one role of a layer over all recorded steps; each number comes from its worst step.

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

    It is a ``Log``, its records, or the path of a file that ``record(jsonl=...)`` wrote.
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
    return replace(
        new if worse else replace(new, step=old.step, sqnr_db=old.sqnr_db),
        steps=old.steps + 1,
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


def _record(values: dict[str, Any]) -> Record:
    """Return the record of one line.

    Raises:
        KeyError: a field is missing.
        ValueError: a field has another type.
    """
    known = {each.name: _READ[each.type](values[each.name]) for each in fields(Record)}
    if known["role"] not in ROLES:
        raise ValueError(f"{known['role']!r} is not a role")
    return Record(**known)
