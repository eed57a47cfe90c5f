"""Decide what becomes of each tensor of a source, before any data are written."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, cast

import torch
from torch import Tensor

from qtensor.api import quantizer_of
from qtensor.checkpoints.activation_factors import factor_problem
from qtensor.checkpoints.checkpoint import Checkpoint
from qtensor.checkpoints.containers.safetensors import TensorSpec
from qtensor.checkpoints.conversion.carrying import NotCarried, carry
from qtensor.checkpoints.conversion.conversion_report import (
    DECODED,
    MOVED,
    PLAIN,
    QUANTIZED,
    RECIPROCAL,
    REQUANTIZED,
    TensorResult,
)
from qtensor.checkpoints.conversion.request import Request
from qtensor.checkpoints.errors import CheckpointError, Place, refuse, shorten
from qtensor.checkpoints.ignoring import ignored_names
from qtensor.checkpoints.layout_base import DIVISOR, FACTOR, Group, Unreadable, Writer
from qtensor.checkpoints.saving import Shard, check_unique
from qtensor.quantizers import Quantizer
from qtensor.storage.tensor import QuantizedTensor


@dataclass(frozen=True)
class Step(TensorResult):
    """Say how one tensor of the result is made."""

    read_bytes: int = 0
    """Bytes in the source."""
    quantizer: Quantizer | None = None
    """The quantizer of a tensor that is quantized here; None for others."""


class PlannedShard(NamedTuple):
    """Describe one file of the result: its steps and its stored tensors."""

    steps: list[Step]
    specs: list[TensorSpec]


class Plan(NamedTuple):
    """Describe the whole result.

    Attributes:
        shards: the files, in order.
        not_carried: tensor of the source -> why the result lacks it.
        notes: what else the report says.
    """

    shards: list[PlannedShard]
    not_carried: dict[str, str]
    notes: list[str]


def make_plan(checkpoint: Checkpoint, request: Request, writer: Writer, limit: int | None) -> Plan:
    """Return the plan of a conversion. Codes are not read, and factors only where needed.

    ``limit`` is the most bytes of a shard, or None for one file.
    """
    shards, not_carried, size = [PlannedShard([], [])], {}, 0
    for name in (*checkpoint, *checkpoint.described):
        found = _Tensor(checkpoint, request, writer, name).step()
        if isinstance(found, NotCarried):
            not_carried[name] = found.reason
            continue
        step, specs = found
        if limit is not None and size and size + step.nbytes > limit:
            shards.append(PlannedShard([], []))
            size = 0
        shards[-1].steps.append(step)
        shards[-1].specs.extend(specs)
        size += step.nbytes
        checkpoint.release(name)
    check_unique([Shard([], shard.specs) for shard in shards])
    steps = [step for shard in shards for step in shard.steps]
    _check_include(request, steps)
    notes = [*_notes(checkpoint, request), *_changes(checkpoint, writer, steps), *writer.notes()]
    return Plan(shards, not_carried, notes)


def _check_include(request: Request, steps: list[Step]) -> None:
    """Refuse patterns that select no weight: they are likely misspelt."""
    if request.quantizer is None or request.include is None:
        return
    weights = (step for step in steps if step.action in (MOVED, QUANTIZED, REQUANTIZED))
    if not any(request.chosen(step.source, False, True) for step in weights):
        rule = "include= selects a weight; plain ones are matrices of floats, or stacked ones"
        refuse(
            Place(request.src), rule, f"no tensor for {list(request.include)}", "Check the names"
        )


class _Tensor:
    """Plan one tensor of the source."""

    def __init__(self, checkpoint: Checkpoint, request: Request, writer: Writer, name: str) -> None:
        self.checkpoint, self.request, self.writer, self.name = checkpoint, request, writer, name
        self.group = checkpoint.groups.get(name)

    def step(self) -> tuple[Step, list[TensorSpec]] | NotCarried:
        """Return the step and the stored tensors of the result."""
        if self.group is None:
            return self._plain()
        if isinstance(self.group.target, Unreadable):
            fix = "Leave the tensor out of the source, or export it in another format"
            self._refuse("the tensor must be readable", self.group.target.reason, fix)
        if self.request.dtype is not None:
            return self._decoded(self.group, self.request.dtype)
        if self.group.matrix is None and self.request.chosen(self.name, False, True):
            wanted = self.request.quantizer
            if wanted is not None and not self._is_already(wanted):
                return self._quantized(REQUANTIZED, self.group.shape, self.group.dtype)
        return self._moved()

    def _is_already(self, wanted: Quantizer) -> bool:
        """Return True if the weight has the format that is asked for."""
        target = self.group.target if self.group else None
        return isinstance(target, Quantizer) and _comparable(target) == _comparable(wanted)

    def _moved(self) -> tuple[Step, list[TensorSpec]]:
        """Return the step of a weight that keeps its codes and factors."""
        tensor = self.checkpoint[self.name]
        if not isinstance(tensor, QuantizedTensor):
            reason = self.checkpoint.why_dense(self.name)
            fix = "Pass format= to quantize its decoded values, or use dequantize"
            self._refuse("codes are moved only if a format of qtensor holds them", reason, fix)
        try:
            stored = self.writer.encoded(self.name, tensor)
        except CheckpointError as error:
            fix = "To quantize the weight again, pass format="
            place = Place(self.checkpoint.path, self.name, self.request.layout)
            raise CheckpointError(f"{error} {fix}.", *place) from error
        quantizer = quantizer_of(tensor)
        order, after = self.writer.swizzled, quantizer
        if order is not None and getattr(quantizer, "swizzled", order) != order:
            after = dataclasses.replace(quantizer, swizzled=order)  # type: ignore[call-arg]
        return self._step(MOVED, quantizer.canonical, after.canonical, tensor, stored)

    def _quantized(
        self, action: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[Step, list[TensorSpec]]:
        quantizer = cast(Quantizer, self.request.quantizer)
        tensor = quantizer.make_empty(shape, dtype=dtype, device="meta")
        stored = self.writer.encoded(self.name, tensor)
        step, specs = self._step(action, self._before(), quantizer.canonical, tensor, stored)
        return dataclasses.replace(step, quantizer=quantizer), specs

    def _decoded(self, group: Group, dtype: torch.dtype) -> tuple[Step, list[TensorSpec]]:
        """Return the step of a weight that becomes plain; its decoded shape may be another."""
        shape = group.shape
        if len(shape) != 2 and not self.checkpoint.reader.decodes_as_ours(group, dtype):
            # The values of stacked experts may be transposed: the layout alone knows.
            shape = tuple(self.checkpoint.dense(self.name, dtype).shape)
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        stored = self.writer.plain(self.name, tensor)
        return self._step(DECODED, self._before(), _word(dtype), tensor, stored)

    def _plain(self) -> tuple[Step, list[TensorSpec]] | NotCarried:
        tensor = self.checkpoint[self.name]
        quantized_source = bool(self.checkpoint.groups)
        if self._fits(tensor) and self.request.chosen(self.name, True, quantized_source):
            return self._quantized(QUANTIZED, tuple(tensor.shape), tensor.dtype)
        if self.request.dtype is not None and self._is_transformed():
            stored = self.writer.plain(self.name, tensor)
            return self._step(DECODED, _word(tensor.dtype), _word(tensor.dtype), tensor, stored)
        found = carry(self.checkpoint, self.request, self.writer, self.name)
        if isinstance(found, NotCarried):
            return found
        word = _word(tensor.dtype)
        made = found.apply(tensor)
        stored = self.writer.plain(found.name, made)
        action = RECIPROCAL if found.reciprocal else PLAIN
        step, specs = self._step(action, word, _word(made.dtype), made, stored)
        return dataclasses.replace(step, name=found.name), specs

    def _is_transformed(self) -> bool:
        """Return True for a plain weight whose layer scales or rotates its inputs."""
        module = self.name.removesuffix(".weight")
        return module != self.name and module in self.checkpoint.input_transforms

    def _fits(self, tensor: Tensor) -> bool:
        """Return True for weights: matrices, and stacked ones that ``include`` names."""
        wide = tensor.is_floating_point() and tensor.dtype.itemsize in (2, 4)
        named = self.name.endswith(".weight") or self.request.include is not None
        dims = (2, 3) if self.request.include is not None else (2,)
        return wide and named and tensor.ndim in dims and math.prod(tensor.shape) > 0

    def _before(self) -> str:
        if self.group is None:
            return _word(self.checkpoint[self.name].dtype)
        target = self.group.target
        return target.canonical if isinstance(target, Quantizer) else self.group.scheme

    def _step(
        self, action: str, before: str, after: str, tensor: Tensor, stored: dict[str, Tensor]
    ) -> tuple[Step, list[TensorSpec]]:
        specs = [TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in stored.items()]
        nbytes = sum(spec.nbytes for spec in specs)
        place = (self.name, self.name, action, before, after, tuple(tensor.shape), nbytes)
        return Step(*place, read_bytes=self.checkpoint.nbytes(self.name)), specs

    def _refuse(self, rule: str, got: object, fix: str) -> NoReturn:
        place = Place(self.checkpoint.path, self.name, self.checkpoint.layout)
        refuse(place, rule, got, fix)


def _comparable(quantizer: Quantizer) -> str:
    """Return the format of a weight, without where its tensor factor comes from."""
    if getattr(quantizer, "with_global_scale_inv", False):
        options = dict(quantizer.changed_options())
        del options["with_global_scale_inv"]
        quantizer = type(quantizer)(**options)
    return str(quantizer.canonical)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _notes(checkpoint: Checkpoint, request: Request) -> Iterator[str]:
    """Yield what the report says about the whole."""
    for name in checkpoint:
        if problem := factor_problem(checkpoint, name):
            yield f"{name}: {problem}"
    seen: dict[tuple[str, int, int], str] = {}
    for info in checkpoint.source.tensors.values():
        key = (info.file, info.start, info.nbytes)
        if info.nbytes and key in seen:
            yield f"{info.name} is tied to {seen[key]} in the source; both are written"
        seen.setdefault(key, info.name)
    for part in (checkpoint.config, *map(checkpoint.config.get, ("text_config", "llm_config"))):
        if isinstance(part, dict) and part.get("tie_word_embeddings"):
            yield "tie_word_embeddings is carried in config.json"
            break
    ignored = ignored_names(checkpoint.source)
    if request.dtype is None and ignored:
        yield (
            f"the source's config ignores {shorten(', '.join(ignored))}; the result's config has "
            "the entries that still apply, and names the other plain matrices"
        )


def _changes(checkpoint: Checkpoint, writer: Writer, steps: list[Step]) -> Iterator[str]:
    """Yield how moved factors are stored otherwise than in the source, with the same values."""
    moved = [step for step in steps if step.action == MOVED]
    reordered = sum(step.before != step.after for step in moved)
    if reordered:
        order = "swizzled" if writer.swizzled else "plain"
        yield f"factors of blocks are stored in {order} order: {reordered} weights"
    other = {FACTOR: "divisor", DIVISOR: "factor"}.get(writer.tensor_factor, "")
    inverted = sum(other in checkpoint.groups[step.source].roles for step in moved)
    if inverted:
        yield (
            f"layout {writer.layout} stores the reciprocals of NVFP4 tensor factors, rounded once: "
            f"{inverted} weights; converting back may give a factor one unit away"
        )
    known = checkpoint.source.tensors
    plain = [s for s in steps if s.action in (PLAIN, RECIPROCAL) and math.prod(s.shape) == 1]
    count = sum(s.source in known and s.shape != known[s.source].shape for s in plain)
    if count:
        shape = list(writer.factor_shape)
        yield f"layout {writer.layout} stores factors of one element as {shape}: {count} tensors"
