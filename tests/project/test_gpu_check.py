"""The check of a GPU, rehearsed without one: stand-ins for the GEMMs, Triton's interpreter."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from triton_checks import needs_triton

pytestmark = pytest.mark.project
ROOT = Path(__file__).parents[2]
MOST = 600
"""Seconds that the whole check may take."""
NAMES = ["machine", "traced", "launches", "triton_bytes", "table", "memcheck", "gpu_tests"]


def run(
    command: list[str], cache: Path, seconds: int = 500, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a part of the check as a rehearsal."""
    own = {"QTENSOR_GPU_CHECK": "rehearsal", "QTENSOR_NATIVE": "0", "PYTHON": sys.executable}
    paths = {"PYTHONPATH": str(ROOT), "QTENSOR_CACHE_DIR": str(cache)}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=seconds,
        check=False,
        env=os.environ | own | paths | variables,
    )


def stages() -> dict[str, int]:
    """Return the stages of the plan and their limits."""
    done = subprocess.run(
        ["scripts/gpu_check.sh", "--plan"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    return {name: int(limit) for name, limit in map(parts, done.stdout.split())}


def parts(line: str) -> tuple[str, str]:
    name, _, limit = line.partition(":")
    return name, limit


def test_the_limits_add_up() -> None:
    plan = stages()
    assert plan.pop("sum") < MOST - 20, "starting and copying take time too"
    assert list(plan) == NAMES
    text = (ROOT / "scripts/gpu_check.sh").read_text()
    assert re.findall(r"^stage (\w+)", text, re.MULTILINE) == NAMES


def test_launches(tmp_path: Path) -> None:
    done = run([sys.executable, "scripts/gpu/launch_each.py", "--few"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\nok ") + done.stdout.startswith("ok ") == 5
    assert "5 of 5 launches are right" in done.stdout


def test_a_wrong_result_is_noticed(tmp_path: Path) -> None:
    """A library whose kernels write nothing fails each launch, and the others still run."""
    code = (
        "import sys; sys.path.insert(0, 'scripts/gpu'); import launch_each; "
        "from qtensor.cutlass_gemm.launch import Kernel; Kernel.run = lambda *_: None; "
        "sys.argv = ['launch_each', '--one-of-each']; sys.exit(launch_each.main())"
    )
    done = run([sys.executable, "-c", code], tmp_path)
    assert done.returncode == 4, done.stdout + done.stderr
    assert done.stdout.count("FAILED") == 4
    assert "results are wrong" in done.stdout


def test_the_table_is_written_as_it_comes(tmp_path: Path) -> None:
    """Without time for the rows, the first cells are there, and the rest is named as left out."""
    out = tmp_path / "out"
    done = run([sys.executable, "scripts/gpu/table.py", str(out), "--seconds", "0.01"], tmp_path)
    assert done.returncode > 10, done.stdout + done.stderr
    text = (out / "table.md").read_text()
    assert text.startswith("| format | quantize both directions")
    assert "- a copy: " in text
    assert "- nvfp4 gemm: left out, the time is over" in text
    assert json.loads((out / "table.json").read_text())["notes"]


def test_a_stage_that_is_too_slow_reports(tmp_path: Path) -> None:
    """Tests end as by Ctrl-C: pytest prints what failed until then."""
    slow = tmp_path / "test_slow.py"
    slow.write_text(
        "import time\ndef test_wrong(): assert 1 == 2\ndef test_slow(): time.sleep(60)\n"
    )
    script = (ROOT / "scripts/gpu_check.sh").read_text()
    stage = script[script.index("# stage NAME") : script.index("machine() {")]
    lines = [
        *("set -uo pipefail", "GRACE=5 total=60 failed=0 STAGES=(tests:6)", f"cd {tmp_path}"),
        *("summary=summary.txt log=log.txt", stage),
        f"stage tests {sys.executable} -m pytest -v -p no:cacheprovider test_slow.py; exit $failed",
    ]
    done = run(["bash", "-c", "\n".join(lines)], tmp_path)
    assert done.returncode == 1
    log = (tmp_path / "log.txt").read_text()
    assert "FAILED test_slow.py::test_wrong" in log
    assert "KeyboardInterrupt" in log
    assert "tests: stopped after its limit" in (tmp_path / "summary.txt").read_text()


@needs_triton
@pytest.mark.nightly(reason="every stage takes a minute; parts of it are above")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_stage(tmp_path: Path) -> None:
    out = tmp_path / "out"
    more = {"QTENSOR_GPU_CHECK_WORKERS": "1", "QTENSOR_GPU_CHECK_SECONDS": "800"}
    done = run(["scripts/gpu_check.sh", str(out)], tmp_path, 850, **more)
    log = (out / "log.txt").read_text()
    assert done.returncode == 0, done.stdout + log[-4000:]
    summary = (out / "summary.txt").read_text().splitlines()
    assert [line.split(", ")[0] for line in summary] == [f"{name}: ok" for name in NAMES]
    assert "34 of 34 launches are right" in log
    assert "FAILED" not in log
    rows = [line.split(" |")[0] for line in (out / "table.md").read_text().splitlines()]
    assert [row for row in rows if row.startswith("| ")][1:] == [
        f"| {name}"
        for name in ("fp8", "fp8 fast", "fp8_rowwise", "fp8_blockwise", "mxfp8", "nvfp4")
    ]
