"""A format in one module outside of the package, the one of docs/adding_a_format.md."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch_process
from places import PYTHONPATH

from qtensor.core.formats import E2M1, Element
from qtensor.reference.elements import code_values

PAGE = Path(__file__).parents[2] / "docs" / "adding_a_format.md"
USE = """
import numpy, torch, qtensor, my_int4
torch.manual_seed(0)
w = torch.randn(64, 96)
q = qtensor.quantize(w, "int4_groups")
numpy.savez("q.npz", w=w, codes=q.to_ml_dtypes().codes.astype(numpy.float32), values=q.dequantize())
model = torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
base = {name: p.detach().clone() for name, p in model.state_dict().items()}
assert qtensor.quantize_(model, "int4_groups").swapped[0].note.startswith("int4_groups")
x = torch.randn(4, 96)
torch.save((x, model(x)), "xy.pt")
torch.save(model.state_dict(), "model.pt")
qtensor.checkpoints.save(model.state_dict(), "saved")
assert "int4_groups" in qtensor.model_report(model.state_dict(), against=base).html()
with qtensor.debug.record(model, format="int4_groups") as log:
    model(x)
assert "int4_groups" in str(log)
"""
LOAD = """
import torch, qtensor
{first}
def load(read):
    try:
        return read()
    except qtensor.QTensorError as error:
        assert "mport the module that defines it" in str(error), error
        print("refused")
for state in (
    load(lambda: torch.load("model.pt", weights_only=True)),
    load(lambda: qtensor.checkpoints.load_state_dict("saved")),
):
    if state is not None:
        layers = torch.nn.Linear(96, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)
        model = torch.nn.Sequential(*layers)
        model.load_state_dict(state, assign=True)
        x, y = torch.load("xy.pt")
        print("equal" if torch.equal(model(x), y) else "other values")
"""


def run(folder: Path, program: str) -> str:
    environment = {
        "PYTHONPATH": f"{folder}:{PYTHONPATH}",
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
    }
    return torch_process.run(program, folder=folder, environment=environment).stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the module, and the files of a process that used it."""
    path = tmp_path_factory.mktemp("own")
    (block,) = re.findall(r"^```python\n(# my_int4.py\n.*?)^```$", PAGE.read_text(), re.M | re.S)
    (path / "my_int4.py").write_text(block)
    run(path, USE)
    return path


def test_values(folder: Path) -> None:
    """Codes are the nearest integers by NumPy, and values are codes times amax / 7."""
    with np.load(folder / "q.npz") as stored:
        w, codes, values = stored["w"], stored["codes"], stored["values"]
    groups = w.reshape(64, 3, 32)
    factor = np.abs(groups).max(-1, keepdims=True) / np.float32(7)
    wanted = np.rint(groups / factor)
    assert np.array_equal(codes.reshape(groups.shape), wanted)
    assert np.array_equal(values.reshape(groups.shape), wanted * factor)


def test_a_process_that_imports_the_module(folder: Path) -> None:
    assert run(folder, LOAD.format(first="import my_int4")).split() == ["equal", "equal"]


def test_a_process_that_does_not(folder: Path) -> None:
    assert run(folder, LOAD.format(first="")).split() == ["refused", "refused"]


@pytest.mark.parametrize(("bits", "signed"), [(4, True), (8, True), (4, False), (8, False)])
def test_elements_that_are_integers(bits: int, signed: bool) -> None:
    kind = Element(f"{'' if signed else 'u'}int{bits}", 0, bits - signed, 7, signed=signed)
    values = np.arange(2**bits)
    if signed:
        values = np.where(values < 2 ** (bits - 1), values, values - 2**bits)
    assert kind.bits == bits
    assert kind.is_integer
    assert list(code_values(kind)) == values.tolist()
    assert not E2M1.is_integer
    assert torch.tensor(code_values(E2M1)).tolist()[9] == -0.5
