"""Open damaged checkpoints in a process with little memory that watches what is opened.

``python tests/helpers/hostile_process.py WORK FIRST LAST STEP`` makes the cases of
hostile_cases.py, opens each and reads everything. It prints JSON: the outcomes by kind of damage,
and what went wrong.
"""

from __future__ import annotations

import contextlib
import encodings.cp437  # noqa: F401 zipfile decodes names with it
import hashlib
import json
import os
import resource
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path

import torch
from checkpoint_cases import EXAMPLES, READ, weight
from hostile_cases import case
from hostile_files import INDEX, Fifo, Folder, Link

from qtensor import QuantizedTensor, checkpoints

MEMORY = 700_000_000
"""Bytes of addresses that all cases together may take beyond those of the imports."""
SECONDS = 30
"""After so long a case counts as endless; a sound one takes milliseconds."""
SAME, OTHER, REFUSED = "same values", "another valid file", "refused"
_WATCHED = ("os.", "shutil.", "subprocess.", "socket.", "pickle.", "ctypes.dlopen", "urllib.")
_LISTS = ("os.listdir", "os.scandir", "os.walk", "os.getxattr")
_EXECUTES = ("exec", "compile", "import", "open_code", "marshal.loads")


class Watch:
    """Note what a process opens, starts or imports while ``folder`` is set."""

    def __init__(self) -> None:
        self.folder = ""
        self.seen: list[str] = []
        sys.addaudithook(self._event)

    def _event(self, name: str, args: tuple) -> None:
        if not self.folder:
            return
        if name == "open" or name in _LISTS:
            path = (
                os.path.realpath(os.fsdecode(args[0])) if isinstance(args[0], str | bytes) else "?"
            )
            inside = path == self.folder or path.startswith(self.folder + os.sep)
            writes = name == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if inside and not writes:
                return
        elif name not in _EXECUTES and not name.startswith(_WATCHED):
            return
        self.seen.append(f"{name} {str(args)[:200]}")
        raise AssertionError(self.seen[-1])


def digest(tensor):
    """Return what identifies a tensor: class, dtype, shape and bytes."""
    found = hashlib.sha256()
    if isinstance(tensor, QuantizedTensor):
        found.update(f"{tensor.quantizer.canonical} {tensor.dtype} {tuple(tensor.shape)}".encode())
        parts = tensor.buffers()
    else:
        parts = [tensor]
    for part in parts:
        found.update(f"{part.dtype} {tuple(part.shape)}".encode())
        found.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def description(checkpoint, name):
    """Return all that the header and the config say of a tensor."""
    group = checkpoint.groups.get(name)
    if group is None:
        infos, about = {"": checkpoint.source.tensors[name]}, ()
    else:
        infos = group.roles
        target = getattr(group.target, "canonical", str(group.target))
        about = (tuple(group.shape), str(group.dtype), target, group.scheme)
    return (
        checkpoint.layout,
        about,
        tuple((r, i.dtype, i.shape, place(i)) for r, i in infos.items()),
    )


def place(info):
    """Return file and offset of a tensor; that of safetensors counts from its data."""
    start = info.start
    if info.file.endswith(".safetensors"):
        with open(info.file, "rb") as file:
            start -= 8 + int.from_bytes(file.read(8), "little")
    return os.path.basename(info.file), start


def read(path):
    """Return {name: (description, digest of the tensor, digest of the values)} and the errors."""
    found, errors = {}, []
    try:
        with checkpoints.open(path) as checkpoint:
            repr(checkpoint.table())
            for name in (*checkpoint, *checkpoint.inner_names()):
                try:
                    tensor, dense = checkpoint[name], checkpoint.dense(name)
                    about = description(checkpoint, name) if name in [*checkpoint] else ()
                    found[name] = about, digest(tensor), digest(dense)
                except checkpoints.CheckpointError as error:
                    errors.append(error)
    except checkpoints.CheckpointError as error:
        errors.append(error)
    return found, errors


