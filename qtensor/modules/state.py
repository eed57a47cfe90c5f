"""The state of a linear layer between calls: a quantized weight, and delayed scaling."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from qtensor.autocasting import active_group, is_outside, step_in_force
from qtensor.core.errors import DtypeError, check
from qtensor.core.torch_state import constant_in_graphs, has_modes, in_backward, without_modes
from qtensor.functional.linear.args import DelayedCall
from qtensor.functional.linear.layer_plan import caller_functions, delayed_options, largest_values
from qtensor.functional.site import Site
from qtensor.library.delayed import (
    ADVANCE_STEP,
    DELAYED_BEGIN,
    DELAYED_READ,
    LAYERS,
    MERGED_HISTORY,
    RECORD_AMAX,
)
from qtensor.library.gradient import drop_listener, drop_postponed
from qtensor.library.recomputation import Factors, active_runs, forget, is_running, keep, recall
from qtensor.recipes import MAX_HISTORY, parse_recipe
from qtensor.recipes.base import FUNCTIONS
from qtensor.storage.process_groups import max_over

_KEYS = itertools.count(1)


def counter(count: int = 1) -> Tensor:
    """Return int64 zeros (count,) on the CPU, whatever torch's default device is."""
    return torch.zeros(count, dtype=torch.int64, device="cpu")


