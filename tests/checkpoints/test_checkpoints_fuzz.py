"""Random damage to files and configs: every problem is a QTensorError, never another exception."""

import json
import random
import shutil

import pytest
from checkpoint_cases import EXAMPLES, READ
from hostile_files import damage_json

from qtensor import checkpoints
from qtensor.core.errors import QTensorError

CASES = 20
"""Damaged files of each example in a run of the tests."""


def damage_bytes(data, chance):
    """Flip, insert, remove or repeat some bytes of the header, or cut the file."""
    data = bytearray(data)
    end = min(len(data), 8 + int.from_bytes(data[:8], "little"))
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(end if chance.random() < 0.9 else len(data))
        kind = chance.randrange(4)
        if kind == 0:
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            data[at:at] = bytes(chance.choices(b'0123456789"[]{},:-e.\xff', k=chance.randint(1, 3)))
        elif kind == 2:
            del data[at : at + chance.randint(1, 5)]
        else:
            del data[at:]
        if not data:
            break
        end = min(end, len(data))
    return bytes(data)


def damage_header(data, chance):
    """Replace a node of the header, and keep its size right."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    texts = {k: v for k, v in header.get("__metadata__", {}).items() if v.startswith("{")}
    if texts and chance.random() < 0.7:
        name = chance.choice(sorted(texts))
        header["__metadata__"][name] = json.dumps(damage_json(json.loads(texts[name]), chance))
    else:
        header = damage_json(header, chance)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def spoil(folder, chance):
    path, config = folder / "model.safetensors", folder / "config.json"
    kind = chance.randrange(4 if config.exists() else 2)
    if kind == 0:
        path.write_bytes(damage_bytes(path.read_bytes(), chance))
    elif kind == 1:
        path.write_bytes(damage_header(path.read_bytes(), chance))
    else:
        config = chance.choice(sorted(folder.glob("*config.json")))  # also hf_quant_config.json
        value = json.loads(config.read_text())
        entry = value.get("quantization", value.get("quantization_config"))
        part = entry if kind == 2 else value
        damage_json(part, chance)
        config.write_text(json.dumps(value))


def read_all(folder):
    """Read everything in both ways; return the error, or None."""
    try:
        with checkpoints.open(folder) as checkpoint:
            repr(checkpoint.table())
            for name in checkpoint:
                checkpoint[name]
                checkpoint.dense(name)
    except QTensorError as error:
        return error
    return None


SAFETENSORS = [e for e in READ if (e.path / "model.safetensors").exists()]


@pytest.mark.parametrize("example", SAFETENSORS, ids=lambda e: e.folder)
def test_damaged_examples(example, tmp_path):
    chance, refused = random.Random(f"{example.folder}"), 0
    for i in range(CASES):
        folder = shutil.copytree(EXAMPLES / example.folder, tmp_path / str(i))
        spoil(folder, chance)
        error = read_all(folder)
        refused += error is not None
        if error is not None:
            assert isinstance(error, checkpoints.CheckpointError)
            assert len(str(error)) < 3000
        shutil.rmtree(folder)
    assert refused > CASES // 4


def test_fuzzing_sees_other_exceptions(tmp_path, monkeypatch):
    """The fuzz test fails if reading raises anything but a QTensorError."""
    monkeypatch.setattr(checkpoints.Checkpoint, "table", lambda self: {}["planted"])
    with pytest.raises(KeyError, match="planted"):
        read_all(EXAMPLES / "ct_mxfp8")
