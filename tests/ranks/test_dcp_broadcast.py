"""Full state dicts that rank 0 alone has, with quantized entries: ``broadcast_from_rank0``."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._state_dict_utils as torch_functions
import torch.distributed.checkpoint.state_dict as state_dict
from formats import assert_same_bytes
from fsdp_cases import RECIPES
from ranks import Ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch_process import run, run_ranks

import qtensor
import qtensor.distributed  # noqa: F401 - torch broadcasts quantized tensors with it
from qtensor.storage.ranks import state_dict_broadcast

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
recipes = pytest.mark.parametrize("recipe", list(RECIPES))


def build(recipe: str, seed: int, sharded: bool = True, stored: bool = True) -> tuple[Any, Any]:
    """Return a model and an optimizer whose state has the values of one step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256))
    qtensor.convert_(model, RECIPES[recipe](), quantized_params=stored)
    if sharded:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if stored:
        qtensor.optim.quantize_state_(optimizer, {"exp_avg": "fp8_blockwise"})
    model(torch.randn(32, 128)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def tensors(model: Any, optimizer: Any) -> list[Any]:
    found = [*model.parameters()]
    for parameter in model.parameters():
        found += [v for v in optimizer.state[parameter].values() if torch.is_tensor(v)]
    return [(t.full_tensor() if isinstance(t, DTensor) else t).detach() for t in found]


def assert_equal(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    pairs = [(a, b)]
    if isinstance(a, qtensor.QuantizedTensor):
        pairs = list(zip(a.buffers(), b.buffers(), strict=True))
    for x, y in pairs:
        assert_same_bytes(x, y)


def run_broadcast(recipe: str, sharded: bool, offload: bool) -> int:
    """Every rank has the bytes of rank 0 afterwards; return the number of quantized tensors."""
    source, target = (build(recipe, seed, sharded) for seed in (0, 1))
    model = copy.deepcopy(get_model_state_dict(source[0], options=FULL))
    state = copy.deepcopy(get_optimizer_state_dict(*source, options=FULL))
    if dist.get_rank():
        assert not model
    wanted = tensors(*source)
    quantized = [t for t in wanted if isinstance(t, qtensor.QuantizedTensor)]
    differ = [not torch.equal(a, b) for a, b in zip(wanted, tensors(*target), strict=True)]
    assert any(differ)
    options = copy.copy(BROADCAST)
    options.cpu_offload = offload
    set_model_state_dict(target[0], model, options=options)
    set_optimizer_state_dict(*target, state, options=BROADCAST)
    for a, b in zip(tensors(*target), wanted, strict=True):
        assert_equal(a, b)
    return len(quantized)


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "whole"])
@recipes
def test_codes_and_scales_are_broadcast(ranks: Ranks, recipe: str, sharded: bool) -> None:
    assert ranks.run(run_broadcast, recipe, sharded, False) == [4, 4]


def test_broadcast_entries_on_the_cpu(ranks: Ranks) -> None:
    assert ranks.run(run_broadcast, "mxfp8", True, True) == [4, 4]


def run_meta(recipe: str) -> None:
    """A model on the meta device takes the broadcast entries themselves."""
    source, _ = build(recipe, 0)
    full = copy.deepcopy(get_model_state_dict(source, options=FULL))
    torch.manual_seed(1)
    target = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256))
    qtensor.convert_(target, RECIPES[recipe](), quantized_params=True)
    fully_shard(target.to("meta"))
    set_model_state_dict(target, full, options=BROADCAST)
    for a, b in zip(target.parameters(), source.parameters(), strict=True):
        assert_equal(a.full_tensor(), b.full_tensor())


@pytest.mark.parametrize("recipe", ["mxfp8", "current"])
def test_a_model_on_the_meta_device(ranks: Ranks, recipe: str) -> None:
    ranks.run(run_meta, recipe)


def run_refused(stored: bool) -> str:
    """Rank 0 has MXFP8 weights, and the model does not."""
    source, _ = build("mxfp8", 0)
    full = copy.deepcopy(get_model_state_dict(source, options=FULL))
    other, _ = build("nvfp4", 1, stored=stored)
    before = [p.full_tensor().detach().clone() for p in other.parameters() if p.ndim > 1]
    with pytest.raises(qtensor.UnsupportedError) as raised:
        set_model_state_dict(other, full, options=BROADCAST)
    after = [p.full_tensor().detach() for p in other.parameters() if p.ndim > 1]
    for a, b in zip(after, before, strict=True):
        assert_equal(a, b)
    return str(raised.value)