class DelayedState:
    """Scales and maxima of delayed scaling.

    Their columns are inputs, weights and gradients, in this order, with ``groups`` columns of each.

    Attributes:
        scale: (3 * groups,) float32 encode factors.
        history: (1024, 3 * groups) float32 maxima. A recipe uses the first ``amax_history_len``
            rows.
        steps: (2,) int64 on the CPU; see ``qtensor.library.delayed``.
        cell: (groups,) float32: the maxima of the gradients, written by backward.
        cell_step: (1,) int64 on the CPU.
        own_step: (1,) int64 on the CPU: the step of a layer outside every ``autocast`` region.

    ``steps[0]`` is 0 before the first step, and -1 after a checkpoint was loaded.
    """

    def __init__(self, device: torch.device | str = "cpu", groups: int = 1) -> None:
        self.scale = torch.ones(3 * groups, dtype=torch.float32, device=device)
        self.history = torch.zeros(MAX_HISTORY, 3 * groups, dtype=torch.float32, device=device)
        self.cell = torch.zeros(groups, dtype=torch.float32, device=device)
        self.steps, self.cell_step, self.own_step = counter(2), counter(), counter()

    def __deepcopy__(self, memo: dict[int, Any]) -> DelayedState:
        copy = DelayedState.__new__(DelayedState)
        memo[id(self)] = copy
        copy.__dict__.update({name: tensor.clone() for name, tensor in self.__dict__.items()})
        return copy

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if int(self.steps[0]):
            # Another process counts its own steps.
            self._restart(self.merged())

    def _restart(self, history: Tensor) -> None:
        """Set the history (1024, 3 * groups), gradients included, and start new counters."""
        self.history, self.cell = history, torch.zeros_like(self.cell)
        self.steps, self.cell_step, self.own_step = counter(2), counter(), counter()
        self.steps[0] = -1

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Move the tensors to where ``function`` moves parameters, and keep their values.

        ``module.bfloat16()`` would round the values, and ``module.to_empty()`` would drop them.
        """
        for name in ("scale", "history", "cell"):
            old = getattr(self, name)
            device = function(old).device
            # The meta device cannot hold the values, so they stay where they are.
            if device.type != "meta":
                setattr(self, name, old.to(device))

    def move(self, device: torch.device) -> None:
        """Move the tensors to a device."""
        for name in ("scale", "history", "cell"):
            setattr(self, name, getattr(self, name).to(device))

    def read(self, report: Tensor) -> Factors:
        """Return the factors as they are.

        An evaluation reads them so: no op may write to the state, because a program that writes to
        state cannot be exported, and ranks may evaluate on their own, so that no maxima are reduced
        over them.
        """
        if torch.compiler.is_compiling() and is_running():
            return Factors(*DELAYED_READ(self.scale, self.steps, report))
        return Factors(self.scale.clone(), self.steps.clone())

    def begin(self, key: str, module: str, name: str, groups: int, report: Tensor) -> Factors:
        """Return the factors of a call in training; the first call of a step computes new ones.

        ``module`` and ``name`` describe the layer to the recipe, and ``report`` (2,) begins with
        its key.
        """
        options = delayed_options(key)
        length = options.amax_history_len
        step = step_in_force(self.own_step)
        if not torch.compiler.is_compiling() and type(self.steps) is not type(step):
            # The layer has fake state. The step of a region is real, and some fake tensor modes
            # refuse real tensors.
            step = self.steps.fake_mode.from_tensor(step)  # type: ignore[attr-defined]
        if is_outside():
            ADVANCE_STEP(step, True)
        largest = [value for value in largest_values(key, module, name) for _ in range(groups)]
        rows = new_scale = None
        group = active_group() if options.reduce_amax else None
        algorithm, factor = caller_functions(key)
        # Compared as numbers: Dynamo before torch 2.13 cannot trace `!=` of tuples.
        if group is not None or algorithm >= 0 or factor >= 0:
            rows, new_scale = self._by_caller(key, length, largest, group)
        algorithm_name = options.amax_compute_algo if algorithm < 0 else ""
        factors = DELAYED_BEGIN(
            self.scale,
            self.history,
            self.steps,
            self.cell,
            self.cell_step,
            step,
            True,
            length,
            algorithm_name,
            options.margin,
            largest,
            rows,
            new_scale,
            # In compiled code the op finds out whether a checkpoint computes the call again.
            report if torch.compiler.is_compiling() else None,
            not torch.is_grad_enabled(),
        )
        return Factors(*factors)

    @staticmethod
    def without_data(groups: int) -> DelayedCall:
        """Return the fields of a call on the meta device, which reads and writes no state."""
        scales = torch.empty(3 * groups, dtype=torch.float32, device="meta")
        counters = torch.empty(2, dtype=torch.int64, device="meta")
        return DelayedCall(scales, counters, report=counters)

    def _by_caller(
        self, key: str, length: int, largest: list[float], group: str | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the history over all ranks, and the scales by the recipe's own functions.

        The history is (length, 3 * groups). The scales, (3 * groups,), are None where the recipe
        has no function of its own.
        """
        options = delayed_options(key)
        algorithm, factor = caller_functions(key)
        rows = MERGED_HISTORY(self.history, self.steps, self.cell, self.cell_step, length)
        if group is not None:
            rows = torch.cat([max_over(rows[:1], group, "delayed scaling"), rows[1:]])
        if algorithm < 0 and factor < 0:
            return rows, None
        if algorithm >= 0:
            amax = FUNCTIONS[algorithm]()(rows)  # type: ignore[misc]
        else:
            amax = rows.amax(0) if options.amax_compute_algo == "max" else rows[0]
        tops = torch.tensor(largest, dtype=torch.float32, device=amax.device)
        if factor >= 0:
            new = FUNCTIONS[factor]()(amax, self.scale, tops, parse_recipe(key))  # type: ignore[misc]
            return rows, new
        new = (amax.reciprocal() * tops) / 2.0**options.margin
        new = torch.where(new.isinf(), torch.finfo(torch.float32).max, new)
        return rows, torch.where((amax > 0) & amax.isfinite(), new, self.scale)

    def record(self, amaxes: list[Tensor], first: int) -> None:
        """Record maxima of the forward pass, each (1,) or (groups,), in row 0 of the history."""
        RECORD_AMAX(self.history, amaxes, first)

    def merged(self) -> Tensor:
        """Return the history (1024, 3 * groups) with the gradients' maxima, as in checkpoints."""
        return MERGED_HISTORY(
            self.history, self.steps, self.cell, self.cell_step, self.history.shape[0]
        )

    @property
    def amax_history(self) -> Tensor:
        """The history as checkpoints hold it, under its name in a ``state_dict``."""
        return self.merged()

    def load(self, scale: Tensor, history: Tensor) -> None:
        """Load scales (3 * groups,) and a history (rows, 3 * groups) that passed the checks."""
        with torch.no_grad():
            self.scale.copy_(scale)
            own = torch.zeros_like(self.history)
            own[: history.shape[0]].copy_(history)
            self._restart(own)

    @property
    def used(self) -> bool:
        """Whether a step has begun or a checkpoint was loaded. Reading it waits for no device."""
        return bool(int(self.steps[0]))


