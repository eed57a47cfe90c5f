"""Run the front end of nvcc over every generated GEMM: ``make check-kernels``.

Preprocessing and cudafe++ take a few seconds a kernel; a whole compilation takes a minute. They
instantiate the types of a kernel, so every static_assert of CUTLASS's builders and mainloops
outside device functions is checked. No GPU is needed. ``--arch``, ``--recipe`` and ``--jobs``
restrict the run.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

from qtensor.build.compilers import parallel_jobs
from qtensor.cutlass_gemm import library, tuning
from qtensor.cutlass_gemm.spec import KernelSpec

MEMORY = 1 << 30
"""Peak memory of one front end, in bytes."""
_ASSIGNMENT = re.compile(r"([A-Z_]+)=(.*)")
_SHOWN = 5


def front_end(spec: KernelSpec, folder: Path) -> list[str]:
    """Return the first errors of a kernel's front end; empty if it passes."""
    unit = library.build_spec(spec, folder).units[0]
    nvcc = library.find_nvcc(spec.arch).compiler.path
    include = [f"-I{path}" for path in unit.include]
    command = [nvcc, "--dryrun", *unit.flags, *include, "-c", str(unit.source), "-o", "none.o"]
    dry = subprocess.run(
        [*command, "--keep", "--keep-dir", str(folder)],
        capture_output=True,
        text=True,
        cwd=folder,
        check=True,
    )
    lines = [line[3:] for line in dry.stderr.splitlines() if line.startswith("#$ ")]
    environment = dict(os.environ)
    steps = []
    for line in lines:
        if (assignment := _ASSIGNMENT.fullmatch(line.strip())) and " " not in assignment[1]:
            environment[assignment[1]] = assignment[2]
        elif " -E " in line or line.startswith("cudafe++"):
            steps.append(line)
    # The first preprocessing is for the host and feeds cudafe++; the next is for the device
    # compiler.
    first = next(i for i, step in enumerate(steps) if step.startswith("cudafe++"))
    for step in steps[: first + 1]:
        completed = subprocess.run(
            step,
            shell=True,
            env=environment,
            capture_output=True,
            text=True,
            cwd=folder,
            check=False,
        )
        if completed.returncode:
            output = (completed.stdout + completed.stderr).splitlines()
            errors = [line for line in output if "error" in line]
            return (errors or output or [f"status {completed.returncode}"])[:_SHOWN]
    return []


def check(spec: KernelSpec) -> tuple[list[str], float]:
    """Return the errors and the seconds that the check took."""
    began = perf_counter()
    with tempfile.TemporaryDirectory(prefix="qtensor-check-") as folder:
        errors = front_end(spec, Path(folder))
    return errors, perf_counter() - began


def main() -> int:
    """Check all kernels; the exit status is the number of kernels that fail."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", help="only this architecture: sm_90a, ...")
    parser.add_argument("--recipe", help="only this recipe: fp8, ...")
    parser.add_argument(
        "--jobs", type=int, help="number of parallel checks; by default by processors and memory"
    )
    options = parser.parse_args()
    specs = tuning.select(options.arch, options.recipe)
    jobs = options.jobs or parallel_jobs(len(specs), MEMORY)
    began, failed = perf_counter(), 0
    with ThreadPoolExecutor(jobs) as pool:
        for spec, (errors, seconds) in zip(specs, pool.map(check, specs), strict=True):
            print(f"{'FAILED' if errors else 'ok':6} {seconds:5.1f} s  {spec.name}", flush=True)
            for error in errors:
                print(f"       {error[:400]}")
            failed += bool(errors)
    print(f"{len(specs) - failed} of {len(specs)} pass in {perf_counter() - began:.0f} s")
    return failed


if __name__ == "__main__":
    sys.exit(main())
