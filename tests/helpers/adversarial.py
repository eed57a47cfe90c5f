"""Adversarial inputs, and their comparison with the numpy oracle."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import oracle
import torch
from formats import FormatCase, assert_same_bytes
from torch import Tensor

import qtensor

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
SEED = 0x1234_5678_9ABC_DEF
"""Of stochastic rounding, where a test does not choose its own; both key words are non-zero."""


# ---- inputs ------------------------------------------------------------------------------------


def _randn(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Normal values over thirteen binades."""
    return torch.randn(shape) * torch.exp2(torch.randint(-6, 7, shape).float())


def _outlier(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = torch.randn(shape)
    if x.numel():
        x.view(-1)[x.numel() // 2] = -3e4
    return x


def _subnormal(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Multiples of the smallest positive value of the dtype, some just normal."""
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    steps = torch.randint(-40, 41, shape).double() * 2.0 ** torch.randint(0, 8, shape)
    return (steps * smallest).to(dtype)


def _powers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    low, high = math.log2(torch.finfo(dtype).tiny), math.log2(torch.finfo(dtype).max)
    powers = torch.exp2(torch.randint(int(low), int(high), shape).double())
    return powers * torch.randint(0, 2, shape).mul(2).sub(1)


def _max_finite(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Half of the values are the largest finite one, with either sign."""
    largest = torch.finfo(dtype).max
    signs = torch.randint(0, 2, shape).double() * 2 - 1
    return torch.where(
        torch.rand(shape) < 0.5, signs * largest, torch.rand(shape).double() * largest
    )


def _ties(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Multiples of 1/8 up to 12: halves, quarters and eighths of every narrow element's steps."""
    return torch.randint(-96, 97, shape) / 8


def _sparse_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    signed_zero = torch.where(torch.rand(shape) < 0.5, -0.0, 0.0)
    return torch.where(torch.rand(shape) < 0.7, signed_zero, torch.randn(shape))


def _with(value: float) -> Callable[[tuple[int, ...], torch.dtype], Tensor]:
    def make(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.where(torch.rand(shape) < 0.02, value, _randn(shape, dtype))

    return make


KINDS: dict[str, Callable[[tuple[int, ...], torch.dtype], Tensor]] = {
    "randn": _randn,
    "zeros": lambda shape, dtype: torch.zeros(shape),
    "negative_zeros": lambda shape, dtype: torch.full(shape, -0.0),
    "sparse_zeros": _sparse_zeros,
    "outlier": _outlier,
    "subnormal": _subnormal,
    "powers_of_two": _powers,
    "max_finite": _max_finite,
    "ties": _ties,
    "nan": _with(math.nan),
    "inf": _with(math.inf),
    "minus_inf": _with(-math.inf),
}


def make(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an input of one kind; float16 saturates unless the kind contains infinities."""
    x = KINDS[kind](shape, dtype)
    if not kind.endswith(("nan", "inf")):
        x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return x.to(dtype)


def mixed(shape: tuple[int, int], dtype: torch.dtype, *, finite: bool = True) -> Tensor:
    """Bands of rows of every kind that keeps a tensor-wide factor useful, and (unless ``finite``)
    NaN and inf.

    One such tensor meets in one call zero blocks, signed zeros, ties, outliers and sixteen binades
    of ordinary values.
    """
    kinds = [
        "randn",
        "zeros",
        "negative_zeros",
        "sparse_zeros",
        "outlier",
        "ties",
        "randn",
        "subnormal",
    ]
    kinds += [] if finite else ["nan", "inf", "minus_inf", "max_finite"]
    x = torch.zeros(shape, dtype=dtype)
    height = -(-shape[0] // len(kinds))
    for index, kind in enumerate(kinds):
        band = x[index * height : (index + 1) * height]
        band.copy_(make(kind, tuple(band.shape), dtype))
    return x


# ---- random bytes ------------------------------------------------------------------------------


def philox_words(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Philox4x32-10 (Salmon et al. 2011) in uint64 numpy: (n, 4) counter words to (n, 4) output
    words.
    """
    mask = np.uint64(0xFFFFFFFF)
    a, b, c, d = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = (np.uint64(k) for k in key)
    for _ in range(10):
        first, second = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (
            (second >> np.uint64(32)) ^ b ^ k0,
            second & mask,
            (first >> np.uint64(32)) ^ d ^ k1,
            first & mask,
        )
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & mask, (k1 + np.uint64(0xBB67AE85)) & mask
    return np.stack([a, b, c, d], axis=1).astype(np.uint32)


def philox_bytes(seed: int, count: int, stream: int) -> np.ndarray:
    """The bytes of elements 0..count-1: element i takes byte i % 16 of counter (i // 16, 0, 0,
    stream).
    """
    groups = -(-count // 16)
    counter = np.zeros((groups, 4), np.uint32)
    counter[:, 0], counter[:, 3] = np.arange(groups), stream
    words = philox_words(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    return words.astype("<u4").reshape(-1).view(np.uint8)[:count]


# ---- the comparison ----------------------------------------------------------------------------


def to_numpy(x: Tensor) -> np.ndarray:
    """Return the values in float32, which holds every float16 and bfloat16 value."""
    return x.detach().float().numpy()


def oracle_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options as the oracle spells them: an ``e4m3_max`` of 0 means the oracle's
    default."""
    return {k: v for k, v in options.items() if not (k == "e4m3_max" and v == 0)}


def expected(
    x: Tensor, case: FormatCase, seed: int = SEED, scale: float = 32.0, **options: Any
) -> dict[str, np.ndarray]:
    """Return the oracle's buffers for ``x``, by name."""
    shape = tuple(x.shape)
    rows, cols = math.prod(shape[:-1]), (shape[-1] if shape else 1)
    extra: dict[str, Any] = {}
    if case.name == "fp8_delayed":
        extra["scale"] = np.float32([scale])
    if options.get("stochastic_rounding"):
        padded = -(-rows // 16) * 16 if options.get("with_rht") else rows
        extra["random_bits"] = {
            "_rowwise_data": philox_bytes(seed, rows * cols, 0),
            "_columnwise_data": philox_bytes(seed, padded * cols, 1),
        }
    in_dtype = DTYPE_NAMES[x.dtype]
    return oracle.quantize(to_numpy(x), case.name, in_dtype, **oracle_options(options), **extra)


def call_of(case: FormatCase, options: Mapping[str, Any], seed: int = SEED) -> dict[str, Any]:
    """Return the arguments of a call that ``expected`` assumes."""
    call: dict[str, Any] = case.call()
    if options.get("stochastic_rounding"):
        call["generator"] = torch.tensor([seed])
    return call


def assert_buffers(q: Any, want: Mapping[str, np.ndarray]) -> None:
    """Assert that the buffers of ``q`` equal those of the oracle: names, shapes, dtypes, bytes."""
    names = [slot.name for slot in q.quantizer.slots]
    assert set(names) == set(want) - {"amax"}
    for name in names:
        assert_same_bytes(
            getattr(q, name),
            torch.from_numpy(np.ascontiguousarray(want[name]).reshape(want[name].shape)),
            name,
        )


def assert_same_values(got: Tensor, want: np.ndarray) -> None:
    """Assert equal shapes, NaN in the same places, and equal bytes (signs of zero included)
    elsewhere."""
    got = got.float()
    other = torch.from_numpy(np.ascontiguousarray(want).reshape(want.shape))
    assert tuple(got.shape) == tuple(other.shape)
    assert torch.equal(got.isnan(), other.isnan()), "NaN in other places"
    assert_same_bytes(
        got.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf),
        other.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf),
        "values",
    )


def assert_like_oracle(x: Tensor, case: FormatCase, seed: int = SEED, **options: Any) -> Any:
    """Quantize ``x``; its buffers and its decoded values must be the oracle's, and ``x`` must be as
    it was.

    Returns:
        The quantized tensor.
    """
    before = x.detach().clone()
    q = case.quantizer(**options).quantize(x, **call_of(case, options, seed))
    want = expected(x, case, seed, **options)
    assert isinstance(q, qtensor.QuantizedTensor)
    assert (tuple(q.shape), q.dtype) == (tuple(x.shape), x.dtype)
    assert_buffers(q, want)
    values = oracle.dequantize(
        want, case.name, tuple(x.shape), in_dtype=DTYPE_NAMES[x.dtype], **oracle_options(options)
    )
    assert_same_values(q.dequantize(torch.float32), values)
    assert_same_bytes(x.detach(), before, "the input")
    return q
