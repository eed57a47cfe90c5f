"""The NamedTuple of each op's arguments says what its schema says."""

import pytest
import torch

import qtensor  # noqa: F401 - defines the ops
from qtensor.library.define import ARGUMENTS


def schema_of(name):
    """The arguments (name, default or None) that the schema of ``qtensor::name`` has."""
    return [
        (argument.name, argument.default_value if argument.has_default_value() else None)
        for argument in getattr(torch.ops.qtensor, name).default._schema.arguments
    ]


def declared(arguments):
    """The same of a NamedTuple."""
    return [(field, arguments._field_defaults.get(field)) for field in arguments._fields]


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_the_arguments_are_those_of_the_schema(name):
    assert declared(ARGUMENTS[name]) == schema_of(name)
    schema = getattr(torch.ops.qtensor, name).default._schema.arguments
    without = [a.name for a in schema if not a.has_default_value()]
    fields = ARGUMENTS[name]._fields
    assert without == [f for f in fields if f not in ARGUMENTS[name]._field_defaults]


def test_the_comparison_sees_another_default():
    quantize = ARGUMENTS["quantize"]
    other = quantize._field_defaults | {"seed": 1}
    found = [(field, other.get(field)) for field in quantize._fields]
    assert found != schema_of("quantize")
