"""Our ops on DTensors: each rank computes its part of what one process computes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compile_helpers import Compiled
from formats import FORMATS, FormatCase, assert_same_bytes
from ranks import Ranks
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import qtensor
import qtensor.distributed  # noqa: F401 - DTensor has rules for our ops with it

SIZE = 2
ROWS, K = 256, 512
"""Half of each is whole blocks of every format."""


def mesh() -> Any:
    return dist.init_device_mesh("cpu", (SIZE,))


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return values whose halves have maxima of different size along each dim."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(3))
    x[: shape[0] // 2] *= 3
    x[..., : shape[-1] // 2] *= 7
    return x.to(dtype)


def part(x: Tensor, placement: Any) -> Tensor:
    if placement.is_replicate():
        return x
    size = x.shape[placement.dim] // SIZE
    return x.narrow(placement.dim, dist.get_rank() * size, size).contiguous()


def options_of(case: FormatCase, combined: bool) -> list[qtensor.Quantizer]:
    """Return the quantizers of a format that round to nearest, with both usages.

    Arguments:
        combined: options in all combinations; otherwise each on its own.
    """
    choices = case.every_option() if combined else case.each_option()
    found = [case.quantizer(**options) for options in choices]
    usable = [q for q in found if not (q.stochastic_rounding or q.needs_scale)]
    return [q.with_usage(rowwise=True, columnwise=True) for q in usable]


NAMES = [case.name for case in FORMATS if case.name != "fp8_delayed"]
names = pytest.mark.parametrize("name", NAMES)
PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}
placements = pytest.mark.parametrize("where", PLACEMENTS)


def same_part(got: Any, whole: Any, placement: Any) -> None:
    """Compare the values of both usages."""
    assert_same_bytes(got.dequantize(), part(whole.dequantize(), placement), f"{whole.quantizer}")
    if whole.quantizer.rowwise and whole.quantizer.columnwise:
        for t in (got, whole):
            t.update_usage(rowwise=False)
        same_part(got, whole, placement)


def run_quantize(name: str, where: str, dtype: torch.dtype, combined: bool) -> None:
    placement, x = PLACEMENTS[where], values(ROWS, K, dtype=dtype)
    for quantizer in options_of(next(case for case in FORMATS if case.name == name), combined):
        given: Any = distribute_tensor(x, mesh(), [placement]).requires_grad_()
        got = quantizer(given)
        assert isinstance(got, DTensor)
        assert (got.placements, got.shape) == ((placement,), x.shape)
        assert got.to_local().quantizer == quantizer
        decoded = [got.dequantize(), qtensor.dequantize(got)]
        for plain in decoded:
            want = part(quantizer(x).dequantize(), placement)
            assert_same_bytes(plain.to_local().detach(), want, f"{quantizer}: dequantize")
        decoded[1].backward(given)
        assert_same_bytes(given.grad.to_local(), given.to_local().detach(), "gradient")
        same_part(got.to_local().detach(), quantizer(x), placement)


@names
@placements
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "combined",
    [
        pytest.param(False, id="each option"),
        pytest.param(
            True,
            id="combined options",
            marks=pytest.mark.nightly(reason="hundreds of quantizers; each option is above"),
        ),
    ],
)
def test_quantize(ranks: Ranks, name: str, where: str, dtype: torch.dtype, combined: bool) -> None:
    """A rank's part has the codes and factors that it has in the whole."""
    ranks.run(run_quantize, name, where, dtype, combined)


def run_delayed(where: str) -> None:
    placement, x, scale = PLACEMENTS[where], values(ROWS, K), torch.tensor([32.0])
    quantizer = qtensor.quantizer("fp8_delayed")
    want, amax = quantizer.quantize_with_amax(x, scale=scale)
    given: Any = distribute_tensor(x, mesh(), [placement])
    got, own = quantizer.quantize_with_amax(given, scale=scale)
    same_part(got.to_local(), want, placement)
    assert_same_bytes(own, amax, "amax")


@placements
def test_delayed_scaling(ranks: Ranks, where: str) -> None:
    """The amax is that of the whole on every rank."""
    ranks.run(run_delayed, where)


def run_compiled(name: str, where: str) -> None:
    placement, x = PLACEMENTS[where], values(ROWS, K)
    quantizer = qtensor.quantizer(name)
    run = Compiled(lambda x: qtensor.dequantize(quantizer.quantize(x)) + 1)
    got = run(distribute_tensor(x, mesh(), [placement]))
    assert got.placements == (placement,)
    assert_same_bytes(got.to_local(), part(quantizer(x).dequantize() + 1, placement), "values")
    run.check_graphs(1)


