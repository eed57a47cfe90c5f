"""Triton kernels of attention beside the reference, and compiled, in children of triton_checks."""

from __future__ import annotations

import dataclasses
import importlib
import re
from typing import Any
from unittest import mock

import torch
from attention_cases import Problem, attention_arguments, empty_side, random_problem
from formats import assert_same_bytes, rand
from raw_op_cases import Maker
from torch import Tensor
from triton_checks import device
from triton_compiler import FORBIDDEN, forms
from triton_float_checks import compare

from qtensor.kernels import table
from qtensor.library.attention import AttentionArgs
from qtensor.library.cache import CacheAppendArgs
from qtensor.library.native_ops import left_to_python

ops = torch.ops.qtensor
PROBLEMS = {
    "chunks": Problem(
        "fp8_rowwise", "mxfp4", torch.bfloat16, (300, 40, 0), groups=3, queries=2, page=16
    ),
    "segments": Problem(
        *("nvfp4", "fp8", torch.float32, (1300,)), options={"soft_cap": 3.0, "window": 1100}
    ),
    "tiles": Problem("float16", "float32", torch.float16, (19,), 1, 3, 4, size=40, v_size=160),
}
"""More than a chunk, a segment and a tile of rows."""


def arguments(problem: Problem, **more: Any) -> AttentionArgs:
    """Return the arguments of the op; ``more`` replaces some."""
    k, v, paged = problem.cache()
    given: dict[str, Any] = {
        **{"q": problem.q(), "k": k.codes, "k_factors": k.factors, "k_format": k.text},
        **{"v": v.codes, "v_factors": v.factors, "v_format": v.text, "k_global": k.wide},
        **{"v_global": v.wide, "lengths": problem.lengths_tensor, "scale": problem.size**-0.5},
    }
    return AttentionArgs(**{**given, **problem.options, **paged, **more})


def check(problem: Problem, **more: Any) -> Tensor:
    """Compare the bytes of a call with those of the reference, and return them."""
    return compare(ops.attention, *arguments(problem, **more))[0]


def check_named(name: str) -> None:
    """Compare a problem of ``PROBLEMS``; "tiles" in slabs of one tile."""
    module = importlib.import_module("qtensor.kernels.triton.attention")
    with mock.patch.object(module, "SCRATCH", 1 if name == "tiles" else module.SCRATCH):
        check(PROBLEMS[name])


def check_formats(k_format: str, v_format: str, dtype: torch.dtype) -> None:
    """Compare a few tokens, with blocks of the values that no program fills."""
    check(Problem(k_format, v_format, dtype, (21, 3), size=64, v_size=96))


def check_options(**options: Any) -> None:
    """Compare options of the op."""
    problem = Problem("mxfp8", dtype=torch.float32, lengths=(23, 9), queries=3, size=32)
    check(dataclasses.replace(problem, options=options))


def check_sampled(seeds: range, limit: int) -> None:
    """Compare random problems."""
    for seed in seeds:
        problem = random_problem(seed, limit)
        if problem is not None:
            check(problem)


def check_raw(seeds: range) -> None:
    """Compare calls that the fuzz of raw ops makes."""
    for seed in seeds:
        compare(ops.attention, *AttentionArgs(**attention_arguments(Maker(seed))))


def check_hidden_rows() -> None:
    """Tokens that no query sees are not read: NaN there changes nothing. Strides may be any."""
    problem = Problem("bfloat16", "mxfp8", lengths=(30, 20), size=32, options={"window": 9})
    args = arguments(problem)
    want = check(problem)
    for b, length in enumerate(problem.lengths):
        for buffer, nan in ((args.k, torch.nan), (args.v, 0x7F), (args.v_factors, 255)):
            buffer[b, :, length:] = buffer[b, :, : length - 9] = nan
    moved = {
        name: t.transpose(1, 2).contiguous().transpose(1, 2)
        for name, t in args._asdict().items()
        if name in ("k", "v", "v_factors")
    }
    q = torch.stack((args.q, args.q), -1)[..., 0]
    assert_same_bytes(compare(ops.attention, *args._replace(**moved, q=q))[0], want)


