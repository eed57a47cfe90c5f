"""Compute products of quantized operands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from qtensor.core.errors import ArgumentTypeError, DtypeError, fail
from qtensor.core.operand import Operand, plain_operand
from qtensor.kernels.products.problem import Pair, facts_of, sides
from qtensor.library.gemm import (
    GEMM,
    GEMM_TENSOR,
    WEIGHT_GEMM,
    GemmArgs,
    check_bias,
    check_layout,
    check_operands,
    output_shape,
)
from qtensor.storage.base import QuantizedTensorStorage, TensorOrStorage, is_quantized
from qtensor.storage.ops.lazy_view import stack_of
from qtensor.storage.ops.table import COMPUTE, LIBRARY, Args, Kwargs, Op, implements
from qtensor.storage.ops.write import copy_into, plain
from qtensor.storage.rebuild import FLOATING

if TYPE_CHECKING:
    from qtensor.kernels.products.choice import Explanation
    from qtensor.storage.tensor import QuantizedTensor


def gemm(
    a: TensorOrStorage,
    b: TensorOrStorage,
    layout: str,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    *,
    backend: str = "auto",
    fast_accumulation: bool = False,
) -> Tensor:
    """Return the product of two operands, quantized (tensor or storage) or plain.

    Args:
        a: (..., M, K), or (..., K, M) in layout NT.
        b: (N, K) in layout TN, (K, N) otherwise; one matrix for the whole batch of ``a``, or the
            same batch dims as ``a``.
        layout: TN (``a @ b.T``), NN (``a @ b``) or NT (``a.T @ b``).
        bias: added in float32, broadcastable to the product.
        dtype: dtype of the result; the nominal dtype of ``a`` if None.
        backend: "auto", or the name of a backend, which computes the product or raises:
            "cutlass", "scaled_mm", "dequant", "integer", "amx", "few_rows", "dot_products",
            "tiles", "reference" (see ``qtensor.explain``). A product with a named backend has no
            gradient.
        fast_accumulation: let FP8 kernels for Hopper keep sums in the narrow accumulators of the
            tensor cores. Such a product has no gradient.

    Returns:
        (..., M, N) plain tensor of ``dtype``.

    Raises:
        QTensorError: the operands do not fit, an operand lacks the usage that the layout reads,
            or the named backend cannot compute the product.
    """
    if not (dtype is None or isinstance(dtype, torch.dtype)):
        rule = "the result's dtype must be a torch.dtype"
        fix = "Pass one, for example torch.float32"
        fail("gemm", rule, repr(dtype), fix, ArgumentTypeError)
    if not isinstance(layout, str):
        check_layout(layout)
    if backend != "auto" or fast_accumulation:
        return _gemm_by(call_of(a, b, layout, bias, dtype), backend, fast_accumulation)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return GEMM_TENSOR(a, b, layout, dtype, bias)
    return gemm_operands(a, b, layout, bias, dtype)


def gemm_operands(
    a: TensorOrStorage,
    b: TensorOrStorage,
    layout: str,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the product of two operands, computed by the gemm op.

    Args:
        a: (..., M, K), or (..., K, M) in layout NT; quantized or plain.
        b: (N, K) in layout TN, (K, N) otherwise; quantized or plain.
        layout: TN, NN or NT.
        bias: broadcastable to (..., M, N), or None.
        dtype: dtype of the result; the nominal dtype of ``a`` if None.
    """
    call = call_of(a, b, layout, bias, dtype)
    return GEMM(*call.operands.a, *call.operands.b, call.layout, call.dtype, bias)


def _gemm_by(call: GemmArgs, backend: str, fast: bool) -> Tensor:
    """Return the product that a named backend computes, without a gradient."""
    from qtensor.kernels.products.choice import check_backend  # noqa: PLC0415 - see library/gemm.py

    check_backend(backend)
    (a, b), layout, dtype, bias = call[:4]
    tensors = [*a.buffers, *b.buffers, *([] if bias is None else [bias])]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        rule = "a product with backend or fast_accumulation has no gradient"
        fix = "Leave both at their defaults, or call it under torch.no_grad()"
        fail("gemm", rule, "an operand that requires grad", fix)
    return GEMM(*a, *b, layout, dtype, bias, backend, fast)


