"""Check qtensor on several torch versions and write the table of ``docs/torch_versions.md``.

Each version gets its own virtual environment with that torch and qtensor's other dependencies. In
it, ``scripts/torch_smoke.py`` runs every case. The bytes of a case must equal those of the first
version, and those of the case in eager mode. A build of torch for CUDA takes several GB per version
and gives the same results as a build for the CPU::

    python scripts/check_torch_versions.py --folder /path/with/space --output docs/torch_versions.md
    python scripts/check_torch_versions.py --versions 2.13.0 2.15.0     # prints the table
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import textwrap
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ("2.13.0", "2.11.0", "2.12.1", "2.14.1", "2.15.0")
"""The first is the development version; the digests of the others must equal its digests."""
REQUIREMENTS = ("numpy", "einops", "filelock", "setuptools")
MODES = ("aot_eager", "inductor", "compiled autograd", "torch.export", "AOTInductor")
"""Endings of the case names whose bytes must equal those of the same case in eager mode."""
_LAST_LINES = 2000
Results = dict[str, str]
"""Case name -> digest, or "error: ..." for a case that raised."""


def environment(version: str, folder: Path) -> Path:
    """Return the Python of a version's environment, which is made if absent."""
    root = folder / f"torch-{version}"
    python = root / "bin" / "python"
    if not python.exists():
        venv.create(root, with_pip=True)
    check = [str(python), "-c", "import einops, numpy, torch; print(torch.__version__)"]
    installed = subprocess.run(check, capture_output=True, text=True, check=False).stdout.strip()
    if installed.partition("+")[0] != version:
        install = [str(python), "-m", "pip", "install", "--quiet", f"torch=={version}"]
        subprocess.run([*install, *REQUIREMENTS], check=True)
    return python


def run(python: Path) -> Results:
    """Return the outcome of every case under one Python.

    Raises:
        RuntimeError: the process printed no line.
    """
    variables = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_WAIT_POLICY": "passive",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    command = [str(python), str(ROOT / "scripts" / "torch_smoke.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"{command} failed:\n{done.stderr[-_LAST_LINES:]}")
    results = {
        line["case"]: line.get("digest") or f"error: {line['error']}"
        for line in lines
        if "case" in line
    }
    if done.returncode:
        results["the process"] = f"error: it ended with code {done.returncode}"
    return results


def verdict(case: str, results: Results, reference: Results) -> str:
    """Return "ok", or the fault of a case in a few words."""
    outcome = results.get(case, "error: did not run")
    if outcome.startswith("error: "):
        return outcome
    if outcome != reference.get(case, outcome):
        return "differs from the first version"
    mode = next((mode for mode in MODES if case.endswith(f" {mode}")), "")
    if mode and outcome != results.get(f"{case.removesuffix(mode)}eager"):
        return "differs from eager mode"
    return "ok"


def groups(cases: list[str]) -> dict[str, list[str]]:
    """Return the rows of the table: cases by feature and mode, all formats or recipes together."""
    rows: dict[str, list[str]] = {}
    for case in cases:
        mode = next((mode for mode in ("eager", *MODES) if case.endswith(f" {mode}")), "")
        words = case.removesuffix(mode).split()
        feature = " ".join(words[:-1]) if len(words) > 1 else words[0]
        rows.setdefault(f"{feature}, {mode}" if mode else feature, []).append(case)
    return rows


def report(all_results: dict[str, Results]) -> tuple[str, int]:
    """Return the table as Markdown, and the number of faults."""
    versions = list(all_results)
    reference = all_results[versions[0]]
    cases = list(dict.fromkeys(case for results in all_results.values() for case in results))
    lines = [f"| cases | {' | '.join(versions)} |", "|---|" + "---|" * len(versions)]
    faults: list[str] = []
    passed: list[str] = []
    for row, members in groups(cases).items():
        cells = []
        for version, results in all_results.items():
            verdicts = {case: verdict(case, results, reference) for case in members}
            bad = {case: text for case, text in verdicts.items() if text != "ok"}
            cells.append(f"{len(members) - len(bad)} of {len(members)}")
            faults += [f"- torch {version}, {case}: {text}" for case, text in bad.items()]
        if set(cells) == {f"{len(members)} of {len(members)}"}:
            passed.append(f"{row} ({len(members)})")
        else:
            lines.append(f"| {row} | {' | '.join(cells)} |")
    text = f"Pass on torch {', '.join(versions)}: {'; '.join(passed) or 'none'}."
    failed = ["", *lines, "", *faults] if faults else []
    return "\n".join([*textwrap.wrap(text, 100), *failed]) + "\n", len(faults)


HEAD = """# torch versions

Written by `python scripts/check_torch_versions.py --output docs/torch_versions.md` on {machine},
Python {python}. Each torch version has its own environment. A case passes if it raises nothing,
gives the bytes that it gives on torch {first}, and, in a compiled mode, the bytes of eager mode.
The cases are in `scripts/torch_smoke.py`. Numbers count them, over all formats or recipes.

"""


def main() -> int:
    """Run the check, print the table and return the exit status: 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--versions", nargs="+", default=VERSIONS, metavar="VERSION")
    parser.add_argument(
        "--folder", type=Path, help="store the environments here; default: temporary"
    )
    parser.add_argument("--output", type=Path, help="write the page of the documentation here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="qtensor-torch-") as temporary:
        folder = options.folder or Path(temporary)
        results = {}
        for version in options.versions:
            print(f"torch {version}", file=sys.stderr, flush=True)
            results[version] = run(environment(version, folder))
    table, faults = report(results)
    print(table, end="")
    if options.output:
        machine = f"{platform.system()} {platform.machine()}"
        python = platform.python_version()
        head = HEAD.format(machine=machine, python=python, first=options.versions[0])
        notes = options.output.read_text() if options.output.exists() else ""
        notes = notes[notes.index(NOTES) :] if NOTES in notes else ""
        options.output.write_text(head + table + (f"\n{notes}" if notes else ""))
    return 1 if faults else 0


NOTES = "## Notes"
"""Heading of the handwritten section of the page, which the script preserves."""

if __name__ == "__main__":
    sys.exit(main())
