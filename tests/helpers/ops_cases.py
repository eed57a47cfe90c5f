"""Sequences for the tests of operations: each basic operation, and each fusion on its pattern."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from training import assert_same, region

from qtensor import ops, recipes
from qtensor.ops import fuser

WIDTH = 64
ROWS = 40
GROUPS = 3


class Case(NamedTuple):
    """A sequence, and the extra inputs that it takes beside x of shape (rows, WIDTH)."""

    build: Callable[[], list[Any]]
    extra: Callable[[int], list[Tensor]] = lambda rows: []

    def make(self, fuse: bool = True, seed: int = 0) -> ops.Sequential:
        torch.manual_seed(seed)
        sequence = ops.Sequential(*self.build(), fuse=fuse)
        with torch.no_grad():
            # Zeros and ones, with which a bias or norm begins, hide mistakes.
            for p in sequence.parameters():
                if p.ndim == 1:
                    p.add_(torch.randn_like(p) / 4)
        return sequence


def _residual(rows: int) -> list[Tensor]:
    return [torch.linspace(-1, 1, rows * WIDTH).reshape(rows, WIDTH).requires_grad_()]


def _splits(rows: int) -> list[Tensor]:
    return [torch.tensor([rows - 8, 0, 8])]


def _linear(bias: bool = True, width: int = WIDTH, out: int = WIDTH) -> ops.Linear:
    return ops.Linear(width, out, bias=bias)


ACTIVATIONS = {
    "GELU": ops.GELU,
    "QGELU": ops.QGELU,
    "ReLU": ops.ReLU,
    "SReLU": ops.SReLU,
    "SiLU": ops.SiLU,
    "GLU": ops.GLU,
    "GEGLU": ops.GEGLU,
    "QGEGLU": ops.QGEGLU,
    "ReGLU": ops.ReGLU,
    "SReGLU": ops.SReGLU,
    "SwiGLU": ops.SwiGLU,
    "ClampedSwiGLU": ops.ClampedSwiGLU,
}

BASIC: dict[str, Case] = {
    "BasicLinear": Case(lambda: [ops.BasicLinear(WIDTH, 96)]),
    "Bias": Case(lambda: [ops.Bias(WIDTH)]),
    "Linear": Case(lambda: [_linear(out=96)]),
    "LayerNorm": Case(lambda: [ops.LayerNorm(WIDTH), _linear(False)]),
    "RMSNorm": Case(lambda: [ops.RMSNorm(WIDTH, zero_centered_gamma=True), _linear(False)]),
    "L2Normalization": Case(lambda: [ops.L2Normalization(), _linear(False)]),
    "Dropout": Case(lambda: [ops.Dropout(0.25), _linear(False), ops.Dropout(0.5)]),
    "ConstantScale": Case(lambda: [ops.ConstantScale(0.3), _linear(False)]),
    "Identity": Case(lambda: [ops.Identity(), _linear(False)]),
    "Reshape": Case(lambda: [ops.Reshape(-1, 2, WIDTH), _linear(), ops.Reshape(-1, WIDTH)]),
    "Quantize": Case(lambda: [ops.Quantize(backward=True), _linear(False)]),
    "AddExtraInput": Case(lambda: [_linear(False), ops.AddExtraInput()], _residual),
    "MakeExtraOutput": Case(lambda: [_linear(False), ops.MakeExtraOutput(), _linear()]),
    "ExtraInput": Case(
        lambda: [
            ops.ExtraInput(channel="r"),
            _linear(False),
            ops.AddExtraInput(channel="r"),
            ops.GELU(),
            ops.AddExtraInput(channel="r"),
        ],
        _residual,
    ),
    "GroupedLinear": Case(
        lambda: [ops.RMSNorm(WIDTH), ops.GroupedLinear(GROUPS, WIDTH, WIDTH)], _splits
    ),
    **{
        name: Case(lambda kind=kind: [_linear(False, out=128), kind(), ops.Identity()])
        for name, kind in ACTIVATIONS.items()
    },
}


def _mlp(bias: bool) -> list[Any]:
    return [
        ops.MakeExtraOutput(channel="residual"),
        ops.RMSNorm(WIDTH),
        ops.Linear(WIDTH, 192, bias=bias),
        ops.SwiGLU(),
        ops.Linear(96, WIDTH, bias=bias),
        ops.AddExtraInput(channel="residual"),
    ]


class Fused(NamedTuple):
    """A sequence, and the fused operations that its plan must contain."""

    case: Case
    forward: dict[str, tuple[int, int]]
    """Class -> places of its first and last basic operation."""
    backward: dict[str, tuple[int, int]]


FUSED: dict[str, Fused] = {
    "linear_bias": Fused(Case(lambda: [_linear()]), {"ForwardLinearBiasActivation": (0, 1)}, {}),
    "linear_bias_activation": Fused(
        Case(lambda: [_linear(), ops.GELU(), _linear(False)]),
        {"ForwardLinearBiasActivation": (0, 2)},
        {"BackwardActivationBias": (1, 2)},
    ),
    "linear_add": Fused(
        Case(lambda: [_linear(False), ops.AddExtraInput()], _residual),
        {"ForwardLinearBiasAdd": (0, 1)},
        {},
    ),
    "linear_bias_add": Fused(
        Case(lambda: [_linear(), ops.AddExtraInput()], _residual),
        {"ForwardLinearBiasAdd": (0, 2)},
        {},
    ),
    "linear_scale_add": Fused(
        Case(lambda: [_linear(False), ops.ConstantScale(0.7), ops.AddExtraInput()], _residual),
        {"ForwardLinearScaleAdd": (0, 2)},
        {},
    ),
    "linear_bias_scale_add": Fused(
        Case(lambda: [_linear(), ops.ConstantScale(0.7), ops.AddExtraInput()], _residual),
        {"ForwardLinearScaleAdd": (0, 3)},
        {},
    ),
    "add_rmsnorm": Fused(
        Case(lambda: [ops.MakeExtraOutput(), ops.RMSNorm(WIDTH), ops.SiLU()]),
        {},
        {"BackwardAddNorm": (0, 1)},
    ),
    "add_layernorm": Fused(
        Case(lambda: [ops.MakeExtraOutput(), ops.LayerNorm(WIDTH), _linear(False)]),
        {},
        {"BackwardAddNorm": (0, 1)},
    ),
    "backward_linear_add": Fused(
        Case(lambda: [ops.MakeExtraOutput(), _linear(False)]), {}, {"BackwardLinearAdd": (0, 1)}
    ),
    "backward_linear_scale": Fused(
        Case(lambda: [ops.ConstantScale(1.5), _linear(False)]),
        {},
        {"BackwardLinearScale": (0, 1)},
    ),
    "grouped_mlp": Fused(
        Case(
            lambda: [
                ops.ExtraInput(channel="splits"),
                ops.GroupedLinear(GROUPS, WIDTH, 128, channel="splits"),
                ops.SwiGLU(),
                ops.GroupedLinear(GROUPS, WIDTH, WIDTH, bias=False, channel="splits"),
            ],
            _splits,
        ),
        {"ForwardGroupedMLP": (1, 3)},
        {},
    ),
    "mlp": Fused(
        Case(lambda: _mlp(False)),
        {"ForwardLinearBiasAdd": (4, 5)},
        {"BackwardAddNorm": (0, 1)},
    ),
    "mlp_with_biases": Fused(
        Case(lambda: _mlp(True)),
        {"ForwardLinearBiasActivation": (2, 4), "ForwardLinearBiasAdd": (5, 7)},
        {"BackwardAddNorm": (0, 1), "BackwardActivationBias": (3, 4)},
    ),
}


@pytest.fixture
def handing_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let operations pass on quantized tensors of any size, as they do with large ones."""
    monkeypatch.setattr(fuser, "HAND_OVER_FROM", 0)


