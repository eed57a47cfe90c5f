"""Give the numbers of a quantized tensor by name: codes, element values, factors, buffers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from qtensor.core.buffer_shapes import ceil_div, rows_cols
from qtensor.core.errors import UnsupportedError, fail
from qtensor.core.formats import ENDINGS, Dim, Slot, Usage
from qtensor.core.quantizer_registry import QuantizerLike, by_name
from qtensor.core.torch_state import watched
from qtensor.core.version import install_command
from qtensor.reference.blocks import read_scales, spread
from qtensor.reference.elements import code_values, unpack_pairs, unpack_quads
from qtensor.reference.scaling import e8m0_decode_factor
from qtensor.storage import geometry

if TYPE_CHECKING:
    import numpy.typing as npt

_SCALE_DTYPES = {
    "e8m0": torch.float8_e8m0fnu,
    "e4m3": torch.float8_e4m3fn,
    "float32": torch.float32,
}
_ML_DTYPES = {
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "e2m3": "float6_e2m3fn",
    "e3m2": "float6_e3m2fn",
    "e2m1": "float4_e2m1fn",
    "e8m0": "float8_e8m0fnu",
}
"""Names of elements and factors in the package ml_dtypes."""


class Arrays(NamedTuple):
    """The numbers of a quantized tensor as NumPy arrays; see ``Numbers.to_ml_dtypes``."""

    codes: npt.NDArray[Any]
    """The logical shape, with the element's dtype of ml_dtypes."""
    factors: npt.NDArray[Any]
    """(block rows, block columns), with the dtype of the stored factor."""
    global_factors: npt.NDArray[Any]
    """float32, (1, 1), (M, 1) or (1, K)."""


class Numbers:
    """Methods of tensors and storages that read their numbers.

    Where a method takes a ``usage``, "rowwise" and "columnwise" name the data to read, and None the
    data that ``dequantize`` reads. All results but ``buffer_views`` are copies or read as copies:
    writing to them does not change the tensor in a defined way.
    """

    __slots__ = ()

    if TYPE_CHECKING:
        _quantizer: QuantizerLike
        _parts: tuple[Any, ...]
        shape: torch.Size
        dtype: torch.dtype
        device: torch.device

        def buffers(self) -> list[Tensor]:
            """Return the inner buffers that exist, in slot order."""

        def get_usages(self) -> dict[str, bool]:
            """Return which usages exist."""

    def codes(self, usage: Usage | None = None) -> Tensor:
        """Return the element codes as integers, one in each entry, without packing or padding.

        Of rotated data (``with_rht``), they are the codes of the rotated values.

        Args:
            usage: "rowwise", "columnwise", or None for the data that ``dequantize`` reads.

        Returns:
            uint8 of the logical shape.

        Raises:
            UnsupportedError: the tensor lacks the data of that usage.
        """
        return _codes(self, usage).reshape(self.shape)

    def element_values(self, usage: Usage | None = None) -> Tensor:
        """Return the values that the codes stand for, before any factor is applied.

        Args:
            usage: as in ``codes``.

        Returns:
            float32 of the logical shape.

        Raises:
            UnsupportedError: as ``codes``.
        """
        codes, element = self.codes(usage), self._quantizer.element
        if element.dtype is not None:
            return codes.view(element.dtype).float()
        values = torch.tensor(code_values(element), dtype=torch.float32, device=codes.device)
        return values.index_select(0, codes.reshape(-1).int()).view(codes.shape)

    def factors(self, usage: Usage | None = None) -> Tensor:
        """Return the decode factors of blocks as floats, in row-major order and without padding.

        Row i and column j hold the factor of a block of the (M, K) view, in which all leading dims
        are rows. ``element_values`` times the factor of its block times ``global_factors``, in this
        order and in float32, is the dequantized value, except of rotated data. A 16x16 or 32x32
        block of NVFP4 or MX has its factor once for each of its rows, as it is stored.

        Args:
            usage: as in ``codes``.

        Returns:
            float32 (block rows, block columns): (1, 1) for one factor of the tensor, (M, 1) for one
            of a row, (M, ceil(K / 16)) for blocks of 16 along the last dim.

        Raises:
            UnsupportedError: as ``codes``, or the format stores no factors.
        """
        stored = _stored_factors(self, usage)
        return e8m0_decode_factor(stored.view(torch.uint8)) if _is_e8m0(stored) else stored.float()

    def global_factors(self, usage: Usage | None = None) -> Tensor:
        """Return the second, tensor-wide decode factors; 1 for formats with one level.

        Args:
            usage: as in ``codes``.

        Returns:
            float32 (1, 1), or (M, 1) or (1, K) of NVFP4 that is row-scaled.

        Raises:
            UnsupportedError: as ``codes``.
        """
        side = _side(self, usage)
        factor = self._quantizer.global_factors(by_name(self._quantizer, self.buffers()), side)
        if factor is None:
            return torch.ones((1, 1), dtype=torch.float32, device=self.device)
        return factor.reshape(1, -1) if side == "_columnwise" else factor.reshape(-1, 1)

    def buffer_views(self) -> dict[str, Tensor]:
        """Return the inner buffers by name, as views in torch's own dtype of what they hold.

        The views share the memory of the tensor, with its packing and padding, and go to other
        libraries by DLPack. Codes are ``float8_e4m3fn``, ``float8_e5m2`` or, two in a byte,
        ``float4_e2m1fn_x2``; factors are ``float8_e8m0fnu``, ``float8_e4m3fn`` or ``float32``.
        Codes of 6 bits and of your own elements without a dtype stay ``uint8``.
        """
        quantizer = self._quantizer
        pairs = zip(quantizer.slots, self.buffers(), strict=True)
        return {slot.keyword: _in_own_dtype(quantizer, slot, buffer) for slot, buffer in pairs}

    def to_ml_dtypes(self, usage: Usage | None = None) -> Arrays:
        """Return codes and factors as NumPy arrays with dtypes of the package ml_dtypes.

        Args:
            usage: as in ``codes``.

        Returns:
            Arrays, copied to the CPU, one element in each entry and without padding.

        Raises:
            UnsupportedError: as ``factors``; or ml_dtypes is not installed or has no such element.
        """
        try:
            import ml_dtypes  # noqa: PLC0415 - an optional package
        except ModuleNotFoundError:
            fix = f"Run: {install_command('arrays')}"
            fail("to_ml_dtypes", "ml_dtypes is needed", "no ml_dtypes", fix, UnsupportedError)
        stored, scale = _stored_factors(self, usage), _ML_DTYPES.get(self._quantizer.spec.scale)
        if stored.dtype is torch.float32:
            factors = stored.cpu().numpy()
        else:
            factors = stored.view(torch.uint8).cpu().numpy().view(getattr(ml_dtypes, scale or ""))
        codes = _codes_array(self, usage, ml_dtypes)
        return Arrays(codes, factors, self.global_factors(usage).cpu().numpy())


