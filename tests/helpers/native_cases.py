"""Native kernels compared with the reference arithmetic, byte by byte."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adversarial import KINDS, SEED, make
from formats import BY_NAME, DTYPES, FORMATS, USAGES, FormatCase, assert_same_bytes
from torch import Tensor

import qtensor
from qtensor.build.cache import BuildSpec, build
from qtensor.core.buffer_shapes import has_padding
from qtensor.core.quantizer_registry import alloc_slots, by_name
from qtensor.kernels import table
from qtensor.kernels.cpu import native, sources
from qtensor.library import native_ops

DOTS_HEADER = Path(__file__).parent / "bfloat16_dots.h"
SHAPES = [
    (),
    (1,),
    (37,),
    (1, 1),
    (2, 16),
    (3, 17),
    (16, 32),
    (33, 50),
    (64, 31),
    (127, 129),
    (128, 128),
    (130, 1),
    (1, 200),
    (2, 3, 40),
    (2, 2, 3, 33),
]
"""0-d to 4-d, tiny, ragged, tall, wide, whole blocks of every format."""
EDGES = [255, 256, 257]
"""Around a tile that is transposed."""
WIDE = [1023, 1024, 1025]
"""Around a tile of columns."""

# The oracle's kinds, and exponents so wide that squares and sums leave float32.
INPUTS = {
    **KINDS,
    "wide": lambda shape, dtype: torch.randn(shape) * torch.exp2(torch.randint(-40, 40, shape)),
    "huge": lambda shape, dtype: torch.randn(shape) * (torch.finfo(dtype).max / 8),
    "tiny": lambda shape, dtype: torch.randn(shape) * torch.finfo(dtype).tiny * 4,
}


_BEST = sources.usable_isas()[0]


def _minutes(library: str) -> pytest.MarkDecorator:
    """Put the cells of a library, which is not the best here, into one part of the wide tier."""
    return pytest.mark.nightly(reason="it compiles for a minute or two", together=library)


QUICK = "avx2 -Og"
"""The kernels for AVX2 with fewer optimizations, which compile in a third of the time."""
ISAS = [
    *(pytest.param(isa, marks=() if isa == _BEST else _minutes(isa)) for isa in sources.ISAS),
    *([pytest.param(QUICK, marks=_minutes(QUICK))] if _BEST == "avx512" else []),
]
"""Instruction sets, as parameters of a fixture: the default tier has the best of this CPU."""

DOTS = "avx512 -Og, dots in software"
"""The kernels for AVX-512: bfloat16 dot products in software, 32 KiB of first-level cache."""
DOTS_HERE = [pytest.param(DOTS, marks=_minutes(DOTS))] if _BEST == "avx512" else []
"""One more parameter for products of few rows. This CPU may lack the instructions or have a larger
first-level cache, for which other kernels run."""


def spec_of(parameter: str) -> BuildSpec:
    """Return how to build the kernels of one of `ISAS`."""
    isa, _, change = parameter.partition(" ")
    spec = sources.build_spec(isa)
    if not change:
        return spec
    extra = ("-include", str(DOTS_HEADER)) if parameter == DOTS else ()
    units = [
        dataclasses.replace(u, flags=(*("-Og" if f == "-O3" else f for f in u.flags), *extra))
        for u in spec.units
    ]
    return dataclasses.replace(spec, units=tuple(units), headers=(*spec.headers, DOTS_HEADER))


def library_of(parameter: str) -> native.Library:
    """Return the kernels of one of `ISAS`; processes that ask at once wait for one build."""
    isa = parameter.partition(" ")[0]
    if isa not in sources.usable_isas():
        pytest.skip(reason=f"this CPU has no {isa}")
    return native.Library(str(build(spec_of(parameter))))


def data(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if kind in KINDS:
        return make(kind, shape, dtype)
    x = INPUTS[kind](shape, dtype)
    return x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)


def call_of(case: FormatCase | str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a call of a format needs, in the form that the kernels take."""
    call: dict[str, Any] = {}
    if (case if isinstance(case, str) else case.name) == "fp8_delayed":
        call["scale"] = torch.tensor([32.0])
    if options.get("stochastic_rounding"):
        call["seed"] = torch.tensor([SEED])
    return call


