"""Let the loader of transformers read quantized weights through ``qtensor.checkpoints``.

The loader of transformers (``core_model_loading``) walks over the stored tensors of a checkpoint,
renames each to a parameter, and converts the tensors of a parameter together. Three transforms
make it see one tensor for each quantized weight:

- ``StoredNames`` renames every stored part of a weight to the weight's logical name.
- ``StoredConverter`` replaces a converter of the model, such as the one that stacks experts.
- ``ReadStored`` loads the weights that no converter of the model takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
)

from qtensor.checkpoints import Checkpoint
from qtensor.checkpoints.buffers import in_dtype
from qtensor.core.errors import UnsupportedError, fail
from qtensor.integrations.experts import ExpertWeights
from qtensor.integrations.stacking import stack
from qtensor.storage.tensor import QuantizedTensor

_NOTHING = r"(?!)"
"""A pattern that matches nothing: the transforms here find names on their own."""
_STORED = "qtensor-stored"
"""The key under which ``ReadStored`` collects tensors."""


class Reader:
    """Read the quantized weights of an open checkpoint for the parameters of a model."""

    def __init__(
        self, checkpoint: Checkpoint, parameters: Mapping[str, Tensor], dtype: torch.dtype | None
    ) -> None:
        """Index the stored tensors of every weight.

        With a dtype None, weights keep the dtype of the checkpoint.
        """
        self.checkpoint = checkpoint
        self.parameters = parameters
        self.dtype = dtype
        self.current: str | None = None
        """Logical name of the weight whose stored tensor the loader handles, or None."""
        self.dense: dict[str, str] = {}
        """Weights that became plain parameters, with the reason."""
        self._owner: dict[str, str] = {}
        self._first: set[str] = set()
        for name, group in checkpoint.groups.items():
            stored = [info.name for info in group.roles.values()]
            self._owner.update(dict.fromkeys(stored, name))
            self._first.update(stored[:1])

    def __deepcopy__(self, memo: dict[int, Any]) -> Reader:
        # The loader copies a converter, with all that it refers to, for each stored tensor.
        return self

    def begin(self, stored: str) -> str | None:
        """Note which stored tensor the loader handles; return the weight's name, or None."""
        self.current = self._owner.get(stored)
        return self.current

    def future(self, stored: str) -> Callable[[], Tensor] | None:
        """Return a function that reads the weight of a stored tensor.

        It is None for all but the first stored tensor of a weight.
        """
        if stored not in self._first:
            return None
        return functools.partial(self.read, self._owner[stored])

    def owns(self, stored: str) -> bool:
        """Return True if the stored tensor belongs to a quantized weight."""
        return stored in self._owner

    def read(self, name: str) -> Tensor:
        """Return a weight: quantized where a format holds it, else its values."""
        tensor = self.checkpoint[name]
        dtype = self.dtype or tensor.dtype
        if not isinstance(tensor, QuantizedTensor):
            self.dense[name] = self.checkpoint.why_dense(name) or "it is stored so"
            return tensor.to(dtype)
        tensor = in_dtype(tensor, dtype)
        if self.checkpoint.groups[name].transposed:
            return ExpertWeights(tensor, True)
        return tensor

    def parameter(self, target: str, tensor: Tensor, module: nn.Module) -> nn.Parameter:
        """Return the parameter for a weight, frozen if it is quantized.

        ``module`` holds the parameter ``target``.
        """
        wanted = tuple(self.parameters[target].shape)
        if isinstance(tensor, QuantizedTensor) and tensor.ndim == 3:
            # The layout does not tell the orientation: (E, N, K), or as in the parameter.
            turned = tuple(tensor.shape) == (*wanted[:-2], *wanted[:-3:-1])
            fits = tuple(tensor.shape) == wanted
            tensor = ExpertWeights(tensor, turned and (is_transposed(module) or not fits))
        if tuple(tensor.shape) != wanted:
            fix = "Load the checkpoint with the config of its own model"
            rule = f"{target}: the weight has the shape of the parameter, {wanted}"
            fail("from_pretrained", rule, tuple(tensor.shape), fix, UnsupportedError)
        return nn.Parameter(tensor, requires_grad=not _is_quantized(tensor))


def _is_quantized(tensor: Tensor) -> bool:
    return isinstance(tensor, (QuantizedTensor, ExpertWeights))


def module_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that holds a parameter, and the parameter's name in it."""
    path, _, key = name.rpartition(".")
    return (model.get_submodule(path) if path else model), key


def plain_tied_modules(model: Any) -> list[str]:
    """Return the names of modules whose plain weight is stored under the name of another module."""
    pairs = model.all_tied_weights_keys.items()
    plain = [name for name, source in pairs if not _is_quantized(model.get_parameter(source))]
    return [name.removesuffix(".weight") for name in plain if name.endswith(".weight")]


def is_transposed(module: nn.Module) -> bool:
    """Return True if the experts of a module are (E, K, N): a product reads ``x @ weight[e]``."""
    # The experts of Llama 4 are not made by the decorator that sets the attribute.
    default = type(module).__name__ == "Llama4TextExperts"
    return bool(getattr(module, "is_transposed", default))


# ---- transforms


