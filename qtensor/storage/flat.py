"""A 1-D view of a quantized tensor whose blocks do not run along one dim."""

from __future__ import annotations

from typing import Any

import torch

from qtensor.errors import UnsupportedError, fail


class FlatView(torch.Tensor):
    """Hold a quantized tensor under the shape (numel,).

    Libraries store a flat view of a parameter and take its shape back later. Columnwise data and
    square blocks have no 1-D form, so that this class offers only the way back.
    """

    _whole: Any

    @staticmethod
    def __new__(cls: type[FlatView], whole: Any) -> FlatView:
        """Make a view of ``whole``, a quantized tensor."""
        self = torch.Tensor._make_wrapper_subclass(
            cls, (whole.numel(),), dtype=whole.dtype, device=whole.device
        )
        self._whole = whole
        return self

    def __init__(self, whole: Any) -> None: ...

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FlatView({self._whole!r})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        view = args[0] if args and isinstance(args[0], cls) else None
        if view is not None:
            whole = view._whole
            if name in ("detach", "alias"):
                return cls(whole.detach())
            if name in ("view", "_unsafe_view", "reshape"):
                if tuple(args[1]) in ((-1,), (whole.numel(),)):
                    return cls(whole)
                return whole.view(args[1])
        flat = torch.utils._pytree.tree_leaves((args, kwargs))
        text = next(t._whole._quantizer.canonical for t in flat if isinstance(t, cls))
        fail(
            f"{name}[{text.partition('(')[0]}]",
            "a 1-D view of a quantized tensor with columnwise data or square blocks only holds it",
            text,
            "View it back to its shape first, or call .dequantize() before the view",
            UnsupportedError,
        )
