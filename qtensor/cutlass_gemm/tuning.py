"""The table of all kernels, and the choice among them by a cost model or by measured times."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from qtensor.core.buffer_shapes import ceil_div
from qtensor.core.errors import check
from qtensor.cutlass_gemm.spec import ARCH_OF, ARCHS, RECIPES, KernelSpec


@dataclass(frozen=True)
class Tile:
    """How a kernel divides its work: tile, cluster and schedule of a ``KernelSpec``."""

    tile: tuple[int, int, int]
    cluster: tuple[int, int] = (1, 1)
    schedule: str = "cooperative"


def _tile(m: int, n: int, k: int, cluster: str, schedule: str) -> Tile:
    first, second = cluster.split("x")
    return Tile((m, n, k), (int(first), int(second)), schedule)


# Ordered from the smallest products to the largest. On Hopper an instruction has at least 64 rows,
# and cooperative kernels need 128. The sizes follow nvidia-matmul-heuristics 0.1.0.27 for an H200;
# they have not been measured yet.
_HOPPER = (
    _tile(64, 32, 128, "1x1", "pingpong"),
    _tile(64, 64, 128, "1x1", "pingpong"),
    _tile(64, 128, 128, "1x1", "pingpong"),
    _tile(128, 128, 128, "2x1", "cooperative"),
    _tile(128, 256, 128, "2x1", "cooperative"),
    _tile(256, 128, 128, "1x2", "cooperative"),
)
_SMALL, _MIDDLE, _LARGE = _HOPPER[2], _HOPPER[3], _HOPPER[4]
# These kernels hold a second tile of float32 sums, and the registers of two warp groups hold
# 128x128 of them.
_HOPPER_BLOCKS = (
    _tile(64, 128, 128, "1x1", "pingpong"),
    _tile(128, 128, 128, "1x1", "cooperative"),
    _tile(128, 128, 128, "2x1", "cooperative"),
    _tile(128, 128, 128, "1x2", "cooperative"),
)
_BLACKWELL = (
    _tile(128, 64, 128, "1x1", "1sm"),
    _tile(128, 128, 128, "1x1", "1sm"),
    _tile(256, 128, 128, "2x1", "2sm"),
    _tile(256, 256, 128, "2x1", "2sm"),
)
_BLACKWELL_FP4 = (
    _tile(128, 128, 256, "1x1", "1sm"),
    _tile(256, 128, 256, "2x1", "2sm"),
    _tile(256, 256, 256, "2x1", "2sm"),
)
_RTX = (
    _tile(128, 128, 128, "1x1", "pingpong"),
    _tile(128, 128, 128, "1x1", "cooperative"),
)
_E4M3, _E5M2, _E2M1 = "e4m3", "e5m2", "e2m1"
_ACTIVATION_BLOCK, _GRADIENT_BLOCK = (1, 128, 128), (1, 1, 128)


def _specs(
    recipe: str, arch: str, tiles: Sequence[Tile], elements: str, **options: object
) -> list[KernelSpec]:
    """Return a spec for each tile; ``elements`` names a, b and the result: "e5m2 e4m3 f32"."""
    a, b, d = elements.split()
    return [
        KernelSpec(recipe, arch, t.tile, t.cluster, t.schedule, a, b, d, **options)  # type: ignore[arg-type]
        for t in tiles
    ]


@functools.cache
def specs() -> tuple[KernelSpec, ...]:
    """Return all kernels of this release."""
    hopper, blackwell = "sm_90a", "sm_100f"
    table = [
        # fprop with both kinds of accumulation, dgrad, and wgrad (float32, for main_grad).
        *_specs("fp8", hopper, _HOPPER, "e4m3 e4m3 bf16"),
        *_specs("fp8", hopper, _HOPPER, "e4m3 e4m3 bf16", fast=True),
        *_specs("fp8", hopper, (_SMALL, _LARGE), "e4m3 e4m3 f16"),
        *_specs("fp8", hopper, (_SMALL, _MIDDLE), "e4m3 e4m3 f32"),
        *_specs("fp8", hopper, (_SMALL, _MIDDLE, _LARGE), "e5m2 e4m3 bf16"),
        *_specs("fp8", hopper, (_SMALL, _MIDDLE), "e5m2 e4m3 f32"),
        *_specs("fp8", hopper, (_MIDDLE,), "e4m3 e5m2 bf16"),
        *_specs("fp8", hopper, (_SMALL, _MIDDLE), "e4m3 e5m2 f32"),
        *_blocks(hopper, _HOPPER_BLOCKS, "e4m3 e4m3 bf16", _ACTIVATION_BLOCK),
        *_blocks(hopper, _HOPPER_BLOCKS[1:2], "e4m3 e4m3 f32", _ACTIVATION_BLOCK),
        *_blocks(hopper, _HOPPER_BLOCKS[2:3], "e5m2 e4m3 bf16", _ACTIVATION_BLOCK),
        *_blocks(hopper, _HOPPER_BLOCKS[1:2], "e4m3 e4m3 bf16", _GRADIENT_BLOCK),
        *_blocks(hopper, _HOPPER_BLOCKS[1:3], "e4m3 e4m3 f32", _GRADIENT_BLOCK),
        *_blocks(hopper, _HOPPER_BLOCKS[2:3], "e5m2 e4m3 f32", _GRADIENT_BLOCK),
        *_specs("fp8", blackwell, _BLACKWELL, "e4m3 e4m3 bf16"),
        *_specs("fp8", blackwell, _BLACKWELL[2:3], "e5m2 e4m3 bf16"),
        *_specs("fp8", blackwell, _BLACKWELL[2:3], "e5m2 e4m3 f32"),
        *_specs("fp8", blackwell, _BLACKWELL[2:3], "e4m3 e4m3 f32"),
        *_blocks(blackwell, _BLACKWELL[1:2], "e4m3 e4m3 bf16", _ACTIVATION_BLOCK),
        *_blocks(blackwell, _BLACKWELL[1:2], "e4m3 e4m3 f32", _GRADIENT_BLOCK),
        *_specs("mxfp8", blackwell, _BLACKWELL, "e4m3 e4m3 bf16"),
        *_specs("mxfp8", blackwell, _BLACKWELL[2:3], "e4m3 e4m3 f32"),
        *_specs("mxfp8", blackwell, _BLACKWELL[1:3], "e4m3 e4m3 bf16", layout="NN"),
        *_specs("mxfp8", blackwell, _BLACKWELL[2:3], "e5m2 e4m3 bf16", layout="NN"),
        *_specs("mxfp8", blackwell, _BLACKWELL[2:3], "e4m3 e4m3 bf16", layout="NT"),
        *_specs("mxfp8", blackwell, _BLACKWELL[2:3], "e4m3 e4m3 f32", layout="NT"),
        *_specs("mxfp8", blackwell, _BLACKWELL[2:3], "e5m2 e4m3 f32", layout="NT"),
        *_specs("mxfp4", blackwell, _BLACKWELL_FP4, "e2m1 e2m1 bf16"),
        *_specs("nvfp4", blackwell, _BLACKWELL_FP4, "e2m1 e2m1 bf16"),
        *_specs("nvfp4", blackwell, _BLACKWELL_FP4[1:2], "e2m1 e2m1 f32"),
        *_specs("mxfp8", "sm_120f", _RTX, "e4m3 e4m3 bf16"),
        *_specs("nvfp4", "sm_120f", _RTX, "e2m1 e2m1 bf16"),
    ]
    return tuple(table)


def _blocks(
    arch: str, tiles: Sequence[Tile], elements: str, block: tuple[int, ...]
) -> list[KernelSpec]:
    return _specs("fp8_blockwise", arch, tiles, elements, block=block)


def select(arch: str | None = None, recipe: str | None = None) -> tuple[KernelSpec, ...]:
    """Return the kernels of an architecture and one of ``RECIPES``; None stands for all.

    "sm_103a", "103" and "sm_100f" name the same architecture: the one whose code runs on 10.3.
    """
    if arch is not None:
        served = {f"{major}{minor}": name for (major, minor), name in ARCH_OF.items()}
        known = served.get(arch.removeprefix("sm_").rstrip("af"))
        rule = f"arch must be one of {', '.join(ARCHS)}, or name a GPU that one of them serves"
        check(known is not None, "kernels", rule, repr(arch), "Choose one of them")
        arch = known
    if recipe is not None:
        rule = f"recipe must be one of {', '.join(RECIPES)}"
        check(recipe in RECIPES, "kernels", rule, repr(recipe), "Choose one of them")
    selected = tuple(s for s in specs() if arch in (None, s.arch) and recipe in (None, s.recipe))
    rule = "the architecture must have instructions for the recipe"
    fix = "Use backend='dequant' for that recipe on this architecture"
    check(bool(selected), "kernels", rule, f"{recipe} on {arch}", fix)
    return selected


@dataclass(frozen=True)
class Want:
    """The kind of kernel that a product needs; sizes are not part of it."""

    recipe: str
    arch: str
    a: str
    b: str
    d: str
    layout: str = "TN"
    block: tuple[int, ...] = ()
    fast: bool = False

    def text(self) -> str:
        """Return a description for messages."""
        block = f", blocks {self.block}" if self.block else ""
        fast = ", fast accumulation" if self.fast else ""
        product = f"{self.recipe} {self.a} x {self.b} -> {self.d} {self.layout}"
        return f"{product} on {self.arch}{block}{fast}"


def want_of(spec: KernelSpec) -> Want:
    """Return the kind of product that a kernel computes."""
    return Want(spec.recipe, spec.arch, spec.a, spec.b, spec.d, spec.layout, spec.block, spec.fast)


@functools.cache
def candidates(want: Want) -> tuple[KernelSpec, ...]:
    """Return the kernels for a kind of product, from the smallest tile to the largest."""
    return tuple(spec for spec in specs() if want_of(spec) == want)


MULTIPROCESSORS = {"sm_90a": 132, "sm_100f": 148, "sm_120f": 170}
"""Number of multiprocessors of the largest GPU of each architecture; used without a device."""

# Cost of loading relative to arithmetic: large tiles load less for each product. This is a rough
# model that ``autotune`` replaces; only the order of the costs matters.
_LOAD = 40.0


def cost(spec: KernelSpec, m: int, n: int, k: int, processors: int) -> float:
    """Return the relative time of a product: the number of waves times the cost of one tile.

    A tile of m x n costs m * n units of arithmetic and ``_LOAD`` * (m + n) of loads, also for the
    part of the tile outside the matrix. Large tiles are therefore expensive for few rows, and small
    tiles are expensive for large matrices.
    """
    rows, columns = spec.tile[0], spec.tile[1]
    processors = processors // 2 if spec.schedule == "2sm" else processors
    tiles = ceil_div(m, rows) * ceil_div(n, columns)
    # All CTAs of a cluster run at once.
    group = spec.cluster[0] * spec.cluster[1]
    group = max(1, group // 2) if spec.schedule == "2sm" else group
    waves = ceil_div(ceil_div(tiles, group), max(1, processors // group))
    shared = _LOAD * (rows / spec.cluster[1] + columns / spec.cluster[0])
    work = rows * columns + shared
    # A wave that is not full still reads each matrix once from memory.
    return waves * work * math.ceil(k / spec.tile[2])


_BUCKETS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def bucket(size: int) -> int:
    """Return the smallest of ``_BUCKETS`` that is at least ``size``, or the last one."""
    return next((b for b in _BUCKETS if size <= b), _BUCKETS[-1])


LISTENERS: list[Callable[[], None]] = []
"""Called when the best kernel may have changed: kernels were built or measured."""


def changed() -> None:
    """Drop the choices that ``ranked`` and, through the listeners, other modules have cached."""
    ranked.cache_clear()
    for listener in LISTENERS:
        listener()


_MEASURED: dict[tuple[Want, tuple[int, int, int]], str] = {}
"""(kind of product, key of its sizes) -> name of the fastest kernel."""


def remember(best: Mapping[tuple[Want, tuple[int, int, int]], str]) -> None:
    """Prefer kernels, by name, for kinds of products and (M, N, K) in this process."""
    _MEASURED.update({(want, _key(sizes)): name for (want, sizes), name in best.items()})
    changed()


def forget() -> None:
    """Drop all choices that were given to ``remember``."""
    _MEASURED.clear()
    changed()


def _key(sizes: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return what products that share a choice have in common.

    M changes from call to call, so buckets of it share a choice. N and K belong to a weight, and
    they decide how full the last wave of tiles is.
    """
    m, n, k = sizes
    return bucket(m), n, k


@functools.lru_cache(maxsize=4096)
def ranked(want: Want, sizes: tuple[int, int, int], processors: int) -> tuple[KernelSpec, ...]:
    """Return the kernels for an (M, N, K) product, best first.

    The kernel that was measured as the fastest comes first; the cost model orders the others.
    """
    measured = _MEASURED.get((want, _key(sizes)))
    return tuple(
        sorted(
            candidates(want),
            key=lambda spec: (spec.name != measured, cost(spec, *sizes, processors)),
        )
    )
