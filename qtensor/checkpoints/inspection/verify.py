"""Check a checkpoint: structure, factors, values that are not finite, and checksums."""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from qtensor.api import quantizer_of
from qtensor.checkpoints.activation_factors import factor_problem
from qtensor.checkpoints.buffers import rowwise_parts
from qtensor.checkpoints.checkpoint import Checkpoint, open_checkpoint
from qtensor.checkpoints.containers.base import Path
from qtensor.checkpoints.containers.shard_files import INDEX_SUFFIX, path_inside, read_json
from qtensor.checkpoints.conversion.work_folder import digest
from qtensor.checkpoints.errors import CheckpointError
from qtensor.checkpoints.inspection.summary import values_of
from qtensor.checkpoints.modes import in_memory
from qtensor.core.formats import Slot
from qtensor.quantizers import Quantizer
from qtensor.storage.rebuild import tensor_of
from qtensor.storage.tensor import QuantizedTensor

ERROR, WARNING = "error", "warning"
_SUMS = ("SHA256SUMS", "sha256sums.txt", "sha256sum.txt")
"""Sidecars with lines of a SHA-256 and a file name."""
_LINE = re.compile(r"([0-9a-fA-F]{64})[ \t]+\*?(?:\./)?([^\r\n]+)")
_PIECE = 1 << 22


@dataclass(frozen=True)
class Problem:
    """Describe one problem of a checkpoint."""

    severity: str
    """``"error"``, or ``"warning"`` for what may be meant so."""
    tensor: str
    """Name of the tensor, or ""."""
    file: str
    """Name of the file, or ""."""
    text: str


@dataclass(frozen=True)
class Verification:
    """Hold the result of ``verify``; the repr lists the problems."""

    path: str
    layout: str
    """Name of the layout, or "" if the checkpoint does not open."""
    tensors: int
    """Tensors that were read."""
    files_hashed: int
    """Files whose SHA-256 was compared with one that an index or a sidecar holds."""
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Return True without errors; warnings do not count."""
        return all(problem.severity != ERROR for problem in self.problems)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as a value that JSON holds; docs/checkpoints.md lists the keys."""
        return {
            "path": self.path,
            "layout": self.layout,
            "ok": self.ok,
            "tensors": self.tensors,
            "files_hashed": self.files_hashed,
            "problems": [asdict(problem) for problem in self.problems],
        }

    def __repr__(self) -> str:
        lines = [
            f"{p.severity}: {': '.join(w for w in (p.file, p.tensor, p.text) if w)}"
            for p in self.problems
        ]
        errors = sum(problem.severity == ERROR for problem in self.problems)
        verdict = "ok" if self.ok else f"{errors} error{'s' * (errors != 1)}"
        sums = f"{self.files_hashed} compared" if self.files_hashed else "none recorded"
        lines.append(f"{verdict}: {self.tensors} tensors; checksums of files: {sums}")
        return "\n".join(lines)


@in_memory
def verify(path: Path, layout: str | None = None) -> Verification:
    """Read every tensor of a checkpoint and return its problems; none of them raises.

    Args:
        path: a file, a folder, an index or an open file.
        layout: name of the layout; by default it is recognised.

    Raises:
        CheckpointError: the caller is in a mode without data, such as ``FakeTensorMode``.
    """
    try:
        checkpoint = open_checkpoint(path, layout, accept_rotated=True)
    except CheckpointError as error:
        problem = Problem(ERROR, error.tensor, os.path.basename(error.file), str(error))
        return Verification(str(path), error.layout, 0, 0, (problem,))
    with checkpoint:
        hashed, problems = _checksums(checkpoint)
        # A GGUF weight times its factor is a group that the mapping does not list.
        for name in dict.fromkeys([*checkpoint, *checkpoint.groups]):
            try:
                problems += _tensor_problems(checkpoint, name)
            except CheckpointError as error:
                file = os.path.basename(error.file)
                problems.append(Problem(ERROR, name, file, str(error)))
            checkpoint.release(name)
        try:
            _ = checkpoint.input_transforms
        except CheckpointError as error:
            problems.append(Problem(ERROR, error.tensor, os.path.basename(error.file), str(error)))
        for name in checkpoint.unlisted:
            text = "lies in a shard and not in the index"
            problems.append(Problem(WARNING, name, "", text))
        count = len(checkpoint)
        return Verification(checkpoint.path, checkpoint.layout, count, hashed, tuple(problems))


# ---- checksums


