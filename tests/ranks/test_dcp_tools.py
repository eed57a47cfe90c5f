"""Distributed checkpoints: killed ranks, other files."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dcp_tools_cases as cases
import pytest
import torch
from formats import FormatCase, assert_same_tensor, layouts, rand
from ranks import RankError, Ranks
from safetensors.torch import save_file
from torch_process import run_ranks

import qtensor


@pytest.mark.parametrize("asynchronous", [False, True], ids=["save", "async_save"])
def test_quantized_optimizer_state(ranks: Ranks, tmp_path: Path, asynchronous: bool) -> None:
    ranks.run(cases.resume, str(tmp_path / "checkpoint"), "fp8_blockwise", asynchronous)


KILLED = pytest.mark.nightly(reason="new processes; one kill is in the default tier")


@pytest.fixture
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    group = Ranks(tmp_path_factory.mktemp("gloo"), 2)
    yield group
    group.stop()


@pytest.mark.parametrize(
    ("victim", "file", "asynchronous"),
    [
        (1, ".distcp", False),
        pytest.param(0, ".metadata", False, marks=KILLED),
        pytest.param(0, ".distcp", True, marks=KILLED),
        pytest.param(0, ".metadata", True, marks=KILLED),
    ],
)
def test_a_killed_rank_leaves_the_older_checkpoint(
    mortal: Ranks, tmp_path: Path, victim: int, file: str, asynchronous: bool
) -> None:
    """A rank is killed when it opens its data, or rank 0 when it opens the metadata."""
    with pytest.raises(RankError, match=f"rank {victim} is gone"):
        mortal.run(cases.die_while_saving, str(tmp_path), victim, file, asynchronous)
    assert (tmp_path / "1/.metadata").exists()
    assert not (tmp_path / "2/.metadata").exists()
    for message in mortal.run(cases.after_the_death, str(tmp_path)):
        assert ".metadata" in message


@layouts
def test_torch_save_of_a_quantized_dtensor(
    ranks: Ranks, tmp_path: Path, case: FormatCase, options: dict[str, Any]
) -> None:
    ranks.run(cases.files_of_torch, str(tmp_path), case.name, options)


@layouts
def test_torch_files_load_into_shards(
    ranks: Ranks, tmp_path: Path, case: FormatCase, options: dict[str, Any]
) -> None:
    ranks.run(cases.torch_file_to_shards, str(tmp_path), case.name, options)


@layouts
def test_a_torch_file_is_broadcast(
    ranks: Ranks, tmp_path: Path, case: FormatCase, options: dict[str, Any]
) -> None:
    """Templates that torch's reader cannot fill are an error on every rank, and nobody waits."""
    for found in ranks.run(cases.broadcast_torch_file, str(tmp_path), case.name, options):
        assert list(found) == ["rows", "replicated", "format", "plain", "values"]
        for name, message in found.items():
            for rank in range(2):
                wanted = rf"layer\.w: BroadcastingTorchSaveReader.*rank {rank} of 2.*torch_save_to"
                assert re.search(wanted, message), (name, message)
        assert "got a DTensor ([Shard(dim=0)]) of" in found["rows"]
        assert "must be a plain tensor" in found["values"]


PROGRAM = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.format_utils as tools
import qtensor

rank, store, kind = int(sys.argv[1]), *sys.argv[2:]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
path = Path(store).with_name("file.pt")
if rank == 0:
    torch.save({"w": qtensor.quantize(torch.ones(64, 64), "mxfp8")}, path)
dist.barrier()
template = torch.zeros(64, 64)
if kind == "quantized":
    template = qtensor.quantize(template, "mxfp8")
try:
    dcp.load(
        {"w": template},
        storage_reader=tools.BroadcastingTorchSaveReader(),
        planner=tools.DynamicMetaLoadPlanner(),
        checkpoint_id=path,
    )
except BaseException as error:
    print(*error.failures.values())
print("plain numbers", (template.isfinite() & (template != 0)).any().item())
"""


@pytest.mark.parametrize("kind", ["plain", "quantized"])
def test_the_missing_import_is_named_on_every_rank(tmp_path: Path, kind: str) -> None:
    """No rank waits, and none takes codes for numbers."""
    for rank in run_ranks(PROGRAM, tmp_path, kind):
        assert "Add `import qtensor.distributed`" in rank.stdout, rank.stderr
        assert "plain numbers False" in rank.stdout


def test_torch_files_of_a_checkpoint_are_refused(tmp_path: Path) -> None:
    """``dcp_to_torch_save`` loads into plain tensors; a template of the quantizer is exact."""
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415 - takes a second
    import torch.distributed.checkpoint.format_utils as tools  # noqa: PLC0415

    q = qtensor.quantize(rand(256, 512), "mxfp8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": q}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
        with pytest.raises(BaseException) as caught:  # noqa: PT011 - torch's own, of ranks
            tools.dcp_to_torch_save(tmp_path / "checkpoint", tmp_path / "file.pt")
        template = {"w": qtensor.quantizer("mxfp8").quantize(torch.zeros(256, 512))}
        dcp.load(template, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    found = cases.messages(caught.value)
    assert "Load into quantizer('mxfp8').quantize(torch.zeros(shape))" in found
    assert_same_tensor(template["w"], q)


def test_safetensors_of_hugging_face(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(cases.hugging_face, str(tmp_path)):
        for name in ("sharded", "whole"):
            assert re.search(r"mxfp8\].*layer\.w.*qtensor\.checkpoints\.save", found[name]), name
        assert re.search(
            r"layer\.w: .*codes without their factors.*qtensor\.checkpoints", found["codes"]
        )


def test_codes_without_factors_are_refused(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415 - takes a second

    template = qtensor.quantize(torch.zeros(64, 64), "mxfp8")
    for dtype in (torch.float8_e4m3fn, torch.uint8, torch.int8):
        save_file({"w": torch.ones(64, 64).to(dtype)}, tmp_path / "model.safetensors")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(BaseException) as caught:  # noqa: PT011 - torch's own, of ranks
                dcp.load(
                    {"w": template},
                    storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)),
                    no_dist=True,
                )
        assert "codes without their factors" in cases.messages(caught.value)
    assert not template.dequantize().any()
