"""The kernels under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer.

No access outside a buffer and no undefined operation, for every instruction set of this CPU, and no
race of threads that call at the same time.
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

from qtensor.build import compilers
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
RACES = ("-fsanitize=thread", "-g1", "-O1")
CASES = 600
LIMIT = 3600
"""Seconds of a test: on a busy machine, building takes most of them."""
MINUTES = pytest.mark.nightly(reason="builds the kernels again with checks, and runs for minutes")
BEST = sources.usable_isas()[0]
ALL = (sources.build_spec(BEST), sources.ops_build_spec(), sources.attention_build_spec(BEST))
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

SERVED = """
import sys
import qtensor.build.cache
from qtensor.kernels.cpu import native
from qtensor.library import native_ops

chosen = lambda spec: sys.argv[3 if spec.name.startswith("attention") else 2]
qtensor.build.cache.build = chosen
qtensor.build.cache.is_built = lambda spec: True
kernels = native.Library(sys.argv[1])
native.library = lambda: kernels
native_ops.serve(kernels)
assert native_ops.library() is not None
"""
BY_CPP = (
    SERVED
    + """
import pytest
sys.exit(pytest.main(["-qs", "-p", "no:cacheprovider", *sys.argv[4:]]))
"""
)
CALLS = (
    "kernels/test_dot_products.py",
    "library/test_native_ops.py",
    "library/test_native_attention_ops.py",
    "library/test_cache_append.py",
    "storage/test_saved_views.py",
)
"""What C++ serves, byte by byte."""


ATTENTION = """
import ctypes
import sys
import pytest
import qtensor.build.cache
from qtensor.kernels.cpu import attention

made = qtensor.build.cache.build
qtensor.build.cache.build = lambda spec: sys.argv[1] if "attention" in spec.name else made(spec)
kernels = ctypes.CDLL(sys.argv[1])
kernels.qt_attention.argtypes = kernels.qt_cache_append.argtypes = (ctypes.c_void_p,)
kernels.qt_join.argtypes = (ctypes.c_void_p,) * 5
attention.library = lambda: kernels
sys.exit(pytest.main(["-qs", "-p", "no:cacheprovider", "-k", sys.argv[2], *sys.argv[3:]]))
"""
ATTENTION_CALLS = ("kernels/test_native_attention.py", "library/test_cache_append.py")


AT_ONCE = (
    """
import time
import torch
import qtensor

# Python's lock would put the calls in an order; TorchScript calls ops without Python. Each thread
# describes texts that no other has asked for, and texts that all ask for.
script = torch.jit.CompilationUnit('''
def calls(x, texts: List[str], rounds: int):
    rows = 0
    for _ in range(rounds):
        for text in texts:
            # torch takes the tensors out of a list that it passes to a kernel of its C interface.
            codes, weight = [torch.ops.qtensor.quantize(x, text) for _ in range(2)]
            y = torch.ops.qtensor.dequantize(codes, text, x.size(), 6)
            product = torch.ops.qtensor.weight_gemm(x[:3], weight, text, 32)
            rows += y.size(0) + product.size(0)
    return rows

def start(x, texts: List[str], rounds: int):
    return torch.jit.fork(calls, x, texts, rounds)
''')
"""
    + SERVED
    + """
torch.set_num_threads(1)
torch.set_num_interop_threads(4)
x = torch.randn(32, 64)
shared = ["mxfp8", "mxfp4", "nvfp4", "fp8_blockwise", "fp8_rowwise", "mxfp6"]
own = [[f"fp8(amax_epsilon={i}.{k})" for i in range(1, 21)] for k in range(1, 5)]
running = [script.start(x, shared + texts, 20) for texts in own]
while not all(task.done() for task in running):  # `wait` would hold Python's lock.
    time.sleep(0.01)