def explain(
    a: TensorOrStorage,
    b: TensorOrStorage,
    layout: str = "TN",
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    *,
    arch: str | None = None,
) -> Explanation:
    """Return the backend that computes ``gemm(a, b, layout, bias, dtype)``, with reasons.

    Args:
        a: as for ``gemm``; only formats, shapes and strides count.
        b: as for ``gemm``.
        layout: as for ``gemm``.
        bias: as for ``gemm``.
        dtype: as for ``gemm``.
        arch: explain for operands on a GPU of this architecture, for example "sm_90a". If None,
            explain for the device of the operands.

    Returns:
        The backend, the kernel, and a reason for each backend. Its repr is a table.

    Raises:
        QTensorError: the operands do not fit.
    """
    from qtensor.kernels.products import choice, weight_rows  # noqa: PLC0415

    call = call_of(a, b, layout, bias, dtype)
    left, right = call.operands
    of_a, of_b = sides(facts_of(left), facts_of(right), call.layout)
    both = weight_rows.with_strides(of_a, left), weight_rows.with_strides(of_b, right)
    target = left.buffers[0].device if arch is None else arch
    return choice.explain(choice.problem_for(both, call.layout, call.dtype, bias, target))


def operand_of(t: TensorOrStorage) -> Operand:
    """Return a plain or quantized tensor, or a storage, as products take it."""
    if isinstance(t, QuantizedTensorStorage):
        return Operand(t.buffers(), t._quantizer.canonical, t.shape)
    return plain_operand(t)


def call_of(
    a: TensorOrStorage,
    b: TensorOrStorage,
    layout: str,
    bias: Tensor | None,
    dtype: torch.dtype | None,
) -> GemmArgs:
    """Return the arguments of the gemm op after checking devices, dtypes and shapes."""
    left, right = getattr(a, "_quantizer", None), getattr(b, "_quantizer", None)
    if a.dtype not in FLOATING or b.dtype not in FLOATING:
        fail(
            "gemm",
            "operands must be quantized or floating",
            f"{a.dtype} and {b.dtype}",
            "Convert them first",
        )
    if dtype is not None and dtype not in FLOATING:
        fail(
            "gemm",
            "the result's dtype must be floating",
            dtype,
            "Convert the result instead",
            DtypeError,
        )
    check_layout(layout)
    if a.device != b.device or (bias is not None and bias.device != a.device):
        fail(
            "gemm",
            "operands must be on one device",
            " and ".join(dict.fromkeys(str(t.device) for t in (a, b, bias) if t is not None)),
            "Move one with .to(device)",
        )
    check_operands(left, a.shape, right, b.shape, layout)
    if layout != "NT" and (stack := stack_of(b)) is not None:
        b, layout = stack, _OTHER_LAYOUT[layout]
    if layout == "NN" and len(a.shape) == len(b.shape) and (stack := stack_of(a)) is not None:
        a, layout = stack, "NT"
    if bias is not None:
        check_bias(bias.shape, output_shape(a.shape, b.shape, layout))
    return GemmArgs(Pair(operand_of(a), operand_of(b)), layout, dtype or a.dtype, bias)


_OTHER_LAYOUT = {"TN": "NN", "NN": "TN"}
"""Layout of a product -> layout of the same product with the transpose of its right operand."""


