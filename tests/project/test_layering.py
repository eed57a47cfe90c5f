"""What import-linter leaves open: rings of imports, private names, and formats that no contract
names.

`make lint` checks the layers themselves (`[tool.importlinter]` in pyproject.toml).
"""

import ast
import re
import tomllib
from pathlib import Path

import pytest
from sources import named_in_types, running

pytestmark = pytest.mark.project


ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "qtensor"
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def module_of(path):
    """Return the dotted name of a file of the package."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(nodes):
    """Yield (module of qtensor, imported name or None) of every import among nodes."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if is_ours(alias.name))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            if is_ours(node.module):
                yield from ((node.module, alias.name) for alias in node.names)


def is_ours(module):
    return module.split(".")[0] == "qtensor"


def modules(nodes):
    """Yield the modules of qtensor that nodes import."""
    for module, name in imports(nodes):
        inner = PACKAGE.parent.joinpath(*module.split("."), name or "")
        is_module = name and (inner.is_dir() or inner.with_suffix(".py").exists())
        yield f"{module}.{name}" if is_module else module


@pytest.mark.parametrize("folder", ["storage", "quantizers"])
def test_every_format_is_in_the_independence_contracts(folder):
    """A module that defines a format's spec or quantizer is named in pyproject.toml."""
    marks = {"storage": r"^class \w+\(QuantizedTensor, spec=", "quantizers": r"^    format = \""}
    defining = {
        f"qtensor.{folder}.{p.stem}"
        for p in (PACKAGE / folder).glob("*.py")
        if re.search(marks[folder], p.read_text(), re.M)
    }
    contracts = [set(c["modules"]) for c in CONFIG["contracts"] if c["type"] == "independence"]
    assert defining in contracts


def cycle(graph):
    """Return modules that import each other in a ring, or None."""
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
    graph = {module_of(p): set(modules(running(ast.parse(p.read_text())))) for p in FILES}
    assert any(graph.values())
    assert cycle(graph) is None


def layer_of(module):
    """Return the number of a module's layer, counted from the top; 0 for qtensor itself."""
    layers = next(c["layers"] for c in CONFIG["contracts"] if c["type"] == "layers")
    names = [{name.strip(" ()") for name in layer.split("|")} for layer in layers]
    unit = f"{module}.".split(".")[1]
    return next((i for i, layer in enumerate(names) if unit in layer), 0)


def test_annotations_name_no_class_of_a_higher_layer():
    """Such imports never run, so import-linter leaves them out; within a layer they may go up."""
    found = {
        (module_of(path), module)
        for path in FILES
        for module in modules(named_in_types(ast.parse(path.read_text())))
    }
    assert found
    assert {pair for pair in found if layer_of(pair[0]) > layer_of(pair[1])} == set()


def test_imports_for_annotations_are_told_from_those_that_run():
    source = (
        "import qtensor.api\n"
        "if TYPE_CHECKING:\n    from qtensor.core import errors\n"
        "def f():\n    import qtensor.ops\n"
    )
    tree = ast.parse(source)
    assert set(modules(running(tree))) == {"qtensor.api", "qtensor.ops"}
    assert set(modules(named_in_types(tree))) == {"qtensor.core.errors"}


def test_a_ring_is_found():
    assert cycle({"a": {"b"}, "b": {"c", "d"}, "c": {"d"}, "d": set()}) is None
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


def private(source):
    """Return the private names that a source imports from files of qtensor, or reads from them."""
    tree = ast.parse(source)
    is_private = re.compile(r"_(?!_)").match
    found = {f"{m}.{name}" for m, name in imports(ast.walk(tree)) if name and is_private(name)}
    aliases = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and is_ours(node.module)
        for alias in node.names
        if f"{node.module}.{alias.name}" in MODULES
    }
    return found | {
        f"{aliases[node.value.id]}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in aliases
        and is_private(node.attr)
    }


MODULES = {module_of(path) for path in FILES}


def test_no_private_name_is_used_in_another_file():
    found = {name for path in FILES for name in private(path.read_text()) if name not in MODULES}
    assert found == set()


def test_a_private_name_is_found():
    source = (
        "from qtensor.core.errors import _rule, QTensorError\n"
        "from qtensor.core import buffer_shapes as a, errors as e\n"
    )
    assert private(source) == {"qtensor.core.errors._rule"}
    source += "a._pad(1); a.__name__; e._rule; other._name; a.pad(1)"
    assert private(source) == {"qtensor.core.errors._rule", "qtensor.core.buffer_shapes._pad"}
    assert private("import qtensor.core.buffer_shapes\nfrom torch import _dynamo") == set()


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


def test_the_table_of_layers_is_that_of_the_contract():
    contract = next(c for c in CONFIG["contracts"] if c["type"] == "layers")
    layers = [[n.strip(" ()") for n in layer.split("|")] for layer in contract["layers"]]
    table = ARCHITECTURE.partition("## Layers")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, re.M)
    assert [re.findall(r"`(\w+)`", cell) for cell in cells] == layers


def defined(tree):
    """Return the names of functions, classes and variables that a module or its classes define."""
    functions = (ast.FunctionDef, ast.ClassDef)
    names = {node.name for node in ast.walk(tree) if isinstance(node, functions)}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def test_files_and_names_of_the_architecture_page_exist():
    paths = set(re.findall(r"\bqtensor/[\w/]*(?:\.\w+)?", ARCHITECTURE))
    assert len(paths) > 30
    assert {path for path in paths if not (ROOT / path).exists()} == set()
    for path, names in re.findall(r"(qtensor/[\w/]+\.py): (\w+(?:, \w+)*)", ARCHITECTURE):
        missing = set(names.split(", ")) - defined(ast.parse((ROOT / path).read_text()))
        assert not missing, f"{path}: {missing}"
