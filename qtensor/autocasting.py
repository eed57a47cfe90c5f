"""The active recipe, and ``autocast``, the context manager that sets it."""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from qtensor.core.errors import ArgumentTypeError, fail
from qtensor.core.torch_state import (
    active_modes,
    context_of_backward,
    has_modes,
    in_backward,
    without_modes,
)
from qtensor.library.delayed import ADVANCE_STEP
from qtensor.library.recomputation import in_forward_of_function
from qtensor.recipes import Float8CurrentScaling, Recipe

HIGH_PRECISION = ""
"""The key of a region without quantization."""


class _Active(threading.local):
    """The innermost region of the current thread, as plain values.

    Attributes:
        key: the recipe's key; "" for high precision; None outside every region.
        group: name of the process group over which maxima are reduced, or None.
        step: int64 (1,) on the CPU: the number of the current step of delayed scaling. The numbers
            come from one counter of the process, so no two steps share one.
    """

    key: str | None
    group: str | None
    step: Tensor

    def __init__(self) -> None:
        # Instance attributes: compiled code would also guard attributes of the class.
        self.key, self.group = None, None
        # The first access in a thread may happen below a fake tensor mode.
        with without_modes():
            self.step = torch.zeros(1, dtype=torch.int64, device="cpu")


_ACTIVE = _Active()
_STEPS = torch.zeros(1, dtype=torch.int64, device="cpu")
"""The number of the last step that any thread has begun."""


State = tuple[str | None, str | None, Tensor | None]
"""(key, group, step) of ``_Active``. The step is None outside every region and in compiled code.

A plain tuple, because a named tuple takes longer to build (hot path).
"""
_OUTSIDE: State = (None, None, None)
_CONTEXT: contextvars.ContextVar[State] = contextvars.ContextVar("qtensor_autocast")
"""A copy of the state. Compiled code does not write it; Dynamo cannot trace a ``ContextVar``."""


def _inherited() -> State:
    """Return the region around ``backward()``, in a thread that autograd started for it.

    On a GPU, autograd runs the backward pass in threads of its own, and ``torch.utils.checkpoint``
    calls layers there. torch hands those threads a copy of the caller's context variables.
    """
    if torch.compiler.is_compiling() or not in_backward():
        return _OUTSIDE
    context = context_of_backward()
    return _OUTSIDE if context is None else context.get(_CONTEXT, _OUTSIDE)


def step_in_force(own: Tensor) -> Tensor:
    """Return the step counter of the current region; outside every region return ``own``."""
    if _ACTIVE.key is not None:
        return _ACTIVE.step
    step = _inherited()[2]
    return own if step is None else step


def is_outside() -> bool:
    """Return whether no region is active in this thread."""
    return _ACTIVE.key is None and _inherited()[0] is None


def active_recipe(own: str | None = None) -> str:
    """Return the key of the active recipe, outside every region ``own``; "": high precision."""
    key = _ACTIVE.key
    if key is None:
        key = _inherited()[0]
    if key is not None:
        return key
    return HIGH_PRECISION if own is None else own


class LastRegion:
    """The region of a layer's last forward, for a checkpoint that computes the layer again.

    ``torch.utils.checkpoint`` calls the layer in the backward pass, often outside of every region.
    It hands on the state of ``torch.autocast`` and of random generators, but not ours.

    Attributes:
        state: the region of the last forward that recorded a graph. A reentrant checkpoint records
            none: without any graph it is the region of the last forward.
        is_ambiguous: since the last recomputation, forwards ran under several recipes, so that
            nobody knows which of them is computed again.
        was_used: a recomputation has read the state; the next forward starts again.
        is_new: the next forward must be noted even if its region is the same.
    """

    __slots__ = ("has_graph", "is_ambiguous", "is_new", "state", "was_used")

    def __init__(self) -> None:
        self.state: State = _OUTSIDE
        self.is_ambiguous, self.was_used, self.has_graph = False, True, False
        self.is_new = True

    def __reduce__(self) -> tuple[type[LastRegion], tuple[()]]:
        # The copy of a layer has had no forward.
        return LastRegion, ()

    def note(self, state: State) -> None:
        """Store the region of a forward."""
        if torch.is_grad_enabled():
            if self.was_used:
                self.is_ambiguous = self.was_used = False
            elif state[0] != self.state[0]:
                self.is_ambiguous = True
            self.state, self.has_graph, self.is_new = state, True, False
        elif not self.has_graph:
            self.state = state


class Labelled(Protocol):
    """A layer that has a name for errors."""

    @property
    def label(self) -> str:
        """Name for errors."""


def layer_recipe(own: str | None, last: LastRegion, layer: Labelled) -> str:
    """Return the key of the active recipe as ``active_recipe`` does, for one layer in eager code.

    In a backward pass outside of every region, the layer's last forward gives the recipe.
    ``last``, the region of that forward, is updated; ``own`` is the key of the layer's own recipe.

    Raises:
        QTensorError: the layer is computed again, and its forwards ran under several recipes.
    """
    active = _ACTIVE
    key = active.key
    if key is not None:
        known, group, step = last.state
        # Most calls find what the call before has noted.
        if known is not key or group is not active.group or step is not active.step or last.is_new:
            last.note((key, active.group, active.step))
        return key
    if not in_backward():
        last.note(_OUTSIDE)
    else:
        key = _inherited()[0]
        if key is None:
            last.was_used = last.is_new = True
            key = last.state[0]
            if last.is_ambiguous:
                rule = (
                    "a checkpoint computes the layer again outside of qtensor.autocast, so that "
                    "its forwards since the last backward pass must share one recipe"
                )
                fix = "Use qtensor.checkpoint, or run the backward pass inside of the region"
                fail(layer.label, rule, "several recipes", fix)
        if key is not None:
            return key
    return HIGH_PRECISION if own is None else own


