"""``KernelSpec``: the value that names a generated GEMM kernel and the products it computes."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

import torch

from qtensor.core.errors import check

ARCHS = {
    "sm_90a": ((9, 0),),
    "sm_100f": ((10, 0), (10, 3)),
    "sm_120f": ((12, 0), (12, 1)),
}
"""Architecture -> the compute capabilities that its code runs on, the first of them first.

Code for an "a" architecture runs on that one only, code for an "f" architecture on its family.
"""

ARCH_OF = {capability: arch for arch, family in ARCHS.items() for capability in family}
"""Compute capability -> the architecture whose code runs on it."""

RECIPES = ("fp8", "fp8_blockwise", "mxfp8", "mxfp4", "nvfp4")
SCHEDULES = ("cooperative", "pingpong", "1sm", "2sm")
LAYOUTS = ("TN", "NN", "NT")

OUTPUTS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
"""Dtype of a result -> its name in a spec."""

BITS = {"e4m3": 8, "e5m2": 8, "e2m1": 4, "bf16": 16, "f16": 16, "f32": 32}
_TMA_BITS = 128
_BLOCK_FACTORS = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}


@dataclass(frozen=True)
class KernelSpec:
    """One kernel, which computes ``D = alpha * scale_a * scale_b * (A @ B.T) + bias + beta * C``.

    Every kernel takes a bias and the per-tensor scale factors as pointers that may be null. A scale
    pointer may also hold one factor per row of ``a`` or per column of the result. Kernels with a
    float32 result also take C and beta.

    Attributes:
        recipe: one of ``RECIPES``; "fp8" covers per-tensor and per-row factors.
        arch: one of ``ARCHS``.
        tile: (M, N, K) of the tile that one MMA group computes: one CTA, or a pair of CTAs ("2sm").
        cluster: (M, N) of the cluster of CTAs.
        schedule: "cooperative" or "pingpong" (sm_90a, sm_120f), "1sm" or "2sm" (sm_100f).
        a: element type of ``a``: "e4m3", "e5m2" or "e2m1".
        b: element type of ``b``.
        d: element type of the result: "bf16", "f16" or "f32".
        layout: "TN" (K is contiguous in both operands). MXFP8 also has "NN" (N is contiguous in b)
            and "NT" (M is contiguous in a, N in b), because its columnwise codes have the same
            memory layout as its rowwise codes.
        fast: only for FP8 on sm_90a. Sums stay in the tensor core's narrow accumulators (about 14
            bits) over all of K, instead of moving to float32 every 128 steps.
        block: for "fp8_blockwise", the (M, N, K) elements that share a factor; otherwise empty.

    Raises:
        QTensorError: the values name no kernel.
    """

    recipe: str
    arch: str
    tile: tuple[int, int, int]
    cluster: tuple[int, int] = (1, 1)
    schedule: str = "cooperative"
    a: str = "e4m3"
    b: str = "e4m3"
    d: str = "bf16"
    layout: str = "TN"
    fast: bool = False
    block: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        known = (
            ("recipe", self.recipe, RECIPES),
            ("arch", self.arch, tuple(ARCHS)),
            ("schedule", self.schedule, SCHEDULES),
            ("layout", self.layout, LAYOUTS if self.recipe == "mxfp8" else ("TN",)),
            ("d", self.d, tuple(OUTPUTS.values())),
        )
        for field, value, choices in known:
            rule = f"{field} must be one of {', '.join(choices)}"
            check(value in choices, "kernel spec", rule, repr(value), "Choose one of them")
        blockwise = self.recipe == "fp8_blockwise"
        rule = "fp8_blockwise needs a block of three sizes, and other recipes need an empty block"
        fits = len(self.block) == (3 if blockwise else 0)
        check(fits, "kernel spec", rule, f"{self.recipe} with {self.block}", "Fix block")
        rule = "fast accumulation exists for fp8 on sm_90a"
        fits = not self.fast or (self.recipe, self.arch) == ("fp8", "sm_90a")
        check(fits, "kernel spec", rule, f"{self.recipe} on {self.arch}", "Remove fast")

    @property
    def name(self) -> str:
        """The name of the kernel and its library: letters, digits and underscores."""
        parts = [self.arch.replace("_", ""), self.recipe, f"{self.a}_{self.b}_{self.d}"]
        parts.append("x".join(map(str, self.tile)))
        parts.append("x".join(map(str, self.cluster)))
        parts.append(self.schedule)
        if self.block:
            parts.append("b" + "x".join(map(str, self.block)))
        if self.layout != "TN":
            parts.append(self.layout.lower())
        return "gemm_" + "_".join([*parts, *(["fast"] if self.fast else [])])

    @property
    def capabilities(self) -> tuple[tuple[int, int], ...]:
        """The compute capabilities that the kernel runs on."""
        return ARCHS[self.arch]

    @property
    def accumulates(self) -> bool:
        """True if the kernel can add its product to C."""
        return self.d == "f32"

    @property
    def factor_block(self) -> int:
        """Number of elements along K that share a stored factor; 0 without block factors."""
        if self.recipe == "fp8_blockwise":
            return self.block[2]
        return _BLOCK_FACTORS.get(self.recipe, 0)

    @property
    def majors(self) -> tuple[str, str]:
        """The contiguous dim of ``a`` ("m" or "k") and of ``b`` ("n" or "k")."""
        return ("m" if self.layout == "NT" else "k"), ("k" if self.layout == "TN" else "n")

    def json(self) -> str:
        """Return the fields as JSON."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    def refusal(self, m: int, n: int, k: int) -> str | None:
        """Return why the kernel cannot compute an (m, n, k) product, or None if it can.

        This is the rule of CUTLASS's ``can_implement``: TMA moves rows of whole 16 bytes, so the
        contiguous dim of each matrix must be a multiple of 128 bits.
        """
        sizes = {"m": m, "n": n, "k": k}
        majors = self.majors
        for operand, element, major in (
            ("a", self.a, majors[0]),
            ("b", self.b, majors[1]),
            ("the result", self.d, "n"),
        ):
            multiple = _TMA_BITS // BITS[element]
            if sizes[major] % multiple:
                return (
                    f"{major.upper()} must be a multiple of {multiple} "
                    f"(16-byte rows of {operand}); "
                    f"got {major.upper()}={sizes[major]}"
                )
        return None
