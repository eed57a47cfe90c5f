"""Distributed checkpoints of delayed scaling: every rank gets its state back."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import dcp_delayed_cases as cases
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch_process import run_ranks

import qtensor
from qtensor.modules.delayed_entries import RowsOfRanks, StateOfRank


@pytest.mark.parametrize("sharded", [True, False], ids=["fsdp", "plain"])
@pytest.mark.parametrize(("saved", "wanted"), [(2, 2), (2, 1), (1, 2)])
def test_ranks_get_their_own_state(
    ranks: Ranks, tmp_path: Path, saved: int, wanted: int, sharded: bool
) -> None:
    ranks.run(cases.reshard, str(tmp_path / "checkpoint"), sharded, saved, wanted)


OPTIONS = {
    "shards": {},
    "cpu": {"cpu_offload": True},
    "full": {"full_state_dict": True},
}


@pytest.mark.parametrize("stored", [False, True], ids=["plain", "stored"])
@pytest.mark.parametrize("reduced", [False, True], ids=["own", "reduced"])
@pytest.mark.parametrize("options", ["shards", "cpu"])
def test_the_step_after_a_resume(
    ranks: Ranks, tmp_path: Path, options: str, reduced: bool, stored: bool
) -> None:
    ranks.run(cases.resume, str(tmp_path / "checkpoint"), stored, reduced, OPTIONS[options])


@pytest.mark.parametrize("stored", [False, True], ids=["plain", "stored"])
@pytest.mark.parametrize("reduced", [False, True], ids=["own", "reduced"])
def test_the_step_after_a_full_state_dict(
    ranks: Ranks, tmp_path: Path, reduced: bool, stored: bool
) -> None:
    """The full state dict of each rank, without a broadcast, has the rank's own state."""
    ranks.run(cases.resume, str(tmp_path / "checkpoint"), stored, reduced, OPTIONS["full"])


@pytest.mark.parametrize("reduced", [False, True], ids=["own", "reduced"])
def test_a_broadcast_has_the_state_of_one_rank(ranks: Ranks, tmp_path: Path, reduced: bool) -> None:
    ranks.run(cases.broadcast, str(tmp_path / "checkpoint"), reduced)


PROGRAM = """
import io, sys
import torch
import qtensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

rank, store, source, more = int(sys.argv[1]), *sys.argv[2:]
exec(more)
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=2
)
layer = qtensor.Linear(64, 64, recipe=qtensor.recipes.DelayedScaling(amax_history_len=4))
if rank == 0:
    layer(torch.randn(32, 64)).sum().backward()
state = {} if rank else layer.state_dict()
if source == "file" and rank == 0:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    state = torch.load(file)
options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
set_model_state_dict(layer, state, options=options)
print(layer.state_dict()["_delayed_scaling.weight.amax_history"].count_nonzero().item() > 0)
"""


@pytest.mark.parametrize(
    "source", ["memory", pytest.param("file", marks=pytest.mark.nightly(reason="as from memory"))]
)
def test_a_broadcast_needs_the_import(tmp_path: Path, source: str) -> None:
    """Without it, torch would keep the state on rank 0."""
    first, _ = run_ranks(PROGRAM, tmp_path, source, "")
    assert "add `import qtensor.distributed`" in first.stderr.replace("Add", "add")
    (tmp_path / "store").unlink()
    for rank in run_ranks(PROGRAM, tmp_path, source, "import qtensor.distributed"):
        assert rank.stdout == "True\n", rank.stderr


def test_a_wrapper_gives_entries_its_prefix() -> None:
    model, other = trained(), qtensor.Linear(64, 64, recipe=cases.RECIPE)
    set_model_state_dict(torch.compile(other), get_model_state_dict(torch.compile(model)))
    for (name, value), (key, wanted) in zip(
        other.state_dict().items(), model.state_dict().items(), strict=True
    ):
        assert name == key
        assert torch.equal(value, wanted), name


