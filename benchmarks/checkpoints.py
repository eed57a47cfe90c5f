"""Speed and memory of checkpoints: ratios to copying files with the same calls, in one run.

    python -m benchmarks.checkpoints                     # ratios, 1 GiB of bfloat16 weights
    python -m benchmarks.checkpoints --memory --gib 4    # peak memory of a sharded model

The copy reads the mapped source and writes it with ``pwrite`` into an allocated file, which is
synced and renamed, as conversion writes its files. All files are in the page cache before.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from benchmarks import machine
from qtensor import checkpoints
from qtensor.checkpoints.containers.safetensors import (
    SafetensorsFile,
    SafetensorsWriter,
    TensorSpec,
)

FORMATS = (("mxfp8", "compressed-tensors"), ("nvfp4", "compressed-tensors"), ("fp8", "qtensor"))
INDEX = "model.safetensors.index.json"
WEIGHT = (4096, 4096)
RATIO, OPEN_SECONDS, OPEN_MB = 2.0, 1.5, 300
MANY = 100_000
LIMIT = 10**9
"""Bytes of anonymous memory that the conversion of a large model may take."""


def write_model(folder: Path, nbytes: int, shard: int) -> None:
    """Write a plain model of random bfloat16 weights in shards; the same numbers in each tensor."""
    folder.mkdir(parents=True)
    values = torch.randn(WEIGHT, generator=torch.Generator().manual_seed(0)).bfloat16()
    each = values.numel() * 2
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(max(1, nbytes // each))]
    size = max(1, shard // each)
    parts = [names[i : i + size] for i in range(0, len(names), size)]
    weight_map = {}
    for i, part in enumerate(parts, 1):
        file = f"model-{i:05d}-of-{len(parts):05d}.safetensors"
        specs = [TensorSpec(name, values.dtype, WEIGHT) for name in part]
        with SafetensorsWriter(folder / file, specs) as writer:
            for name in part:
                writer.write(name, values)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))


def copy_model(source: Path, out: Path) -> None:
    """Copy every shard: mapped reads, ``pwrite``, fsync and rename."""
    out.mkdir()
    for path in sorted(source.glob("*.safetensors")):
        file = SafetensorsFile(path)
        specs = [
            TensorSpec(name, file.read(name).dtype, tuple(info.shape))
            for name, info in file.infos.items()
        ]
        with SafetensorsWriter(out / path.name, specs) as writer:
            for spec in specs:
                writer.write(spec.name, file.read(spec.name))


def timed(call: Callable[[Path], object], folder: Path) -> float:
    """Return the seconds of a call that makes a folder, which is removed."""
    os.sync()
    began = time.perf_counter()
    call(folder)
    seconds = time.perf_counter() - began
    shutil.rmtree(folder)
    return seconds


def ratios(root: Path, nbytes: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return seconds and ratio of each conversion, and of decoding, measured in turns."""
    source = root / "source"
    write_model(source, nbytes, nbytes)
    calls: dict[str, Callable[[Path], object]] = {"copy": lambda out: copy_model(source, out)}
    for fmt, layout in FORMATS:
        calls[f"to {fmt}"] = lambda out, f=fmt, x=layout: checkpoints.convert(  # type: ignore[misc]
            source, out, x, f
        )
        checkpoints.convert(source, root / fmt, layout, fmt)
    for fmt, _ in FORMATS:
        calls[f"{fmt} to bfloat16"] = lambda out, f=fmt: checkpoints.dequantize(  # type: ignore[misc]
            root / f, out
        )
    calls["nvfp4 to bfloat16, our arithmetic"] = lambda out: checkpoints.dequantize(
        root / "nvfp4", out, rounding=None
    )
    calls["moved, mxfp8"] = lambda out: checkpoints.convert(root / "mxfp8", out)
    calls |= _peer(source)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            seconds[name].append(timed(call, root / "out"))
    copy = median(seconds["copy"])
    return {
        name: {"seconds": round(median(s), 3), "ratio": round(median(s) / copy, 3)}
        for name, s in seconds.items()
    }


def _peer(source: Path) -> dict[str, Callable[[Path], object]]:
    """Return compressed-tensors' own compression of the same weights, if it is installed."""
    try:
        from benchmarks.peer_compressed_tensors import PEER  # noqa: PLC0415
    except ImportError:
        return {}

    def compress(out: Path, fmt: str) -> None:
        out.mkdir()
        made = {}
        for path in sorted(source.glob("*.safetensors")):
            file = SafetensorsFile(path)
            for name in file.infos:
                state = PEER.eager[fmt].quantize(file.read(name))
                module = name.removesuffix("weight")
                made |= {f"{module}{part}": tensor for part, tensor in state.items()}
        specs = [TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in made.items()]
        with SafetensorsWriter(out / "model.safetensors", specs) as writer:
            for name, tensor in made.items():
                writer.write(name, tensor)

    return {
        f"compressed-tensors to {fmt}": lambda out, f=fmt: compress(out, f)  # type: ignore[misc]
        for fmt, _ in FORMATS
    }


