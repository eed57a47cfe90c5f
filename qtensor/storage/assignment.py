"""Refuse ``plain.data = quantized``, for which torch does not call the subclass.

Torch would replace the memory of ``plain`` by that of the wrapper. The wrapper has no memory, so
every later use of ``plain`` would fail. Before torch does so, it calls
``aten::_has_compatible_shallow_copy_type``. The handler below is registered under a dispatch key
that only subclasses with ``__torch_dispatch__`` have, so assignments among plain tensors skip it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qtensor.errors import ArgumentTypeError, fail
from qtensor.storage.base import QuantizedTensorStorage

_DISPATCH_KEY = "PythonTLSSnapshot"
_EXCLUDED_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.PythonTLSSnapshot)
_COMPATIBLE = torch.ops.aten._has_compatible_shallow_copy_type.default
_LIBRARY = torch.library.Library("aten", "IMPL")


def _compatible(destination: Tensor, source: Tensor) -> bool:
    """Return True if torch can carry out ``destination.data = source``.

    Raises:
        ArgumentTypeError: the source is quantized and the destination is not.
    """
    quantizer = getattr(source, "_quantizer", None)
    if quantizer is not None and not isinstance(destination, QuantizedTensorStorage):
        fail(
            f"data[{quantizer.format}]",
            "a plain tensor cannot take over the buffers of a quantized one",
            type(source).__name__,
            "Replace the parameter: module.weight = torch.nn.Parameter(quantized)",
            ArgumentTypeError,
        )
    # Without the key, the call reaches torch's own kernel instead of this function again.
    with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED_KEYS):
        answer: bool = _COMPATIBLE(destination, source)
    return answer


def install() -> None:
    """Register the handler; importing ``qtensor.storage.tensor`` calls this once."""
    _LIBRARY.impl("_has_compatible_shallow_copy_type", _compatible, _DISPATCH_KEY)
