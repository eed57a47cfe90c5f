"""Extra peak memory of one weight-only linear call.

``python -m benchmarks.memory TOKENSxNxK CASES [PEERS]`` prints JSON; ``peaks`` runs it in its own
process. The peak is that of resident memory (``VmHWM``, which the kernel resets on request),
because neither tracemalloc nor torch's profiler sees memory that a library allocates inside.
Without /proc the portable ``ru_maxrss`` is used. It never falls, and in a child process it starts
at the parent's peak, so it shows only what exceeds all earlier calls.
"""

from __future__ import annotations

import ctypes
import json
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import qtensor
from benchmarks import cases, peer
from benchmarks.suite import first_line, silent

STATUS = Path("/proc/self/status")
RESET = Path("/proc/self/clear_refs")
KIB = 1024


def peaks(size: tuple[int, int, int], names: Sequence[str], peers: Sequence[str]) -> dict[str, Any]:
    """Return MiB by case, by ``<peer> <case>`` and for ``bf16``; empty if the process fails."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.memory"]
    command += [cases.size_name(size), ";".join(names), ",".join(peers)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}


def peak_mib(call: Callable[[], Any]) -> float:
    """Return the peak memory of a call minus the memory before it."""
    _trim()
    before = _reset()
    result = call()
    after = _peak_kib()
    del result
    return max(0, after - before) / KIB


def _trim() -> None:
    """Make the allocator return freed memory to the system, so that every allocation is seen."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def _reset() -> int:
    """Return the KiB in use; this is also the new peak if the kernel can reset it."""
    if RESET.exists():
        RESET.write_text("5")
    return _peak_kib()


def _peak_kib() -> int:
    if STATUS.exists():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _measure(
    size: tuple[int, ...], names: Sequence[str], peers: Sequence[peer.Peer]
) -> dict[str, float]:
    tokens, n, k = size
    x = cases.random_input((tokens, k), torch.bfloat16)
    weight = cases.random_input((n, k), torch.bfloat16)
    small = cases.random_input((128, 128), torch.bfloat16)
    F.linear(small, small)
    peaks_mib = {"bf16": peak_mib(lambda: F.linear(x, weight))}
    known = {quantizer.canonical: quantizer for quantizer in cases.weight_quantizers(quick=False)}
    for name in names:
        chosen = known[name]
        arguments = cases.call_arguments(chosen)
        warm, q = (qtensor.quantize(w, chosen, **arguments) for w in (small, weight))
        F.linear(small, warm)
        peaks_mib[name] = peak_mib(lambda q=q: F.linear(x, q))
        for other in peers:
            job = other.job(name)
            if job is not None and job.linear is not None:
                label = f"{other.name} {name}"
                try:
                    job.linear(small, job.quantize(small))
                    theirs = job.quantize(weight)
                    peaks_mib[label] = peak_mib(lambda j=job, t=theirs: j.linear(x, t))
                except Exception as error:  # noqa: BLE001 - a foreign library may fail in any way
                    print(label, first_line(error), file=sys.stderr)
    return peaks_mib


def main(arguments: Sequence[str]) -> int:
    """Print the peaks."""
    size, names, *others = arguments
    peers, _ = peer.load([name for name in "".join(others).split(",") if name])
    with silent():
        peaks_mib = _measure(tuple(int(n) for n in size.split("x")), names.split(";"), peers)
    print(json.dumps(peaks_mib))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
