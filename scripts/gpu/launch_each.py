"""Launch every built GEMM of the current GPU once, and compare every bit of its result.

``python scripts/gpu/launch_each.py [--one-of-each | --few]``: one kernel of each recipe and
schedule alone; with ``--few`` also a batch, and the Triton kernels of each format on ragged sizes,
for compute-sanitizer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from time import perf_counter

import place
import torch
from gemm_integers import check_kernel
from prepare import one_of_each

import qtensor
from qtensor.cutlass_gemm import library, tuning
from qtensor.cutlass_gemm.launch import Kernel

SIZES = (17, 136, 128) if place.REHEARSAL else (160, 272, 672)
"""(M, N, K), not multiples of any tile. Rows are multiples of 16 bytes."""
RAGGED = (33, 70)


def launch(name: str, call: Callable[[], None]) -> bool:
    """Make a call, wait for it, and print what came of it; True if all is well."""
    began = perf_counter()
    try:
        call()
        if not place.REHEARSAL:
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - the next kernels must be launched
        print(f"FAILED  {name}: {type(error).__name__}: {error}", flush=True)
        return False
    print(f"ok  {(perf_counter() - began) * 1000:7.1f} ms  {name}", flush=True)
    return True


def gemms(few: bool) -> dict[str, Callable[[], None]]:
    """Return the calls of the kernels."""
    specs = tuning.select(place.arch())

    def call(spec: tuning.KernelSpec) -> None:
        kernel = library.load(spec)
        if not isinstance(kernel, Kernel):
            raise RuntimeError(kernel)
        check_kernel(kernel, spec, SIZES, place.device(), place.processors())

    chosen = one_of_each(specs) if few else specs
    return {spec.name: lambda spec=spec: call(spec) for spec in chosen}  # type: ignore[misc]


def batch() -> None:
    """Multiply a batch of three matrices."""
    x, y = (torch.ones(3, rows, 64, device=place.device()) for rows in (40, 72))
    a, b = (qtensor.quantize(t.bfloat16(), "fp8") for t in (x, y))
    got = qtensor.gemm(a, b, "TN", dtype=torch.bfloat16)
    if got.shape != (3, 40, 72) or bool(((got - 64).abs() >= 1).any()):
        raise RuntimeError(f"64 is wanted, got {got}")


def triton_kernels() -> dict[str, Callable[[], None]]:
    """Return a round trip on ragged sizes through each format, in both directions."""
    if place.REHEARSAL:
        # A pytest of the rehearsal runs them in the interpreter.
        return {}

    def call(name: str) -> None:
        x = torch.randn(RAGGED, device=place.device(), dtype=torch.bfloat16)
        options = {"scale": torch.ones(1, device=x.device)} if name == "fp8_delayed" else {}
        q = qtensor.quantize(x, name, columnwise=True, **options)
        q.dequantize()

    return {f"triton {name}": lambda name=name: call(name) for name in qtensor.formats()}  # type: ignore[misc]


def main() -> int:
    """Launch the kernels; the exit status is the number of those that are missing or fail."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one-of-each", action="store_true")
    parser.add_argument("--few", action="store_true")
    options = parser.parse_args()
    place.prepare()
    calls = gemms(options.one_of_each or options.few)
    if options.few:
        calls |= {"fp8, a batch": batch, **triton_kernels()}
    failed = [name for name, call in calls.items() if not launch(name, call)]
    print(f"{len(calls) - len(failed)} of {len(calls)} launches are right")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
