"""The small ops of sequences: bytes by hand, empty tensors, refusals."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from training import assert_same

from qtensor import QTensorError
from qtensor.reference.philox import random_bytes, random_words

OPS = torch.ops.qtensor
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((5, 7), (3, 4, 130), (0, 8), (6,))


def draw(shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_rounds_once(shape, dtype):
    x, y = draw(shape, dtype), draw(shape, dtype, 1)
    bias = draw(shape[-1:], torch.float32, 2)
    assert_same([OPS.add(x, y)], [(x.float() + y.float()).to(dtype)])
    scaled = (x.float() * 0.3).to(dtype)
    assert_same([OPS.scale(x, 0.3)], [scaled])
    both = (scaled.float() + y.float()).to(dtype)
    assert_same([OPS.scale_add(x, 0.3, y)], [both])
    for result in DTYPES:
        assert_same([OPS.bias_add(x, bias, result)], [(x.float() + bias).to(result)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_dropout_is_the_words_of_the_seed(dtype, p):
    seed = torch.tensor([0x1234_5678_9ABC])
    x = draw((9, 13), dtype)
    kept = random_words(seed, x.numel(), 2).view(x.shape) >= round(p * 2**32)
    factor = 1 / (1 - p) if p < 1 else 0.0
    expected = torch.where(kept, x.float() * factor, 0.0).to(dtype)
    assert_same([OPS.dropout(x, p, seed)], [expected])
    # A part of a tensor keeps the words of its elements' places, not of theirs in the whole.
    assert_same([OPS.dropout(x[:4], p, seed)], [expected[:4]])


def test_words_and_bytes_are_the_same_numbers():
    seed = torch.tensor([-7])
    words = random_words(seed, 10, 1)
    octets = random_bytes(seed, 40, 1).view(10, 4).long()
    assert torch.equal(sum(octets[:, i] << 8 * i for i in range(4)), words)
    assert random_bytes(seed, 37, 1).tolist() == octets.flatten()[:37].tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_l2_norm(shape, dtype):
    x, dy = draw(shape, dtype) * 3, draw(shape, dtype, 1)
    y, rnorm = OPS.l2_norm(x, 1e-6)
    assert rnorm.shape == x.shape[:-1]
    wide = x.double().requires_grad_()
    expected = F.normalize(wide, dim=-1, eps=1e-3)
    expected.backward(dy.double())
    tolerance = 1e-6 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
    dx = OPS.l2_norm_backward(dy, x, rnorm, 1e-6)
    torch.testing.assert_close(dx.double(), wide.grad, rtol=tolerance, atol=tolerance)


def test_strides_do_not_matter():
    x, y = draw((8, 6), torch.float32).t(), draw((6, 8), torch.float32, 1)
    assert_same([OPS.add(x, y)], [OPS.add(x.contiguous(), y)])
    seed = torch.tensor([1])
    assert_same([OPS.dropout(x, 0.5, seed)], [OPS.dropout(x.contiguous(), 0.5, seed)])
    assert_same(OPS.l2_norm(x, 1e-6), OPS.l2_norm(x.contiguous(), 1e-6))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: OPS.add(x, x[:1]), "add: both tensors must have one shape and dtype"),
        (lambda x: OPS.add(x, x.half()), "add: both tensors must have one shape and dtype"),
        (
            lambda x: OPS.scale(x.double(), 2.0),
            "scale: x must be dense, float32, bfloat16 or float16",
        ),
        (lambda x: OPS.scale_add(x, 2.0, x[0]), "scale_add: both tensors"),
        (lambda x: OPS.bias_add(x, x[0, :2], x.dtype), "bias_add: the bias must have the size"),
        (lambda x: OPS.dropout(x.long(), 0.5, torch.tensor([1])), "dropout: x must be dense"),
        (lambda x: OPS.l2_norm(x[0, 0], 1e-6), "l2_norm: x must have a last dim"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(QTensorError, match=message):
        call(torch.ones(3, 4))
