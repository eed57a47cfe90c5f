"""Quantize DTensors: each rank quantizes its part, with the codes of the whole tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from torch import Tensor
from torch.compiler import is_compiling

from qtensor.core.buffer_shapes import Shape
from qtensor.core.compile_constants import compile_constant
from qtensor.core.dtensors import from_part, install_rules, part_of
from qtensor.core.errors import UnsupportedError, fail
from qtensor.core.quantizer_registry import parse
from qtensor.library.quantize import maxima_of
from qtensor.storage.maxima import amax_axes
from qtensor.storage.process_groups import Group, group_of_mesh, reduce_max
from qtensor.storage.ranks.splits import note_splits

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from qtensor.quantizers.call import Called
    from qtensor.storage.tensor import QuantizedTensor


def check_parts(quantizer: Called, x: DTensor) -> DTensor:
    """Return a DTensor whose parts can be quantized one by one: ``x``, without partial sums.

    Raises:
        QTensorError: a shard ends inside a block, or is split in strides.
        UnsupportedError: stochastic rounding, whose noise each rank would draw for itself.
    """
    op = f"quantize[{quantizer.format}]"
    if quantizer.stochastic_rounding:
        rule = "a DTensor is rounded to nearest, because ranks would draw other noise than one rank"
        fix = "Quantize x.to_local(), or use a quantizer without stochastic_rounding"
        fail(op, rule, quantizer.canonical, fix, UnsupportedError)
    if any([p.is_partial() for p in x.placements]):
        from torch.distributed.tensor import Replicate  # noqa: PLC0415 - see qtensor.core.dtensors

        x = x.redistribute(placements=[Replicate() if p.is_partial() else p for p in x.placements])
    _check_borders(op, quantizer, x)
    return x


def maxima_over_mesh(
    quantizer: Called, x: DTensor, part: Tensor, group: Group | None
) -> list[Tensor] | None:
    """Return the maxima of a DTensor, which decide the factors of each part.

    Maxima of rows, columns or the tensor are reduced over the ranks that share them.

    Args:
        quantizer: the quantizer.
        x: the DTensor.
        part: this rank's part of it, without a gradient.
        group: a further process group over which maxima are reduced, or None.

    Returns:
        None if each rank finds the maxima of its part by itself.
    """
    axes = amax_axes(quantizer.canonical)
    if quantizer.needs_scale or not axes or not _splits(x):
        return None
    maxima = maxima_of(part, quantizer.canonical)
    return [_over_ranks(a, x, of, group) for a, of in zip(maxima, axes, strict=True)]


def whole_of(
    x: DTensor, part: QuantizedTensor, amax: Tensor | None
) -> tuple[QuantizedTensor, Tensor | None]:
    """Return the DTensor of quantized parts of ``x``, and the amax of delayed scaling of all parts.

    Args:
        x: the DTensor that was quantized.
        part: this rank's quantized part.
        amax: of the part, float32 (1,), or None.
    """
    install_rules()
    whole = from_part(part, x.device_mesh, x.placements, x.shape)
    if not is_compiling():
        note_splits(whole)
    if amax is not None:
        amax = _over_ranks(amax, x, ("m", "k"), None)
    # A DTensor of quantized parts is used as a quantized tensor.
    return cast("QuantizedTensor", whole), amax


def _splits(x: DTensor) -> list[tuple[int, int]]:
    """Return (dim of the mesh, dim of the tensor) of each split over several ranks."""
    # Shard has a dim, and so has the strided shard that fully_shard makes of a part.
    dims = [getattr(p, "dim", None) for p in x.placements]
    return [
        (i, dim % x.ndim)
        for i, dim in enumerate(dims)
        if dim is not None and x.device_mesh.size(i) > 1
    ]


def _over_ranks(amax: Tensor, x: DTensor, axes: Sequence[str], group: Group | None) -> Tensor:
    """Return maxima, reduced over the ranks that split one of ``axes``, and over ``group``."""
    for mesh_dim, dim in _splits(x):
        if ("k" if dim == x.ndim - 1 else "m") in axes:
            amax = reduce_max(amax, group_of_mesh(x.device_mesh, mesh_dim, "quantize"))
    return amax if group is None else reduce_max(amax, group)


@compile_constant
def block_sizes(canonical: str) -> tuple[int, int]:
    """Return the number of rows and of columns that must stay together."""
    quantizer = parse(canonical)
    per = {"m": 1, "k": 1}
    for slot in quantizer.slots:
        for dim in slot.dims:
            if dim.axis in per:
                per[dim.axis] = math.lcm(per[dim.axis], dim.per)
    square = quantizer.square_block
    return math.lcm(per["m"], square), math.lcm(per["k"], square)


def _check_borders(op: str, quantizer: Called, x: DTensor) -> None:
    """Refuse shards that end inside a block of the whole tensor."""
    rows, columns = block_sizes(quantizer.canonical)
    size = list(x.shape)
    for mesh_dim, dim in _splits(x):
        ranks = x.device_mesh.size(mesh_dim)
        if type(x.placements[mesh_dim]).__name__ == "_StridedShard":
            rule = "a part of a DTensor must be one piece of the whole"
            fix = "Redistribute it to Shard or Replicate first"
            fail(op, rule, part_of(x.placements), fix, UnsupportedError)
        part = -(-size[dim] // ranks)
        block = columns if dim == x.ndim - 1 else _rows_apart(x.shape, dim, rows)
        if part < size[dim] and part % block:
            rule = "a part of a DTensor must end at the border of a block"
            got = (
                f"dim {dim} of {tuple(x.shape)} in parts of {part}, in which blocks take {block} "
                f"({part_of(x.placements)})"
            )
            fix = f"Pad the dim to a multiple of {ranks * block}, or redistribute to Replicate()"
            fail(op, rule, got, fix)
        size[dim] = part


def _rows_apart(shape: Shape, dim: int, rows: int) -> int:
    """Return the number of entries of ``dim`` that hold a whole number of blocks of rows."""
    inner = math.prod(shape[dim + 1 : -1])
    return rows // math.gcd(rows, inner)
