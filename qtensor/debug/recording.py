"""Record the tensors of a model's layers while a ``with`` block runs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qtensor import api
from qtensor.core.errors import ArgumentTypeError, QTensorError, check, fail
from qtensor.core.texts import some
from qtensor.debug.layer_site import LayerSite, joined
from qtensor.debug.layers import Layer, clean_name, find_layers, is_conv1d, unwrapped
from qtensor.debug.log import ROLES, Entry, Log, Record, known_role
from qtensor.debug.methods import Counted, Recorded, gradient_hooks, replace_forward, set_sites
from qtensor.debug.op import SINKS, Values
from qtensor.debug.sequences import RecordedFuser, replace_fusers
from qtensor.debug.statistics import Columns, measure, totals_of
from qtensor.quantizers import Quantizer
from qtensor.storage.base import QuantizedTensorStorage

OP = "debug.record"
FORMAT_ROLES = ("input", "weight", "grad_output")
"""The operands of GEMMs, which one format applies to."""
_PENDING = 4096
"""Statistics that wait on their device, at most; reading them waits for the device."""
_NUMBERS = itertools.count(1)

Formats = str | Quantizer | Mapping[str, str | Quantizer | None]


def record(
    model: nn.Module,
    layers: str | Iterable[str] = "*",
    *,
    roles: Iterable[str] = ROLES,
    format: Formats | None = None,
    reference: nn.Module | Mapping[str, Tensor] | None = None,
    every: int = 1,
    count: str = "forward",
    jsonl: str | PathLike[str] | None = None,
    keep: int = 100_000,
) -> Recorder:
    """Return a context that records statistics of the tensors of a model's layers.

    ``with qtensor.debug.record(model) as log:`` records all linear layers, qtensor's modules and
    modules with quantized parameters, in eager and compiled code. No byte of the results changes.
    Afterwards the model is as before.

    Args:
        model: the model; it may be compiled, or wrapped by FSDP or DDP.
        layers: patterns of names, such as ``"*.mlp.*"``. Names are those of ``named_modules()``
            without the parts that wrappers add.
        roles: which of input, weight, output, grad_output, grad_input and grad_weight to record.
        format: compare with this format instead of the quantizers of the layers, for a model that
            is not quantized yet. A format id or a quantizer applies to input, weight and
            grad_output; a mapping has roles as its keys.
        reference: the high-precision model, or its state dict, for the SQNR of weights that are
            stored quantized.
        every: record the steps 0, every, 2 * every, ...
        count: "forward" begins a step at every forward call of the model; "manual" ends a step at
            every ``log.step()``, for example with several microbatches in one step.
        jsonl: path of a file to which each step adds its records, one JSON object a line.
        keep: the largest number of records in memory; older ones are removed.

    Returns:
        The context. Entering it gives the ``Log``.

    Raises:
        QTensorError: a pattern matches no layer, or a role, format or number is not legal.
    """
    rule = "the model must be a torch.nn.Module"
    fix = "Pass the module, not a function or its state"
    got = type(model).__name__
    check(isinstance(model, nn.Module), OP, rule, got, fix, ArgumentTypeError)
    for name, number in (("every", every), ("keep", keep)):
        good = isinstance(number, int) and not isinstance(number, bool) and number > 0
        check(good, OP, f"{name} must be a positive integer", repr(number), "Fix it")
    rule = 'count must be "forward" or "manual"'
    check(count in ("forward", "manual"), OP, rule, repr(count), "Choose one")
    root = unwrapped(model)
    plan = _Plan(
        tuple(known_role(OP, role) for role in ([roles] if isinstance(roles, str) else roles)),
        _formats(format),
        reference,
        every,
        count == "forward",
        jsonl,
    )
    chosen = choose_layers(root, layers)
    return Recorder(root, chosen, plan, keep)


class _Plan(NamedTuple):
    """The options of a recording, checked."""

    roles: tuple[str, ...]
    formats: dict[str, str] | None
    reference: nn.Module | Mapping[str, Tensor] | None
    every: int
    count_forward: bool
    jsonl: str | PathLike[str] | None


def _formats(format: Formats | None) -> dict[str, str] | None:
    """Return role -> canonical text, or None for the quantizers of the layers."""
    if format is None:
        return None
    named = format if isinstance(format, Mapping) else dict.fromkeys(FORMAT_ROLES, format)
    texts = {}
    for role, fmt in named.items():
        quantizer = None if fmt is None else api.quantizer(fmt)
        if quantizer is not None and quantizer.needs_scale:
            rule = "a format to try must need no factor from earlier steps"
            fail(OP, rule, quantizer.canonical, 'Try "fp8", which computes its own factor')
        texts[known_role(OP, role)] = "" if quantizer is None else quantizer.canonical
    return texts


def choose_layers(model: nn.Module, patterns: str | Iterable[str], op: str = OP) -> list[Layer]:
    """Return the layers of a model whose names match one of the patterns."""
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
    found = list(find_layers(model))
    rule = "the model must have a linear layer, a module of qtensor or a quantized parameter"
    check(bool(found), op, rule, f"{type(model).__name__} without one", "Pass another model")
    chosen: dict[int, Layer] = {}
    for pattern in wanted:
        matching = [layer for layer in found if layer.matches(pattern)]
        if not matching:
            names = [layer.name or "(the model itself)" for layer in found]
            rule = "each pattern of layers must match a name"
            fail(op, rule, repr(pattern), f"The layers are: {some(names)}")
        chosen.update({id(layer.module): layer for layer in matching})
    return [layer for layer in found if id(layer.module) in chosen]


class _Pending(NamedTuple):
    """Statistics that wait on their device."""

    site: int
    role: str
    vector: Tensor
    quantizer: str
    shape: tuple[int, ...]
    note: str


class Recorder:
    """The context of ``record``; the ops call it for each tensor."""

    def __init__(self, root: nn.Module, layers: Sequence[Layer], plan: _Plan, keep: int) -> None:
        self._root, self._layers, self._plan = root, layers, plan
        self._labels = [label for layer in layers for label in layer.labels()]
        self.log = Log(self._labels, keep)
        self._number = next(_NUMBERS)
        self._step, self._forwards = 0, 0
        self._lock = threading.RLock()
        self._pending: list[_Pending] = []
        self._entries: dict[tuple[int, str], Entry] = {}
        self._columns: dict[tuple[int, str], Columns] = {}
        self._received = 0
        self._weights: set[int] = set()
        self._references: dict[int, Tensor] = {}
        self._undo = ExitStack()
        self._used = False

    # ---- the context

    def __enter__(self) -> Log:
        fix = "Call qtensor.debug.record again"
        check(not self._used, OP, "a recording is entered once", "a closed recording", fix)
        self._used = True
        lines = None
        if self._plan.jsonl is not None:
            lines = open(self._plan.jsonl, "w", encoding="utf-8")
        with ExitStack() as undo:
            self.log.attach(self._open_records, self._advance, lines)
            undo.callback(self.log.detach)
            self._install(undo)
            SINKS[self._number] = self
            undo.callback(SINKS.pop, self._number, None)
            self._undo = undo.pop_all()
        return self.log

    def __exit__(self, *_: object) -> None:
        SINKS.pop(self._number, None)
        try:
            self._finish_step()
        finally:
            self._references.clear()
            self._undo.close()

    def _install(self, undo: ExitStack) -> None:
        """Give each layer its site; ``undo`` takes them back."""
        plan, numbers = self._plan, itertools.count()
        tokens = self._tensor(self._number), self._tensor(self._number)
        fusers: dict[int, list[RecordedFuser]] = {}
        state = self._reference_state()
        for layer in self._layers:
            sites = {
                label: LayerSite(self._tensor(next(numbers)), *tokens, plan.roles, plan.formats)
                for label in layer.labels()
            }
            weights = {weight: sites[layer.label(weight)] for weight in layer.weights}
            if layer.kind == "torch":
                recorded = Recorded(sites[layer.name], weights, is_conv1d(layer.module))
                undo.callback(replace_forward(layer.module, recorded))
            elif layer.kind == "module":
                undo.callback(set_sites(layer.module, weights))
            elif layer.owner is not None:
                if id(layer.owner) not in fusers:
                    fusers[id(layer.owner)], restore = replace_fusers(layer.owner)
                    undo.callback(restore)
                own = joined(weights) if weights else sites[layer.name]
                for slot in filter(None, [f.slot(layer) for f in fusers[id(layer.owner)]]):
                    slot.site = own
            for weight, site in weights.items():
                self._watch_weight(layer, weight, site, state, undo)
        if plan.count_forward:
            counted = Counted(tokens[0], None)
            undo.callback(replace_forward(self._root, counted))

    @staticmethod
    def _tensor(number: int) -> Tensor:
        return torch.tensor([number], dtype=torch.int64, device="cpu")

    def _watch_weight(
        self, layer: Layer, weight: str, site: LayerSite, state: Mapping[str, Any], undo: ExitStack
    ) -> None:
        """Record the gradient of a weight, and find the values that it was quantized from."""
        parameter = getattr(layer.module, weight)
        if isinstance(parameter, QuantizedTensorStorage):
            name = f"{layer.name}.{weight}" if layer.name else weight
            high = state.get(name, getattr(parameter, "_high_precision_init_val", None))
            if isinstance(high, Tensor) and high.shape == parameter.shape:
                high = high.detach()
                self._references[int(site.ticket)] = high.t() if is_conv1d(layer.module) else high
        leaf = isinstance(parameter, Tensor) and parameter.is_leaf and parameter.requires_grad
        if leaf and "grad_weight" in self._plan.roles:
            for each in gradient_hooks(parameter, site, is_conv1d(layer.module)):
                undo.callback(each.remove)

    def _reference_state(self) -> Mapping[str, Any]:
        reference = self._plan.reference
        if reference is None:
            return {}
        if isinstance(reference, nn.Module):
            reference = dict(unwrapped(reference).named_parameters())
        state = {clean_name(name): value for name, value in reference.items()}
        for layer in self._layers:
            for weight in layer.weights:
                name = f"{layer.name}.{weight}" if layer.name else weight
                parameter = getattr(layer.module, weight)
                if isinstance(parameter, QuantizedTensorStorage):
                    shape = tuple(state[name].shape) if name in state else "no such tensor"
                    rule = f"the reference must hold {name} of shape {tuple(parameter.shape)}"
                    good = shape == tuple(parameter.shape)
                    check(good, OP, rule, shape, "Pass the model from before the quantization")
        return state

    # ---- what the ops call

    @property
    def active(self) -> bool:
        """Whether this step is recorded."""
        return self._step % self._plan.every == 0

    def begin_forward(self) -> None:
        """Begin a step, unless it is the first forward pass."""
        with self._lock:
            if self._forwards:
                self._finish_step()
                self._step += 1
            self._forwards += 1

    def wants(self, site: int, role: str) -> bool:
        """Return whether a tensor is recorded; a weight is recorded once a step."""
        if not self.active or role not in self._plan.roles:
            return False
        return role != "weight" or site not in self._weights

    def receive(
        self, site: int, role: str, values: Values, quantizer: str, scale: Tensor | None
    ) -> None:
        """Take a tensor: compute its statistics on its device, without waiting for it."""
        found = api.parsed(quantizer) if quantizer else None
        if found is not None and found.rowwise and found.columnwise:
            found = found.with_usage(columnwise=False)
        reference = self._references.get(site) if role == "weight" else None
        text, note = "" if found is None else found.canonical, ""
        if isinstance(values, QuantizedTensorStorage):
            text = values._quantizer.canonical
            if reference is not None:
                reference = reference.to(values.device)
        before = self._columns.get((site, role))
        try:
            vector, columns = measure(values, found, scale, reference, before)
        except QTensorError as error:
            vector, columns = measure(values, before=before)
            text, note = "", str(error)
        shape = tuple(values.shape)
        with self._lock:
            if role == "weight":
                self._weights.add(site)
            else:
                self._columns[site, role] = columns
            self._pending.append(_Pending(site, role, vector, text, shape, note))
            if len(self._pending) >= _PENDING:
                self._drain()

    # ---- steps

    def _advance(self) -> None:
        rule = 'log.step() ends the steps of a recording with count="manual"'
        fix = 'Pass count="manual", or leave out log.step()'
        check(not self._plan.count_forward, "log.step", rule, 'count="forward"', fix)
        with self._lock:
            self._finish_step()
            self._step += 1

    def _drain(self) -> None:
        """Read the pending statistics, and add each to the entry of its layer."""
        pending, self._pending = self._pending, []
        for p, totals in zip(pending, totals_of([p.vector for p in pending]), strict=True):
            old = self._entries.get((p.site, p.role))
            at = self._received if totals.nan or totals.inf else -1
            entry = Entry(totals, p.quantizer, p.shape, p.note, at)
            self._entries[p.site, p.role] = entry if old is None else old.plus(entry)
            self._received += 1

    def _open_records(self) -> list[Record]:
        """Return the records of the current step."""
        with self._lock:
            self._drain()
            return [
                entry.record(self._step, self._labels[site], role)
                for (site, role), entry in self._entries.items()
            ]

    def _finish_step(self) -> None:
        with self._lock:
            self.log.append(self._open_records())
            self._entries, self._columns, self._received = {}, {}, 0
            self._weights = set()