class StoredNames(WeightRenaming):
    """Rename ``x.weight_packed``, ``x.weight_scale``, ... to ``x.weight``."""

    __slots__ = ("reader",)

    def __init__(self, reader: Reader) -> None:
        super().__init__(_NOTHING, "")
        self.reader = reader

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return the logical name of the weight to which a stored tensor belongs."""
        name = self.reader.begin(source_key)
        return (source_key, None) if name is None else (name, _NOTHING)


class _Stored(WeightConverter):
    """Collect one future for each quantized weight instead of one for each stored tensor."""

    __slots__ = ("reader",)
    reader: Reader

    def add_tensor(
        self, target_key: str, source_key: str, source_pattern: str, future: object
    ) -> None:
        """Collect a stored tensor; only the first one of a quantized weight is kept."""
        if self.reader.owns(source_key):
            future = self.reader.future(source_key)
        if future is not None:
            super().add_tensor(target_key, source_key, source_pattern, future)

    def has_stored(self, target: str) -> bool:
        """Return True if a quantized weight was collected for the target."""
        return any(self.reader.owns(source) for source in self.layer_targets[target])


class ReadStored(_Stored):
    """Load the quantized weights that no converter of the model takes."""

    __slots__ = ()

    def __init__(self, reader: Reader) -> None:
        super().__init__([_STORED], [""], [_Nothing()])
        self.reader = reader

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Take a weight under the name that the renamings of the model gave it."""
        return source_key, (None if self.reader.current is None else _STORED)

    def convert(self, layer_name: str, model: Any = None, **__: object) -> dict[str, Any]:
        """Return the parameter."""
        tensors = self.materialize_tensors()[_STORED]
        module, _ = module_of(model, layer_name)
        if len(tensors) != 1:
            _refuse(layer_name, "one weight for the parameter", f"{len(tensors)} of them")
        return {layer_name: self.reader.parameter(layer_name, tensors[0], module)}


class StoredConverter(_Stored):
    """Do what a converter of the model does, for quantized weights too."""

    __slots__ = ()

    def __init__(self, converter: WeightConverter, reader: Reader) -> None:
        # The operations of the converter may be shared; they keep no state.
        super().__init__(
            converter._original_source_patterns.copy(),
            converter._original_target_patterns.copy(),
            list(converter.operations),
            force_cpu=converter.force_cpu,
        )
        for key in ("scope_prefix", "base_model_prefix"):
            setattr(self, key, getattr(converter, key))
        self.reader = reader

    def reverse_transform(self) -> WeightConverter:
        """Return the transform that ``save_pretrained`` applies."""
        operations = [op.reverse_op for op in self.operations[::-1]]
        sources, targets = self._original_target_patterns, self._original_source_patterns
        reverse = WeightConverter(sources.copy(), targets.copy(), operations)
        reverse.scope_prefix, reverse.base_model_prefix = self.scope_prefix, self.base_model_prefix
        return reverse

    def convert(self, layer_name: str, model: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Return the parameter; quantized experts are stacked without rounding.

        Raises:
            UnsupportedError: an operation of the converter is not defined for quantized weights.
        """
        if not self.has_stored(layer_name):
            return super().convert(layer_name, model=model, **kwargs)
        collected = self.materialize_tensors()
        every = [tensor for tensors in collected.values() for tensor in tensors]
        if not all(isinstance(tensor, QuantizedTensor) for tensor in every):
            # A part of the weight is dense, so all of it is.
            for key, tensors in collected.items():
                plain = [t.dequantize() if isinstance(t, QuantizedTensor) else t for t in tensors]
                self.collected_tensors[key] = [functools.partial(_given, t) for t in plain]
            return super().convert(layer_name, model=model, **kwargs)
        module, _ = module_of(model, layer_name)
        tensor = self._stacked(layer_name, collected)
        return {layer_name: self.reader.parameter(layer_name, tensor, module)}

    def _stacked(self, layer_name: str, collected: Mapping[str, list[Any]]) -> Tensor:
        kinds = [type(op) for op in self.operations]
        dims = [getattr(op, "dim", None) for op in self.operations]
        known = ([MergeModulelist], [MergeModulelist, Concatenate])
        if kinds not in known or dims != [0, 1][: len(dims)]:
            got = ", ".join(map(repr, self.operations))
            _refuse(layer_name, "stacking experts is the only conversion of quantized weights", got)
        lists = [collected[key] for key in self.source_patterns if key in collected]
        if len({len(tensors) for tensors in lists}) != 1:
            _refuse(layer_name, "every expert has all of its parts", list(map(len, lists)))
        return stack(list(zip(*lists, strict=True)), f"from_pretrained[{layer_name}]")


def _given(tensor: Tensor) -> Tensor:
    return tensor


def _refuse(name: str, rule: str, got: object) -> NoReturn:
    fix = "Load a checkpoint without quantization, or open it with qtensor.checkpoints"
    fail(f"from_pretrained[{name}]", rule, got, fix, UnsupportedError)


class _Nothing(ConversionOps):
    """Stand for the operation that a converter must have."""

    def convert(self, input_dict: dict[str, Any], *_: object, **__: object) -> dict[str, Any]:
        return input_dict


class QuantizeWeight(ConversionOps):
    """Quantize a parameter as soon as the loader has it."""

    def __init__(self, quantize: Callable[[Any, str, Tensor], Tensor]) -> None:
        """Take the function that quantizes."""
        self.quantize = quantize

    def convert(
        self, input_dict: dict[str, Any], *args: Any, model: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the parameters by name."""
        done = {}
        for name in list(input_dict):
            value = input_dict.pop(name)
            value = value[0] if isinstance(value, list) else value
            done[name] = self.quantize(model, name, value)
        return done


def transforms(conversions: Iterable[Any], reader: Reader) -> list[Any]:
    """Return the transforms that load a checkpoint with quantized weights."""
    own = [
        StoredConverter(entry, reader) if type(entry) is WeightConverter else entry
        for entry in conversions
    ]
    return [StoredNames(reader), *own, ReadStored(reader)]
