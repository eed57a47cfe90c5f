"""The factors of delayed scaling for layers that a checkpoint computes again.

A checkpoint runs a function in the forward pass, and again in the backward pass. By then the state
of its layers may have moved on: a later step has begun, or the model has another mode. The second
run must read the factors of the first one, or the gradients are those of another function.
Therefore ``keep`` stores the factors of each call that may be computed again, and ``recall`` finds
them in the second run. How it finds them depends on the kind of the checkpoint:

- ``qtensor.checkpoint`` notes the calls of a function on a ``Tape``, and plays the tape back.
- ``torch.utils.checkpoint`` with ``use_reentrant=False`` hooks the tensors that autograd saves. The
  hooks of both runs belong to one object, which gets a tape.
- All other checkpoints, ``use_reentrant=True`` among them, are functions of autograd. All calls in
  the forward of such a function are noted. torch numbers the nodes of its graph: the first calls
  that are newer than the node whose backward calls the layer are those of its forward.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from types import FunctionType
from typing import NamedTuple, NoReturn, Self

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils import checkpoint

from qtensor.core.errors import fail
from qtensor.core.torch_state import (
    backward_id,
    backward_node,
    forward_mode_enabled,
    has_saved_tensor_hooks,
    in_backward,
    saved_tensor_hooks,
    sequence_number,
)

MAX_CALLS, MAX_STEPS = 4096, 64
"""How many calls in the forward of functions of autograd are noted for a layer, of how many steps.

