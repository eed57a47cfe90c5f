"""In-place ops write back through the tensor's own quantizer: what a fresh quantization of the
result would be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from formats import (
    BY_NAME,
    FORMATS,
    FormatCase,
    assert_same_bytes,
    assert_same_tensor,
    formats,
    layouts,
    rand,
    requantized,
    snapshot,
    usages,
)
from torch import nn

import qtensor

Op = Callable[[Any], Any]

OPS: dict[str, Op] = {
    "add_": lambda t: t.add_(0.5),
    "add_alpha": lambda t: t.add_(rand(33, 130, seed=3), alpha=-2),
    "iadd": lambda t: t.__iadd__(rand(130, seed=4)),
    "sub_": lambda t: t.sub_(rand(33, 1, seed=5)),
    "mul_": lambda t: t.mul_(-3),
    "div_": lambda t: t.div_(7),
    "pow_": lambda t: t.pow_(2),
    "neg_": lambda t: t.neg_(),
    "clamp_": lambda t: t.clamp_(-0.5, 0.25),
    "lerp_": lambda t: t.lerp_(rand(33, 130, seed=6), 0.1),
    "addcmul_": lambda t: t.addcmul_(rand(33, 130, seed=6), rand(33, 130, seed=7), value=0.5),
    "addcdiv_": lambda t: t.addcdiv_(
        rand(33, 130, seed=6), rand(33, 130, seed=7).abs() + 1, value=0.5
    ),
    "masked_fill_": lambda t: t.masked_fill_(rand(33, 130, seed=8) > 0, 2.0),
    "zero_": lambda t: t.zero_(),
    "fill_": lambda t: t.fill_(1.75),
    "copy_": lambda t: t.copy_(rand(33, 130, seed=9)),
    "copy_broadcast": lambda t: t.copy_(rand(130, seed=9)),
    "copy_bf16": lambda t: t.copy_(rand(33, 130, seed=9, dtype=torch.bfloat16)),
    "copy_int": lambda t: t.copy_(torch.arange(130)),
    "relu_": lambda t: t.relu_(),
    "init_constant": lambda t: nn.init.constant_(t, 0.3),
}


@pytest.mark.parametrize("name", OPS)
@formats
@usages
def test_in_place_equals_requantizing_the_result(
    case: FormatCase, rowwise: bool, columnwise: bool, name: str
) -> None:
    q = case.quantize(rand(33, 130), rowwise=rowwise, columnwise=columnwise)
    target = snapshot(q)
    pointers = [b.data_ptr() for b in target.buffers()]
    want = requantized(q, OPS[name](q.dequantize()))
    assert OPS[name](target) is target
    assert_same_tensor(target, want)
    assert [b.data_ptr() for b in target.buffers()] == pointers


@layouts
@usages
def test_in_place_for_every_layout(
    case: FormatCase, options: dict, rowwise: bool, columnwise: bool
) -> None:
    q = case.quantize(rand(48, 160), rowwise=rowwise, columnwise=columnwise, **options)
    for op in (lambda t: t.add_(1), lambda t: t.mul_(0), lambda t: t.copy_(rand(48, 160, seed=1))):
        target = q.clone()
        want = requantized(q, op(q.dequantize()))
        op(target)
        assert_same_tensor(target, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@formats
def test_in_place_of_a_low_precision_tensor(case: FormatCase, dtype: torch.dtype) -> None:
    q = case.quantize(rand(33, 130, dtype=dtype))
    want = requantized(q, q.dequantize().add_(0.3))
    assert_same_tensor(q.clone().add_(0.3), want)


@pytest.mark.parametrize("source", FORMATS, ids=lambda c: f"from-{c.name}")
@formats
def test_copy_between_formats_requantizes(case: FormatCase, source: FormatCase) -> None:
    q, other = case.quantize(rand(33, 130)), source.quantize(rand(33, 130, seed=1) * 2)
    before = snapshot(other)
    want = snapshot(other) if other.quantizer == q.quantizer else requantized(q, other.dequantize())
    assert q.copy_(other) is q
    assert_same_tensor(q, want)
    assert_same_tensor(other, before)


@formats
def test_plain_destinations(case: FormatCase) -> None:
    """A plain tensor takes the values of a quantized source, in its own dtype, as itself."""
    q = case.quantize(rand(33, 130))
    before, d = snapshot(q), q.dequantize()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        plain = torch.ones(33, 130, dtype=dtype)
        assert plain.copy_(q) is plain
        assert torch.equal(plain, d.to(dtype))
    plain = rand(33, 130, seed=1)
    for op in (
        lambda t, s: t.add_(s),
        lambda t, s: t.mul_(s),
        lambda t, s: t.addcmul_(s, s, value=2),
        lambda t, s: t.lerp_(s, 0.25),
        lambda t, s: t.__setitem__(slice(0, 33), s),
        lambda t, s: t.__setitem__(7, s[0]),
    ):
        got, want = plain.clone(), plain.clone()
        pointer = got.data_ptr()
        op(got, q)
        op(want, d)
        assert_same_bytes(got, want)
        assert got.data_ptr() == pointer
    one, want = [plain.clone()], [plain.clone()]
    torch._foreach_add_(one, [q])
    torch._foreach_add_(want, [d])
    assert_same_bytes(one[0], want[0])
    assert_same_tensor(q, before)


@formats
def test_foreach_in_place(case: FormatCase) -> None:
    qs = [case.quantize(rand(8, 64)), case.quantize(rand(3, 5, seed=1))]
    want = [requantized(q, q.dequantize() * 3) for q in qs]
    targets = [q.clone() for q in qs]
    torch._foreach_mul_(targets, 3)
    for target, expected in zip(targets, want, strict=True):
        assert_same_tensor(target, expected)
    torch._foreach_copy_(targets, qs)
    for target, q in zip(targets, qs, strict=True):
        assert_same_bytes(target.dequantize(), requantized(q, q.dequantize()).dequantize())


@formats
@usages
def test_writing_a_part_leaves_the_rest(case: FormatCase, rowwise: bool, columnwise: bool) -> None:
    """A factor that spans the tensor is kept (the part is encoded with it) or the write is
    refused.
    """
    q = case.quantize(rand(256, 256), rowwise=rowwise, columnwise=columnwise)
    d = q.dequantize()
    other = case.quantize(rand(256, 256, seed=1) * 3, rowwise=rowwise, columnwise=columnwise)
    writes: list[Op] = [
        lambda t: t[:128].zero_(),
        lambda t: t[:128].add_(1),
        lambda t: t[:128].copy_(other[128:]),
        lambda t: t[:128].copy_(rand(128, 256, seed=2) * 0.01),
        lambda t: t.narrow(0, 0, 128).mul_(0.5),
        lambda t: t.__setitem__(slice(0, 128), 0.5),
    ]
    for write in writes:
        target = q.clone()
        try:
            write(target)
        except qtensor.QTensorError:
            assert_same_tensor(target, q)
            continue
        assert_same_bytes(target[128:].dequantize(), d[128:])
        assert_same_bytes(target.dequantize()[128:], d[128:])
        assert not torch.equal(target.dequantize()[:128], d[:128])


@pytest.mark.parametrize("name", ["fp8", "fp8_rowwise", "mxfp8", "mxfp4", "nvfp4"])
def test_writing_a_column_part_leaves_the_rest(name: str) -> None:
    q = BY_NAME[name].quantize(rand(128, 256))
    target, d = q.clone(), q.dequantize()
    try:
        target[:, :128].zero_()
    except qtensor.QTensorError:
        assert_same_tensor(target, q)
        return
    assert_same_bytes(target.dequantize()[:, 128:], d[:, 128:])
    assert torch.equal(target.dequantize()[:, :128].abs(), torch.zeros(128, 128))


@pytest.mark.parametrize("name", ["mxfp8", "mxfp6", "mxfp4", "nvfp4"])
@usages
def test_writing_a_part_of_swizzled_factors(name: str, rowwise: bool, columnwise: bool) -> None:
    """Tile columns of swizzled factors are not a view: a write arrives whole or is refused, never
    by half.
    """
    case = BY_NAME[name]
    kwargs = {"rowwise": rowwise, "columnwise": columnwise, "swizzled": True}
    q, values = case.quantize(rand(256, 512), **kwargs), rand(256, 512, seed=1)
    for dim, size in ((0, 128), (1, 256)):
        target, want = q.clone(), q.dequantize()
        part = target.narrow(dim, 0, size)
        try:
            part.copy_(values.narrow(dim, 0, size))
        except qtensor.QTensorError:
            assert_same_tensor(target, q)
            continue
        want.narrow(dim, 0, size).copy_(part.dequantize())
        assert_same_bytes(target.dequantize(), want)
        assert not torch.equal(want, q.dequantize())


@formats
def test_a_write_through_a_view_or_transpose_arrives(case: FormatCase) -> None:
    q = case.quantize(rand(64, 128))
    want = requantized(q, q.dequantize() + 1)
    for view in (
        lambda t: t.view(2, 32, 128),
        lambda t: t.detach(),
        lambda t: t.data,
        lambda t: t.unsqueeze(0),
    ):
        target = q.clone()
        view(target).add_(1)
        assert_same_tensor(target, want)
    target = q.clone()
    flipped = target.t()
    flipped.add_(1)
    assert_same_bytes(target.dequantize(), flipped.dequantize().t())


@pytest.mark.parametrize(
    ("op", "error"),
    [
        (lambda t: t.copy_(torch.ones(3, 3)), RuntimeError),
        (lambda t: t.add_(torch.ones(3)), RuntimeError),
        (lambda t: t.resize_(3), qtensor.UnsupportedError),
        (lambda t: t.t_(), qtensor.UnsupportedError),
        (lambda t: t.eq_(1), qtensor.UnsupportedError),
        (lambda t: t.set_(torch.ones(3)), qtensor.UnsupportedError),
    ],
    ids=["copy_shape", "add_shape", "resize_", "t_", "eq_", "set_"],
)
@formats
def test_a_failed_write_changes_nothing(case: FormatCase, op: Op, error: Any) -> None:
    q = case.quantize(rand(8, 64))
    before = snapshot(q)
    with pytest.raises(error):
        op(q)
    assert_same_tensor(q, before)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p, **k: torch.optim.SGD(p, lr=0.1, weight_decay=0.01, **k),
    "SGD-momentum": lambda p, **k: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, **k),
    "AdamW": lambda p, **k: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0, **k),
    "Adam": lambda p, **k: torch.optim.Adam(p, lr=0.1, weight_decay=0.01, amsgrad=True, **k),
    "RMSprop": lambda p, **k: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, **k),
    "Adagrad": lambda p, **k: torch.optim.Adagrad(p, lr=0.1, **k),
}


@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@formats
def test_optimizer_step_is_the_requantized_high_precision_step(
    case: FormatCase, name: str, foreach: bool
) -> None:
    """Each step writes the parameter once, so it equals requantizing the step on the values; state
    is plain.
    """
    q = case.quantize(rand(16, 64))
    parameter, master = nn.Parameter(q.clone()), nn.Parameter(q.dequantize())
    steps = [OPTIMIZERS[name]([p], foreach=foreach) for p in (parameter, master)]
    inner = parameter.buffers()
    for seed in range(3):
        with torch.no_grad():
            master.copy_(parameter.dequantize())
        old = parameter.detach().clone()
        parameter.grad, master.grad = rand(16, 64, seed=10 + seed), rand(16, 64, seed=10 + seed)
        for step in steps:
            step.step()
        assert_same_tensor(parameter.detach(), requantized(old, master.detach()))
        assert not torch.equal(parameter.dequantize(), old.dequantize())
    assert all(a is b for a, b in zip(parameter.buffers(), inner, strict=True))
    for value, want in zip(
        steps[0].state[parameter].values(), steps[1].state[master].values(), strict=True
    ):
        assert type(value) is type(want)
        if isinstance(value, torch.Tensor):
            assert_same_bytes(value, want)


@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
@formats
def test_decoupled_weight_decay_writes_twice(case: FormatCase, foreach: bool) -> None:
    """AdamW's decay is a write of its own: the step is the requantized step of the requantized
    decay.
    """
    q = case.quantize(rand(16, 64))
    parameter = nn.Parameter(q.clone())
    decayed = requantized(q, q.dequantize().mul_(1 - 0.1 * 0.5))
    master = nn.Parameter(decayed.dequantize())
    parameter.grad, master.grad = rand(16, 64, seed=10), rand(16, 64, seed=10)
    torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.5, foreach=foreach).step()
    torch.optim.AdamW([master], lr=0.1, weight_decay=0.0, foreach=foreach).step()
    assert_same_tensor(parameter.detach(), requantized(decayed, master.detach()))


@formats
def test_copying_the_own_transpose(case: FormatCase) -> None:
    """The buffers of both overlap: they are read before one of them is written."""
    q = case.quantize(rand(128, 128), columnwise=True)
    want = q.clone()
    want.t().copy_(q)
    q.t().copy_(q)
    assert_same_tensor(q, want)
    half, other = case.quantize(rand(256, 128)), case.quantize(rand(256, 128))
    other.copy_(half)
    half[:128].copy_(half[128:])
    other[:128].copy_(other[128:].clone())
    assert_same_tensor(half, other)


def test_new_zeros_are_zeros_until_they_are_written() -> None:
    """Their first rows may end inside of a block only while zeros follow."""
    q = qtensor.quantize(rand(64, 64), "mxfp8", columnwise=True)
    zeros, written = q.new_zeros(64, 64), q.new_zeros(64, 64)
    assert zeros[:40].shape == (40, 64)
    written.copy_(q)
    assert zeros[:40].shape == (40, 64)
    with pytest.raises(qtensor.UnsupportedError, match="Row slicing"):
        written[:40]


@pytest.mark.parametrize("name", ["fp8", "mxfp8", "nvfp4"])
def test_the_first_rows_of_zeros(name: str) -> None:
    """A write to them gets factors of its own, but changes no row that was written behind them."""
    like = BY_NAME[name].quantize(rand(64, 64), columnwise=True)
    zeros, values = like.new_zeros(64, 64), 1000 * rand(40, 64, seed=1)
    part = zeros[:40]
    part.copy_(values)
    want = BY_NAME[name].quantize(values, columnwise=True).dequantize()
    assert_same_bytes(part.dequantize(), want)
    assert_same_bytes(zeros.dequantize()[:40], want)
    zeros.copy_(rand(64, 64, seed=2))
    before = [buffer.clone() for buffer in zeros.buffers()]
    if name == "fp8":
        part.copy_(values)  # it keeps the factor that the other rows have
        assert torch.equal(zeros._scale_inv, before[-1])
    else:
        with pytest.raises(qtensor.UnsupportedError, match="copy"):
            part.copy_(values)
        for buffer, old in zip(zeros.buffers(), before, strict=True):
            assert_same_bytes(buffer, old)


@formats
def test_out_of_plain_operands(case: FormatCase) -> None:
    """``out=`` may be the only quantized tensor of a call."""
    x = rand(64, 128, seed=3)
    for call in (
        lambda out: torch.cat([x[:32], x[32:]], out=out),
        lambda out: torch.index_select(x, 0, torch.arange(64), out=out),
    ):
        out = case.quantize(rand(64, 128))
        want = out.clone().copy_(x)
        assert call(out) is out
        assert_same_tensor(out, want)
    with pytest.raises(qtensor.QTensorError, match="out must have the shape of the result"):
        torch.cat([x, x], out=case.quantize(rand(64, 128)))


@pytest.mark.parametrize("name", ["nvfp4", "fp8_rowwise"])
def test_copying_into_a_part_that_dropped_a_usage(name: str) -> None:
    """The whole still has that usage, and the write would not reach it."""
    options = {"axis": 0} if name == "fp8_rowwise" else {}
    q = BY_NAME[name].quantize(rand(256, 128), columnwise=True, **options)
    part = q[:128]
    part.update_usage(columnwise=False)
    source = BY_NAME[name].quantize(rand(128, 128, seed=1), columnwise=True, **options)
    source.update_usage(columnwise=False)
    before = [buffer.clone() for buffer in q.buffers()]
    with pytest.raises(qtensor.UnsupportedError, match="a write must reach all data"):
        part.copy_(source)
    assert all(torch.equal(a, b) for a, b in zip(q.buffers(), before, strict=True))
    part.clone().copy_(source)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_the_transpose_of_rows_with_swizzled_columnwise_factors(name: str) -> None:
    """No strides show their tiles in the reverse shape: a copy, which products read."""
    q = qtensor.quantize(rand(256, 384), name, rowwise=False, columnwise=True, swizzled=True)
    rows, x = q[128:], rand(3, 128, seed=1)
    assert_same_bytes(rows.t().dequantize(), rows.dequantize().t().contiguous())
    # At most 128 products of unit size in float32, in another order.
    torch.testing.assert_close(x @ rows, x @ rows.dequantize(), rtol=0, atol=128 * 2**-20)
    with pytest.raises(qtensor.UnsupportedError, match="the scales of the part are a copy"):
        rows.t().mul_(2)
    assert_same_bytes(q.t().mul_(2).dequantize(), q.dequantize().t().contiguous())
