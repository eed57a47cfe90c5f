"""Time the built kernels for given sizes and remember the fastest.

The choices apply to this process and are written as JSON for later ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qtensor.build.cache import cache_dir
from qtensor.core.buffer_shapes import ceil_div
from qtensor.core.errors import check
from qtensor.cutlass_gemm import library, scale_tiles, tuning
from qtensor.cutlass_gemm.launch import Kernel, Launcher, Tensors
from qtensor.cutlass_gemm.spec import BITS, OUTPUTS, KernelSpec
from qtensor.cutlass_gemm.tuning import Want

Sizes = tuple[int, int, int]
Timer = Callable[[Callable[[], None]], float]
"""Runs a call several times and returns the microseconds that one takes."""

_WARM_UP, _CALLS = 3, 20
_FLOATS = {name: dtype for dtype, name in OUTPUTS.items()}


@dataclass(frozen=True)
class Choice:
    """The measured times of all kernels for one product.

    Attributes:
        want: the kind of product.
        sizes: (M, N, K).
        times: kernel name -> microseconds, in ascending order.
    """

    want: Want
    sizes: Sizes
    times: dict[str, float]

    @property
    def best(self) -> str:
        """The fastest kernel."""
        return next(iter(self.times))


def autotune(
    wanted: Iterable[Want],
    sizes: Sequence[Sizes],
    device: torch.device,
    *,
    name: str,
    timer: Timer | None = None,
) -> list[Choice]:
    """Time every built kernel for each kind of product and each size, and store the fastest.

    Compiles nothing. Skips sizes that no built kernel can compute.

    Args:
        wanted: kinds of products.
        sizes: (M, N, K) of each product.
        device: device to run on.
        name: name of the device; each device has its own file.
        timer: measures a call; by default with CUDA events.

    Raises:
        QTensorError: no kernel is built for any of the products.
    """
    timer = timer or _time_on_gpu
    choices = []
    for want in wanted:
        for size in sizes:
            times = _times(want, size, device, timer)
            if times:
                choices.append(Choice(want, size, times))
                tuning.remember(want, size, choices[-1].best)
    rule = "a built kernel must be able to compute at least one of the products"
    fix = "Run: qtensor kernels build --arch ... --recipe ..."
    check(bool(choices), "autotune", rule, "no such kernel in the cache", fix)
    write(name, choices)
    return choices


def _times(want: Want, size: Sizes, device: torch.device, timer: Timer) -> dict[str, float]:
    times: dict[str, float] = {}
    built = library.built_specs()
    tensors = None
    for spec in tuning.candidates(want):
        if spec.name not in built or spec.refusal(*size) is not None:
            continue
        kernel = library.load(spec)
        if not isinstance(kernel, Kernel):
            continue
        tensors = tensors or random_tensors(spec, size, device)
        launcher = Launcher(kernel, (1, *size), device, processors=_processors(device))
        times[spec.name] = timer(lambda run=launcher, on=tensors: run(on))  # type: ignore[misc]
    return dict(sorted(times.items(), key=lambda item: item[1]))


def _processors(device: torch.device) -> int | None:
    return None if device.type == "cuda" else 1


def random_tensors(spec: KernelSpec, size: Sizes, device: torch.device) -> Tensors:
    """Return operands with random codes for a kernel.

    Zeros would draw less power than real data and would therefore run faster.
    """
    m, n, k = size

    def codes(rows: int, element: str) -> Tensor:
        # No FP8 code below 0x78 is NaN or inf.
        return torch.randint(
            0, 0x78, (rows, k * BITS[element] // 8), dtype=torch.uint8, device=device
        )

    out = torch.empty(m, n, dtype=_FLOATS[spec.d], device=device)
    a, b = codes(m, spec.a), codes(n, spec.b)
    if spec.recipe == "fp8":
        return Tensors(a, b, out)
    if spec.block:
        shapes = [
            scale_tiles.blockwise_shape(rows, k, block)
            for rows, block in ((m, 1), (n, spec.block[1]))
        ]
        sfa, sfb = (torch.full(shape, 0.01, dtype=torch.float32, device=device) for shape in shapes)
        return Tensors(a, b, out, sfa, sfb)
    columns = ceil_div(k, spec.factor_block)
    one = 127 if spec.recipe.startswith("mx") else 0x38  # 1.0 in E8M0 and in E4M3
    sfa, sfb = (
        torch.full(
            (scale_tiles.swizzled_count(rows, columns),), one, dtype=torch.uint8, device=device
        )
        for rows in (m, n)
    )
    return Tensors(a, b, out, sfa, sfb)


def _time_on_gpu(call: Callable[[], None]) -> float:
    for _ in range(_WARM_UP):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(_CALLS):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000.0 / _CALLS


# ---------------------------------------------------------------------------- the file of choices


def path_for(name: str) -> Path:
    """Return the path of the file that holds a device's measured choices."""
    return cache_dir() / "autotune" / f"{re.sub(r'[^A-Za-z0-9]+', '_', name)}.json"


def write(name: str, choices: Sequence[Choice]) -> Path:
    """Add choices to a device's file; each replaces an older one for its product and size."""
    known = {_identity(row): row for row in _rows(path_for(name), name)}
    for choice in choices:
        row = {
            "want": dataclasses.asdict(choice.want),
            "sizes": list(choice.sizes),
            "kernel": choice.best,
            "library": _key_of(choice.best),
            "microseconds": choice.times,
        }
        known[_identity(row)] = row
    content = json.dumps({"device": name, "choices": list(known.values())}, indent=1)
    path = path_for(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w") as file:
        file.write(content + "\n")
    os.replace(temporary, path)
    return path


def read(name: str) -> int:
    """Load a device's file and return how many of its choices apply.

    A choice applies if the cache still holds the kernel that it names.
    """
    count = 0
    for row in _rows(path_for(name), name):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            if row["library"] != _key_of(row["kernel"]):
                continue
            want = dict(row["want"])
            want["block"] = tuple(want["block"])
            m, n, k = row["sizes"]
            tuning.remember(Want(**want), (m, n, k), row["kernel"])
            count += 1
    return count


def _rows(path: Path, name: str) -> list[dict[str, Any]]:
    """Return the choices in a file; an empty list if it is unreadable or for another device."""
    try:
        content = json.loads(path.read_text())
        return list(content["choices"]) if content["device"] == name else []
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _identity(row: dict[str, Any]) -> str:
    return json.dumps([row.get("want"), row.get("sizes")], sort_keys=True)


def _key_of(kernel: str) -> str | None:
    """Return the key of a kernel's library in the cache, or None if it is not built."""
    path = library.built_specs().get(kernel)
    return None if path is None else path.parent.name.rpartition("-")[2]
