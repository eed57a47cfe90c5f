"""The entries of delayed scaling in a ``state_dict``, and in distributed checkpoints.

Factors and maxima belong to a rank: each rank sees other batches, and under tensor parallelism
other parts of the weight. ``torch.distributed.checkpoint`` stores a plain tensor once, from one
rank. ``StateOfRank`` makes it store the values of all ranks, joined along dim 0, and reads them
back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor

from qtensor.core.dtensors import is_dtensor
from qtensor.core.errors import UnsupportedError, fail, this_rank
from qtensor.core.torch_state import no_torch_function
from qtensor.modules.state import DelayedState, LinearState, check_checkpoint
from qtensor.storage.process_groups import check_group
from qtensor.storage.ranks.state_dict_broadcast import is_installed

SCALE, HISTORY = "scale", "amax_history"

MAX_RANKS = 1 << 20
"""Upper bound of the ranks of a checkpoint; no memory is allocated for it."""

_OP = "distributed checkpoint[fp8_delayed]"


def reduced(of_ranks: Tensor, name: str) -> Tensor:
    """Return the state for all ranks from ``of_ranks`` (ranks, ...): the one with most headroom.

    That is the maximum of the histories, as ``amax_reduction_group`` takes it, and the smallest
    encode factor.
    """
    return of_ranks.amin(0) if name == SCALE else of_ranks.amax(0)


class Loaded(NamedTuple):
    """What a load has read so far.

    Attributes:
        ranks: the saved ranks.
        of_all: what ``reduced`` makes of their values.
        own: the values of the saved rank with the index of this rank, or None.
    """

    ranks: set[int]
    of_all: Tensor
    own: Tensor | None


class StateOfRank(Tensor):
    """Factors or maxima of one rank, which distributed checkpoints store for every rank.

    Attributes:
        kind: "scale" or "amax_history".
        rank: index of this rank among those that hold the layer; -1 if it does not hold it.
        ranks: number of ranks that hold the layer; 1 if all of them have the same values.
        loaded: what a load has read so far, or None.
    """

    kind: str
    rank: int
    ranks: int
    loaded: Loaded | None = None

    @staticmethod
    def of(values: Tensor, kind: str, rank: int, ranks: int) -> StateOfRank:
        """Return ``values`` as the state of a rank; the memory is shared."""
        state = values.as_subclass(StateOfRank)
        state.kind, state.rank, state.ranks = kind, rank, ranks
        return state

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = no_torch_function(func, types, args, kwargs or {})
        if func in _KEEP and type(result) is Tensor:
            state = args[0]
            return StateOfRank.of(result, state.kind, state.rank, state.ranks)
        return result

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"StateOfRank({self.as_subclass(Tensor)!r}, {self.rank} of {self.ranks})"

    def __deepcopy__(self, memo: dict[int, Any]) -> StateOfRank:
        copied = memo[id(self)] = self.clone()
        return copied  # type: ignore[return-value]

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        # Files of torch.save hold a plain tensor.
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    # ---- hooks of torch.distributed.checkpoint

    @property
    def size(self) -> Any:
        """Missing on purpose: torch must not compare it with the size in a checkpoint.

        A checkpoint holds the rows of all its ranks; ``RowsOfRanks`` checks the size of a row.
        """
        raise AttributeError(
            "the state of delayed scaling in a state_dict has a shape and no size(): a checkpoint "
            "joins the rows of all ranks. Use .shape, or entry.as_subclass(torch.Tensor); for "
            "broadcast_from_rank0, add `import qtensor.distributed`; for async_save, pass "
            "async_stager=qtensor.distributed.Stager()."
        )

    def _chunk(self, rank: int, ranks: int) -> Any:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata  # noqa: PLC0415 - takes a second

        rows, *rest = self.shape
        return ChunkStorageMetadata(
            offsets=torch.Size([rank * rows, *[0] * len(rest)]),
            sizes=torch.Size([ranks * rows, *rest]),
        )

    def __create_write_items__(self, fqn: str, object: Tensor) -> list[Any]:
        """Return what this rank writes: its rows of the joined tensor."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties  # noqa: PLC0415 - takes a second
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType  # noqa: PLC0415

        if self.rank < 0:
            return []
        chunk, size = self._chunk(self.rank, 1), self._chunk(0, self.ranks).sizes
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(self), size)
        index = MetadataIndex(fqn, chunk.offsets)
        return [WriteItem(index, WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[Any]:
        """Return what this rank reads: the rows of all ranks, however many there are."""
        return [self._chunk(0, MAX_RANKS)]

    def __get_tensor_shard__(self, index: object) -> RowsOfRanks:
        """Return what ``torch.distributed.checkpoint`` saves, or writes to."""
        return RowsOfRanks(self, getattr(index, "fqn", ""))


_KEEP = frozenset((Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.clone, Tensor.new_empty))
"""Functions that return the state of the same rank: copies, and moves to another device."""


class RowsOfRanks:
    """The rows of all saved ranks, from which a load fills the state of one rank.

    torch narrows it to the rows of a saved rank and calls ``copy_``, once for each saved rank. If
    as many ranks load as saved, each gets its own rows. Otherwise all get ``reduced`` ones.
    """

    def __init__(self, state: StateOfRank, entry: str) -> None:
        self.state, self.entry = state, entry
        rows, *rest = state.shape
        self.start, self.shape = 0, (MAX_RANKS * rows, *rest)

    def size(self, dim: int | None = None) -> Any:
        """Return all sizes, or the size of one dim."""
        return torch.Size(self.shape) if dim is None else self.shape[dim]

    def narrow(self, dim: int, start: int, length: int) -> RowsOfRanks:
        """Return ``length`` of these rows, from ``start`` on."""
        if dim:
            self._refuse(f"{length} of its {self.shape[dim]} columns")
        rows = RowsOfRanks(self.state, self.entry)
        rows.start, rows.shape = self.start + start, (length, *self.shape[1:])
        return rows

    def detach(self) -> Any:
        """Return the rows to load into; or, to save, the values of this rank."""
        whole = self.shape[0] == MAX_RANKS * self.state.shape[0]
        return self.state.as_subclass(Tensor) if whole else self

    @torch.no_grad()
    def copy_(self, values: Tensor, non_blocking: bool = False) -> RowsOfRanks:
        """Take the rows of one or several saved ranks."""
        state, rows = self.state, self.state.shape[0]
        first, rest = divmod(self.start, rows)
        if rest or values.shape[0] % rows or values.shape[1:] != state.shape[1:]:
            self._refuse(f"rows {self.start} to {self.start + len(values)}, {tuple(values.shape)}")
        for i, own in enumerate(values.to(state.device, state.dtype).split(rows)):
            self._take(first + i, own)
        return self

    def _take(self, rank: int, values: Tensor) -> None:
        """Take the values of the saved rank ``rank``."""
        state = self.state
        loaded = state.loaded
        if loaded is None or rank in loaded.ranks:  # another load
            loaded = state.loaded = Loaded(set(), values, None)
        of_all = reduced(torch.stack([loaded.of_all, values]), state.kind)
        own = values if rank == state.rank else loaded.own
        loaded.ranks.add(rank)
        state.loaded = Loaded(loaded.ranks, of_all, own)
        has_own = state.ranks == len(loaded.ranks) > 1 and own is not None
        state.copy_(own if has_own else of_all)  # type: ignore[arg-type]

    def _refuse(self, got: str) -> None:
        rule = f"a rank has {tuple(self.state.shape)} values"
        fix = "Load a checkpoint of the same layer"
        fail(f"{self.entry}: {_OP}", rule, got, fix, UnsupportedError)


def place(weights: Sequence[Any], group: str | None) -> tuple[int, int]:
    """Return (rank, ranks) of this process among those whose checkpoint holds the layer.

    The ranks of its mesh hold a sharded weight. A plain weight is held by the ranks of ``group``,
    the group over which the last step reduced maxima; without one, by all ranks of the program. The
    group does not make all entries equal: the newest maxima are a rank's own until the next step.
    """
    sharded = is_dtensor(weights[0])
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if sharded:
        mesh = weights[0].device_mesh
        coordinate, ranks = mesh.get_coordinate(), mesh.size()
        if coordinate is None:
            return -1, ranks
        rank = 0
        for index, size in zip(coordinate, mesh.shape, strict=True):
            rank = rank * size + index
    elif group:
        found = check_group(group, "state_dict[fp8_delayed]")
        return found.rank(), found.size()
    return rank, ranks


def save_entries(module: Any, destination: dict[str, Any], prefix: str) -> None:
    """Add the entries of delayed scaling of a module to its ``state_dict``."""
    for weight, delayed in used_states(module):
        key = f"{prefix}_delayed_scaling.{weight}"
        where = place(module._weights(weight), module._states[weight].group)
        destination[f"{key}.{SCALE}"] = StateOfRank.of(delayed.scale.clone(), SCALE, *where)
        destination[f"{key}.{HISTORY}"] = StateOfRank.of(delayed.merged(), HISTORY, *where)


def used_states(module: Any) -> Iterator[tuple[str, DelayedState]]:
    """Yield the name of the weight and the state of each layer that has or will have one."""
    for weight, state in module._states.items():
        delayed = state.delayed_state
        if module._needs_delayed(weight) or (delayed is not None and delayed.used):
            yield weight, module._delayed(weight)


def take_entries(
    module: Any, state_dict: dict[str, Any], prefix: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """Remove the entries of delayed scaling from a dict, and return checked values by weight."""
    loaded: dict[str, tuple[Tensor, Tensor]] = {}
    for weight, state in module._states.items():
        key = f"{prefix}_delayed_scaling.{weight}"
        names = (f"{key}.{SCALE}", f"{key}.{HISTORY}")
        present = [name for name in names if name in state_dict]
        label = f"{module.label} {key}"
        if len(present) == 1:
            rule = "the state of delayed scaling is two entries, scale and amax_history"
            fail(label, rule, f"{present[0]} alone", "Load both, or leave out both")
        if present:
            _check_taught(label)
            scale, history = (state_dict.pop(name) for name in names)
            scale, history = _of_this_rank(module._weights(weight), state, scale, history)
            check_checkpoint(label, scale, history, state.groups)
            loaded[weight] = (scale, history)
    return loaded


def _check_taught(label: str) -> None:
    """Refuse entries that ``broadcast_from_rank0`` would have given to rank 0 alone."""
    if (rank := this_rank()) and not is_installed():
        rule = "with broadcast_from_rank0, the other ranks get them after an import alone"
        fix = "Add `import qtensor.distributed` to the program"
        fail(label, rule, f"entries for {rank}, without the import", fix, UnsupportedError)


def _of_this_rank(
    weights: Sequence[Any], state: LinearState, scale: object, history: object
) -> tuple[Any, Any]:
    """Return this rank's part of the entries that ``dcp_to_torch_save`` joined from all ranks.

    Other entries are returned as they are.
    """
    columns = 3 * state.groups
    if not (isinstance(scale, Tensor) and isinstance(history, Tensor)) or scale.ndim != 1:
        return scale, history
    saved, rest = divmod(scale.shape[0], columns)
    fits = history.ndim == 2 and history.shape[1] == columns and saved > 1 and not rest
    if not fits or history.shape[0] % saved:
        return scale, history
    rank, ranks = place(weights, None)
    both = scale.view(saved, columns), history.view(saved, -1, columns)
    if saved == ranks and rank >= 0:
        return both[0][rank], both[1][rank]
    return reduced(both[0], SCALE), reduced(both[1], HISTORY)


def entry_buffers(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the entries of delayed scaling with their tensors, as if these were buffers."""
    for weight, delayed in used_states(module):
        is_meta = module._weights(weight)[0].is_meta
        for name in (SCALE, HISTORY):
            values = getattr(delayed, name)
            # The state stays on the CPU while its weight has no device; torch accepts one device.
            yield f"_delayed_scaling.{weight}.{name}", values.to("meta") if is_meta else values
