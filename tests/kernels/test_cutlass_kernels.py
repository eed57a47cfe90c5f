"""One kernel a recipe and architecture, compiled in full: its instructions, and what CUTLASS says
of sizes.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

from qtensor.core.buffer_shapes import round_up
from qtensor.core.errors import QTensorError
from qtensor.cutlass_gemm import emit, library, scale_tiles, tuning
from qtensor.cutlass_gemm.autotune import random_tensors
from qtensor.cutlass_gemm.launch import Kernel, Launcher
from qtensor.cutlass_gemm.spec import KernelSpec

BLOCK = (1, 128, 128)
# Kernel -> the tensor-core instruction that it must use.
BUILT = {
    KernelSpec("fp8", "sm_90a", (128, 128, 128), (2, 1)): "QGMMA",
    KernelSpec("fp8_blockwise", "sm_90a", (128, 128, 128), (2, 1), block=BLOCK): "QGMMA",
    KernelSpec("mxfp8", "sm_100f", (128, 128, 128), schedule="1sm"): "UTCQMMA",
    KernelSpec("nvfp4", "sm_100f", (128, 128, 256), schedule="1sm", a="e2m1", b="e2m1"): "UTCOMMA",
    KernelSpec(
        "nvfp4", "sm_120f", (128, 128, 128), schedule="pingpong", a="e2m1", b="e2m1"
    ): "OMMA",
}
MATRIX = re.compile(r"\b(\w*MMA)\b")
PROCESSORS = 132
each = pytest.mark.parametrize("spec", BUILT, ids=lambda spec: spec.name)


@pytest.fixture(scope="module", params=BUILT, ids=lambda spec: spec.name)
def kernel(request: pytest.FixtureRequest) -> tuple[KernelSpec, Path, Kernel]:
    """A kernel in the user's cache, where a second run finds it. Workers wait for each other's
    compilers.
    """
    spec = request.param
    try:
        emit.cutlass()
        library.find_nvcc(spec.arch)
    except QTensorError as error:
        pytest.skip(reason=f"CUTLASS or nvcc is missing: {error}")
    path = library.build(spec)
    return spec, path, Kernel(str(path), spec.name)


def disassembler() -> str | None:
    """cuobjdump, of a toolkit or of the wheel (which needs nvdisasm beside it)."""
    wheels = Path(sysconfig.get_path("purelib")) / "nvidia"
    folders = [str(path.parent) for path in sorted(wheels.glob("cu*/bin/cuobjdump"))]
    return shutil.which("cuobjdump") or next(
        filter(None, (shutil.which("cuobjdump", path=folder) for folder in folders)), None
    )


@pytest.mark.nightly(reason="nvcc takes minutes for some kernels")
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: it would run")
def test_a_launch_without_a_gpu_says_what_cuda_says(
    kernel: tuple[KernelSpec, Path, Kernel],
) -> None:
    """CUTLASS answers "Error Internal" to every CUDA error; its driver keeps the reason."""
    spec, _, loaded = kernel
    size, device = (128, 128, 256), torch.device("cpu")
    with pytest.raises(QTensorError, match=r"got .*(driver|no CUDA-capable device).*status 1\d{3}"):
        Launcher(loaded, (1, *size), device, processors=132)(random_tensors(spec, size, device))


def test_they_are_in_the_table() -> None:
    assert set(BUILT) <= set(tuning.specs())


@pytest.mark.nightly(reason="nvcc takes minutes for some kernels")
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_instruction(kernel: tuple[KernelSpec, Path, Kernel]) -> None:
    spec, path, _ = kernel
    program = disassembler()
    if program is None:
        pytest.skip(reason="cuobjdump is not installed (extra 'dev')")
    folder = str(Path(program).parent)
    environment = {"PATH": f"{folder}:/usr/bin:/bin"}
    done = subprocess.run(
        [program, "--dump-sass", str(path)],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    found = set(MATRIX.findall(done.stdout))
    listed = subprocess.run(
        [program, "--list-elf", str(path)], capture_output=True, text=True, check=True
    )
    assert f".{spec.arch.removesuffix('f')}.cubin" in listed.stdout
    assert found == {BUILT[spec]}, "other instructions than the tensor core's for this format"


@pytest.mark.nightly(reason="nvcc takes minutes for some kernels")
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_cutlass_and_the_spec_agree_on_sizes(kernel: tuple[KernelSpec, Path, Kernel]) -> None:
    spec, _, loaded = kernel
    seen = set()
    for m in (1, 17, 128, 4096):
        for n in (8, 12, 16, 100, 128, 1000, 4096):
            for k in (16, 24, 32, 48, 64, 128, 136, 4096):
                says = loaded.can_implement(m, n, k, PROCESSORS)
                ours = spec.refusal(m, n, k)
                assert (says is None) == (ours is None), (m, n, k, says, ours)
                seen.add(says is None)
    assert seen == {True, False}


@pytest.mark.nightly(reason="nvcc takes minutes for some kernels")
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_factors_that_it_reads_are_the_buffers(
    kernel: tuple[KernelSpec, Path, Kernel],
) -> None:
    """Sizes by CUTLASS's layouts equal those of our storages, padding included."""
    spec, _, loaded = kernel
    for m, n, k in ((128, 256, 512), (17, 128, 1024), (1, 384, 640), (300, 136, 4096)):
        if spec.recipe == "fp8":
            want = (0, 0)
        elif spec.block:
            shapes = scale_tiles.blockwise_shape(m, k, 1), scale_tiles.blockwise_shape(n, k, 128)
            want = tuple(rows * columns for rows, columns in shapes)
        else:
            blocks = k // spec.factor_block
            want = tuple(scale_tiles.swizzled_count(rows, blocks) for rows in (m, n))
        assert loaded.factor_counts(m, n, k) == want, (m, n, k)
    assert round_up(17, 4) == 20


@pytest.mark.nightly(reason="nvcc takes minutes for some kernels")
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_it_says_what_it_is(kernel: tuple[KernelSpec, Path, Kernel]) -> None:
    spec, path, loaded = kernel
    assert (loaded.name, loaded.spec) == (spec.name, spec.json())
    assert loaded.accumulates is False
    assert path.stat().st_size < 4 << 20
    assert library.built_specs()[spec.name].name == path.name
