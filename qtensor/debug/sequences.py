"""Record the operations of a ``qtensor.ops.Sequential``, and operations that run alone.

While it is recorded, a sequence runs a plan of its own: without the library's fusions and without
handing over quantized tensors, which change no byte. Every tensor between two operations then
exists and is plain. Fusions of the user run as they are; only their first input and their last
output are seen. The steps of the plan hand their tensors to the recorder.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from qtensor.debug.layer_site import LayerSite
from qtensor.debug.layers import Layer, find_layers
from qtensor.functional.grouped.args import GroupedFwdArgs
from qtensor.functional.linear.saved import with_tensors
from qtensor.ops.fused import fusions_of_users
from qtensor.ops.fuser import OperationFuser, fuse_nothing, run_plan
from qtensor.ops.fusions import fuse
from qtensor.ops.grouped_linear import GroupedLinear
from qtensor.ops.handover import Unrounded, Value
from qtensor.ops.linear import BasicLinear, LinearCall
from qtensor.ops.sequence_plan import BackwardStep, ForwardStep, SequencePlan, WatchedStep
from qtensor.ops.sequential import Sequential


class Slot:
    """A layer of a recorded sequence. A later recording fills it again, and graphs stay valid."""

    def __init__(self, layer: Layer) -> None:
        self.site: LayerSite | None = None
        self.has_product = bool(layer.weights)

    def take(self, role: str, x: Value | None) -> None:
        """Record a tensor, or a value that operations pass to each other."""
        if self.site is not None and x is not None:
            self.site.take(role, x.sums if isinstance(x, Unrounded) else x)


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
                self.slots[span[0], span[-1]] = Slot(layer)

    def __call__(self, input: Tensor, *extra_inputs: Tensor) -> Any:
        """Return the output, followed by the extra outputs that go to the caller."""
        first = next((slot.site for slot in self.slots.values() if slot.site is not None), None)
        if first is None or first.is_idle():
            return self.fuser(input, *extra_inputs)
        return super().__call__(input, *extra_inputs)

    def slot(self, layer: Layer) -> Slot | None:
        """Return the slot of a layer; None if another fuser runs its operations."""
        span = self._span(layer)
        return self.slots[span[0], span[-1]] if span else None

    def empty(self) -> None:
        """Empty all slots."""
        for slot in self.slots.values():
            slot.site = None

    def _span(self, layer: Layer) -> list[int]:
        return [i for i, op in enumerate(self.ops) if any([op is o for o in layer.operations])]

    def make_plan(self, keys: Sequence[str], first: int) -> SequencePlan:
        """Return a plan whose steps record."""
        steps = fuse_nothing(self.ops, first)
        if self.fusing:
            steps = fuse(self.ops, keys, first, fusions_of_users())
        return SequencePlan(self.ops, steps, False, run_plan).watched(self._recorded)

    def _recorded(self, step: ForwardStep | BackwardStep) -> RecordedStep:
        enters = next((s for (i, _), s in self.slots.items() if i == step.first), None)
        leaves = next((s for (_, i), s in self.slots.items() if i == step.last), None)
        within = next((s for (i, j), s in self.slots.items() if i <= step.first <= j), None)
        if isinstance(step.op, GroupedLinear):
            # It passes on its output too, because each group is a layer of its own.
            return RecordedStep(step.op, None, None, within)
        if isinstance(step.op, BasicLinear):
            return RecordedStep(step.op, None, leaves, within)
        return RecordedStep(step.op, enters, leaves, None)


class RecordedStep(WatchedStep):
    """A step of a plan: calls an operation, and records what enters and what leaves it.

    It records the input of ``enters`` and the output of ``leaves``; ``product`` is the layer of a
    product, which tells of its operands itself.
    """

    def __init__(
        self, op: Any, enters: Slot | None, leaves: Slot | None, product: Slot | None
    ) -> None:
        super().__init__(op)
        self.enters, self.leaves, self.product = enters, leaves, product

    def fuser_forward_compute(self, input: Any, *, basic_op_kwargs: Any, **kwargs: Any) -> Any:
        """Run and record the function of the operation."""
        if self.product is not None:
            basic_op_kwargs = [{"call": telling(basic_op_kwargs[0]["call"], self.product.site)}]
        result = self.op.fuser_forward_compute(input, basic_op_kwargs=basic_op_kwargs, **kwargs)
        self._forward(input, result[0])
        return result

    def fuser_forward(self, ctxs: Any, input: Any, **kwargs: Any) -> Any:
        """Run and record the function of the operation."""
        result = self.op.fuser_forward(ctxs, input, **kwargs)
        self._forward(input, result[0])
        return result

    def fuser_backward(self, ctxs: Any, grad_output: Any, **kwargs: Any) -> Any:
        """Run and record the function of the operation."""
        result = self.op.fuser_backward(ctxs, grad_output, **kwargs)
        # A layer with a product records the gradient that the product gets.
        if self.leaves is not None and not self.leaves.has_product:
            self.leaves.take("grad_output", grad_output)
        if self.enters is not None:
            self.enters.take("grad_input", result[0])
        return result

    def _forward(self, input: Value, out: Value) -> None:
        if self.enters is not None:
            self.enters.take("input", input)
        if self.leaves is not None:
            self.leaves.take("output", out)


def telling(call: LinearCall | GroupedFwdArgs, site: LayerSite | None) -> Any:
    """Return the arguments of a product that tells a site of its tensors."""
    if isinstance(call, LinearCall):
        return call._replace(site=site)
    copy = with_tensors(call, call.inp, call.weights, call.biases)
    copy.site = site
    return copy


# ---- install


def replace_fusers(owner: nn.Module) -> tuple[list[RecordedFuser], Callable[[], None]]:
    """Make a module run its operations by fusers that record; their slots are still empty.

    The second value is a function that undoes it.
    """
    if not isinstance(owner, Sequential):
        return _replace_forward(owner)
    layers = [layer for layer in find_layers(owner) if layer.owner is owner]
    put_back = owner.replace_groups(
        lambda group: _twin(group, layers) if isinstance(group, OperationFuser) else group
    )
    fusers = [group for group in owner.groups if isinstance(group, RecordedFuser)]

    def restore() -> None:
        for fuser in fusers:
            fuser.empty()
        put_back()

    return fusers, restore


def _replace_forward(operation: nn.Module) -> tuple[list[RecordedFuser], Callable[[], None]]:
    """Make an operation that is called alone run by a fuser that records, as ``replace_fusers``."""
    own = operation.__dict__
    if "_alone" not in own:
        own["_alone"] = _twin(OperationFuser([operation]), list(find_layers(operation)))
    before, fuser = own.get("forward"), own["_alone"]

    def forward(self: Any, input: Tensor, *extra_inputs: Tensor) -> Any:
        return self._alone(input, *extra_inputs)

    own["forward"] = types.MethodType(forward, operation)

    def restore() -> None:
        fuser.empty()
        own.pop("forward")
        own.pop("_alone")
        if before is not None:
            own["forward"] = before

    return [fuser], restore


def _twin(fuser: OperationFuser, layers: Sequence[Layer]) -> RecordedFuser:
    twin = fuser.recorded
    if not isinstance(twin, RecordedFuser):
        fuser.recorded = twin = RecordedFuser(fuser, layers)
    return twin