def dirty(codec: Any, shape: tuple[int, ...]) -> list[Tensor]:
    """Return new buffers in which every byte that a kernel must write is wrong; padding is zero."""
    buffers = alloc_slots(codec.slots, shape, torch.device("cpu"))
    for slot, buffer in zip(codec.slots, buffers, strict=True):
        if not has_padding(slot, shape) and buffer.numel():
            buffer.view(torch.uint8).fill_(0xA5)
    if codec.returns_amax:
        buffers.append(torch.full((1,), -1.0))
    return buffers


def by_reference(
    codec: Any,
    x: Tensor,
    scale: Tensor | None = None,
    amax: list[Tensor] | None = None,
    seed: Tensor | None = None,
) -> list[Tensor]:
    """Return the buffers of the reference, and the amax for ops that return it."""
    buffers = dirty(codec, x.shape)[: len(codec.slots)]
    codec.encode_(by_name(codec, buffers), x, scale, amax, seed)
    return [*buffers, codec.amax(x)[0].reshape(1)] if codec.returns_amax else buffers


def by_kernels(
    codec: Any,
    x: Tensor,
    scale: Tensor | None = None,
    amax: list[Tensor] | None = None,
    seed: Tensor | None = None,
    out: list[Tensor] | None = None,
) -> list[Tensor]:
    """Return the buffers of the native kernels; fail if the kernels did not serve the call."""
    buffers = dirty(codec, x.shape) if out is None else out
    served = table.quantize_(codec, buffers, x, scale, amax, seed)
    assert served is True, f"not served: {table.explain(codec, x.dtype, 'cpu')}"
    return buffers


def assert_same_floats(got: Tensor, want: Tensor, name: str) -> None:
    """Assert NaN in the same places and equal bytes elsewhere; no format fixes the payload of
    NaN."""
    nan = want.isnan()
    assert torch.equal(got.isnan(), nan), f"{name}: NaN in other places"
    assert_same_bytes(got.masked_fill(nan, 0), want.masked_fill(nan, 0), name)


def assert_same_buffers(codec: Any, got: list[Tensor], want: list[Tensor]) -> None:
    names = [slot.name for slot in codec.slots] + ["amax"] * codec.returns_amax
    for name, a, b in zip(names, got, want, strict=True):
        (assert_same_floats if a.is_floating_point() else assert_same_bytes)(a, b, name)


def decoded(codec: Any, buffers: list[Tensor], shape: tuple[int, ...], **part: Any) -> Tensor:
    """Return values that the kernels decode; the options are ``dtype`` and fields of
    ``native.Part``."""
    dtype = part.pop("dtype", torch.float32)
    asked = native.Part(**part)
    size = tuple(shape) if asked.count is None else (asked.count, shape[-1])
    out = torch.full(size, -7.0, dtype=dtype)
    assert table.dequantize_(codec, buffers, shape, out, asked) is True
    return out


def assert_same_values(codec: Any, buffers: list[Tensor], shape: tuple[int, ...]) -> None:
    """Compare the values decoded from each direction to each dtype."""
    named = by_name(codec, buffers)
    both = codec.rowwise and codec.columnwise and not codec.per_tensor
    shares = codec.spec.transpose_shares_bytes
    for columnwise in (None, False, True) if both and not shares else (None,):
        want = codec.decode(named, shape, columnwise)
        for dtype in DTYPES:
            got = decoded(codec, buffers, shape, dtype=dtype, columnwise=columnwise)
            assert_same_floats(got, want.to(dtype), f"values {dtype} columnwise={columnwise}")


