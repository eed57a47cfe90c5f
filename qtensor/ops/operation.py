"""The base classes of operations: steps of a block with their own forward and backward.

A forward has one of two forms. **Split**: ``op_forward_compute`` computes without side effects, and
``op_forward_save_ctx`` saves what backward needs; it gets the inputs, the keyword arguments and the
data that compute returned. **Single**: ``op_forward`` does both. Traced code runs the split form; a
single form runs outside the graph. The ``fuser_*`` functions are the same for operations with extra
inputs or outputs, and for fused operations.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from qtensor.core.errors import ArgumentTypeError, UnsupportedError, fail
from qtensor.ops.handover import Request
from qtensor.recipes import compile_constant


class OperationContext:
    """The state of one operation between its forward and its backward.

    Operations may set any attributes to plain values. Tensors go through ``save_for_backward``.

    Attributes:
        input_requires_grad: True if a gradient of the operation's input is needed.
        grad_output_request: the format that the operation requested for its gradient, None for a
            plain tensor.
        grad_input_request: the format that the previous operation requests for its gradient, None
            for a plain tensor. Set in backward.
        saved_tensors: the tensors that were saved. Set in backward.
    """

    # Class attributes as defaults: a call makes a context for every operation.
    input_requires_grad: bool = True
    grad_output_request: Request | None = None
    grad_input_request: Request | None = None
    saved_tensors: tuple[Tensor | None, ...] = ()
    to_save: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Save tensors for backward; a second call replaces them."""
        self.to_save = tensors

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: object) -> None: ...


class BackwardContext:
    """A context during backward, with its saved tensors, which the context itself does not hold."""

    grad_output_request: Request | None = None
    grad_input_request: Request | None = None

    def __init__(self, context: OperationContext, saved_tensors: tuple[Tensor | None, ...]) -> None:
        self._context = context
        self.saved_tensors = saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


Extra = list[tuple[Tensor, ...]]
"""Extra inputs or outputs of each basic operation."""
GradExtra = list[tuple[Tensor | None, ...]]
"""Gradients of extra inputs or outputs of each basic operation."""
Kwargs = list[dict[str, Any]]
"""What ``forward_kwargs`` of each basic operation returned."""

COMPUTED = ("the output", "data for op_forward_save_ctx")
GRADIENTS = ("gradient of the input", "gradients of the parameters")
Context = OperationContext | BackwardContext


def _check_forms(cls: type, prefix: str) -> bool | None:
    """Return the form that ``cls`` itself defines: split (True), single (False) or none (None)."""
    single, compute, save = (f"{prefix}forward{end}" for end in ("", "_compute", "_save_ctx"))
    own = vars(cls)
    if single in own and (compute in own or save in own):
        other = compute if compute in own else save
        raise TypeError(
            f"{cls.__name__} defines both {single} and {other}. "
            f"Define {single} alone, or {compute} and {save}."
        )
    if single in own:
        return False
    if compute not in own and save not in own:
        return None
    inherits = getattr(cls, f"{prefix}is_split", False)
    for half, there in ((compute, compute in own), (save, save in own)):
        if not there and not inherits:
            defined = save if half == compute else compute
            raise TypeError(
                f"{cls.__name__} defines {defined} but not {half}. "
                f"Define both, or {prefix}forward alone."
            )
    return True


def operation_label(op: nn.Module) -> str:
    """Return the class name of an operation and its index in the sequence that it belongs to."""
    index = op._index
    kind = type(op).__name__
    return kind if index is None else f"{kind} (operation {index})"


_NUMBERS = itertools.count()
_OPERATIONS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


@compile_constant
def _own_fuser(number: int) -> str:
    """Return the name of the attribute that runs an operation alone.

    A tracer cannot create that fuser, so it is created here, at compile time.
    """
    op = _OPERATIONS[number]
    op.__dict__["_own_fuser"] = FusibleOperation.fuser_class([op])
    return "_own_fuser"


