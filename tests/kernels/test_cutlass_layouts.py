"""Layouts of block factors: our closed forms, CUTLASS's own code compiled here, a stored table of
it, and our storages.
"""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from formats import rand
from places import HELPERS

import qtensor
from qtensor.build.compilers import find_cxx
from qtensor.core.buffer_shapes import ceil_div
from qtensor.core.errors import QTensorError
from qtensor.cutlass_gemm import emit, scale_tiles
from qtensor.cutlass_gemm.toolchain import find_nvcc

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "cutlass_sf_layouts.npz"
SOURCE = HELPERS / "sf_layout.cpp"
BLOCKS = {"bs16": 16, "bs32": 32}


def golden() -> dict[str, dict[str, np.ndarray]]:
    """Case name -> {"A", "B": offsets (rows, blocks along K), "cosize": sizes of both}."""
    cases: dict[str, dict[str, np.ndarray]] = {}
    with np.load(GOLDEN) as file:
        for key in file.files:
            case, _, what = key.rpartition("/")
            cases.setdefault(case, {})[what] = file[key]
    return cases


CASES = golden()


def parse(case: str) -> tuple[str, tuple[int, int, int], tuple[int, int]]:
    kind, sizes, blocks = case.split("/")
    m, n, k = map(int, sizes.split("x"))
    vm, vn = map(int, blocks.split("x"))
    return kind, (m, n, k), (vm, vn)


def swizzled_offset(row: int, column: int, columns: int) -> int:
    """Offset of the factor of block ``column`` of ``row``; a row has ``columns`` blocks.

    The layout of cuBLAS and CUTLASS (docs/numerics.md, "Swizzled factors"): tiles of 128x4 in
    row-major order. A tile has 32 lines of 16 bytes, and each line holds 4 factors of 4 rows.
    """
    tile = row // 128 * ceil_div(columns, 4) + column // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4


def blockwise_offset(row: int, block: int, shape: tuple[int, int], block_rows: int) -> int:
    """Offset of the factor of ``block`` along K in ``row``, in a buffer of ``shape``."""
    return block * shape[1] + row if block_rows == 1 else row // block_rows * shape[1] + block


def offsets(kind: str, side: str, shape: tuple[int, int]) -> tuple[np.ndarray, int]:
    """Our offsets of a (rows, blocks) grid, and the size of the buffer, without leading dims that
    are rounded up.
    """
    rows, blocks = shape
    found = np.empty(shape, np.int64)
    for row in range(rows):
        for block in range(blocks):
            if kind in BLOCKS:
                found[row, block] = swizzled_offset(row, block, blocks)
            else:
                by_rows = kind[4] == "k" if side == "A" else kind[5] == "k"
                sizes = (rows, blocks) if by_rows else (blocks, rows)
                one = 128 if by_rows else 1
                found[row, block] = blockwise_offset(row * one, block, sizes, one)
    count = scale_tiles.swizzled_count(rows, blocks) if kind in BLOCKS else rows * blocks
    return found, count


def test_there_are_61_cases() -> None:
    assert len(CASES) == 61
    assert {parse(case)[0] for case in CASES} == {"bs16", "bs32", "blk_mn", "blk_mk", "blk_kk"}


@pytest.mark.parametrize("case", CASES)
def test_closed_forms_equal_cutlass(case: str) -> None:
    kind, _, _ = parse(case)
    for side, size in zip("AB", CASES[case]["cosize"], strict=True):
        want = CASES[case][side]
        found, count = offsets(kind, side, want.shape)
        assert np.array_equal(found, want), side
        assert count == size, side


def test_a_wrong_table_is_noticed() -> None:
    case = next(c for c in CASES if c.startswith("bs32") and CASES[c]["A"].shape[0] > 128)
    wrong = CASES[case]["A"].copy()
    wrong[129, 0] += 1
    assert not np.array_equal(offsets("bs32", "A", wrong.shape)[0], wrong)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program around CUTLASS's layout code; CUDA's headers come with the nvcc that is found."""
    try:
        cutlass = emit.source_folder() / "include"
        nvcc = find_nvcc("sm_90a").compiler.path
        dry = subprocess.run(
            [nvcc, "--dryrun", "-c", SOURCE], capture_output=True, text=True, check=False
        ).stderr
    except QTensorError as error:
        pytest.skip(reason=f"CUTLASS or nvcc is missing: {error}")
    # The program on PATH may be a script; what it prints are the folders of its toolkit.
    printed = [line.partition("=")[2] for line in dry.splitlines() if "INCLUDES=" in line]
    cuda = [word for text in printed for word in shlex.split(text)]
    program = tmp_path_factory.mktemp("oracle") / "sf_layout"
    command = [*find_cxx().command, "-std=c++17", "-w", f"-I{cutlass}", *cuda]
    subprocess.run([*command, str(SOURCE), "-o", str(program)], check=True)
    return program


@pytest.mark.nightly(reason="compiles CUTLASS; the stored table of its offsets is compared above")
@pytest.mark.parametrize("case", list(CASES)[::3])
def test_the_table_equals_cutlass_compiled_here(case: str, oracle: Path) -> None:
    kind, sizes, blocks = parse(case)
    words = [str(oracle), kind, *map(str, (*sizes, *blocks))]
    done = subprocess.run(words, capture_output=True, check=True)
    raw = np.frombuffer(done.stdout, np.int32)
    rows_a, k_a, size_a, rows_b, k_b, size_b = raw[:6].tolist()
    a, b = np.split(raw[6:], [rows_a * k_a])
    assert np.array_equal(a.reshape(rows_a, k_a), CASES[case]["A"])
    assert np.array_equal(b.reshape(rows_b, k_b), CASES[case]["B"])
    assert [size_a, size_b] == CASES[case]["cosize"].tolist()


@pytest.mark.parametrize(("name", "block"), [("mxfp8", 32), ("mxfp4", 32), ("nvfp4", 16)])
def test_swizzled_storages_have_cutlass_layout(name: str, block: int) -> None:
    """The bytes of a storage, read at our offsets, are the plain factors."""
    x = rand(200, 7 * block)
    plain = qtensor.quantize(x, name)._rowwise_scale_inv
    swizzled = qtensor.quantize(x, name, swizzled=True)._rowwise_scale_inv.flatten()
    blocks = ceil_div(x.shape[1], block)
    assert swizzled.numel() == scale_tiles.swizzled_count(200, blocks)
    at = [[swizzled_offset(r, c, blocks) for c in range(blocks)] for r in range(200)]
    assert torch.equal(swizzled[torch.tensor(at)], plain[:200, :blocks])


@pytest.mark.parametrize(("dim", "rows"), [(1, 1), (2, 128)])
@pytest.mark.parametrize("shape", [(130, 300), (7, 128), (256, 1024)])
def test_blockwise_storages_have_cutlass_layout(
    shape: tuple[int, int], dim: int, rows: int
) -> None:
    q = qtensor.quantize(rand(*shape), "fp8_blockwise", block_scaling_dim=dim)
    factors = q._rowwise_scale_inv
    assert tuple(factors.shape) == scale_tiles.blockwise_shape(*shape, rows)
    flat, size = factors.flatten(), tuple(factors.shape)
    values, codes = q.dequantize().float(), q._rowwise_data.view(torch.float8_e4m3fn).float()
    for row in (0, shape[0] // 2, shape[0] - 1):
        for column in (0, shape[1] // 2, shape[1] - 1):
            at = blockwise_offset(row, column // 128, size, rows)
            assert values[row, column] == codes[row, column] * flat[at]
