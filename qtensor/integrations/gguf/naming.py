"""Plan which tensors of transformers make each tensor of a GGUF file, and the reverse."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtensor.core.errors import UnsupportedError, fail
from qtensor.integrations.gguf.families import OUTER, Experts, Family
from qtensor.integrations.gguf.rows import expert, in_turns, join_experts, pair_rows, take_rows
from qtensor.storage.tensor import QuantizedTensor

Make = Callable[..., Tensor]
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
FREQUENCIES = "rope_freqs.weight"
"""The tensor with the frequency factors of Llama 3, which transformers has in the config."""
_SUFFIXES = ("weight", "bias", "input_scale")
_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""How models with several parts begin the names of their language model."""


class Entry(NamedTuple):
    """Say how a tensor is made: ``make(*tensors)`` of the tensors ``sources``."""

    sources: tuple[str, ...]
    make: Make


class Plan(NamedTuple):
    """Hold the entries by the name of the result, and the sources that have no place there."""

    entries: dict[str, Entry]
    unknown: list[str]


def _same(tensor: Tensor) -> Tensor:
    return tensor


def plain_name(name: str) -> str:
    """Return the name of a tensor as in a model that is a language model alone."""
    for prefix, own in _PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name


# ---- to llama.cpp


def to_gguf(family: Family, config: Mapping[str, Any], names: Iterable[str]) -> Plan:
    """Return how each tensor of a file is made from those of transformers."""
    plan = Plan({}, [])
    experts: dict[str, dict[int, str]] = {}
    for name in names:
        known = plain_name(name)
        if family.experts is not None and f".{family.experts.module}." in known:
            _to_experts(plan, experts, family.experts, name, known)
            continue
        own = _renamed(family, known)
        if own is None:
            plan.unknown.append(name)
        else:
            plan.entries[own] = Entry((name,), _to_values(family, config, own))
    for own, sources in experts.items():
        plan.entries[own] = Entry(_in_order(own, sources), _joined)
    return plan


def _in_order(own: str, sources: Mapping[int, str]) -> tuple[str, ...]:
    """Return the tensors of all experts in the order of their numbers."""
    missing = sorted({*range(max(sources) + 1)} - sources.keys())
    if missing:
        fix = "Download the missing shard, or pass the whole state dict"
        fail("gguf", f"{own} has every expert", f"none for {missing[:5]}", fix, UnsupportedError)
    return tuple(sources[number] for number in sorted(sources))


def _joined(*tensors: Tensor) -> Tensor:
    """Return the stack of the tensors of all experts; of numbers, a vector."""
    if tensors[0].numel() == 1 and tensors[0].ndim < 2:
        return torch.stack([tensor.reshape(()) for tensor in tensors])
    return join_experts(tensors)


def _renamed(family: Family, name: str) -> str | None:
    """Return the name in a file of a tensor that is not of an expert."""
    module, _, suffix = name.rpartition(".")
    if module in OUTER and suffix in _SUFFIXES:
        return f"{OUTER[module]}.{suffix}"
    found = _LAYER.fullmatch(name)
    if found is None:
        return None
    block, inner = found.groups()
    if inner in family.block:  # a parameter of a layer itself
        return f"blk.{block}.{family.block[inner]}.weight"
    module, _, suffix = inner.rpartition(".")
    if module not in family.block or suffix not in _SUFFIXES:
        return None
    return f"blk.{block}.{family.block[module]}.{suffix}"


def _heads(config: Mapping[str, Any], name: str) -> int:
    """Return the number of heads of q or k, or 0 for other tensors of a file."""
    if name.endswith((".attn_q.weight", ".attn_q.bias")):
        return int(config["num_attention_heads"])
    if name.endswith((".attn_k.weight", ".attn_k.bias")):
        return int(config["num_key_value_heads"])
    return 0


def _to_values(family: Family, config: Mapping[str, Any], name: str) -> Make:
    """Return what makes the values of a file from those of transformers."""
    heads = _heads(config, name)
    if family.pairs and heads:
        return lambda t: take_rows(t, pair_rows(t.shape[0], heads))
    if family.norm_offset and name.endswith("_norm.weight"):
        return lambda t: t.float() + family.norm_offset
    return _same


def _to_experts(
    plan: Plan, stacks: dict[str, dict[int, str]], experts: Experts, name: str, known: str
) -> None:
    """Add a tensor of the experts of a layer to a plan."""
    found = _LAYER.fullmatch(known)
    block, inner = found.groups() if found else ("", "")
    key = inner.removeprefix(f"{experts.module}.")
    one = re.fullmatch(r"(\d+)\.(\w+)\.(weight|input_scale)", key)
    if one and one[2] in experts.projections:
        own = f"blk.{block}.{experts.projections[one[2]]}.{one[3]}"
        stacks.setdefault(own, {})[int(one[1])] = name
        return
    bias = key.endswith("_bias")
    suffix = "bias" if bias else "weight"
    key = key.removesuffix("_bias")
    if key == "down_proj" and (experts.interleaved or experts.stacked):
        make = _same if bias or experts.stacked else functools.partial(_rows_of, step=1)
        plan.entries[f"blk.{block}.ffn_down_exps.{suffix}"] = Entry((name,), make)
    elif key == "gate_up_proj" and (experts.interleaved or experts.stacked):
        for number, part in enumerate(("gate", "up")):
            if experts.stacked:
                make = functools.partial(_half, number=number)
            else:
                make = functools.partial(_rows_of, start=number, step=2, bias=bias)
            plan.entries[f"blk.{block}.ffn_{part}_exps.{suffix}"] = Entry((name,), make)
    else:
        plan.unknown.append(name)