@pytest.mark.parametrize("stored", [True, False], ids=["other format", "plain"])
def test_entries_that_do_not_fit_are_refused_on_every_rank(ranks: Ranks, stored: bool) -> None:
    got = r"a DTensor \(\[Shard\(dim=0\)\]\) of " + ("nvfp4" if stored else "a plain tensor")
    for rank, message in enumerate(ranks.run(run_refused, stored)):
        assert message.startswith(f"0.weight: broadcast_from_rank0[mxfp8] (rank {rank} of 2)")
        assert re.search(got, message), message


def run_unexpected() -> list[str]:
    """Rank 0 has a quantized entry that the model lacks."""
    source, _ = build("mxfp8", 0)
    full = copy.deepcopy(get_model_state_dict(source, options=FULL))
    if full:
        full["9.weight"] = full["2.weight"].clone()
    other, _ = build("mxfp8", 1)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*: "9.weight"'):
        set_model_state_dict(other, dict(full), options=BROADCAST)
    options = dataclasses.replace(BROADCAST, strict=False)
    return set_model_state_dict(other, full, options=options).unexpected_keys


def test_an_entry_that_the_model_lacks_has_its_own_name(ranks: Ranks) -> None:
    assert ranks.run(run_unexpected) == [["9.weight"]] * 2


PROGRAM = """
import sys
import torch
import qtensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

rank, store, more = int(sys.argv[1]), sys.argv[2], sys.argv[3]
exec(more)
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=2
)
torch.manual_seed(rank)
layer = torch.nn.Linear(64, 32)
weight = qtensor.quantize(layer.weight.detach(), "mxfp8")
layer.weight = torch.nn.Parameter(weight)
options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
set_model_state_dict(layer, {} if rank else layer.state_dict(), options=options)
torch.manual_seed(0)
expected = qtensor.quantize(torch.nn.Linear(64, 32).weight.detach(), "mxfp8")
assert all(map(torch.equal, layer.weight.buffers(), expected.buffers()))
print("right")
"""


def test_the_missing_import_is_named(tmp_path: Path) -> None:
    """Rank 0 raises before anything travels; the end of its process ends the other rank."""
    first, second = run_ranks(PROGRAM, tmp_path, "")
    assert re.search(
        r"UnsupportedError: broadcast\[mxfp8\].*Add `import qtensor\.distributed`", first.stderr
    )
    assert second.returncode != 0
    assert "right" not in first.stdout + second.stdout


def test_the_import_is_enough(tmp_path: Path) -> None:
    for rank in run_ranks(PROGRAM, tmp_path, "import qtensor.distributed"):
        assert rank.stdout == "right\n", rank.stderr


def test_no_broadcast_without_the_import() -> None:
    """No rank can see what the others receive into."""
    script = """
import torch, qtensor
dist = torch.distributed
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
q = qtensor.quantize(torch.randn(32, 32), "fp8")
try:
    dist.broadcast(q, 0)
except qtensor.UnsupportedError as error:
    assert "Add `import qtensor.distributed`" in str(error)
    import qtensor.distributed
    dist.broadcast(q, 0)
    print("right")
"""
    assert run(script, compiles=True).stdout == "right\n"


def test_the_functions_of_torch_are_replaced() -> None:
    """Watches torch: without these two functions, a broadcast would write codes as numbers."""
    for name, arguments in state_dict_broadcast._ARGUMENTS.items():
        original = state_dict_broadcast._ORIGINALS[name]
        assert tuple(inspect.signature(original).parameters)[: len(arguments)] == arguments
        assert getattr(torch_functions, name).__module__ == state_dict_broadcast.__name__
    assert hasattr(torch_functions, "_distribute_tensors")


def test_other_arguments_of_torch_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the functions of torch have other arguments, no codes are broadcast as numbers."""
    plain, q = torch.ones(32, 32), qtensor.quantize(torch.ones(32, 32), "mxfp8")
    calls: list[Any] = []

    def other(full_state_dict: Any, group: Any) -> None:
        calls.append((full_state_dict, group))

    monkeypatch.setattr(state_dict_broadcast, "_ORIGINALS", {})
    for module in (torch_functions, state_dict):
        monkeypatch.setattr(module, "_broadcast_state_dict", other)
    state_dict_broadcast.install()
    for module in (torch_functions, state_dict):
        with pytest.raises(qtensor.UnsupportedError, match=r"must be plain.*got layer\.weight"):
            module._broadcast_state_dict({"layer.weight": q, "layer.bias": plain}, None)
    assert not calls
    torch_functions._broadcast_state_dict({"layer.bias": plain}, "group")
    assert calls == [({"layer.bias": plain}, "group")]