@names
@placements
def test_compiled(ranks: Ranks, name: str, where: str) -> None:
    ranks.run(run_compiled, name, where)


# ---- products ------------------------------------------------------------------------------------

CASES: dict[str, tuple[str, Any, Any, Any]] = {
    "column": ("TN", Replicate(), Shard(0), Shard(1)),
    "gathered": ("TN", Shard(0), Shard(0), Shard(1)),
    "rows": ("TN", Shard(0), Replicate(), Shard(0)),
    "row": ("TN", Shard(1), Shard(1), Partial()),
    "dgrad": ("NN", Shard(1), Shard(0), Partial()),
    "dgrad-column": ("NN", Replicate(), Shard(1), Shard(1)),
    "wgrad": ("NT", Shard(0), Shard(0), Partial()),
    "wgrad-column": ("NT", Replicate(), Shard(1), Shard(1)),
}
"""Layout, and placements of a, b and the local product."""


def run_gemm(name: str, case: str, bias: bool) -> None:
    """Compare with the product of the whole; sums over ranks with those of its parts."""
    layout, of_a, of_b, of_out = CASES[case]
    quantizer = qtensor.quantizer(name).with_usage(rowwise=True, columnwise=True)
    a = values(ROWS, K) if layout != "NT" else values(K, ROWS)
    b = values(K, K)
    c = values(K)[:K] if bias else None
    whole = qtensor.gemm(quantizer(a), quantizer(b), layout)
    given = [quantizer(distribute_tensor(t, mesh(), [p])) for t, p in ((a, of_a), (b, of_b))]
    spread: Any = None if c is None else distribute_tensor(c, mesh(), [Replicate()])
    got = qtensor.gemm(*given, layout, spread)
    if of_out.is_partial():
        parts: list[Any] = [None] * SIZE
        own = qtensor.gemm(*[t.to_local() for t in given], layout)
        dist.all_gather_object(parts, own)
        want = parts[0] + parts[1]
        assert (want - whole).abs().max() <= 1e-5 * whole.abs().max()
        want = want if c is None else want + c
    else:
        assert got.placements == (of_out,)
        want = qtensor.gemm(quantizer(a), quantizer(b), layout, c)
    assert_same_bytes(got.full_tensor(), want, case)


@names
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_gemm(ranks: Ranks, name: str, case: str, bias: bool) -> None:
    ranks.run(run_gemm, name, case, bias)


# ---- errors --------------------------------------------------------------------------------------


def cut_blocks() -> None:
    qtensor.quantize(
        distribute_tensor(values(96, 64), mesh(), [Shard(0)]), "mxfp8", columnwise=True
    )


def cut_tiles() -> None:
    x = distribute_tensor(values(128, 512), mesh(), [Shard(0)])
    qtensor.quantize(x, "fp8_blockwise", block_scaling_dim=2)


def random_rounding() -> None:
    x = distribute_tensor(values(64, 64), mesh(), [Shard(0)])
    qtensor.quantize(x, "nvfp4", stochastic_rounding=True)


def raw_op() -> None:
    torch.ops.qtensor.quantize(distribute_tensor(values(64, 64), mesh(), [Shard(0)]), "mxfp8")


def mixed() -> None:
    x = qtensor.quantize(distribute_tensor(values(64, 64), mesh(), [Shard(0)]), "mxfp8")
    qtensor.gemm(x, qtensor.quantize(values(64, 64), "mxfp8"), "TN")


ERRORS = [
    (
        cut_blocks,
        r"\(rank [01] of 2\): .*\(96, 64\) in parts of 48.*blocks take 32 .*Shard\(dim=0\)",
    ),
    (cut_tiles, r"fp8_blockwise\] \(rank [01] of 2\): .*dim 0 of \(128, 512\) in parts of 64"),
    (random_rounding, r"a DTensor is rounded to nearest"),
    (
        raw_op,
        r"quantize \(rank [01] of 2\): this op takes no DTensors.*Shard\(dim=0\)\]",
    ),
    (mixed, r"gemm \(rank [01] of 2\): .*a plain tensor of \(64, 64\)\."),
]


def error_of(call: Any) -> str:
    try:
        call()
    except qtensor.QTensorError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(("call", "message"), ERRORS, ids=[call.__name__ for call, _ in ERRORS])
def test_refused(ranks: Ranks, call: Any, message: str) -> None:
    """All ranks raise, so that none waits for the other."""
    for rank, text in enumerate(ranks.run(error_of, call)):
        assert re.search(message, text), f"rank {rank}: {text}"
