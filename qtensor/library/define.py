"""Define ops, each by one NamedTuple of arguments, one allocation and one fill."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple, NoReturn, TypeVar, get_type_hints

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape
from qtensor.core.errors import ArgumentTypeError, UnsupportedError, fail
from qtensor.core.operand import Operand
from qtensor.core.torch_state import below_autograd

LIBRARY = torch.library.Library("qtensor", "DEF")

BODIES: dict[str, Callable[..., Any]] = {}
"""The Python kernels of the ops, by op name."""

SCHEMAS: dict[str, str] = {}
"""The schemas of the ops, by op name."""

FILLS: dict[str, Callable[..., None]] = {}
"""Op name -> ``fill(outputs, args)``.

A test or a backend may replace an entry; schema and fake stay. The calls that C++ serves on a CPU
do not use the fills; inside ``native_ops.left_to_python``, all calls do.
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

ARGUMENTS: dict[str, type[NamedTuple]] = {}
"""Op name -> the NamedTuple of its arguments."""

SymInt = Annotated[int, "SymInt"]
"""A size that may be symbolic in a graph."""
Written = Annotated[Tensor, "written"]
"""A tensor that the op writes."""
WrittenOptional = Annotated[Tensor | None, "written"]
WrittenList = Annotated[list[Tensor], "written"]

_TYPES: dict[object, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    list[Tensor]: "Tensor[]",
    list[Tensor] | None: "Tensor[]?",
    Written: "Tensor(!)",
    WrittenOptional: "Tensor(!)?",
    WrittenList: "Tensor(!)[]",
    Shape: "SymInt[]",
    SymInt: "SymInt",
    torch.dtype: "ScalarType",
    str: "str",
    int: "int",
    float: "float",
    bool: "bool",
    list[int]: "int[]",
    list[float]: "float[]",
    list[bool]: "bool[]",
}
"""Type of a field -> type in a schema; in ``(!)`` the schema names the tensor that is written."""
_OF_OPERAND = (("", "Tensor[]"), ("_quantizer", "str"), ("_shape", "SymInt[]"))
"""An ``Operand`` named ``a`` is three arguments of an op: ``a``, ``a_quantizer``, ``a_shape``."""

_REQUIRED = object()
"""The default of an argument that has none."""

Arguments = TypeVar("Arguments", bound=NamedTuple)
Outputs = TypeVar("Outputs")


def leaf_op(
    name: str,
    arguments: type[Arguments],
    returns: str,
    allocate: Callable[[Arguments], Outputs],
    fill: Callable[[Outputs, Arguments], None],
    tags: Sequence[torch.Tag] = (),
) -> Callable[..., Outputs]:
    """Define ``qtensor::<name>`` and return its overload.

    It uses ``Library.define``, because calls are a hot path and the ``custom_op`` decorator adds
    to each of them.

    Args:
        name: of the op.
        arguments: a NamedTuple of the op's arguments, from which the schema is made. The fields of
            a NamedTuple in it (``Pair``) are arguments themselves; see ``_OF_OPERAND`` for names.
        returns: the results, as a schema of ``torch.library`` names them.
        allocate: ``allocate(args)`` makes the outputs from shapes, dtypes and devices alone. It
            serves real, fake and meta tensors.
        fill: ``fill(outputs, args)`` writes the outputs. It runs on real tensors only.
        tags: of the op.
    """
    listed = list(_arguments(arguments))
    SCHEMAS[name] = _schema(name, listed, returns)
    LIBRARY.define(SCHEMAS[name], tags=tuple(tags))
    bind = _binder(name, arguments, listed)
    FILLS[name], ARGUMENTS[name] = fill, arguments

    def body(*args: object) -> Outputs:
        bound = bind(*args)
        outputs = allocate(bound)
        with below_autograd():  # torch ops in a fill need no gradients
            FILLS[name](outputs, bound)
        return outputs

    def fake(*args: object) -> Outputs:
        if torch.onnx.is_in_onnx_export():
            _refuse_onnx(name)
        # A single meta tensor among real ones brings the whole call here.
        return allocate(bind(*args))

    BODIES[name] = body
    LIBRARY.impl(name, body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"qtensor::{name}", fake, lib=LIBRARY)
    op: Callable[..., Outputs] = getattr(torch.ops.qtensor, name).default
    return op


def _refuse_onnx(name: str) -> NoReturn:
    """Name the way out of an export to ONNX, which has no op of ours."""
    rule = "ONNX has no such op"
    fix = "Export quantized weights with qtensor.integrations.onnx.export(model, args, file)"
    fail(name, rule, "a call inside torch.onnx.export", fix, UnsupportedError)


