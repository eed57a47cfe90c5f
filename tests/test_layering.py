"""A file imports only layers below its own: import-linter's contracts, and a check that needs no extra."""

import ast
import re
import shutil
import subprocess
import sysconfig
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "qtensor"
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
CONTRACTS = {contract["type"]: [] for contract in CONFIG["contracts"]}
for one in CONFIG["contracts"]:
    CONTRACTS[one["type"]].append(one)


def layers():
    """Module or package name directly under qtensor -> its height, 0 the lowest."""
    (contract,) = CONTRACTS["layers"]
    rows = reversed(contract["layers"])
    names = [re.findall(r"\w+", row) for row in rows]
    return {name: height for height, row in enumerate(names) for name in row}


def layer_of(module):
    """``qtensor.storage.base`` -> ``storage``; the package itself is above all."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "qtensor"


def imports(path, source=None):
    """Modules of qtensor that a file imports, those inside functions and type-checking blocks too."""
    for node in ast.walk(ast.parse(path.read_text() if source is None else source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "qtensor")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "qtensor":
                for alias in node.names:
                    is_module = (PACKAGE / alias.name).is_dir() or (
                        PACKAGE / f"{alias.name}.py"
                    ).exists()
                    yield f"qtensor.{alias.name}" if is_module else "qtensor"
            elif node.module and node.module.split(".")[0] == "qtensor":
                yield node.module


def violations(path, source=None):
    heights = {"qtensor": 99} | layers()
    own = layer_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
    found = []
    for module in imports(path, source):
        other = layer_of(module)
        if other != own and heights[other] >= heights[own]:
            found.append(f"{path.relative_to(ROOT)} ({own}) imports {module} ({other})")
    return found


FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")
# The command line and the demo stand on the public names.
ABOVE_ALL = ("cli", "demo")


def test_every_module_has_a_layer():
    known = layers()
    names = {
        p.stem if p.is_file() else p.name for p in PACKAGE.iterdir() if p.name != "__pycache__"
    }
    names -= {"__init__", "py"}
    assert {n for n in names if (PACKAGE / n).is_dir() or (PACKAGE / f"{n}.py").exists()} <= set(
        known
    )


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_file_imports_a_higher_layer(path):
    own = layer_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
    found = violations(path)
    if own in ABOVE_ALL:
        found = [v for v in found if not v.endswith("(qtensor)")]
    assert found == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("layout.py", "from qtensor.storage.base import QuantizedTensorStorage"),
        ("storage/base.py", "def f():\n    import qtensor.quantizers.mx"),
        ("reference/mx.py", "from qtensor import storage"),
        ("library/gemm.py", "import qtensor"),
    ],
)
def test_the_check_sees_a_higher_layer(file, source):
    assert len(violations(PACKAGE / file, source)) == 1


def test_the_check_allows_lower_layers():
    source = "from qtensor.formats import K\nfrom qtensor.storage.rebuild import with_buffers\nimport torch"
    assert violations(PACKAGE / "storage/base.py", source) == []


def test_formats_know_nothing_of_each_other():
    for contract in CONTRACTS["independence"]:
        modules = set(contract["modules"])
        for module in sorted(modules):
            path = ROOT / Path(*module.split(".")).with_suffix(".py")
            assert not (modules - {module}) & set(imports(path)), module


@pytest.mark.parametrize("folder", ["storage", "quantizers"])
def test_every_format_is_in_the_independence_contracts(folder):
    """A module that defines a format's spec or quantizer is named in pyproject.toml."""
    marks = {"storage": r"^class \w+\(QuantizedTensor, spec=", "quantizers": r"^    format = \""}
    defining = {
        f"qtensor.{folder}.{p.stem}"
        for p in (PACKAGE / folder).glob("*.py")
        if re.search(marks[folder], p.read_text(), re.M)
    }
    contracts = [set(c["modules"]) for c in CONTRACTS["independence"]]
    assert defining in contracts


def test_import_linter():
    scripts = Path(sysconfig.get_path("scripts"))
    command = shutil.which("lint-imports", path=str(scripts)) or shutil.which("lint-imports")
    if command is None:
        pytest.skip(reason="import-linter is not installed (extra 'dev')")
    done = subprocess.run(
        [command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(CONFIG['contracts'])} kept, 0 broken" in done.stdout


def cycle(graph):
    """Modules that import each other in a ring, or None."""
    done, path = set(), []

    def visit(name):
        if name in path:
            return path[path.index(name) :]
        if name in done:
            return None
        path.append(name)
        for other in sorted(graph.get(name, ())):
            if ring := visit(other):
                return ring
        done.add(path.pop())
        return None

    return next(filter(None, map(visit, sorted(graph))), None)


def test_no_modules_import_each_other_in_a_ring():
    names = {
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
        for p in FILES
    }
    assert cycle({name: set(imports(path)) for name, path in names.items()}) is None


def test_a_ring_is_found():
    assert cycle({"a": {"b"}, "b": {"c", "d"}, "c": {"d"}, "d": set()}) is None
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
