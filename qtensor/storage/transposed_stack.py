"""Transpose each matrix of a stack (..., A, B) without a copy, as products of experts read it.

The bytes of a transposed stack lie in another order than those of the stack. They are copied when
something reads a buffer. Products and ``dequantize`` read the stack itself.
"""

from __future__ import annotations

from typing import Any

import torch

from qtensor.storage import geometry
from qtensor.storage.base import ViewNote
from qtensor.storage.rebuild import make_wrapper, same
from qtensor.storage.write import inherit_note


def transpose_stack(stack: Any, quantizer: Any) -> Any:
    """Return ``stack.mT``, which has no buffers yet.

    Args:
        stack: quantized, (..., A, B), at least three dims.
        quantizer: describes the buffers of the result, once it has some.
    """
    shape = (*stack.shape[:-2], stack.shape[-1], stack.shape[-2])
    turned = make_wrapper(stack, shape, quantizer)
    # Another object: the caller may give `stack` other buffers.
    turned._stack = same(stack)
    return inherit_note(turned, stack, ViewNote(is_copy=True))


class MissingBuffer:
    """What reads a buffer that a tensor does not hold: None, or the bytes of a transposed stack.

    A descriptor of the class, behind the attributes of a tensor.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, t: Any, owner: Any = None) -> Any:
        if t is None:
            return None
        stack = t._stack
        if stack is None:  # another thread may have set the buffer since it was looked up
            return t.__dict__.get(self.name)
        with torch.inference_mode(t.is_inference()):
            buffers = geometry.transpose_each(stack, t._quantizer)
        for name, buffer in zip(t._quantizer.slot_names, buffers, strict=True):
            setattr(t, name, buffer)
        t._stack = None
        return t.__dict__.get(self.name)
