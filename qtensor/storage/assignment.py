"""Refuse ``plain.data = quantized``, which torch would carry out without asking the subclass.

Torch replaces the memory of ``plain`` by the memory of the wrapper, which has none, so every later
use of ``plain`` fails. Before it does so, it calls ``aten::_has_compatible_shallow_copy_type``. The
handler below runs only when one of the two tensors is a subclass with ``__torch_dispatch__``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qtensor.errors import ArgumentTypeError, fail
from qtensor.storage.base import QuantizedTensorStorage

_KEY = "PythonTLSSnapshot"
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.PythonTLSSnapshot)
_COMPATIBLE = torch.ops.aten._has_compatible_shallow_copy_type.default
_LIBRARY = torch.library.Library("aten", "IMPL")


def _compatible(destination: Tensor, source: Tensor) -> bool:
    """Answer torch's question whether ``destination.data = source`` can work.

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
    with torch._C._ExcludeDispatchKeyGuard(_KEYS):
        answer: bool = _COMPATIBLE(destination, source)
    return answer


def install() -> None:
    """Register the handler; importing ``qtensor.storage.tensor`` calls this once."""
    _LIBRARY.impl("_has_compatible_shallow_copy_type", _compatible, _KEY)
