"""``Sequential``: a sequence of operations and modules."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from qtensor.core.errors import ArgumentTypeError, check, fail
from qtensor.ops.checks import hooks_of, refuse_hooks
from qtensor.ops.fuser import OperationFuser
from qtensor.ops.operation import FusibleOperation

_DERIVED = ("_groups", "_only", "_hooks")
"""Attributes that are derived from the modules."""
Group = OperationFuser | nn.Module
"""A fuser of neighbouring operations, or another module between them."""
_OWNERS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def _check_module(name: object, module: object) -> None:
    """Check that an element is a module."""
    if not isinstance(module, nn.Module):
        rule = "a sequence consists of operations and modules"
        label, fix = f"Sequential (operation {name})", "Pass operations, one by one"
        fail(label, rule, type(module).__name__, fix, ArgumentTypeError)


def _autocast_dtype(like: Tensor) -> torch.dtype | None:
    """Return the dtype that ``torch.autocast`` selects, or None without autocast."""
    kind = like.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def _cast(t: Any, dtype: torch.dtype) -> Any:
    """Cast like torch.autocast: only floating-point tensors, and not float64."""
    moves = isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64
    return t.to(dtype) if moves else t


class Sequential(nn.Sequential):
    """A ``torch.nn.Sequential`` that fuses neighbouring operations, in forward and backward.

    Each run of neighbouring ``qtensor.ops`` operations is one autograd function; other modules are
    called as usual. Extra inputs are passed after the input, and extra outputs are returned after
    the output.

    Args:
        *modules: operations and modules, or an ``OrderedDict`` of them.
        fuse: False to run each operation separately, with the same arithmetic.

    Raises:
        QTensorError: an operation belongs to another sequence, or occurs twice.
    """

    def __init__(self, *modules: Any, fuse: bool = True) -> None:
        self.__dict__["_ready"] = False
        super().__init__()
        self.fuse = fuse
        named = modules
        if len(modules) == 1 and isinstance(modules[0], OrderedDict):
            named = tuple(modules[0].items())
        else:
            named = tuple((str(i), module) for i, module in enumerate(modules))
        for name, module in named:
            _check_module(name, module)
            nn.Sequential.add_module(self, name, module)
        self._ready = True
        self._arrange()

    # ---- structure ---------------------------------------------------------------------------

    def _arrange(self) -> None:
        """Group neighbouring operations, and register this sequence as their owner."""
        if not self.__dict__.get("_ready", False):
            return
        groups: Sequence[Any] = []
        run: list[Any] = []
        for index, module in enumerate(self):
            if not isinstance(module, FusibleOperation):
                groups = [*groups, *self._fused(run), module]
                run = []
                continue
            self._own(module, index)
            run.append(module)
        # Set in __dict__, so that they do not become submodules.
        self.__dict__["_groups"] = groups = (*groups, *self._fused(run))
        alone = len(groups) == 1 and isinstance(groups[0], OperationFuser)
        self.__dict__["_only"] = groups[0] if alone else None
        self.__dict__["_hooks"] = tuple([
            hooks for op in self._operations() for hooks in hooks_of(op)
        ])

    def _operations(self) -> list[FusibleOperation]:
        """Return the operations, and the basic operations that they consist of."""
        own = [module for module in self if isinstance(module, FusibleOperation)]
        return list(dict.fromkeys([op for module in own for op in (module, *module.basic_ops)]))

    @property
    def groups(self) -> tuple[Group, ...]:
        """Fusers of neighbouring operations, and the modules between them."""
        return self.__dict__["_groups"]

    def replace_groups(self, replace: Callable[[Group], Group]) -> Callable[[], None]:
        """Run ``replace(group)`` in place of each of ``groups``; return a function that undoes it.

        If the sequence changes, its groups are made again.
        """
        own = self.__dict__
        before = own["_groups"], own["_only"]
        own["_groups"] = groups = tuple([replace(group) for group in before[0]])
        own["_only"] = None if before[1] is None else groups[0]

        def restore() -> None:
            if own["_groups"] is groups:
                own["_groups"], own["_only"] = before

        return restore

    @property
    def n_extra_inputs(self) -> int:
        """Number of tensors that a call takes after the input, nested sequences included."""
        counting = (OperationFuser, Sequential)
        return sum([g.n_extra_inputs for g in self.groups if isinstance(g, counting)])

    def refuse(self, count: int) -> NoReturn:
        """Raise the error for ``count`` extra inputs instead of ``n_extra_inputs``."""
        rule = f"it takes {self.n_extra_inputs} extra inputs"
        fail("Sequential", rule, count, "Pass that number after the input")

    def explain(self, *inputs: Tensor) -> Any:
        """Return how the sequence would run now: fusions, quantization, bytes saved for backward.

        Computes nothing and changes no state.

        Args:
            *inputs: inputs as for a call; only shapes, dtypes and ``requires_grad`` matter. Without
                inputs, an example input of 1024 rows is used.

        Returns:
            A ``SequenceExplanation``; its ``repr`` is a table.

        Raises:
            QTensorError: for the same reasons as a call.
        """
        # Fake tensors are slow to import, and only this method needs them.
        from qtensor.ops.explain import explain  # noqa: PLC0415

        return explain(self, *inputs)

    def _fused(self, run: list[Any]) -> list[OperationFuser]:
        return [OperationFuser(run, self.fuse)] if run else []

    def _own(self, module: FusibleOperation, index: int) -> None:
        owner = _OWNERS.get(module)
        other = None if owner is None else owner()
        if self.__dict__.get("_is_slice", False):
            return
        label = f"{type(module).__name__} (operation {index})"
        if other is not None and other is not self and any(m is module for m in other):
            rule = "an operation may belong to only one sequence"
            fail(label, rule, "one that is in another", "Create another operation")
        twice = any(m is module for m in list(self)[:index])
        rule = "an operation may occur only once in a sequence"
        check(not twice, label, rule, "it again", "Create another operation")
        for op in (module, *module.basic_ops):
            op.__dict__["_index"] = index
        _OWNERS[module] = weakref.ref(self)

    def __getitem__(self, idx: slice | int) -> Any:
        """Return a module or, for a slice, a sequence of the same operations."""
        if not isinstance(idx, slice):
            return super().__getitem__(idx)
        result = Sequential(fuse=self.fuse)
        result.__dict__["_is_slice"] = True
        for name, module in list(self._modules.items())[idx]:
            nn.Sequential.add_module(result, name, module)
        result._arrange()
        return result

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Regroup the operations after a change; restore the sequence if the change is refused."""
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
        """Return another sequence of the same operations, like a slice."""
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__getstate__(), _modules=self._modules.copy(), _is_slice=True)
        new._arrange()
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
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

    # ---- the call ----------------------------------------------------------------------------

    def forward(self, input: Tensor, *extra_inputs: Tensor) -> Any:
        """Run the sequence.

        Args:
            input: input of the first module.
            *extra_inputs: extra inputs of the operations that take them, in order.

        Returns:
            The output, or a tuple of the output and the extra outputs if there are any.

        Raises:
            QTensorError: shapes, dtypes or extra inputs do not fit; the message names the operation
                and its index.
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
            group_inputs = extra_inputs[taken : taken + count]
            if len(group_inputs) != count:
                group.refuse(len(group_inputs))
            taken += count
            if cast_to is not None and isinstance(group, OperationFuser):
                x = _cast(x, cast_to)
                group_inputs = tuple([_cast(t, cast_to) for t in group_inputs])
            out = group(x, *group_inputs)
            if isinstance(out, tuple):
                x, *more = out
                extra_outputs += more
            else:
                x = out
        if taken != len(extra_inputs):
            self.refuse(len(extra_inputs))
        return (x, *extra_outputs) if extra_outputs else x
