"""Building kernels: nvcc is found or its absence explained, failures are readable, and a cache is
never half made.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import shlex
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from compiler_scripts import SECONDS, entries, runs, wait_for, waiting
from standin import Standin, compiled, install
from torch_process import TorchProcess

from qtensor.build import cache as cache
from qtensor.build import compilers
from qtensor.core.errors import BuildError, CompilerNotFound, QTensorError
from qtensor.cutlass_gemm import emit, library, toolchain, tuning
from qtensor.cutlass_gemm.launch import Kernel

pytestmark = pytest.mark.usefixtures("libraries")
SPEC = tuning.specs()[0]
PROCESS = """
import sys
from qtensor.cutlass_gemm import library, tuning

def notice(text):
    open(sys.argv[1], "a").write(text + "\\n")

print(library.build(tuning.specs()[0], notice=notice))
"""


@pytest.fixture(autouse=True)
def _cutlass(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUTLASS is there, and this process has loaded no kernel."""
    monkeypatch.setattr(library, "_LOADED", {})
    library.refresh()
    try:
        emit.cutlass()
    except BuildError as error:
        pytest.skip(reason=f"the extra 'cutlass-build' is not installed: {error}")


def fake(folder: Path, body: str = "", release: str = "13.0") -> Path:
    """An nvcc that logs its runs, does ``body``, and makes the stand-in library of everything."""
    path = folder / "nvcc"
    path.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = --version ]; then echo "release {release}, V{release}.88"; exit; fi\n'
        f"here={shlex.quote(str(folder))}\n"
        'echo "$*" >>"$here/runs"\n'
        'for word; do [ "$previous" = -o ] && out=$word; previous=$word; done\n'
        f"{body}\n"
        f'case "$*" in *-shared*) cp {shlex.quote(str(compiled()))} "$out";;'
        ' *) echo >"$out";; esac\n'
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = fake(tmp_path)
    monkeypatch.setenv("QTENSOR_NVCC", str(path))
    return path


# ------------------------------------------------------------------------------------ finding nvcc


def wheels(monkeypatch: pytest.MonkeyPatch, folder: Path | None) -> None:
    """The package ``nvidia`` is there, or (None) is not."""
    spec = folder and SimpleNamespace(submodule_search_locations=[str(folder)])
    util = SimpleNamespace(find_spec=lambda name: spec)
    monkeypatch.setattr(toolchain, "importlib", SimpleNamespace(util=util))


