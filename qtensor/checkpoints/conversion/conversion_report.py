"""Define what a conversion returns: what became of each tensor, and what was not carried."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from qtensor.core.texts import aligned

MOVED, QUANTIZED, REQUANTIZED = "moved", "quantized", "requantized"
DECODED, PLAIN, RECIPROCAL = "decoded", "plain", "reciprocal"
ACTIONS = {
    MOVED: "codes and factors as stored",
    QUANTIZED: "a plain tensor was quantized",
    REQUANTIZED: "a quantized weight was decoded and quantized to another format",
    DECODED: "a quantized weight was decoded to plain values",
    PLAIN: "a plain tensor as stored, perhaps under another name",
    RECIPROCAL: "a factor of activations became a divisor, or the reverse",
}
"""What happened to a tensor -> what that means."""


@dataclass(frozen=True)
class TensorResult:
    """Say what became of one tensor."""

    name: str
    """Logical name in the result."""
    source: str
    """Logical name in the source."""
    action: str
    """A key of ``ACTIONS``."""
    before: str
    """Format in the source, for example ``"fp8_rowwise"`` or ``"bfloat16"``."""
    after: str
    """Format in the result."""
    shape: tuple[int, ...]
    """Logical shape."""
    nbytes: int
    """Bytes in the result, factors included."""
    sqnr_db: float | None = None
    """10 log10(sum x^2 / sum (x - q)^2) against the values of the source: inf if equal, NaN if a
    value is not finite, None if nothing was rounded."""
    max_abs_error: float | None = None
    """Largest absolute error, or None if nothing was rounded."""


def error_words(sqnr_db: float | None, max_abs_error: float | None) -> tuple[str, str]:
    """Return SQNR and largest error as a table shows them; "" for None."""
    if sqnr_db is None or max_abs_error is None:
        return "", ""
    return f"{sqnr_db:.2f}", f"{max_abs_error:.3g}"


@dataclass(frozen=True)
class ConversionReport:
    """Hold the result of a conversion; the repr is a table."""

    source: str
    """Path of the source."""
    path: str
    """Path of the result."""
    source_layout: str
    layout: str
    tensors: tuple[TensorResult, ...]
    not_carried: Mapping[str, str]
    """Tensors of the source that the result lacks -> why."""
    notes: tuple[str, ...]
    """What else differs, or should be known."""
    seconds: float
    """Time of this call."""
    resumed_shards: int
    """Files that an earlier, interrupted call had finished."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors of the result."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def lossless(self) -> bool:
        """Return True if no value was rounded and no tensor left out."""
        changed = (QUANTIZED, REQUANTIZED, DECODED, RECIPROCAL)
        return not self.not_carried and all(t.action not in changed for t in self.tensors)

    def counts(self) -> dict[str, int]:
        """Return the number of tensors of each action."""
        found = Counter(tensor.action for tensor in self.tensors)
        return {action: found[action] for action in ACTIONS if found[action]}

    def __repr__(self) -> str:
        return "\n".join(self.lines(self.tensors))

    def lines(self, tensors: Iterable[TensorResult]) -> list[str]:
        """Return the table of some tensors, and below it what was not carried and the notes."""
        rows = [("name", "action", "before", "after", "shape", "bytes", "SQNR dB", "max error")]
        rows += [
            (
                t.name,
                t.action,
                t.before,
                t.after,
                "x".join(map(str, t.shape)) or "()",
                f"{t.nbytes:,}",
                *error_words(t.sqnr_db, t.max_abs_error),
            )
            for t in tensors
        ]
        lines = aligned(rows)
        lines += [f"not carried: {name}: {why}" for name, why in self.not_carried.items()]
        lines += [f"note: {note}" for note in self.notes]
        counts = ", ".join(f"{n} {action}" for action, n in self.counts().items())
        lines.append(f"{self.source_layout} -> {self.layout}: {counts or 'no tensors'}")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a value that JSON holds; docs/checkpoints.md lists the keys."""
        return {
            "source": self.source,
            "path": self.path,
            "source_layout": self.source_layout,
            "layout": self.layout,
            "lossless": self.lossless,
            "counts": self.counts(),
            "bytes": self.nbytes,
            "seconds": self.seconds,
            "resumed_shards": self.resumed_shards,
            "tensors": [result_dict(tensor) for tensor in self.tensors],
            "not_carried": dict(self.not_carried),
            "notes": list(self.notes),
        }


def result_dict(result: TensorResult) -> dict[str, Any]:
    """Return a tensor's result as a value that JSON holds."""
    values = asdict(result)
    values["shape"] = list(result.shape)
    values["bytes"] = values.pop("nbytes")
    for key in ("sqnr_db", "max_abs_error"):
        values[key] = json_number(values[key])
    return values


def result_from_dict(values: Mapping[str, Any]) -> TensorResult:
    """Return the tensor's result that ``result_dict`` made a dict of."""
    numbers = {key: values[key] for key in ("sqnr_db", "max_abs_error")}
    numbers = {k: float(v) if isinstance(v, str) else v for k, v in numbers.items()}
    others = {"shape": tuple(values["shape"]), "nbytes": values["bytes"]}
    kept = {key: value for key, value in values.items() if key != "bytes"}
    return TensorResult(**{**kept, **numbers, **others})


def json_number(value: float | None) -> float | str | None:
    """Return a number as JSON holds it: ``"inf"`` and ``"nan"`` are texts there."""
    return value if value is None or math.isfinite(value) else str(value)