The factors of a step take about ten times as much memory as a call.
"""


class Factors(NamedTuple):
    """The results of the op ``delayed_begin_`` for one call of a layer."""

    scales: Tensor
    ticket: Tensor


class Tape:
    """The factors that layers read in the first run of a function, in order, by key of the layer.

    Attributes:
        calls: the factors.
        rerun: identifies the run that plays the tape back, or None.
        places: the number of calls that this run has made, by key of the layer.
    """

    __slots__ = ("__weakref__", "calls", "places", "rerun")

    def __init__(self) -> None:
        self.calls: dict[int, list[Factors]] = {}
        self.rerun: object = None
        self.places: dict[int, int] = {}

    def rewind(self, rerun: object) -> None:
        """Go back to the first call, unless ``rerun`` is the run that plays the tape already."""
        if rerun is not self.rerun:
            self.rerun, self.places = rerun, {}

    def play(self, layer: int) -> Factors:
        """Return the factors of the next call of a layer."""
        place = self.places.get(layer, 0)
        self.places[layer] = place + 1
        calls = self.calls.get(layer, ())
        if place >= len(calls):
            _refuse(
                "the second run of a checkpointed function must call the layers of the first run",
                f"call {place + 1} of a layer that the first run called {len(calls)} times",
            )
        return calls[place]


Run = tuple[Tape, bool]
"""A tape and whether it is played back; False if it is written."""


class _Here(threading.local):
    def __init__(self) -> None:
        self.runs: list[Run] = []


_HERE = _Here()
"""The runs of ``qtensor.checkpoint`` in this thread, the innermost last."""


class running:
    """Note the calls of layers on a tape, or play the tape back."""

    def __init__(self, tape: Tape, again: bool) -> None:
        self.run = (tape, again)

    def __enter__(self) -> Self:
        tape, again = self.run
        if again:
            tape.rewind(object())
        _HERE.runs.append(self.run)
        return self

    def __exit__(self, *exc: object) -> None:
        _HERE.runs.pop()


def is_running() -> bool:
    """Return whether a run of ``qtensor.checkpoint`` is active in this thread."""
    return bool(_HERE.runs)


def in_forward_of_function() -> bool:
    """Return whether this code runs in the forward of a function of autograd.

    Gradients are off there, as in an evaluation, but backward may compute them later. Unlike
    ``torch.no_grad()``, such a forward also turns off forward-mode differentiation.
    """
    return not (
        torch.is_grad_enabled() or forward_mode_enabled() or torch.is_inference_mode_enabled()
    )


_OF_TORCH: weakref.WeakKeyDictionary[checkpoint._CheckpointFrame, Tape]
_OF_TORCH = weakref.WeakKeyDictionary()
"""The tapes of ``torch.utils.checkpoint``, by the object to which the hooks of a call belong."""


def _run_of(pack: FunctionType) -> Run | None:
    """Return the run of torch's checkpoint to which a hook belongs; None if it is another hook.

    The hook of the first run holds the object of the call, that of the second run a weak reference.
    """
    function = getattr(pack, "__wrapped__", pack)
    if getattr(function, "__module__", "") != checkpoint.__name__:
        return None
    for cell in function.__closure__ or ():
        held = cell.cell_contents
        again = isinstance(held, weakref.ref)
        frame = held() if again else held
        if isinstance(frame, checkpoint._CheckpointFrame):
            tape = _OF_TORCH.get(frame)
            if tape is None:
                tape = _OF_TORCH[frame] = Tape()
            if again:
                tape.rewind(pack)
            return tape, again
    return None


def may_run_again() -> bool:
    """Return whether a checkpoint may compute the current call again, or is doing so."""
    return in_backward() or is_running() or has_saved_tensor_hooks()


def active_runs() -> list[Run]:
    """Return the runs of checkpoints in which this code is called."""
    if not has_saved_tensor_hooks():
        return _HERE.runs
    found = [_run_of(pack) for pack, _ in saved_tensor_hooks()]
    return _HERE.runs + [run for run in found if run is not None]


class _Noted(NamedTuple):
    """A call in the forward of a function of autograd.

    Attributes:
        thread: the thread of the call; each thread numbers its nodes.
        number: of the next node of the graph.
        factors: of the call.
    """

    thread: int
    number: int
    factors: Factors


class _Notes:
    """The newest calls of a layer in the forward of functions of autograd.

    Attributes:
        calls: the calls, the oldest first.
        steps: their factors. Calls of one step share them.
        ticket: that of the newest call.
        lost: number of the newest call that is forgotten.
        rerun: (backward pass, number of the node) of the last run that asked.
        place: the number of calls that this run has made.
    """

    def __init__(self) -> None:
        self.calls: deque[_Noted] = deque()
        self.steps: deque[Factors] = deque()
        self.ticket: list[int] = []
        self.lost = -1
        self.rerun = (-1, -1)
        self.place = 0

    def add(self, factors: Factors) -> None:
        """Note a call, and forget the oldest ones if there are too many."""
        ticket = factors.ticket.tolist()
        if ticket != self.ticket:
            self.steps.append(factors)
            self.ticket = ticket
        number = sequence_number()
        self.calls.append(_Noted(threading.get_ident(), number, self.steps[-1]))
        while len(self.calls) > MAX_CALLS or len(self.steps) > MAX_STEPS:
            self.lost = self.calls.popleft().number
            if self.calls[0].factors is not self.steps[0]:
                self.steps.popleft()

    def since(self, node: BackwardCFunction) -> Factors | None:
        """Return the factors of the next call after a node was made; None without such a call."""
        number = node._sequence_nr()
        rerun = (backward_id(), number)
        if rerun != self.rerun:
            self.rerun, self.place = rerun, 0
        later: dict[int, list[Factors]] = {}
        for call in self.calls:
            if call.number > number:
                later.setdefault(call.thread, []).append(call.factors)
        found = [calls[self.place] for calls in later.values() if self.place < len(calls)]
        self.place += 1
        is_lost = self.lost > number
        if is_lost or any([factors is not found[0] for factors in found]):
            limits = f"more than {MAX_CALLS} calls or {MAX_STEPS} steps since then"
            got = limits if is_lost else "calls in several threads"
            _refuse("the first run of a checkpointed function must be known", got)
        return found[0] if found else None


_NOTES: dict[int, _Notes] = {}
"""Calls in the forward of functions of autograd, by key of the layer."""


def forget(layer: int) -> None:
    """Forget the calls of a layer that is gone."""
    _NOTES.pop(layer, None)


def recall(runs: list[Run], layer: int) -> Factors | None:
    """Return the factors of the call that a checkpoint computes again; None for a new call.

    Args:
        runs: the result of ``active_runs``.
        layer: key of the layer.

    Raises:
        QTensorError: the first run did not call the layer, or it is not known which one it was.
    """
    for tape, again in runs:
        if again:
            return tape.play(layer)
    notes = _NOTES.get(layer)
    if notes is None or not in_backward():
        return None
    node = backward_node()
    # A compiled function computes its own part again, from state that torch has saved for it.
    if not isinstance(node, BackwardCFunction) or node.name() == "CompiledFunctionBackward":
        return None
    return notes.since(node)


def keep(runs: list[Run], layer: int, factors: Factors, copy: bool = False) -> None:
    """Keep the factors of a call that a checkpoint may compute again.

    Args:
        runs: the result of ``active_runs``.
        layer: key of the layer.
        factors: of the call.
        copy: copy them, because a compiled program may use their memory again.
    """
    # Fake tensors have no step.
    is_noted = in_forward_of_function() and type(factors.ticket) is Tensor
    tapes = [tape for tape, again in runs if not again]
    if copy and (is_noted or tapes):
        factors = Factors(factors.scales.clone(), factors.ticket.clone())
    for tape in tapes:
        tape.calls.setdefault(layer, []).append(factors)
    if is_noted:
        _NOTES.setdefault(layer, _Notes()).add(factors)


def recall_or_keep(
    layer: int, scales: Tensor, ticket: Tensor, begin: Callable[[], tuple[Tensor, Tensor]]
) -> None:
    """Write the factors of a call of compiled code, those of ``begin`` if it is a new call.

    Args:
        layer: key of the layer.
        scales: is written.
        ticket: is written.
        begin: returns new scales and a new ticket.
    """
    runs = active_runs()
    found = recall(runs, layer)
    factors = Factors(*begin()) if found is None else found
    scales.copy_(factors.scales)
    ticket.copy_(factors.ticket)
    keep(runs, layer, Factors(scales, ticket) if found is None else found, copy=found is None)


def _refuse(rule: str, got: str) -> NoReturn:
    fail("delayed scaling in a checkpoint", rule, got, "Use qtensor.checkpoint")
