"""Compute linear layers whose tensors are DTensors: each rank multiplies its own parts.

The layer runs on local tensors, so that recipes, states and compiled code need no second
implementation. For each dim of the mesh, the placement of the weight (N, K) decides the others:

| weight | input (..., K) | output (..., N) | gradient of the input | of the weight |
|---|---|---|---|---|
| ``Shard(0)`` | ``Replicate`` | ``Shard(-1)`` | ``Partial`` | ``Shard(0)`` |
| ``Shard(1)`` | ``Shard(-1)`` | ``Partial`` | ``Shard(-1)`` | ``Shard(1)`` |
| ``Replicate`` | ``Shard(i)``, rows | ``Shard(i)`` | ``Shard(i)`` | ``Partial`` |
| ``Replicate`` | ``Replicate`` | ``Replicate`` | ``Replicate`` | ``Replicate`` |

An input with another placement is redistributed first. A bias is added after the sum over ranks,
as ``parallel_mode="row"`` does: then the layer reduces its output itself. A grouped layer has no
such exchange: there the first rank of those that sum adds the bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from qtensor.core.dtensors import from_part, is_dtensor, local_part, part_of
from qtensor.core.errors import ArgumentTypeError, UnsupportedError, fail
from qtensor.core.quantizer_registry import parse
from qtensor.functional.ranks.parallel import Parallel
from qtensor.storage.base import QuantizedTensorStorage
from qtensor.storage.process_groups import group_of_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


class SequenceExchange(NamedTuple):
    """The layer itself gathers an input whose rows are split, and splits the rows of a sum.

    Attributes:
        output_dim: the dim along which the output of a sum over ranks is split, None for no split.
    """

    output_dim: int | None = None


class LayerPlacements(NamedTuple):
    """The placements of a layer's tensors, one for each dim of the mesh.

    Attributes:
        input: the placements that the products read.
        output: placements of the local products.
        input_grad: of the gradient that each rank computes for its input.
        weight_grad: of the gradient of the weight.
        bias: of the bias.
        bias_grad: of the gradient of the bias.
        summed: dims of the mesh over which products are summed.
    """

    input: tuple[Placement, ...]
    output: tuple[Placement, ...]
    input_grad: tuple[Placement, ...]
    weight_grad: tuple[Placement, ...]
    bias: tuple[Placement, ...]
    bias_grad: tuple[Placement, ...]
    summed: tuple[int, ...]


class Schedule(Protocol):
    """The options of a layer that say where the gradient of the weight goes."""

    @property
    def delay_wgrad_compute(self) -> bool:
        """The gradient is computed after backward."""

    @property
    def fuse_wgrad_accumulation(self) -> bool:
        """Backward adds the gradient to ``main_grad``."""


class Localized(NamedTuple):
    """The local part of a layer's call.

    Attributes:
        input: (..., K) of this rank.
        weights: (N, K) of this rank, one for each group.
        biases: (N,) of this rank, one for each group, or [].
        parallel: the exchange that the layer does itself; None for none.
        mesh: the mesh of all DTensors of the call.
        placements: of the output.
        shape: of the whole output.
        sums_wgrad: the gradient of the weight is the sum of those of several ranks.
    """

    input: Tensor
    weights: list[Tensor]
    biases: list[Tensor]
    parallel: Parallel | None
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    sums_wgrad: bool

    def check_schedule(self, label: str, options: Schedule) -> None:
        """Refuse ways to accumulate the gradient of the weight that DTensors do not have.

        Args:
            label: the layer, for error messages.
            options: the options of the layer.

        Raises:
            UnsupportedError: the gradient is postponed, or ``main_grad`` would get this rank's part
                of a sum over ranks.
        """
        if options.delay_wgrad_compute:
            rule = "delay_wgrad_compute does not know how ranks share the gradient of a DTensor"
            got, fix = "weights that are DTensors", "Build the layer without it"
            fail(f"{label} weight", rule, got, fix, UnsupportedError)
        if options.fuse_wgrad_accumulation and self.sums_wgrad:
            rule = "fuse_wgrad_accumulation adds the gradient of this rank's rows to main_grad"
            fix = "Build the layer without it, or pass an input whose rows are not split"
            got = f"rows split over ranks ({list(self.placements)})"
            fail(f"{label} weight", rule, got, fix, UnsupportedError)

    def whole(self, out: Tensor, canonical: str = "") -> Tensor:
        """Return the output as a DTensor, given this rank's part.

        Args:
            out: the part.
            canonical: quantizer of the output, whose parts get the factors that they have in the
                whole; "" for a plain output.
        """
        result = from_part(out, self.mesh, self.placements, self.shape)
        if not canonical:
            return result
        output: Any = parse(canonical)
        return output(result)


def _where(t: DTensor) -> str:
    return part_of(t.placements) if is_dtensor(t) else "a plain tensor"


def placements_of(
    label: str, input: DTensor, weight: DTensor, *, splits_rows: bool = True
) -> LayerPlacements:
    """Return the placements for an input (..., K) and a weight (N, K).

    Args:
        label: the layer, for error messages.
        input: a DTensor.
        weight: a DTensor on the same mesh.
        splits_rows: whether ranks may have different rows of the input.

    Raises:
        UnsupportedError: a weight that is a pending sum, or split in strides.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard  # noqa: PLC0415 - see qtensor.core.dtensors

    last = input.ndim - 1
    rows: list[tuple[Placement, ...]] = []
    summed = []
    for i, (x, w) in enumerate(zip(input.placements, weight.placements, strict=True)):
        if w.is_shard(0):
            rows.append((Replicate(), Shard(last), Partial(), Shard(0), Shard(0), Shard(0)))
        elif w.is_shard(1):
            summed.append(i)
            rows.append((Shard(last), Partial(), Shard(last), Shard(1), Replicate(), Replicate()))
        elif w.is_replicate():
            own = splits_rows and x.is_shard() and not (x.is_shard(last) or x.is_shard(-1))
            p = x if own else Replicate()
            grad = Partial() if own else Replicate()
            rows.append((p, p, p, grad, Replicate(), grad))
        else:
            fix = "Redistribute it to Shard(0), Shard(1) or Replicate()"
            rule = "a weight must be Shard(0), Shard(1) or Replicate() on each dim of its mesh"
            fail(f"{label} weight", rule, _where(weight), fix, UnsupportedError)
    columns = [tuple([row[i] for row in rows]) for i in range(6)]
    return LayerPlacements._make([*columns, tuple(summed)])


