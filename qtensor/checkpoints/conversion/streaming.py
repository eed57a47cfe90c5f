"""Run a plan: write file after file in bounded memory, on several threads."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import fields
from typing import cast

from torch import Tensor

from qtensor.checkpoints.checkpoint import Checkpoint
from qtensor.checkpoints.containers.safetensors import SafetensorsWriter
from qtensor.checkpoints.containers.shard_files import path_inside
from qtensor.checkpoints.conversion.carrying import Carried, carry
from qtensor.checkpoints.conversion.conversion_plan import PlannedShard, Step
from qtensor.checkpoints.conversion.conversion_report import (
    DECODED,
    MOVED,
    TensorResult,
    result_dict,
    result_from_dict,
)
from qtensor.checkpoints.conversion.measure import ErrorSums
from qtensor.checkpoints.conversion.request import Progress, Request
from qtensor.checkpoints.conversion.rows import (
    Arena,
    Values,
    Workers,
    origin_values,
    our_values,
    plain_values,
    quantize_values,
)
from qtensor.checkpoints.conversion.work_folder import WorkFolder, digest
from qtensor.checkpoints.errors import CheckpointError, Place, refuse
from qtensor.checkpoints.layout_base import Writer
from qtensor.core.buffer_shapes import rows_cols
from qtensor.quantizers import Quantizer
from qtensor.storage.tensor import QuantizedTensor

_SMALL = 1 << 20
"""Tensors below this number of bytes are written at once, without a thread."""
_CARRIED_FILES = (".json", ".txt", ".model", ".jinja", ".py")
"""Ends of the names of other files that go into the result, such as tokenizer files."""
_OURS = ("config.json", "hf_quant_config.json", "quantize_config.json")


class Stream:
    """Write the shards of one conversion."""

    def __init__(
        self, checkpoint: Checkpoint, request: Request, writer: Writer, work: WorkFolder
    ) -> None:
        self.checkpoint, self.request, self.writer = checkpoint, request, writer
        self.work = work
        self.resumed = 0
        self._workers = Workers(request.jobs)
        self._arena = Arena()
        self._pending: tuple[Future[None], str] | None = None
        decodes = request.dtype is not None
        self._transforms = checkpoint.input_transforms if decodes else {}
        self._began = time.monotonic()
        self._done = self._worked = self._total = 0

    def run(self, files: dict[str, PlannedShard]) -> list[TensorResult]:
        """Write every file of the work folder and return what became of each tensor.

        Raises:
            CheckpointError: a tensor cannot be converted, or the disk is full. Finished files stay
                for the next call.
        """
        self._total = sum(step.read_bytes for shard in files.values() for step in shard.steps)
        results: list[TensorResult] = []
        try:
            for name, shard in files.items():
                entry = self.work.finished(name)
                if entry is not None:
                    results += [result_from_dict(values) for values in entry["tensors"]]
                    self.resumed += 1
                    self._advance(shard.steps, 0)
                    continue
                made, sha256 = self._write(name, shard)
                self.work.add(name, sha256, [result_dict(result) for result in made])
                results += made
        finally:
            self._workers.close()
        return results

    def _write(self, name: str, shard: PlannedShard) -> tuple[list[TensorResult], str]:
        """Write one file and return its results and its digest."""
        names = [step.name for step in shard.steps]
        path = os.path.join(self.work.folder, name)
        file = self.writer.open_file(path, shard.specs, names)
        try:
            results = []
            for step in shard.steps:
                results.append(self._convert(file, step))
                self._advance([step], 1)
            self._wait()
            hashed = self._workers.pool.submit(digest, file.temporary)
            file.finish()  # syncs while the digest is computed
            sha256 = hashed.result()
            file.publish()
        except BaseException:
            self._forget()
            file.abort()
            raise
        return results, sha256

    def _advance(self, steps: Iterable[Step], worked: int) -> None:
        """Count finished tensors and tell the caller."""
        name = ""
        for step in steps:
            self._done += step.read_bytes
            self._worked += worked * step.read_bytes
            name = step.name
        if self.request.progress is not None:
            seconds = time.monotonic() - self._began
            state = Progress(self._done, self._total, seconds, self._worked, name)
            self.request.progress(state)

    # ---- one tensor

    def _convert(self, file: SafetensorsWriter, step: Step) -> TensorResult:
        """Make the stored tensors of a step and write them, perhaps after this call returns."""
        error = None
        if step.quantizer is not None:
            error = self._quantize(file, step, step.quantizer)
        elif step.action == DECODED:
            self._decode(file, step)
        elif step.action == MOVED:
            tensor = cast(QuantizedTensor, self.checkpoint[step.source])
            self._put(file, step, lambda: self.writer.encoded(step.name, tensor))
        else:
            plain = self._carried(step)
            self._put(file, step, lambda: self.writer.plain(step.name, plain))
        values = {field.name: getattr(step, field.name) for field in fields(TensorResult)}
        if error is not None:
            values |= {"sqnr_db": error.sqnr_db, "max_abs_error": error.max_abs_error}
        return TensorResult(**values)

    def _carried(self, step: Step) -> Tensor:
        """Return a plain tensor as the plan carries it."""
        found = carry(self.checkpoint, self.request, self.writer, step.source)
        plain = self.checkpoint[step.source]
        return found.apply(plain) if isinstance(found, Carried) else plain

    def _quantize(self, file: SafetensorsWriter, step: Step, quantizer: Quantizer) -> ErrorSums:
        values = self._values(step)
        tensor, error = quantize_values(values, quantizer, self._arena, self._workers)
        self._put(file, step, lambda: self.writer.encoded(step.name, tensor))
        return error

    def _values(self, step: Step) -> Values:
        """Return the values of a step's source: as stored, or as its origin decodes them."""
        group = self.checkpoint.groups.get(step.source)
        if group is None:
            return plain_values(self.checkpoint[step.source])
        dtype = self.request.dtype or group.dtype
        if self.request.rounding is None:
            tensor = self.checkpoint[step.source]
            if isinstance(tensor, QuantizedTensor):
                return our_values(tensor, dtype)
        return origin_values(self.checkpoint, step.source, dtype)

    def _decode(self, file: SafetensorsWriter, step: Step) -> None:
        """Write decoded values part by part."""
        values = self._values(step)
        if tuple(values.shape) != step.shape:
            rule = f"the decoded shape is {list(step.shape)}"
            place = Place(self.checkpoint.path, step.source, self.checkpoint.layout)
            refuse(place, rule, list(values.shape), "Report it: the layout decodes in two shapes")
        cols = rows_cols(values.shape)[1]
        transform = self._transforms.get(step.source.removesuffix(".weight"))

        def one(start: int, stop: int) -> None:
            part = values.read(start, stop)
            if transform is not None:  # The weight is for inputs that were transformed.
                part = transform.into_weight(part.float()).to(part.dtype)
            file.write_part(step.name, start * cols, part)

        self._workers.map(one, values.bounds)
        self.checkpoint.release(step.source)

    # ---- writing behind

    def _put(
        self, file: SafetensorsWriter, step: Step, make: Callable[[], dict[str, Tensor]]
    ) -> None:
        """Write stored tensors on a thread, once the tensor before is written."""

        def write() -> None:
            for name, tensor in make().items():
                file.write(name, tensor)

        if step.nbytes < _SMALL:
            write()
            self.checkpoint.release(step.source)
            return
        self._wait()
        self._pending = self._workers.pool.submit(write), step.source

    def _wait(self) -> None:
        """Wait until the tensor before is written; raise what its writing raised."""
        if self._pending is not None:
            future, source = self._pending
            self._pending = None
            future.result()
            self.checkpoint.release(source)

    def _forget(self) -> None:
        """Wait for a running write whose result does not matter any more."""
        if self._pending is not None:
            self._pending[0].exception()
            self._pending = None


def copy_other_files(
    checkpoint: Checkpoint, src: str, folder: str, made: Iterable[str]
) -> list[str]:
    """Copy the files of a tokenizer and the like from the folder of a source; return their names.

    A single file without a config.json may lie among files of others, so nothing is copied then.
    ``made`` names the files that the conversion makes itself.
    """
    source = checkpoint.folder
    if source is None or not (
        os.path.isdir(src) or os.path.exists(os.path.join(source, "config.json"))
    ):
        return []
    names = []
    for name in sorted(os.listdir(source)):
        wanted = name.endswith(_CARRIED_FILES) and not name.endswith(".index.json")
        if not wanted or name in _OURS or name in made or name.startswith("."):
            continue
        try:
            path = path_inside(source, name, checkpoint.path)
            shutil.copyfile(path, os.path.join(folder, name))
        except CheckpointError:
            continue  # a folder, or a link that leaves the folder
        except OSError as error:
            fix = "Free space on the disk"
            refuse(Place(os.path.join(folder, name)), "the file must be writable", error, fix)
        names.append(name)
    return names
