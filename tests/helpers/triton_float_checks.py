"""Triton kernels for norms, activations and row sums compared with the reference, in a child of
triton_checks."""

from __future__ import annotations

import math
import random
from typing import Any
from unittest import mock

import torch
from adversarial import SEED
from float_cases import GATED, draw_floats, hurting, outputs_of, without_kernels
from formats import BY_NAME, DTYPES, USAGES, assert_same_bytes
from native_cases import assert_same_floats
from triton_checks import device

from qtensor.kernels import table
from qtensor.kernels.fusion import Factors, Target
from qtensor.kernels.products.dequant import finish_
from qtensor.library.native_ops import left_to_python

ops = torch.ops.qtensor


def compare(op: Any, *args: Any) -> list[torch.Tensor]:
    """Compare the kernels of the GPU row of the table with the reference, byte for byte."""
    with left_to_python(), without_kernels():
        want = outputs_of(op(*args))
    fused = op in (ops.norm_quantize, ops.activation_quantize)
    row = table.FLOATS["cuda"]
    served = []

    def watched(name: str, _: str, *rest: Any) -> bool:
        served.append(row[name](*rest))
        return served[-1]

    moved = [a.to(device()) if isinstance(a, torch.Tensor) else a for a in args]
    with left_to_python(), mock.patch.object(table, "floats_", watched):
        got = outputs_of(op(*moved))
    assert served == [True], f"{op} was not served"
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        same = assert_same_floats if fused and w.is_floating_point() else assert_same_bytes
        same(g.cpu(), w, f"output {i} of {op}")
    return want


def check_activation(kind: str, step: int) -> None:
    """Compare every ``step``-th value of 16 bits and many of 32, with odd shapes and strides."""
    torch.manual_seed(0)
    for dtype in DTYPES:
        if dtype == torch.float32:
            x = torch.randint(-(2**31), 2**31, (40_000 // step,)).to(torch.int32).view(dtype)
        else:
            x = torch.arange(0, 65536, step, dtype=torch.int32).to(torch.int16).view(dtype)
        other = x.roll(12345)
        x = torch.stack((x, other)).t().contiguous() if kind in GATED else x
        compare(ops.activation, x, kind)
        compare(ops.activation_backward, other[:, None] if kind in GATED else other, x, kind)
    rng = random.Random(1)
    for shape in ((5,), (3, 70), (2, 3, 33)):
        wide = (*shape[:-1], 2 * shape[-1]) if kind in GATED else shape
        x, dy = draw_floats(rng, wide, torch.bfloat16), draw_floats(rng, shape, torch.float32)
        compare(ops.activation, x.movedim(-1, 0).contiguous().movedim(0, -1), kind)
        compare(ops.activation_backward, dy, x, kind)


def check_norm(kind: str, seed: int) -> None:
    """Compare ragged rows and columns around the lanes (128) and the rows of a block (64)."""
    rng = random.Random(seed)
    for rows, cols in ((1, 1), (3, 127), (65, 130), (130, 40), (6, 400)):
        dtypes = [rng.choice(DTYPES) for _ in range(5)]
        x, dy = hurting((rows, cols), dtypes[0], seed), draw_floats(rng, (rows, cols), dtypes[1])
        weight = rng.choice([None, draw_floats(rng, (cols,), dtypes[2])])
        bias = rng.choice([None, draw_floats(rng, (cols,), dtypes[3])])
        centered, with_bias = rng.random() < 0.5, rng.random() < 0.5
        got = compare(ops.norm, x, weight, bias, kind, 1e-5, centered, dtypes[4])
        compare(ops.norm_backward, dy, x, weight, *got[1:], kind, centered, with_bias)
        compare(ops.bias_grad, dy)


def check_fused(name: str, options: dict[str, Any]) -> None:
    """Fused kernels of a format, by usage and dtype: the bytes of the two ops by the reference."""
    case = BY_NAME[name]
    torch.manual_seed(2)
    shape = (130, 140) if name == "fp8_blockwise" else (40, 70)
    for turn, (rowwise, columnwise) in enumerate(USAGES):
        q = case.quantizer(rowwise=rowwise, columnwise=columnwise, **options)
        if name == "nvfp4" and columnwise and not q.two_dimensional:
            continue
        scale = torch.tensor([32.0]) if q.needs_scale else None
        seed = torch.tensor([SEED]) if q.stochastic_rounding else None
        x = hurting(shape, DTYPES[turn], turn)
        weight = torch.randn(shape[1])
        norm, dtype = ("layernorm", "rmsnorm")[turn % 2], DTYPES[(turn + 1) % 3]
        bias = weight if turn else None
        args = (weight, bias, norm, 1e-5, turn == 1, dtype, q.canonical, scale, None, seed)
        compare(ops.norm_quantize, x, *args)
        act = ("swiglu", "gelu", "clamped_swiglu(limit=0.5)")[turn]
        compare(ops.activation_quantize, x, act, q.canonical, scale, None, seed)


def check_finish(seed: int) -> None:
    """Compare the end of products: one factor, those of rows and columns, a bias, dtypes."""
    rng = random.Random(seed)
    for shape in ((1, 1), (5, 300), (2, 33, 70), (130, 9)):
        rows, cols = math.prod(shape[:-1]), shape[-1]
        sums = hurting((rows, cols), torch.float32, seed).reshape(shape)
        left = rng.choice([None, torch.tensor([0.37]), torch.rand(rows)])
        right = rng.choice([None, torch.tensor([3.0]), torch.rand(cols)])
        bias = rng.choice([None, draw_floats(rng, (cols,), rng.choice(DTYPES))])
        given = [sums, left, right, bias]
        want = torch.empty(shape, dtype=rng.choice(DTYPES))
        moved = torch.empty_like(want, device=device())
        with without_kernels():
            finish_(want, *given)
        kernel = table.FLOATS["cuda"]["finish_product"]
        assert kernel(moved, *(None if t is None else t.to(device()) for t in given))
        assert_same_floats(moved.cpu(), want, f"{shape} {want.dtype}")
    out = torch.zeros(2, 8, device=device())
    assert kernel(out, out, None, None, torch.ones(1, device=device())) is False


def check_left_to_the_pair() -> None:
    """Columns of nvfp4, its rotation, and a tensor between that is kept: not served, and nothing is
    written.
    """
    x = torch.randn(4, 32, device=device())
    kernels = table.FLOATS["cuda"]["activation_quantize"]
    for options in ({"columnwise": True}, {"with_rht": True, "rht_side": "rowwise"}):
        codec = BY_NAME["nvfp4"].quantizer(**options)
        buffers = [torch.full_like(b, 7) for b in codec.alloc_tensors((4, 32)).values()]
        target = Target(codec, x.dtype, Factors())
        assert kernels(None, buffers, x, "gelu", target) is False
        assert all(bool((b == 7).all()) for b in buffers)
    mx = Target(BY_NAME["mxfp8"].quantizer(), x.dtype, Factors())
    buffers = list(mx.quantizer.alloc_tensors((4, 32)).values())
    assert kernels(torch.empty_like(x), buffers, x, "gelu", mx) is False
