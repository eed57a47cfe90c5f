"""The structs that the C++ kernels read (structs.h): quantizers, and arguments of some kernels."""

from __future__ import annotations

import ctypes
from typing import Any

from qtensor.core.formats import E2M1, FormatSpec

ABI = 12
_ELEMENTS = {"e4m3": 0, "e5m2": 1, "e2m3": 2, "e3m2": 3, "e2m1": 4}
_SCALES = {"float32": 0, "e8m0": 1, "e4m3": 2}
_MODES = {"rceil": 0, "floor": 1, "ceil": 2, "even": 3}
_TENSOR, _ROW, _COLUMN, _BLOCK = range(4)
_SIDES = {"rowwise": 1, "columnwise": 2}

FORMATS = (
    "fp8",
    "fp8_delayed",
    "fp8_rowwise",
    "fp8_blockwise",
    "mxfp8",
    "mxfp6",
    "mxfp4",
    "nvfp4",
)
"""The formats that the kernels compute. Another format with equal fields may round differently."""


def fields(names: str, kind: Any) -> list[tuple[str, Any]]:
    """Return the fields of a struct that have one type."""
    return [(name, kind) for name in names.split()]


class CQuantizer(ctypes.Structure):
    """`struct CQuantizer` of structs.h, field by field."""

    _fields_ = (
        *fields("abi family element codes bytes block square scale mode", ctypes.c_int32),
        *fields("transposed swizzled pow2", ctypes.c_int32),
        ("epsilon", ctypes.c_float),
        *fields("rotated signs stochastic row_scaled four_over_six", ctypes.c_int32),
        *fields("squared_error", ctypes.c_int32),
        *fields("e4m3_max global_divisor", ctypes.c_float),
    )


class NormCall(ctypes.Structure):
    """`struct NormCall` of structs.h, field by field."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        *fields("rows cols stride", ctypes.c_int64),
        ("y", ctypes.c_void_p),
        ("y_stride", ctypes.c_int64),
        *fields("weight bias mean rstd dx dweight dbias", ctypes.c_void_p),
        *fields("y_dtype weight_dtype bias_dtype zero_centered threads", ctypes.c_int32),
        ("eps", ctypes.c_float),
    )


class ActivationCall(ctypes.Structure):
    """`struct ActivationCall` of structs.h, field by field."""

    _fields_ = (
        *fields("x dy out", ctypes.c_void_p),
        *fields("rows cols stride dy_stride", ctypes.c_int64),
        *fields("kind gated threads", ctypes.c_int32),
        *fields("alpha limit offset bound", ctypes.c_float),
    )


def refusal(quantizer: Any) -> str | None:
    """Return why the kernels do not compute what a quantizer says, or None if they do."""
    return None if quantizer.format in FORMATS else f"{quantizer.format} has no native kernel"


def c_quantizer(quantizer: Any) -> CQuantizer:
    """Return the struct of a quantizer that `refusal` accepts."""
    spec: FormatSpec = quantizer.spec
    options: dict[str, Any] = {
        name: getattr(quantizer, name, None) for name in quantizer.option_names()
    }
    codes, size = (
        (2, 1) if quantizer.element == E2M1 else (4, 3) if options.get("packed") else (1, 1)
    )
    return CQuantizer(
        abi=ABI,
        family=_family(quantizer),
        element=_ELEMENTS[quantizer.element.name],
        codes=codes,
        bytes=size,
        block=spec.block[1] if spec.block else 0,
        square=quantizer.two_dimensional,
        scale=_SCALES[spec.scale],
        mode=_MODES[options.get("scale_mode", "rceil")],
        transposed=_columnwise_is_transposed(quantizer),
        swizzled=options.get("swizzled", False),
        pow2=options.get("force_pow_2_scales", False),
        epsilon=options.get("amax_epsilon", 0.0),
        rotated=_SIDES[options["rht_side"]] if options.get("with_rht") else 0,
        signs=options.get("with_random_sign_mask", False),
        stochastic=options.get("stochastic_rounding", False),
        row_scaled=options.get("row_scaled", False),
        four_over_six=options.get("use_4over6", False),
        squared_error=options.get("err_mode") == "mse",
        e4m3_max=options.get("e4m3_max", 448.0),
        global_divisor=getattr(quantizer, "global_divisor", 1.0),
    )


def _family(quantizer: Any) -> int:
    if quantizer.spec.block:
        return _BLOCK
    if quantizer.per_tensor:
        return _TENSOR
    return _ROW if quantizer.axis == -1 else _COLUMN


def _columnwise_is_transposed(quantizer: Any) -> bool:
    data = next(b for b in quantizer.spec.inner if b.usage == "columnwise")
    dims = data.dims(quantizer)
    return dims is not None and dims[0].axis == "k"
