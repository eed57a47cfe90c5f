"""Time the kernels that are built for given sizes, and keep the fastest: in this process, and as JSON for later ones."""

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

from qtensor.build import cache_dir
from qtensor.cutlass_gemm import layout, library, tuning
from qtensor.cutlass_gemm.launch import Kernel, Launcher, Tensors
from qtensor.cutlass_gemm.spec import BITS, OUTPUTS, KernelSpec
from qtensor.cutlass_gemm.tuning import Want
from qtensor.errors import check
from qtensor.layout import ceil_div

Sizes = tuple[int, int, int]
Timer = Callable[[Callable[[], None]], float]
"""Microseconds of a call."""

_WARM_UP, _CALLS = 3, 20
_FLOATS = {name: dtype for dtype, name in OUTPUTS.items()}


@dataclass(frozen=True)
class Choice:
    """What was measured for one product.

    Attributes:
        want: of the product.
        sizes: (M, N, K).
        times: kernel name -> microseconds, the fastest first.
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
    """Time every kernel that is built, for each kind of product and each size; remember the fastest and write them.

    Nothing is compiled. Sizes that no built kernel can compute are left out.

    Args:
        wanted: kinds of products.
        sizes: (M, N, K) each.
        device: to run on.
        name: of the device; the file is kept for each.
        timer: CUDA events by default.

    Raises:
        QTensorError: no kernel is built for any of them.
    """
    timer = timer or _time_on_gpu
    choices = []
    for want in wanted:
        for size in sizes:
            times = _times(want, size, device, timer)
            if times:
                choices.append(Choice(want, size, times))
                tuning.remember(want, size, choices[-1].best)
    rule = "a kernel must be built for at least one of the products"
    fix = "Run: qtensor kernels build --arch ... --recipe ..."
    check(bool(choices), "autotune", rule, "none that can compute these sizes", fix)
    write(name, choices)
    return choices


def _times(want: Want, size: Sizes, device: torch.device, timer: Timer) -> dict[str, float]:
    found: dict[str, float] = {}
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
        found[spec.name] = timer(lambda run=launcher, on=tensors: run(on))  # type: ignore[misc]
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _processors(device: torch.device) -> int | None:
    return None if device.type == "cuda" else 1


def random_tensors(spec: KernelSpec, size: Sizes, device: torch.device) -> Tensors:
    """Operands of a kernel with random codes: zeros would draw less power, and be faster, than real data."""
    m, n, k = size

    def codes(rows: int, element: str) -> Tensor:
        # Below 0x78 no FP8 code is NaN or inf.
        return torch.randint(
            0, 0x78, (rows, k * BITS[element] // 8), dtype=torch.uint8, device=device
        )

    out = torch.empty(m, n, dtype=_FLOATS[spec.d], device=device)
    a, b = codes(m, spec.a), codes(n, spec.b)
    if spec.recipe == "fp8":
        return Tensors(a, b, out)
    if spec.block:
        shapes = [
            layout.blockwise_shape(rows, k, block) for rows, block in ((m, 1), (n, spec.block[1]))
        ]
        sfa, sfb = (torch.full(shape, 0.01, device=device) for shape in shapes)
        return Tensors(a, b, out, sfa, sfb)
    columns = ceil_div(k, spec.factor_block)
    one = 127 if spec.recipe.startswith("mx") else 0x38  # 1.0 in E8M0 and in E4M3
    sfa, sfb = (
        torch.full((layout.swizzled_count(rows, columns),), one, dtype=torch.uint8, device=device)
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


# ------------------------------------------------------------------------------------------- the file


def path_for(name: str) -> Path:
    """The file of a device."""
    return cache_dir() / "autotune" / f"{re.sub(r'[^A-Za-z0-9]+', '_', name)}.json"


def write(name: str, choices: Sequence[Choice]) -> Path:
    """Add choices to a device's file; one for the same product and sizes replaces the older."""
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
    text = json.dumps({"device": name, "choices": list(known.values())}, indent=1)
    path = path_for(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w") as file:
        file.write(text + "\n")
    os.replace(temporary, path)
    return path


def read(name: str) -> int:
    """Remember what a device's file says, as far as those kernels are still in the cache; returns how many were."""
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
    """Choices in a file; none if it is not there, cannot be read or is of another device."""
    try:
        found = json.loads(path.read_text())
        return list(found["choices"]) if found["device"] == name else []
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _identity(row: dict[str, Any]) -> str:
    return json.dumps([row.get("want"), row.get("sizes")], sort_keys=True)


def _key_of(kernel: str) -> str | None:
    """The key of a kernel's library in the cache."""
    path = library.built_specs().get(kernel)
    return None if path is None else path.parent.name.rpartition("-")[2]
