"""``norm``, ``norm_backward`` and ``bias_grad``: bytes against the oracle, values against float64,
refusals.
"""

from __future__ import annotations

import pytest
import torch
from compile_helpers import Compiled, backends
from float_cases import (
    EMPTY,
    SHAPES,
    dtypes,
    expect_norm,
    expect_norm_backward,
    hurting,
    rounded,
    strided,
)
from formats import assert_same_bytes
from oracle import float_ops

import qtensor

KINDS = ("layernorm", "rmsnorm")
kinds = pytest.mark.parametrize("kind", KINDS)
U = 2.0**-24
norm, norm_backward = torch.ops.qtensor.norm, torch.ops.qtensor.norm_backward
bias_grad = torch.ops.qtensor.bias_grad


def vectors(size: int, dtype: torch.dtype):
    return torch.randn(size).to(dtype), torch.randn(size).to(dtype)


def assert_all_same(got, want):
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert_same_bytes(g, w, f"output {i}")


@kinds
@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_against_the_oracle(shape, dtype, kind):
    for case in range(4):
        weight, bias = vectors(shape[-1], (dtype, torch.float32)[case % 2])
        weight, bias = weight if case != 2 else None, bias if case else None
        centered, out_dtype = case == 3, (dtype, torch.float32, dtype, torch.bfloat16)[case]
        x, dy = hurting(shape, dtype, case), hurting(shape, dtype, 9)
        got = norm(x, weight, bias, kind, 1e-5, centered, out_dtype)
        assert got[0].dtype == out_dtype
        assert_all_same(got, expect_norm(x, weight, bias, kind, 1e-5, centered, got))
        stats = got[1:]
        back = norm_backward(dy, x, weight, *stats, kind, centered, bias is not None)
        assert back[1].numel() == (0 if weight is None else shape[-1])
        assert back[2].numel() == (0 if bias is None else shape[-1])
        assert_all_same(back, expect_norm_backward(dy, x, weight, stats, centered, back))


@kinds
def test_strides_do_not_matter(kind):
    x, dy = torch.randn(3, 5, 140), torch.randn(3, 5, 140)
    weight, bias = vectors(140, torch.float32)
    want = norm(x, weight, bias, kind, 1e-5, False, x.dtype)
    want_back = norm_backward(dy, x, weight, *want[1:], kind, False, True)
    strided_weight = torch.stack((weight, weight), 1)[:, 0]
    for view, dview in zip(strided(x), strided(dy), strict=True):
        got = norm(view, strided_weight, bias, kind, 1e-5, False, x.dtype)
        assert_all_same(got, want)
        back = norm_backward(dview, view, strided_weight, *want[1:], kind, False, True)
        assert_all_same(back, want_back)
        assert_same_bytes(bias_grad(dview), bias_grad(dy))


@kinds
@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_empty(shape, kind):
    x, weight = torch.empty(shape), torch.randn(shape[-1])
    y, mean, rstd = norm(x, weight, weight, kind, 1e-5, False, torch.bfloat16)
    assert y.shape == x.shape
    assert rstd.shape == x.shape[:-1]
    assert mean.shape == (x.shape[:-1] if kind == "layernorm" else (0,))
    dx, dweight, dbias = norm_backward(x, x, weight, mean, rstd, kind, False, True)
    assert dx.shape == x.shape
    assert dweight.tolist() == dbias.tolist() == [0.0] * shape[-1]
    assert bias_grad(x).tolist() == [0.0] * shape[-1]


@dtypes
def test_bias_grad_against_the_oracle(dtype):
    for shape in (*SHAPES, (400, 9), (5, 64, 3)):
        dy = hurting(shape, dtype)
        got = bias_grad(dy)
        want = float_ops.column_sum(dy.float().reshape(-1, shape[-1]).numpy())
        assert_same_bytes(got, rounded(want, got))


