"""Every python block of the README and the documents runs, in order, one process a document."""

import re
from pathlib import Path

import pytest
import torch_process
from places import PYTHONPATH

import qtensor

pytestmark = pytest.mark.project


ROOT = Path(__file__).parents[2]
GENERATED = (
    "distributed_matrix.md",
    "distributed_planning.md",
    "op_matrix.md",
    "torch_versions.md",
    "training_losses.md",
)
CHANGES = ("first_change.md",)
"""Pages that show edits of the package, which are no programs."""
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\S*)\n(.*?)^```$", re.M | re.S)


def blocks(text):
    """(line of the first statement, source) of each python block."""
    for match in BLOCK.finditer(text):
        if match[1] == "python":
            yield text.count("\n", 0, match.start(2)) + 1, match[2]


def script(path):
    """One program whose lines are where they are in the document, so that a traceback points into
    it.
    """
    lines = []
    for first, source in blocks(path.read_text()):
        lines += [""] * (first - 1 - len(lines)) + source.splitlines()
    return "\n".join(lines) + "\n"


def run(path, folder, cache=None):
    """Run the blocks of a document; ``cache`` is a folder for what Inductor compiles."""
    # A file, because torch reads the source of functions. Its name is not that of a module.
    program = folder / f"{path.stem}_page.py"
    program.write_text(script(path))
    environment = {
        "PYTHONPATH": PYTHONPATH,
        "OMP_NUM_THREADS": "1",
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "TORCHINDUCTOR_CACHE_DIR": str(cache or folder / "cache"),
    }
    first = "import warnings; warnings.filterwarnings('error', '', DeprecationWarning, '__main__');"
    return torch_process.run(
        first + program.read_text(),
        name=str(program),
        environment=environment,
        folder=folder,
        check=False,
        compiles=True,
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """All documents share the headers that Inductor precompiles, a second and a half each time."""
    return tmp_path_factory.mktemp("inductor")


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [p for p in DOCUMENTS if p.name not in GENERATED], ids=lambda p: p.name
)
def test_examples_run(path, tmp_path, cache):
    done = run(path, tmp_path, cache)
    assert done.returncode == 0, done.stderr


def test_a_wrong_example_fails(tmp_path):
    path = tmp_path / "wrong.md"
    path.write_text("# Title\n\n```python\nx = 1\n```\n\ntext\n\n```python\nassert x == 2\n```\n")
    done = run(path, tmp_path)
    assert done.returncode == 1
    assert 'wrong_page.py", line 10' in done.stderr


def test_there_are_examples():
    counts = {
        p.name: len(list(blocks(p.read_text())))
        for p in DOCUMENTS
        if p.name not in GENERATED + CHANGES
    }
    assert counts.keys() >= {"README.md", "concepts.md", "numerics.md", "adding_a_format.md"}
    assert all(counts.values()), counts


def test_the_first_example_is_short():
    """What a reader sees first is a whole program of about 15 lines."""
    _, source = next(blocks((ROOT / "README.md").read_text()))
    assert 10 <= len([line for line in source.splitlines() if line.strip()]) <= 15


def test_links_lead_somewhere():
    for path in DOCUMENTS:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(#[^)]*)?\)", path.read_text()):
            other = (path.parent / target) if target else path
            assert other.exists(), f"{path.name}: {target}"
            if anchor:
                heads = re.findall(r"^#+ (.*)$", other.read_text(), re.M)
                slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}
                assert anchor[1:] in slugs, f"{path.name}: {target}{anchor}"


def test_the_versions_of_libraries_are_those_of_the_constraints():
    """The tests of the table of docs/transformers.md run with these versions."""
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    table = (ROOT / "docs/transformers.md").read_text().partition("| library | job |")[2]
    named = re.findall(r"^\| ([^|]+\d) \|", table, re.M)
    stated = [pair.split() for cell in named for pair in cell.split(", ")]
    assert len(stated) > 7
    for name, version in stated:
        assert pins[name] == version, name


def test_the_readme_lists_every_format_with_its_size():
    """Bits per value: all buffers of a large matrix with the default options."""
    text = (ROOT / "README.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \|.*?\| *([\d.]+) \|", text, re.M))
    assert set(rows) == set(BUILT_IN)
    for fmt, bits in rows.items():
        described = qtensor.quantizer(fmt)._describe_buffers((4096, 4096)).values()
        total = sum(8 * dtype.itemsize * _product(shape) for shape, dtype in described)
        assert float(bits) == pytest.approx(total / 4096**2, abs=0.005), fmt


BUILT_IN = (
    "fp8",
    "fp8_delayed",
    "fp8_rowwise",
    "fp8_blockwise",
    "mxfp8",
    "mxfp6",
    "mxfp4",
    "nvfp4",
)


def _product(shape):
    result = 1
    for n in shape:
        result *= n
    return result
