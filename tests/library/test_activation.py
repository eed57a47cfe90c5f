"""``activation`` and ``activation_backward``: bytes against the oracle, values against float64,
refusals.
"""

from __future__ import annotations

import pytest
import torch
from compile_helpers import Compiled, backends
from float_cases import CLAMPED, EMPTY, SHAPES, dtypes, expect_activation, hurting, strided
from formats import assert_same_bytes
from torch.nn import functional as F

import qtensor
from qtensor.functional.activation import clamped_swiglu

GATES = {
    "geglu": "gelu",
    "glu": "sigmoid",
    "qgeglu": "qgelu",
    "reglu": "relu",
    "sreglu": "srelu",
    "swiglu": "silu",
    **dict.fromkeys(CLAMPED, "clamped"),
}
KINDS = ("gelu", "qgelu", "relu", "silu", "srelu", *GATES)
kinds = pytest.mark.parametrize("kind", KINDS)
activation = torch.ops.qtensor.activation
activation_backward = torch.ops.qtensor.activation_backward

EXACT = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "silu": F.silu,
    "srelu": lambda x: F.relu(x) ** 2,
    "sigmoid": torch.sigmoid,
}


def pair(shape: tuple[int, ...], dtype: torch.dtype, kind: str):
    """An input, and a gradient of its activation's shape."""
    wide = (*shape[:-1], 2 * shape[-1]) if kind in GATES else shape
    return hurting(wide, dtype), hurting(shape, dtype, 7)


@kinds
@dtypes
def test_bytes_against_the_oracle(dtype, kind):
    for shape in SHAPES:
        x, dy = pair(shape, dtype, kind)
        got = activation(x, kind), activation_backward(dy, x, kind)
        assert got[0].dtype == got[1].dtype == dtype
        for g, want in zip(got, expect_activation(x, GATES.get(kind), kind, dy, got), strict=True):
            assert_same_bytes(g, want)


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value(dtype, kind):
    codes = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    other = codes.roll(12345)
    x = torch.stack((codes, other), -1) if kind in GATES else codes
    dy = torch.full((65536, 1) if kind in GATES else (65536,), -1.25, dtype=dtype)
    got = activation(x, kind), activation_backward(dy, x, kind)
    for g, want in zip(got, expect_activation(x, GATES.get(kind), kind, dy, got), strict=True):
        assert_same_bytes(g, want)


@kinds
def test_strides_do_not_matter(kind):
    x, dy = pair((3, 5, 70), torch.bfloat16, kind)
    for view, dview in zip(strided(x), strided(dy), strict=True):
        assert_same_bytes(activation(view, kind), activation(x, kind))
        want = activation_backward(dy, x, kind)
        assert_same_bytes(activation_backward(dview, view, kind), want)