def check_small_numbers() -> None:
    """Numbers of queries, plain values and weights that count as 0; NaN beside a weight of 0."""
    mask = torch.zeros(1, 1, 1, 30)
    mask[..., 3], mask[..., 4] = -60.0, -200.0
    for plain in (True, False):
        problem = Problem("float32" if plain else "mxfp8", "", torch.float32, (30,), size=64)
        args = arguments(problem, mask=mask)
        args.v[:, :, torch.arange(args.v.shape[2]) != 3, 7] = 0
        if plain:
            args.q[..., 5], args.k[..., 5] = 2.0**-50, args.k[..., 5] * 2.0**50
            args.q[..., 6], args.k[..., 6] = 2.0**66, args.k[..., 6].sign() * 2.0**-66
            args.v[:, :, 3] *= 2.0**60
            args.v[:, :, 5, 9], args.v[:, :, 5, 8] = 2.0**-66, torch.nan
        else:
            args.q[..., 32:] = 2.0**-100
            args.k_factors[..., 1] += 97
            args.v_factors[:, :, 3], args.v_factors[:, :, 4] = 100, 255
            args.v[:, :, 5, 8] = 0x7F
        want = compare(ops.attention, *args)[0]
        assert want[..., 8].isnan().all()
        assert want.isnan().sum() == want[..., 8].numel()
        assert not want[..., 7].any()
    signs = arguments(Problem("nvfp4", "fp8", torch.float32, (9,), size=32))
    compare(ops.attention, *signs._replace(v_global=torch.tensor([1e-44])))


def check_illegal_indices() -> None:
    """A length or a page outside the cache gives NaN where it matters, and reads nothing."""
    args = arguments(Problem("mxfp8", lengths=(30, 20, 25), size=32, page=16))
    names = ("k", "k_factors", "v", "v_factors")
    # Between pages of zeros, so that reading outside of the cache gives numbers.
    args = args._replace(**{name: _between_zeros(getattr(args, name)) for name in names})
    want = compare(ops.attention, *args)[0]
    got = _run(args._replace(lengths=torch.tensor([-1, 20, 33])))
    assert got[::2].isnan().all()
    assert_same_bytes(got[1], want[1])
    block_table = args.block_table.clone()
    block_table[:2, 1] = torch.tensor([-1, args.k.shape[0]])
    got = _run(args._replace(block_table=block_table))
    assert got[:2].isnan().all()
    assert_same_bytes(got[2], want[2])
    early = torch.tensor([[3], [15], [24]])
    assert _run(args._replace(block_table=block_table, positions=early)).isfinite().all()
    got = _run(args._replace(mask=torch.zeros(1, 1, 1, 24)))
    assert [bool(row.isnan().all()) for row in got] == [True, False, True]


def _between_zeros(pages: Tensor) -> Tensor:
    """Return a copy with memory of zeros before and behind it."""
    more = torch.zeros(3 * pages.shape[0], *pages.shape[1:], dtype=pages.dtype)
    inside = more[pages.shape[0] : 2 * pages.shape[0]]
    return inside.copy_(pages)


def _run(args: AttentionArgs) -> Tensor:
    """Call the kernels."""
    moved = [t.to(device()) if isinstance(t, Tensor) else t for t in args]
    kernels = mock.patch.object(table, "floats_", lambda n, _, *a: table.FLOATS["cuda"][n](*a))
    with left_to_python(), kernels:
        return ops.attention(*moved).cpu()