def _on_one_mesh(label: str, input: Tensor, parameters: Sequence[Tensor]) -> list[DTensor]:
    """Return all tensors of a call; refuse a mix of DTensors and plain tensors, or of meshes."""
    tensors: list[Any] = [input, *parameters]
    mesh = next(t.device_mesh for t in tensors if is_dtensor(t))
    for i, t in enumerate(tensors):
        name = "parameter" if i else "input"
        if not is_dtensor(t):
            rule = f"the layer has DTensors, so its {name} must be one too"
            fix = f"Pass DTensor.from_local({name}, mesh, placements), or use a parallel style"
            fail(f"{label} {name}", rule, _where(t), fix, ArgumentTypeError)
        if t.device_mesh != mesh:
            rule = "all DTensors of a layer must be on one mesh"
            fail(f"{label} {name}", rule, f"{t.device_mesh} and {mesh}", "Redistribute one of them")
    return tensors


def localize(
    label: str,
    input: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    *,
    exchange: SequenceExchange | None = None,
    grouped: bool = False,
) -> Localized:
    """Return the local part of the call of a linear layer.

    Args:
        label: the layer, for error messages.
        input: (..., K).
        weights: (N, K) each.
        biases: (N,) each, or none.
        exchange: how the layer itself gathers and splits the rows of a sequence; None if DTensors
            do that.
        grouped: the layer exchanges nothing itself, and ranks cannot have different rows.

    Raises:
        QTensorError: the tensors are not DTensors of one mesh.
        UnsupportedError: the placements are none of the module's table.
    """
    x, *parameters = _on_one_mesh(label, input, (*weights, *biases))
    weight, mesh = parameters[0], x.device_mesh
    placements = placements_of(label, x, weight, splits_rows=not grouped)
    for other in parameters[1 : len(weights)]:
        if other.placements != weight.placements:
            rule = "the weights of all groups must have the placements of the first"
            fail(f"{label} weight", rule, _where(other), "Distribute all of them alike")
    parallel, wanted, grad, output = (
        None,
        placements.input,
        placements.input_grad,
        placements.output,
    )
    shape = (*x.shape[:-1], weight.shape[0])
    if not grouped and (exchange is not None or (biases and placements.summed)):
        parallel = _own_exchange(label, x, weight, placements, exchange)
    if parallel is not None and parallel.mode == "column":
        wanted = grad = x.placements
    elif parallel is not None:
        output = _reduced(placements, parallel)
    if wanted != x.placements:
        x = x.redistribute(placements=wanted)
    return Localized(
        x.to_local(grad_placements=grad),
        [w.to_local(grad_placements=placements.weight_grad) for w in parameters[: len(weights)]],
        [_local_bias(b, placements, grouped) for b in parameters[len(weights) :]],
        parallel,
        mesh,
        output,
        shape,
        any([p.is_partial() for p in placements.weight_grad]),
    )