def opening(root: Path) -> dict[str, float]:
    """Return seconds and megabytes of opening a folder of 100,000 tensors, in a fresh process."""
    folder = root / "many"
    state = {f"layers.{i}.weight": torch.zeros(4) for i in range(MANY)}
    checkpoints.save(state, folder, layout="plain")
    code = (
        "import sys, time\n"
        "from benchmarks.checkpoints import PeakMemory, anonymous_bytes\n"
        "from qtensor import checkpoints\n"
        "checkpoints.layouts()\n"
        "before, began = anonymous_bytes(), time.perf_counter()\n"
        "if sys.argv[2] == 'memory':\n"
        "    with PeakMemory() as peak: found = checkpoints.open(sys.argv[1])\n"
        "    print((peak.anonymous - before) / 1e6, len(found))\n"
        "else:\n"
        "    found = checkpoints.open(sys.argv[1])\n"
        "    print(time.perf_counter() - began, len(found))\n"
    )

    def run(what: str) -> float:
        command = [sys.executable, "-c", code, str(folder), what]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        value, count = map(float, done.stdout.split())
        assert count == MANY  # noqa: S101
        return value

    seconds = min(run("time") for _ in range(3))
    return {"seconds": round(seconds, 3), "MB": round(run("memory"), 1)}


class PeakMemory:
    """Sample the anonymous memory of this process ("RssAnon") every few milliseconds."""

    def __init__(self) -> None:
        self.anonymous = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.wait(0.005):
            self.anonymous = max(self.anonymous, anonymous_bytes())

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


def anonymous_bytes() -> int:
    """Return the resident memory of this process that belongs to no file (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("this system does not report RssAnon")


def memory(root: Path, nbytes: int) -> dict[str, dict[str, float]]:
    """Return the peak memory of converting a sharded model, each conversion in a fresh process."""
    source = root / "source"
    write_model(source, nbytes, 10**9)
    found = {}
    for name, call in {
        "to mxfp8": "checkpoints.convert(source, out, 'compressed-tensors', 'mxfp8')",
        "to nvfp4": "checkpoints.convert(source, out, 'compressed-tensors', 'nvfp4')",
        "nvfp4 to bfloat16": "checkpoints.dequantize(out, again)",
    }.items():
        out, again = root / "out", root / "again"
        if name.startswith("to"):
            shutil.rmtree(out, ignore_errors=True)
        code = (
            "import json, sys, time\n"
            "from benchmarks.checkpoints import PeakMemory, anonymous_bytes, peak_resident\n"
            "from qtensor import checkpoints\n"
            "source, out, again = sys.argv[1:]\n"
            "checkpoints.layouts()\n"
            "before, began = anonymous_bytes(), time.perf_counter()\n"
            f"with PeakMemory() as peak: {call}\n"
            "print(json.dumps({'seconds': round(time.perf_counter() - began, 1),\n"
            "    'anonymous MB': round(peak.anonymous / 1e6, 1),\n"
            "    'before MB': round(before / 1e6, 1),\n"
            "    'resident MB, files included': round(peak_resident() / 1e6, 1)}))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(source), str(out), str(again)],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        found[name] = json.loads(done.stdout)
    return found


def peak_resident() -> int:
    """Return the largest resident memory of this process, mapped files included, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Run the measurements and print them as JSON; the status is 1 beyond a limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=1.0, help="size of the model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", action="store_true", help="measure peak memory instead")
    parser.add_argument("--folder", type=Path, help="where files are written (default: TMPDIR)")
    options = parser.parse_args()
    nbytes = int(options.gib * 2**30)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        root = Path(folder)
        about = {**machine.environment(torch.get_num_threads(), {}), "GiB": options.gib}
        if options.memory:
            found = memory(root, nbytes)
            ok = all(entry["anonymous MB"] < LIMIT / 1e6 for entry in found.values())
            report = {**about, "memory": found}
        else:
            speed = ratios(root, nbytes, options.rounds)
            many = opening(root)
            ours = (
                entry["ratio"] for name, entry in speed.items() if "compressed-tensors" not in name
            )
            ok = max(ours) <= RATIO and many["seconds"] <= OPEN_SECONDS and many["MB"] <= OPEN_MB
            report = {**about, "ratios": speed, "open 100,000 tensors": many}
    print(json.dumps({**report, "ok": ok}, indent=2))
    sys.exit(not ok)


if __name__ == "__main__":
    main()