def _rows_of(weight: Tensor, start: int = 0, step: int = 1, bias: bool = False) -> Tensor:
    """Return every ``step``-th row (E, N, K) of experts of gpt-oss; plain ones are (E, K, N)."""
    if bias:
        return weight[..., start::step].contiguous()
    rows = weight if isinstance(weight, QuantizedTensor) else weight.transpose(-2, -1)
    return take_rows(rows, torch.arange(start, rows.shape[1], step))


def _half(weight: Tensor, number: int) -> Tensor:
    """Return the first or the second half of the rows of each expert."""
    half = weight.shape[1] // 2
    return take_rows(weight, torch.arange(number * half, (number + 1) * half))


# ---- to transformers


def to_transformers(
    family: Family, config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]
) -> Plan:
    """Return how each tensor of transformers is made from those of a file, by their shapes."""
    plan = Plan({}, [])
    outer = {own: module for module, own in OUTER.items()}
    block = {own: module for module, own in family.block.items()}
    for name, shape in shapes.items():
        module, _, suffix = name.rpartition(".")
        if module in outer and suffix in _SUFFIXES:
            own = f"{outer[module]}.{suffix}"
        else:
            found = _BLOCK.fullmatch(name)
            number, inner = found.groups() if found else ("", "")
            module, _, suffix = inner.rpartition(".")
            if family.experts is not None and module in family.experts.projections.values():
                layer = f"model.layers.{number}.{family.experts.module}"
                _from_experts(plan, family.experts, name, (layer, module, suffix), shape)
                continue
            if module not in block or suffix not in _SUFFIXES:
                plan.unknown.append(name)
                continue
            own = f"model.layers.{number}.{block[module]}"
            own += "" if block[module].endswith("sinks") else f".{suffix}"
        plan.entries[own] = Entry((name,), _from_values(family, config, name))
    return plan


def _from_values(family: Family, config: Mapping[str, Any], name: str) -> Make:
    """Return what makes the values of transformers from those of a file."""
    heads = _heads(config, name)
    if family.pairs and heads:
        return lambda t: take_rows(t, pair_rows(t.shape[0], heads).argsort())
    if family.norm_offset and name.endswith("_norm.weight"):
        return lambda t: t.float() - family.norm_offset
    return _same


def _from_experts(
    plan: Plan, experts: Experts, name: str, parts: tuple[str, str, str], shape: Sequence[int]
) -> None:
    """Add the experts of a layer to a plan. ``parts`` are layer, module in the file, and suffix."""
    layer, module, suffix = parts
    projection = next(key for key, own in experts.projections.items() if own == module)
    if not experts.interleaved:
        for number in range(shape[0]):
            own = f"{layer}.{number}.{projection}.{suffix}"
            plan.entries[own] = Entry((name,), functools.partial(_expert, number=number))
        return
    ending = {"weight": "", "bias": "_bias"}.get(suffix, f".{suffix}")
    turned = _as_in_model if suffix == "weight" else _same
    if projection == "down_proj":
        plan.entries[f"{layer}.down_proj{ending}"] = Entry((name,), turned)
    elif projection == "gate_proj":
        sources = (name, name.replace("ffn_gate_exps", "ffn_up_exps"))
        make = _gate_up if suffix == "weight" else in_turns
        plan.entries[f"{layer}.gate_up_proj{ending}"] = Entry(sources, make)


def _expert(weights: Tensor, number: int) -> Tensor:
    return expert(weights, number)


def _as_in_model(weight: Tensor) -> Tensor:
    """Return experts of gpt-oss as transformers has them: plain ones are (E, K, N)."""
    quantized = isinstance(weight, QuantizedTensor)
    return weight if quantized else weight.transpose(-2, -1).contiguous()


def _gate_up(gate: Tensor, up: Tensor) -> Tensor:
    return _as_in_model(in_turns(gate, up))


class Renamed(Mapping[str, Tensor]):
    """Map the names of a plan to tensors, which are made at each access."""

    def __init__(
        self, plan: Plan, read: Callable[[str], Tensor], finish: Make | None = None
    ) -> None:
        """Take a plan, what reads a source, and what finishes ``(name, tensor)``."""
        self._plan, self._read, self._finish = plan, read, finish

    def __getitem__(self, name: str) -> Tensor:
        entry = self._plan.entries[name]
        tensor = entry.make(*map(self._read, entry.sources))
        return tensor if self._finish is None else self._finish(name, tensor)

    def __iter__(self) -> Iterator[str]:
        return iter(self._plan.entries)

    def __len__(self) -> int:
        return len(self._plan.entries)


def check_known(names: Sequence[str], family: Family, fix: str) -> None:
    """Refuse tensors that have no place.

    Raises:
        UnsupportedError: there is one.
    """
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        rule = f"every tensor has a place in a model of {family.architecture}"
        fail("gguf", rule, ", ".join(names[:5]) + more, fix, UnsupportedError)


def check_complete(family: Family, layers: int, names: Container[str]) -> None:
    """Refuse a model of a file without all of its weights.

    Raises:
        UnsupportedError: one of the names of the file is missing.
    """
    modules = [*family.block.values()]
    modules += family.experts.projections.values() if family.experts is not None else ()
    needed = ["token_embd.weight", "output_norm.weight"]
    needed += [f"blk.{layer}.{module}.weight" for layer in range(layers) for module in modules]
    missing = [name for name in needed if name not in names]
    if missing:
        rule = f"a model of {family.architecture} with {layers} layers has all of its weights"
        got = f"no {', '.join(missing[:3])}"
        fix = "Download the missing shard, or pass the whole state dict"
        fail("gguf", rule, got, fix, UnsupportedError)
