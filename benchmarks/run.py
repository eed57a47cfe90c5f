"""Run all benchmarks, each in its own process, then the plot.

``python -m benchmarks.run [--quick] [--peers NAMES] [--sizes SIZES] [--threads N] [--output DIR]``.
A quick run takes at most three minutes on two cores and writes files ``*_quick``, which are not
committed. ``--seconds`` applies to each benchmark.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from benchmarks.settings import parser

MODULES = ("overhead", "quantize", "dequantize", "linear", "compile_time")
QUICK_SECONDS = {"quantize": 30, "dequantize": 18, "linear": 18, "compile_time": 20}
"""Seconds for the rows of a benchmark in a quick run, without imports and first compilation."""


def command(name: str, options: Any) -> list[str]:
    """Return the command line of one benchmark."""
    seconds = options.seconds
    if seconds is None and options.quick:
        seconds = QUICK_SECONDS.get(name)
    words = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{name}"]
    words += ["--output", str(options.output)]
    words += ["--quick"] if options.quick else []
    if name == "plot":
        return words
    words += ["--peers", options.peers]
    words += ["--sizes", options.sizes] if options.sizes else []
    # Overhead is measured with one thread unless --threads is given; the others use all cores.
    words += ["--threads", str(options.threads)] if options.threads else []
    return words + (["--seconds", str(seconds)] if seconds is not None else [])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all benchmarks; the exit status is the number of those that failed."""
    options = parser("run", __doc__).parse_args(arguments)
    failed = []
    with tempfile.TemporaryDirectory(prefix="qtensor-bench-") as cache:
        environment = {"TORCHINDUCTOR_CACHE_DIR": cache, **os.environ}
        for name in (*MODULES, "plot"):
            began = perf_counter()
            print(f"== {name}", flush=True)
            done = subprocess.run(command(name, options), env=environment, check=False)
            print(f"== {name}: {perf_counter() - began:.0f} s", flush=True)
            if done.returncode:
                failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