def put(folder, files):
    """Write a folder: files, links, pipes and folders."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, data in files.items():
        path = folder / name
        if isinstance(data, Link):
            path.symlink_to(data.target)
        elif isinstance(data, Fifo):
            os.mkfifo(path)
        elif isinstance(data, Folder):
            path.mkdir()
        else:
            path.write_bytes(data)


def examples(work):
    """Return {name: files} of the undamaged folders: examples, shards of them, and ours."""
    folders = {}
    for example in READ:
        names = [
            p for p in example.path.iterdir() if p.name not in ("meta.json", "expected.safetensors")
        ]
        folders[example.folder] = {p.name: p.read_bytes() for p in names}
    for name in ("ct_fp8_block", "ct_nvfp4", "hf_fp8_block", "modelopt_nvfp4", "gptoss_mxfp4"):
        with checkpoints.open(EXAMPLES / name, layout="plain") as checkpoint:
            state = {key: checkpoint[key].clone() for key in checkpoint}
        size = sum(t.nbytes for t in state.values()) // 3
        checkpoints.save(state, work / "made", layout="plain", shard_size=size)
        files = {p.name: p.read_bytes() for p in (work / "made").iterdir()}
        assert INDEX in files
        files |= {k: v for k, v in folders[name].items() if k.endswith(".json")}
        folders[f"{name} in shards"] = files
        shutil.rmtree(work / "made")
    formats = ("nvfp4", "mxfp8", "mxfp4", "fp8", "fp8_rowwise", "fp8_blockwise")
    state = {f"layers.{i}.weight": weight(fmt, 128, 128) for i, fmt in enumerate(formats)}
    state["norm.weight"] = torch.ones(128)
    for name, size in (("ours", "5GB"), ("ours in shards", 20_000)):
        checkpoints.save(state, work / "made", config={"model_type": "x"}, shard_size=size)
        folders[name] = {p.name: p.read_bytes() for p in (work / "made").iterdir()}
        shutil.rmtree(work / "made")
    return folders


class Run:
    """Run cases and count what comes of them."""

    def __init__(self, work: Path) -> None:
        self.work, self.folder = work, work / "case"
        self.outside = work / "outside"
        self.folders = examples(work)
        self.sound: dict[str, dict] = {}
        for name, files in self.folders.items():
            put(self.folder, files)
            self.sound[name], errors = read(self.folder)
            assert self.sound[name], errors
            checkpoints.verify(self.folder)
        put(self.outside, self.folders["ct_fp8_block"])
        (self.outside / "SHA256SUMS").write_text("")
        self.before = sorted(os.listdir(self.outside))
        self.watch = Watch()
        self.counts: dict[str, Counter] = {}
        self.failures: list[str] = []

    def one(self, number):
        """Run a case and note what is wrong with it."""
        kind, name, files, damage = case(number, self.folders)
        put(self.folder, files)
        problems: list[str] = []
        outcome = "failed"
        signal.alarm(SECONDS)
        try:
            with self._watched():
                found, errors = read(self.folder)
                checkpoints.verify(self.folder)
                if number % 10 == 0 and not errors:
                    repr(checkpoints.inspect(self.folder))
            outcome, problems = self._judge(damage, name, found, errors)
        except BaseException as error:  # noqa: BLE001 MemoryError, RecursionError, an endless case
            problems.append(f"{type(error).__name__}: {str(error)[:300]}")
        signal.alarm(0)
        if self.watch.seen:
            problems.append(f"did {self.watch.seen}")
            self.watch.seen.clear()
        if sorted(os.listdir(self.outside)) != self.before:
            problems.append(f"left {sorted(os.listdir(self.outside))}")
        self.counts.setdefault(kind, Counter())[outcome] += 1
        self.failures += [f"case {number}, {kind}, {name}: {text}" for text in problems]

    @contextlib.contextmanager
    def _watched(self):
        os.chdir(self.folder)
        self.watch.folder = os.path.realpath(self.folder)
        try:
            yield
        finally:
            self.watch.folder = ""
            os.chdir(self.work)

    def _judge(self, damage, name, found, errors):
        """Return the outcome, and what is wrong with it."""
        sound, problems = self.sound[name], []
        for error in errors:
            if not error.file.startswith(str(self.folder)) or error.file[:200] not in str(error):
                problems.append(f"no file: {error}")
            if len(str(error)) > 3000:
                problems.append(f"an error of {len(str(error))} characters")
        if damage.refused and not errors:
            problems.append("taken for a valid file")
        if damage.refused and damage.tensor and not any(error.tensor for error in errors):
            problems.append(f"the error names no tensor, not {damage.tensor}: {errors[:1]}")
        for key, (about, *values) in found.items():
            same = key in sound and (damage.kept or sound[key][0] == about)
            if same and list(sound[key][1:]) != values and not damage.values:
                problems.append(f"other values of {key}: {about}")
        if errors:
            return REFUSED, problems
        return (SAME if found == sound else OTHER), problems


def endless(*args):
    raise TimeoutError(f"a case took {SECONDS} seconds")


def main():
    work, numbers = Path(sys.argv[1]).resolve(), range(*map(int, sys.argv[2:5]))
    torch.set_num_threads(1)
    run = Run(work)
    signal.signal(signal.SIGALRM, endless)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY,) * 2)
    for number in numbers:
        run.one(number)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    kinds = {kind: dict(counts) for kind, counts in run.counts.items()}
    print(json.dumps({"kinds": kinds, "failures": run.failures, "peak": peak}))


if __name__ == "__main__":
    main()
