"""A sequence of operations and modules."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from qtensor.errors import DtypeError, check, fail
from qtensor.ops.checks import hooks_of, refuse_hooks
from qtensor.ops.fuser import OperationFuser
from qtensor.ops.operation import FusibleOperation

_DERIVED = ("_groups", "_only", "_hooks")
"""Attributes that follow from the modules."""
_OWNERS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def _check_module(name: Any, module: Any) -> None:
    """Refuse what is no module.

    Raises:
        QTensorError: with its type.
    """
    if not isinstance(module, nn.Module):
        rule = "a sequence is made of operations and modules"
        label, fix = f"Sequential (operation {name})", "Pass operations, one by one"
        fail(label, rule, type(module).__name__, fix, DtypeError)


def _autocast_dtype(like: Tensor) -> torch.dtype | None:
    """The dtype that ``torch.autocast`` asks for, None without it."""
    kind = like.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def _cast(t: Any, dtype: torch.dtype) -> Any:
    """As torch.autocast casts: float64 and what is no floating point number stays as it is."""
    moves = isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64
    return t.to(dtype) if moves else t


class Sequential(nn.Sequential):
    """``torch.nn.Sequential`` whose neighbouring operations are fused, forward and backward.

    Runs of ``qtensor.ops`` operations are one autograd function each; other modules run by themselves. Extra inputs are passed
    behind the input, extra outputs come back behind the output.

    Args:
        *modules: operations and modules, or an ``OrderedDict`` of them.
        fuse: False: run each operation by itself, in the same arithmetic.

    Raises:
        QTensorError: an operation that belongs to another sequence, or is there twice.
    """

    def __init__(self, *modules: Any, fuse: bool = True) -> None:
        self.__dict__["_ready"] = False
        super().__init__()
        self.fuse = fuse
        given = modules
        if len(modules) == 1 and isinstance(modules[0], OrderedDict):
            given = tuple(modules[0].items())
        else:
            given = tuple((str(i), module) for i, module in enumerate(modules))
        for name, module in given:
            _check_module(name, module)
            nn.Sequential.add_module(self, name, module)
        self._ready = True
        self._arrange()

    # ---- structure ------------------------------------------------------------------------------------------

    def _arrange(self) -> None:
        """Group neighbouring operations, and take note that they are this sequence's."""
        if not self.__dict__.get("_ready", False):
            return
        groups: Sequence[Any] = []
        run: list[Any] = []
        for place, module in enumerate(self):
            if not isinstance(module, FusibleOperation):
                groups = [*groups, *self._fused(run), module]
                run = []
                continue
            self._own(module, place)
            run.append(module)
        # Beside the submodules, not among them.
        self.__dict__["_groups"] = groups = (*groups, *self._fused(run))
        alone = len(groups) == 1 and isinstance(groups[0], OperationFuser)
        self.__dict__["_only"] = groups[0] if alone else None
        self.__dict__["_hooks"] = tuple([
            hooks for op in self._operations() for hooks in hooks_of(op)
        ])

    def _operations(self) -> list[FusibleOperation]:
        """The operations, and those that they are made of."""
        own = [module for module in self if isinstance(module, FusibleOperation)]
        return list(dict.fromkeys([op for module in own for op in (module, *module.basic_ops)]))

    @property
    def groups(self) -> tuple[Any, ...]:
        """Fusers of neighbouring operations, and the modules between them."""
        return self.__dict__["_groups"]

    @property
    def n_extra_inputs(self) -> int:
        """How many tensors a call takes behind the input; those of sequences inside of it count."""
        counting = (OperationFuser, Sequential)
        return sum([g.n_extra_inputs for g in self.groups if isinstance(g, counting)])

    def refuse(self, given: int) -> NoReturn:
        """Refuse another number of extra inputs than ``n_extra_inputs``.

        Raises:
            QTensorError: with both numbers.
        """
        rule = f"it takes {self.n_extra_inputs} extra inputs"
        fail("Sequential", rule, given, "Pass as many")

    def explain(self, *inputs: Tensor) -> Any:
        """Print how the sequence would run now: fused operations, quantization, bytes saved for backward.

        Args:
            *inputs: as for a call; only shapes, dtypes and ``requires_grad`` count. Without any, an input of 1024 rows.

        Returns:
            What was printed, as a value: ``SequenceExplanation``.

        Raises:
            QTensorError: as the call itself.
        """
        # Fake tensors take a while to import, and nothing else needs them.
        from qtensor.ops.explain import explain  # noqa: PLC0415

        found = explain(self, *inputs)
        print(found)
        return found

    def _fused(self, run: list[Any]) -> list[OperationFuser]:
        return [OperationFuser(run, self.fuse)] if run else []

    def _own(self, module: FusibleOperation, place: int) -> None:
        owner = _OWNERS.get(module)
        other = None if owner is None else owner()
        if self.__dict__.get("_is_slice", False):
            return
        label = f"{type(module).__name__} (operation {place})"
        if other is not None and other is not self and any(m is module for m in other):
            rule = "an operation belongs to one sequence"
            fail(label, rule, "one that is in another", "Make another operation")
        twice = any(m is module for m in list(self)[:place])
        rule = "an operation stands in a sequence once"
        check(not twice, label, rule, "it again", "Make another one")
        for op in (module, *module.basic_ops):
            op.__dict__["_place"] = place
        _OWNERS[module] = weakref.ref(self)

    def __getitem__(self, idx: Any) -> Any:
        """A module, or for a slice a sequence of the same operations."""
        if not isinstance(idx, slice):
            return super().__getitem__(idx)
        part = Sequential(fuse=self.fuse)
        part.__dict__["_is_slice"] = True
        for name, module in list(self._modules.items())[idx]:
            nn.Sequential.add_module(part, name, module)
        part._arrange()
        return part

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Group anew after a change, however many steps it has; one that is refused leaves the sequence as it was."""
        if not self.__dict__.get("_ready", False):
            yield
            return
        before = self._modules.copy()
        self.__dict__["_ready"] = False
        try:
            yield
            self.__dict__["_ready"] = True
            self._arrange()
        except Exception:
            self.__dict__.update(_ready=True, _modules=before)
            self._arrange()
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        # Tools that replace modules set them as attributes: ``sequence.set_submodule("0", other)``.
        replaces = name in self.__dict__.get("_modules", ())
        with self._changing() if replaces or name == "fuse" else contextlib.nullcontext():
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        with self._changing():
            super().__delattr__(name)

    def __setitem__(self, idx: int, module: nn.Module) -> None:
        _check_module(idx, module)
        with self._changing():
            super().__setitem__(idx, module)

    def __delitem__(self, idx: slice | int) -> None:
        with self._changing():
            super().__delitem__(idx)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """See ``torch.nn.Module.add_module``."""
        _check_module(name, module)
        with self._changing():
            super().add_module(name, module)

    def append(self, module: nn.Module) -> Self:
        """Add a module at the end."""
        self.add_module(str(len(self)), module)
        return self

    def insert(self, index: int, module: nn.Module) -> Self:
        """Add a module before another."""
        _check_module(index, module)
        with self._changing():
            super().insert(index, module)
        return self

    def __copy__(self) -> Self:
        """Another sequence of the same operations, as a slice is."""
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__getstate__(), _modules=self._modules.copy(), _is_slice=True)
        new._arrange()
        return new

    def __deepcopy__(self, memo: Any) -> Self:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        state = {k: v for k, v in self.__dict__.items() if k not in _DERIVED}
        new.__dict__.update(copy.deepcopy(state, memo))
        new._arrange()
        return new

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in _DERIVED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._arrange()

    # ---- the call -------------------------------------------------------------------------------------------

    def forward(self, input: Tensor, *extra_inputs: Tensor) -> Any:
        """Run the sequence.

        Args:
            input: of the first module.
            *extra_inputs: of the operations that take them, in their order.

        Returns:
            The output; behind it the extra outputs, where there are any.

        Raises:
            QTensorError: shapes, dtypes or extra inputs that do not fit, with the operation and its place.
        """
        if not isinstance(input, Tensor):
            fail("Sequential", "the input must be a tensor", type(input).__name__, "Pass one")
        if any(self.__dict__["_hooks"]):
            refuse_hooks(self._operations())
        cast_to, only = _autocast_dtype(input), self.__dict__["_only"]
        if only is not None and cast_to is None and len(extra_inputs) == only.n_extra_inputs:
            return only(input, *extra_inputs)
        x, taken = input, 0
        extra_outputs: list[Tensor] = []
        for group in self.__dict__["_groups"]:
            if not isinstance(group, (OperationFuser, Sequential)):
                x = group(x)
                continue
            count = group.n_extra_inputs
            given = extra_inputs[taken : taken + count]
            if len(given) != count:
                group.refuse(len(given))
            taken += count
            if cast_to is not None and isinstance(group, OperationFuser):
                x, given = _cast(x, cast_to), tuple([_cast(t, cast_to) for t in given])
            out = group(x, *given)
            if isinstance(out, tuple):
                x, *more = out
                extra_outputs += more
            else:
                x = out
        if taken != len(extra_inputs):
            self.refuse(len(extra_inputs))
        return (x, *extra_outputs) if extra_outputs else x
