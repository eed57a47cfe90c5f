"""Build a wheel with compiled CPU kernels, so that its users need no compiler: ``make wheel``.

The wheel of ``pip wheel .`` holds only the sources of the kernels and runs on every platform. This
wheel also holds the compiled kernels; its tag names the oldest glibc that they need. They use the
OpenMP and C++ libraries that torch loads.
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
"""glibc 2.17, of manylinux_2_17: every pip for Python 3.11 knows this platform tag."""
GLIBCXX = 19
"""Newest libstdc++ symbol version of manylinux_2_17: GLIBCXX_3.4.19."""


def platform_tag(libraries: Sequence[Path]) -> str:
    """Return the platform tag of a wheel that holds these libraries."""
    data = b"".join(path.read_bytes() for path in libraries)
    glibc = [int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", data)]
    glibcxx = [int(minor) for minor in re.findall(rb"GLIBCXX_3\.4\.(\d+)", data)]
    if not sys.platform.startswith("linux") or not glibc or max(glibcxx, default=0) > GLIBCXX:
        return re.sub(r"[-.]", "_", sysconfig.get_platform())
    return f"manylinux_2_{max(OLDEST_GLIBC, *glibc)}_{platform.machine()}"


def main() -> int:
    """Build the wheel."""
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
