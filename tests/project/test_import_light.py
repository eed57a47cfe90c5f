"""``import qtensor`` is small, silent and starts nothing; ``benchmarks.overhead`` times it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch_process

ROOT = Path(__file__).parents[2]
MAX_MODULES = 145
HEAVY = (
    "triton",
    "torch._inductor",
    "torch._dynamo",
    "transformers",
    "typer",
    "rich",
    "qtensor.build.cache",
    "qtensor.build.compilers",
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


@pytest.mark.project
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


@pytest.mark.project
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


UNTOUCHED = """
import sys
import torch
import torch.distributed.checkpoint.format_utils
import torch.distributed.checkpoint.state_dict

OPS = torch._C._dispatch_get_all_op_names()
KEYS = [key for name, key in torch._C.DispatchKey.__members__.items() if name != "DeferredInit"]

def functions():
    "All functions and classes of torch, and the members of its classes."
    found = {}
    for module in [m for n, m in sys.modules.items() if n.split(".")[0] == "torch"]:
        for name, value in list(vars(module).items()):
            if callable(value):
                found[module.__name__, name] = value
            if isinstance(value, type) and value.__module__.startswith("torch"):
                for member, function in list(vars(value).items()):
                    if callable(function) or isinstance(function, (property, staticmethod)):
                        found[module.__name__, name, member] = function
    return found

def kernels():
    "All kernels of torch's ops, but for those under the key that only quantized tensors have."
    return {
        (op, line)
        for op in OPS
        for line in torch._C._dispatch_dump(op).splitlines()
        if not line.startswith("DeferredInit: ")
    } | {key for key in KEYS if torch._C._dispatch_has_backend_fallback(key)}

def hooks():
    places = [sys.modules[f"torch.{name}"] for name in ("optim.optimizer", "nn.modules.module")]
    return {
        (place.__name__, name, key)
        for place in places
        for name, value in vars(place).items()
        if name.startswith("_global_") and isinstance(value, dict)
        for key in value
    }

def check(when):
    now = functions()
    changed = [name for name, value in before[0].items() if now.get(name) is not value]
    assert not changed, (when, changed)
    assert kernels() == before[1], (when, kernels() ^ before[1])
    assert hooks() == before[2], (when, hooks())
    others = set(torch._C._dispatch_get_all_op_names()) - set(OPS)
    assert all(name.startswith("qtensor") for name in others), others

before = functions(), kernels(), hooks()
assert len(before[0]) > 10_000 and len(before[1]) > 5_000, (len(before[0]), len(before[1]))
import qtensor
check("import")
layer = qtensor.Linear(64, 64, quantized_params=True, recipe=qtensor.recipes.MXFP8BlockScaling())
optimizer = torch.optim.AdamW(layer.parameters())
layer(torch.randn(32, 64)).sum().backward()
optimizer.step()
layer.weight.detach()[:32].clone().dequantize()
layer.load_state_dict(layer.state_dict())
check("use")
import qtensor.distributed
assert torch.distributed._state_dict_utils._broadcast_tensors.__module__.startswith("qtensor")
assert len(hooks()) == len(before[2]) + 1
print("the checks see changes")
"""


def test_torch_stays_as_it_was():
    """No function is replaced, no kernel of others registered and no optimizer hooked."""
    assert torch_process.run(UNTOUCHED, compiles=True).stdout == "the checks see changes\n"
