"""Describe quantizers, plans and products to the C++ ops.

The structs are those of src/ops/description.h, field by field. C++ does not parse canonical texts
and does not know which buffers a format has: `describe` tells it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from qtensor.core.formats import Slot
from qtensor.core.row_format import RowFormat
from qtensor.kernels.cpu.attention import stored_ids
from qtensor.kernels.cpu.buffers import POSITION_OF, is_columnwise, position_of_row_factors
from qtensor.kernels.cpu.structs import CQuantizer, c_quantizer, fields, refusal

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.int64,
    torch.int32,
    torch.bool,
)
"""The dtypes that the C++ ops know, in the order of `enum TensorType` of torch_abi.h."""
_AXES = ("lead", "m", "k", "one")
_MAX_SLOTS, _MAX_SLOT_DIMS = 10, 4


class CDim(ctypes.Structure):
    """`struct Dim`."""

    _fields_ = fields("axis per units pad", ctypes.c_int32)


class CSlot(ctypes.Structure):
    """`struct Slot`."""

    _fields_ = (
        *fields("position dtype dims", ctypes.c_int32),
        ("dim", CDim * _MAX_SLOT_DIMS),
    )


class CDescription(ctypes.Structure):
    """`struct Description`."""

    _fields_ = (
        ("quantizer", CQuantizer),
        *fields(
            "slots needs_scale returns_amax stochastic per_tensor stores_global", ctypes.c_int32
        ),
        ("columnwise", ctypes.c_int32 * 3),
        ("rows_of_factors", ctypes.c_int32),
        ("slot", CSlot * _MAX_SLOTS),
        ("text", ctypes.c_char_p),
    )


def describe(quantizer: Any) -> CDescription | None:
    """Return the description of a quantizer, or None if C++ does not serve it."""
    slots = quantizer.slots
    if refusal(quantizer) is not None or len(slots) > _MAX_SLOTS:
        return None
    names = [slot.name for slot in slots]
    directions = [is_columnwise(quantizer, wanted) for wanted in (None, False, True)]
    if "_scale_inv" in names:
        # Both directions hold the same codes.
        directions = [not {"_data", "_rowwise_data"} & set(names)] * 3
    rows = position_of_row_factors(quantizer)
    return CDescription(
        quantizer=c_quantizer(quantizer),
        slots=len(slots),
        needs_scale=quantizer.needs_scale,
        returns_amax=quantizer.returns_amax,
        stochastic=quantizer.stochastic_rounding,
        per_tensor=quantizer.per_tensor,
        stores_global=any("global_scale_inv" in name for name in names),
        columnwise=(ctypes.c_int32 * 3)(*directions),
        rows_of_factors=-1 if rows is None else rows,
        slot=(CSlot * _MAX_SLOTS)(*(_slot(slot) for slot in slots)),
        text=quantizer.canonical.encode(),
    )


def _slot(slot: Slot) -> CSlot:
    dims = [CDim(_AXES.index(dim.axis), dim.per, dim.units, dim.pad) for dim in slot.dims]
    array = (CDim * _MAX_SLOT_DIMS)(*dims)
    return CSlot(POSITION_OF[slot.name], DTYPES.index(slot.dtype), len(dims), array)


class CTwin(ctypes.Structure):
    """`struct Twin`."""

    _fields_ = (
        ("d", ctypes.c_void_p),
        ("source", ctypes.c_int32 * _MAX_SLOTS),
        ("turned", ctypes.c_int32 * _MAX_SLOTS),
    )


def describe_twin(quantizer: Any, address: int) -> CTwin:
    """Return how the transpose of a matrix views its buffers.

    Args:
        quantizer: of the matrix.
        address: of the description of the transpose's quantizer.
    """
    twin = CTwin(d=address)
    names = [slot.name for slot in quantizer.slots]
    for i, (_, source, view) in enumerate(quantizer.transpose_plan[1]):
        twin.source[i] = names.index(source)
        # The view of swizzled factors has their bytes, in the reverse shape.
        twin.turned[i] = 0 if view is None else 1 if view is torch.t else 2
    return twin


class CPlannedOperand(ctypes.Structure):
    """`struct PlannedOperand`."""

    _fields_ = fields("all part kept", ctypes.c_void_p)


class CForwardPlan(ctypes.Structure):
    """`struct ForwardPlan`."""

    _fields_ = (("x", CPlannedOperand), ("weight", CPlannedOperand), ("dtype", ctypes.c_int64))


class CBackwardPlan(ctypes.Structure):
    """`struct BackwardPlan`."""

    _fields_ = (
        *fields("dy dy_rows dy_columns x weight", ctypes.c_void_p),
        *fields("dtype weight_dtype bias", ctypes.c_int64),
    )


class CRowFormat(ctypes.Structure):
    """`struct RowFormat`; `quantizer` is the address of a description, None for plain rows."""

    _fields_ = (
        ("quantizer", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("dtype", "factor_dtype", "codes", "bytes")),
        *((name, ctypes.c_int64) for name in ("element", "packed", "block", "factor_id")),
        ("divisor", ctypes.c_double),
    )


def describe_rows(form: RowFormat, quantizer: int | None) -> CRowFormat:
    """Return the description of rows; `quantizer` is the address of that of the quantizer."""
    factor = -1 if form.factor is None else DTYPES.index(form.factor)
    dtypes = DTYPES.index(form.dtype), factor
    return CRowFormat(quantizer, *dtypes, *form.group, *stored_ids(form), form.divisor)


class CProblem(ctypes.Structure):
    """`struct Problem`; a quantizer is the address of its description, or None."""

    _fields_ = (
        *fields("a b", ctypes.c_void_p),
        *fields("a_rows a_cols b_rows b_cols", ctypes.c_int64),
        *fields("a_dtype b_dtype layout dtype", ctypes.c_int64),
        ("bias_dtype", ctypes.c_int64),
    )
