"""Fused ops compared with the pairs of ops that they replace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from formats import assert_same_bytes
from native_cases import assert_same_floats
from torch import Tensor

from qtensor.kernels import table

ops = torch.ops.qtensor


def assert_all_same(got: list[Tensor], want: list[Tensor], name: str) -> None:
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        same = assert_same_floats if g.is_floating_point() else assert_same_bytes
        same(g, w, f"{name} output {i}")


def pair_of_norm(x: Tensor, weight: Tensor, settings: Any, q: str, call: Any, keep: bool) -> Any:
    y, mean, rstd = ops.norm(x, weight, None, *settings)
    return [*ops.quantize(y, q, **call), mean, rstd, *[y] * keep]


def pair_of_activation(x: Tensor, kind: str, q: str, call: Any, keep: bool) -> Any:
    y = ops.activation(x, kind)
    return [*ops.quantize(y, q, **call), *[y] * keep]


class Watched:
    """Records the calls that fused kernels served in ``table.floats_``."""

    def __init__(self) -> None:
        self.real, self.answers = table.floats_, list[bool]()

    def __call__(self, name: str, *args: Any) -> bool:
        done = self.real(name, *args)
        if name.endswith("_quantize"):
            self.answers.append(done)
        return done


def check(x: Tensor, q: Any, call: Any, keep: bool, seed: int = 0) -> None:
    """Compare both fused ops on ``x`` with the pairs; a kernel serves every quantizer."""
    weight = torch.randn(x.shape[-1])
    kind = ("rmsnorm", "layernorm")[seed % 2]
    settings = (kind, 1e-5, seed % 3 == 0, (x.dtype, torch.bfloat16)[seed % 2])
    act = ("swiglu", "gelu", "reglu", "silu", "qgeglu", "clamped_swiglu(limit=0.5)")[seed % 6]
    watched = Watched()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "floats_", watched)
        got = ops.norm_quantize(x, weight, None, *settings, q.canonical, keep=keep, **call)
        want = pair_of_norm(x, weight, settings, q.canonical, call, keep)
        assert_all_same(got, want, q.canonical)
        got = ops.activation_quantize(x, act, q.canonical, keep=keep, **call)
        assert_all_same(got, pair_of_activation(x, act, q.canonical, call, keep), q.canonical)
    assert watched.answers == [True, True], f"{q.canonical}: who serves has changed"
