"""Distributed checkpoints of delayed scaling: every rank gets its state back."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import dcp_delayed_cases as cases
import pytest
import torch
from ranks import Ranks

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
@pytest.mark.parametrize("options", ["full"])
def test_the_step_after_a_full_state_dict(
    ranks: Ranks, tmp_path: Path, options: str, stored: bool
) -> None:
    """It holds the state of rank 0, so that the maxima are reduced over the ranks."""
    ranks.run(cases.resume, str(tmp_path / "checkpoint"), stored, True, OPTIONS[options])


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
