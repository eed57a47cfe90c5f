"""Options of a conversion: their types, and many of them together."""

import itertools

import pytest
import torch
from checkpoint_cases import stored_bytes

from qtensor import checkpoints
from qtensor.checkpoints import CheckpointError

CONFIG = {"model_type": "llama", "dtype": "bfloat16"}
CT = "compressed-tensors"


@pytest.mark.parametrize(
    "option",
    [{"include": 3}, {"exclude": b"x"}, {"include": ["a", None]}, {"progress": 3}],
    ids=str,
)
def test_options_of_another_type(option, tmp_path):
    checkpoints.save({"a.weight": torch.randn(64, 64)}, tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"shell patterns|progress is a function"):
        checkpoints.convert(tmp_path / "a", tmp_path / "b", format="mxfp8", **option)
    assert not (tmp_path / "b").exists()


PATTERNS = {
    "all": {},
    "include": {"include": "*.0.*"},
    "exclude": {"exclude": ["*.1.*", "*.2.*"]},
    "both": {"include": ["*.0.*", "*.1.*"], "exclude": "*.1.*"},
}


@pytest.mark.parametrize("case", PATTERNS)
def test_combined_options_give_the_same_bytes(case, tmp_path):
    """Threads, shards, overwriting and beginning anew do not matter to the tensors."""
    weights = {f"layers.{i}.weight": torch.randn(96, 128).bfloat16() for i in range(4)}
    checkpoints.save(weights, tmp_path / "plain", layout="plain", config=CONFIG)
    options = {"layout": CT, "format": "nvfp4", **PATTERNS[case]}
    checkpoints.convert(tmp_path / "plain", tmp_path / "want", **options)
    want = stored_bytes(tmp_path / "want")
    for jobs, resume, size in itertools.product((1, 2, 7), (True, False), (9_000, "5GB")):
        more = {"jobs": jobs, "resume": resume, "shard_size": size, "overwrite": True}
        report = checkpoints.convert(tmp_path / "plain", tmp_path / "out", **options, **more)
        chosen = {"all": 4, "include": 1, "exclude": 2, "both": 1}[case]
        assert report.counts().get("quantized") == chosen
        assert stored_bytes(tmp_path / "out") == want


def test_a_folder_that_is_not_writable_is_replaced_and_removed(tmp_path):
    """The exchange needs the folder above alone; the old one must not stay under another name."""
    checkpoints.save({"a.weight": torch.randn(64, 64)}, tmp_path / "a", layout="plain")
    checkpoints.save({"a.weight": torch.randn(64, 64)}, tmp_path / "out")
    (tmp_path / "out").chmod(0o555)
    for _ in range(2):
        checkpoints.convert(tmp_path / "a", tmp_path / "out", "plain", overwrite=True)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "out"]
