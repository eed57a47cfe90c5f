"""What an operation of ``qtensor.ops`` is: a step of a block, with a forward and a backward of its own.

A forward comes in one of two forms. **Split**: ``op_forward_compute`` computes and has no side effects, and
``op_forward_save_ctx`` notes what backward needs; it sees the inputs, the keyword arguments and what compute returned.
**Single**: ``op_forward`` does both. Code that is traced runs the split form; a single form runs outside of the graph.
``fuser_*`` are the same for operations with extra inputs or outputs, and for fused ones.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from qtensor.errors import UnsupportedError, fail
from qtensor.ops.checks import parts
from qtensor.ops.handover import Request
from qtensor.recipes import compile_constant


class OperationContext:
    """What one operation keeps between a forward and its backward.

    Attributes may be set at will, to plain values. Tensors go through ``save_for_backward``.

    Attributes:
        input_requires_grad: whether a gradient of the operation's input is asked for.
        grad_output_request: how the operation asked for its gradient, None for a plain one.
        grad_input_request: how the operation before asks for its gradient, None for a plain one. Set in backward.
        saved_tensors: what was saved. Set in backward.
    """

    # Of the class until they are set: a call makes a context for every operation.
    input_requires_grad: bool = True
    grad_output_request: Request | None = None
    grad_input_request: Request | None = None
    saved_tensors: tuple[Tensor | None, ...] = ()
    to_save: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors for backward; the last call counts."""
        self.to_save = tensors

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...


class BackwardContext:
    """A context as a backward sees it: with its tensors, which the context itself never holds on to."""

    grad_output_request: Request | None = None
    grad_input_request: Request | None = None

    def __init__(self, context: OperationContext, saved_tensors: tuple[Tensor | None, ...]) -> None:
        self._context = context
        self.saved_tensors = saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


COMPUTED = ("the output", "what op_forward_save_ctx is to see")
GRADIENTS = ("gradient of the input", "gradients of the parameters")
Context = OperationContext | BackwardContext


def _check_forms(cls: type, prefix: str) -> bool | None:
    """Whether ``cls`` itself defines the split form (True), the single one (False) or neither (None).

    Raises:
        TypeError: both, or half of the split one.
    """
    single, compute, save = (f"{prefix}forward{end}" for end in ("", "_compute", "_save_ctx"))
    own = vars(cls)
    if single in own and (compute in own or save in own):
        other = compute if compute in own else save
        raise TypeError(
            f"{cls.__name__} defines both {single} and {other}. Define {single} alone, or {compute} and {save}."
        )
    if single in own:
        return False
    if compute not in own and save not in own:
        return None
    inherits = getattr(cls, f"{prefix}is_split", False)
    for half, there in ((compute, compute in own), (save, save in own)):
        if not there and not inherits:
            given = save if half == compute else compute
            raise TypeError(
                f"{cls.__name__} defines {given} but not {half}. Define both, or {prefix}forward alone."
            )
    return True


def placed(op: nn.Module) -> str:
    """The class of an operation, and its place in the sequence that it belongs to."""
    place = op._place
    kind = type(op).__name__
    return kind if place is None else f"{kind} (operation {place})"


_NUMBERS = itertools.count()
_OPERATIONS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


@compile_constant
def _own_fuser(number: int) -> str:
    """The attribute of an operation that runs it alone: a tracer cannot make one, but finds it here."""
    op = _OPERATIONS[number]
    op.__dict__["_own_fuser"] = FusibleOperation.fuser_class([op])
    return "_own_fuser"


