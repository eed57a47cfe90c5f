"""Record the operations of a ``qtensor.ops.Sequential``, and operations that run alone.

While it is recorded, a sequence runs a plan of its own: without the library's fusions and without
handing over quantized tensors, which change no byte, so that every tensor between two operations
exists and is plain. Fusions of the user run as they are; only their first input and their last
output are seen. The steps of the plan hand their tensors to the recorder.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from qtensor.debug.layers import Layer, find_layers
from qtensor.debug.methods import (
    Ragged,
    Site,
    hand_over,
    hand_over_buffers,
    is_idle,
    plan_texts,
    ragged_roles,
    record,
)
from qtensor.functional import grouped_linear, linear
from qtensor.functional.operands import Quantized
from qtensor.ops.fused import fusions_of_users
from qtensor.ops.fuser import OperationFuser, fuse_nothing, run_plan
from qtensor.ops.fusions import fuse
from qtensor.ops.grouped_linear import GroupedLinear
from qtensor.ops.handover import Unrounded
from qtensor.ops.linear import BasicLinear
from qtensor.ops.plan import SequencePlan
from qtensor.storage.base import QuantizedTensorStorage


class Slot:
    """A layer of a recorded sequence. A later recording fills it again, and graphs stay valid."""

    def __init__(self) -> None:
        self.site: Site | None = None
        self.weights: dict[str, Site] = {}


class RecordedFuser(OperationFuser):
    """Runs the operations of ``fuser`` and records those whose slots are filled."""

    def __init__(self, fuser: OperationFuser, layers: Sequence[Layer]) -> None:
        super().__init__(fuser.ops, fuser.fusing)
        self.fuser = fuser
        self.slots: dict[tuple[int, int], Slot] = {}
        """(index of the first, of the last basic operation) -> slot."""
        for layer in layers:
            span = self._span(layer)
            if span:
                self.slots[span[0], span[-1]] = Slot()

    def __call__(self, input: Any, *extra_inputs: Tensor) -> Any:
        """Return the output, followed by the extra outputs that go to the caller."""
        first = next((slot.site for slot in self.slots.values() if slot.site is not None), None)
        if first is None or is_idle(first):
            return self.fuser(input, *extra_inputs)
        return super().__call__(input, *extra_inputs)

    def slot(self, layer: Layer) -> Slot | None:
        """Return the slot of a layer; None if another fuser runs its operations."""
        span = self._span(layer)
        return self.slots[span[0], span[-1]] if span else None

    def _span(self, layer: Layer) -> list[int]:
        return [i for i, op in enumerate(self.ops) if any([op is o for o in layer.operations])]

    def make_plan(self, keys: Sequence[str], first: int) -> SequencePlan:
        """Return a plan whose steps record."""
        ops = self.ops
        steps = fuse_nothing(ops, first)
        if self.fusing:
            steps = fuse(ops, keys, first, fusions_of_users())
        plan = SequencePlan(ops, steps, False, run_plan)
        plan.forward = tuple([s._replace(op=self._recorded(s)) for s in plan.forward])
        plan.backward = tuple([s._replace(op=self._recorded(s)) for s in plan.backward])
        return plan

    def _recorded(self, step: Any) -> Any:
        enters = next((s for (i, _), s in self.slots.items() if i == step.first), None)
        leaves = next((s for (_, i), s in self.slots.items() if i == step.last), None)
        within = next((s for (i, j), s in self.slots.items() if i <= step.first <= j), None)
        kind = RecordedStep
        if isinstance(step.op, BasicLinear):
            kind = RecordedLinear
        elif isinstance(step.op, GroupedLinear):
            kind = RecordedGroups
        return kind(step.op, enters, leaves, within)


class RecordedStep:
    """A step of a plan: calls an operation, and records what enters and what leaves it."""

    def __init__(
        self, op: Any, enters: Slot | None, leaves: Slot | None, within: Slot | None
    ) -> None:
        self.op = op
        self.enters, self.leaves, self.within = enters, leaves, within
        self.label, self.basic_ops = op.label, op.basic_ops
        # A layer with a product records the gradient that the product gets.
        products = (BasicLinear, GroupedLinear)
        self.sees_gradient = leaves is not None and not leaves.weights
        if isinstance(op, products):
            self.sees_gradient = within is not None

    # ---- forward

    def op_forward_compute(self, input: Any, **kwargs: Any) -> Any:
        """Run and record the function of the operation."""
        result = self.op.op_forward_compute(input, **kwargs)
        self._forward(input, result[0], [kwargs], [()])
        return result

    def op_forward_save_ctx(self, *args: Any, **kwargs: Any) -> None:
        """Run the function of the operation."""
        self.op.op_forward_save_ctx(*args, **kwargs)

    def fuser_forward_compute(self, input: Any, **kwargs: Any) -> Any:
        """Run and record the function of the operation."""
        result = self.op.fuser_forward_compute(input, **kwargs)
        self._forward(input, result[0], kwargs["basic_op_kwargs"], kwargs["basic_op_extra_inputs"])
        return result

    def fuser_forward_save_ctx(self, *args: Any, **kwargs: Any) -> None:
        """Run the function of the operation."""
        self.op.fuser_forward_save_ctx(*args, **kwargs)

    def fuser_forward(self, ctxs: Any, input: Any, **kwargs: Any) -> Any:
        """Run and record the function of the operation."""
        result = self.op.fuser_forward(ctxs, input, **kwargs)
        self._forward(input, result[0], kwargs["basic_op_kwargs"], kwargs["basic_op_extra_inputs"])
        return result

    def published(self, returned: Any) -> Any:
        """Run the function of the operation."""
        return self.op.published(returned)

    def published_by_op(self, returned: Any) -> Any:
        """Run the function of the operation."""
        return self.op.published_by_op(returned)

    # ---- backward

    def op_backward(self, ctx: Any, grad_output: Any) -> Any:
        """Run and record the function of the operation."""
        result = self.op.op_backward(ctx, grad_output)
        self._backward([ctx], grad_output, result[0])
        return result

    def fuser_backward(self, ctxs: Any, grad_output: Any, **kwargs: Any) -> Any:
        """Run and record the function of the operation."""
        result = self.op.fuser_backward(ctxs, grad_output, **kwargs)
        self._backward(ctxs, grad_output, result[0])
        return result

    # ---- records

    def _forward(self, input: Any, out: Any, kwargs: Any, extra: Any) -> None:
        """Record the input and the output."""
        if self.enters is not None and self.enters.site is not None:
            site = self.enters.site
            _record(input, "input", site, site.formats or {})
        if self.leaves is not None and self.leaves.site is not None:
            site = self.leaves.site
            _record(out, "output", site, site.formats or {})

    def _backward(self, ctxs: Any, grad_output: Any, grad_input: Any) -> None:
        """Record the gradients of the output and the input."""
        if self.sees_gradient and self.leaves is not None and self.leaves.site is not None:
            site = self.leaves.site
            _record(grad_output, "grad_output", site, site.formats or {}, backward=True)
        if self.enters is not None and self.enters.site is not None:
            site = self.enters.site
            _record(grad_input, "grad_input", site, site.formats or {}, backward=True)


class RecordedLinear(RecordedStep):
    """A product: its operands are recorded with their quantizers."""

    def _forward(self, input: Any, out: Any, kwargs: Any, extra: Any) -> None:
        if self.within is not None and self.within.site is not None:
            site, call = self.within.site, kwargs[0]["call"]
            texts, factors = plan_texts(site, call.plan), [None, None]
            if call.delayed is not None and site.formats is None:
                scales, delayed = call.delayed.scales.clone(), call.plan.delayed
                factors = [scales[i : i + 1] if delayed[i] else None for i in (0, 1)]
            _record(input, "input", site, texts, factors[0])
            record(self.op.weight, "weight", site, texts, factors[1])
        if self.leaves is not None and self.leaves.site is not None:
            site = self.leaves.site
            _record(out, "output", site, site.formats or {})

    def _backward(self, ctxs: Any, grad_output: Any, grad_input: Any) -> None:
        if self.within is not None and self.within.site is not None:
            site, ctx = self.within.site, ctxs[0]
            args = linear.restored(ctx.args, ctx.saved_tensors, None)
            scale = None
            if args.delayed is not None and args.plan.delayed[2] and site.formats is None:
                scale = args.delayed.scales[2:3]
            texts = plan_texts(site, args.plan)
            _record(grad_output, "grad_output", site, texts, scale, backward=True)
            _record(grad_input, "grad_input", site, texts, backward=True)


class RecordedGroups(RecordedStep):
    """Products of groups: each group is recorded as a layer of its own."""

    def _forward(self, input: Any, out: Any, kwargs: Any, extra: Any) -> None:
        if self.within is None or self.within.site is None:
            return
        site, call = self.within.site, kwargs[0]["call"]
        splits = self.op._splits(input, extra[0][0])
        texts = plan_texts(site, call.plan)
        call = with_splits(call, splits)
        ragged = ragged_roles(site, call)
        _record(input, "input", site, texts, ragged[0])
        for i, own in enumerate(self.within.weights.values()):
            scales = ragged[1].scales
            scale = None if scales is None else scales[i : i + 1]
            record(call.weights[i], "weight", own, texts, scale)
        _record(out, "output", site, texts, Ragged(splits, None))

    def _backward(self, ctxs: Any, grad_output: Any, grad_input: Any) -> None:
        if self.within is None or self.within.site is None:
            return
        site, ctx = self.within.site, ctxs[0]
        args = grouped_linear.restored(ctx.args, ctx.saved_tensors, None)
        texts = plan_texts(site, args.plan)
        _record(grad_output, "grad_output", site, texts, ragged_roles(site, args)[2], backward=True)
        _record(grad_input, "grad_input", site, texts, Ragged(args.splits, None), backward=True)


def with_splits(call: Any, splits: Any) -> Any:
    """Return the arguments of a grouped call with the sizes of the groups."""
    copy = grouped_linear.with_tensors(call, call.inp, call.weights, call.biases)
    copy.splits = splits
    return copy


def _record(
    x: Any,
    role: str,
    site: Site,
    texts: Mapping[str, str],
    scale: Tensor | Ragged | None = None,
    backward: bool = False,
) -> None:
    """Hand a tensor, or a value that operations pass to each other, to the recorder."""
    if x is None or role not in site.roles:
        return
    if isinstance(x, Unrounded):
        x = x.sums
    if isinstance(x, Quantized):
        hand_over_buffers(x.buffers, (x.canonical, x.shape), role, site, backward)
    elif isinstance(x, QuantizedTensorStorage):
        stored = x._quantizer.canonical, x.shape
        hand_over_buffers(x.buffers(), stored, role, site, backward)
    else:
        hand_over(x.detach(), role, texts.get(role, ""), site, scale, backward)


# ---- install


def replace_fusers(owner: Any) -> tuple[list[RecordedFuser], Callable[[], None]]:
    """Make a module run its operations by fusers that record.

    Returns:
        The fusers, whose slots are still empty, and a function that undoes it.
    """
    own = owner.__dict__
    if "_groups" not in own:
        return _replace_forward(owner)
    before = own["_groups"], own["_only"]
    layers = [layer for layer in find_layers(owner) if layer.owner is owner]
    groups = tuple([_twin(g, layers) if isinstance(g, OperationFuser) else g for g in before[0]])
    fusers = [g for g in groups if isinstance(g, RecordedFuser)]
    own["_groups"], own["_only"] = groups, groups[0] if before[1] is not None else None

    def restore() -> None:
        for fuser in fusers:
            fuser.slots = {key: _emptied(slot) for key, slot in fuser.slots.items()}
        if own["_groups"] is groups:  # the user may have changed the sequence
            own["_groups"], own["_only"] = before

    return fusers, restore


def _replace_forward(operation: Any) -> tuple[list[RecordedFuser], Callable[[], None]]:
    """Make an operation that is called alone run by a fuser that records, as ``replace_fusers``."""
    own = operation.__dict__
    if "_alone" not in own:
        own["_alone"] = _twin(OperationFuser([operation]), list(find_layers(operation)))
    before, fuser = own.get("forward"), own["_alone"]

    def forward(self: Any, input: Any, *extra_inputs: Tensor) -> Any:
        return self._alone(input, *extra_inputs)

    own["forward"] = types.MethodType(forward, operation)

    def restore() -> None:
        fuser.slots = {key: _emptied(slot) for key, slot in fuser.slots.items()}
        own.pop("forward")
        own.pop("_alone")
        if before is not None:
            own["forward"] = before

    return [fuser], restore


def _twin(fuser: OperationFuser, layers: Sequence[Layer]) -> RecordedFuser:
    if fuser.recorded is None:
        fuser.recorded = RecordedFuser(fuser, layers)
    twin: RecordedFuser = fuser.recorded
    return twin


def _emptied(slot: Slot) -> Slot:
    slot.site, slot.weights = None, {}
    return slot
