"""Plan products: by the kernel of few rows where `few_rows` serves them, else by `torch.mm`.

The programs compute with the sums of the backend that `gemm` would choose, so that a call has the
same bytes before and after its program exists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape
from qtensor.core.quantizer_registry import transposed
from qtensor.kernels.cpu.buffers import (
    POSITIONS,
    SHARED,
    BufferLayout,
    addresses,
    buffer_layout,
)
from qtensor.kernels.cpu.native import DTYPES
from qtensor.kernels.cpu.small_calls.calls import (
    Address,
    Arguments,
    CallProgram,
    Parse,
    are_buffers,
    outputs_at,
)
from qtensor.kernels.cpu.small_calls.program import (
    SMALL,
    Builder,
    ProgramMatrix,
    Result,
    Source,
    can_multiply,
    serves,
)
from qtensor.kernels.products.problem import Problem, sides
from qtensor.kernels.products.weight_rows import few_rows_refusal, mirrored


def fits(m: int, n: int, k: int) -> bool:
    """Return whether a product is small, with sizes of 2 and more.

    A size of 1 has any stride, and `torch.mm` chooses its routine by strides.
    """
    return min(m, n, k) > 1 and max(m * n, n * k, m * k) <= SMALL


def read_addresses(builder: Builder, matrix_layout: BufferLayout) -> tuple[list[int], list[int]]:
    """Return the addresses of the buffers that a decode reads, by position, and their slots."""
    read = (SHARED, *matrix_layout.read_positions(matrix_layout.reads_columnwise))
    at, slots = [0] * POSITIONS, []
    for slot, index, _, _ in matrix_layout.slots:
        if index in read:
            at[index] = builder.call_address()
            slots.append(slot)
    return at, slots


class Operand(NamedTuple):
    """An operand of a product: its buffers, quantizer (None: plain), shape and address sources."""

    buffers: Sequence[Tensor]
    quantizer: Any
    shape: Shape
    sources: list[Address]


def plan_gemm(call: Arguments, outputs: list[Tensor], parse: Parse) -> CallProgram | None:
    """Plan `gemm`: two matrices, at least one of them quantized, to their product (M, N)."""
    if call.backend != "auto" or call.fast:
        return None  # The caller has chosen who computes.
    if not (call.a_quantizer or call.b_quantizer):
        return None
    a, b = [
        Operand(
            call.values[name], parse(canonical) if canonical else None, shape, call.all_at(name)
        )
        for name, canonical, shape in (
            ("a", call.a_quantizer, call.a_shape),
            ("b", call.b_quantizer, call.b_shape),
        )
    ]
    return _plan_product(call, a, b, call.layout, call.dtype)


def plan_weight_gemm(call: Arguments, outputs: list[Tensor], parse: Parse) -> CallProgram | None:
    """Plan `weight_gemm`: plain x (..., K) and a quantized weight (N, K) to (..., N)."""
    x, columns = call.x, call.x.shape[-1]
    rows = x.reshape(-1, columns).contiguous()
    a = Operand([rows], None, rows.shape, [call.at("x")])
    b = Operand(call.weight, parse(call.quantizer), (call.n, columns), call.all_at("weight"))
    return _plan_product(call, a, b, "TN", x.dtype)


def by_few_rows(a: Operand, b: Operand, layout: str) -> tuple[Operand, Operand] | None:
    """Return x and the rows of a weight, as the backend `few_rows` multiplies a product.

    Returns:
        None if it does not serve the product, or as a batch, which no program computes. The bias
        does not count: it follows the sums.
    """
    left, right = (
        ("" if o.quantizer is None else o.quantizer.canonical, o.shape, o.buffers[0].dtype)
        for o in (a, b)
    )
    problem = _problem(left, right, layout)
    if problem.batched or few_rows_refusal(problem) is not None:
        return None
    turned = mirrored(problem)
    if turned is not None:
        return b._replace(shape=turned.a.shape), a
    return a, b if layout == "TN" else _transposed(b)


Side = tuple[str, Shape, torch.dtype]


def _problem(a: Side, b: Side, layout: str) -> Problem:
    return Problem(*sides(a, b, layout), layout, torch.float32, device="cpu")


def multiply(builder: Builder, a: ProgramMatrix, b: ProgramMatrix, result: Result) -> bool:
    """Add the product of two quantized matrices to a program, with the sums that `gemm` has.

    Returns:
        False, with nothing added, if no step computes it.
    """
    layout, (m, n, k), out, bias = result
    shape = (n, k) if layout == "TN" else (k, n)
    codes = torch.uint8
    left, right = (a.quantizer.canonical, (m, k), codes), (b.quantizer.canonical, shape, codes)
    if layout != "NT" and few_rows_refusal(_problem(left, right, layout)) is None:
        rows = b if layout == "TN" else _turned(b, (n, k))
        if rows is not None:
            builder.multiply_few_rows(a, rows, m, out, bias)
            return True
    if not can_multiply() or not fits(m, n, k):
        return False
    builder.multiply(a, b, result)
    return True


def _turned(matrix: ProgramMatrix, shape: Shape) -> ProgramMatrix | None:
    """Return the rows (N, K) of a matrix (K, N), or None if its codes lie across them."""
    twin, moves = matrix.quantizer.transpose_plan
    matrix_layout = buffer_layout(twin, torch.Size(shape))
    if matrix_layout is None:
        return None
    slots = matrix.quantizer.slots
    known = {slots[i].name: (matrix.at[p], size) for i, p, size, _ in matrix.layout.slots}
    at = [0] * POSITIONS
    for slot, position, _, _ in matrix_layout.slots:
        _, name, make_view = moves[slot]
        at[position], size = known[name]
        if make_view is not None and min(size) > 1:
            return None
    return ProgramMatrix(twin, matrix_layout, at)


def _transposed(matrix: Operand) -> Operand:
    quantizer = matrix.quantizer
    twin, rows = transposed(quantizer, matrix.buffers[: len(quantizer.slots)])
    sources = [matrix.sources[slot] for slot in _source_slots(quantizer)]
    return Operand(rows, twin, matrix.shape[::-1], sources)


def _plan_few_rows(
    call: Arguments, x: Operand, weight: Operand, dtype: torch.dtype
) -> CallProgram | None:
    """Plan x (..., K) @ weight (N, K).T with the `bias` of the call."""
    bias, (n, columns), rows = call.bias, weight.shape, math.prod(x.shape[:-1])
    matrix_layout = readable(weight)
    if matrix_layout is None or dtype not in DTYPES:
        return None
    if bias is not None and (bias.dtype not in DTYPES or tuple(bias.shape) != (n,)):
        return None
    builder = Builder()
    left: ProgramMatrix | Source
    if x.quantizer is None:
        plain = x.buffers[0]
        if plain.dtype not in DTYPES or not plain.is_contiguous():
            return None
        if plain.numel() != rows * columns:
            return None
        left, sources = Source(builder.call_address(), plain.dtype), x.sources[:1]
    else:
        left_layout = readable(x)
        if left_layout is None:
            return None
        left = builder.operand(x.quantizer, left_layout)
        sources = x.sources[: len(left_layout.slots)]
    matrix = builder.operand(weight.quantizer, matrix_layout)
    out = Source(builder.call_address(), dtype)
    added = None if bias is None else Source(builder.call_address(), bias.dtype)
    builder.multiply_few_rows(left, matrix, rows, out, added)
    sources = [*sources, *weight.sources[: len(matrix_layout.slots)], *outputs_at([0])]
    return CallProgram(builder.build(), sources if bias is None else [*sources, call.at("bias")])


def readable(operand: Operand) -> BufferLayout | None:
    """Return the layout of a quantized operand that kernels read, or of rows of one; or None."""
    matrix_layout = buffer_layout(operand.quantizer, torch.Size(operand.shape))
    if matrix_layout is None or addresses(matrix_layout, operand.buffers, True) is None:
        return None
    return matrix_layout


def _source_slots(quantizer: Any) -> list[int]:
    """Return for each slot of the transpose of a matrix the slot of the matrix that it views."""
    names = [slot.name for slot in quantizer.slots]
    return [names.index(name) for _, name, _ in quantizer.transpose_plan[1]]


def _plan_product(
    call: Arguments, left: Operand, right: Operand, layout: str, dtype: torch.dtype
) -> CallProgram | None:
    """Plan a product with the `bias` of the call."""
    few = by_few_rows(left, right, layout)
    if few is not None:
        x, weight = few
        if right.quantizer is None:
            # The weight is on the left: the result is a column, or the transpose of the program's.
            return _plan_few_rows(call, x, weight, dtype) if math.prod(x.shape[:-1]) == 1 else None
        if layout == "TN" or readable(weight) is not None:
            return _plan_few_rows(call, x, weight, dtype)
        # Codes of MX that lie across the contraction: `few_rows` refuses them too.
    return _plan_small_product(call, left, right, layout, dtype)


def _plan_small_product(
    call: Arguments, left: Operand, right: Operand, layout: str, dtype: torch.dtype
) -> CallProgram | None:
    """Plan a product of decoded matrices by `torch.mm`."""
    a_shape, b_shape, bias = left.shape, right.shape, call.bias
    if len(a_shape) != 2 or len(b_shape) != 2:
        return None
    m, k = (a_shape[1], a_shape[0]) if layout == "NT" else (a_shape[0], a_shape[1])
    n = b_shape[0] if layout == "TN" else b_shape[1]
    if tuple(b_shape) != ((n, k) if layout == "TN" else (k, n)):
        return None
    if not fits(m, n, k) or dtype not in DTYPES or not can_multiply():
        return None
    if bias is not None and (bias.dtype not in DTYPES or tuple(bias.shape) != (n,)):
        return None
    builder = Builder()
    addresses: list[Address] = []
    matrices: list[ProgramMatrix | Source] = []
    for buffers, quantizer, shape, sources in (left, right):
        matrix = _matrix(builder, buffers, quantizer, shape)
        if matrix is None and len(matrices) == 1 and layout in _OTHER_LAYOUT:
            matrix, slots = _transposed_matrix(builder, buffers, quantizer, shape)
            sources, layout = [sources[slot] for slot in slots], _OTHER_LAYOUT[layout]
        if matrix is None:
            return None
        matrices.append(matrix)
        if isinstance(matrix, ProgramMatrix):
            sources = sources[: len(matrix.layout.slots)]
        addresses += sources
    out = Source(builder.call_address(), dtype)
    added = None if bias is None else Source(builder.call_address(), bias.dtype)
    builder.multiply(matrices[0], matrices[1], Result(layout, (m, n, k), out, added))
    addresses += outputs_at([0]) if bias is None else [*outputs_at([0]), call.at("bias")]
    return CallProgram(builder.build(), addresses)


def refuse_gemm(problem: Problem) -> str | None:
    """Return why no program decodes and multiplies on a CPU, or None if one does."""
    if len(problem.a.shape) != 2 or len(problem.b.shape) != 2:
        return "an operand is a batch of matrices"
    if few_rows_refusal(problem) is None:
        return "its programs run the kernel of few_rows"
    _, m, n, k = problem.sizes
    if not fits(m, n, k):
        return f"a matrix has more than {SMALL} elements, or a size is below 2"
    if problem.dtype not in DTYPES:
        return f"no program writes {problem.dtype}"
    if not (problem.a.canonical or problem.b.canonical):
        return "both operands are plain"
    for side in (problem.a, problem.b):
        served = serves(side.quantizer, side.shape) if side.canonical else side.dtype in DTYPES
        if not served:
            return f"no program reads {side.label}"
    if problem.bias is not None and not (problem.bias[0] == (n,) and problem.bias[1] in DTYPES):
        return f"the bias is not a vector of {n} values that a program reads"
    return None if can_multiply() else "the library that multiplies is not built"


def _matrix(
    builder: Builder, buffers: Sequence[Tensor], quantizer: Any, shape: Shape
) -> ProgramMatrix | Source | None:
    """Return an operand (rows, columns) of the call; `quantizer` is None for a plain one."""
    if quantizer is None:
        plain = buffers[0]
        if plain.dtype not in DTYPES or tuple(plain.shape) != tuple(shape):
            return None
        if not plain.is_contiguous():
            return None
        return Source(builder.call_address(), plain.dtype)
    matrix_layout = serves(quantizer, tuple(shape))
    if matrix_layout is None or not are_buffers(buffers, matrix_layout):
        return None
    if not all(buffer.is_contiguous() for buffer in buffers):
        return None
    return builder.operand(quantizer, matrix_layout)


_OTHER_LAYOUT = {"NN": "TN", "TN": "NN"}
"""Layout of a product -> layout of the same product if `b` is passed as its transpose."""


def _transposed_matrix(
    builder: Builder, buffers: Sequence[Tensor], quantizer: Any, shape: Shape
) -> tuple[Source | None, list[int]]:
    """Return the values of a transposed weight (K, N), decoded as (N, K), and the slots it reads.

    `torch.nn.functional.linear` passes `weight.t()`, whose buffers are transposed views.
    """
    if quantizer is None or quantizer.rowwise or buffers[0].is_contiguous():
        return None, []
    count = len(quantizer.slots)
    twin, rows = transposed(quantizer, buffers[:count])
    matrix_layout = serves(twin, tuple(shape[::-1]))
    if matrix_layout is None or not are_buffers(rows, matrix_layout):
        return None, []
    if not all(buffer.is_contiguous() for buffer in rows):
        return None, []
    own_slots = _source_slots(quantizer)
    at, slots = read_addresses(builder, matrix_layout)
    return builder.decoded(matrix_layout, at), [own_slots[slot] for slot in slots]
