"""Compare two checkpoints tensor by tensor."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from qtensor.checkpoints.checkpoint import Checkpoint, open_with_factors
from qtensor.checkpoints.containers.base import Path
from qtensor.checkpoints.conversion.conversion_report import error_words, json_number
from qtensor.checkpoints.conversion.measure import ErrorSums, combined, error_sums
from qtensor.checkpoints.inspection.summary import values_of
from qtensor.checkpoints.modes import in_memory
from qtensor.core.texts import aligned
from qtensor.storage.rebuild import tensor_of
from qtensor.storage.tensor import QuantizedTensor

EQUAL_BYTES, EQUAL_VALUES, DIFFERENT = "equal bytes", "equal values", "different"
OTHER_SHAPE, ONLY_A, ONLY_B = "other shape", "only in a", "only in b"


@dataclass(frozen=True)
class Difference:
    """Say how a tensor differs in two checkpoints."""

    name: str
    result: str
    """``"equal bytes"``: the same format, codes and factors. ``"equal values"``: NaN equals NaN.
    ``"different"``, ``"other shape"``, ``"only in a"`` or ``"only in b"``."""
    a: str
    """Format in the first checkpoint, or ""."""
    b: str
    sqnr_db: float | None = None
    """10 log10(sum a^2 / sum (a - b)^2), or None if nothing was compared."""
    max_abs_error: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Hold the differences of two checkpoints; the repr is a table."""

    a: str
    b: str
    tensors: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        """Return True if both have the same tensors with equal values."""
        return all(t.result in (EQUAL_BYTES, EQUAL_VALUES) for t in self.tensors)

    def counts(self) -> dict[str, int]:
        """Return the number of tensors of each result."""
        found: dict[str, int] = {}
        for tensor in self.tensors:
            found[tensor.result] = found.get(tensor.result, 0) + 1
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as a value that JSON holds; docs/checkpoints.md lists the keys."""
        tensors = [asdict(tensor) for tensor in self.tensors]
        for tensor in tensors:
            for key in ("sqnr_db", "max_abs_error"):
                tensor[key] = json_number(tensor[key])
        return {
            "a": self.a,
            "b": self.b,
            "equal": self.equal,
            "counts": self.counts(),
            "tensors": tensors,
        }

    def __repr__(self) -> str:
        rows = [("name", "result", "a", "b", "SQNR dB", "max error")]
        for t in self.tensors:
            rows.append((t.name, t.result, t.a, t.b, *error_words(t.sqnr_db, t.max_abs_error)))
        counts = ", ".join(f"{n} {result}" for result, n in self.counts().items())
        return "\n".join([*aligned(rows), counts or "no tensors"])


@in_memory
def compare(a: Path, b: Path, layouts: tuple[str | None, str | None] = (None, None)) -> Comparison:
    """Return how two checkpoints differ, in bounded memory.

    Weights that are quantized in both are compared by our arithmetic in float32. Where one of them
    is plain, the other is decoded as its origin does, to the dtype of the plain one. A factor that
    a file stores beside a weight, as GGUF does, is part of the weight, as in a conversion.

    Args:
        a: a file, a folder, an index or an open file.
        b: the other one.
        layouts: names of their layouts; by default they are recognised.

    Raises:
        CheckpointError: a checkpoint is not sound, or a tensor cannot be read.
    """
    with open_with_factors(a, layouts[0]) as one, open_with_factors(b, layouts[1]) as other:
        names = dict.fromkeys([*one, *other])
        return Comparison(
            one.path, other.path, tuple(_difference(name, one, other) for name in names)
        )


def _difference(name: str, one: Checkpoint, other: Checkpoint) -> Difference:
    if name not in one or name not in other:
        side, result = (one, ONLY_A) if name in one else (other, ONLY_B)
        word = _format(side[name])
        return Difference(name, result, word * (side is one), word * (side is other))
    a, b = one[name], other[name]
    words = _format(a), _format(b)
    if a.shape != b.shape:
        shapes = f"{words[0]} {list(a.shape)}", f"{words[1]} {list(b.shape)}"
        return Difference(name, OTHER_SHAPE, *shapes)
    if _same_bytes(a, b):
        return Difference(name, EQUAL_BYTES, *words)
    dtypes = _dtypes(a, b)
    left, right = values_of(one, name, dtypes[0]), values_of(other, name, dtypes[1])
    if left.shape != right.shape:
        return Difference(name, OTHER_SHAPE, f"{list(left.shape)}", f"{list(right.shape)}")
    sums, equal = [], True
    for pair in left.bounds:
        x, y = left.read(*pair), right.read(*pair)
        equal = equal and _equal(x, y)
        sums.append(_error_sums(x, y))
    total = combined(sums) if not equal else ErrorSums()
    one.release(name)
    other.release(name)
    result = EQUAL_VALUES if equal else DIFFERENT
    error = (math.inf, 0.0) if equal else (total.sqnr_db, total.max_abs_error)
    return Difference(name, result, *words, *error)


def _format(tensor: Tensor) -> str:
    if isinstance(tensor, QuantizedTensor):
        return tensor.quantizer.canonical
    return str(tensor.dtype).removeprefix("torch.")


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    """Return True for the same format and equal bytes of every buffer."""
    if isinstance(a, QuantizedTensor) != isinstance(b, QuantizedTensor) or _format(a) != _format(b):
        return False
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
        pairs = zip(tensor_of(a).buffers(), tensor_of(b).buffers(), strict=True)
        return all(_same_bytes(x, y) for x, y in pairs)
    if a.shape != b.shape:
        return False
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*raw)


def _dtypes(a: Tensor, b: Tensor) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Return in which dtype each side is decoded as its origin does; None: by our arithmetic."""
    quantized = isinstance(a, QuantizedTensor), isinstance(b, QuantizedTensor)
    if quantized[0] == quantized[1]:
        return None, None
    plain = b if quantized[0] else a
    dtype = plain.dtype if plain.is_floating_point() and plain.dtype.itemsize > 1 else torch.float32
    return dtype, dtype


def _equal(x: Tensor, y: Tensor) -> bool:
    """Return True for equal values, NaN equal to NaN."""
    if not any(t.is_floating_point() or t.is_complex() for t in (x, y)):
        a, b = x.to(torch.int64), y.to(torch.int64)
        # An unsigned number of 64 bits beyond 2^63 becomes a negative one.
        wrapped = (x.dtype == torch.uint64) != (y.dtype == torch.uint64) and bool((a < 0).any())
        return torch.equal(a, b) and not wrapped
    x, y = _real(x, y), _real(y, x)
    return bool(((x == y) | (x.isnan() & y.isnan())).all())


def _real(x: Tensor, other: Tensor) -> Tensor:
    """Return float64 values; of complex numbers, their two parts."""
    if x.is_complex() or other.is_complex():
        return torch.view_as_real(x.to(torch.complex128))
    return x.double()


def _error_sums(x: Tensor, y: Tensor) -> ErrorSums:
    """Return the error of y: in float32, or in float64 where float32 does not hold the values."""
    if all(t.is_floating_point() and t.dtype.itemsize <= 4 for t in (x, y)):
        return error_sums(x, y.to(torch.float32, copy=True))
    x, y = _real(x, y), _real(y, x)
    if not x.numel():
        return ErrorSums()
    error = (y - x).abs()
    return ErrorSums(x.square().sum().item(), error.square().sum().item(), error.max().item())