def _codes_array(t: Numbers, usage: Usage | None, ml_dtypes: Any) -> npt.NDArray[Any]:
    """Return the codes as an array with the element's dtype of ml_dtypes.

    Raises:
        UnsupportedError: ml_dtypes has no such element.
    """
    element = t._quantizer.element
    if element.is_integer:
        name = f"{'' if element.signed else 'u'}int{element.bits}"
        values = t.element_values(usage).to(torch.int16).cpu().numpy()
        return values.astype(getattr(ml_dtypes, name, name))
    dtype = getattr(ml_dtypes, _ML_DTYPES.get(element.name, ""), None)
    if dtype is None:
        rule, fix = "ml_dtypes must have the element", "Call codes() or element_values()"
        fail("to_ml_dtypes", rule, element, fix, UnsupportedError)
    return t.codes(usage).cpu().numpy().view(dtype)


def _is_e8m0(stored: Tensor) -> bool:
    return stored.dtype == torch.float8_e8m0fnu


def _side(t: Numbers, usage: Usage | None) -> str:
    """Return ``"_rowwise"`` or ``"_columnwise"``, the data to read.

    Raises:
        UnsupportedError: the tensor lacks them, or ``usage`` is not a usage.
    """
    quantizer = t._quantizer
    if usage is None:
        return quantizer.side()
    if usage not in ("rowwise", "columnwise") or not getattr(quantizer, usage):
        present = [name for name, is_there in t.get_usages().items() if is_there]
        fix = "Leave usage out"
        if usage in ("rowwise", "columnwise"):
            fix += f", or quantize with {usage}=True"
        fail(
            f"usage[{quantizer.format}]",
            f"the usage must be one of this tensor, {' or '.join(present)}",
            repr(usage),
            fix,
            UnsupportedError,
        )
    return f"_{usage}"


def _slot(t: Numbers, side: str, holds: str) -> tuple[Slot, Tensor]:
    """Return the slot, and its buffer, that holds the codes or factors of one side.

    Raises:
        UnsupportedError: no buffer is named so.
    """
    quantizer = t._quantizer
    for slot, buffer in zip(quantizer.slots, t.buffers(), strict=True):
        if slot.holds == holds and slot.usage in ("both", side[1:]):
            return slot, buffer.detach()
    rule = f"the {holds} need a buffer whose name ends with {' or '.join(ENDINGS[holds])}"
    got = ", ".join(quantizer.slot_names)
    fix = "Call dequantize(), or rename the buffer of your format"
    fail(f"{holds}[{quantizer.format}]", rule, got, fix, UnsupportedError)


def _codes(t: Numbers, usage: Usage | None) -> Tensor:
    """Return the codes of a usage, uint8 (M, K)."""
    rows, cols = rows_cols(t.shape)
    slot, buffer = _slot(t, _side(t, usage), "codes")
    codes = buffer.view(torch.uint8)
    transposed = slot.dims[0].axis == "k"
    # (rows, K), (K, rows), or one of them with several codes in some bytes.
    codes = codes.reshape(codes.shape[0], -1) if transposed else _flat(codes, slot.dims)
    packed = next((i for i, dim in enumerate(slot.dims) if dim.per > 1), None)
    if packed is not None:
        along_first = packed == 0
        count = rows if slot.dims[packed].axis == "m" else cols
        unpack = unpack_quads if slot.dims[packed].units == 3 else unpack_pairs
        codes = unpack(codes.t() if along_first else codes, count)
        codes = codes.t() if along_first else codes
    codes = codes.t() if transposed else codes
    return codes[:rows, :cols]


