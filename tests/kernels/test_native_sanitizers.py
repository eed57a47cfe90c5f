"""The kernels under AddressSanitizer and UndefinedBehaviorSanitizer.

No access outside a buffer and no undefined operation, for every instruction set of this CPU.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from places import PYTHONPATH

from qtensor.build.cache import BuildSpec, Unit, build
from qtensor.build.compilers import find_cxx
from qtensor.kernels.cpu import sources

FLAGS = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
    "-g1",
    "-O1",
)
CASES = 600
BEST = sources.usable_isas()[0]
ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
import torch
from few_rows_cases import WEIGHTS, check_tails
from float_cases import check_random as check_floats
from fused_cases import check as check_fused
from formats import FORMATS, USAGES, assert_same_bytes
from native_cases import check, check_random, data, call_of, loaded, threads
from qtensor.kernels.cpu.native import Library

with loaded(Library(sys.argv[1])):
    # Each format, usage and option that moves bytes; sizes around tiles, blocks and single
    # elements.
    for case in FORMATS:
        for options in case.each_option():
            for rowwise, columnwise in USAGES:
                codec = case.quantizer(rowwise=rowwise, columnwise=columnwise, **options)
                for shape in ((1, 1), (3, 17), (33, 50), (130, 257), (1, 1025), (257, 2), (520,
                66)):
                    dtype = (torch.float32, torch.bfloat16, torch.float16)[sum(shape) % 3]
                    with threads(1 + sum(shape) % 2):
                        check(codec, data("nan", shape, dtype), **call_of(case, options))
                if columnwise:
                    x = torch.randn(131, 260).bfloat16()
                    check_fused(x, codec, call_of(case, options), rowwise)
    for fmt, options in WEIGHTS:
        check_tails(fmt, options)
    for seed in range(int(sys.argv[2])):
        check_random(seed)
    for seed in range(int(sys.argv[2]) // 5):
        check_floats(seed)
print("compared")
"""

BY_CPP = """
import sys
import pytest
import qtensor.build.cache
from qtensor.kernels.cpu import native
from qtensor.library import native_ops

qtensor.build.cache.build = lambda spec: sys.argv[2]
qtensor.build.cache.is_built = lambda spec: True
kernels = native.Library(sys.argv[1])
native.library = lambda: kernels
native_ops.serve(kernels)
assert native_ops.library() is not None
sys.exit(pytest.main(["-qs", "-p", "no:cacheprovider", *sys.argv[3:]]))
"""
CALLS = (
    "library/test_native_ops.py",
    "storage/test_saved_views.py",
)
"""What C++ serves, byte by byte."""


def sanitizer() -> str:
    """The runtime of AddressSanitizer, which has to be loaded before everything else."""
    if platform.system() != "Linux":
        pytest.skip(reason="sanitizers are preloaded as Linux does it")
    found = []
    for name in ("libasan.so", "libubsan.so"):
        asked = (*find_cxx().command, f"-print-file-name={name}")
        path = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        if not os.path.isabs(path) or not Path(path).exists():
            pytest.skip(reason=f"the compiler has no {name}")
        found.append(os.path.realpath(path))
    return found[0]


def sanitized(spec: BuildSpec) -> BuildSpec:
    """The same sources with checks in place of speed, under another name in the cache."""
    units = tuple(
        dataclasses.replace(unit, flags=(*(f for f in unit.flags if f[:2] != "-O"), *FLAGS))
        for unit in spec.units
    )
    link = (*spec.link_flags, FLAGS[0])
    name = f"{spec.name}_sanitized"
    return dataclasses.replace(spec, name=name, units=units, link_flags=link, effort=0.0)


def run(*arguments: str, wide_vectors: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a program under the sanitizers.

    With `wide_vectors`, the check for returned stack frames is off. With it, code of GCC 12 crashes
    at 64-byte vectors on the stack, probably because the check aligns its frames to less than that.
    """
    environment = os.environ | {
        # A sanitizer looks for the runtime of C++ at its start, to see exceptions.
        "LD_PRELOAD": f"{sanitizer()} libstdc++.so.6",
        # CPython and torch free little at exit. Torch's allocator asks for huge blocks at times.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:"
        f"detect_stack_use_after_return={int(not wide_vectors)}",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "PYTHONPATH": PYTHONPATH,
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "passive",
    }
    command = [sys.executable, "-c", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)


@pytest.mark.nightly(reason="builds the kernels again with checks, and runs for minutes")
@pytest.mark.slow
@pytest.mark.parametrize("isa", sources.ISAS)
def test_the_kernels_stay_inside_their_buffers(isa: str) -> None:
    sanitizer()
    if isa not in sources.usable_isas():
        pytest.skip(reason=f"this CPU has no {isa}")
    library = build(sanitized(sources.build_spec(isa)))
    done = run(PROGRAM, str(library), str(CASES), wide_vectors=isa == "avx512")
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout == "compared\n"
    assert "runtime error" not in done.stderr


@pytest.mark.nightly(reason="builds the kernels again with checks, and runs for minutes")
@pytest.mark.slow
def test_what_calls_the_kernels_stays_inside_its_memory() -> None:
    sanitizer()
    specs = (sources.build_spec(BEST), sources.ops_build_spec())
    libraries = [build(sanitized(spec)) for spec in specs]
    files = [str(ROOT / "tests" / name) for name in CALLS]
    done = run(BY_CPP, *map(str, libraries), *files, wide_vectors=BEST == "avx512")
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert "no compiler for the C++ kernels" not in done.stdout
    assert "runtime error" not in done.stderr


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("char* p = new char[n]; int r = p[n]; delete[] p; return r;", "heap-buffer-overflow"),
        ("return 0x7fffffff + n;", "signed integer overflow"),
        ("int a[4] = {1, 2, 3, 4}; return a[n];", "out of bounds"),
    ],
    ids=["heap", "overflow", "index"],
)
def test_the_check_sees_a_mistake(body: str, told: str, tmp_path: Path) -> None:
    sanitizer()
    source = tmp_path / "wrong.cpp"
    source.write_text(f'extern "C" int wrong(int n) {{ {body} }}\n')
    unit = Unit(source, FLAGS, "wrong")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QTENSOR_CACHE_DIR", str(tmp_path / "cache"))
        library = build(BuildSpec("wrong", (unit,), find_cxx(), (), (FLAGS[0],)))
    done = run("import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).wrong(8))", str(library))
    assert done.returncode != 0
    assert told in done.stderr
