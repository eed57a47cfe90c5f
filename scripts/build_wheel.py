"""Build a wheel with compiled CPU kernels and C++ ops, which need no compiler: ``make wheel``.

The wheel of ``pip wheel .`` holds only the sources of the kernels and runs on every platform. A
wheel of this script also holds the libraries of one platform::

    python scripts/build_wheel.py                           # this machine
    python scripts/build_wheel.py --target linux-aarch64    # needs g++-aarch64-linux-gnu
    python scripts/build_wheel.py --target macos-arm64      # needs the package ziglang

The tag of a wheel for Linux names the oldest glibc that the libraries need. They use the OpenMP and
C++ libraries that torch loads. Wheels for macOS and Windows use one thread and have never run.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qtensor.build.cache import BuildSpec
from qtensor.build.compilers import Command, find_cxx, parallel_jobs, run_all
from qtensor.kernels.cpu import prebuilt, sources

ROOT = Path(__file__).parents[1]
PACKED = ("qtensor", "pyproject.toml", "README.md", "LICENSE")
ZIG = f"{sys.executable} -m ziglang c++ -target "
OLDEST = {"GLIBC_2.": 28, "GLIBCXX_3.4.": 24, "CXXABI_1.3.": 11}
"""The versions of manylinux_2_28, the platform of torch's own wheels."""


@dataclass(frozen=True)
class Target:
    """A platform that wheels are built for.

    Attributes:
        machine: as in the tag of a wheel.
        compiler: the command; None for the compiler of this machine, and its cache.
        tag: of the wheel; None where the libraries decide it.
        isas: the instruction sets.
        left_out: flags of the kernels that the compiler does not know.
    """

    machine: str
    compiler: str | None = None
    tag: str | None = None
    isas: tuple[str, ...] = sources.ISAS
    left_out: tuple[str, ...] = ()


TARGETS = {
    "here": Target(platform.machine()),
    "linux-aarch64": Target("aarch64", "aarch64-linux-gnu-g++", isas=("baseline",)),
    "macos-arm64": Target(
        "arm64",
        f"{ZIG}aarch64-macos.11.0",
        "macosx_11_0_arm64",
        ("baseline",),
        ("-fopenmp", "-fPIC"),
    ),
    "windows-x86_64": Target(
        "amd64", f"{ZIG}x86_64-windows-gnu", "win_amd64", left_out=("-fopenmp", "-fPIC")
    ),
}


def platform_tag(libraries: Sequence[Path], machine: str) -> str:
    """Return the platform tag of a wheel for Linux that holds these libraries."""
    data = b"".join(path.read_bytes() for path in libraries)
    needs = {
        name: max(map(int, re.findall(re.escape(name.encode()) + rb"(\d+)", data)), default=0)
        for name in OLDEST
    }
    glibc = needs.pop("GLIBC_2.")
    if not glibc or any(version > OLDEST[name] for name, version in needs.items()):
        return f"linux_{machine}"
    return f"manylinux_2_{max(OLDEST['GLIBC_2.'], glibc)}_{machine}"


def cross_build(target: Target, folder: Path, spec: BuildSpec) -> Path:
    """Compile a library for another machine, outside the cache, which belongs to this machine.

    Raises:
        BuildError: the compiler is missing, or it fails.
    """
    compiler = dataclasses.replace(find_cxx(), pic=())
    left_out = set(target.left_out)
    library = folder / f"{spec.name}.so"
    commands = []
    for unit in spec.units:
        output = folder / f"{spec.name}-{unit.name}.o"
        flags = [flag for flag in ("-fPIC", *unit.flags) if flag not in left_out]
        arguments = (*flags, "-c", str(unit.source), "-o", str(output))
        commands.append(Command(unit.name, compiler, arguments, output))
    run_all(spec.name, commands, parallel_jobs(len(commands)), folder)
    objects = [str(command.output) for command in commands]
    flags = [flag for flag in spec.link_flags if flag not in left_out]
    arguments = ("-shared", "-s", "-o", str(library), *objects, *flags)
    run_all(spec.name, [Command("the library", compiler, arguments, library)], 1, folder)
    return library


def write_libraries(target: Target, inside: Path, work: Path) -> list[Path]:
    """Write the libraries of a platform into the folder of the package, without symbols to debug.

    Raises:
        BuildError: a compiler is missing, or it fails.
    """
    if target.compiler is None:
        libraries = prebuilt.write(inside, target.isas)
        subprocess.run(["strip", "--strip-unneeded", *map(str, libraries)], check=True)
        return libraries
    os.environ["QTENSOR_CXX"] = target.compiler
    return prebuilt.write(inside, target.isas, lambda spec: cross_build(target, work, spec))


def main() -> int:
    """Build the wheel."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", choices=TARGETS, default="here")
    parser.add_argument("--isa", action="append", choices=sources.ISAS, help="default: all")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", metavar="FOLDER")
    options = parser.parse_args()
    target = TARGETS[options.target]
    if options.isa:
        target = dataclasses.replace(target, isas=tuple(options.isa))
    with tempfile.TemporaryDirectory(prefix="qtensor-wheel-") as folder:
        stage = Path(folder) / "qtensor"
        stage.mkdir()
        for name in PACKED:
            source = ROOT / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "prebuilt")
                shutil.copytree(source, stage / name, ignore=ignored)
            else:
                shutil.copyfile(source, stage / name)
        inside = stage / prebuilt.FOLDER.relative_to(ROOT)
        libraries = write_libraries(target, inside, Path(folder))
        tag = target.tag or platform_tag(libraries, target.machine)
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir"]
        command += [str(options.output), f"--config-settings=--build-option=--plat-name={tag}"]
        return subprocess.run([*command, str(stage)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