def check_checkpoint(label: str, scale: Any, history: Any, groups: int) -> None:
    """Check scales and history from a checkpoint before anything is written.

    Raises:
        QTensorError: a tensor of another shape or with other values.
        DtypeError: a tensor of another dtype, or something that is not a tensor.
    """
    fix = "Load a checkpoint of the same layer, or leave out both entries"
    columns = 3 * groups
    for name, tensor in (("scale", scale), ("amax_history", history)):
        right = isinstance(tensor, Tensor) and tensor.dtype == torch.float32
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        check(right, label, f"{name} must be a float32 tensor", got, fix, DtypeError)
        check(not tensor.is_meta, label, f"{name} must have data", "a meta tensor", fix)
    shape = tuple(scale.shape)
    check(shape == (columns,), label, f"scale must have the shape ({columns},)", shape, fix)
    good = bool((scale.isfinite() & (scale > 0)).all())
    check(good, label, "scales must be finite and above 0", scale.tolist()[:12], fix)
    shape = tuple(history.shape)
    right = len(shape) == 2 and 1 <= shape[0] <= MAX_HISTORY and shape[1] == columns
    rule = f"amax_history must have the shape (1 to {MAX_HISTORY} rows, {columns})"
    check(right, label, rule, shape, fix)
    # A maximum of values with NaN or infinity is NaN or infinity; such steps keep the old scale.
    lowest = history.nan_to_num(nan=0.0).amin()
    check(bool(lowest >= 0), label, "maxima must not be negative", float(lowest), fix)


_STATES: weakref.WeakSet[LinearState] = weakref.WeakSet()
"""All states, see ``allocate_traced``."""


@constant_in_graphs
def allocate_traced() -> bool:
    """Allocate the delayed scaling of all layers, when Dynamo traces a call of one.

    Dynamo calls this function while it traces. It has no argument, because Dynamo would guard the
    identity of a layer's state, and one graph often serves many layers. For the same reason it
    allocates the state of all: a layer without its state would be compiled again.
    """
    for state in list(_STATES):
        state.allocate()
    return True