class _Argument(NamedTuple):
    """Describe an argument of an op: its name, its type in the schema and its default."""

    name: str
    kind: str
    default: object

    @property
    def optional(self) -> bool:
        return "?" in self.kind

    @property
    def many(self) -> bool:
        return "[]" in self.kind


def _arguments(record: type[NamedTuple]) -> Iterator[_Argument]:
    """Yield the arguments that a NamedTuple declares, in the order of the schema."""
    for name, hint in get_type_hints(record, include_extras=True).items():
        if hint in _TYPES:
            yield _Argument(name, _TYPES[hint], record._field_defaults.get(name, _REQUIRED))
        elif hint is Operand:
            for suffix, kind in _OF_OPERAND:
                yield _Argument(name + suffix, kind, _REQUIRED)
        else:
            yield from _arguments(hint)


def _schema(name: str, listed: Sequence[_Argument], returns: str) -> str:
    text = ", ".join([
        f"{kind} {argument}" + (f"={default!r}" if default is not _REQUIRED else "")
        for argument, kind, default in listed
    ])
    for letter in "abcdefgh"[: text.count("(!)")]:
        text = text.replace("(!)", f"({letter}!)", 1)
    return f"{name}({text}) -> {returns}"


def _records(record: type[NamedTuple], start: int = 0) -> Iterator[tuple[int, type[NamedTuple]]]:
    """Yield the places of the NamedTuples in a record, the last ones and the inner ones first.

    A place is the index of the first argument of the NamedTuple. Replacing arguments in this order
    leaves the places of those that follow as they are.
    """
    nested = []
    for hint in get_type_hints(record).values():
        is_record = hasattr(hint, "_fields")
        if is_record:
            nested.append((start, hint))
        start += len(list(_arguments(hint))) if is_record else 1
    for place, hint in reversed(nested):
        yield from _records(hint, place)
        yield place, hint


def _binder(
    name: str, arguments: type[Arguments], listed: Sequence[_Argument]
) -> Callable[..., Arguments]:
    """Return a function that checks the devices of a call's arguments and binds them."""
    check_devices = _device_check(name, listed)
    defaults = tuple([argument.default for argument in listed])
    records = [(place, place + len(kind._fields), kind) for place, kind in _records(arguments)]

    def bind(*args: object) -> Arguments:
        flat = args + defaults[len(args) :]
        check_devices(flat)
        if records:
            nested = list(flat)
            for first, end, kind in records:
                nested[first:end] = [kind._make(nested[first:end])]
            return arguments._make(nested)
        return arguments._make(flat)

    return bind


def _device_check(name: str, listed: Sequence[_Argument]) -> Callable[[Sequence[Any]], None]:
    """Return a function that refuses arguments of ``qtensor::name`` on different devices.

    The arguments in ``ON_THE_CPU`` must not be meta tensors beside others; they may be on another
    device otherwise.
    """
    tensors = [(i, argument) for i, argument in enumerate(listed) if "Tensor" in argument.kind]
    required = {i: argument.name for i, argument in tensors if not argument.optional}
    counters = [i for i, argument in tensors if argument.name in ON_THE_CPU]
    lists = [i for i, argument in tensors if argument.many and i not in counters]
    single = [i for i, argument in tensors if not argument.many and i not in counters]

    def all_on_the_cpu(args: Sequence[Any]) -> bool:
        for i in single:
            if args[i] is None:
                if i in required:
                    return False
            elif not args[i].is_cpu:
                return False
        for i in lists:
            for tensor in args[i] or ():
                if not tensor.is_cpu:
                    return False
        return all([i not in required if args[i] is None else args[i].is_cpu for i in counters])

    def check_devices(args: Sequence[Any]) -> None:
        if all_on_the_cpu(args):
            return
        for i, field in required.items():
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


def empty(like: Tensor, shape: Shape | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate a contiguous tensor like another, with another shape or dtype where one is named."""
    size = like.shape if shape is None else shape
    return torch.empty(size, dtype=dtype or like.dtype, device=like.device)


def never_alone(results: list[Tensor]) -> list[Tensor]:
    """Return the results of an op, and an empty tensor after one that would be alone.

    Code that Inductor writes with the option ``cpp_wrapper`` takes a list of one tensor for the
    tensor, and crashes (torch 2.13).
    """
    return [*results, empty(results[0], (0,))] if len(results) == 1 else results


def no_outputs(args: object) -> None:
    """Allocate nothing: for ops that only write to their arguments."""
