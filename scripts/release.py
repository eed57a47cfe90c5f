"""Build and check everything that a release uploads: ``make release VERSION=0.1.0``.

Five steps, each of which ends the release if it fails:

1. `qtensor/core/version.py` and the first heading of `CHANGELOG.md` name the version, and the
   working tree holds no change.
2. The sdist, and a wheel for each target (`scripts/build_wheel.py`).
3. ``twine check``.
4. Each wheel for this machine is installed into a bare environment for each Python and torch, where
   `scripts/wheel_smoke.py` runs without a compiler.
5. A table of what was made, and the command that uploads it. Nothing is uploaded.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from build_wheel import TARGETS

from qtensor.core.version import __version__

ROOT = Path(__file__).parents[1]
TORCHES = ("2.11.0", "newest")
"""The oldest torch that is supported, and the newest one of the package index."""
_LAST_LINES = 2000


def objections(version: str, package: str, changelog: str, changes: str) -> list[str]:
    """Return why a version cannot be released.

    Args:
        version: as the user gave it.
        package: the version of the package.
        changelog: contents of CHANGELOG.md.
        changes: the output of ``git status --porcelain``.
    """
    found = []
    if version != package:
        found.append(f"qtensor/core/version.py says {package}, not {version}")
    heading = next(iter(re.findall(r"^## (.*)$", changelog, re.MULTILINE)), "nothing")
    if not re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", heading):
        found.append(
            f"the first heading of CHANGELOG.md is {heading!r}, not '{version} (year-month-day)'"
        )
    if changes.strip():
        found.append(f"the working tree has changes:\n{changes}")
    return found


def output_of(*command: str) -> str:
    """Return what a command prints in the checkout."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def run(*command: str | Path, environment: dict[str, str] | None = None) -> None:
    """Run a command in the checkout.

    Raises:
        CalledProcessError: it failed.
    """
    print("$", *command, file=sys.stderr, flush=True)
    subprocess.run([str(word) for word in command], cwd=ROOT, env=environment, check=True)


def build(targets: Sequence[str], output: Path) -> list[Path]:
    """Build the sdist and the wheels into an empty folder, and return them."""
    run(sys.executable, "-m", "build", "--sdist", "--outdir", output)
    for target in targets:
        script = ROOT / "scripts" / "build_wheel.py"
        run(sys.executable, script, "--target", target, "--output", output)
    files = sorted(output.iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    return files


def smoke(wheel: Path, python: str, torch: str) -> dict[str, object]:
    """Return what the smoke test says about a wheel in a new environment."""
    with tempfile.TemporaryDirectory(prefix="qtensor-release-") as folder:
        inside = Path(folder) / "bin"
        # Neither a compiler nor another installation of qtensor.
        bare = os.environ | {"PATH": str(inside), "HOME": folder}
        bare.pop("PYTHONPATH", None)
        run(python, "-m", "venv", folder)
        version = "torch" if torch == "newest" else f"torch=={torch}"
        install = [inside / "python", "-m", "pip", "install", "--quiet", version, wheel]
        run(*install, environment=bare)
        command = [str(inside / "python"), str(ROOT / "scripts" / "wheel_smoke.py")]
        done = subprocess.run(command, env=bare, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return {"faults": [done.stderr[-_LAST_LINES:]]}
    return json.loads(lines[-1])


def main() -> int:
    """Build, check, and print what was made."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("version")
    parser.add_argument("--output", type=Path, default=ROOT / "dist" / "release")
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: Linux")
    parser.add_argument("--python", action="append", help="for the environments; default: this one")
    parser.add_argument("--torch", action="append", help=f"default: {' and '.join(TORCHES)}")
    parser.add_argument("--any-state", action="store_true", help="for a rehearsal: skip step 1")
    options = parser.parse_args()
    changes = output_of("git", "status", "--porcelain")
    changelog = (ROOT / "CHANGELOG.md").read_text()
    found = objections(options.version, __version__, changelog, changes)
    if found and not options.any_state:
        print("\n".join(found), file=sys.stderr)
        return 1
    if options.output.exists() and any(options.output.iterdir()):
        print(f"{options.output} is not empty", file=sys.stderr)
        return 1
    options.output.mkdir(parents=True, exist_ok=True)
    files = build(options.target or ["here", "linux-aarch64"], options.output)
    here = [path for path in files if path.stem.endswith(f"_{platform.machine()}")]
    failed = not here
    for wheel in here:
        for python in options.python or [sys.executable]:
            for torch in options.torch or TORCHES:
                result = smoke(wheel, python, torch)
                failed |= bool(result["faults"])
                print(wheel.name, json.dumps(result), flush=True)
    for path in files:
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {path.name}")
    if failed:
        print("A wheel failed, or none was for this machine.", file=sys.stderr)
        return 1
    print(f"To upload: twine upload {options.output}/*")
    return 0


if __name__ == "__main__":
    sys.exit(main())