counts = [task.value() for task in running]
assert counts == [20 * 26 * (32 + 3)] * 4, counts
print("ended")
"""
)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """With checks, a unit takes 26 s of a processor to compile: on a busy machine, over 600 s."""
    monkeypatch.setattr(compilers, "TIME_LIMIT", float(LIMIT))


def sanitizer(*names: str) -> str:
    """The runtime of a sanitizer, which has to be loaded before everything else.

    By default, that of AddressSanitizer; the one of undefined behaviour has to exist, too.
    """
    if platform.system() != "Linux":
        pytest.skip(reason="sanitizers are preloaded as Linux does it")
    found = []
    for name in names or ("libasan.so", "libubsan.so"):
        asked = (*find_cxx().command, f"-print-file-name={name}")
        path = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        if not os.path.isabs(path) or not Path(path).exists():
            pytest.skip(reason=f"the compiler has no {name}")
        found.append(os.path.realpath(path))
    return found[0]


def sanitized(spec: BuildSpec, flags: tuple[str, ...] = FLAGS) -> BuildSpec:
    """The same sources with checks in place of speed, under another name in the cache."""
    units = tuple(
        dataclasses.replace(unit, flags=(*(f for f in unit.flags if f[:2] != "-O"), *flags))
        for unit in spec.units
    )
    link = (*spec.link_flags, flags[0])
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
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)


def run_threads(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program under ThreadSanitizer, which sees only what is compiled for it.

    It wants addresses that are not random. It does not see how OpenMP's threads wait for each
    other, so each caller computes with one thread.
    """
    environment = os.environ | {
        "LD_PRELOAD": sanitizer("libtsan.so"),
        "TSAN_OPTIONS": "ignore_noninstrumented_modules=1:halt_on_error=1:exitcode=66",
        "PYTHONPATH": PYTHONPATH,
        "OMP_NUM_THREADS": "1",
    }
    command = ["setarch", "--addr-no-randomize", sys.executable, "-c", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)


@MINUTES
@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
def test_threads_that_call_at_the_same_time() -> None:
    sanitizer("libtsan.so")
    libraries = [build(sanitized(spec, RACES)) for spec in ALL]
    done = run_threads(AT_ONCE, *map(str, libraries))
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout == "ended\n"


RACE = """
#include <thread>
int shared = 0;
extern "C" int wrong() {
    std::thread other([] { for (int i = 0; i < 1000; i++) shared++; });
    for (int i = 0; i < 1000; i++) shared++;
    other.join();
    return shared;
}
"""


def test_the_check_sees_a_race(tmp_path: Path) -> None:
    sanitizer("libtsan.so")
    library = made(tmp_path, RACE, RACES)
    done = run_threads("import ctypes, sys; ctypes.CDLL(sys.argv[1]).wrong()", str(library))
    assert done.returncode == 66
    assert "data race" in done.stderr


@MINUTES
@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
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


@MINUTES
@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
def test_what_calls_the_kernels_stays_inside_its_memory() -> None:
    sanitizer()
    libraries = [build(sanitized(spec)) for spec in ALL]
    files = [str(ROOT / "tests" / name) for name in CALLS]
    done = run(BY_CPP, *map(str, libraries), *files, wide_vectors=BEST == "avx512")
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert "no compiler for the C++ kernels" not in done.stdout
    assert "runtime error" not in done.stderr


@MINUTES
@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize("isa", sources.ISAS)
def test_the_kernels_of_attention_stay_inside_their_buffers(isa: str) -> None:
    """Their own tests, all of whose calls reach the kernels of one instruction set.

    The slower instruction sets get random problems and appended rows alone.
    """
    sanitizer()
    if isa not in sources.usable_isas():
        pytest.skip(reason=f"this CPU has no {isa}")
    library = build(sanitized(sources.attention_build_spec(isa)))
    chosen = [f"not {other}" for other in (*sources.ISAS, "hundreds") if other != isa]
    chosen += ["(random or append)"] * (isa != BEST)
    files = [str(ROOT / "tests" / name) for name in ATTENTION_CALLS]
    done = run(ATTENTION, str(library), " and ".join(chosen), *files, wide_vectors=isa == "avx512")
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert "passed" in done.stdout
    assert "runtime error" not in done.stderr


def made(folder: Path, text: str, flags: tuple[str, ...]) -> Path:
    """A library of one source."""
    source = folder / "wrong.cpp"
    source.write_text(text)
    unit = Unit(source, flags, "wrong")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QTENSOR_CACHE_DIR", str(folder / "cache"))
        return build(BuildSpec("wrong", (unit,), find_cxx(), (), (flags[0],)))


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
    library = made(tmp_path, f'extern "C" int wrong(int n) {{ {body} }}\n', FLAGS)
    done = run("import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).wrong(8))", str(library))
    assert done.returncode != 0
    assert told in done.stderr
