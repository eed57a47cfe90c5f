"""Conversions that are interrupted, run out of disk space, or must not hold much memory."""

import errno
import itertools
import json
import math
import mmap
import os
import signal
import subprocess
import sys

import pytest
import torch
import torch_process

from qtensor import checkpoints
from qtensor.checkpoints import CheckpointError
from qtensor.checkpoints.containers import safetensors
from qtensor.checkpoints.conversion import work_folder

OPTIONS = {"format": "mxfp8", "shard_size": 40_000}
WORK, JOURNAL = ".out.converting", ".out.converting.jsonl"


@pytest.fixture
def source(tmp_path):
    """Four matrices, so that ``OPTIONS`` gives four shards."""
    generator = torch.Generator().manual_seed(0)
    state = {
        f"layers.{i}.weight": torch.randn(128, 256, generator=generator).bfloat16()
        for i in range(4)
    }
    checkpoints.save(state, tmp_path / "source", layout="plain", config={"model_type": "llama"})
    return tmp_path / "source"


@pytest.fixture
def want(source, tmp_path):
    """The files of a conversion that nothing interrupts."""
    checkpoints.convert(source, tmp_path / "want", "compressed-tensors", **OPTIONS)
    return files_of(tmp_path / "want")


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Stop(Exception):
    """What the tests interrupt a conversion with."""


def stop_after(count):
    """A progress callback that stops after so many tensors."""
    seen = []

    def progress(state):
        seen.append(state)
        if len(seen) == count:
            raise Stop

    return progress


def convert(source, out, **options):
    return checkpoints.convert(source, out, "compressed-tensors", **OPTIONS, **options)


# ---- progress


