"""Launches: what reaches the library, what is refused before it, and what it answers."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path

import pytest
import torch
from formats import rand
from standin import Standin, as_on_a_gpu, compiled, install, pretend

import qtensor
from qtensor.core.devices import device_guard
from qtensor.core.errors import QTensorError
from qtensor.cutlass_gemm import launch, library, tuning
from qtensor.cutlass_gemm.launch import Arguments, Kernel, Launcher, Tensors
from qtensor.cutlass_gemm.spec import KernelSpec
from qtensor.kernels.products import cutlass
from tests.kernels.test_gemm import assert_product, values

pytestmark = pytest.mark.usefixtures("native_kernels", "libraries", "in_python")
SPEC = KernelSpec("fp8", "sm_90a", (64, 128, 128), (1, 1), "pingpong")
SUMS = dataclasses.replace(SPEC, d="f32")
M, N, K = 5, 16, 32
CPU = torch.device("cpu")


def loaded(spec: KernelSpec = SPEC) -> tuple[Kernel, Standin]:
    path = install(spec)
    return Kernel(str(path), spec.name), Standin(path)


def launcher(spec: KernelSpec = SPEC, **options: float) -> tuple[Launcher, Standin]:
    kernel, standin = loaded(spec)
    return Launcher(kernel, (1, M, N, K), CPU, processors=132, **options), standin


def tensors(dtype: torch.dtype = torch.bfloat16, **changed: torch.Tensor) -> Tensors:
    codes = torch.zeros(M, K, dtype=torch.uint8), torch.zeros(N, K, dtype=torch.uint8)
    given = {"a": codes[0], "b": codes[1], "out": torch.zeros(M, N, dtype=dtype)}
    return Tensors(**(given | changed))


def test_everything_reaches_the_library() -> None:
    call, standin = launcher(alpha=0.25)
    floats = {"scale_a": torch.ones(M), "scale_b": torch.ones(1), "bias": torch.ones(N)}
    factors = {name: torch.zeros(512, dtype=torch.uint8) for name in ("sfa", "sfb")}
    given = tensors(**floats, **factors)
    call(given)
    last = standin.last()
    got = last.arguments
    assert (got.struct_size, got.version) == (ctypes.sizeof(Arguments), launch.VERSION)
    assert (got.m, got.n, got.k, got.l, got.sm_count, got.device) == (M, N, K, 1, 132, 0)
    assert (got.alpha, got.beta) == (0.25, 0.0)
    assert (got.scale_a_rows, got.scale_b_columns) == (1, 0)
    assert (got.c, got.d) == (given.out.data_ptr(),) * 2
    for name in ("a", "b", "sfa", "sfb", "scale_a", "scale_b", "bias"):
        assert getattr(got, name) == getattr(given, name).data_ptr(), name
    assert (last.stream, last.workspace, last.bytes) == (None, None, 0)


def test_what_is_not_given_is_null() -> None:
    call, standin = launcher()
    call(tensors())
    got = standin.last().arguments
    assert [getattr(got, n) for n in ("sfa", "sfb", "scale_a", "scale_b", "bias")] == [None] * 5
    assert got.alpha == 1.0


def test_the_workspace_comes_from_torch() -> None:
    kernel, standin = loaded()
    standin.set(workspace=4096)
    Launcher(kernel, (1, M, N, K), CPU, processors=1)(tensors())
    last = standin.last()
    assert last.bytes == 4096
    assert last.workspace is not None


def test_accumulation_is_for_kernels_that_accumulate() -> None:
    call, standin = launcher()
    with pytest.raises(
        QTensorError, match=r"only kernels with a float32 result can add to it; got beta=1\.0"
    ):
        call(tensors(), beta=1.0)
    assert standin.calls == 0
    sums, standin = launcher(SUMS)
    sums(tensors(torch.float32), beta=1.0)
    assert standin.last().arguments.beta == 1.0


def misaligned(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Contiguous, and one element past a multiple of 16 bytes."""
    flat = torch.zeros(rows * columns + 32, dtype=dtype)
    start = -(flat.data_ptr() // dtype.itemsize) % (16 // dtype.itemsize) + 1
    return flat[start : start + rows * columns].view(rows, columns)


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        (
            {"a": misaligned(M, K, torch.uint8)},
            "a must start at a multiple of 16 bytes; got an address 1 bytes",
        ),
        (
            {"out": misaligned(M, N, torch.bfloat16)},
            "out must start at a multiple of 16 bytes; got an address 2",
        ),
        ({"b": torch.zeros(K, N, dtype=torch.uint8).t()}, "b must be contiguous; got strides"),
        (
            {"bias": torch.zeros(N, dtype=torch.bfloat16)},
            "bias must be float32; got torch.bfloat16",
        ),
        ({"scale_a": torch.zeros(2)[::2]}, None),
        (
            {"a": torch.zeros(M, K, dtype=torch.uint8, device="meta")},
            "all operands must be on one device; got a on meta",
        ),
    ],
    ids=["codes", "result", "strides", "bias", "one", "device"],
)
def test_bad_tensors(changed: dict[str, torch.Tensor], rule: str | None) -> None:
    call, standin = launcher()
    if rule is None:
        call(tensors(**changed))
        assert standin.calls == 1
        return
    with pytest.raises(QTensorError, match=rule):
        call(tensors(**changed))
    assert standin.calls == 0


def test_a_launch_that_fails_says_what_cutlass_says() -> None:
    call, standin = launcher()
    standin.set(status=7)
    with pytest.raises(
        QTensorError,
        match=r"the kernel must launch; got Error Internal \(status 7\)\. Use another backend",
    ):
        call(tensors())