def check_append(text: str, page: int) -> None:
    """Compare the buffers that new rows are written into; some positions are negative."""
    positions = torch.tensor([[3, 0, -1, 17], [1, 31, 2, -5]])
    block_table = torch.tensor([[4, 1], [0, 3]]) if page else None
    made = []
    for served in (False, True):
        lead = (5, 2, page) if page else (2, 2, 32)
        k, v = empty_side(text, lead, 64), empty_side("nvfp4", lead, 32)
        args = CacheAppendArgs(
            *(rand(2, 2, 4, 64, seed=1), rand(2, 2, 4, 32, seed=2).bfloat16(), positions),
            *(k.codes, k.factors, v.codes, v.factors, k.text, v.text),
            **{"block_table": block_table, "k_global": k.wide, "v_global": v.wide},
        )
        moved = [t.to(device()) if isinstance(t, Tensor) else t for t in args]
        row = table.FLOATS["cuda"] if served else {}
        kernels = mock.patch.object(
            table, "floats_", lambda n, _, *a, row=row: n in row and row[n](*a)
        )
        with left_to_python(), kernels:
            ops.cache_append_(*moved)
        made.append([t.cpu() for t in moved[3:7] if t is not None])
    for got, want in zip(made[1], made[0], strict=True):
        assert bool(want.view(torch.uint8).any())
        assert_same_bytes(got, want)


def check_append_outside() -> None:
    """Positions and pages outside the cache are not written, nor is anything else."""
    k = empty_side("mxfp8", (3, 1, 16), 32)
    before = k.codes.clone()
    rows, positions = [(torch.ones(4, 32).byte(), k.codes)], torch.tensor([[32, 2**40, 5, 16]])
    kernel = table.FLOATS["cuda"]["cache_append"]
    for entries in ([[3, -1]], [[-(2**40), 2**40]]):
        target = k.codes.to(device())
        moved = [(rows[0][0].to(device()), target)]
        block_table = torch.tensor(entries).to(device())
        assert kernel(moved, positions.to(device()), block_table)
        assert_same_bytes(target.cpu(), before)


def compile_all(k_format: str, v_format: str, options: dict[str, Any], target: int) -> set[str]:
    """Compile the kernels of a call and of an append; return their names.

    A product and a sum are rounded once where a kernel says so, and nowhere else: the machine code
    has as many fused instructions as the program of the compiler's first half.
    """
    names: set[str] = set()

    def compile_one(kernel: Any, _: int, *args: Any, **constants: Any) -> None:
        names.add(kernel.__name__)
        made = forms(kernel, args, constants, target)
        widths = re.findall(r" call .*@llvm\.fma\.(?:v(\d+))?f32\(", made["llir"])
        written = sum(int(width or 1) for width in widths)
        fused = re.findall(r"^\s*(?:@\S+ )?fma\.(\S+)", made["ptx"], re.MULTILINE)
        assert set(fused) <= {"rn.f32", "rn.f32x2"}, set(fused)
        assert written == sum(1 + form.endswith("x2") for form in fused), kernel.__name__
        assert bool(written) == (kernel.__name__ != "append_kernel")
        # The weights replace NaN before they take the largest score.
        allowed = ("fma", "max") if kernel.__name__ == "weights_kernel" else ("fma",)
        for pattern, meaning in FORBIDDEN.items():
            if any(word in pattern for word in allowed):
                continue
            found = re.search(rf".*{pattern}.*", made["ptx"])
            assert found is None, f"{kernel.__name__}: {meaning}: {found and found.group(0)}"

    _compile_calls(compile_one, k_format, v_format, options)
    return names


def _compile_calls(launch: Any, k_format: str, v_format: str, options: dict[str, Any]) -> None:
    """Call attention and an append with ``launch`` in place of the real one."""
    for module in ("attention", "append"):
        importlib.import_module(f"qtensor.kernels.triton.{module}").launch = launch
    problem = Problem(k_format, v_format, lengths=(300,), size=128, spare=20, **options)
    args = arguments(problem)
    backend = importlib.import_module("qtensor.kernels.triton.backend")
    backend.attention_(torch.empty_like(args.q), args)
    backend.append_(args.k[0, 0], args.k, torch.zeros(1, 1, dtype=torch.int64), args.block_table)
