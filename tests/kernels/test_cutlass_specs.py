"""The table of kernels: what a spec may say, that each emits, and which a product takes."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch_process

from qtensor.core.errors import BuildError, QTensorError
from qtensor.cutlass_gemm import emit, library, tuning
from qtensor.cutlass_gemm.spec import ARCHS, RECIPES, KernelSpec
from qtensor.cutlass_gemm.tuning import Want

SPECS = tuning.specs()
FP8 = Want("fp8", "sm_90a", "e4m3", "e4m3", "bf16")


@pytest.fixture
def cutlass() -> None:
    try:
        emit.cutlass()
    except BuildError as error:
        pytest.skip(reason=f"the extra 'cutlass-build' is not installed: {error}")


def test_every_recipe_has_kernels() -> None:
    assert {(s.arch, s.recipe) for s in SPECS} == {
        *((arch, "fp8") for arch in ("sm_90a", "sm_100f")),
        *((arch, "fp8_blockwise") for arch in ("sm_90a", "sm_100f")),
        *(("sm_100f", recipe) for recipe in ("mxfp8", "mxfp4", "nvfp4")),
        *(("sm_120f", recipe) for recipe in ("mxfp8", "nvfp4")),
    }


def test_names_are_unique_and_plain() -> None:
    names = [spec.name for spec in SPECS]
    assert len(set(names)) == len(names)
    assert all(name.replace("_", "").isalnum() for name in names)


def test_values() -> None:
    spec = SPECS[0]
    assert spec == KernelSpec(
        **(json.loads(spec.json()) | {"tile": spec.tile, "cluster": spec.cluster, "block": ()})
    )
    assert hash(spec) == hash(dataclasses.replace(spec))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"recipe": "int8"}, "recipe must be one of fp8, "),
        ({"arch": "sm_80"}, "arch must be one of sm_90a, sm_100f, sm_120f; got 'sm_80'"),
        ({"schedule": "fast"}, "schedule must be one of"),
        ({"layout": "NN"}, "layout must be one of TN; got 'NN'"),
        ({"d": "e4m3"}, "d must be one of bf16, f16, f32"),
        (
            {"block": (1, 128, 128)},
            "fp8_blockwise needs a block of three sizes, and other recipes need an empty block",
        ),
        ({"recipe": "fp8_blockwise"}, "fp8_blockwise needs a block of three sizes"),
        ({"arch": "sm_100f", "fast": True}, "fast accumulation exists for fp8 on sm_90a"),
    ],
)
def test_bad_specs(change: dict[str, Any], rule: str) -> None:
    with pytest.raises(QTensorError, match=rule):
        dataclasses.replace(SPECS[0], **change)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.usefixtures("cutlass")
def test_every_spec_emits(spec: KernelSpec) -> None:
    text = emit.emit(spec)
    assert text == emit.emit(spec)
    m, n, k = spec.tile
    assert f"cute::Shape<cute::_{m}, cute::_{n}, cute::_{k}>" in text
    assert f"cutlass::arch::Sm{spec.capabilities[0][0] * 10}" in text
    assert f'#define QT_NAME "{spec.name}"' in text
    assert f"#define QT_ACCUMULATES {int(spec.d == 'f32')}" in text
    kinds = {"fp8": 0, "fp8_blockwise": 2}
    assert f"#define QT_FACTORS {kinds.get(spec.recipe, 1)}" in text
    assert ("FP8FastAccum" in text) == spec.fast
    if spec.block:
        major = "Major::K>" in text
        assert major == (spec.block[1] == 128)


def test_digests_follow_the_generator(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    before = library.library_name(SPECS[0])
    other = tmp_path / "qt_gemm_driver.h"
    other.write_text("// changed")
    monkeypatch.setattr(emit, "HEADERS", (other,))
    assert library.library_name(SPECS[0]) != before


@pytest.mark.parametrize("arch", [None, *ARCHS])
@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_select(arch: str | None, recipe: str | None) -> None:
    if (arch, recipe) in {("sm_90a", r) for r in ("mxfp8", "mxfp4", "nvfp4")} | {
        ("sm_120f", r) for r in ("fp8", "fp8_blockwise", "mxfp4")
    }:
        with pytest.raises(QTensorError, match="the architecture must have instructions"):
            tuning.select(arch, recipe)
        return
    found = tuning.select(arch, recipe)
    assert found
    assert all(arch in (None, s.arch) and recipe in (None, s.recipe) for s in found)


@pytest.mark.parametrize(
    ("names", "arch"),
    [
        (("90", "90a", "sm_90"), "sm_90a"),
        (("100", "sm_100a", "103", "sm_103a", "sm_103f"), "sm_100f"),
        (("120", "sm_120a", "sm_121", "121a"), "sm_120f"),
    ],
)
def test_select_by_the_name_of_a_gpu(names: tuple[str, ...], arch: str) -> None:
    for name in names:
        assert tuning.select(name) == tuning.select(arch)


@pytest.mark.parametrize("name", ["hopper", "sm_70", "sm_110", "a", "", "9"])
def test_select_refuses_other_gpus(name: str) -> None:
    with pytest.raises(QTensorError, match="arch must be one of sm_90a, sm_100f, sm_120f, or name"):
        tuning.select(name)


def test_select_refuses_other_recipes() -> None:
    with pytest.raises(QTensorError, match=r"recipe must be one of fp8.*got 'int8'"):
        tuning.select(None, "int8")


# ----------------------------------------------------------------------------- the choice of a tile


@pytest.mark.parametrize(
    ("sizes", "rows", "columns"),
    [
        ((1, 4096, 4096), {64}, {32, 64}),
        ((16, 6144, 4096), {64}, {32, 64}),
        ((128, 28672, 4096), {64, 128}, {128, 256}),
        ((8192, 8192, 8192), {128, 256}, {128, 256}),
        ((16384, 57344, 8192), {128, 256}, {128, 256}),
    ],
)
def test_small_products_take_small_tiles(
    sizes: tuple[int, int, int], rows: set[int], columns: set[int]
) -> None:
    best = tuning.ranked(FP8, sizes, 132)[0]
    assert best.tile[0] in rows
    assert best.tile[1] in columns


def test_every_candidate_is_ranked() -> None:
    for want in dict.fromkeys(map(tuning.want_of, SPECS)):
        for sizes in ((1, 128, 128), (4096, 4096, 4096)):
            assert set(tuning.ranked(want, sizes, 132)) == set(tuning.candidates(want))


def test_what_was_measured_comes_first() -> None:
    sizes = (8192, 8192, 8192)
    by_size = tuning.ranked(FP8, sizes, 132)
    slowest = by_size[-1]
    try:
        tuning.remember({(FP8, (8000, 8192, 8192)): slowest.name})
        assert tuning.ranked(FP8, sizes, 132)[0] == slowest
        assert tuning.ranked(FP8, (16, 8192, 8192), 132)[0] != slowest
        # Another N or K fills the last wave of tiles differently.
        assert tuning.ranked(FP8, (8192, 8000, 8192), 132)[0] != slowest
        assert tuning.ranked(FP8, (8192, 8192, 8064), 132)[0] != slowest
    finally:
        tuning.forget()
    assert tuning.ranked(FP8, sizes, 132) == by_size


def test_buckets() -> None:
    assert [tuning.bucket(n) for n in (1, 16, 17, 8192, 8193, 99999)] == [
        16,
        16,
        32,
        8192,
        16384,
        16384,
    ]


def test_importing_and_choosing_import_no_cutlass() -> None:
    code = (
        "import sys; from qtensor.cutlass_gemm import spec, tuning, launch, emit;"
        "tuning.ranked(tuning.want_of(tuning.specs()[0]), (1, 2, 3), 4); emit.digest();"
        "print([m for m in sys.modules if m.startswith(('cutlass', 'qtensor.build.cache'))])"
    )
    assert torch_process.run(code).stdout.strip() == "[]"
