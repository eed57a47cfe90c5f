"""Which recipe modules compute by: a context manager."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Self

import torch

from qtensor.errors import DtypeError, fail
from qtensor.library.delayed import ADVANCE_STEP
from qtensor.recipes import Float8CurrentScaling, Recipe

HIGH_PRECISION = ""
"""The key of a region without quantization."""


class _Active:
    """The state of the innermost region, as plain values."""

    key: str | None
    """Key of the recipe; "" for high precision; None outside of every region."""
    group: str | None
    """Name of the process group that maxima are reduced over."""
    step: torch.Tensor
    """int64 (1,) on the CPU: counts the outermost regions of recipes with delayed scaling."""

    def __init__(self) -> None:
        # Not of the class, which compiled code would guard besides.
        self.key, self.group = None, None
        self.step = torch.zeros(1, dtype=torch.int64)


_ACTIVE = _Active()


def step_in_force(own: torch.Tensor) -> torch.Tensor:
    """The counter of steps: the process's inside of a region, else ``own``."""
    return own if _ACTIVE.key is None else _ACTIVE.step


def is_outside() -> bool:
    """Whether no region is in force."""
    return _ACTIVE.key is None


def active_recipe(own: str | None = None) -> str:
    """Key of the recipe in force; "" for high precision.

    Args:
        own: key of the recipe that a module brings, which counts outside of every region.
    """
    if _ACTIVE.key is not None:
        return _ACTIVE.key
    return HIGH_PRECISION if own is None else own


def active_group() -> str | None:
    """Name of the process group over which maxima are reduced, or None."""
    return _ACTIVE.group


class autocast:
    """A region whose modules compute by a recipe: ``with qtensor.autocast(recipe=MXFP8BlockScaling()): ...``.

    Regions nest; the innermost counts, and leaving one restores what was before, after an exception too. Also a decorator,
    and usable inside compiled regions. The state is the process's: threads share it.

    Args:
        enabled: False: a region of high precision.
        recipe: Float8CurrentScaling() if None. Read when the region is entered.
        amax_reduction_group: a process group; delayed scaling takes its maxima over the ranks of it.

    Raises:
        QTensorError: ``recipe`` is no recipe, or one object is entered twice.
    """

    def __init__(
        self,
        enabled: bool = True,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
    ) -> None:
        if not (recipe is None or isinstance(recipe, Recipe)):
            is_class = isinstance(recipe, type)
            fix = (
                f"Call it: {recipe.__name__}()"
                if is_class
                else "Pass qtensor.recipes.MXFP8BlockScaling(), say"
            )
            fail("autocast", "recipe must be a recipe object", repr(recipe), fix, DtypeError)
        if not isinstance(enabled, bool):
            rule = "enabled must be True or False"
            fail("autocast", rule, repr(enabled), "Pass the recipe as recipe=", DtypeError)
        self.enabled = enabled
        self.recipe = recipe
        self.amax_reduction_group = amax_reduction_group
        self._before: tuple[str | None, str | None] | None = None

    def __enter__(self) -> Self:
        if self._before is not None:
            rule = "one object can be entered once at a time"
            fail("autocast", rule, "an active one", "Make another autocast(...)")
        key = HIGH_PRECISION
        if self.enabled:
            key = Float8CurrentScaling().key if self.recipe is None else self.recipe.key
            delayed = self.recipe is not None and self.recipe.delayed
            if delayed and _ACTIVE.key is None and torch.is_grad_enabled():
                ADVANCE_STEP(_ACTIVE.step)
        group = self.amax_reduction_group
        self._before = (_ACTIVE.key, _ACTIVE.group)
        _ACTIVE.key = key
        _ACTIVE.group = None if group is None else group.group_name
        return self

    def __exit__(self, *exc: object) -> None:
        if self._before is not None:
            _ACTIVE.key, _ACTIVE.group = self._before
        self._before = None

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that runs in such a region."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with autocast(self.enabled, self.recipe, self.amax_reduction_group):
                return function(*args, **kwargs)

        return run


class restored:
    """A region with the state of another moment, for what runs again in the backward pass."""

    def __init__(self, state: tuple[str | None, str | None]) -> None:
        self.state = state
        self.before: tuple[str | None, str | None] = (None, None)

    def __enter__(self) -> Self:
        self.before = (_ACTIVE.key, _ACTIVE.group)
        # Written only where it differs: a compiled checkpointed region must not write what is outside of it.
        if self.before != self.state:
            _ACTIVE.key, _ACTIVE.group = self.state
        return self

    def __exit__(self, *exc: object) -> None:
        if self.before != self.state:
            _ACTIVE.key, _ACTIVE.group = self.before


def captured() -> tuple[str | None, str | None]:
    """The state of now, to be ``restored`` later."""
    return (_ACTIVE.key, _ACTIVE.group)