def active_group() -> str | None:
    """Return the name of the process group over which maxima are reduced, or None."""
    return _ACTIVE.group if _ACTIVE.key is not None else _inherited()[1]


def _set(key: str | None, group: str | None, step: Tensor) -> None:
    """Set the state of this thread."""
    _ACTIVE.key, _ACTIVE.group = key, group
    if not torch.compiler.is_compiling():
        _ACTIVE.step = step
        _CONTEXT.set((key, group, None if key is None else step))


def captured() -> State:
    """Return the state of this thread, for ``restored``."""
    if _ACTIVE.key is None:
        return _inherited()
    step = None if torch.compiler.is_compiling() else _ACTIVE.step
    return (_ACTIVE.key, _ACTIVE.group, step)


def _takes_only_fakes() -> bool:
    """Return whether a fake tensor mode is active that refuses real tensors, such as counters.

    Nothing is computed there, so no step begins either.
    """
    if not has_modes():
        return False
    return any(getattr(mode, "allow_non_fake_inputs", True) is False for mode in active_modes())


def _begin_step() -> None:
    """Begin a step of delayed scaling at the outermost region, unless it is an evaluation.

    A checkpoint that enters the region again, in the backward pass, begins no step either.
    """
    if torch.compiler.is_compiling():
        if torch.is_grad_enabled():
            ADVANCE_STEP(_ACTIVE.step, True, _STEPS)
    elif (torch.is_grad_enabled() or in_forward_of_function()) and not _takes_only_fakes():
        ADVANCE_STEP(_ACTIVE.step, True, _STEPS)


class autocast:
    """Run modules by a recipe: ``with qtensor.autocast(recipe=MXFP8BlockScaling()): ...``.

    Regions nest. The innermost region applies, and leaving it restores the region around it, also
    after an exception. ``autocast`` is also a decorator, and works inside compiled functions. As
    with ``torch.autocast``, a region belongs to the thread that entered it; other threads do not
    see it.

    Args:
        enabled: False for high precision.
        recipe: ``Float8CurrentScaling()`` if None. It is read when the region is entered.
        amax_reduction_group: a process group. Delayed scaling takes its maxima over its ranks.

    Raises:
        QTensorError: ``recipe`` is not a recipe, or the object is entered while it is active.
    """

    def __init__(
        self,
        enabled: bool = True,
        recipe: Recipe | None = None,
        amax_reduction_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not (recipe is None or isinstance(recipe, Recipe)):
            is_class = isinstance(recipe, type)
            call = f"Call it: {recipe.__name__}()" if is_class else ""
            fix = call or "Pass a recipe, for example qtensor.recipes.MXFP8BlockScaling()"
            fail("autocast", "recipe must be a recipe object", repr(recipe), fix, ArgumentTypeError)
        if not isinstance(enabled, bool):
            rule = "enabled must be True or False"
            fail("autocast", rule, repr(enabled), "Pass the recipe as recipe=", ArgumentTypeError)
        self.enabled = enabled
        self.recipe = recipe
        self.amax_reduction_group = amax_reduction_group
        self._outer: tuple[str | None, str | None] | None = None

    def __enter__(self) -> Self:
        if self._outer is not None:
            rule = "an autocast object can be active only once at a time"
            fail("autocast", rule, "an active one", "Create another autocast(...)")
        key = HIGH_PRECISION
        if self.enabled:
            key = Float8CurrentScaling().key if self.recipe is None else self.recipe.key
            delayed = self.recipe is not None and self.recipe.delayed
            if delayed and _ACTIVE.key is None:
                _begin_step()
        group = self.amax_reduction_group
        self._outer = (_ACTIVE.key, _ACTIVE.group)
        _set(key, None if group is None else group.group_name, _ACTIVE.step)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._outer is not None:
            _set(*self._outer, _ACTIVE.step)
        self._outer = None

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs ``function`` in a region with these options."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with autocast(self.enabled, self.recipe, self.amax_reduction_group):
                return function(*args, **kwargs)

        return run


class restored:
    """Restore an earlier state, for code that runs again in the backward pass.

    Args:
        state: the result of ``captured()``, possibly from another thread.
    """

    def __init__(self, state: State) -> None:
        self.key, self.group, self.step = state
        self.outer: tuple[str | None, str | None] = (None, None)
        self.outer_step: Tensor | None = None
        self.changes = False

    def __enter__(self) -> Self:
        self.outer = (_ACTIVE.key, _ACTIVE.group)
        # Compiled code of a checkpointed region must not write state of the enclosing code, so
        # that the state is written only if it differs.
        self.changes = self.outer != (self.key, self.group)
        if not torch.compiler.is_compiling():
            self.outer_step = _ACTIVE.step
            self.changes = self.changes or self.step is not self.outer_step
        if self.changes:
            _set(self.key, self.group, _ACTIVE.step if self.step is None else self.step)
        return self

    def __exit__(self, *exc: object) -> None:
        if self.changes:
            _set(*self.outer, _ACTIVE.step if self.outer_step is None else self.outer_step)