def aten_product(
    a: TensorOrStorage, b: TensorOrStorage, layout: str, bias: TensorOrStorage | None = None
) -> Tensor:
    """Return the product (..., M, N) of operands as an aten op passes them.

    Plain ``a`` times a quantized weight, as ``F.linear`` has it, is an op with fewer arguments. The
    ops check their operands.
    """
    if isinstance(bias, QuantizedTensorStorage):
        bias = plain(bias)
    if not isinstance(b, QuantizedTensorStorage) or len(b.shape) != 2:
        return gemm_operands(a, b, layout, bias)
    weight = operand_of(b)
    rows = weight.as_rows()
    if layout == "TN":
        if rows is not None:
            # The order of the sums is that of the ops into which torch decomposes a linear.
            return gemm_operands(a, cast(Tensor, b).t(), "NN", bias)
        rows = weight
    if isinstance(a, QuantizedTensorStorage):
        return GEMM(*operand_of(a), *weight, layout, a.dtype, bias)
    if a.dtype in FLOATING:
        k = a.shape[-1]
        if rows is not None and k == rows.shape[1]:
            return WEIGHT_GEMM(a, rows.buffers, rows.canonical, rows.shape[0], bias)
        if rows is None and k == weight.shape[0]:
            return WEIGHT_GEMM(a, weight.buffers, weight.canonical, weight.shape[1], bias, "NN")
    return gemm_operands(a, b, layout, bias)


@implements(LIBRARY, "gemm_tensor")
def _gemm_tensor(func: Op, args: Args, kwargs: Kwargs) -> Tensor:
    """Handle ``qtensor::gemm_tensor``."""
    a, b, layout, dtype, bias = (*args, None, None)[:5]
    return gemm_operands(
        a, b, layout, bias=kwargs.get("bias", bias), dtype=kwargs.get("dtype", dtype)
    )


def _ranks(op: str, operands: tuple[Any, ...], rank: int) -> None:
    if [t.ndim for t in operands] != [rank] * len(operands):
        fail(
            op,
            f"operands must have {rank} dims",
            [tuple(t.shape) for t in operands],
            "Use torch.matmul",
        )


@implements(COMPUTE, "mm")
def _mm(func: Op, args: Args, kwargs: Kwargs) -> Tensor:
    _ranks("mm", args[:2], 2)
    return aten_product(args[0], args[1], "NN")


@implements(COMPUTE, "bmm")
def _bmm(func: Op, args: Args, kwargs: Kwargs) -> Tensor:
    _ranks("bmm", args[:2], 3)
    return gemm_operands(args[0], args[1], "NN")


@implements(COMPUTE, "mv", "dot", "vdot")
def _mv(func: Op, args: Args, kwargs: Kwargs) -> Tensor:
    """Handle ``mv`` and ``dot``: the vector is the only row of a second operand."""
    a, vector = args
    _ranks("mv", (vector,), 1)
    rows = a if a.ndim == 2 else a.unsqueeze(0)
    product = gemm_operands(rows, vector.unsqueeze(0), "TN").squeeze(1)
    return product if a.ndim == 2 else product.squeeze(0)


@implements(COMPUTE, "addmm", "baddbmm")
def _addmm(func: Op, args: Args, kwargs: Kwargs) -> Tensor:
    bias, a, b = args
    _ranks("addmm", (a, b), 3 if "baddbmm" in func._schema.name else 2)
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    bias = plain(bias) if is_quantized(bias) else bias
    if alpha == 1 and beta == 1:
        return aten_product(a, b, "NN", bias)
    product = gemm_operands(a, b, "NN", dtype=torch.float32) * alpha
    return (product + beta * bias.float()).to(a.dtype) if beta else product.to(a.dtype)


@implements(COMPUTE, "addmm_", "baddbmm_")
def _addmm_in_place(func: Op, args: Args, kwargs: Kwargs) -> Tensor:
    return copy_into(args[0], _addmm(func, args, kwargs))


@implements(COMPUTE, "linear")
def linear(func: Op, args: Args, kwargs: Kwargs) -> Tensor:
    """Handle ``linear``, which arrives whole in inference mode and from ``whole_products``."""
    x, weight, bias = (*args, kwargs.get("bias"))[:3]
    return aten_product(x, weight, "TN", bias)


@implements(COMPUTE, "matmul")
def matmul(func: Op, args: Args, kwargs: Kwargs) -> Tensor:
    """Handle ``matmul``, which arrives whole in inference mode and from ``whole_products``."""
    a, b = args
    if b.ndim == 2 and (a.ndim > 1 or is_quantized(b)):
        return aten_product(a, b, "NN")
    decomposed: Tensor = func.decompose(a, b)
    return decomposed


