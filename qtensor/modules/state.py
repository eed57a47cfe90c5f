"""What a linear layer keeps between calls: the workspace of its weight, and the state of delayed scaling."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qtensor.autocasting import active_group, is_outside, step_in_force
from qtensor.functional.linear_args import DelayedCall
from qtensor.functional.parallel import max_over_ranks
from qtensor.functional.plan import caller_functions, delayed_options, largest_values
from qtensor.library.delayed import (
    ADVANCE_STEP,
    DELAYED_BEGIN,
    MERGED_HISTORY,
    RECORD_AMAX,
)
from qtensor.library.direct import direct
from qtensor.library.gradient import drop_listener, drop_postponed
from qtensor.recipes import MAX_HISTORY, parse_recipe
from qtensor.recipes.base import CALLABLES

_KEYS = itertools.count(1)

advance_step = direct(ADVANCE_STEP, 0)
delayed_begin = direct(DELAYED_BEGIN, 0)
record_amax = direct(RECORD_AMAX, 0)


class DelayedState:
    """Factors and maxima of delayed scaling: of inputs, weights and gradients, in this order.

    A layer of several GEMMs has ``groups`` of each: first its inputs, then its weights, then its gradients.

    Attributes:
        scale: (3 * groups,) float32 encode factors.
        history: (1024, 3 * groups) float32 maxima, of which a recipe uses the first ``amax_history_len`` rows.
        steps: (2,) int64 on the CPU: see ``qtensor.library.delayed``.
        cell: (groups,) float32: the gradients' maxima, written by backward.
        cell_step: (1,) int64 on the CPU.
        own_step: (1,) int64 on the CPU: counts the steps of a layer outside of every ``autocast``.
    """

    def __init__(self, device: Any = None, groups: int = 1) -> None:
        self.scale = torch.ones(3 * groups, dtype=torch.float32, device=device)
        self.history = torch.zeros(MAX_HISTORY, 3 * groups, dtype=torch.float32, device=device)
        self.cell = torch.zeros(groups, dtype=torch.float32, device=device)
        self.steps = torch.zeros(2, dtype=torch.int64)
        self.cell_step = torch.zeros(1, dtype=torch.int64)
        self.own_step = torch.zeros(1, dtype=torch.int64)

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Move what lives beside the parameters; values stay, whatever the function makes of a parameter's.

        ``bfloat16()`` would round them, and ``to_empty()`` leave them to chance.
        """
        for name in ("scale", "history", "cell"):
            old = getattr(self, name)
            device = function(old).device
            # Where to alone counts: to_empty() would hand back other values, and meta has none.
            if device.type != "meta":
                setattr(self, name, old.to(device))

    def begin(
        self, key: str, module: str, name: str, training: bool, groups: int = 1
    ) -> DelayedCall:
        """The factors of this call; the first call of a step renews them. ``groups`` as at construction."""
        if not training:
            # Nothing moves, and no operator says that it might: a program that writes to state cannot be exported.
            # A rank may evaluate on its own, so that there is nothing to reduce either.
            return DelayedCall(self.scale.clone(), self.steps.clone(), self.cell, self.cell_step)
        options = delayed_options(key)
        length = options.amax_history_len
        step = step_in_force(self.own_step)
        if is_outside():
            advance_step(step, True)
        largest = [value for value in largest_values(key, module, name) for _ in range(groups)]
        rows = new_scale = None
        group = active_group() if options.reduce_amax else None
        algorithm, factor = caller_functions(key)
        # Compared as numbers: Dynamo before torch 2.13 cannot trace `!=` of tuples.
        if group is not None or algorithm >= 0 or factor >= 0:
            rows, new_scale = self._by_caller(key, length, largest, group)
        text = options.amax_compute_algo if algorithm < 0 else ""
        scales, ticket = delayed_begin(
            self.scale,
            self.history,
            self.steps,
            self.cell,
            self.cell_step,
            step,
            True,
            length,
            text,
            options.margin,
            largest,
            rows,
            new_scale,
        )
        return DelayedCall(scales, ticket, self.cell, self.cell_step)

    def _by_caller(
        self, key: str, length: int, largest: list[float], group: str | None
    ) -> tuple[Tensor, Tensor | None]:
        """The history over all ranks, and the factors by the recipe's own functions."""
        options = delayed_options(key)
        algorithm, factor = caller_functions(key)
        rows = MERGED_HISTORY(self.history, self.steps, self.cell, self.cell_step, length)
        if group is not None:
            rows = torch.cat([max_over_ranks(rows[:1], group), rows[1:]])
        if algorithm < 0 and factor < 0:
            return rows, None
        if algorithm >= 0:
            amax = CALLABLES[algorithm](rows)
        else:
            amax = rows.amax(0) if options.amax_compute_algo == "max" else rows[0]
        tops = torch.tensor(largest, dtype=torch.float32, device=amax.device)
        if factor >= 0:
            return rows, CALLABLES[factor](amax, self.scale, tops, parse_recipe(key))
        new = (amax.reciprocal() * tops) / 2.0**options.margin
        new = torch.where(new.isinf(), torch.finfo(torch.float32).max, new)
        return rows, torch.where((amax > 0) & amax.isfinite(), new, self.scale)

    def record(self, amaxes: list[Tensor], first: int) -> None:
        """Maxima of the forward pass into row 0 of the history."""
        record_amax(self.history, amaxes, first)

    def merged(self) -> Tensor:
        """The history with the gradients' maxima, as a checkpoint keeps it."""
        return MERGED_HISTORY(
            self.history, self.steps, self.cell, self.cell_step, self.history.shape[0]
        )

    def load(self, scale: Tensor, history: Tensor) -> None:
        """Take up a checkpoint's state; counters begin anew."""
        with torch.no_grad():
            self.scale.copy_(scale)
            rows = min(history.shape[0], self.history.shape[0])
            self.history.zero_()
            self.history[:rows].copy_(history[:rows])
        self.cell.zero_()
        for counter in (self.steps, self.cell_step, self.own_step):
            counter.zero_()

    @property
    def used(self) -> bool:
        """Whether a step has begun, or a checkpoint brought maxima."""
        return bool(int(self.steps[0])) or bool(self.history.any())


