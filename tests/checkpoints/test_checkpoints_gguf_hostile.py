"""Damaged and hostile GGUF files: an error that names file and tensor, in bounded time."""

import io
import random
import struct
import tracemalloc

import pytest
import torch
from checkpoint_cases import EXAMPLES

from qtensor import checkpoints
from qtensor.checkpoints.containers import gguf
from tests.checkpoints.test_checkpoints_fuzz import read_all
from tests.checkpoints.test_checkpoints_gguf import (
    F32,
    MXFP4,
    NVFP4,
    gguf_bytes,
    info,
    pair,
    raw,
    text,
)

CASES = 200
"""Damaged files of each example in a run of the tests."""
ONES = raw(torch.ones(4))
A = info("a", (4,), F32, 0)


def array(kind, count, data=b""):
    return struct.pack("<IQ", kind, count) + data


HEADERS = {
    "version 1": (gguf_bytes(version=1), "got version 1"),
    "version 4": (gguf_bytes(version=4), "got version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "a big-endian file"),
    "2^63 tensors": (gguf_bytes(counts=(2**63, 0)), "9223372036854775808 tensors"),
    "2^63 key-values": (gguf_bytes(counts=(0, 2**63)), "9223372036854775808 key-values"),
    "a tensor too few": (gguf_bytes((), [A], ONES, counts=(2, 0)), "at most 4 dims"),
    "a key of 2^60 bytes": (gguf_bytes([struct.pack("<Q", 2**60) + bytes(13)]), "lies inside"),
    "a key that is not UTF-8": (gguf_bytes([pair(b"\xff", 0, b"\1")]), "a key is UTF-8"),
    "a key twice": (gguf_bytes([pair("a", 0, b"\1")] * 2), "'a' twice"),
    "a value of type 13": (gguf_bytes([pair("a", 13, bytes(8))]), "types 0 to 12"),
    "a text of 2^64 - 1 bytes": (gguf_bytes([pair("a", 8, b"\xff" * 8)]), "lies inside"),
    "an array of 2^60 bytes": (gguf_bytes([pair("a", 9, array(0, 2**60))]), "lies inside"),
    "an array of 2^60 texts": (gguf_bytes([pair("a", 9, array(8, 2**60))]), "elements of 'a'"),
    "an array of type 99": (gguf_bytes([pair("a", 9, array(99, 1, bytes(8)))]), "types 0 to 12"),
    "arrays 5 deep": (
        gguf_bytes([pair("a", 9, array(9, 1) * 5 + array(0, 1, b"\1"))]),
        "at most 4 deep",
    ),
    "data that begin too early": (gguf_bytes((), [A], ONES)[:-20] + ONES, "are zeros"),
    "alignment 0": (gguf_bytes([pair("general.alignment", 4, bytes(4))]), "power of two"),
    "alignment 24": (
        gguf_bytes([pair("general.alignment", 4, struct.pack("<I", 24))]),
        "power of two",
    ),
    "an alignment that is a text": (
        gguf_bytes([pair("general.alignment", 8, text("32"))]),
        "power of two",
    ),
}


@pytest.mark.parametrize("case", HEADERS)
def test_damaged_headers(case, tmp_path):
    data, message = HEADERS[case]
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    with pytest.raises(checkpoints.CheckpointError, match=message) as raised:
        checkpoints.open(path)
    assert tracemalloc.get_traced_memory()[1] < 4_000_000
    tracemalloc.stop()
    assert raised.value.file == str(path)
    assert len(str(raised.value)) < 1500


TENSORS = {
    "a name twice": ([A, A], ONES, "the name twice"),
    "a name that is not UTF-8": ([info(b"\xff", (4,), F32, 0)], ONES, "UTF-8"),
    "5 dims": ([info("a", (1,) * 5, F32, 0)], ONES, "at most 4 dims"),
    "2^32 - 1 dims": ([text("a") + b"\xff" * 4 + bytes(30)], ONES, "at most 4 dims"),
    "a dim of 2^63": ([info("a", (2**63,), F32, 0)], ONES, "below 2\\^63"),
    "a product of 2^80": ([info("a", (2**40, 2**40), F32, 0)], ONES, "below 2\\^63"),
    "a product that wraps to 4": ([info("a", (2**33, 2**31 + 1), F32, 0)], ONES, "2\\^63"),
    "an offset behind the end": ([info("a", (4,), F32, 2**40)], ONES, "inside the file"),
    "an offset of 2^64 - 32": ([info("a", (4,), F32, 2**64 - 32)], ONES, "inside the file"),
    "an offset that is not aligned": ([info("a", (4,), F32, 4)], ONES * 2, "multiples of 32"),
    "data that end early": ([info("a", (5,), F32, 0)], ONES, "cut off"),
    "no data": ([A], b"", "cut off"),
    "an overlap": ([A, info("b", (4,), F32, 0)], ONES, "do not overlap"),
    "a partial block": ([info("a", (48,), MXFP4, 0)], bytes(51), "whole blocks of 32"),
    "a partial NVFP4 block": ([info("a", (96, 2), NVFP4, 0)], bytes(108), "whole blocks of 64"),
    "a block type without dims": ([info("a", (), MXFP4, 0)], bytes(17), "whole blocks of 32"),
    "blocks that end early": ([info("a", (64, 2), NVFP4, 0)], bytes(71), "cut off"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_damaged_tensors(case, tmp_path):
    infos, data, message = TENSORS[case]
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes((), infos, data))
    with pytest.raises(checkpoints.CheckpointError, match=message) as raised:
        checkpoints.open(path)
    assert raised.value.file == str(path)
    assert raised.value.tensor in ({"a", "b"} if "UTF-8" not in case else {""})


SIDECARS = [
    ((2,), F32, r"got F32 of shape \[2\]"),
    ((1,), 1, "needs F32"),
    ((4, 1), F32, r"shape \[1, 4\]"),
]


@pytest.mark.parametrize(("dims", "kind", "message"), SIDECARS)
def test_factors_of_another_shape(dims, kind, message, tmp_path):
    infos = [info("a.weight", (64, 4), NVFP4, 0), info("a.scale", dims, kind, 160)]
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes((), infos, bytes(192)))
    with pytest.raises(checkpoints.CheckpointError, match=message) as raised:
        checkpoints.open(path)
    assert raised.value.tensor == "a.scale"
    assert raised.value.layout == "gguf"


def test_two_tensors_of_factors(tmp_path):
    infos = [info("a.weight", (64, 4), NVFP4, 0)]
    infos += [info("a.scale", (1,), F32, 160), info("a.weight.scale", (1,), F32, 192)]
    (tmp_path / "x.gguf").write_bytes(gguf_bytes((), infos, bytes(224)))
    with pytest.raises(checkpoints.CheckpointError, match="one tensor of factors"):
        checkpoints.open(tmp_path / "x.gguf")


def test_the_number_of_items_is_bounded(monkeypatch, tmp_path):
    """Many empty texts are a small file that would take long to walk."""
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes([pair("a", 9, array(8, 100, bytes(800)))]))
    checkpoints.open(path)
    monkeypatch.setattr(gguf, "MAX_ITEMS", 100)
    with pytest.raises(checkpoints.CheckpointError, match="at most 100 items"):
        checkpoints.open(path)


