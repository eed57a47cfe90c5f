"""Time the built kernels for given sizes and remember the fastest.

The choices apply to this process and are written as JSON for later ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qtensor.build.cache import cache_dir
from qtensor.core.buffer_shapes import ceil_div
from qtensor.core.errors import check
from qtensor.cutlass_gemm import library, scale_tiles, tuning
from qtensor.cutlass_gemm.device_timer import Call, copies_for, time_in_turns
from qtensor.cutlass_gemm.launch import Kernel, Launcher, Tensors
from qtensor.cutlass_gemm.spec import BITS, OUTPUTS, KernelSpec
from qtensor.cutlass_gemm.tuning import Want

Sizes = tuple[int, int, int]
Timer = Callable[[Mapping[str, Sequence[Call]], torch.device], dict[str, float]]
"""Returns the microseconds of a call of each function, whose operands rotate: ``time_in_turns``."""

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
    timer: Timer = time_in_turns,
) -> list[Choice]:
    """Time every built kernel for each kind of product and each size, and store the fastest.

    Compiles nothing. Skips sizes that no built kernel can compute.

    Args:
        wanted: kinds of products.
        sizes: (M, N, K) of each product.
        device: device to run on.
        name: name of the device; each device has its own file.
        timer: measures calls.

    Raises:
        QTensorError: no kernel is built for any of the products.
    """
    choices = []
    for want in wanted:
        for size in sizes:
            times = _times(want, size, device, timer)
            if times:
                choices.append(Choice(want, size, times))
    rule = "a built kernel must be able to compute at least one of the products"
    fix = "Run: qtensor kernels build --arch ... --recipe ..."
    check(bool(choices), "autotune", rule, "no such kernel in the cache", fix)
    tuning.remember({(choice.want, choice.sizes): choice.best for choice in choices})
    write(name, choices)
    return choices


def _times(want: Want, size: Sizes, device: torch.device, timer: Timer) -> dict[str, float]:
    built = library.built_specs()
    launchers: dict[str, Launcher] = {}
    sets: list[Tensors] = []
    for spec in tuning.candidates(want):
        if spec.name not in built or spec.refusal(*size) is not None:
            continue
        kernel = library.load(spec)
        if not isinstance(kernel, Kernel):
            continue
        if not sets:
            first = random_tensors(spec, size, device)
            copies = copies_for(first.bytes, device)
            sets = [first, *(random_tensors(spec, size, device) for _ in range(copies - 1))]
        processors = _processors(device)
        launchers[spec.name] = Launcher(kernel, (1, *size), device, processors=processors)
    functions = {
        name: [functools.partial(launcher, on) for on in sets]
        for name, launcher in launchers.items()
    }
    times = timer(functions, device) if functions else {}
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


# ---------------------------------------------------------------------------- the file of choices


def path_for(name: str) -> Path:
    """Return the path of the file that holds a device's measured choices."""
    return cache_dir() / "autotune" / f"{re.sub(r'[^A-Za-z0-9]+', '_', name)}.json"


def write(name: str, choices: Sequence[Choice]) -> Path:
    """Add choices to a device's file; each replaces an older one for its product and size.

    Choices of another driver or CUDA version are dropped.
    """
    known = {_identity(row): row for row in _rows(path_for(name), name)}
    keys = _keys()
    for choice in choices:
        row = {
            "want": dataclasses.asdict(choice.want),
            "sizes": list(choice.sizes),
            "kernel": choice.best,
            "library": keys.get(choice.best),
            "microseconds": choice.times,
        }
        known[_identity(row)] = row
    content = json.dumps({**_facts(name), "choices": list(known.values())}, indent=1)
    path = path_for(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w") as file:
        file.write(content + "\n")
    os.replace(temporary, path)
    return path


def read(name: str) -> int:
    """Load a device's file and return how many of its choices apply.

    A choice applies if the cache still holds the kernel that it names, and driver and CUDA version
    are those with which it was measured.
    """
    rows = _rows(path_for(name), name)
    keys = _keys() if rows else {}
    found: dict[tuple[Want, Sizes], str] = {}
    for row in rows:
        with contextlib.suppress(KeyError, TypeError, ValueError):
            if row["library"] is None or row["library"] != keys.get(row["kernel"]):
                continue
            want = dict(row["want"])
            want["block"] = tuple(want["block"])
            m, n, k = row["sizes"]
            found[Want(**want), (m, n, k)] = row["kernel"]
    tuning.remember(found)
    return len(found)


def _facts(name: str) -> dict[str, Any]:
    """Return what a measurement depends on besides product and library."""
    return {"device": name, "driver": _driver(), "cuda": torch.version.cuda}


@functools.cache
def _driver() -> str | None:
    """Return the first line about the driver of NVIDIA that runs, or None."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None


def _rows(path: Path, name: str) -> list[dict[str, Any]]:
    """Return the choices in a file; an empty list if it is unreadable or of other ``_facts``."""
    try:
        content = json.loads(path.read_text())
        same = all(content[key] == value for key, value in _facts(name).items())
        return list(content["choices"]) if same else []
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _identity(row: dict[str, Any]) -> str:
    return json.dumps([row.get("want"), row.get("sizes")], sort_keys=True)


def _keys() -> dict[str, str]:
    """Return built kernel -> the key of its library in the cache."""
    built = library.built_specs().items()
    return {kernel: path.parent.name.rpartition("-")[2] for kernel, path in built}
