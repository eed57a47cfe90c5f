"""Count the bytes that collectives move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_GATHERS = ("_allgather_base_", "allgather_", "all_gather_into_tensor")
_NOT_COUNTED = ("wait_tensor", "barrier", "monitored_barrier_", "_wrap_tensor_autograd")


class Traffic(TorchDispatchMode):
    """Count the bytes that this rank gives to collectives: ``with Traffic() as traffic: ...``.

    Attributes:
        sent: the bytes of the inputs by name of the collective, for example
            ``{"_allgather_base_": 4096}``. A ring gather over R ranks moves R - 1 times as many.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    @property
    def gathered(self) -> int:
        """The bytes of this rank's inputs of all gathers."""
        return sum(self.sent[name] for name in _GATHERS)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count a collective, and run it."""
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional") and name not in _NOT_COUNTED:
            # c10d passes the outputs of a gather or a scatter first.
            second = namespace == "c10d" and ("gather" in name or "scatter" in name)
            leaves = pytree.tree_leaves(args[1] if second else args[0])
            self.sent[name] += sum(t.nbytes for t in leaves if isinstance(t, Tensor))
        return func(*args, **(kwargs or {}))