def bounds(x, weight, dy, rstd, mean):
    """(M, K) float64: what float32 can move y and dx by.

    A row sum of K terms adds c = ceil(K / 128) + 7 roundings to each, relative to the sum of their
    magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2); mean and rstd
    and the few operations around them add less than 8. Normalized values n are then off by e = c u
    (mean|x| rstd + 2 |n|), and so on through the formulas.
    """
    c = (-(-x.shape[1] // 128) + 15) * U
    gamma = torch.ones(x.shape[1], dtype=torch.float64) if weight is None else weight.abs()
    n = ((x - mean) * rstd).abs()
    e = c * (x.abs().mean(1, keepdim=True) * rstd + 2 * n)
    y = e * gamma + c * n * gamma
    g = dy.abs() * gamma
    gn = (g * n).mean(1, keepdim=True)
    slip = (g * (e + c * n)).mean(1, keepdim=True)
    moved = c * g + e * gn + n * (slip + c * gn) + c * g.mean(1, keepdim=True)
    # The exact gradient uses the exact rstd; ours is off by less than c relative.
    dx = (moved + 2 * c * (g + n * gn + g.mean(1, keepdim=True))) * rstd
    return y, dx


@kinds
@pytest.mark.parametrize("shape", [(67, 40), (33, 1000), (5, 4097)], ids=str)
def test_values_against_torch_in_float64(shape, kind):
    x = (torch.randn(shape) * torch.exp2(torch.randint(-6, 7, (shape[0], 1)).float())).add_(0.5)
    weight, bias, dy = torch.randn(shape[1]), torch.randn(shape[1]), torch.randn(shape)
    y, mean, rstd = norm(x, weight, bias, kind, 1e-5, False, x.dtype)
    dx, dweight, dbias = norm_backward(dy, x, weight, mean, rstd, kind, False, True)
    xd, wd, bd = (t.double().requires_grad_() for t in (x, weight, bias))
    eps = float(torch.tensor(1e-5))  # as float32 has it
    if kind == "layernorm":
        exact = torch.nn.functional.layer_norm(xd, shape[1:], wd, bd, eps)
    else:
        exact = torch.nn.functional.rms_norm(xd, shape[1:], wd, eps) + bd
    exact.backward(dy.double())
    x, dy, weight = x.double(), dy.double(), weight.double()
    center = x.mean(1, keepdim=True) * (kind == "layernorm")
    r = 1 / ((x - center).square().mean(1, keepdim=True) + eps).sqrt()
    for_y, for_dx = bounds(x, weight, dy, r, center)
    tiny = 2.0**-140
    assert ((y - exact).abs() <= for_y + U * exact.abs() + tiny).all()
    assert ((dx - xd.grad).abs() <= for_dx + tiny).all()
    rows = (64 + -(-shape[0] // 64)) * U
    n_error = bounds(x, None, dy, r, center)[0]
    for_weight = (rows * (dy * (x - center) * r).abs() + dy.abs() * n_error).sum(0)
    assert ((dweight - wd.grad).abs() <= for_weight + U * wd.grad.abs()).all()
    assert ((dbias - bd.grad).abs() <= rows * dy.abs().sum(0)).all()


@backends
@kinds
def test_compiled_bytes(kind, backend, fresh_dynamo):
    """Producers and consumers that a compiler would fuse with are around the ops."""

    def step(x, dy, weight, bias):
        x = x * 1.5
        y, mean, rstd = norm(x, weight, bias, kind, 1e-5, True, torch.bfloat16)
        grads = norm_backward(dy + 1, x, weight, mean, rstd, kind, True, True)
        return y.float() * 2, mean, rstd, *grads, bias_grad(dy + 1)

    compiled = Compiled(step, backend, dynamic=True)
    for rows in (70, 5, 130):
        x, dy = torch.randn(rows, 2, 136), torch.randn(rows, 2, 136)
        weight, bias = vectors(136, torch.float32)
        assert_all_same(compiled(x, dy, weight, bias), step(x, dy, weight, bias))
    compiled.check_graphs(1)


REFUSALS = {
    "kind": (dict(kind="batchnorm"), "kind must be layernorm or rmsnorm; got 'batchnorm'"),
    "integers": (dict(x=torch.zeros(4, 8, dtype=torch.int32)), "x must be dense, float32"),
    "0-d": (dict(x=torch.zeros(())), "must have a last dim"),
    "weight": (dict(weight=torch.zeros(7)), r"weight must have the size of the last dim; got \(7,"),
    "bias": (dict(bias=torch.zeros(1, 8)), "bias must have the size of the last dim"),
    "dtype": (dict(dtype=torch.float64), "the result's dtype must be float32"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name):
    changed, message = REFUSALS[name]
    arguments = dict(
        x=torch.zeros(4, 8), weight=None, bias=None, kind="rmsnorm", eps=1e-5,
        zero_centered_gamma=False, dtype=torch.float32,
    ) | changed  # fmt: skip
    with pytest.raises(qtensor.QTensorError, match=message):
        norm(**arguments)


def test_backward_refusals():
    x = torch.zeros(4, 8)
    with pytest.raises(qtensor.QTensorError, match="dy must have the shape of x"):
        norm_backward(x[:2], x, None, x[:, 0], x[:, 0], "rmsnorm", False, False)
    with pytest.raises(qtensor.QTensorError, match="rstd must be what norm returned"):
        norm_backward(x, x, None, x[:, 0], x[:, 0].double(), "rmsnorm", False, False)
    with pytest.raises(qtensor.QTensorError, match="mean must be what norm returned"):
        norm_backward(x, x, None, x[:, 0].new_empty(0), x[:, 0], "layernorm", False, False)
    with pytest.raises(qtensor.QTensorError, match=r"bias_grad: dy must be dense"):
        bias_grad(x.double())
