"""The quantized matmul op, with the reference backend."""

from __future__ import annotations

import torch
from torch import Tensor

from qtensor.errors import check, fail
from qtensor.layout import Shape
from qtensor.library.codec import Codec, by_name, parse
from qtensor.library.define import LIBRARY, leaf_op
from qtensor.reference.gemm import matmul

LAYOUTS = ("TN", "NN", "NT")
"""TN: ``a @ b.T`` (fprop, both rowwise). NN: ``a @ b`` (dgrad, a rowwise, b columnwise). NT: ``a.T @ b`` (wgrad,
both columnwise). The letters are the field's: the operand that is transposed in a column-major GEMM."""


def output_shape(a_shape: Shape, b_shape: Shape, layout: str) -> tuple[int, ...]:
    """Shape of the product of operands with logical shapes ``a_shape`` and ``b_shape``."""
    if layout == "TN":
        return (*a_shape[:-1], b_shape[-2])
    if layout == "NN":
        return (*a_shape[:-1], b_shape[-1])
    return (*a_shape[:-2], a_shape[-1], b_shape[-1])


def _gemm_alloc(
    a: list[Tensor],
    a_quantizer: str,
    a_shape: Shape,
    b: list[Tensor],
    b_quantizer: str,
    b_shape: Shape,
    layout: str,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    return torch.empty(output_shape(a_shape, b_shape, layout), dtype=dtype, device=a[0].device)


def _gemm_fill(
    out: Tensor,
    a: list[Tensor],
    a_quantizer: str,
    a_shape: Shape,
    b: list[Tensor],
    b_quantizer: str,
    b_shape: Shape,
    layout: str,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> None:
    left, right, factor = _decode_operands(a, a_quantizer, a_shape, b, b_quantizer, b_shape, layout)
    left = left.mT if layout == "NT" else left
    right = right.mT if layout == "TN" else right
    out.copy_(matmul(left, right, factor, bias))


def _decode_operands(
    a: list[Tensor],
    a_quantizer: str,
    a_shape: Shape,
    b: list[Tensor],
    b_quantizer: str,
    b_shape: Shape,
    layout: str,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Both operands in float32; where each has one factor for the whole tensor, codes and the product of the factors."""
    left, right = (parse(q) if q else None for q in (a_quantizer, b_quantizer))
    if left is not None and right is not None and left.per_tensor and right.per_tensor:
        a_values, a_factor = left.decode_codes(by_name(left, a), tuple(a_shape))
        b_values, b_factor = right.decode_codes(by_name(right, b), tuple(b_shape))
        return a_values, b_values, a_factor * b_factor
    # One operand quantized: its value counts, whichever side holds it. Both: the sides whose blocks run along the
    # contraction.
    both = left is not None and right is not None
    return (
        _values(left, a, a_shape, layout == "NT" if both else None),
        _values(right, b, b_shape, layout != "TN" if both else None),
        None,
    )


def _values(
    codec: Codec | None, buffers: list[Tensor], shape: Shape, columnwise: bool | None
) -> Tensor:
    if codec is None:
        return buffers[0].float()
    return codec.decode(by_name(codec, buffers), tuple(shape), columnwise)


def check_operands(
    a: Codec | None, a_shape: Shape, b: Codec | None, b_shape: Shape, layout: str
) -> None:
    """Refuse operands whose sizes do not meet or whose blocks do not run along the contraction.

    Raises:
        QTensorError: with the rule that is broken and the way out.
    """
    left = a_shape[-2] if layout == "NT" else a_shape[-1]
    right = b_shape[-1] if layout == "TN" else b_shape[-2]
    if left != right:
        fail(
            "gemm",
            f"the contracted sizes must be equal in layout {layout}",
            f"a {tuple(a_shape)}, b {tuple(b_shape)}",
            "Transpose one operand or mend the shapes",
        )
    if a is None or b is None:
        return
    for name, codec, columnwise in (("a", a, layout == "NT"), ("b", b, layout != "TN")):
        usage = "columnwise" if columnwise else "rowwise"
        check(
            getattr(codec, usage) or codec.spec.transpose_shares_bytes,
            f"gemm[{codec.format}]",
            f"operand {name} needs {usage} data, whose blocks run along the contraction",
            f"rowwise={codec.rowwise}, columnwise={codec.columnwise}",
            f"Quantize it with {usage}=True",
        )


GEMM = leaf_op(
    "gemm(Tensor[] a, str a_quantizer, SymInt[] a_shape, Tensor[] b, str b_quantizer, SymInt[] b_shape, "
    "str layout, ScalarType dtype, Tensor? bias=None) -> Tensor",
    _gemm_alloc,
    _gemm_fill,
)
"""Product of two operands, each the buffers of a quantized tensor or (quantizer "") one plain tensor."""

LIBRARY.define(
    "gemm_tensor(Tensor a, Tensor b, str layout, ScalarType? dtype=None, Tensor? bias=None) -> Tensor"
)


def _gemm_plain(
    a: Tensor, b: Tensor, layout: str, dtype: torch.dtype | None = None, bias: Tensor | None = None
) -> Tensor:
    """For two plain tensors. A subclass answers the op in its dispatch table instead."""
    return GEMM([a], "", a.shape, [b], "", b.shape, layout, dtype or a.dtype, bias)


LIBRARY.impl("gemm_tensor", _gemm_plain, "CompositeExplicitAutograd")
torch.library.register_fake(
    "qtensor::gemm_tensor",
    lambda a, b, layout, dtype=None, bias=None: torch.empty(
        output_shape(a.shape, b.shape, layout), dtype=dtype or a.dtype, device=a.device
    ),
    lib=LIBRARY,
)
GEMM_TENSOR = torch.ops.qtensor.gemm_tensor.default
"""``gemm`` over tensors themselves, so that one made inside a compiled region can be an operand."""
