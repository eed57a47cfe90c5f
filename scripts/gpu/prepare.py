"""Compile the GEMMs of an architecture into ``QTENSOR_CACHE_DIR``, for prepare_gpu_check.sh."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from time import monotonic

from qtensor.build.compilers import parallel_jobs
from qtensor.core.errors import BuildError
from qtensor.cutlass_gemm import library, tuning
from qtensor.cutlass_gemm.spec import KernelSpec


def one_of_each(specs: tuple[KernelSpec, ...]) -> tuple[KernelSpec, ...]:
    """Return the first kernel of each recipe and schedule."""
    first: dict[tuple[str, str], KernelSpec] = {}
    for spec in specs:
        first.setdefault((spec.recipe, spec.schedule), spec)
    return tuple(first.values())


def drop_others(specs: tuple[KernelSpec, ...]) -> None:
    """Remove libraries of other kernels and of older sources, which would travel for nothing."""
    names = {library.library_name(spec) for spec in specs}
    for entry in library.list_built():
        if entry.name not in names:
            shutil.rmtree(entry.path.parent)


def main() -> int:
    """Compile; the exit status is 1 if a kernel fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arch")
    parser.add_argument("--one-of-each", action="store_true", help="a kernel a recipe and schedule")
    parser.add_argument("--jobs", type=int)
    options = parser.parse_args()
    specs = tuning.select(options.arch)
    if options.one_of_each:
        specs = one_of_each(specs)
    jobs = options.jobs or parallel_jobs(len(specs), library.COMPILE_MEMORY)
    began, done = monotonic(), 0

    def tell(spec: KernelSpec, result: Path | BuildError) -> None:
        nonlocal done
        done += 1
        said = f"failed: {result}" if isinstance(result, BuildError) else "ok"
        print(f"{monotonic() - began:6.0f} s  {done}/{len(specs)} {spec.name}: {said}", flush=True)

    try:
        library.build_all(specs, jobs=jobs, progress=tell)
    except BuildError:
        return 1
    drop_others(specs)
    print(f"{len(specs)} kernels in {monotonic() - began:.0f} s, {jobs} compilers at once")
    return 0


if __name__ == "__main__":
    sys.exit(main())