def test_progress_counts_the_bytes_of_the_source(source, tmp_path):
    states = []
    convert(source, tmp_path / "out", progress=states.append)
    total = 4 * 128 * 256 * 2
    assert [state.done for state in states] == [total * i // 4 for i in range(1, 5)]
    assert all(state.total == total for state in states)
    assert [state.name for state in states] == [f"layers.{i}.weight" for i in range(4)]
    assert all(state.rate > 0 and state.seconds_left >= 0 for state in states)
    assert states[-1].seconds_left == 0
    assert checkpoints.Progress(0, 5, 0.0, 0, "").seconds_left is None


# ---- interruption


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_stopped_conversion_goes_on(count, source, want, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(Stop):
        convert(source, out, progress=stop_after(count))
    assert not out.exists()
    report = convert(source, out)
    assert report.resumed_shards == count - 1  # the last one was not recorded yet
    assert files_of(out) == want
    assert len(report.tensors) == 4
    assert all(tensor.sqnr_db > 20 for tensor in report.tensors)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source", "want"]


def test_a_killed_conversion_goes_on(source, want, tmp_path):
    """SIGKILL while the third shard is written: its temporary file stays, and is removed."""
    code = (
        "import os, signal, sys\n"
        "from qtensor import checkpoints\n"
        "def progress(state):\n"
        "    if state.name == 'layers.2.weight': os.kill(os.getpid(), signal.SIGKILL)\n"
        "checkpoints.convert(sys.argv[1], sys.argv[2], 'compressed-tensors', 'mxfp8',\n"
        "                    shard_size=40_000, progress=progress)\n"
    )
    out = tmp_path / "out"
    done = torch_process.run(code, str(source), str(out), check=False)
    assert done.returncode == -signal.SIGKILL
    assert not out.exists()
    assert any(name.endswith(".tmp") for name in os.listdir(tmp_path / WORK))
    report = convert(source, out)
    assert report.resumed_shards == 2
    assert files_of(out) == want
    assert not (tmp_path / WORK).exists()


def test_resumed_bytes_count_as_done_and_not_as_worked(source, tmp_path):
    with pytest.raises(Stop):
        convert(source, tmp_path / "out", progress=stop_after(3))
    states = []
    convert(source, tmp_path / "out", progress=states.append)
    assert [4 * s.done // s.total for s in states] == [1, 2, 3, 4]
    assert [4 * s.worked // s.total for s in states] == [0, 0, 1, 2]


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_finished_shard_that_changed_is_written_again(damage, source, want, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(Stop):
        convert(source, out, progress=stop_after(3))
    shard = tmp_path / WORK / "model-00001-of-00004.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    if damage == "remove":
        shard.unlink()
    else:
        shard.write_bytes(data if damage == "flip" else data[:-1])
    assert convert(source, out).resumed_shards == 1
    assert files_of(out) == want


def test_another_request_or_source_begins_anew(source, want, tmp_path):
    out = tmp_path / "out"

    def stop():
        with pytest.raises(Stop):
            convert(source, out, progress=stop_after(3))

    stop()
    other = checkpoints.convert(source, out, "compressed-tensors", "mxfp4", shard_size=40_000)
    assert other.resumed_shards == 0
    stop_source = source / "model.safetensors"
    with pytest.raises(Stop):
        convert(source, out, progress=stop_after(3), overwrite=True)
    stop_source.touch()
    assert convert(source, out, overwrite=True).resumed_shards == 0
    assert files_of(out) == want
    with pytest.raises(Stop):
        convert(source, out, progress=stop_after(3), overwrite=True)
    assert convert(source, out, overwrite=True, resume=False).resumed_shards == 0
    assert files_of(out) == want


def test_a_damaged_journal_begins_anew(source, want, tmp_path):
    out = tmp_path / "out"
    for text in ("{", "[]", '{"about": 1}', '{"about": 1}\n{"x": {}}\n', "", "\n\n"):
        with pytest.raises(Stop):
            convert(source, out, progress=stop_after(3))
        (tmp_path / JOURNAL).write_text(text)
        assert convert(source, out).resumed_shards == 0
        assert files_of(out) == want
        for path in out.iterdir():
            path.unlink()


@pytest.mark.parametrize("cut", [1, 40, -1, -40])
def test_half_a_line_of_the_journal_is_not_read(cut, source, want, tmp_path):
    """A kill while the third shard is recorded: two are kept, and what follows is complete."""
    out = tmp_path / "out"
    with pytest.raises(Stop):
        convert(source, out, progress=stop_after(4))
    *lines, last = (tmp_path / JOURNAL).read_bytes().splitlines(keepends=True)
    assert len(lines) == 3
    (tmp_path / JOURNAL).write_bytes(b"".join(lines) + last[:cut])
    with pytest.raises(Stop):
        convert(source, out, progress=stop_after(4))
    again = (tmp_path / JOURNAL).read_bytes().splitlines(keepends=True)
    assert again == [*lines, last]
    assert convert(source, out).resumed_shards == 3
    assert files_of(out) == want


def test_the_journal_grows_by_a_line_for_each_file(source, tmp_path):
    """Writing all of it again after each file takes the square of their number."""
    sizes, lines = [], []

    def progress(state):
        data = (tmp_path / JOURNAL).read_bytes()
        sizes.append((tmp_path / JOURNAL).stat().st_ino)
        lines.append(data)

    convert(source, tmp_path / "out", progress=progress)
    assert len(set(sizes)) == 1
    for before, after in itertools.pairwise(lines):
        assert after.startswith(before)
        assert after.count(b"\n") == before.count(b"\n") + 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_of_a_config_that_are_not_finite_keep_the_journal(value, source, tmp_path):
    path = source / "config.json"
    path.write_text(json.dumps({"model_type": "mamba", "limits": [0.0, value]}))
    with pytest.raises(Stop):
        convert(source, tmp_path / "out", progress=stop_after(3))
    assert convert(source, tmp_path / "out").resumed_shards == 2


# ---- the old or the new checkpoint


def test_the_old_checkpoint_stays_until_the_new_one_is_complete(source, want, tmp_path):
    out = tmp_path / "out"
    checkpoints.convert(source, out, format="nvfp4")
    before = files_of(out)
    with pytest.raises(Stop):
        convert(source, out, progress=stop_after(4), overwrite=True)
    assert files_of(out) == before
    convert(source, out, overwrite=True)
    assert files_of(out) == want


def test_folders_are_exchanged_where_the_system_cannot_do_it_at_once(
    source, want, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    checkpoints.convert(source, out, format="nvfp4")
    monkeypatch.setattr(work_folder, "exchange", lambda one, other: False)
    convert(source, out, overwrite=True)
    assert files_of(out) == want
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source", "want"]


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync"])
def test_a_full_disk(call, single, source, tmp_path, monkeypatch):
    """The disk is full at the second file, or at the only one: the error says so, the old
    checkpoint stays, and the call goes on when there is space.
    """
    out = tmp_path / ("out.safetensors" if single else "out")
    options = {"format": "mxfp8", "shard_size": 40_000}
    checkpoints.convert(source, out, format="nvfp4")
    before = out.read_bytes() if single else files_of(out)
    finished, real = [], getattr(os, call)

    def full(*args):
        if single or finished:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.os, call, full)
        patch.setattr(
            work_folder.WorkFolder, "add", _counting(work_folder.WorkFolder.add, finished)
        )  # the first shard is finished
        with pytest.raises(CheckpointError, match="No space left on device"):
            checkpoints.convert(source, out, overwrite=True, **options)
    assert (out.read_bytes() if single else files_of(out)) == before
    report = checkpoints.convert(source, out, overwrite=True, **options)
    assert report.resumed_shards == (0 if single else 1)
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {"source", out.name}


def _counting(add, finished):
    def counted(self, *args):
        add(self, *args)
        finished.append(args[0])

    return counted


def test_a_small_file_system(source, tmp_path):
    """A tmpfs of 60 kB in a namespace of its own, where the system lets users mount one."""
    code = (
        "import sys\n"
        "from qtensor import checkpoints\n"
        "try:\n"
        "    checkpoints.convert(sys.argv[1], sys.argv[2], format='mxfp8', shard_size=40_000)\n"
        "except checkpoints.CheckpointError as error:\n"
        "    print(error)\n"
    )
    small = tmp_path / "small"
    small.mkdir()
    script = 'mount -t tmpfs -o size=60k none "$0" && exec "$@" && ls -A "$0"'
    command = ["unshare", "-rm", "sh", "-c", script, str(small)]
    try:
        works = subprocess.run([*command, "true"], check=False, capture_output=True).returncode
    except FileNotFoundError:
        works = 1
    if works:
        pytest.skip(reason="this system lets no user mount a tmpfs")
    run = [*command, sys.executable, "-c", code, str(source), str(small / "out")]
    done = subprocess.run(run, check=True, capture_output=True, text=True)
    assert "No space left on device" in done.stdout


# ---- memory of mapped files


def resident():
    """Return the resident bytes of mapped files of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[2]) * mmap.PAGESIZE


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="it reads Linux's /proc")
@pytest.mark.parametrize("container", ["safetensors", "torch", "gguf"])
def test_released_tensors_take_no_memory(container, tmp_path):
    """One tensor of a mapped file is in memory at a time, and is read again after its release."""
    state = {f"{i}.weight": torch.full((1024, 1024), float(i)) for i in range(16)}  # 4 MiB each
    path = tmp_path / "model.pt"
    if container == "torch":
        torch.save(state, path)
    else:
        path = tmp_path / f"model.{container}"
        checkpoints.save(state, path, layout="plain" if container == "safetensors" else "gguf")
    with checkpoints.open(path) as checkpoint:
        before = most = resident()
        for i, name in enumerate(state):
            assert checkpoint[name].sum() == i * 2**20
            most = max(most, resident())
            checkpoint.release(name)
        assert most - before < 12 * 2**20
        assert resident() - before < 4 * 2**20
        assert checkpoint["3.weight"].sum() == 3 * 2**20


# ---- one file


def test_one_file(source, tmp_path):
    out = tmp_path / "out.safetensors"
    with pytest.raises(Stop):
        checkpoints.convert(source, out, format="mxfp8", progress=stop_after(2))
    assert not out.exists()
    checkpoints.convert(source, out, format="mxfp8")
    with checkpoints.open(out) as checkpoint:
        assert checkpoint.layout == "qtensor"
        assert len(checkpoint.groups) == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == [out.name, "source"]


def test_the_index_has_the_digests_of_the_shards(source, tmp_path):
    convert(source, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    digests = index["metadata"]["sha256"]
    assert sorted(digests) == sorted(set(index["weight_map"].values()))
    for name, sha256 in digests.items():
        assert work_folder.digest(str(tmp_path / "out" / name)) == sha256