def _checksums(checkpoint: Checkpoint) -> tuple[int, list[Problem]]:
    """Return the number of compared files, and the problems."""
    problems: list[Problem] = []
    hashed = 0
    for name, expected in _expected_sums(checkpoint, problems).items():
        try:
            file = path_inside(checkpoint.folder or "", name, checkpoint.path)
            found = digest(file)
        except (CheckpointError, OSError) as error:
            problems.append(Problem(ERROR, "", name, f"a checksum names it: {error}"))
            continue
        hashed += 1
        if not hmac.compare_digest(found, expected.lower()):
            text = f"SHA-256 is {found}, and {expected} is recorded"
            problems.append(Problem(ERROR, "", name, text))
    return hashed, problems


def _expected_sums(checkpoint: Checkpoint, problems: list[Problem]) -> dict[str, str]:
    """Return file name -> SHA-256 of the index and of sidecars.

    A sidecar that is a link out of the folder is not read; it is added to ``problems``.
    """
    found: dict[str, str] = {}
    if checkpoint.folder is None:
        return found
    if checkpoint.path.endswith(INDEX_SUFFIX):
        recorded = read_json(checkpoint.path).get("metadata")
        sums = recorded.get("sha256") if isinstance(recorded, dict) else None
        if isinstance(sums, dict):
            found |= {name: value for name, value in sums.items() if isinstance(value, str)}
    used = {os.path.basename(info.file) for info in checkpoint.source.tensors.values()}
    for sidecar in (*_SUMS, *(f"{name}.sha256" for name in sorted(used))):
        path = os.path.join(checkpoint.folder, sidecar)
        if os.path.isfile(path) and os.path.getsize(path) < _PIECE:
            try:
                path_inside(checkpoint.folder, sidecar, path)
            except CheckpointError as error:
                problems.append(Problem(ERROR, "", sidecar, str(error)))
                continue
            with open(path, encoding="utf-8", errors="replace") as file:
                lines = _LINE.findall(file.read())
            found |= {name.strip(): sha256 for sha256, name in lines if name.strip() in used}
    return found


# ---- values


def _tensor_problems(checkpoint: Checkpoint, name: str) -> Iterator[Problem]:
    tensor = checkpoint[name]
    if isinstance(tensor, QuantizedTensor):
        for text in _quantized_problems(tensor):
            yield Problem(ERROR, name, "", text)
        return
    if not tensor.is_floating_point() and not tensor.is_complex():
        return
    problem = factor_problem(checkpoint, name)
    if problem:
        yield Problem(ERROR, name, "", problem)
        return
    nans = infinities = 0
    values = values_of(checkpoint, name, None)
    for pair in values.bounds:
        x = values.read(*pair)
        x = x.float() if x.dtype.itemsize == 1 else x
        nans += int(x.isnan().sum())
        infinities += int(x.isinf().sum())
    if nans:
        yield Problem(ERROR, name, "", f"{nans} values are NaN")
    if infinities:
        # Masks hold infinities on purpose; weights do not.
        severity = ERROR if name in checkpoint.groups else WARNING
        yield Problem(severity, name, "", f"{infinities} values are infinite")


def _quantized_problems(tensor: QuantizedTensor) -> Iterator[str]:
    """Yield what is wrong with the factors and codes of a tensor."""
    quantizer = quantizer_of(tensor)
    for slot, buffer in zip(quantizer.slots, _buffers(tensor), strict=True):
        word = slot.name.strip("_")
        bad = 0
        for piece in buffer.reshape(-1).split(_PIECE):
            bad += int(_bad(quantizer, slot, piece).sum())
        if bad:
            what = "codes are NaN" if _is_data(slot) else "factors are NaN, infinite or negative"
            yield f"{bad} of {buffer.numel()} {what} ({word})"


def _buffers(tensor: QuantizedTensor) -> list[Tensor]:
    """Return the buffers, without padding where they are rowwise."""
    tensor, quantizer = tensor_of(tensor), quantizer_of(tensor)
    if not quantizer.rowwise or quantizer.columnwise_value:
        return list(tensor.buffers())
    parts = [part for part in rowwise_parts(tensor) if part is not None]
    return parts if len(parts) == len(quantizer.slots) else list(tensor.buffers())


def _is_data(slot: Slot) -> bool:
    return slot.name.endswith("data")


def _bad(quantizer: Quantizer, slot: Slot, piece: Tensor) -> Tensor:
    """Return where codes or factors are not legal numbers."""
    if slot.dtype == torch.float32:
        return ~torch.isfinite(piece) | (piece < 0)
    if not _is_data(slot):
        if quantizer.spec.scale == "e8m0":
            return piece == 255
        return (piece & 0x7F == 0x7F) | (piece > 0x80)
    if quantizer.element.bits != 8:
        return torch.zeros(1, dtype=torch.bool)  # FP4 and FP6 have no NaN
    codes = piece & 0x7F
    return codes == 0x7F if quantizer.element.name == "e4m3" else codes >= 0x7C
