"""Names, types and errors of the public interface, and calls of other libraries."""

from __future__ import annotations

import inspect
import typing
from typing import Any

import pytest
import torch
from formats import FormatCase, assert_same_tensor, formats, rand
from safetensors.torch import save_file
from torch import nn

import qtensor
from qtensor import ops
from qtensor.storage.tensor import QuantizedTensor


def test_no_private_name_is_exported() -> None:
    exported: dict[str, Any] = {}
    exec("from qtensor import *", exported)
    private = {n for n in exported if n.startswith("_")} - {"__builtins__", "__version__"}
    assert private == set()
    assert set(qtensor.__all__) <= {*exported, "__version__"}


def test_dir_lists_public_names_alone() -> None:
    listed = dir(qtensor)
    modules = {"distributed", "kernels"}  # documented; a star import leaves them alone
    assert set(listed) == {*qtensor.__all__, *modules}
    assert all(getattr(qtensor, name) is not None for name in listed)


def _results(function: Any) -> set[Any]:
    variants = typing.get_overloads(function) or [function]
    names = {"QuantizedTensor": QuantizedTensor, "Tensor": torch.Tensor}
    return {names.get(v.__annotations__["return"], v.__annotations__["return"]) for v in variants}


@pytest.mark.parametrize(
    "function",
    [
        qtensor.quantize,
        qtensor.Quantizer.quantize,
        qtensor.Quantizer.__call__,
        qtensor.Quantizer.make_empty,
        qtensor.Quantizer.assemble,
    ],
    ids=lambda f: f.__qualname__,
)
def test_results_are_annotated_as_quantized_tensors(function: Any) -> None:
    assert QuantizedTensor in _results(function)
    assert not {"Any", Any} & _results(function)


def test_public_parameters_are_called_input() -> None:
    for name in qtensor.__all__:
        value = getattr(qtensor, name)
        if callable(value) and not inspect.isclass(value):
            assert not {"inp", "input_"} & set(inspect.signature(value).parameters), name


@formats
def test_safetensors_names_the_way_out(case: FormatCase, tmp_path: Any) -> None:
    q = case.quantize(rand(8, 64))
    ways = r"t\.buffers\(\).*torch\.save.*qtensor\.checkpoints\.save.*assemble"
    rule = rf"data_ptr\[{case.name}\]: .*{ways}"
    with pytest.raises(qtensor.UnsupportedError, match=rule):
        save_file({"weight": q, "bias": rand(8)}, tmp_path / "model.safetensors")
    buffers = {
        name: buffer.contiguous() for name, buffer in zip("abcdef", q.buffers(), strict=False)
    }
    save_file(buffers, tmp_path / "buffers.safetensors")


def test_a_device_is_named_for_each_operand() -> None:
    weight = qtensor.quantize(rand(4, 32), "mxfp8")
    bias = torch.empty(4, device="meta")
    with pytest.raises(qtensor.QTensorError, match=r"one device; got cpu and meta"):
        nn.functional.linear(rand(2, 32), weight, bias)


@formats
def test_a_plain_tensor_refuses_quantized_data(case: FormatCase) -> None:
    """Torch would leave the plain tensor without memory."""
    q = case.quantize(rand(8, 64))
    rule = rf"data\[{case.name}\]: .*cannot take over.*torch\.nn\.Parameter\(quantized\)"
    for plain in (rand(8, 64), nn.Parameter(rand(8, 64))):
        values = plain.detach().clone()
        with pytest.raises(qtensor.ArgumentTypeError, match=rule):
            plain.data = q
        assert torch.equal(plain, values)
        plain.data = values + 1
        assert torch.equal(plain, values + 1)
    parameter = nn.Parameter(q)
    parameter.data = case.quantize(rand(8, 64, seed=1))
    assert_same_tensor(parameter.detach(), case.quantize(rand(8, 64, seed=1)))


# ---- names of arguments: torch's own, so that ``layer(input=x)`` works

SHORT = {"inp", "input_", "inputs_", "x_in"}


def _callables():
    """(name, function): every public function, and the public methods of every public class."""
    for package in (qtensor, ops):
        for name in package.__all__:
            member = getattr(package, name)
            if inspect.isclass(member):
                for method, function in inspect.getmembers(member, inspect.isfunction):
                    if not method.startswith("_") or method in ("__init__", "__call__"):
                        yield f"{name}.{method}", function
            elif inspect.isfunction(member):
                yield name, member


def test_the_input_is_called_input():
    functions = dict(_callables())
    assert {"Linear.forward", "GroupedLinear.forward", "ReLU.op_forward_compute"} <= set(functions)
    wrong = {
        name: sorted(SHORT & set(inspect.signature(function).parameters))
        for name, function in functions.items()
    }
    assert {name: short for name, short in wrong.items() if short} == {}


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_layers_take_input_by_keyword(backend):
    x = torch.randn(8, 32)
    layers = [
        qtensor.Linear(32, 32),
        qtensor.LayerNormLinear(32, 32),
        qtensor.LayerNormMLP(32, 32),
        ops.Sequential(ops.ReLU()),
    ]
    for layer in layers:
        call = torch.compile(layer, backend=backend, fullgraph=True) if backend else layer
        assert torch.equal(call(input=x), layer(x))
    grouped = qtensor.GroupedLinear(1, 32, 32)
    assert torch.equal(grouped(input=x, m_splits=[8]), grouped(x, [8]))