class LinearState:
    """The state of one linear layer.

    Attributes:
        workspace: buffers of the quantized weight, stored at the first microbatch of a step; None
            before.
        workspace_quantizer: canonical string of their quantizer; "" without buffers.
        workspace_shape: (N, K) of the weight that they encode.
        device: device of the delayed scaling: the weight's, or the CPU for a weight on meta.
        groups: number of GEMMs.
        group: name of the process group over which the last step reduced the maxima of delayed
            scaling, or None.
        key: identifies the layer: its postponed weight gradients, its listener for gradients that
            were added to ``main_grad``, and its factors in checkpoints.
        report: (2,) int64 on the CPU: the key, and the number of additions to ``main_grad``.
        draws: (1,) int64 on the CPU: counts the seeds drawn for stochastic rounding.
        site: where ``qtensor.debug`` records the tensors of the layer; None if it does not.
    """

    def __init__(self, device: torch.device | None = None, groups: int = 1) -> None:
        self.workspace: list[Tensor] | None = None
        self.workspace_quantizer = ""
        self.workspace_shape: tuple[int, ...] = ()
        self.groups = groups
        self.group: str | None = None
        self.site: Site | None = None
        self.device = torch.device("cpu") if device is None else device
        self.delayed_state: DelayedState | None = None
        if has_modes():
            # A module that is built under a fake tensor mode has fake state.
            self.delayed_state = DelayedState(self.device, self.groups)
        self.renew_key()
        _STATES.add(self)

    @property
    def delayed(self) -> DelayedState:
        """The state of delayed scaling, allocated at the first access."""
        if torch.compiler.is_dynamo_compiling():
            # Before the attribute is read: Dynamo would guard that it is None.
            allocate_traced()
        elif self.delayed_state is None:
            self.allocate()
        return self.delayed_state  # type: ignore[return-value]

    def allocate(self) -> None:
        """Allocate the state of delayed scaling if there is none."""
        if self.delayed_state is None:
            # The first call may be an evaluation or happen below a fake tensor mode.
            with torch.inference_mode(False), without_modes():
                self.delayed_state = DelayedState(self.device, self.groups)

    def begin(self, key: str, module: str, name: str, training: bool) -> DelayedCall:
        """Return the factors of delayed scaling of a call.

        ``module`` and ``name`` describe the layer to the recipe. Without ``training`` the state
        stays as it is.
        """
        delayed = self.delayed
        is_compiling = torch.compiler.is_compiling()
        runs = [] if is_compiling else active_runs()
        factors = None if is_compiling else recall(runs, self.key)
        begins = training and factors is None and (is_compiling or not in_backward())
        if begins:
            self.group = active_group() if delayed_options(key).reduce_amax else None
            factors = delayed.begin(key, module, name, self.groups, self.report)
        elif factors is None:
            factors = delayed.read(self.report)
        if is_compiling:
            return DelayedCall(*factors, report=self.report)
        keep(runs, self.key, factors)
        return DelayedCall(*factors, delayed.cell, delayed.cell_step)

    def renew_key(self) -> None:
        """Assign a new key and new counters, for a new layer or a copy of a layer."""
        self.key = next(_KEYS)
        self.draws = counter()
        self.report = torch.tensor([self.key, 0], device="cpu")
        LAYERS[self.key] = self
        weakref.finalize(self, drop_postponed, self.key)
        weakref.finalize(self, drop_listener, self.key)
        weakref.finalize(self, forget, self.key)

    def __deepcopy__(self, memo: dict[int, Any]) -> LinearState:
        copy = LinearState(self.device, self.groups)
        memo[id(self)] = copy
        if self.delayed_state is not None:
            copy.delayed_state, copy.group = deepcopy(self.delayed_state, memo), self.group
        return copy

    def __getstate__(self) -> dict[str, Any]:
        return {"delayed": self.delayed_state, "device": self.device, "groups": self.groups}

    def __setstate__(self, state: dict[str, Any]) -> None:
        delayed = state["delayed"]
        # Pickles of earlier versions have only the state of delayed scaling.
        groups = state.get("groups") or len(delayed.scale) // 3
        self.__init__(state.get("device"), groups)  # type: ignore[misc]
        self.delayed_state = delayed

    def move(self, device: torch.device) -> None:
        """Move the state to the device of the weight, unless that is meta, which has no data."""
        if device == self.device or device.type == "meta":
            return
        self.device = device
        if self.delayed_state is not None:
            self.delayed_state.move(device)

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Move delayed scaling to where ``function`` moves parameters; drop the stored weight."""
        if self.delayed_state is not None:
            self.delayed_state.apply(function)
        self.drop_workspace()

    def drop_workspace(self) -> None:
        """Drop the stored quantized weight."""
        self.workspace, self.workspace_quantizer, self.workspace_shape = None, "", ()


class DelayedPaths:
    """Attribute paths for the delayed-scaling entries of a ``state_dict``.

    ``torch.distributed.checkpoint`` resolves each key, for example
    ``_delayed_scaling.weight.scale``, by ``getattr``.
    """

    def __init__(self, states: dict[str, LinearState]) -> None:
        self.__dict__.update({weight: state.delayed for weight, state in states.items()})