def test_a_launch_that_fails_says_what_cuda_says() -> None:
    """Status 1000 + a CUDA error, which may be that of an earlier kernel."""
    call, standin = launcher()
    standin.set(status=launch.CUDA_ERROR + 700)
    with pytest.raises(
        QTensorError, match=r"got CUDA error 700 \(status 1700\).*CUDA_LAUNCH_BLOCKING=1"
    ):
        call(tensors())


@pytest.mark.parametrize(
    "sizes", [(1, (1 << 31) + 5, N, K), (1 << 31, M, N, K), (2, 1 << 20, N, 1 << 11)]
)
def test_sizes_that_a_struct_cannot_hold(sizes: tuple[int, int, int, int]) -> None:
    """ctypes would wrap them silently: 2^31 + 5 is a negative int32."""
    kernel, standin = loaded()
    with pytest.raises(QTensorError, match=r"kernels take .* 2\^31"):
        Launcher(kernel, sizes, CPU, processors=1)
    assert standin.calls == 0


def test_another_device_is_current_for_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch restores the device, without a context on one that the process does not use."""
    entered = []

    class Device:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            entered.append(self.device)

        def __exit__(self, *_: object) -> None:
            entered.append(None)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", Device)
    for place in (CPU, torch.device("cuda", 0)):
        with device_guard(place):
            assert entered == []
    other = torch.device("cuda", 1)
    with device_guard(other):
        assert entered == [other]
    assert entered == [other, None]


def test_a_product_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (9, 0))
    as_on_a_gpu(monkeypatch)
    for spec in tuning.select("sm_90a", "fp8"):
        install(spec)
    checks = []
    for module in (launch, cutlass):
        monkeypatch.setattr(module, "fault", lambda given: checks.append(given) and None)
    a, b = (qtensor.quantize(rand(rows, 64), "fp8") for rows in (32, 48))
    qtensor.gemm(a, b, "TN")
    assert len(checks) == 1


def test_a_product_that_the_library_refuses() -> None:
    kernel, standin = loaded()
    standin.set(workspace=-7)
    with pytest.raises(QTensorError, match="must support the sizes; got m=5, n=16, k=32: Error"):
        Launcher(kernel, (1, M, N, K), CPU, processors=1)


# ------------------------------------------------------------------------------------ libraries


@pytest.mark.parametrize(
    "flags", ["-DQT_TEST_VERSION=99 -DQT_TEST_SIZE=152", "-DQT_TEST_VERSION=1 -DQT_TEST_SIZE=8"]
)
def test_another_interface_is_never_called(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (9, 0))
    path = install(SPEC, compiled(*flags.split()))
    with pytest.raises(
        OSError, match=r"has interface \(.*\) \(version, size\), but this qtensor has \(1,"
    ):
        Kernel(str(path), SPEC.name)
    assert "has interface" in str(library.load(SPEC))
    assert Standin(path).calls == 0


def test_the_struct_has_the_size_of_the_header() -> None:
    """The stand-in is compiled from the header, and refuses a struct of another size."""
    kernel, _ = loaded()
    assert kernel.can_implement(M, N, K, 1) is None


def test_another_kernel_under_the_name() -> None:
    path = install(SPEC)
    with pytest.raises(OSError, match=f"holds {SPEC.name}, not {SUMS.name}"):
        Kernel(str(path), SUMS.name)


def test_a_library_without_the_interface(tmp_path: Path) -> None:
    from compiler_scripts import recipe, write_source  # noqa: PLC0415 - only here

    from qtensor.build.cache import build  # noqa: PLC0415
    from qtensor.build.compilers import find_cxx  # noqa: PLC0415

    path = build(recipe(write_source(tmp_path), find_cxx()))
    with pytest.raises(OSError, match="is not a kernel library"):
        Kernel(str(path), SPEC.name)


def test_a_truncated_library_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest knows how long it was."""
    pretend(monkeypatch, (9, 0))
    path = install(SPEC)
    path.write_bytes(path.read_bytes()[:4096])
    library.refresh()
    assert library.load(SPEC) == "it is not built"
    install(SPEC, key="1" * 32)
    assert isinstance(library.load(SPEC), Kernel)


def test_a_library_that_has_changed_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the size of the manifest but other contents, as after a crash of the machine."""
    pretend(monkeypatch, (9, 0))
    path = install(SPEC)
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1  # the end of the section table; the system still loads such a file
    path.write_bytes(contents)
    library.refresh()
    refusal = library.load(SPEC)
    assert isinstance(refusal, str)
    assert "has changed since it was built; run: qtensor kernels build" in refusal
    path.with_name("manifest.json").write_text("{}")
    library.refresh()
    assert library.load(SPEC) == "it is not built"


def test_an_older_intact_library_replaces_a_changed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (9, 0))
    install(SPEC)
    newest = install(SPEC, key="1" * 32)
    newest.write_bytes(bytes(newest.stat().st_size))
    library.refresh()
    assert isinstance(library.load(SPEC), Kernel)


def test_broken_libraries_leave_the_product_to_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, (9, 0))
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"no library")
    for spec in tuning.select("sm_90a", "fp8"):
        install(spec, garbage)
    a, b = (qtensor.quantize(rand(rows, 64), "fp8") for rows in (32, 48))
    with pytest.raises(qtensor.UnsupportedError, match="its library cannot be loaded"):
        qtensor.gemm(a, b, "TN", backend="cutlass")
    found = qtensor.explain(a, b)
    assert found.backend == "scaled_mm"
    as_on_a_gpu(monkeypatch)
    with pytest.warns(RuntimeWarning, match="no CUTLASS kernel for fp8 on sm_90a can be used"):
        got = qtensor.gemm(a, b, "TN")
    monkeypatch.undo()
    assert_product(got, values(a), values(b).mT)
