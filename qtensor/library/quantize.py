"""The ops that quantize: ``quantize``, ``quantize_``, ``amax``, ``random_seed``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.errors import DtypeError, check
from qtensor.kernels import table
from qtensor.library.checks import check_buffers, check_factors, check_one, check_seed
from qtensor.library.codec import Codec, alloc_outputs, by_name, parse
from qtensor.library.define import below_autograd, leaf_op
from qtensor.library.denormals import denormals_kept

INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_input(x: Tensor, format_name: str) -> None:
    """Refuse what no format takes.

    Raises:
        DtypeError: dtype other than float32, bfloat16, float16, or a layout that is not strided.
    """
    if x.dtype in INPUT_DTYPES and x.layout is torch.strided:
        return
    check(
        x.dtype in INPUT_DTYPES,
        f"quantize[{format_name}]",
        "the input must be float32, bfloat16 or float16",
        x.dtype,
        "Convert it with .to(torch.float32) first",
        DtypeError,
    )
    check(
        x.layout == torch.strided,
        f"quantize[{format_name}]",
        "the input must be a dense tensor",
        x.layout,
        "Call .to_dense() first",
        DtypeError,
    )


class QuantizeArgs(NamedTuple):
    """Arguments of the op ``quantize``."""

    x: Tensor
    quantizer: str
    scale: Tensor | None = None
    amax: list[Tensor] | None = None
    seed: Tensor | None = None


def _quantize_alloc(args: QuantizeArgs) -> list[Tensor]:
    codec = parse(args.quantizer)
    check_input(args.x, codec.format)
    check_seed("quantize", codec, args.seed)
    outputs = alloc_outputs(codec, args.x)
    if codec.returns_amax:
        outputs.append(torch.empty(1, dtype=torch.float32, device=args.x.device))
    return outputs


def _encode(
    codec: Codec,
    buffers: list[Tensor],
    x: Tensor,
    scale: Tensor | None,
    amax: list[Tensor] | None,
    seed: Tensor | None,
) -> None:
    """Write the buffers, and the amax where there is room for it behind them."""
    if scale is not None or amax:
        check_factors("quantize", codec, x.shape, scale, amax)
    if table.quantize_(codec, buffers, x, scale, amax, seed):
        return
    with below_autograd(), denormals_kept():
        codec.encode_(by_name(codec, buffers), x, scale, amax, seed)
        if codec.returns_amax and len(buffers) > len(codec.slots):
            buffers[-1].copy_(codec.amax(x)[0])


def _quantize_fill(outputs: list[Tensor], args: QuantizeArgs) -> None:
    _encode(parse(args.quantizer), outputs, args.x, args.scale, args.amax, args.seed)


class QuantizeInPlaceArgs(NamedTuple):
    """Arguments of the op ``quantize_``."""

    x: Tensor
    quantizer: str
    out: list[Tensor]
    scale: Tensor | None = None
    amax: list[Tensor] | None = None
    seed: Tensor | None = None
    noop_flag: Tensor | None = None


def _quantize_inplace_check(args: QuantizeInPlaceArgs) -> None:
    codec = parse(args.quantizer)
    check_input(args.x, codec.format)
    check_seed("quantize_", codec, args.seed)


def _quantize_inplace_fill(_: None, args: QuantizeInPlaceArgs) -> None:
    codec = parse(args.quantizer)
    count = len(codec.slots)
    check_buffers("quantize_", args.out[:count], args.quantizer, args.x.shape)
    if len(args.out) > count:
        op, extra = f"quantize_[{codec.format}]", len(args.out) - count
        rule = f"out must hold {count} buffers{' and an amax' * codec.returns_amax}"
        check(extra == codec.returns_amax, op, rule, len(args.out), "Pass the buffers alone")
        check_one(op, "amax", args.out[-1], torch.float32)
    check_one("quantize_", "noop_flag", args.noop_flag, None)
    if args.noop_flag is None:
        _encode(codec, args.out, args.x, args.scale, args.amax, args.seed)
        return
    fresh = alloc_outputs(codec, args.x)
    # The amax of delayed scaling, where a caller made room for it, is written in any case.
    _encode(codec, [*fresh, *args.out[len(fresh) :]], args.x, args.scale, args.amax, args.seed)
    for old, new in zip(args.out, fresh, strict=False):
        # A choice on the device: reading the flag on the host would wait for it.
        old.copy_(torch.where(args.noop_flag.reshape(()) != 0, old, new))


class AmaxArgs(NamedTuple):
    """Arguments of the op ``amax``."""

    x: Tensor
    quantizer: str


def _amax_alloc(args: AmaxArgs) -> list[Tensor]:
    codec = parse(args.quantizer)
    check_input(args.x, codec.format)
    return [
        torch.empty(s, dtype=torch.float32, device=args.x.device)
        for s in codec.amax_shapes(args.x.shape)
    ]


def _amax_fill(outputs: list[Tensor], args: AmaxArgs) -> None:
    with below_autograd(), denormals_kept():
        found = parse(args.quantizer).amax(args.x)
    for output, value in zip(outputs, found, strict=True):
        output.copy_(value)


class RandomSeedArgs(NamedTuple):
    """Arguments of the op ``random_seed``."""

    like: Tensor


def _random_seed_alloc(args: RandomSeedArgs) -> Tensor:
    return torch.empty(1, dtype=torch.int64, device=args.like.device)


def _random_seed_fill(seed: Tensor, args: RandomSeedArgs) -> None:
    seed.random_()


class DrawSeedsArgs(NamedTuple):
    """Arguments of the op ``draw_seeds_``."""

    like: Tensor
    draws: Tensor
    count: int  # type: ignore[assignment]  # shadows tuple.count


def _draw_seeds_alloc(args: DrawSeedsArgs) -> Tensor:
    return torch.empty(args.count, dtype=torch.int64, device=args.like.device)


def _draw_seeds_fill(seeds: Tensor, args: DrawSeedsArgs) -> None:
    seeds.random_()
    args.draws.data.add_(args.count)


QUANTIZE = leaf_op(
    "quantize(Tensor x, str quantizer, Tensor? scale=None, Tensor[]? amax=None, Tensor? "
    "seed=None) -> Tensor[]",
    QuantizeArgs,
    _quantize_alloc,
    _quantize_fill,
)
"""High-precision tensor -> inner buffers in slot order, then the amax for delayed scaling."""

QUANTIZE_ = leaf_op(
    "quantize_(Tensor x, str quantizer, Tensor(a!)[] out, Tensor? scale=None, Tensor[]? amax=None, "
    "Tensor? seed=None, Tensor? noop_flag=None) -> ()",
    QuantizeInPlaceArgs,
    _quantize_inplace_check,
    _quantize_inplace_fill,
)
"""Quantize into existing buffers; a non-zero ``noop_flag`` leaves every byte as it is."""

AMAX = leaf_op("amax(Tensor x, str quantizer) -> Tensor[]", AmaxArgs, _amax_alloc, _amax_fill)
"""Return the maxima of tensor-wide factors; a group may reduce them before ``quantize``."""

RANDOM_SEED = leaf_op(
    "random_seed(Tensor like) -> Tensor",
    RandomSeedArgs,
    _random_seed_alloc,
    _random_seed_fill,
    tags=(torch.Tag.nondeterministic_seeded,),
)
"""Return a seed for stochastic rounding from the default generator of ``like``'s device."""

DRAW_SEEDS = leaf_op(
    "draw_seeds_(Tensor like, Tensor(a!) draws, int count) -> Tensor",
    DrawSeedsArgs,
    _draw_seeds_alloc,
    _draw_seeds_fill,
    tags=(torch.Tag.nondeterministic_seeded,),
)
"""Seeds (count,) for a layer that keeps a counter of its draws: ``draws``, int64 (1,) on the CPU.

The write keeps the draw where it is: AOTAutograd merges calls with equal arguments
(``fx_graph_cse``) and its min-cut partitioner moves them into the backward graph, looking at a list
of random operators and not at the tag. To be replaced by ``random_seed`` when these passes look at
``nondeterministic_seeded``.
"""
