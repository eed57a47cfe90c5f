"""examples/train_fsdp.py: training, bytes and a resumed run on two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import Ranks

pytestmark = pytest.mark.project


EXAMPLES = Path(__file__).parents[2] / "examples"
WIDE = pytest.mark.nightly(reason="each trains three times; the default tier has four recipes")


def run_example(folder: str, *arguments: str) -> list[float]:
    """Return the losses of a run on this rank, which saves after its second step."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import train_fsdp  # noqa: PLC0415 - the folder is no package
    finally:
        sys.path.remove(str(EXAMPLES))
    small = ["--layers", "1", "--width", "64", "--length", "32", "--batch", "2"]
    found = train_fsdp.options([
        *small,
        *arguments,
        *("--checkpoint", folder, "--save-every", "2"),
    ])
    return train_fsdp.train(found, torch.device("cpu"))


@pytest.mark.parametrize(
    ("recipe", "gather"),
    [
        ("mxfp8", "plain"),
        ("current", "quantized"),
        ("nvfp4", "quantized"),
        ("delayed", "plain"),
        pytest.param("rowwise", "quantized", marks=WIDE),
        pytest.param("mxfp6", "quantized", marks=WIDE),
        pytest.param("blockwise", "plain", marks=WIDE),
    ],
)
def test_a_resumed_run_goes_on_with_the_same_bytes(
    ranks: Ranks, tmp_path: Path, recipe: str, gather: str
) -> None:
    options = ("--recipe", recipe, "--gather", gather)
    whole = ranks.run(run_example, str(tmp_path / "whole"), *options, "--steps", "4")
    ranks.run(run_example, str(tmp_path / "part"), *options, "--steps", "2")
    resumed = ranks.run(run_example, str(tmp_path / "part"), *options, "--steps", "4")
    assert [losses[2:] for losses in whole] == resumed
    # Each rank writes its shards of weights, of AdamW's averages and of delayed scaling.
    files = sorted((tmp_path / "whole" / "4").glob("*.distcp"))
    assert len(files) == 2
    for file in files:
        assert file.read_bytes() == (tmp_path / "part" / "4" / file.name).read_bytes(), file.name


@pytest.mark.nightly(reason="two new processes that import torch; the runs above are in the pool")
def test_the_command_runs_under_torchrun(tmp_path: Path) -> None:
    small = ["--layers", "1", "--width", "64", "--length", "32", "--batch", "2", "--steps", "2"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", str(EXAMPLES / "train_fsdp.py"), *small),
        ],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "step 2: loss" in done.stdout
    assert "MB gathered" in done.stdout
