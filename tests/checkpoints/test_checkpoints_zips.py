"""Zips of torch.save: damaged ones, and small ones that would take much time or memory."""

import json
import os
import random
import struct
import zipfile

import pytest
import torch_process
from checkpoint_cases import EXAMPLES
from pickle_cases import refused, tensor_pickle, torch_zip
from places import PYTHONPATH

from qtensor import checkpoints
from qtensor.checkpoints.containers import torch_pickle
from qtensor.checkpoints.containers.torch_zip import TorchZip

PICKLED = ("te_float8", "te_mxfp8_nvfp4", "torchao_pickle")


# ---- zips

ENTRIES = {
    "../x": "plain paths",
    "/x": "plain paths",
    "model/../../x": "plain paths",
    "model/./x": "plain paths",
    "model//x": "plain paths",
    "..\\x": "plain paths",
    "C:/x": "plain paths",
    "other/data.pkl": r"one \*/data.pkl",
    "model/deep/data.pkl": r"one \*/data.pkl",
}


@pytest.mark.parametrize("name", ENTRIES)
def test_names_of_entries(name, tmp_path):
    path = torch_zip(tmp_path / "x.pt", tensor_pickle(), {"0": bytes(16)})
    with zipfile.ZipFile(path, "a") as file:
        file.writestr(name, b"x")
    refused(path, ENTRIES[name])
    assert [p.name for p in tmp_path.iterdir()] == ["x.pt"]


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_damaged_zips(tmp_path):
    good = torch_zip(tmp_path / "x.pt", tensor_pickle(), {"0": bytes(16)}).read_bytes()
    path = tmp_path / "y.pt"
    with zipfile.ZipFile(torch_zip(path, tensor_pickle(), {"0": bytes(16)}), "a") as file:
        file.writestr("model/data/0", bytes(16))
    refused(path, "occurs once")
    refused(torch_zip(path, tensor_pickle(), {"0": bytes(16)}, byteorder=b"big"), "little-endian")
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("model/x", b"")
    refused(path, r"one \*/data.pkl")
    at = good.rindex(b"PK\1\2")
    path.write_bytes(good[: at + 8] + b"\1" + good[at + 9 :])
    refused(path, "encrypted")
    path.write_bytes(good[: at + 42] + bytes(4) + good[at + 46 :])
    refused(path, "differ")
    for sizes in ((2**31, 2**31), (16, 17), (17, 16)):
        path.write_bytes(good[: at + 20] + struct.pack("<2I", *sizes) + good[at + 28 :])
        refused(path, "one size and lies inside the file")


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressed_entries(method, tmp_path):
    """torch.save never compresses: what is small in the file is small in memory."""
    path = torch_zip(tmp_path / "x.pt", tensor_pickle())
    with zipfile.ZipFile(path, "a", method) as file:
        file.writestr("model/data/0", bytes(16))
    assert refused(path, "not compressed").tensor == "model/data/0"


def test_truncated_zips(tmp_path):
    data = (EXAMPLES / "torchao_pickle" / "model.pt").read_bytes()
    path = tmp_path / "x.pt"
    for size in range(8, len(data), 61):
        path.write_bytes(data[:size])
        refused(path)


# ---- bombs: bounded time and memory

BOMBS = """
import json, resource, sys
from qtensor import checkpoints
from pickle_cases import bombs

used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 1_000_000_000,) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (100, 100))
results = {}
for name, path in bombs(sys.argv[1]):
    try:
        checkpoints.load_state_dict(path)
        results[name] = "read"
    except checkpoints.CheckpointError as error:
        results[name] = str(error)
print(json.dumps(results))
"""


def test_bombs(tmp_path):
    """Small files cannot take much memory (1 GB for all) or time (100 s of a processor)."""
    done = torch_process.run(
        BOMBS, str(tmp_path), environment={**os.environ, "PYTHONPATH": PYTHONPATH}
    )
    results = json.loads(done.stdout)
    read = {name for name, result in results.items() if result == "read"}
    assert read == {"a large memo index", "a large frame", "encoding again"}
    assert all(len(result) < 1500 for result in results.values())
    assert "holds no other stream" in results["streams in streams"]


def test_a_pickle_is_bounded(tmp_path, monkeypatch):
    path = torch_zip(tmp_path / "x.pt", b"\x80\x02" + b"N0" * 500 + b"}.")
    assert checkpoints.load_state_dict(path) == {}
    monkeypatch.setattr(torch_pickle, "MAX_READS", 1000)
    refused(path, "more than 1,000 opcodes")
    monkeypatch.setattr(torch_pickle, "MAX_PICKLE", 1000)
    refused(path, "at most 1,000 bytes")


# ---- random damage


@pytest.mark.parametrize("folder", PICKLED)
@pytest.mark.parametrize("where", ["pickle", "zip"])
def test_damaged_examples(folder, where, tmp_path):
    """Only a CheckpointError comes out of a damaged pickle or zip."""
    chance = random.Random(f"{folder} {where}")
    with zipfile.ZipFile(EXAMPLES / folder / "model.pt") as file:
        entries = {name: file.read(name) for name in file.namelist()}
    whole, refusals = (EXAMPLES / folder / "model.pt").read_bytes(), []
    path = tmp_path / "x.pt"
    for _ in range(150):
        data = bytearray(entries["model/data.pkl"] if where == "pickle" else whole)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(data))
            kind = chance.randrange(3)
            if kind == 0:
                data[at] = chance.randrange(256)
            elif kind == 1:
                del data[at : at + chance.randint(1, 4)]
            else:
                data[at:at] = bytes(chance.randrange(256) for _ in range(chance.randint(1, 3)))
        if where == "zip":
            path.write_bytes(data)
        else:
            with zipfile.ZipFile(path, "w") as file:
                for name, value in {**entries, "model/data.pkl": bytes(data)}.items():
                    file.writestr(name, value)
        try:
            with checkpoints.open(path) as checkpoint:
                repr(checkpoint.table())
                for name in (*checkpoint, *checkpoint.inner_names()):
                    checkpoint[name]
                    checkpoint.dense(name)
        except checkpoints.CheckpointError as error:
            refusals.append(str(error))
    assert len(refusals) > 30
    assert max(map(len, refusals)) < 3000


def test_opening_makes_no_tensors(monkeypatch):
    def refuse(*args):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(TorchZip, "read", refuse)
    for folder in PICKLED:
        with checkpoints.open(EXAMPLES / folder) as checkpoint:
            assert len(checkpoint.table().rows) == len(checkpoint)
