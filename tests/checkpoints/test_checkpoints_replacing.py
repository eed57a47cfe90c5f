"""``save`` over an older checkpoint: either the old or the new one is there at any moment."""

import errno
import os

import pytest
import torch
import torch_process
from places import PYTHONPATH

import qtensor
from qtensor import checkpoints
from qtensor.checkpoints import CheckpointError, publishing
from qtensor.checkpoints.containers import safetensors

OLD, NEW = 1.0, 2.0


def state(value, count=4):
    return {f"{i}.weight": torch.full((64, 64), value) for i in range(count)}


def save(folder, value, count=4, layout="plain", **options):
    size = options.pop("shard_size", 33_000)
    about = {"model_type": "x", "value": value}
    more = {"config": about, "shard_size": size, **options}
    checkpoints.save(state(value, count), folder, layout, overwrite=True, **more)


def value_of(folder):
    """Return the value that all tensors and the config of a folder have."""
    with checkpoints.open(folder) as checkpoint:
        values = {float(v) for name in checkpoint for v in checkpoint[name].unique()}
        values.add(checkpoint.config["value"])
    (value,) = values
    return value


def add_others(folder):
    """Add what a user may have beside a checkpoint."""
    (folder / "tokenizer.json").write_text("{}")
    (folder / "runs").mkdir()
    (folder / "runs" / "log").write_text("x")
    (folder / "link").symlink_to("tokenizer.json")


def has_others(folder):
    return (
        (folder / "tokenizer.json").read_text() == "{}"
        and (folder / "runs" / "log").read_text() == "x"
        and os.readlink(folder / "link") == "tokenizer.json"
    )


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "out"
    save(path, OLD)
    add_others(path)
    return path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# ---- what is in the folder afterwards


