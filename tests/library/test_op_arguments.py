"""The NamedTuple of each op's arguments says what its schema says."""

from typing import get_type_hints

import pytest
import torch

import qtensor  # noqa: F401 - defines the ops
from qtensor.core.operand import Operand
from qtensor.kernels.products.problem import Pair
from qtensor.library.define import ARGUMENTS, FILLS


def schema_of(name):
    """The arguments (name, default or None) that the schema of ``qtensor::name`` has."""
    return [
        (argument.name, argument.default_value if argument.has_default_value() else None)
        for argument in getattr(torch.ops.qtensor, name).default._schema.arguments
    ]


def declared(arguments):
    """The same of a NamedTuple; the fields of a record in it are arguments themselves."""
    found = []
    for field, kind in get_type_hints(arguments).items():
        if kind is Operand:
            found += [(field, None), (f"{field}_quantizer", None), (f"{field}_shape", None)]
        elif hasattr(kind, "_fields"):
            found += declared(kind)
        else:
            found.append((field, arguments._field_defaults.get(field)))
    return found


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_the_arguments_are_those_of_the_schema(name):
    assert declared(ARGUMENTS[name]) == schema_of(name)


def test_a_record_is_bound_from_flat_arguments(monkeypatch):
    """``gemm`` takes six arguments for two operands, and its fill sees a pair of them."""
    calls = []
    monkeypatch.setitem(FILLS, "gemm", lambda out, args: calls.append(args))
    a, b = torch.ones(2, 3), torch.ones(4, 3)
    torch.ops.qtensor.gemm([a], "", (2, 3), [b], "", (4, 3), "TN", torch.float32)
    (args,) = calls
    assert args.operands == Pair(Operand([a], "", [2, 3]), Operand([b], "", [4, 3]))
    assert args.operands.a.buffers[0] is a
    assert args.operands.b.buffers[0] is b
    assert (args.layout, args.dtype, args.bias) == ("TN", torch.float32, None)
    assert (args.backend, args.fast) == ("auto", False)


SCHEMAS = {
    "quantize_": "(Tensor x, str quantizer, Tensor(a!)[] out, Tensor? scale=None, Tensor[]? "
    "amax=None, Tensor? seed=None, Tensor? noop_flag=None) -> ()",
    "advance_step_": "(Tensor(a!) step, bool forward_only=False, Tensor(b!)? counter=None) -> ()",
    "split_sizes": "(Tensor splits, SymInt rows, str label) -> Tensor",
    "grouped_wgrad": "(Tensor[] a, str a_quantizer, SymInt[] a_shape, Tensor[] b, str "
    "b_quantizer, SymInt[] b_shape, SymInt[] sizes, Tensor? splits, int groups, int[] wanted, "
    "ScalarType dtype) -> Tensor[]",
    "l2_norm": "(Tensor x, float eps) -> (Tensor y, Tensor rnorm)",
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_schema_that_is_made_from_the_arguments(name):
    schema = str(getattr(torch.ops.qtensor, name).default._schema)
    assert schema == f"qtensor::{name}{SCHEMAS[name]}"


def test_the_comparison_sees_another_default():
    quantize = ARGUMENTS["quantize"]
    other = quantize._field_defaults | {"seed": 1}
    found = [(field, other.get(field)) for field in quantize._fields]
    assert found != schema_of("quantize")