def test_the_size_of_an_entry_is_that_of_all_ranks() -> None:
    """torch skips its comparison of sizes for a tensor without size(), and async_save needs it."""
    state = trained().state_dict()
    entry = state["_delayed_scaling.weight.scale"]
    assert "StateOfRank(tensor([" in repr(entry)
    assert not hasattr(entry, "size")
    with pytest.raises(AttributeError, match=r"Use \.shape.*async_stager=qtensor\.distributed"):
        entry.size()
    with pytest.raises(AttributeError, match=r"async_stager=qtensor\.distributed\.Stager"):
        dcp.async_save(state, checkpoint_id="never")
    staged = qtensor.distributed.Stager().stage(state)
    assert isinstance(staged["_delayed_scaling.weight.scale"], StateOfRank)
    assert all(torch.equal(staged[name], value) for name, value in state.items())


@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
def test_layers_that_some_ranks_hold(ranks: Ranks, tmp_path: Path, apart: bool) -> None:
    assert ranks.run(cases.stages, str(tmp_path / "checkpoint"), 1, True, apart) == ["", ""]


def test_layers_that_some_ranks_hold_need_their_group(ranks: Ranks, tmp_path: Path) -> None:
    """Watches torch: docs/distributed.md names the message and the way out."""
    for message in ranks.run(cases.stages, str(tmp_path / "checkpoint"), 1, False, False):
        assert "Failed to validate global plan" in message


@pytest.mark.parametrize("stored", [False, True], ids=["plain", "stored"])
def test_model_and_optimizer_load_one_after_the_other(ranks: Ranks, stored: bool) -> None:
    ranks.run(cases.separately, stored)


def test_every_rank_is_stored(ranks: Ranks, tmp_path: Path) -> None:
    for own, reduced in ranks.run(cases.one_entry, str(tmp_path)):
        assert (own, reduced) == (2 * 1024, 2 * 1024)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    group = Ranks(tmp_path_factory.mktemp("gloo"), 4)
    yield group
    group.stop()


@pytest.mark.nightly(reason="four processes; two ranks in test_ranks_get_their_own_state")
@pytest.mark.parametrize("saved", [1, 2, 3, 4])
@pytest.mark.parametrize("wanted", [1, 2, 3, 4])
def test_other_numbers_of_ranks(four: Ranks, tmp_path: Path, wanted: int, saved: int) -> None:
    four.run(cases.reshard, str(tmp_path / "checkpoint"), True, saved, wanted)


@pytest.mark.nightly(reason="four processes; two ranks in test_layers_that_some_ranks_hold")
@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
def test_pairs_of_ranks_hold_layers(four: Ranks, tmp_path: Path, apart: bool) -> None:
    assert set(four.run(cases.stages, str(tmp_path / "checkpoint"), 2, True, apart)) == {""}


def trained() -> torch.nn.Module:
    model = qtensor.Linear(64, 64, recipe=cases.RECIPE)
    model(torch.randn(32, 64)).sum().backward()
    return model


def test_files_of_torch_hold_plain_tensors() -> None:
    state = trained().state_dict()
    assert isinstance(state["_delayed_scaling.weight.scale"], StateOfRank)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert all(type(value) is torch.Tensor for value in loaded.values())
    assert all(torch.equal(state[key].detach(), loaded[key]) for key in loaded)


def test_joined_states_of_several_ranks_load() -> None:
    """``dcp_to_torch_save`` writes the states of all ranks into one tensor."""
    models = [trained() for _ in range(2)]
    names = [f"_delayed_scaling.weight.{name}" for name in ("scale", "amax_history")]
    scales, histories = (
        [m.state_dict()[name].as_subclass(torch.Tensor) for m in models] for name in names
    )
    state = models[0].state_dict()
    state.update(zip(names, (torch.cat(scales), torch.cat(histories)), strict=True))
    other = qtensor.Linear(64, 64)
    other.load_state_dict(state)
    found = [other.state_dict()[name].as_subclass(torch.Tensor) for name in names]
    assert torch.equal(found[0], torch.minimum(*scales))
    assert torch.equal(found[1], torch.maximum(*histories))


def test_rows_of_another_layer_are_refused() -> None:
    state = StateOfRank.of(torch.zeros(1024, 3), "amax_history", 0, 1)
    rows = RowsOfRanks(state, "fc.amax_history").narrow(0, 0, 1024)
    with pytest.raises(qtensor.QTensorError, match=r"fc.amax_history.*\(1024, 3\) values"):
        rows.copy_(torch.zeros(1024, 6))