@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_the_folder_holds_the_new_checkpoint_and_the_other_files(count, folder, tmp_path):
    save(folder, NEW, count)
    assert value_of(folder) == NEW
    assert has_others(folder)
    shards = len(list(folder.glob("*.safetensors")))
    assert shards == -(-count // 2)
    assert (folder / "model.safetensors.index.json").exists() == (shards > 1)
    assert names(tmp_path) == ["out"]


def test_the_source_may_be_the_folder_itself(folder):
    loaded = checkpoints.load_state_dict(folder)
    checkpoints.save(loaded, folder, shard_size=20_000, overwrite=True)
    again = checkpoints.load_state_dict(folder)
    assert all(torch.equal(again[name], loaded[name]) for name in loaded)
    with checkpoints.open(folder) as checkpoint:
        checkpoints.save(checkpoint, folder, layout="plain", overwrite=True)
    assert value_of(folder) == OLD


def test_no_description_of_the_old_weights_stays(tmp_path):
    out = tmp_path / "out"
    weight = {"a.weight": qtensor.quantize(torch.ones(128, 128).bfloat16(), "nvfp4")}
    checkpoints.save(weight, out, "modelopt", config={"model_type": "x"})
    (out / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    checkpoints.save({"a.weight": torch.ones(2, 2)}, out, "plain", overwrite=True)
    with checkpoints.open(out) as checkpoint:
        assert checkpoint.layout == "plain"
        assert checkpoint.config == {"model_type": "x"}


def test_a_link_to_a_folder_stays_one(folder, tmp_path):
    (tmp_path / "alias").symlink_to("out")
    save(tmp_path / "alias", NEW)
    assert (tmp_path / "alias").is_symlink()
    assert value_of(folder) == NEW


def test_the_mode_of_the_folder_stays(folder):
    folder.chmod(0o750)
    save(folder, NEW)
    assert folder.stat().st_mode & 0o777 == 0o750


def test_the_current_folder_is_written_in_place(folder, monkeypatch):
    """Exchanged, it would be gone for the process and for the shell that started it."""
    monkeypatch.chdir(folder)
    before = os.stat(".").st_ino
    save(".", NEW)
    assert os.stat(".").st_ino == folder.stat().st_ino == before
    assert value_of(folder) == NEW
    assert has_others(folder)


def test_without_overwrite_nothing_changes(folder):
    before = {path: path.read_bytes() for path in folder.glob("model*")}
    with pytest.raises(CheckpointError, match="must not exist"):
        checkpoints.save(state(NEW), folder, shard_size=33_000)
    assert {path: path.read_bytes() for path in folder.glob("model*")} == before


# ---- kills

KILLS = """
import os, shutil, signal, sys
from pathlib import Path
import torch
from tests.checkpoints.test_checkpoints_replacing import (
    NEW, OLD, add_others, has_others, names, save, value_of
)
from qtensor.checkpoints import publishing

base, can_exchange = Path(sys.argv[1]), sys.argv[2] == "True"
folder, old = base / "out", base / ".out.saving.old"
if not can_exchange:
    publishing.exchange = lambda one, other: False
CHANGES = ("os.rename", "os.link", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.chmod")

def kill_before(number):
    seen = []
    def watch(name, args):
        # "ctypes.dlsym" comes before the exchange, which Python does not see.
        creates = name == "open" and isinstance(args[2], int) and args[2] & os.O_CREAT
        if creates or name in CHANGES or name == "ctypes.dlsym":
            seen.append(name)
            if len(seen) == number:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(watch)

torch.set_num_threads(1)
os.fsync = lambda descriptor: None  # files outlive the process without it, and it takes long
SMALL = {"count": 2, "shard_size": 17_000}
save(base / "warm", NEW, **SMALL)
shutil.rmtree(base / "warm")
killed, found = 0, []
while True:
    save(folder, OLD, **SMALL)
    if not killed:
        add_others(folder)
    child = os.fork()
    if child == 0:
        kill_before(killed + 1)
        save(folder, NEW, **SMALL)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) == 0:
        break
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    killed += 1
    # Where folders cannot be exchanged, the old one has another name for a moment.
    found.append(value_of(folder if folder.exists() or can_exchange else old))
    save(folder, NEW, **SMALL)
    assert value_of(folder) == NEW and has_others(folder), killed
    assert names(base) == ["out"], names(base)
assert value_of(folder) == NEW
assert found == sorted(found), found
print(found.count(OLD), found.count(NEW))
"""


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_kill_at_any_step(can_exchange, tmp_path):
    """After each step the old or the new checkpoint is whole, and the next save clears up."""
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = torch_process.run(KILLS, str(tmp_path), str(can_exchange), environment=environment)
    old, new = map(int, done.stdout.split())
    assert old > 10
    assert new > 5


# ---- errors


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync", "link", "rename"])
def test_a_full_disk(call, folder, tmp_path, monkeypatch):
    """The disk is full at one of the steps: the old checkpoint stays, and nothing else is left."""

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        module = publishing if call in ("link", "rename") else safetensors
        patch.setattr(module.os, call, full)
        if call == "link":
            patch.setattr(publishing.shutil, "copy2", full)
        if call == "rename":
            patch.setattr(publishing, "exchange", lambda one, other: False)
        with pytest.raises(CheckpointError, match="No space left on device"):
            save(folder, NEW)
    assert value_of(folder) == OLD
    assert has_others(folder)
    assert names(tmp_path) == ["out"]


def test_an_error_after_the_exchange_keeps_the_subfolders(folder, tmp_path, monkeypatch):
    """A subfolder that cannot be moved stays beside the new checkpoint, and comes back later."""

    def fail(old, new):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(publishing.os, "rename", fail)
        with pytest.raises(CheckpointError, match="Permission denied"):
            save(folder, NEW)
    assert value_of(folder) == NEW
    assert (tmp_path / ".out.saving" / "runs" / "log").exists()
    save(folder, NEW)
    assert has_others(folder)
    assert names(tmp_path) == ["out"]


def test_a_file_system_without_hard_links(folder, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(publishing.os, "link", fail)
    save(folder, NEW)
    assert value_of(folder) == NEW
    assert has_others(folder)
