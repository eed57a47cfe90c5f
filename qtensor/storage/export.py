"""Record in the graph of ``torch.export`` how a program makes a quantized tensor.

``torch.export`` traces above autograd, where a tensor subclass is one value. It records every op on
a value that it knows, but a constructor is not an op: without a record of it, the tensor would
become a constant of the program.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape

if TYPE_CHECKING:
    from qtensor.storage.tensor import QuantizedTensor


def _constructor(self: QuantizedTensor, *args: object, **kwargs: object) -> None:
    """Do nothing, because ``__new__`` has built the tensor."""


# torch recognises the constructor of a subclass by its name.
_constructor.__name__ = "__init__"
_constructor.__qualname__ = "QuantizedTensor.__init__"


@cache
def _recorder() -> Callable[..., None]:
    """Return torch's function that records a construction."""
    # Imported here, because importing torch._export is slow.
    from torch._export.wrappers import (  # noqa: PLC0415
        mark_subclass_constructor_exportable_experimental,
    )

    return mark_subclass_constructor_exportable_experimental(_constructor)


def record_construction(
    tensor: QuantizedTensor,
    shape: Shape,
    dtype: torch.dtype | None,
    canonical: str,
    buffers: dict[str, Tensor],
) -> None:
    """Record ``type(tensor)(shape, dtype, canonical, **buffers)``, whose result is ``tensor``.

    Args:
        tensor: the new quantized tensor.
        shape: its sizes, some of them symbolic.
        dtype: its nominal dtype.
        canonical: the canonical string of its quantizer.
        buffers: its inner buffers by constructor keyword.
    """
    _recorder()(tensor, tuple(shape), dtype, canonical, **buffers)