def _local_bias(bias: DTensor, placements: LayerPlacements, first_adds: bool) -> Tensor:
    """Return this rank's part (N,) of a bias, or zeros if another rank adds it."""
    from torch.distributed.tensor import Partial  # noqa: PLC0415 - see qtensor.core.dtensors

    if bias.placements != placements.bias:
        bias = bias.redistribute(placements=placements.bias)
    if not (first_adds and placements.summed):
        return bias.to_local(grad_placements=placements.bias_grad)
    grad = [Partial() if i in placements.summed else p for i, p in enumerate(placements.bias_grad)]
    local = bias.to_local(grad_placements=tuple(grad))
    mesh = bias.device_mesh
    is_first = all([mesh.get_local_rank(i) == 0 for i in placements.summed])
    return local if is_first else torch.where(torch.zeros_like(local, dtype=torch.bool), local, 0.0)


def _own_exchange(
    label: str,
    input: DTensor,
    weight: DTensor,
    placements: LayerPlacements,
    exchange: SequenceExchange | None,
) -> Parallel | None:
    """Return the exchange that the layer does itself, or None if DTensors do all of it."""
    mesh = input.device_mesh
    if len(placements.summed) > 1:
        rule = "a weight with a bias can be split along in_features on one dim of the mesh only"
        fix = "Build the layer with bias=False, or use another placement"
        fail(f"{label} weight", rule, _where(weight), fix, UnsupportedError)
    if placements.summed:
        on, mode = placements.summed[0], "row"
        along = None if exchange is None else exchange.output_dim
    else:
        split = [i for i, w in enumerate(weight.placements) if w.is_shard(0)]
        if exchange is None or len(split) != 1:
            return None
        on, mode = split[0], "column"
        placement = input.placements[on]
        along = getattr(placement, "dim", None) if type(placement).__name__ == "Shard" else None
    size = mesh.size(on)
    group = group_of_mesh(mesh, on, "tensor parallel layer").group_name
    if along is not None and _splits_rows(input, on, along % input.ndim, mode):
        return Parallel(group, size, mode, True, along % input.ndim)
    return None if mode == "column" else Parallel(group, size, mode, False)


def _splits_rows(input: DTensor, on: int, along: int, mode: str) -> bool:
    """Return whether the layer can gather or split the rows of its call along dim ``along``.

    Args:
        input: a DTensor (..., K).
        on: the dim of the mesh over which rows are split.
        along: a dim of the input.
        mode: "column" or "row".
    """
    if along == input.ndim - 1 or input.shape[along] % input.device_mesh.size(on):
        return False
    if any([p.is_shard(along) for i, p in enumerate(input.placements) if i != on]):
        return False
    # The parts of a quantized input are joined along dim 0, or by DTensor.
    quantized = mode == "column" and isinstance(local_part(input), QuantizedTensorStorage)
    return along == 0 or not quantized


def _reduced(placements: LayerPlacements, parallel: Parallel) -> tuple[Placement, ...]:
    """Return the placements of an output that the layer has reduced."""
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415 - see qtensor.core.dtensors

    end = Shard(parallel.dim) if parallel.sequence else Replicate()
    return tuple([end if i in placements.summed else p for i, p in enumerate(placements.output)])
