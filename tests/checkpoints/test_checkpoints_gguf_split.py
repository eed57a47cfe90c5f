"""GGUF models in several files, as llama-gguf-split writes them."""

import struct

import pytest
import torch
from checkpoint_cases import assert_same_bytes

from qtensor import checkpoints
from tests.checkpoints.test_checkpoints_gguf import F32, MXFP4, gguf_bytes, info, mxfp4, pair, raw


def split_keys(number, count, total):
    keys = [("split.no", 2, "<H", number), ("split.count", 2, "<H", count)]
    keys.append(("split.tensors.count", 5, "<i", total))
    return [pair(key, kind, struct.pack(form, value)) for key, kind, form, value in keys]


def write(folder, *, numbers=(0, 1), counts=(2, 2), total=2, names=("a.weight", "b.weight")):
    """Two parts: an MXFP4 weight, and a plain one."""
    blocks, _ = mxfp4(4, 64)
    plain = torch.arange(6.0)
    parts = [(names[0], (64, 4), MXFP4, raw(blocks)), (names[1], (6,), F32, raw(plain))]
    for i, (name, dims, kind, data) in enumerate(parts):
        pairs = split_keys(numbers[i], counts[i], total)
        body = gguf_bytes(pairs, [info(name, dims, kind, 0)], data)
        (folder / f"model-{i + 1:05d}-of-00002.gguf").write_bytes(body)
    return plain


def test_parts_are_one_model(tmp_path):
    """A folder, the first part and another one open the whole; a copy is one file."""
    plain = write(tmp_path)
    for path in (tmp_path, *sorted(tmp_path.iterdir())):
        with checkpoints.open(path) as checkpoint:
            assert checkpoint.layout == "gguf"
            assert list(checkpoint) == ["a.weight", "b.weight"]
            assert checkpoint["a.weight"].shape == (4, 64)
            assert_same_bytes(checkpoint["b.weight"], plain)
            checkpoint.release("a.weight")
    with checkpoints.open(tmp_path) as checkpoint:
        checkpoints.save(checkpoint, tmp_path / "copy.gguf", layout="gguf")
        with checkpoints.open(tmp_path / "copy.gguf") as copy:
            assert_same_bytes(copy["a.weight"], checkpoint["a.weight"])
            assert not any(key.startswith("split.") for key in copy.source.extra["key_values"])


def test_a_missing_part(tmp_path):
    write(tmp_path)
    (tmp_path / "model-00002-of-00002.gguf").unlink()
    with pytest.raises(checkpoints.CheckpointError, match="00002-of-00002") as raised:
        checkpoints.open(tmp_path)
    assert "Download" in str(raised.value)


def test_a_part_of_another_name(tmp_path):
    write(tmp_path)
    (tmp_path / "model-00001-of-00002.gguf").rename(tmp_path / "x.gguf")
    with pytest.raises(checkpoints.CheckpointError, match="are named NAME-00001-of-00002"):
        checkpoints.open(tmp_path / "x.gguf")
    with (tmp_path / "x.gguf").open("rb") as file, pytest.raises(checkpoints.CheckpointError):
        checkpoints.open(file)


DAMAGED = [
    ({"numbers": (0, 0)}, "this is part 1 of 2"),
    ({"counts": (2, 3)}, "this is part 1 of 2"),
    ({"total": 3}, "the parts have 3 tensors; got 2"),
    ({"names": ("a.weight", "a.weight")}, "each name occurs once"),
]


@pytest.mark.parametrize(("options", "message"), DAMAGED)
def test_parts_that_do_not_fit(options, message, tmp_path):
    write(tmp_path, **options)
    with pytest.raises(checkpoints.CheckpointError, match=message):
        checkpoints.open(tmp_path / "model-00001-of-00002.gguf")
