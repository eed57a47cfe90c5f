"""For each op: the program of a small call, and where the addresses of the program come from.

A planner reads the arguments and outputs of a call that the Python kernel has just served. It
returns a `CallProgram`, or None if programs do not serve such a call: large or empty matrices,
sizes of 1, dtypes and formats without a kernel, buffers that do not have the shapes of their
quantizer.
C++ runs the program only for calls with the same shapes, dtypes, alignment, strings and numbers,
and checks device and layout of every tensor at each call. A tensor is contiguous, or the transpose
of a contiguous matrix, which belongs to the description and which only `plan_gemm` takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtensor.kernels.cpu import native
from qtensor.kernels.cpu.buffers import POSITIONS, SHARED, BufferLayout, buffer_layout
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
    available,
    serves,
)
from qtensor.kernels.gemm.problem import Problem
from qtensor.layout import Shape
from qtensor.linear_plans import backward_plan, forward_plan
from qtensor.registry import transposed


def _is_one(t: Tensor | None, dtype: torch.dtype) -> bool:
    """Return whether `t` is absent, or holds one element of `dtype` that a kernel can read."""
    return t is None or (t.is_cpu and t.dtype is dtype and t.numel() == 1)


def _has_scale(scales: Tensor | None, role: int) -> bool:
    return scales is not None and scales.dtype is torch.float32 and scales.numel() > role


def _fits(m: int, n: int, k: int) -> bool:
    """Return whether a product is small. Sizes of 1 make `torch.mm` choose another routine."""
    return min(m, n, k) > 1 and max(m * n, n * k, m * k) <= SMALL


def _small_layout(quantizer: Any, shape: Shape) -> BufferLayout | None:
    return (
        None
        if math.prod(shape) > native.ONE_THREAD
        else buffer_layout(quantizer, torch.Size(shape))
    )


# ---- quantize and dequantize --------------------------------------------------------------------


def plan_quantize(call: Arguments, outputs: list[Tensor], parse: Parse) -> CallProgram | None:
    """Plan `quantize`: x (..., K) to buffers in slot order, then the amax of delayed scaling."""
    quantizer = parse(call.quantizer)
    x, scale, seed = call.x, call.scale, call.seed
    matrix_layout = _small_layout(quantizer, x.shape)
    if matrix_layout is None or x.dtype not in DTYPES or call.amax is not None:
        return None
    if matrix_layout.stores_global:
        return None
    if (scale is not None) != quantizer.needs_scale:
        return None
    if not (_is_one(scale, torch.float32) and _is_one(seed, torch.int64)):
        return None
    builder = Builder()
    x_at, scale_at, seed_at = (builder.call_address() for _ in range(3))
    saved = {slot.name: builder.call_address() for slot in quantizer.slots}
    values = {"seed": seed_at} | ({"scale": scale_at} if quantizer.needs_scale else {})
    if quantizer.returns_amax:
        is_returned = len(outputs) > len(quantizer.slots)
        values["amax"] = builder.call_address() if is_returned else builder.scratch_memory(4)
    builder.quantize(quantizer, matrix_layout, Source(x_at, x.dtype), saved, values)
    addresses = [call.at("x"), call.at("scale"), call.at("seed"), *outputs_at(range(len(outputs)))]
    # Kernels never write padding.
    padded = [i for i, slot in enumerate(quantizer.slots) if slot.padded]
    return CallProgram(builder.build(), addresses, padded)


def plan_quantize_in_place(
    call: Arguments, outputs: list[Tensor], parse: Parse
) -> CallProgram | None:
    """Plan `quantize_`: x (..., K) into the buffers of `out`, in slot order."""
    quantizer = parse(call.quantizer)
    matrix_layout = _small_layout(quantizer, call.x.shape)
    if matrix_layout is None or call.noop_flag is not None or len(call.out) < len(quantizer.slots):
        return None
    if not are_buffers(call.out, matrix_layout):
        return None
    planned = plan_quantize(call, call.out, parse)
    if planned is None:
        return None
    given = planned.addresses[: -len(call.out)]
    return CallProgram(planned.program, [*given, *call.all_at("out")])


def plan_dequantize(call: Arguments, outputs: list[Tensor], parse: Parse) -> CallProgram | None:
    """Plan `dequantize`: buffers in slot order to a tensor of the logical shape."""
    quantizer = parse(call.quantizer)
    matrix_layout = _small_layout(quantizer, call.shape)
    if (
        matrix_layout is None
        or call.dtype not in DTYPES
        or not are_buffers(call.buffers, matrix_layout)
    ):
        return None
    builder = Builder()
    at, slots = _read_addresses(builder, matrix_layout)
    builder.decode(matrix_layout, at, Source(builder.call_address(), call.dtype))
    sources = call.all_at("buffers")
    return CallProgram(builder.build(), [*(sources[slot] for slot in slots), *outputs_at([0])])


def _read_addresses(builder: Builder, matrix_layout: BufferLayout) -> tuple[list[int], list[int]]:
    """Return the addresses of the buffers that a decode reads, by position, and their slots."""
    read = (SHARED, *matrix_layout.read_positions(matrix_layout.reads_columnwise))
    at, slots = [0] * POSITIONS, []
    for slot, index, _, _ in matrix_layout.slots:
        if index in read:
            at[index] = builder.call_address()
            slots.append(slot)
    return at, slots


# ---- products -----------------------------------------------------------------------------------


class _Operand(NamedTuple):
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
        _Operand(
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
    a = _Operand([rows], None, rows.shape, [call.at("x")])
    b = _Operand(call.weight, parse(call.quantizer), (call.n, columns), call.all_at("weight"))
    if call.n * columns > SMALL:
        return _plan_few_rows(call, rows, b)
    return _plan_product(call, a, b, "TN", x.dtype)


def _plan_few_rows(call: Arguments, x: Tensor, weight: _Operand) -> CallProgram | None:
    """Plan x (M, K) times a large weight (N, K): the product of the backend `few_rows`."""
    bias, quantizer = call.bias, weight.quantizer
    matrix_layout = buffer_layout(quantizer, torch.Size(weight.shape))
    if matrix_layout is None or not are_buffers(weight.buffers, matrix_layout):
        return None
    if not 0 < x.shape[0] <= native.MOST_ROWS or x.dtype not in DTYPES or not quantizer.rowwise:
        return None
    if bias is not None and (bias.dtype not in DTYPES or tuple(bias.shape) != (call.n,)):
        return None
    builder = Builder()
    source = Source(builder.call_address(), x.dtype)
    matrix = builder.operand(quantizer, matrix_layout)
    out = Source(builder.call_address(), x.dtype)
    added = None if bias is None else Source(builder.call_address(), bias.dtype)
    builder.multiply_few_rows(source, matrix, x.shape[0], out, added)
    addresses = [call.at("x"), *weight.sources[: len(matrix_layout.slots)], *outputs_at([0])]
    return CallProgram(
        builder.build(), addresses if bias is None else [*addresses, call.at("bias")]
    )


def _plan_product(
    call: Arguments, left: _Operand, right: _Operand, layout: str, dtype: torch.dtype
) -> CallProgram | None:
    """Plan a product with the `bias` of the call."""
    a_shape, b_shape, bias = left.shape, right.shape, call.bias
    if len(a_shape) != 2 or len(b_shape) != 2:
        return None
    m, k = (a_shape[1], a_shape[0]) if layout == "NT" else (a_shape[0], a_shape[1])
    n = b_shape[0] if layout == "TN" else b_shape[1]
    if tuple(b_shape) != ((n, k) if layout == "TN" else (k, n)):
        return None
    if not _fits(m, n, k) or dtype not in DTYPES or not available():
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
    """Return why no program computes a product on a CPU, or None if one does."""
    if len(problem.a.shape) != 2 or len(problem.b.shape) != 2:
        return "an operand is a batch of matrices"
    _, m, n, k = problem.sizes
    if not _fits(m, n, k):
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
    return None if available() else "the matrix product of torch was not found"


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
    names = [slot.name for slot in quantizer.slots]
    own_slots = [names.index(name) for _, name, _ in quantizer.transpose_plan[1]]
    at, slots = _read_addresses(builder, matrix_layout)
    return builder.decoded(matrix_layout, at), [own_slots[slot] for slot in slots]


# ---- linear layers ------------------------------------------------------------------------------


def plan_linear_forward(call: Arguments, outputs: list[Tensor], parse: Parse) -> CallProgram | None:
    """Plan `linear_forward`: x (M, K), weight (N, K) to [product (M, N), saved buffers, amaxes]."""
    x, weight, bias, scales = call.x, call.weight, call.bias, call.scales
    plan = forward_plan(call.plan)
    quantizers = [parse(canonical) for canonical in (plan.x_quantizer, plan.weight_quantizer)]
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        return None
    sizes = (x.shape[0], weight.shape[0], x.shape[1])
    served = (serves(q, tuple(t.shape)) for q, t in zip(quantizers, (x, weight), strict=True))
    matrix_layouts = [
        layout for layout in served if layout is not None and not layout.stores_global
    ]
    if not available() or not _fits(*sizes) or len(matrix_layouts) < 2:
        return None
    if any(dtype not in DTYPES for dtype in (x.dtype, weight.dtype, plan.dtype)):
        return None
    if bias is not None and (bias.dtype not in DTYPES or tuple(bias.shape) != (sizes[1],)):
        return None
    if not all(q.rowwise for q in quantizers):
        return None
    if any(q.needs_scale for q in quantizers) and not _has_scale(scales, 1):
        return None
    if not (_is_one(call.x_seed, torch.int64) and _is_one(call.weight_seed, torch.int64)):
        return None
    builder = Builder()
    x_at, w_at, bias_at, *scale_at, x_seed, w_seed, out_at = [
        builder.call_address() for _ in range(8)
    ]
    slots = [
        parse(canonical).slots if canonical else () for canonical in (plan.x_kept, plan.weight_kept)
    ]
    saved = [{slot.name: builder.call_address() for slot in group} for group in slots]
    amax_at = [builder.call_address() if q.returns_amax else 0 for q in quantizers]
    sources = ((x_at, x.dtype, x_seed), (w_at, weight.dtype, w_seed))
    matrices = []
    for i, (at, dtype, seed) in enumerate(sources):
        values = {"seed": seed, "amax": amax_at[i]}
        if quantizers[i].needs_scale:
            values["scale"] = scale_at[i]
        source = Source(at, dtype)
        matrices.append(
            builder.quantize(quantizers[i], matrix_layouts[i], source, saved[i], values)
        )
    added = None if bias is None else Source(bias_at, bias.dtype)
    result = Result("TN", sizes, Source(out_at, plan.dtype), added)
    builder.multiply(matrices[0], matrices[1], result)
    addresses = [call.at("x"), call.at("weight"), call.at("bias")]
    addresses += [call.at("scales"), call.at("scales", 4), call.at("x_seed")]
    addresses += [call.at("weight_seed"), *outputs_at(range(len(outputs)))]
    padded = [1 + i for i, slot in enumerate([*slots[0], *slots[1]]) if slot.padded]
    return CallProgram(builder.build(), addresses, padded)


def plan_linear_backward(
    call: Arguments, outputs: list[Tensor], parse: Parse
) -> CallProgram | None:
    """Plan `linear_backward`: dy (M, N) and the saved operands to gradients.

    The outputs are dgrad (M, K), wgrad (N, K), the gradient of the bias (N,) and the amax, those
    that the call asks for.
    """
    dy, columns, plan = call.dy, call.columns, backward_plan(call.plan)
    quantizer = parse(plan.quantizer)
    matrix_layout = serves(quantizer, tuple(dy.shape))
    if not available() or matrix_layout is None or dy.dtype not in DTYPES:
        return None
    if matrix_layout.stores_global:
        return None
    if quantizer.needs_scale and not _has_scale(call.scales, 2):
        return None
    if not _is_one(call.seed, torch.int64):
        return None
    rows, width = dy.shape
    operands: list[tuple[Any, tuple[int, int]] | None] = [
        (parse(canonical), (first, columns)) if canonical else None
        for canonical, first in ((plan.x_kept, rows), (plan.weight_kept, width))
    ]
    saved_addresses = _saved_addresses(call, operands)
    if saved_addresses is None:
        return None
    builder = Builder()
    dy_source = Source(builder.call_address(), dy.dtype)
    values = {"scale": builder.call_address(), "seed": builder.call_address()}
    addresses = [call.at("dy"), call.at("scales", 8), call.at("seed"), *saved_addresses]
    matrices: list[ProgramMatrix | None] = []
    for operand in operands:
        operand_layout = None if operand is None else serves(*operand)
        if operand is None:
            matrices.append(None)
        elif operand_layout is None or not _fits(rows, width, columns):
            return None
        else:
            matrices.append(builder.operand(operand[0], operand_layout))
    x, weight = matrices
    dtypes = ([plan.dtype] if weight else []) + ([plan.weight_dtype] if x else [])
    if any(dtype not in DTYPES for dtype in dtypes):
        return None
    results = [Source(builder.call_address(), dtype) for dtype in dtypes]
    bias_at = builder.call_address() if plan.bias else 0
    if quantizer.returns_amax:
        values["amax"] = builder.call_address()
    if not quantizer.needs_scale:
        del values["scale"]
    if quantizer.rowwise and matrix_layout.scale_inv is not None:
        # Both directions hold the same codes, and the products read their values once.
        quantizer = quantizer.with_usage(rowwise=True, columnwise=False)
        matrix_layout = serves(quantizer, tuple(dy.shape)) or matrix_layout
    gradient = builder.quantize(quantizer, matrix_layout, dy_source, {}, values)
    if weight is not None:
        builder.multiply(gradient, weight, Result("NN", (rows, columns, width), results[0]))
    if x is not None:
        builder.multiply(gradient, x, Result("NT", (width, columns, rows), results[-1]))
    if plan.bias:
        builder.sum_rows(dy_source, rows, width, bias_at)
    return CallProgram(builder.build(), [*addresses, *outputs_at(range(len(outputs)))])


def _saved_addresses(
    call: Arguments, operands: Sequence[tuple[Any, tuple[int, int]] | None]
) -> list[Address] | None:
    """Return the address sources of the saved buffers of x, then of the weight.

    None if no program reads the tensors of `saved`.
    """
    saved, first = call.saved, 0
    for operand in operands:
        if operand is None:
            continue
        operand_layout = serves(*operand)
        count = len(operand[0].slots)
        buffers = saved[first : first + count]
        if operand_layout is None or not are_buffers(buffers, operand_layout):
            return None
        first += count
    return call.all_at("saved") if first == len(saved) else None


Planner = Callable[[Arguments, list[Tensor], Parse], CallProgram | None]

PLANNERS: dict[str, Planner] = {
    "quantize": plan_quantize,
    "quantize_": plan_quantize_in_place,
    "dequantize": plan_dequantize,
    "gemm": plan_gemm,
    "weight_gemm": plan_weight_gemm,
    "linear_forward": plan_linear_forward,
    "linear_backward": plan_linear_backward,
}
"""Op name -> its planner."""