def check(codec: Any, x: Tensor, **call: Any) -> None:
    """Compare kernels and reference on quantizing and decoding ``x``; the input stays unchanged."""
    before = x.clone()
    want = by_reference(codec, x, **call)
    assert_same_buffers(codec, by_kernels(codec, x, **call), want)
    assert_same_bytes(x, before, "the input")
    assert_same_values(codec, want[: len(codec.slots)], tuple(x.shape))


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Use this number of threads for tensors of any size."""
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "ONE_THREAD", 0 if count > 1 else 1 << 62)
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)


@contextlib.contextmanager
def loaded(library: native.Library) -> Iterator[None]:
    """Let the kernels of ``library`` serve, in C++ and in Python."""
    usual = native.library()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: library)
        native_ops.serve(library)
        try:
            yield
        finally:
            if not isinstance(usual, str):
                native_ops.serve(usual)


@contextlib.contextmanager
def switched_off() -> Iterator[None]:
    """Compute without native kernels."""
    with native_ops.left_to_python(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: "switched off by the test")
        yield


# ---- random cases ------------------------------------------------------------------------------


def draw_codec(rng: random.Random, case: FormatCase) -> Any:
    """Return a random legal combination of options and usages; half of the options are defaults."""
    while True:
        values = {
            name: rng.choice(values) if rng.random() < 0.5 else values[0]
            for name, values in case.options.items()
        }
        if "rht_side" in case.quantizer().option_names() and rng.random() < 0.3:
            values["rht_side"] = "rowwise"
        rowwise, columnwise = rng.choice(USAGES)
        try:
            codec = case.quantizer(rowwise=rowwise, columnwise=columnwise, **values)
        except qtensor.QTensorError:
            continue
        if rowwise and columnwise and rng.random() < 0.3:
            codec = dataclasses.replace(codec, columnwise_value=True)
        return codec


def draw_shape(rng: random.Random) -> tuple[int, ...]:
    return rng.choice([
        lambda: (rng.randint(1, 70), rng.randint(1, 300)),
        lambda: (rng.randint(1, 70), rng.randint(1, 300)),
        lambda: rng.choice(SHAPES),
        lambda: (rng.choice([32, 64, 128, 256]), rng.choice([32, 64, 80, 256, 512])),
        lambda: (rng.randint(1, 5), rng.randint(1, 20), rng.randint(1, 100)),
        lambda: (rng.randint(200, 520), rng.randint(1, 60)),
        lambda: (rng.randint(1, 40), rng.randint(900, 1100)),
    ])()


def draw_input(rng: random.Random, shape: tuple[int, ...]) -> Tensor:
    """Return an input of random kind and dtype, at times with other strides."""
    kind = "randn" if rng.random() < 0.4 else rng.choice(list(INPUTS))
    x = data(kind, shape, rng.choice(DTYPES))
    if x.ndim == 2 and rng.random() < 0.2:
        wider = data("randn", (shape[0], shape[1] + rng.randint(1, 40)), x.dtype)
        first = rng.randint(0, wider.shape[1] - shape[1])
        wider[:, first : first + shape[1]] = x
        return wider[:, first : first + shape[1]]
    if x.ndim == 2 and rng.random() < 0.1:
        return x.t().contiguous().t()
    return x


def draw_call(rng: random.Random, codec: Any, x: Tensor) -> dict[str, Any]:
    """Return the arguments that a random call needs: a scale, maxima or a seed."""
    call: dict[str, Any] = {}
    if codec.needs_scale:
        call["scale"] = torch.tensor([rng.choice([1.0, 3.7, 32.0, 1e30, 1e-30])])
    elif rng.random() < 0.15 and codec.amax_shapes(x.shape) and bool(x.isfinite().all()):
        most, factor = torch.finfo(torch.float32).max, rng.choice([1.0, 0.5, 2.0])
        call["amax"] = [(a * factor).clamp(max=most) for a in codec.amax(x)]
    if codec.stochastic_rounding:
        call["seed"] = torch.tensor([rng.randint(-(2**62), 2**62)])
    return call


def check_random(seed: int, names: list[str] | None = None) -> str:
    """Run one random case and return its description for messages."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    case = BY_NAME[rng.choice(names or [case.name for case in FORMATS])]
    codec = draw_codec(rng, case)
    x = draw_input(rng, draw_shape(rng))
    told = f"seed {seed}: {codec.canonical} from {tuple(x.shape)} {x.dtype}"
    try:
        check(codec, x, **draw_call(rng, codec, x))
    except AssertionError as error:
        raise AssertionError(f"{told}: {error}") from error
    return told