def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No nvcc in any place."""
    for variable in ("QTENSOR_NVCC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(toolchain, "shutil", SimpleNamespace(which=lambda name: None))
    wheels(monkeypatch, None)
    monkeypatch.setattr(toolchain, "USUAL", tmp_path / "none")


def test_no_nvcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nowhere(monkeypatch, tmp_path)
    with pytest.raises(
        CompilerNotFound,
        match=r"CUDA 12\.0 or later .* sm_90a; got none in CUDA_HOME, on PATH, among wheels",
    ):
        library.build(SPEC)
    with pytest.raises(CompilerNotFound, match=r"pip install 'torch-qtensor\[cutlass-build\]'"):
        toolchain.find_nvcc("sm_90a")


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_nvcc_of_a_variable(variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nowhere(monkeypatch, tmp_path)
    (tmp_path / "bin").mkdir()
    path = fake(tmp_path / "bin")
    monkeypatch.setenv(variable, str(tmp_path))
    found = toolchain.find_nvcc("sm_100f")
    assert (found.compiler.path, found.release) == (str(path), (13, 0))
    assert found.compiler.version.endswith("V13.0.88")


def test_the_wheels_come_with_their_libraries(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nowhere(monkeypatch, tmp_path)
    root = tmp_path / "nvidia" / "cu13"
    for folder in ("bin", "lib"):
        (root / folder).mkdir(parents=True)
    path = fake(root / "bin")
    (root / "lib" / "libcudart_static.a").touch()

    wheels(monkeypatch, tmp_path / "nvidia")
    found = toolchain.find_nvcc("sm_90a")
    assert (found.compiler.path, found.link_flags) == (str(path), (f"-L{root / 'lib'}",))


def test_one_that_is_too_old_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nowhere(monkeypatch, tmp_path)
    for name, release in (("old", "12.4"), ("new", "12.9")):
        (tmp_path / name / "bin").mkdir(parents=True)
        fake(tmp_path / name / "bin", release=release)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "old"))
    assert toolchain.find_nvcc("sm_90a").release == (12, 4)
    with pytest.raises(CompilerNotFound, match=r"CUDA_HOME: CUDA 12\.4 is too old"):
        toolchain.find_nvcc("sm_100f")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "new"))
    assert toolchain.find_nvcc("sm_100f").release == (12, 9)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("#!/bin/sh\nexit 3\n", "printed no release"),
        ("#!/nonexistent/sh\n", "does not start"),
    ],
)
def test_the_variable_is_used_or_refused(
    text: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "broken"
    path.write_text(text)
    path.chmod(0o755)
    monkeypatch.setenv("QTENSOR_NVCC", str(path))
    with pytest.raises(CompilerNotFound, match=f"got QTENSOR_NVCC: .*{reason}"):
        toolchain.find_nvcc("sm_90a")


def test_no_cutlass(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(emit, "importlib", SimpleNamespace(import_module=absent))
    emit.cutlass.cache_clear()
    try:
        with pytest.raises(
            BuildError,
            match=r"nvidia-cutlass 4\.2 must be .*pip install 'torch-qtensor\[cutlass-build\]'",
        ):
            emit.emit(SPEC)
    finally:
        emit.cutlass.cache_clear()


# ------------------------------------------------------------------------------------ building


def test_a_build_is_found_and_loads(nvcc: Path, libraries: Path) -> None:
    path = library.build(SPEC, notice=lambda text: None)
    assert library.built_specs() == {SPEC.name: path}
    kernel = library.load(SPEC)
    assert isinstance(kernel, Kernel)
    assert kernel.name == SPEC.name
    compile_, link = runs(nvcc.parent)
    assert "-gencode arch=compute_90a,code=sm_90a" in compile_
    assert f"-I{emit.FOLDER}" in compile_
    assert "-shared" in link
    assert library.build(SPEC) == path
    assert len(runs(nvcc.parent)) == 2
    assert entries(libraries) == [path.parent.name]


def test_the_place_of_cutlass_does_not_count(nvcc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = library.build(SPEC, notice=lambda text: None)
    monkeypatch.setattr(library, "include_folders", lambda: (Path("/elsewhere"),))
    assert library.build(SPEC) == path
    monkeypatch.setattr(emit, "version", lambda: "4.2.1")
    assert library.build(SPEC, notice=lambda text: None) != path


def test_a_compile_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    body = 'echo "kernel.cu(7): error: static assertion failed with \\"tile\\"" >&2; exit 2'
    monkeypatch.setenv("QTENSOR_NVCC", str(fake(tmp_path, body)))
    with pytest.raises(BuildError) as caught:
        library.build(SPEC, notice=lambda text: None)
    text = str(caught.value)
    assert "must compile; got exit status 2" in text
    assert 'error: static assertion failed with "tile"' in text
    assert "set QTENSOR_NVCC to another compiler" in text
    assert entries(libraries) == []


def start(told: Path) -> TorchProcess:
    return TorchProcess(PROCESS, str(told))


def test_two_processes_build_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    monkeypatch.setenv("QTENSOR_NVCC", str(fake(tmp_path, waiting("go"))))
    told = [tmp_path / f"told{i}" for i in range(2)]
    processes = [start(path) for path in told]
    wait_for(lambda: all(path.exists() for path in told))
    (tmp_path / "go").touch()
    paths = set()
    for process in processes:
        done = process.finish()
        assert done.returncode == 0, done.stderr
        paths.add(done.stdout.strip())
    assert len(runs(tmp_path)) == 2, "one compile and one link"
    assert paths == {str(library.built_specs()[SPEC.name])}
    texts = sorted(path.read_text() for path in told)
    assert "compiling its kernel gemm_sm90a" in texts[0]
    assert "waiting for another process" in texts[1]


def test_a_killed_build_leaves_nothing_half_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    monkeypatch.setenv("QTENSOR_NVCC", str(fake(tmp_path, waiting("go"))))
    process = start(tmp_path / "told")
    wait_for(lambda: runs(tmp_path))
    process.kill()
    process.finish()
    assert library.built_specs() == {}
    assert library.load(SPEC) == "it is not built"
    (tmp_path / "go").touch()
    library.build(SPEC, notice=lambda text: None)
    assert isinstance(library.load(SPEC), Kernel)


def test_many_kernels(nvcc: Path) -> None:
    specs, told = tuning.specs()[:4], []
    paths = library.build_all(specs, progress=lambda spec, result: told.append((spec, result)))
    assert set(told) == set(zip(specs, paths, strict=True))
    assert set(library.built_specs().values()) == set(paths)


def test_many_kernels_of_which_some_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = 'case "$*" in *fast*) echo "error: no" >&2; exit 1;; esac'
    monkeypatch.setenv("QTENSOR_NVCC", str(fake(tmp_path, body)))
    specs, told = tuning.specs()[4:8], []
    with pytest.raises(BuildError, match=r"(?s)error: no.*1 other builds failed too"):
        library.build_all(specs, jobs=1, progress=lambda spec, result: told.append(result))
    assert sorted(library.built_specs()) == sorted(s.name for s in specs if not s.fast)
    assert sum(isinstance(result, BuildError) for result in told) == 2


def test_giving_up_stops_the_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = f'case "$*" in *{tuning.specs()[1].name}.cu*) {waiting("never")};; esac'
    monkeypatch.setenv("QTENSOR_NVCC", str(fake(tmp_path, body)))

    def give_up(spec: Any, result: Any) -> None:
        wait_for(lambda: len(runs(tmp_path)) == 3)
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        library.build_all(tuning.specs()[:2], jobs=2, progress=give_up)
    assert time.monotonic() - began < SECONDS
    assert not compilers._PROCESSES


@pytest.mark.parametrize(("free", "jobs"), [(5, 1), (13, 2), (64, 4), (None, 4)])
def test_jobs_are_bounded_by_memory(
    free: int | None, jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers, "_free_memory", lambda: None if free is None else free << 30)
    monkeypatch.setattr(compilers, "_processors", lambda: 4)
    assert compilers.parallel_jobs(16, library.COMPILE_MEMORY) == jobs


def test_clean_removes_what_it_is_asked_for(nvcc: Path) -> None:
    hopper, blackwell = tuning.select("sm_90a", "fp8")[:2], tuning.select("sm_100f", "mxfp8")[:2]
    for spec in (*hopper, *blackwell):
        install(spec)
    removed = library.clean(tuning.select("sm_90a"))
    assert len(removed) == 2
    assert sorted(library.built_specs()) == sorted(spec.name for spec in blackwell)


# ------------------------------------------------------------------------------------ the command


def invoke(*args: str) -> Any:
    pytest.importorskip("typer", reason="the extra 'cli' is not installed")
    from typer.testing import CliRunner  # noqa: PLC0415 - optional

    from qtensor import cli  # noqa: PLC0415 - needs typer

    return CliRunner().invoke(cli.app, ["kernels", *args])


def test_the_command_builds_lists_and_cleans(nvcc: Path) -> None:
    wanted = ("--arch", "sm_100f", "--recipe", "mxfp4")
    count = len(tuning.select("sm_100f", "mxfp4"))
    assert f"0 of {count} are built" in invoke("list", *wanted).stdout
    done = invoke("build", *wanted, "--jobs", "2")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("built gemm_sm100f_mxfp4") == count
    assert f"{count} kernels are built" in done.stdout
    assert f"{count} of {count} are built" in invoke("list", *wanted).stdout
    assert invoke("list").stdout.count("current") == count
    done = invoke("clean", *wanted)
    assert done.stdout.startswith(f"removed {count} libraries")
    assert library.built_specs() == {}


@pytest.mark.parametrize(
    ("args", "rule"),
    [
        (("--arch", "sm_70"), "arch must be one of sm_90a, sm_100f, sm_120f, or name"),
        (("--recipe", "int8"), "recipe must be one of fp8, "),
        (("--arch", "sm_90a", "--recipe", "nvfp4"), "the architecture must have instructions"),
    ],
)
def test_the_command_explains_mistakes(args: tuple[str, ...], rule: str) -> None:
    done = invoke("build", *args)
    assert done.exit_code == 2
    assert rule in done.stderr


def test_from_python(nvcc: Path) -> None:
    import qtensor.kernels  # noqa: PLC0415 - as a user does

    paths = qtensor.kernels.build_gemms("sm_100f", "mxfp4", jobs=2)
    assert [path.exists() for path in paths] == [True] * 3
    with pytest.raises(QTensorError, match="without an architecture there must be a GPU"):
        qtensor.kernels.build_gemms()


# ------------------------------------------------------------------------------------ autotune


def test_autotune_prefers_what_is_fastest(nvcc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch  # noqa: PLC0415 - only here

    from qtensor.cutlass_gemm import autotune  # noqa: PLC0415

    want = tuning.want_of(SPEC)
    candidates = tuning.candidates(want)
    standins = [Standin(install(spec)) for spec in candidates[:3]]
    sizes = (32, 64, 32)
    given: list[int] = []

    def timer(functions: Any, device: torch.device) -> dict[str, float]:
        for calls in functions.values():
            given.append(len(calls))
            calls[0]()
        return dict(zip(functions, (30.0, 10.0, 20.0), strict=True))

    where = torch.device("cpu")
    try:
        (choice,) = autotune.autotune([want], [sizes], where, name="A GPU", timer=timer)
        assert choice.best == candidates[1].name
        assert list(choice.times.values()) == [10.0, 20.0, 30.0]
        assert [standin.calls for standin in standins] == [1, 1, 1]
        assert min(given) > 1, "operands must rotate, or they stay in the cache"
        assert tuning.ranked(want, sizes, 132)[0] == candidates[1]
        rows = json.loads(autotune.path_for("A GPU").read_text())
        assert rows["device"] == "A GPU"
        assert rows["choices"][0]["library"] == "0" * 32

        tuning.forget()
        assert autotune.read("Another GPU") == 0
        assert autotune.read("A GPU") == 1
        assert tuning.ranked(want, sizes, 132)[0] == candidates[1]
        # Another driver or CUDA version has to be measured anew.
        with monkeypatch.context() as patch:
            patch.setattr(autotune, "_driver", lambda: "another")
            assert autotune.read("A GPU") == 0
        # Libraries that were built anew have to be measured anew.
        install(candidates[1], key="1" * 32)
        os.utime(cache.cache_dir())
        tuning.forget()
        assert autotune.read("A GPU") == 0
        autotune.path_for("A GPU").write_text("{")
        assert autotune.read("A GPU") == 0
        with pytest.raises(
            QTensorError, match="a built kernel must be able to compute at least one"
        ):
            autotune.autotune([want], [(32, 64, 24)], where, name="A GPU", timer=timer)
    finally:
        tuning.forget()


def test_functions_take_turns_over_rotating_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch  # noqa: PLC0415 - only here

    from qtensor.cutlass_gemm import device_timer  # noqa: PLC0415

    where, made, clock = torch.device("cpu"), [], [0.0]
    monkeypatch.setattr(device_timer, "perf_counter", lambda: clock[0])

    def call(name: str, operands: int) -> None:
        made.append((name, operands))
        clock[0] += 5e-4 if name == "slow" else 1e-4

    functions = {
        name: [functools.partial(call, name, i) for i in range(3)] for name in ("quick", "slow")
    }
    times = device_timer.time_in_turns(functions, where, turns=2)
    assert times == pytest.approx({"quick": 100.0, "slow": 500.0})
    for name in functions:
        operands = [i for which, i in made if which == name]
        assert operands == [i % 3 for i in range(len(operands))]
    turns = [name for name, _ in itertools.groupby(name for name, _ in made)]
    assert turns[-6:] == ["quick", "slow"] * 3
    cache = device_timer._HOST_CACHE
    assert device_timer.copies_for(4 * cache, where) == 2
    assert device_timer.copies_for(cache // 4, where) * (cache // 4) > 2 * cache


@pytest.mark.parametrize("recipe", ["fp8", "fp8_blockwise", "mxfp8", "nvfp4"])
def test_autotune_hands_each_recipe_its_operands(recipe: str) -> None:
    import torch  # noqa: PLC0415 - only here

    from qtensor.cutlass_gemm import autotune  # noqa: PLC0415
    from qtensor.cutlass_gemm.launch import fault  # noqa: PLC0415

    for spec in tuning.select(None, recipe)[:2]:
        tensors = autotune.random_tensors(spec, (160, 256, 512), torch.device("cpu"))
        assert fault(tensors) is None
        assert (tensors.sfa is None) == (spec.factor_block == 0)
