"""The ops that quantize: ``quantize``, ``quantize_``, ``amax``, ``random_seed``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.core.errors import DtypeError, check, fail
from qtensor.core.quantizer_registry import (
    QuantizerLike,
    alloc_outputs,
    by_name,
    check_buffers,
    parse,
)
from qtensor.kernels import table
from qtensor.library.checks import check_factors, check_one, check_seed
from qtensor.library.define import Written, WrittenList, empty, leaf_op, never_alone
from qtensor.reference.denormals import denormals_kept

INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_input(x: Tensor, format_name: str) -> None:
    """Refuse an input that no format can quantize.

    Raises:
        DtypeError: dtype other than float32, bfloat16, float16, or a layout that is not strided.
    """
    op = f"quantize[{format_name}]"
    if x.dtype not in INPUT_DTYPES:
        rule = "the input must be float32, bfloat16 or float16"
        fail(op, rule, x.dtype, "Convert it with .to(torch.float32) first", DtypeError)
    if x.layout is not torch.strided:
        rule = "the input must be a dense tensor"
        fail(op, rule, x.layout, "Call .to_dense() first", DtypeError)


def alloc_amax(quantizer: QuantizerLike, device: torch.device, count: int = 1) -> list[Tensor]:
    """Return [an empty float32 amax (count,)] under delayed scaling; [] for other quantizers."""
    if not quantizer.returns_amax:
        return []
    # Hot path: torch does not compute strides that it gets, as in ``alloc_outputs``.
    return [torch.empty_strided((count,), (1,), dtype=torch.float32, device=device)]


class QuantizeArgs(NamedTuple):
    """Arguments of the op ``quantize``."""

    x: Tensor
    quantizer: str
    scale: Tensor | None = None
    amax: list[Tensor] | None = None
    seed: Tensor | None = None


def _quantize_alloc(args: QuantizeArgs) -> list[Tensor]:
    quantizer = parse(args.quantizer)
    check_input(args.x, quantizer.format)
    check_seed("quantize", quantizer, args.seed)
    return [*alloc_outputs(quantizer, args.x), *alloc_amax(quantizer, args.x.device)]


def _encode(buffers: list[Tensor], args: QuantizeArgs | _QuantizeInPlaceArgs) -> None:
    """Write the buffers of ``args.x`` (..., K), and the amax (1,) if ``buffers`` ends with one."""
    quantizer, x = parse(args.quantizer), args.x
    if args.scale is not None or args.amax:
        check_factors("quantize", quantizer, x.shape, args.scale, args.amax)
    if table.quantize_(quantizer, buffers, x, args.scale, args.amax, args.seed):
        return
    with denormals_kept():
        quantizer.encode_(by_name(quantizer, buffers), x, args.scale, args.amax, args.seed)
        if quantizer.returns_amax and len(buffers) > len(quantizer.slots):
            buffers[-1].copy_(quantizer.amax(x)[0])


class _QuantizeInPlaceArgs(NamedTuple):
    x: Tensor
    quantizer: str
    out: WrittenList
    scale: Tensor | None = None
    amax: list[Tensor] | None = None
    seed: Tensor | None = None
    noop_flag: Tensor | None = None


def _quantize_inplace_check(args: _QuantizeInPlaceArgs) -> None:
    quantizer = parse(args.quantizer)
    check_input(args.x, quantizer.format)
    check_seed("quantize_", quantizer, args.seed)


def _quantize_inplace_fill(_: None, args: _QuantizeInPlaceArgs) -> None:
    quantizer = parse(args.quantizer)
    op, count = f"quantize_[{quantizer.format}]", len(quantizer.slots)
    check_buffers(op, quantizer, args.out[:count], args.x.shape)
    if len(args.out) > count:
        extra = len(args.out) - count
        rule = f"out must hold {count} buffers{' and an amax' * quantizer.returns_amax}"
        check(extra == quantizer.returns_amax, op, rule, len(args.out), "Pass the buffers alone")
        check_one(op, "amax", args.out[-1], torch.float32)
    check_one("quantize_", "noop_flag", args.noop_flag, None)
    if args.noop_flag is None:
        _encode(args.out, args)
        return
    fresh = alloc_outputs(quantizer, args.x)
    # The amax of delayed scaling is written in any case.
    _encode([*fresh, *args.out[len(fresh) :]], args)
    for old, new in zip(args.out, fresh, strict=False):
        # A choice on the device: reading the flag on the host would wait for it.
        old.copy_(torch.where(args.noop_flag.reshape(()) != 0, old, new))


class _AmaxArgs(NamedTuple):
    x: Tensor
    quantizer: str


def _amax_alloc(args: _AmaxArgs) -> list[Tensor]:
    quantizer = parse(args.quantizer)
    check_input(args.x, quantizer.format)
    shapes = quantizer.amax_shapes(args.x.shape)
    return never_alone([empty(args.x, shape, torch.float32) for shape in shapes])


def _amax_fill(results: list[Tensor], args: _AmaxArgs) -> None:
    quantizer = parse(args.quantizer)
    outputs = results[: len(quantizer.amax_shapes(args.x.shape))]
    if table.amax_(quantizer, outputs, args.x):
        return
    with denormals_kept():
        maxima = quantizer.amax(args.x)
    for output, value in zip(outputs, maxima, strict=True):
        output.copy_(value)


class _RandomSeedArgs(NamedTuple):
    like: Tensor


def _random_seed_alloc(args: _RandomSeedArgs) -> Tensor:
    return empty(args.like, (1,), torch.int64)


def _random_seed_fill(seed: Tensor, args: _RandomSeedArgs) -> None:
    seed.random_()


class _DrawSeedsArgs(NamedTuple):
    like: Tensor
    draws: Written
    count: int  # type: ignore[assignment]  # shadows tuple.count


def _draw_seeds_alloc(args: _DrawSeedsArgs) -> Tensor:
    return empty(args.like, (args.count,), torch.int64)


def _draw_seeds_fill(seeds: Tensor, args: _DrawSeedsArgs) -> None:
    seeds.random_()
    args.draws.data.add_(args.count)


QUANTIZE = leaf_op("quantize", QuantizeArgs, "Tensor[]", _quantize_alloc, _encode)
"""Quantize ``x`` (..., K) to inner buffers in slot order, then the amax (1,) of delayed scaling."""

QUANTIZE_ = leaf_op(
    "quantize_", _QuantizeInPlaceArgs, "()", _quantize_inplace_check, _quantize_inplace_fill
)
"""Quantize into existing buffers; a non-zero ``noop_flag`` leaves every byte as it is."""

_AMAX = leaf_op("amax", _AmaxArgs, "Tensor[]", _amax_alloc, _amax_fill)
"""Return the maxima of tensor-wide factors; a group may reduce them before ``quantize``.

An empty tensor follows one that is alone.
"""


def maxima_of(x: Tensor, canonical: str) -> list[Tensor]:
    """Return the maxima of tensor-wide factors, as ``quantize`` takes them."""
    return _AMAX(x, canonical)[: len(parse(canonical).amax_shapes(x.shape))]


_RANDOM = (torch.Tag.nondeterministic_seeded,)

RANDOM_SEED = leaf_op(
    "random_seed", _RandomSeedArgs, "Tensor", _random_seed_alloc, _random_seed_fill, _RANDOM
)
"""Return a seed for stochastic rounding from the default generator of ``like``'s device."""

DRAW_SEEDS = leaf_op(
    "draw_seeds_", _DrawSeedsArgs, "Tensor", _draw_seeds_alloc, _draw_seeds_fill, _RANDOM
)
"""Return seeds (count,) int64 for a layer that counts its draws in ``draws``, int64 (1,), CPU.

The write keeps the draw where it is: AOTAutograd merges calls with equal arguments
(``fx_graph_cse``) and its min-cut partitioner moves them into the backward graph, looking at a list
of random operators and not at the tag. To be replaced by ``random_seed`` when these passes look at
``nondeterministic_seeded``.
"""
