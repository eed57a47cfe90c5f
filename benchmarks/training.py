"""Cases of the overhead benchmark that train: a tiny linear layer, and compiling a small MLP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

import qtensor
from benchmarks import suite
from qtensor import ops, recipes

SIZE = 32
LIMITS_US = {
    "forward": 60.0,
    "forward + backward": 150.0,
    "compiled forward": 75.0,
    "compiled forward + backward": 170.0,
}
"""Target for Float8CurrentScaling in microseconds; the other recipes have no target."""
RECIPES = (
    recipes.Float8CurrentScaling(),
    recipes.DelayedScaling(),
    recipes.MXFP8BlockScaling(),
    recipes.NVFP4BlockScaling(),
)

Call = Callable[[], Any]
Job = tuple[str, str, Call, Call | None, Call | None, float | None]
"""(recipe, timed part, our call, torchao's, ``nn.Linear``'s, limit in microseconds)."""


def peer_layer(module: nn.Module) -> nn.Module | None:
    """Convert the module with torchao's float8 training linears; None without torchao.

    They are emulated if there is no FP8 hardware.
    """
    try:
        # torchao is optional.
        from torchao.float8 import (  # noqa: PLC0415
            Float8LinearConfig,
            convert_to_float8_training,
        )
    except ImportError:
        return None
    converted = convert_to_float8_training(module, config=Float8LinearConfig(emulate=True))
    return converted


def _calls(layer: Callable[[Tensor], Tensor]) -> tuple[Call, Call]:
    """Return the calls: forward, and forward with backward."""
    x = torch.randn(SIZE, SIZE, requires_grad=True)
    dy = torch.ones(SIZE, SIZE)
    return (lambda: layer(x)), (lambda: layer(x).backward(dy))


def jobs(quick: bool) -> Iterator[Job]:
    """Yield every timed call. Quick: compiled calls of the first recipe only."""
    other = peer_layer(nn.Sequential(nn.Linear(SIZE, SIZE)))
    for compiled in (False, True):
        wrap = suite.compile_static if compiled else (lambda f: f)
        theirs = (None, None) if other is None else _calls(wrap(other))
        prefix = "compiled " if compiled else ""
        names = (f"{prefix}forward", f"{prefix}forward + backward")
        plain = _calls(wrap(nn.Linear(SIZE, SIZE)))
        for name, call in zip(names, plain, strict=True):
            yield "nn.Linear", name, call, None, None, None
        for recipe in RECIPES[:1] if quick and compiled else RECIPES:
            label = type(recipe).__name__
            own = _calls(wrap(qtensor.Linear(SIZE, SIZE, recipe=recipe)))
            current = label == "Float8CurrentScaling"
            for i, name in enumerate(names):
                limit = LIMITS_US[name] if current else None
                yield label, name, own[i], theirs[i] if current else None, plain[i], limit


class _Residual(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x)


def blocks() -> dict[str, nn.Module]:
    """Return an MLP block with residual as the module, the sequence, and the unfused sequence."""
    options: dict[str, Any] = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False}

    def sequence(fuse: bool) -> nn.Module:
        return ops.Sequential(
            ops.MakeExtraOutput(channel="residual"),
            ops.RMSNorm(SIZE),
            ops.Linear(SIZE, 4 * SIZE, bias=False),
            ops.SwiGLU(),
            ops.Linear(2 * SIZE, SIZE, bias=False),
            ops.AddExtraInput(channel="residual"),
            fuse=fuse,
        )

    return {
        "LayerNormMLP": _Residual(qtensor.LayerNormMLP(SIZE, 2 * SIZE, **options)),
        "ops.Sequential": sequence(True),
        "ops.Sequential, fuse=False": sequence(False),
    }


def block_jobs() -> Iterator[tuple[str, str, Call]]:
    """Yield (recipe and block, timed part, call) of every timed call of the blocks."""
    for recipe in RECIPES[:3]:
        region = qtensor.autocast(recipe=recipe)
        for name, block in blocks().items():
            forward, both = _calls(region(block))
            label = f"{type(recipe).__name__}, {name}"
            yield label, "forward", forward
            yield label, "forward + backward", both


def compile_seconds(make: Callable[[], nn.Module | None]) -> tuple[float, float] | None:
    """Return the cold compile seconds of a module's forward and backward, with an empty cache."""
    module = make()
    if module is None:
        return None
    x = torch.randn(64, SIZE, requires_grad=True)
    with suite.silent(), fresh_cache():
        suite.forget_compiled()
        began = perf_counter()
        y = suite.compile_static(module)(x)
        middle = perf_counter()
        y.sum().backward()
        return middle - began, perf_counter() - middle


def mlps() -> dict[str, Callable[[], nn.Module | None]]:
    """Return an MLP of two layers for each library."""

    def plain() -> nn.Module:
        return nn.Sequential(nn.Linear(SIZE, 64), nn.ReLU(), nn.Linear(64, SIZE))

    def ours() -> nn.Module:
        recipe = recipes.Float8CurrentScaling()
        first, last = (
            qtensor.Linear(SIZE, 64, recipe=recipe),
            qtensor.Linear(64, SIZE, recipe=recipe),
        )
        return nn.Sequential(first, nn.ReLU(), last)

    return {"qtensor": ours, "torchao": lambda: peer_layer(plain()), "nn.Linear": plain}
