"""Find the layers of a model that a recorder can see.

A recorded layer of qtensor has a site, and one of torch a ``forward`` of its own in its
``__dict__``. Dynamo guards both: a compiled model runs another graph while it is recorded, and its
first graph again afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from torch import nn

from qtensor.modules.grouped_linear import GroupedLinear
from qtensor.modules.quantized_module import QuantizedModule
from qtensor.ops.grouped_linear import GroupedLinear as GroupedOperation
from qtensor.ops.linear import BasicLinear
from qtensor.ops.operation import BasicOperation, FusibleOperation
from qtensor.ops.sequential import Sequential
from qtensor.storage.base import QuantizedTensorStorage

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Parts of names that torch.compile, FSDP and checkpoint wrappers add."""

Kind = Literal["torch", "module", "operation"]


class Layer(NamedTuple):
    """A layer that can be recorded."""

    name: str
    module: nn.Module
    weights: tuple[str, ...]
    kind: Kind
    """"torch" for a module whose forward is replaced, "module" for one of qtensor that passes on
    its tensors itself, "operation" for one that a fuser runs."""
    owner: nn.Module | None = None
    """The module whose fuser runs an operation: a ``Sequential``, or the operation itself."""
    operations: tuple[BasicOperation, ...] = ()
    """The neighbouring basic operations that the layer consists of."""
    sequence: str | None = None
    """The name of the sequence that the operation belongs to."""

    def matches(self, pattern: str) -> bool:
        """Return whether a pattern is for the layer, one of its weights or its sequence."""
        sequence = () if self.sequence is None else (self.sequence,)
        names = (self.name, *self.labels(), *sequence)
        return any([fnmatchcase(name, pattern) for name in names])

    def label(self, weight: str) -> str:
        """Return the name under which a weight is recorded."""
        return self.name if len(self.weights) == 1 else _joined(self.name, weight)

    def labels(self) -> tuple[str, ...]:
        """Return the names of the layer in records: one, or one for each of several weights."""
        labels = [self.label(weight) for weight in self.weights]
        own = () if labels and self.kind != "torch" else (self.name,)
        return tuple(dict.fromkeys([*own, *labels]))


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside of ``torch.compile`` and ``DistributedDataParallel`` wrappers."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := model.__dict__.get("_modules", {}).get("_orig_mod"), nn.Module):
            model = inner
        else:
            return model


def clean_name(name: str) -> str:
    """Return a module's name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is transformers' ``Conv1D``: a linear layer with a (K, N) weight."""
    library = sys.modules.get("transformers.pytorch_utils")
    return library is not None and isinstance(module, library.Conv1D)


def find_layers(model: nn.Module) -> Iterator[Layer]:
    """Yield the layers of a model that can be recorded.

    These are linear layers, qtensor's modules, operations, and modules with quantized parameters.
    """
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside:
            continue
        name = clean_name(name)
        if isinstance(module, Sequential):
            inside |= run_by(module)
            for child, operation in module.named_children():
                if isinstance(operation, FusibleOperation):
                    for layer in _operation_layers(_joined(name, child), operation, module):
                        yield layer._replace(sequence=name)
        elif isinstance(module, FusibleOperation):
            inside |= set(module.modules())
            yield from _operation_layers(name, module, module)
        elif isinstance(module, QuantizedModule):
            grouped = isinstance(module, GroupedLinear)
            names = _weights_of(module) if grouped else tuple(module._states)
            if names:
                yield Layer(name, module, names, "module")
        else:
            own = dict(module.named_parameters(recurse=False))
            quantized = [n for n, p in own.items() if isinstance(p, QuantizedTensorStorage)]
            if isinstance(module, nn.Linear) or is_conv1d(module):
                # FSDP's flat parameters leave a view in place of the weight.
                quantized = [n for n in own if n.startswith("weight")] or ["weight"]
            if quantized:
                yield Layer(name, module, tuple(quantized), "torch")


def run_by(sequence: Sequential) -> set[nn.Module]:
    """Return the modules that the fusers of a sequence run, whose ``forward`` is not called."""
    operations = [module for module in sequence if isinstance(module, FusibleOperation)]
    return {part for operation in operations for part in operation.modules()}


def _operation_layers(name: str, operation: FusibleOperation, owner: nn.Module) -> Iterator[Layer]:
    """Yield the layers of an operation: one, or one for each of several products."""
    basic = operation.basic_ops
    products = [op for op in basic if isinstance(op, BasicLinear | GroupedOperation)]
    if len(products) == 1:
        yield Layer(name, products[0], _weights_of(products[0]), "operation", owner, basic)
    elif products:
        names = {module: part for part, module in operation.named_modules()}
        for op in products:
            own = _joined(name, names.get(op, str(basic.index(op))))
            yield Layer(own, op, _weights_of(op), "operation", owner, (op,))
    elif not all([vars(type(op)).get("passes_input") for op in basic]):
        yield Layer(name, operation, (), "operation", owner, basic)


def _weights_of(op: nn.Module) -> tuple[str, ...]:
    if isinstance(op, GroupedLinear):
        return tuple([f"weight{i}" for i in range(op.num_gemms)])
    return ("weight",)