class FusibleOperation(nn.Module):
    """A step of a ``Sequential`` that can be fused with its neighbours.

    Attributes:
        num_extra_inputs: tensors that a call takes beside its input.
        num_extra_outputs: tensors that a call returns beside its output.
        op_is_split, fuser_is_split: which form of the forward the class has: split, single (False) or none (None).
    """

    _place: int | None = None
    num_extra_inputs: int = 0
    num_extra_outputs: int = 0
    op_is_split: ClassVar[bool | None] = None
    fuser_is_split: ClassVar[bool | None] = None
    fuser_class: ClassVar[Any] = None
    """What runs an operation that is called by itself; set where it is defined, which needs operations."""

    def __init__(self) -> None:
        super().__init__()
        self._enlist()

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
        """How messages name the operation: with its place in the sequence that it belongs to."""
        return placed(self)

    @property
    def basic_ops(self) -> tuple[Any, ...]:
        """The basic operations that this one is or stands for."""
        raise NotImplementedError

    @property
    def is_split(self) -> bool:
        """Whether tracing may see the forward."""
        raise NotImplementedError

    def forward(self, input: Any, *extra_inputs: Tensor) -> Any:
        """The operation alone."""
        return getattr(self, _own_fuser(self.__dict__["_number"]))(input, *extra_inputs)

    def __getstate__(self) -> dict[str, Any]:
        # What runs the operation alone is made anew: plans are known by a number of this process.
        return {k: v for k, v in self.__dict__.items() if k != "_own_fuser"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._enlist()

    def _enlist(self) -> None:
        self.__dict__["_number"] = number = next(_NUMBERS)
        _OPERATIONS[number] = self


class BasicOperation(FusibleOperation, is_base=True):
    """An operation that stands for itself.

    A subclass without extra inputs and outputs defines ``op_forward_compute`` and ``op_forward_save_ctx`` (or
    ``op_forward``) and ``op_backward``. One with them defines the ``fuser_`` functions instead.
    """

    input_channels: tuple[str | None, ...] = ()
    """For each extra input the channel that brings it from within the sequence; None for one that the caller passes."""
    output_channels: tuple[str | None, ...] = ()
    """For each extra output the channel that it goes into; None for one that the caller gets."""
    passes_input: ClassVar[bool] = False
    """Whether the forward of this very class hands on its input, as every extra output too, and does nothing else: it is not
    called then."""
    reads_unrounded: ClassVar[bool] = False
    """Whether a linear layer before hands over its float32 sums, which are then rounded once, here."""

    @property
    def basic_ops(self) -> tuple[Any, ...]:
        """Itself."""
        return (self,)

    @property
    def is_split(self) -> bool:
        """Whether tracing may see the forward: the form of the functions that run."""
        return bool(self.op_is_split if self.fuser_is_split is None else self.fuser_is_split)

    # ---- what a subclass may define ------------------------------------------------------------------------

    def op_forward_compute(self, input: Any, *args: Any, **kwargs: Any) -> Any:
        """(the output, what ``op_forward_save_ctx`` is to see).

        Args:
            input: (..., K), a tensor, or a ``Quantized`` where ``input_request`` asked for one.
            *args: nothing.
            **kwargs: ``next_op_input_request``, how the next operation asks for its input (``ops.produce(y, request)`` makes
                it; a plain tensor does as well), and what ``forward_kwargs`` returned.
        """
        self._missing("op_forward_compute and op_forward_save_ctx, or op_forward")

    def op_forward_save_ctx(
        self, ctx: OperationContext, input: Any, returned: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Note in ``ctx`` what backward needs. Not called where nothing needs a gradient."""
        self._missing("op_forward_save_ctx beside op_forward_compute")

    def op_forward(self, ctx: OperationContext, input: Any, *args: Any, **kwargs: Any) -> Any:
        """The single form: the output, with everything that backward needs noted in ``ctx``."""
        self._missing("op_forward")

    def op_backward(self, ctx: BackwardContext, grad_output: Any) -> Any:
        """(gradient of the input, gradients of the parameters in the order of ``parameters()``).

        Args:
            ctx: ``saved_tensors``, and what the forward has noted.
            grad_output: (..., N), a tensor, or a ``Quantized`` where ``grad_output_request`` asked for one.
        """
        self._missing("op_backward")

    def forward_kwargs(self, like: Tensor, input_requires_grad: bool) -> dict[str, Any]:
        """Values and tensors of this call, for both phases of the forward; made before it, outside of autograd.

        Args:
            like: the input of the whole sequence, for its device; its dtype need not be that of the operation's input.
            input_requires_grad: whether a gradient of this operation's input is asked for.
        """
        return {}

    def input_request(self, kwargs: dict[str, Any]) -> Request | None:
        """How the operation would like its input, None for a plain tensor."""
        return None

    def grad_output_request(self, kwargs: dict[str, Any]) -> Request | None:
        """How the operation would like its gradient, None for a plain tensor."""
        return None

    def published(self, returned: Any) -> list[Tensor]:
        """Tensors of the forward that ``after_forward`` is to see."""
        return []

    def published_count(self, kwargs: dict[str, Any]) -> int:
        """How many tensors ``published`` returns."""
        return 0

    def after_forward(self, published: list[Tensor], kwargs: dict[str, Any]) -> None:
        """Update the operation's state; outside of autograd."""

    @property
    def reports(self) -> bool:
        """Whether ``report_on`` is to be called; asked once, when the operation is put into a sequence."""
        return type(self).report_on is not BasicOperation.report_on

    def report_on(self, out: Any, kwargs: dict[str, Any]) -> Any:
        """The sequence's output, with whatever is to happen as its backward begins."""
        return out

    def plan_key(self) -> str:
        """Text on which the choice of fusions may depend: the recipe in force, "" where there is none."""
        return ""

    # ---- an operation alone, as a fused one of one -----------------------------------------------------------

    def fuser_forward_compute(
        self,
        input: Any,
        *,
        basic_op_extra_inputs: Any,
        basic_op_kwargs: Any,
        next_op_input_request: Request | None = None,
    ) -> Any:
        """(output, extra outputs of each basic operation, what save_ctx is to see)."""
        result = self.op_forward_compute(
            input, next_op_input_request=next_op_input_request, **basic_op_kwargs[0]
        )
        out, returned = parts(self, "op_forward_compute", result, COMPUTED)
        return out, [()], returned

    def fuser_forward_save_ctx(
        self,
        basic_op_ctxs: Any,
        input: Any,
        returned: Any,
        *,
        basic_op_extra_inputs: Any,
        basic_op_kwargs: Any,
    ) -> None:
        """Note in the contexts what backward needs."""
        self.op_forward_save_ctx(basic_op_ctxs[0], input, returned, **basic_op_kwargs[0])

    def fuser_forward(
        self,
        basic_op_ctxs: Any,
        input: Any,
        *,
        basic_op_extra_inputs: Any,
        basic_op_kwargs: Any,
        next_op_input_request: Request | None = None,
    ) -> Any:
        """The single form: (output, extra outputs of each basic operation)."""
        out = self.op_forward(
            basic_op_ctxs[0],
            input,
            next_op_input_request=next_op_input_request,
            **basic_op_kwargs[0],
        )
        return out, [()]

    def fuser_backward(
        self,
        basic_op_ctxs: Any,
        grad_output: Any,
        *,
        basic_op_grad_extra_outputs: Any,
    ) -> Any:
        """(gradient of the input; of each basic operation's parameters; of its extra inputs)."""
        result = self.op_backward(basic_op_ctxs[0], grad_output)
        grad_input, grad_params = parts(self, "op_backward", result, GRADIENTS)
        return grad_input, [grad_params], [()]

    def published_by_op(self, returned: Any) -> list[list[Tensor]]:
        """``published`` of each basic operation."""
        return [self.published(returned)]

    def _missing(self, what: str) -> Any:
        rule = f"a basic operation defines {what}"
        fail(self.label, rule, "none", "Define it in the class", UnsupportedError)


class FusedOperation(FusibleOperation, is_base=True):
    """Neighbouring basic operations in one: in forward (``fuser_forward*``), in backward (``fuser_backward``), or both.

    Args:
        basic_ops: what it stands for, in the order of the sequence.
    """

    def __init__(self, basic_ops: Sequence[BasicOperation]) -> None:
        super().__init__()
        # Not submodules: the sequence has them already.
        self.__dict__["_basic_ops"] = tuple(basic_ops)

    @property
    def basic_ops(self) -> tuple[Any, ...]:
        """What it stands for."""
        return self.__dict__["_basic_ops"]

    @property
    def is_split(self) -> bool:
        """Whether tracing may see the forward."""
        return self.fuser_is_split is not False

    @property
    def has_forward(self) -> bool:
        """Whether the class defines a fused forward."""
        return self.fuser_is_split is not None

    @property
    def has_backward(self) -> bool:
        """Whether the class defines a fused backward."""
        return type(self).fuser_backward is not FusedOperation.fuser_backward

    fuser_forward_compute = BasicOperation.fuser_forward_compute
    fuser_forward_save_ctx = BasicOperation.fuser_forward_save_ctx

    def fuser_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The single form; see ``BasicOperation.fuser_forward``."""
        rule = "a fused operation that stands in a forward defines one"
        fail(self.label, rule, "none", "Define fuser_forward_compute and fuser_forward_save_ctx")

    def fuser_backward(self, *args: Any, **kwargs: Any) -> Any:
        """See ``BasicOperation.fuser_backward``."""
        rule = "a fused operation that stands in a backward defines fuser_backward"
        fail(self.label, rule, "none", "Define it in the class")

    reads_requests: ClassVar[bool] = False
    """Whether it passes on a quantized input to its first operation, and a quantized gradient to its last."""

    def published_by_op(self, returned: Any) -> list[list[Tensor]]:
        """What each basic operation publishes; those at the end that publish nothing may be left out."""
        return []


def parameters_of(op: BasicOperation) -> Sequence[Any]:
    """The parameters of an operation, in the order in which ``op_backward`` returns their gradients."""
    # parameters() takes several times as long as the rest of a small operation.
    own = op._parameters
    if op._modules:
        return list(op.parameters())
    return [p for p in own.values() if p is not None] if own else ()
