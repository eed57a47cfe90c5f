"""Check the shape and the nominal dtype of a new tensor."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from qtensor.core.buffer_shapes import Shape
from qtensor.core.errors import DtypeError, fail
from qtensor.storage.rebuild import FLOATING


def as_shape(op: str, shape: Shape | int) -> tuple[int, ...]:
    """Return sizes as a tuple; a single size makes a 1-D shape, as in ``torch.empty(3)``.

    Raises:
        QTensorError: a size is not an integer, or is negative.
    """
    # Torch itself checks symbolic sizes.
    if torch.compiler.is_compiling():
        return (shape,) if isinstance(shape, int) else tuple(shape)
    try:
        sizes = tuple(shape) if isinstance(shape, Sequence) else (shape,)
        sizes = tuple(n if isinstance(n, torch.SymInt) else operator.index(n) for n in sizes)
    except TypeError:
        rule = "a shape is a sequence of sizes, or one size"
        fail(op, rule, repr(shape), "Pass a tuple such as (rows, columns)")
    if any(isinstance(n, int) and n < 0 for n in sizes):
        fail(op, "sizes must not be negative", repr(shape), "Fix the shape")
    return sizes


def check_nominal(op: str, dtype: object) -> None:
    """Refuse a dtype that cannot be the nominal dtype of a quantized tensor.

    Raises:
        DtypeError: ``dtype`` is not floating; the message lists the legal dtypes.
    """
    if dtype not in FLOATING:
        legal = ", ".join(str(d).removeprefix("torch.") for d in FLOATING)
        got = dtype if isinstance(dtype, torch.dtype) else repr(dtype)
        rule = f"the nominal dtype must be floating: one of {legal}"
        fail(op, rule, got, "Pass one of them, for example torch.float32", DtypeError)