@kinds
@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_empty(shape, kind):
    x = torch.empty(shape)
    y = activation(x, kind)
    assert y.shape == ((*shape[:-1], shape[-1] // 2) if kind in GATES else shape)
    assert activation_backward(y, x, kind).shape == x.shape


@pytest.mark.parametrize("kind", EXACT)
def test_values_against_torch_in_float64(kind):
    """Relative to the terms that are summed: 12 roundings, and those of the sigmoid's argument
    times its size.

    The argument v has up to 6 roundings; sigmoid(v) moves by that times the size of v, relatively.
    Where exp(-|v|) is subnormal it is off by up to 2^-149; and torch's own gelu cancels in its
    float64.
    """
    gated = next(g for g, plain in GATES.items() if plain == kind)
    x = torch.cat((torch.linspace(-30, 30, 200_001), torch.randn(1000) * 1e-6))
    both = torch.stack((x, torch.ones_like(x)), -1)
    y = activation(both, gated)[:, 0]
    dx = activation_backward(torch.ones(len(x), 1), both, gated)[:, 0]
    xd = x.double().requires_grad_()
    want = EXACT[kind](xd)
    (slope,) = torch.autograd.grad(want.sum(), xd)
    want, xd = want.detach(), xd.detach()
    v, rise = xd, torch.ones_like(xd)
    if kind == "gelu":
        v = 1.5957691216057308 * (xd + 0.044715 * xd**3)
        rise = 1.5957691216057308 * (1 + 3 * 0.044715 * xd**2)
    elif kind == "qgelu":
        v, rise = 1.702 * xd, rise * 1.702
    rate, terms = 2.0**-24, slope.abs()
    if kind not in ("relu", "srelu"):
        z = torch.exp(-v.abs())
        rate = (12 + 7 * v.abs()) * 2.0**-24
        terms = torch.sigmoid(v) + (xd * rise).abs() * z / (1 + z) ** 2
    slack = 2.0**-50 * xd.abs() * rise.abs() if kind == "gelu" else 2.0**-130
    assert ((y - want).abs() <= rate * want.abs() + slack).all()
    assert ((dx - slope).abs() <= rate * terms + slack).all()


def test_the_first_half_is_activated():
    x = torch.tensor([[-3.0, 2.0, 5.0, 7.0]])
    assert activation(x, "reglu").tolist() == [[0.0, 14.0]]
    assert activation(x, "sreglu").tolist() == [[0.0, 28.0]]


def clamped_in_torch(x, alpha, limit, offset):
    """As GPT-OSS computes it, from halves."""
    gate, linear = x.chunk(2, -1)
    gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (linear + offset)


@pytest.mark.parametrize(
    "numbers", [(1.702, 7.0, 1.0), (0.5, 3.0, 0.0), (1.0, 100.0, 2.0)], ids=str
)
def test_clamped_values_against_torch_in_float64(numbers):
    """Relative to the terms that are summed, as above; on the bounds themselves too, where the
    gradient passes.
    """
    alpha, limit, offset = numbers
    kind = clamped_swiglu(*numbers)
    grid = torch.cat((
        torch.linspace(-1.5 * limit, 1.5 * limit, 301),
        torch.tensor([limit, -limit]),
    ))
    x = torch.cartesian_prod(grid, grid)
    y = activation(x, kind)
    dx = activation_backward(torch.ones(len(x), 1), x, kind)
    xd = x.double().requires_grad_()
    want = clamped_in_torch(xd, *(float(torch.tensor(n)) for n in numbers))
    (slope,) = torch.autograd.grad(want.sum(), xd)
    a, b = x.double().unbind(-1)
    v = alpha * a.clamp(max=limit)
    rate = (16 + 8 * v.abs()) * 2.0**-24
    terms = (b.abs().clamp(max=limit) + abs(offset)) * (torch.sigmoid(v) * (1 + v.abs()))
    size = a.abs().clamp(max=limit) * torch.sigmoid(v)
    assert ((y - want.detach())[:, 0].abs() <= rate * size * (limit + abs(offset)) + 1e-30).all()
    assert ((dx - slope)[:, 0].abs() <= rate * terms + 1e-30).all()
    assert ((dx - slope)[:, 1].abs() <= rate * size + 1e-30).all()
    assert bool((slope[a > limit, 0] == 0).all())
    assert bool((dx[a > limit, 0] == 0).all())


def test_clamped_limits():
    inf, nan = torch.inf, torch.nan
    x = torch.tensor([
        [inf, 1.0],
        [-inf, 1.0],
        [1.0, inf],
        [1.0, -inf],
        [8.0, 8.0],
        [nan, 1.0],
        [0.0, nan],
    ])
    y = activation(x, "clamped_swiglu(alpha=100)")[:, 0]
    assert_same_bytes(y, torch.tensor([14.0, -0.0, 8.0, -6.0, 56.0, nan, nan]))
    dx = activation_backward(torch.ones(7, 1), x, "clamped_swiglu(alpha=100)")
    assert dx[0].tolist() == [0.0, 7.0]
    assert dx[1].tolist() == [0.0, 0.0]
    assert dx[2].tolist() == [8.0, 0.0]
    assert dx[3].tolist() == [-6.0, 0.0]
    assert dx[4].tolist() == [0.0, 0.0]
    assert dx[5].isnan().tolist() == [True, True]
    assert dx[6].isnan().tolist() == [True, False]


def test_the_numbers_of_clamped_swiglu():
    """Canonical text; every spelling of the same numbers gives the same bytes."""
    assert clamped_swiglu() == "clamped_swiglu(alpha=1.702,limit=7.0,offset=1.0)"
    assert clamped_swiglu(1, 7, 0) == "clamped_swiglu(alpha=1.0,limit=7.0,offset=0.0)"
    x = torch.randn(64, 32) * 8
    want = activation(x, "clamped_swiglu")
    for kind in (clamped_swiglu(), "clamped_swiglu()", "clamped_swiglu(offset=1e0,limit=7)"):
        assert_same_bytes(activation(x, kind), want)
    assert not torch.equal(activation(x, clamped_swiglu(limit=1.0)), want)
    assert not torch.equal(activation(x, clamped_swiglu(alpha=1.0)), want)
    assert not torch.equal(activation(x, clamped_swiglu(offset=0.0)), want)
    with pytest.raises(qtensor.QTensorError, match="alpha and limit above 0"):
        clamped_swiglu(alpha=0.0)


@pytest.mark.parametrize(
    "numbers",
    [
        "limit=0", "alpha=-1", "alpha=nan", "limit=inf", "offset=1e39", "beta=1", "limit",
        "limit=7,limit=7", "alpha=1e-45", "alpha=1e20,limit=1e20", "limit=x", ",", "limit=7,",
    ],
)  # fmt: skip
def test_numbers_that_clamped_swiglu_does_not_take(numbers):
    with pytest.raises(
        qtensor.QTensorError, match=r"clamped_swiglu takes alpha=1.702, limit=7.0, offset=1.0"
    ):
        activation(torch.zeros(4, 8), f"clamped_swiglu({numbers})")


@pytest.mark.parametrize("kind", ["gelu", "qgelu", "silu"])
def test_limits(kind):
    x = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0, 3e38, -3e38])
    y = activation(x, kind)
    assert_same_bytes(y, torch.tensor([torch.inf, -0.0, 0.0, -0.0, 3e38, -0.0]))
    slope = activation_backward(torch.ones(6), x, kind)
    assert_same_bytes(slope, torch.tensor([1.0, 0.0, 0.5, 0.5, 1.0, 0.0]))