def data(rows: int = ROWS, dtype: torch.dtype = torch.float32, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator).to(dtype)


def step(
    call: Callable[..., Any],
    sequence: Any,
    x: Tensor,
    recipe: recipes.Recipe | None,
    extra: list[Tensor] | tuple[()] = (),
    seed: int = 0,
) -> list[Tensor]:
    """Return outputs and the gradients of inputs and parameters of one forward and backward."""
    torch.manual_seed(seed)
    x = x.detach().clone().requires_grad_()
    extra = [
        t.detach().to(x.dtype).clone().requires_grad_() if t.is_floating_point() else t
        for t in extra
    ]
    with region(recipe):
        outs = call(x, *extra)
    outs = list(outs) if isinstance(outs, tuple) else [outs]
    loss = sum(
        (o.dequantize() if hasattr(o, "_quantizer") else o)
        .mul(torch.linspace(-1, 1, o.shape[-1], dtype=o.dtype))
        .sum()
        for o in outs
    )
    loss.backward()
    grads = [t.grad for t in (x, *extra) if t.grad is not None]
    grads += [p.grad.clone() for p in sequence.parameters() if p.grad is not None]
    for p in sequence.parameters():
        p.grad = None
    return [o.detach().clone() for o in outs] + grads


def assert_same_steps(first: Any, second: Any, *args: Any, **options: Any) -> None:
    """Assert that two sequences with equal parameters give equal bytes."""
    assert_same(step(second, second, *args, **options), step(first, first, *args, **options))
