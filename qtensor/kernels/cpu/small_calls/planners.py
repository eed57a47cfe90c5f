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
from typing import Any

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import Shape
from qtensor.core.linear_plans import backward_plan, forward_plan
from qtensor.kernels.cpu import native
from qtensor.kernels.cpu.buffers import SHARED, BufferLayout, buffer_layout
from qtensor.kernels.cpu.buffers import addresses as buffer_addresses
from qtensor.kernels.cpu.native import DTYPES
from qtensor.kernels.cpu.small_calls.calls import (
    Address,
    Arguments,
    CallProgram,
    Parse,
    are_buffers,
    outputs_at,
)
from qtensor.kernels.cpu.small_calls.products import (
    multiply,
    plan_gemm,
    plan_weight_gemm,
    read_addresses,
)
from qtensor.kernels.cpu.small_calls.program import (
    Builder,
    ProgramMatrix,
    Result,
    Source,
    serves,
)


def _is_one(t: Tensor | None, dtype: torch.dtype) -> bool:
    """Return whether `t` is absent, or holds one element of `dtype` that a kernel can read."""
    return t is None or (t.is_cpu and t.dtype is dtype and t.numel() == 1)


def _has_scale(scales: Tensor | None, role: int) -> bool:
    return scales is not None and scales.dtype is torch.float32 and scales.numel() > role


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
    if matrix_layout is None or call.dtype not in DTYPES:
        return None
    columnwise = matrix_layout.reads_columnwise
    read = (*matrix_layout.read_positions(columnwise), SHARED)
    if buffer_addresses(matrix_layout, call.buffers, not columnwise, read) is None:
        return None
    builder = Builder()
    at, slots = read_addresses(builder, matrix_layout)
    builder.decode(matrix_layout, at, Source(builder.call_address(), call.dtype))
    sources = call.all_at("buffers")
    return CallProgram(builder.build(), [*(sources[slot] for slot in slots), *outputs_at([0])])


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
    if len(matrix_layouts) < 2:
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
    if not multiply(builder, matrices[0], matrices[1], result):
        return None
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
    if matrix_layout is None or dy.dtype not in DTYPES:
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
    for kept in operands:
        operand_layout = None if kept is None else serves(*kept)
        if kept is None:
            matrices.append(None)
        elif operand_layout is None:
            return None
        else:
            matrices.append(builder.operand(kept[0], operand_layout))
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
    for operand, layout, sizes, out in (
        (weight, "NN", (rows, columns, width), results[:1]),
        (x, "NT", (width, columns, rows), results[-1:]),
    ):
        if operand and not multiply(builder, gradient, operand, Result(layout, sizes, *out)):
            return None
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