class LinearState:
    """The state of one linear layer.

    Attributes:
        workspace: buffers of the quantized weight, kept from the first microbatch of a step on; None where there is none.
        workspace_quantizer: their canonical text.
        delayed: see ``DelayedState``.
        key: names the layer's postponed weight gradients, and what hears of those in ``main_grad``.
        report: int64 (2,): the key, and how often backward has added to ``main_grad``.
        token: int64 (1,): written when one is put off.
        draws: int64 (1,): counts the seeds drawn for stochastic rounding.
    """

    def __init__(self, device: Any = None, groups: int = 1) -> None:
        self.workspace: list[Tensor] | None = None
        self.workspace_quantizer = ""
        self.workspace_shape: tuple[int, ...] = ()
        self.delayed = DelayedState(device, groups)
        self.renew_key()

    def renew_key(self) -> None:
        """A key and token of its own, for a new layer or a copy of one."""
        self.key = next(_KEYS)
        self.token = torch.zeros(1, dtype=torch.int64)
        self.report = torch.tensor([self.key, 0])
        self.draws = torch.zeros(1, dtype=torch.int64)
        weakref.finalize(self, drop_postponed, self.key)
        weakref.finalize(self, drop_listener, self.key)

    def __deepcopy__(self, memo: dict[int, Any]) -> LinearState:
        copy = LinearState.__new__(LinearState)
        memo[id(self)] = copy
        copy.workspace, copy.workspace_quantizer, copy.workspace_shape = None, "", ()
        copy.delayed = DelayedState.__new__(DelayedState)
        copy.delayed.__dict__.update({n: t.clone() for n, t in self.delayed.__dict__.items()})
        copy.renew_key()
        return copy

    def __getstate__(self) -> dict[str, Any]:
        return {"delayed": self.delayed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.workspace, self.workspace_quantizer, self.workspace_shape = None, "", ()
        self.delayed = state["delayed"]
        self.renew_key()

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Move with the module; the workspace is made anew where it is needed."""
        self.delayed.apply(function)
        self.drop_workspace()

    def drop_workspace(self) -> None:
        """Forget the quantized weight."""
        self.workspace, self.workspace_quantizer, self.workspace_shape = None, "", ()
