"""Define ops by one schema, one NamedTuple of arguments, one allocation and one fill each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qtensor.errors import ArgumentTypeError, fail

LIBRARY = torch.library.Library("qtensor", "DEF")

below_autograd = torch._C._AutoDispatchBelowAutograd
"""Context of the torch ops in a fill: without gradients, each op costs a tenth less."""

BODIES: dict[str, Callable[..., Any]] = {}
"""Functions that the dispatcher calls for real tensors, by op name."""

FILLS: dict[str, Callable[[Any, Any], None]] = {}
"""Op name -> ``fill(outputs, args)``.

A test or a backend may replace an entry; schema and fake stay.
"""


ON_THE_CPU = frozenset({
    "cell_step",
    "draws",
    "report",
    "splits",
    "step",
    "steps",
    "ticket",
    "token",
})
"""Names of the arguments that are on the CPU whatever device an op computes on."""


ARGUMENTS: dict[str, type[Any]] = {}
"""Op name -> the NamedTuple of its arguments."""

OBSERVERS: dict[str, Callable[[Any, Any], None]] = {}
"""``observer(outputs, args)`` by op name, called after the op's body (``small_calls``)."""


def leaf_op(
    schema: str,
    arguments: type[Any],
    allocate: Callable[[Any], Any],
    fill: Callable[[Any, Any], None],
    tags: Sequence[torch.Tag] = (),
) -> Callable[..., Any]:
    """Define ``qtensor::<schema>`` and return its overload.

    ``Library.define`` costs about 2 us a call where the ``custom_op`` decorator costs 7 to 9.

    Args:
        schema: name, arguments and results, as ``torch.library`` writes them.
        arguments: a NamedTuple with the names and defaults of the schema's arguments. Each call
            binds its arguments to it once.
        allocate: ``allocate(args)`` makes the outputs from shapes, dtypes and devices alone. It
            serves real, fake and meta tensors.
        fill: ``fill(outputs, args)`` writes the outputs. It runs on real tensors only.
        tags: of the op.
    """
    name = schema.split("(")[0]
    LIBRARY.define(schema, tags=tuple(tags))
    check_devices = _device_check(name, arguments)
    FILLS[name], ARGUMENTS[name] = fill, arguments

    def compute(args: Any) -> Any:
        check_devices(args)
        outputs = allocate(args)
        FILLS[name](outputs, args)
        return outputs

    def body(*args: Any, **kwargs: Any) -> Any:
        return compute(arguments(*args, **kwargs))

    def observed_body(*args: Any, **kwargs: Any) -> Any:
        bound = arguments(*args, **kwargs)
        outputs = compute(bound)
        observer = OBSERVERS.get(name)
        if observer is not None and FILLS[name] is fill:
            observer(outputs, bound)
        return outputs

    def fake(*args: Any, **kwargs: Any) -> Any:
        # A single meta tensor among real ones brings the whole call here.
        bound = arguments(*args, **kwargs)
        check_devices(bound)
        return allocate(bound)

    BODIES[name] = body
    LIBRARY.impl(name, observed_body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"qtensor::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.qtensor, name).default


def _device_check(name: str, arguments: type[Any]) -> Callable[[Any], None]:
    """Return a function that refuses arguments of ``qtensor::name`` on different devices.

    The arguments in ``ON_THE_CPU`` must not be meta tensors beside others; they may be on another
    device otherwise.
    """
    kinds = [
        (i, field, "list" in str(arguments.__annotations__[field]))
        for i, field in enumerate(arguments._fields)
        if "Tensor" in str(arguments.__annotations__[field])
    ]
    optional = {field for field, kind in arguments.__annotations__.items() if "None" in str(kind)}
    required = [(i, field) for i, field, _ in kinds if field not in optional]
    single = tuple(i for i, field, many in kinds if not many and field not in ON_THE_CPU)
    lists = tuple(i for i, field, many in kinds if many and field not in ON_THE_CPU)
    counters = tuple(i for i, field, _ in kinds if field in ON_THE_CPU)

    needed = frozenset(i for i, _ in required)

    def all_on_the_cpu(args: Any) -> bool:
        for i in single:
            if args[i] is None:
                if i in needed:
                    return False
            elif not args[i].is_cpu:
                return False
        for i in lists:
            for tensor in args[i] or ():
                if not tensor.is_cpu:
                    return False
        return all([i not in needed if args[i] is None else args[i].is_cpu for i in counters])

    def check_devices(args: Any) -> None:
        if all_on_the_cpu(args):
            return
        for i, field in required:
            if args[i] is None:
                fail(name, f"{field} must be a tensor", None, "Pass one", ArgumentTypeError)
        values = [args[i] for i in single] + [t for i in lists for t in args[i] or ()]
        states = [args[i] for i in counters if args[i] is not None]
        if any(t is not None and t.is_meta for t in values) or any(t.is_meta for t in states):
            values += states
        check_one_device(name, *values)

    return check_devices


def check_one_device(op: str, *tensors: Tensor | None) -> None:
    """Refuse tensors on different devices; None stands for no tensor.

    Raises:
        QTensorError: the message names the devices.
    """
    devices = dict.fromkeys(str(t.device) for t in tensors if t is not None)
    if len(devices) > 1:
        rule = "all tensors must be on one device"
        fail(op, rule, " and ".join(devices), "Move them with .to(device)")


def no_outputs(args: Any) -> None:
    """Allocate nothing: for ops that only write to their arguments."""


def watched() -> bool:
    """Return True if a dispatch mode, transform, profiler or trace observes ops."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._autograd._profiler_enabled()
        or torch._C._get_tracing_state() is not None
    )
