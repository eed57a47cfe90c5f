"""``import qtensor`` is small, silent and starts nothing; ``benchmarks.overhead`` times it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch_process

ROOT = Path(__file__).parents[1]
MAX_MODULES = 126
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
import json, sys
import torch

def refuse(*args, **kwargs):
    raise SystemExit("importing initialised a GPU")

torch.cuda._lazy_init = torch.cuda.init = refuse
before = set(sys.modules)
import qtensor
added = sorted(set(sys.modules) - before)
json.dump([added, torch.cuda.is_initialized()], open(sys.argv[1], "w"))
"""


def run(script, path):
    command = [sys.executable, "-c", script, str(path)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """(added modules, whether CUDA is initialised, what was printed) of a fresh process."""
    path = tmp_path_factory.mktemp("import") / "result.json"
    done = run(SCRIPT, path)
    assert done.returncode == 0, done.stderr
    return (*json.loads(path.read_text()), done.stdout + done.stderr)


def test_it_adds_few_modules(imported):
    assert len(imported[0]) < MAX_MODULES, imported[0]


def test_it_imports_no_compiler(imported):
    assert [m for m in imported[0] if m.startswith(HEAVY)] == []


def test_it_touches_no_gpu(imported):
    assert not imported[1]


def test_it_prints_nothing(imported):
    assert imported[2] == ""


def test_public_names_exist():
    torch_process.run("import qtensor; assert all(hasattr(qtensor, n) for n in qtensor.__all__)")


def test_every_name_loads():
    done = run(
        "import qtensor; from qtensor import *; "
        "assert set(qtensor.__all__) <= set(dir(qtensor)); "
        "assert callable(autocast) and recipes.RECIPES",
        "",
    )
    assert done.returncode == 0, done.stderr


def test_an_unknown_name():
    done = torch_process.run("import qtensor; qtensor.Lineer", check=False)
    assert "module 'qtensor' has no attribute 'Lineer'" in done.stderr


def test_a_first_use_in_compiled_code():
    script = """
import torch, qtensor

@torch.compile(fullgraph=True, backend="aot_eager")
def f(x, layer):
    with qtensor.autocast(recipe=qtensor.recipes.MXFP8BlockScaling()):
        return qtensor.checkpoint(layer, x)

x, layer = torch.randn(32, 32), torch.nn.Linear(32, 32)
assert torch.equal(f(x, layer), layer(x))
"""
    torch_process.run(script, compiles=True)