class FusibleOperation(nn.Module):
    """A step of a ``Sequential`` that can be fused with its neighbours.

    Attributes:
        num_extra_inputs: number of tensors that a call takes in addition to its input.
        num_extra_outputs: number of tensors that a call returns in addition to its output.
        op_is_split, fuser_is_split: form of the forward that the class defines: split (True),
            single (False) or none (None).
    """

    _index: int | None = None
    num_extra_inputs: int = 0
    num_extra_outputs: int = 0
    op_is_split: ClassVar[bool | None] = None
    fuser_is_split: ClassVar[bool | None] = None
    fuser_class: ClassVar[Any] = None
    """Class that runs an operation which is called alone. ``ops.fuser`` sets it."""

    def __init__(self) -> None:
        super().__init__()
        self._register()

    def __init_subclass__(cls, is_base: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if is_base:
            return
        for prefix in ("op_", "fuser_"):
            form = _check_forms(cls, prefix)
            if form is not None:
                setattr(cls, f"{prefix}is_split", form)

    @property
    def label(self) -> str:
        """Name of the operation in messages, with its index in its sequence."""
        return operation_label(self)

    @property
    def basic_ops(self) -> tuple[Any, ...]:
        """The basic operations that this operation consists of."""
        raise NotImplementedError

    @property
    def is_split(self) -> bool:
        """True if the forward can be traced."""
        raise NotImplementedError

    def forward(self, input: Tensor, *extra_inputs: Tensor) -> Any:
        """Run the operation alone."""
        return getattr(self, _own_fuser(self.__dict__["_number"]))(input, *extra_inputs)

    def __getstate__(self) -> dict[str, Any]:
        # The fuser that runs the operation alone is created again: it is registered in this
        # process.
        return {k: v for k, v in self.__dict__.items() if k != "_own_fuser"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._register()

    def _register(self) -> None:
        self.__dict__["_number"] = number = next(_NUMBERS)
        _OPERATIONS[number] = self


def check_tuple(op: FusibleOperation, name: str, result: object, form: tuple[str, ...]) -> Any:
    """Return what a function of an operation returned, checked to be a tuple of that form.

    ``form`` describes its elements, for the message.
    """
    if not isinstance(result, tuple) or len(result) != len(form):
        kind = type(result).__name__
        got = f"{kind} of {len(result)}" if isinstance(result, tuple) else kind
        refuse_result(op, name, f"return ({', '.join(form)})", got)
    return result


def refuse_result(op: FusibleOperation, name: str, must: str, got: object) -> None:
    """Raise the error for a function of an operation that returned a wrong value."""
    fail(op.basic_ops[0].label, f"its {name} must {must}", got, "Fix the class", ArgumentTypeError)


class BasicOperation(FusibleOperation, is_base=True):
    """Base of all operations that are not composed of others.

    A subclass without extra inputs and outputs defines ``op_backward``, and either
    ``op_forward_compute`` and ``op_forward_save_ctx`` or ``op_forward``. A subclass with extra
    tensors defines the ``fuser_`` functions instead.
    """

    input_channels: tuple[str | None, ...] = ()
    """For each extra input the channel that brings it; None if the caller passes it."""
    output_channels: tuple[str | None, ...] = ()
    """For each extra output the channel that receives it; None if it goes to the caller."""
    passes_input: ClassVar[bool] = False
    """True if the forward of this class only returns its input, also as every extra output.

    Such a forward is not called.
    """
    reads_unrounded: ClassVar[bool] = False
    """True if a preceding linear layer passes its float32 sums, which this operation rounds."""

    @property
    def basic_ops(self) -> tuple[Any, ...]:
        """The operation itself."""
        return (self,)

    @property
    def is_split(self) -> bool:
        """True if the forward can be traced, by the form of the functions that run."""
        return bool(self.op_is_split if self.fuser_is_split is None else self.fuser_is_split)

    # ---- what a subclass may define

    def op_forward_compute(self, input: Any, *args: Any, **kwargs: Any) -> Any:
        """Return (the output, data for ``op_forward_save_ctx``).

        Args:
            input: (..., K), a tensor, or a ``Quantized`` if ``input_request`` asked for one.
            *args: unused.
            **kwargs: ``next_op_input_request``, the format that the next operation requests for its
                input, and the items that ``forward_kwargs`` returned. ``ops.produce(y, request)``
                fulfils the request; a plain tensor is allowed too.
        """
        self._missing("op_forward_compute and op_forward_save_ctx, or op_forward")

    def op_forward_save_ctx(
        self, ctx: OperationContext, input: Any, returned: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Save in ``ctx`` what backward needs. Not called if nothing needs a gradient."""
        self._missing("op_forward_save_ctx together with op_forward_compute")

    def op_forward(self, ctx: OperationContext, input: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the output, and save in ``ctx`` what backward needs: the single form."""
        self._missing("op_forward")

    def op_backward(self, ctx: BackwardContext, grad_output: Any) -> Any:
        """Return (gradient of the input, gradients of the parameters).

        The latter have the order of ``parameters()``.

        Args:
            ctx: ``saved_tensors`` and the attributes that the forward has set.
            grad_output: (..., N), a tensor, or a ``Quantized`` if ``grad_output_request`` asked for
                one.
        """
        self._missing("op_backward")

    def forward_kwargs(self, like: Tensor, input_requires_grad: bool) -> dict[str, Any]:
        """Return keyword arguments of this call for both functions of the forward.

        They are computed before the forward, outside autograd.

        Args:
            like: input of the whole sequence, for its device; the operation's input may have
                another dtype.
            input_requires_grad: True if a gradient of this operation's input is needed.
        """
        return {}

    def input_request(self, kwargs: dict[str, Any]) -> Request | None:
        """Return the format requested for the operation's input, None for a plain tensor."""
        return None

    def grad_output_request(self, kwargs: dict[str, Any]) -> Request | None:
        """Return the format requested for the operation's gradient, None for a plain tensor."""
        return None

    def published(self, returned: Any) -> list[Tensor]:
        """Return the tensors of the forward that ``after_forward`` gets."""
        return []

    def published_count(self, kwargs: dict[str, Any]) -> int:
        """Return the number of tensors that ``published`` returns."""
        return 0

    def after_forward(self, published: list[Tensor], kwargs: dict[str, Any]) -> None:
        """Update the operation's state, outside autograd."""

    @property
    def reports(self) -> bool:
        """True if ``report_on`` must be called; read once, when a sequence is built."""
        return type(self).report_on is not BasicOperation.report_on

    def report_on(self, out: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Return the sequence's output, possibly with a hook that runs when its backward begins."""
        return out

    def plan_key(self) -> str:
        """Return a string that fusions may depend on: the key of the active recipe, or ""."""
        return ""

    # ---- an operation alone, as a fused one of one

    def fuser_forward_compute(
        self,
        input: Any,
        *,
        basic_op_extra_inputs: Extra,
        basic_op_kwargs: Kwargs,
        next_op_input_request: Request | None = None,
    ) -> Any:
        """Return (output, extra outputs of each operation, data for ``fuser_forward_save_ctx``)."""
        result = self.op_forward_compute(
            input, next_op_input_request=next_op_input_request, **basic_op_kwargs[0]
        )
        out, returned = check_tuple(self, "op_forward_compute", result, COMPUTED)
        return out, [()], returned

    def fuser_forward_save_ctx(
        self,
        basic_op_ctxs: list[OperationContext],
        input: Any,
        returned: Any,
        *,
        basic_op_extra_inputs: Extra,
        basic_op_kwargs: Kwargs,
    ) -> None:
        """Save in the contexts what backward needs."""
        self.op_forward_save_ctx(basic_op_ctxs[0], input, returned, **basic_op_kwargs[0])

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input: Any,
        *,
        basic_op_extra_inputs: Extra,
        basic_op_kwargs: Kwargs,
        next_op_input_request: Request | None = None,
    ) -> Any:
        """Return (output, extra outputs of each basic operation): the single form."""
        out = self.op_forward(
            basic_op_ctxs[0],
            input,
            next_op_input_request=next_op_input_request,
            **basic_op_kwargs[0],
        )
        return out, [()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[BackwardContext],
        grad_output: Any,
        *,
        basic_op_grad_extra_outputs: GradExtra,
    ) -> Any:
        """Return gradients of the input, of each operation's parameters, and of extra inputs."""
        result = self.op_backward(basic_op_ctxs[0], grad_output)
        grad_input, grad_params = check_tuple(self, "op_backward", result, GRADIENTS)
        return grad_input, [grad_params], [()]

    def published_by_op(self, returned: Any) -> list[list[Tensor]]:
        """Return ``published`` of each basic operation."""
        return [self.published(returned)]

    def _missing(self, what: str) -> Any:
        rule = f"a basic operation must define {what}"
        fail(self.label, rule, "none", "Define it in the class", UnsupportedError)


class FusedOperation(FusibleOperation, is_base=True):
    """Base of operations that replace neighbouring basic operations.

    They replace them in forward (``fuser_forward*``), in backward (``fuser_backward``), or in both.

    Args:
        basic_ops: the operations that it replaces, in the order of the sequence.
    """

    def __init__(self, basic_ops: Sequence[BasicOperation]) -> None:
        super().__init__()
        # Set in __dict__: the operations are submodules of the sequence already.
        self.__dict__["_basic_ops"] = tuple(basic_ops)

    @property
    def basic_ops(self) -> tuple[Any, ...]:
        """The operations that it replaces."""
        return self.__dict__["_basic_ops"]

    @property
    def is_split(self) -> bool:
        """True if the forward can be traced."""
        return self.fuser_is_split is not False

    @property
    def has_forward(self) -> bool:
        """True if the class defines a fused forward."""
        return self.fuser_is_split is not None

    @property
    def has_backward(self) -> bool:
        """True if the class defines a fused backward."""
        return type(self).fuser_backward is not FusedOperation.fuser_backward

    fuser_forward_compute = BasicOperation.fuser_forward_compute
    fuser_forward_save_ctx = BasicOperation.fuser_forward_save_ctx

    def fuser_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the single form; see ``BasicOperation.fuser_forward``."""
        rule = "a fused operation that runs in a forward must define one"
        fail(self.label, rule, "none", "Define fuser_forward_compute and fuser_forward_save_ctx")

    def fuser_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the backward; see ``BasicOperation.fuser_backward``."""
        rule = "a fused operation that runs in a backward must define fuser_backward"
        fail(self.label, rule, "none", "Define it in the class")

    reads_requests: ClassVar[bool] = False
    """True if its first operation gets a quantized input and its last a quantized gradient."""

    def published_by_op(self, returned: Any) -> list[list[Tensor]]:
        """Return the tensors that each operation publishes; trailing lists may be left out."""
        return []


def parameters_of(op: BasicOperation) -> Sequence[Any]:
    """Return the parameters of an operation, in the order of the gradients of ``op_backward``."""
    # parameters() is too slow here (hot path).
    own = op._parameters
    if op._modules:
        return list(op.parameters())
    return [p for p in own.values() if p is not None] if own else ()
