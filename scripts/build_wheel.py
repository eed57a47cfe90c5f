"""A wheel for one platform that holds the CPU kernels compiled, so that no machine needs a compiler: ``make wheel``.

The wheel of ``pip wheel .`` holds their sources alone and runs everywhere; this one is the same and more. Its tag says the oldest
glibc that the kernels ask for. OpenMP and the C++ library are those that torch loads.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from qtensor.kernels.cpu import prebuilt, sources

ROOT = Path(__file__).parents[1]
PACKED = ("qtensor", "pyproject.toml", "README.md", "LICENSE")
OLDEST_GLIBC = 17
"""Of the platform tags that every pip of Python 3.11 knows: manylinux_2_17."""
GLIBCXX = 19
"""What manylinux_2_17 has of libstdc++: 3.4.19."""


def platform_tag(libraries: Sequence[Path]) -> str:
    """The platforms that the libraries run on, as a wheel's name says it."""
    data = b"".join(path.read_bytes() for path in libraries)
    glibc = [int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", data)]
    glibcxx = [int(minor) for minor in re.findall(rb"GLIBCXX_3\.4\.(\d+)", data)]
    if not sys.platform.startswith("linux") or not glibc or max(glibcxx, default=0) > GLIBCXX:
        return re.sub(r"[-.]", "_", sysconfig.get_platform())
    return f"manylinux_2_{max(OLDEST_GLIBC, *glibc)}_{platform.machine()}"


def main() -> int:
    """Build it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--isa", action="append", choices=sources.ISAS, help="default: all")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", metavar="FOLDER")
    options = parser.parse_args()
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
        tag = platform_tag(prebuilt.write(inside, options.isa or sources.ISAS))
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir"]
        command += [str(options.output), f"--config-settings=--build-option=--plat-name={tag}"]
        return subprocess.run([*command, str(stage)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