def test_the_size_of_a_header_is_bounded(monkeypatch, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes([pair("a", 8, text("x" * 1000))]))
    checkpoints.open(path)
    monkeypatch.setattr(gguf, "MAX_HEADER", 1000)
    with pytest.raises(checkpoints.CheckpointError, match="at most 1000 bytes"):
        checkpoints.open(path)


@pytest.mark.parametrize("folder", ["gguf_mxfp4", "gguf_nvfp4"])
def test_truncated_examples(folder):
    """A download that stopped: every file that lacks data is refused when it is opened."""
    data = (EXAMPLES / folder / "model.gguf").read_bytes()
    with checkpoints.open(io.BytesIO(data)) as checkpoint:
        last = max(i.start + i.nbytes for i in checkpoint.source.tensors.values())
    for size in range(4, last, 3):
        with pytest.raises(checkpoints.CheckpointError):
            checkpoints.open(io.BytesIO(data[:size]))


def damaged(data, chance):
    """Change one to four bytes of the header, or put numbers at the edge into it."""
    data = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(4, 350)
        kind = chance.randrange(4)
        if kind == 0:
            data[at] = chance.randrange(256)
        elif kind == 1:
            number = chance.choice([0, 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1])
            data[at : at + 8] = struct.pack("<Q", number)
        elif kind == 2:
            data[at:at] = bytes(chance.randrange(256) for _ in range(chance.randint(1, 9)))
        else:
            del data[at : at + chance.randint(1, 9)]
    return bytes(data)


@pytest.mark.parametrize("folder", ["gguf_mxfp4", "gguf_nvfp4"])
def test_damaged_examples(folder):
    """Reading everything raises a CheckpointError or nothing."""
    chance, refused = random.Random(folder), 0
    data = (EXAMPLES / folder / "model.gguf").read_bytes()
    for _ in range(CASES):
        error = read_all(io.BytesIO(damaged(data, chance)))
        refused += error is not None
        assert error is None or isinstance(error, checkpoints.CheckpointError)
    assert refused > CASES // 2


def test_the_layout_needs_the_container(tmp_path):
    with pytest.raises(checkpoints.CheckpointError, match="needs a GGUF file"):
        checkpoints.open(EXAMPLES / "ct_mxfp8", layout="gguf")