def _flat(codes: Tensor, dims: tuple[Dim, ...]) -> Tensor:
    """Return a buffer as a matrix: leading dims are rows."""
    if codes.ndim == 0:
        return codes.reshape(1, 1)
    return codes if dims[0].axis != "lead" else codes.reshape(-1, codes.shape[-1])


def _stored_factors(t: Numbers, usage: Usage | None) -> Tensor:
    """Return the factors of blocks in the dtype of the stored ones, (block rows, block columns)."""
    slot, buffer = _slot(t, _side(t, usage), "factors")
    rows, cols = rows_cols(t.shape)
    sizes = {"m": rows, "k": cols}
    if slot.swizzled:
        # Tiles run along the dim that is padded to 128.
        buffer = read_scales(buffer, True, transposed=slot.dims[0].pad != geometry.TILE[0])
    for i, dim in enumerate(slot.dims):
        buffer = buffer.narrow(i, 0, ceil_div(sizes.get(dim.axis, 1), dim.per))
    by_columns = slot.dims[0].axis == "k" or slot.dims[-1].axis == "m"
    grid = buffer if buffer.ndim == 2 else buffer.reshape(-1, 1)
    return _in_own_dtype(t._quantizer, slot, (grid.t() if by_columns else grid).contiguous())


def _in_own_dtype(quantizer: QuantizerLike, slot: Slot, buffer: Tensor) -> Tensor:
    """Return a view of a buffer in torch's dtype of what it holds."""
    if buffer.dtype is not torch.uint8 or slot.holds == "other":
        return buffer
    if slot.holds == "factors":
        return buffer.view(_SCALE_DTYPES[quantizer.spec.scale])
    dtype = quantizer.element.dtype
    if quantizer.element.name == "e2m1":
        dtype = torch.float4_e2m1fn_x2
    return buffer if dtype is None else buffer.view(dtype)


def factors_of_elements(t: Numbers) -> Tensor:
    """Return the product of all factors of each element: the decoded value of code 1.0.

    It is float32, of the logical shape; NaN for rotated data, whose factors apply before the
    inverse rotation.
    """
    quantizer = t._quantizer
    if not quantizer.factors_are_local:
        return torch.full(t.shape, math.nan, dtype=torch.float32, device=t.device)
    slot, _ = _slot(t, quantizer.side(), "factors")
    per = {dim.axis: dim.per for dim in slot.dims}
    rows, cols = rows_cols(t.shape)
    factors = t.factors()
    each = spread(factors, per.get("m", rows), per.get("k", cols), (rows, cols))
    return (each * t.global_factors()).reshape(t.shape)


# ---- the first values

SHOWN = 6
"""Values in a repr."""
_ENOUGH = 128
"""Every format lets rows and columns be cut at multiples of this number."""
_MOST = 1 << 16
"""Elements that a repr decodes, at most."""


def first_values(t: Numbers) -> list[float] | None:
    """Return the first values of a tensor in CPU memory; None if reading them is not free.

    A tensor on another device would be waited for, a mode would see the ops, and fake tensors have
    no values. No kernel is compiled.
    """
    buffers = [] if t._parts else t.buffers()
    readable = all(type(b) is Tensor and b.is_cpu and _has_memory(b) for b in buffers)
    if not buffers or not readable or watched() or 0 in t.shape:
        return None
    part: Any = t
    for dim in range(len(t.shape)):
        end = min(_ENOUGH if dim >= len(t.shape) - 2 else 1, t.shape[dim])
        shape = (*part.shape[:dim], end, *part.shape[dim + 1 :])
        try:
            cut = geometry.slice_buffers(part, dim, 0, end)
        except UnsupportedError:
            continue
        named = {slot.keyword: b for slot, b in zip(t._quantizer.slots, cut, strict=True)}
        part = t._quantizer.storage_cls(shape, t.dtype, t._quantizer, **named)
    if math.prod(part.shape) > _MOST:
        return None
    with torch.no_grad():
        values = t._quantizer.decode(by_name(t._quantizer, part.buffers()), part.shape)
    found: list[float] = values.reshape(-1)[:SHOWN].tolist()
    return found


def _has_memory(buffer: Tensor) -> bool:
    """Return whether a buffer still has its bytes; ``fully_shard`` frees those it has gathered."""
    needed = buffer.numel() * buffer.element_size()
    return buffer.untyped_storage().nbytes() >= needed


def text_of_first_values(t: Numbers) -> str:
    """Return the first values as ``[0.5, -1, ...]``; "" where they are not shown."""
    values = first_values(t)
    if values is None:
        return ""
    more = ", ..." * (math.prod(t.shape) > len(values))
    return f"[{', '.join(f'{value:.4g}' for value in values)}{more}]"
