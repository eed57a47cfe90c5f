"""``import qtensor`` is quick, small, silent and starts nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUNS = 5
MAX_SHARE = 0.15
"""Of the time that ``import torch`` takes beside it, about a second: seconds alone would measure
the machine.
"""
MAX_MODULES = 122
HEAVY = (
    "triton",
    "torch._inductor",
    "torch._dynamo",
    "transformers",
    "typer",
    "rich",
    "qtensor.build",
    "qtensor.compilers",
    "qtensor.modules",
    "qtensor.functional",
)

SCRIPT = """
import json, sys, time
start = time.process_time()
import torch
torch_seconds = time.process_time() - start

def refuse(*args, **kwargs):
    raise SystemExit("importing initialised a GPU")

torch.cuda._lazy_init = torch.cuda.init = refuse
before = set(sys.modules)
start = time.process_time()
import qtensor
seconds = time.process_time() - start
added = sorted(set(sys.modules) - before)
json.dump([seconds / torch_seconds, added, torch.cuda.is_initialized()], open(sys.argv[1], "w"))
"""


def run(script, path):
    command = [sys.executable, "-c", script, str(path)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(share of the import of torch, added modules, CUDA initialised, what was printed) of several
    fresh processes.
    """
    path = tmp_path_factory.mktemp("import") / "result.json"
    results = []
    for _ in range(RUNS):
        done = run(SCRIPT, path)
        assert done.returncode == 0, done.stderr
        results.append((*json.loads(path.read_text()), done.stdout + done.stderr))
    return results


def test_it_is_quick(runs):
    # The minimum: what a busy machine adds is not the library's.
    assert min(share for share, *_ in runs) < MAX_SHARE


def test_it_adds_few_modules(runs):
    added = runs[0][1]
    assert len(added) < MAX_MODULES, added


def test_it_imports_no_compiler(runs):
    added = runs[0][1]
    assert [m for m in added if m.startswith(HEAVY)] == []


def test_it_touches_no_gpu(runs):
    assert not any(initialised for _, _, initialised, _ in runs)


def test_it_prints_nothing(runs):
    assert {printed for *_, printed in runs} == {""}


def test_public_names_exist():
    done = run("import qtensor; assert all(hasattr(qtensor, n) for n in qtensor.__all__)", "")
    assert done.returncode == 0, done.stderr


def test_every_name_loads():
    done = run(
        "import qtensor; from qtensor import *; "
        "assert set(qtensor.__all__) <= set(dir(qtensor)); "
        "assert callable(autocast) and recipes.RECIPES",
        "",
    )
    assert done.returncode == 0, done.stderr


def test_an_unknown_name():
    done = run("import qtensor; qtensor.Lineer", "")
    assert "module 'qtensor' has no attribute 'Lineer'" in done.stderr


def test_a_first_use_in_compiled_code(tmp_path):
    script = """
import torch, qtensor

@torch.compile(fullgraph=True, backend="aot_eager")
def f(x, layer):
    with qtensor.autocast(recipe=qtensor.recipes.MXFP8BlockScaling()):
        return qtensor.checkpoint(layer, x)

x, layer = torch.randn(32, 32), torch.nn.Linear(32, 32)
assert torch.equal(f(x, layer), layer(x))
"""
    done = run(script, tmp_path)
    assert done.returncode == 0, done.stderr
