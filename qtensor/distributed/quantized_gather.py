"""Weights in high precision that ``fully_shard`` gathers as codes and scales."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from qtensor.autocasting import active_recipe
from qtensor.core.dtensors import local_part, part_of
from qtensor.core.errors import ArgumentTypeError, UnsupportedError, fail
from qtensor.core.quantizer_registry import QuantizerLike
from qtensor.core.torch_state import no_torch_function
from qtensor.library.quantize import QUANTIZE, maxima_of
from qtensor.modules.convert import Filter
from qtensor.modules.quantized_module import QuantizedModule
from qtensor.quantizers import Quantizer
from qtensor.recipes import Recipe, parse_recipe, role_quantizers
from qtensor.storage.base import QuantizedTensorStorage
from qtensor.storage.maxima import is_shared_by_rows, max_over_ranks
from qtensor.storage.process_groups import group_of_mesh
from qtensor.storage.ranks.fully_shard import (
    Gathered,
    GatheredWeight,
    check_dim,
    gathered,
    named_in_errors,
    sent_bytes,
    sent_quantizer,
    storage_of,
)

_OP = "quantized_all_gather"
_VIEWS = frozenset([
    *("detach", "alias", "contiguous", "view", "_unsafe_view", "as_strided"),
    *("slice", "split", "split_with_sizes"),
])
_COPIES = frozenset(["clone", "_to_copy", "new_zeros", "new_empty", "empty_like", "lift_fresh"])
"""Ops whose result is a weight of the same kind; all others return plain tensors."""


class _Memory:
    """What the tensors that share memory know about it.

    Attributes:
        root: the plain tensor that owns the memory. Views that a subclass makes inside of its ops
            do not share a version with it, so that plain views for others are views of the root.
        writes: the number of in-place ops on the weights. torch does not count ops on a subclass.
        maxima: those that ``reduce_amaxes`` computed: one value for the whole tensor, or the row
            (K,), for each tensor-wide maximum.
        valid_for: the writes, the version of the root and the ranks of the maxima. DTensor may keep
            an equal mesh whose groups have other names.
    """

    __slots__ = ("maxima", "root", "valid_for", "writes")

    def __init__(self, root: Tensor) -> None:
        self.root, self.writes = root, 0
        self.maxima: list[Tensor] = []
        self.valid_for: tuple[int, int, list[int]] | None = None


class MasterWeight(GatheredWeight, torch.Tensor):
    """A weight in high precision that travels quantized under ``fully_shard``.

    Optimizers, norms and all other code see its values. Before a gather, each rank quantizes its
    shard, and the gathered weight is a quantized tensor.

    Attributes:
        _high_precision: the values, plain.
        _quantizer_of_weight: quantizer of the gathered weight.
        _name: the parameter's name in errors.
        _memory: shared with the views of this tensor.
    """

    _high_precision: Tensor
    _quantizer_of_weight: Quantizer
    _name: str
    _memory: _Memory

    @staticmethod
    def __new__(
        cls: type[MasterWeight], values: Tensor, quantizer: Quantizer, name: str
    ) -> MasterWeight:
        """Wrap ``values`` (N, K), or a part of them."""
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=values.device,
        )
        self._high_precision, self._quantizer_of_weight, self._name = values, quantizer, name
        self._memory = _Memory(values)
        return self

    def __init__(self, values: Tensor, quantizer: Quantizer, name: str) -> None: ...

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        canonical = self._quantizer_of_weight.canonical
        return f"MasterWeight({self._high_precision!r}, gathered as {canonical!r})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Quantizer, str]]:
        return ["_high_precision"], (self._quantizer_of_weight, self._name)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[Quantizer, str], *_: object
    ) -> MasterWeight:
        return MasterWeight(inner["_high_precision"], *context)

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs or {}))
        weights = [leaf for leaf in leaves if isinstance(leaf, cls)]
        plain = [leaf._high_precision if isinstance(leaf, cls) else leaf for leaf in leaves]
        values, options = pytree.tree_unflatten(plain, structure)
        result = func(*values, **options)
        if func._schema.is_mutable:
            for weight in weights:
                weight._memory.writes += 1
                # An in-place op returns the tensor that it changed.
                result = weight if result is weight._high_precision else result
        name = func._schema.name.removeprefix("aten::")
        if name not in _VIEWS and name not in _COPIES:
            return result
        memory = weights[0]._memory if name in _VIEWS else None
        return pytree.tree_map_only(Tensor, lambda t: weights[0]._like(t, memory), result)

    def _like(self, values: Tensor, memory: _Memory | None) -> MasterWeight:
        """Return a weight with other values; a view has this weight's ``memory``."""
        other = MasterWeight(values, self._quantizer_of_weight, self._name)
        if memory is not None:
            other._memory = memory
        return other

    # ---- the hooks of fully_shard

    def _whole_quantizer(self) -> Any:
        return self._quantizer_of_weight

    def plain_view(self) -> Tensor:
        """Return the values as a plain tensor that shares their memory."""
        values = self._high_precision
        layout = values.size(), values.stride(), values.storage_offset()
        return self._memory.root.detach().as_strided(*layout)

    def _now(self, group: dist.ProcessGroup) -> tuple[int, int, list[int]]:
        ranks = dist.get_process_group_ranks(group)
        return self._memory.writes, self._memory.root._version, ranks

    def _maxima(
        self, values: Tensor, sent: QuantizerLike, group: dist.ProcessGroup
    ) -> list[Tensor] | None:
        """Return the maxima of a shard; maxima that all rows share are taken over all shards."""
        maxima = maxima_of(values, sent.canonical)
        flags = is_shared_by_rows(sent.canonical)
        shared = [a for a, flag in zip(maxima, flags, strict=True) if flag]
        if not shared or group.size() == 1:
            return maxima or None
        if self._memory.valid_for == self._now(group):
            # Rounding is monotonic: the maximum of rounded values is the rounded maximum.
            whole = [a.to(values.dtype).float() for a in self._memory.maxima]
        else:
            whole = max_over_ranks(shared, group.group_name, _OP)
        for target, reduced in zip(shared, whole, strict=True):
            target.copy_(reduced.view(target.shape))
        return maxima

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor, ...], Gathered]:
        """Return the bytes of this rank's shard, and what the second hook needs.

        The mesh has one dim. Values are rounded to the ``param_dtype`` of the policy.

        Raises:
            QTensorError: on every rank, if the shards have different numbers of rows or end inside
                a block.
            UnsupportedError: the weight is not sharded along dim 0.
        """
        with named_in_errors(self._name):
            group = group_of_mesh(mesh, None, _OP)
            return self._quantized_shard(group, tuple(outer_size), mp_policy.param_dtype)

    def _quantized_shard(
        self, group: dist.ProcessGroup, shape: tuple[int, ...], dtype: torch.dtype | None
    ) -> tuple[tuple[Tensor, ...], Gathered]:
        """Return the bytes of this rank's shard of a weight of ``shape``, rounded to ``dtype``."""
        quantizer, ranks = self._quantizer_of_weight, group.size()
        check_dim(self.shape, shape, quantizer)
        if shape[0] % ranks:
            rule = f"the {ranks} ranks must have equally many rows of the weight"
            fix = f"Use a number of rows that {ranks} divides, or leave the layer out by filter_fn"
            fail(f"{_OP} {self._name} (Shard(0))", rule, f"{shape[0]} rows", fix)
        values = self._high_precision if dtype is None else self._high_precision.to(dtype)
        data = gathered(values, quantizer, (shape[0] // ranks,) * ranks, group)
        maxima = self._maxima(values, data.sent, group)
        buffers = QUANTIZE(values, data.sent.canonical, None, maxima, None)
        return (sent_bytes(storage_of(data.sent, buffers, values.shape, data.dtype), data),), data


# ---- public calls --------------------------------------------------------------------------------


def quantized_all_gather(
    model: nn.Module, recipe: Recipe | None = None, filter_fn: Filter | None = None
) -> list[str]:
    """Make ``fully_shard`` gather the weights of the layers of qtensor as codes and scales.

    The parameters stay in high precision, for the optimizer and for checkpoints: a ``state_dict``
    holds plain tensors. Training has the same bytes as with a gather in high precision. Call this
    function before ``fully_shard`` and before the optimizer is created.

    Rowwise data travel alone if they determine the columnwise data: one factor for a tensor or
    row, and square blocks (``fp8``, ``fp8_rowwise``, and 2-D ``fp8_blockwise``, MX and NVFP4).
    With 1-D blocks both directions travel, which takes twice as many bytes.

    If a parallel style has split a weight, each rank of the style's mesh dim quantizes and gathers
    its own part.

    Args:
        model: holds layers of qtensor. It is changed in place: weights become new parameters.
        recipe: decides the quantizers; by default each layer's own, or the active one.
        filter_fn: ``(module, name) -> bool`` selects layers; None selects all.

    Returns:
        The names of the parameters that travel quantized.

    Raises:
        ArgumentTypeError: ``model`` is not a ``torch.nn.Module``.
        QTensorError: no layer has a recipe that quantizes weights; a weight is quantized or sharded
            already, or shared with another kind of module.
        UnsupportedError: the recipe quantizes weights with delayed scaling or stochastic rounding,
            or its backward reads weights in high precision.
    """
    if not isinstance(model, nn.Module):
        rule = "model must be a torch.nn.Module"
        fail(_OP, rule, type(model).__name__, "Pass one", ArgumentTypeError)
    found = list(_weights(model, recipe, filter_fn))
    if not found:
        rule = "the model must have layers of qtensor with a recipe that quantizes weights"
        fail(_OP, rule, "none", "Call qtensor.convert_(model, recipe) first, or pass recipe=")
    _check_owners(model, found)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for weight in found:
        old = getattr(weight.module, weight.attribute)
        if old not in made:
            values = _wrapped(old.detach(), weight)
            made[old] = nn.Parameter(values, requires_grad=old.requires_grad)
            made[old].__dict__.update(vars(old))
        setattr(weight.module, weight.attribute, made[old])
        weight.module.register_state_dict_post_hook(_plain_entries)
    return [weight.name for weight in found]


def _wrapped(old: Tensor, weight: _Weight) -> Tensor:
    """Return a weight, or the DTensor of a split one, whose values travel quantized."""
    if not isinstance(old, DTensor):
        return MasterWeight(old, weight.quantizer, weight.name)
    return _like_dtensor(old, MasterWeight(local_part(old), weight.quantizer, weight.name))


def _like_dtensor(old: DTensor, local: Tensor) -> DTensor:
    """Return the DTensor with another local part."""
    return DTensor.from_local(
        local,
        old.device_mesh,
        old.placements,
        run_check=False,
        shape=old.shape,
        stride=old.stride(),
    )


class _Weight(NamedTuple):
    """A parameter that will travel quantized."""

    module: QuantizedModule
    attribute: str
    name: str
    quantizer: Quantizer


def _weights(
    model: nn.Module, recipe: Recipe | None, filter_fn: Filter | None
) -> Iterable[_Weight]:
    for path, module in model.named_modules():
        if not isinstance(module, QuantizedModule):
            continue
        if filter_fn is not None and not filter_fn(module, path):
            continue
        own = module.recipe if recipe is None else recipe
        key = active_recipe(None if own is None else own.key)
        for weight in module._states:
            options = module._layer_options(weight)
            roles = role_quantizers(key, options.module, options.name) if key else {}
            quantizer = roles.get("weight")
            if quantizer is None:
                continue
            parameters = module._weights(weight)
            for attribute, parameter in module._parameters.items():
                if any([parameter is p for p in parameters]):
                    name = f"{path}.{attribute}" if path else attribute
                    _check_weight(name, module, parameter, quantizer, key)
                    both = quantizer.with_usage(rowwise=True, columnwise=True)
                    yield _Weight(module, attribute, name, both)


def _split_dims(module: nn.Module) -> int:
    """Return over how many dims of its mesh a parallel style has split a module, 0 or 1.

    ``distribute_module``, which the styles call, leaves this private note. Without it, the DTensors
    of a style are refused.
    """
    return int(getattr(module, "_distribute_module_applied", False))


def _check_weight(
    name: str, module: nn.Module, parameter: Tensor | None, quantizer: Quantizer, key: str
) -> None:
    own = local_part(parameter)
    # fully_shard puts its own dims of the mesh before the dim of a style.
    sharded = isinstance(parameter, DTensor) and parameter.device_mesh.ndim != _split_dims(module)
    if sharded or isinstance(own, (QuantizedTensorStorage, MasterWeight)):
        kind = type(own).__name__
        if isinstance(parameter, DTensor) and sharded:
            kind = f"a DTensor ({part_of(parameter.placements)} on {parameter.device_mesh})"
        rule = "the weight must be a plain parameter, or split by a parallel style on one mesh dim"
        fix = "Call quantized_all_gather once, before fully_shard; quantized weights need no call"
        fail(f"{_OP} {name}", rule, kind, fix)
    override = parse_recipe(key).backward_override
    if not quantizer.is_requantization_safe() or override == "high_precision":
        rule = "all ranks must find the codes of the whole weight from their shards, and backward "
        rule += "must read them"
        got = quantizer.canonical if override is None else f"backward_override={override!r}"
        fix = "Use a recipe with current or block scaling, such as Float8CurrentScaling"
        fail(f"{_OP} {name}", rule, got, fix, UnsupportedError)


def _check_owners(model: nn.Module, found: list[_Weight]) -> None:
    """Refuse weights that another kind of module shares, which needs their values."""
    ours = {(weight.module, weight.attribute) for weight in found}
    shared = {getattr(weight.module, weight.attribute): weight.name for weight in found}
    for path, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter in shared and (module, key) not in ours:
                rule = "the weight must belong to layers of qtensor alone"
                got = f"a weight that {path or 'the root'} shares as {key}"
                fail(f"{_OP} {shared[parameter]}", rule, got, "Leave the layer out by filter_fn")


def _plain_entries(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: object
) -> None:
    """Replace the entries of a module by plain tensors that share the memory of the weights."""
    for key in module._parameters:
        entry = state_dict.get(f"{prefix}{key}")
        if entry is not None:
            state_dict[f"{prefix}{key}"] = _plain(entry)


def _plain(entry: object) -> object:
    if isinstance(entry, MasterWeight):
        return entry.plain_view()
    if isinstance(entry, DTensor):
        local = local_part(entry)
        if isinstance(local, MasterWeight):
            return _like_dtensor(entry, local.plain_view())
    return entry


def reduce_amaxes(model: nn.Module) -> int:
    """Compute the maxima of all weights that travel quantized, with one collective.

    Call it after each optimizer step, on every rank, with sharded parameters. Without the call,
    each gather of a weight with a tensor-wide factor reduces its maxima itself; the bytes are the
    same. Formats with factors of blocks or rows alone need no maxima.

    Args:
        model: its weights were given to ``quantized_all_gather`` and ``fully_shard``.

    Returns:
        The number of float32 values that were reduced, over all process groups.

    Raises:
        QTensorError: a weight is not sharded, or over several dims of its mesh; or a process group
            was destroyed.
    """
    by_ranks: dict[tuple[int, ...], list[tuple[MasterWeight, list[Tensor]]]] = {}
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    with torch.no_grad():
        for name, module, parameter in _parameters(model):
            local = local_part(parameter)
            if not (isinstance(parameter, DTensor) and isinstance(local, MasterWeight)):
                continue
            sent = sent_quantizer(local._quantizer_of_weight)
            flags = is_shared_by_rows(sent.canonical)
            # A rotation mixes values, so the maxima of rounded values are not known.
            if any(flags) and sent.factors_are_local:
                maxima = maxima_of(local._high_precision, sent.canonical)
                shared = [a for a, flag in zip(maxima, flags, strict=True) if flag]
                group = _shard_group(name, parameter, _split_dims(module))
                ranks = tuple(dist.get_process_group_ranks(group))
                groups.setdefault(ranks, group)
                by_ranks.setdefault(ranks, []).append((local, shared))
        count = 0
        for ranks, entries in by_ranks.items():
            maxima = [a for _, own in entries for a in own]
            count += sum(a.numel() for a in maxima)
            name = groups[ranks].group_name
            reduced = iter(max_over_ranks(maxima, name, "reduce_amaxes"))
            for local, own in entries:
                local._memory.maxima = [next(reduced) for _ in own]
                local._memory.valid_for = local._now(groups[ranks])
    return count


def _parameters(model: nn.Module) -> Iterable[tuple[str, nn.Module, nn.Parameter]]:
    """Yield the name, the module and each parameter; one that modules share comes once."""
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        yield name, modules[name.rpartition(".")[0]], parameter


def _shard_group(name: str, parameter: DTensor, split_dims: int) -> dist.ProcessGroup:
    """Return the group over which ``fully_shard`` has sharded a weight.

    ``split_dims`` is the number of dims of a parallel style, the last ones of the mesh.
    """
    own = parameter.placements[: parameter.device_mesh.ndim - split_dims]
    dims = [i for i, placement in enumerate(own) if not placement.is_replicate()]
    if len(dims) != 1:
        rule = "fully_shard must shard the weight over one dim of its mesh"
        got = part_of(parameter.placements)
        fail(f"reduce_amaxes {name}", rule, got, "Call fully_shard first, on one dim")
    return group_of_mesh(parameter.device_mesh, dims[0], "reduce_amaxes")