WIDE = pytest.mark.nightly(reason="the same op with another name")


@backends
@pytest.mark.parametrize(
    "kind",
    [
        "gelu",
        "swiglu",
        pytest.param("sreglu", marks=WIDE),
        pytest.param("clamped_swiglu", marks=WIDE),
    ],
)
def test_compiled_bytes(kind, backend, fresh_dynamo):
    def step(x, dy):
        return activation(x * 2, kind) * 3, activation_backward(dy * 3, x * 2, kind) + 1

    compiled = Compiled(step, backend, dynamic=True)
    for rows in (3, 6, 33):
        x, dy = pair((rows, 2, 48), torch.bfloat16, kind)
        for got, want in zip(compiled(x, dy), step(x, dy), strict=True):
            assert_same_bytes(got, want)
    compiled.check_graphs(1)


def test_refusals():
    x = torch.zeros(4, 9)
    with pytest.raises(qtensor.QTensorError, match="kind must be one of gelu"):
        activation(x, "mish")
    with pytest.raises(qtensor.QTensorError, match="kind must be one of gelu"):
        activation(x, "swiglu(limit=7)")
    with pytest.raises(qtensor.QTensorError, match="last dim of clamped_swiglu must be even"):
        activation(x, "clamped_swiglu(limit=1)")
    with pytest.raises(qtensor.QTensorError, match="last dim of swiglu must be even"):
        activation(x, "swiglu")
    with pytest.raises(qtensor.DtypeError, match="x must be dense, float32"):
        activation(x.double(), "gelu")
    with pytest.raises(qtensor.QTensorError, match=r"dy must have the shape of the activation"):
        activation_backward(x, x[:, :8], "glu")
