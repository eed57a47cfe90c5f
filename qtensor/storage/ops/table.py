"""Hold the tables of handlers by op name; ``implements`` enters a handler where it is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch._ops import OpOverload

Op: TypeAlias = "OpOverload[..., Any]"
"""An op as torch dispatches it, for example ``torch.ops.aten.slice.Tensor``."""

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
"""Arguments of an op, of whatever type its schema names."""

Handler = Callable[[Op, Args, Kwargs], Any]
"""Entry of a table: (op, args, kwargs) -> result."""

Table = dict[str, Handler]

PRESERVE: Table = {}
"""Exact aten ops. A handler raises a QTensorError that names the rule."""

COMPUTE: Table = {}
"""Aten ops that decode the operands in one op; the plain result is rounded once."""

LIBRARY: Table = {}
"""Ops of qtensor that take quantized tensors; the others get the values."""

FUNCTIONAL: Table = {}
"""Functional collectives."""

C10D: Table = {}
"""Collectives of ``torch.distributed``."""

TRANSFORMERS: Table = {}
"""Ops of transformers."""

OTHERS: dict[str, Table] = {
    "c10d": C10D,
    "_c10d_functional": FUNCTIONAL,
    "_c10d_functional_autograd": FUNCTIONAL,
    "_dtensor": FUNCTIONAL,
    "transformers": TRANSFORMERS,
}
"""Tables of ops of other namespaces than aten. The modules of ``storage/ranks/`` fill those of
collectives."""

FILLED_LATE: dict[str, str] = {}
"""Modules by namespace: the first op of the namespace imports the module, which fills its table."""


def implements(table: Table, *names: str) -> Callable[[Handler], Handler]:
    """Return a decorator that enters a handler into ``table`` under the names of its ops."""

    def enter(handler: Handler) -> Handler:
        table.update(dict.fromkeys(names, handler))
        return handler

    return enter


def named(func: Op, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """Return the arguments of a call by name, with the defaults of the schema."""
    schema = func._schema.arguments
    defaults = {argument.name: argument.default_value for argument in schema}
    return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