@implements(COMPUTE, "dequantize")
def _dequantize(func: Op, args: Args, kwargs: Kwargs) -> Tensor:
    """Handle ``torch.dequantize(q)``, which does not call the method of the class."""
    return plain(args[0])


# ---- F.scaled_mm, of which the modules are imported by the first call


class ScaledArguments:
    """Gives quantized tensors the methods that return arguments of ``scaled_mm``."""

    __slots__ = ()

    def scaled_mm_args(self, side: str = "a", *, codes: bool = False) -> dict[str, Any]:
        """Return the arguments of ``torch.nn.functional.scaled_mm`` for this matrix.

        ``F.scaled_mm(**x.scaled_mm_args("a"), **w.scaled_mm_args("b"))`` is ``x @ w.T``, on a GPU
        and on a CPU.

        Args:
            side: "a" or "b". The matrix is (M, K) as ``a`` and (N, K) as ``b``; its rowwise data
                are read, so that a transposed tensor gives its columnwise data.
            codes: return plain codes in a dtype of torch as ``mat_a`` or ``mat_b``, for code that
                must not see a quantized tensor.

        Returns:
            ``mat_a``, ``scale_a``, ``scale_recipe_a`` and ``swizzle_a``, or the same for b.
            ``mat_b`` is (K, N). Factors are views where the format stores them as torch reads them;
            factors of MX and NVFP4 are copied unless the quantizer has ``swizzled=True``.

        Raises:
            UnsupportedError: torch has no recipe for the format or its options.
            QTensorError: the tensor is not a matrix, or is a slice that lacks padding.
        """
        from qtensor.storage.ops import scaled_arguments  # noqa: PLC0415

        return scaled_arguments.scaled_mm_args(cast("QuantizedTensor", self), side, codes)

    def scaled_grouped_mm_args(
        self,
        side: str = "a",
        *,
        offs: Tensor | None = None,
        along_k: bool = False,
        codes: bool = False,
    ) -> dict[str, Any]:
        """Return the arguments of ``torch.nn.functional.scaled_grouped_mm`` for this tensor.

        ``F.scaled_grouped_mm(**x.scaled_grouped_mm_args("a", offs=offs),
        **w.scaled_grouped_mm_args("b"), offs=offs)`` multiplies each group of rows of x (M, K) by
        the transpose of its own matrix of the stack w (groups, N, K).

        Args:
            side: "a" or "b"; the tensor is (..., rows, K) on both sides.
            offs: int32 (groups,): where each group of a matrix ends; None for a stack. It is read
                on its device.
            along_k: the groups of a matrix lie along K, as in gradients of weights. Each must have
                a multiple of the block size.
            codes: as for ``scaled_mm_args``.

        Returns:
            As ``scaled_mm_args``. The factors of each group are padded on their own, and copied.

        Raises:
            UnsupportedError: torch has no recipe for the format or its options.
            QTensorError: the tensor is neither a matrix with ``offs`` nor a stack without.
        """
        from qtensor.storage.ops import scaled_arguments  # noqa: PLC0415

        return scaled_arguments.scaled_grouped_mm_args(
            cast("QuantizedTensor", self), side, offs, along_k, codes
        )


@implements(COMPUTE, "_scaled_mm_v2")
def _scaled_mm(func: Op, args: Args, kwargs: Kwargs) -> Tensor:
    from qtensor.storage.ops import scaled_mm  # noqa: PLC0415

    return scaled_mm.scaled_mm(func, args, kwargs)


@implements(COMPUTE, "_scaled_grouped_mm_v2")
def _scaled_grouped_mm(func: Op, args: Args, kwargs: Kwargs) -> Tensor:
    from qtensor.storage.ops import scaled_mm  # noqa: PLC0415

    return scaled_mm.scaled_grouped_mm(func, args, kwargs)
