"""Describe number formats: element codes, inner buffers, format specs.

Allocation, flattening, slicing, copying, repr and fakes all derive from the specs that these
classes define; no method elsewhere lists the fields of a format.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from qtensor.core.quantizer_registry import QuantizerLike

PLAIN, SWIZZLED = "plain", "swizzled_32_4_4"
"""Scale layouts: rows of factors, or the 128x4 tiles that block-scaled GEMMs read."""

ENDINGS = {"codes": ("_data", "_transpose"), "factors": ("_scale_inv",)}
"""How the names of buffers end that hold element codes, or a factor of each block."""

Usage = Literal["rowwise", "columnwise", "both"]


@dataclass(frozen=True)
class Element:
    """Describe a narrow float or integer: its bits, and the largest finite magnitude.

    An element without exponent bits is an integer, in two's complement if it is signed:
    ``Element("int4", 0, 3, max=7)``, ``Element("uint4", 0, 4, max=15, signed=False)``.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    max: float
    """Largest finite magnitude."""
    dtype: torch.dtype | None = None
    """The torch dtype with these codes, or None."""
    signed: bool = True

    @property
    def is_integer(self) -> bool:
        """Return True if the codes are integers."""
        return self.exponent_bits == 0

    @property
    def bits(self) -> int:
        """Return the width of a code in bits, the sign included."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """Return the exponent of the smallest normal number, ``1 - bias``."""
        return 0 if self.is_integer else 2 - (1 << (self.exponent_bits - 1))

    @property
    def max_exponent(self) -> int:
        """Return the exponent of the largest finite number, ``floor(log2(max))``."""
        return math.frexp(self.max)[1] - 1


E4M3 = Element("e4m3", 4, 3, 448.0, torch.float8_e4m3fn)
E5M2 = Element("e5m2", 5, 2, 57344.0, torch.float8_e5m2)
E2M3 = Element("e2m3", 2, 3, 7.5)
E3M2 = Element("e3m2", 3, 2, 28.0)
E2M1 = Element("e2m1", 2, 1, 6.0)
ELEMENTS: dict[str, Element] = {e.name: e for e in (E4M3, E5M2, E2M3, E3M2, E2M1)}


@dataclass(frozen=True)
class Dim:
    """Describe one dimension of an inner buffer as a function of the logical (M, K) shape.

    A dimension over an axis of n elements has ``ceil(n / per) * units`` entries, rounded up to a
    multiple of ``pad``.
    """

    axis: Literal["lead", "m", "k", "one"]
    """``lead``: the separate leading dims. ``m``: their product. ``k``: the last dim. ``one``: one
    entry.
    """
    per: int = 1
    """Logical elements that share one group of entries (block size, or codes in a packed group)."""
    units: int = 1
    """Entries of a group (3 for packed FP6: 4 codes in 3 bytes)."""
    pad: int = 1
    """The number of entries is rounded up to a multiple of this; the padding is zero."""


LEAD = Dim("lead")
M = Dim("m")
K = Dim("k")
ONE = Dim("one")


@dataclass(frozen=True)
class Buffer:
    """Describe an inner buffer: name, dtype, the usage that needs it, and its dims.

    The dims are a function of the quantizer's options.
    """

    name: str
    dtype: torch.dtype
    usage: Usage
    dims: Callable[[Any], tuple[Dim, ...] | None]
    """None where the options leave the buffer out."""
    tiled: bool = False
    """True for scales that the ``swizzled`` option stores in 128x4 tiles."""


@dataclass(frozen=True)
class FormatSpec:
    """Describe a storage class: element types, block shape, scale element, inner buffers."""

    name: str
    elements: tuple[Element, ...]
    """Legal elements, the default first."""
    block: tuple[int, int] | None
    """Rowwise (rows, columns) that share one factor; None: the whole tensor or a whole row."""
    scale: Literal["float32", "e8m0", "e4m3"]
    """The element of a stored factor."""
    inner: tuple[Buffer, ...]
    transpose_shares_bytes: bool = False
    """True if columnwise data are always the transposed rowwise bytes (per-tensor scaling)."""

    @property
    def attributes(self) -> tuple[str, ...]:
        """Return the names of all inner buffers, in slot order."""
        return tuple(b.name for b in self.inner)


@dataclass(frozen=True)
class Slot:
    """Describe a buffer that a quantizer fills: a buffer of the spec, with options applied."""

    name: str
    dtype: torch.dtype
    usage: Usage
    dims: tuple[Dim, ...]
    swizzled: bool
    keyword: str
    """The constructor keyword: the name without its underscore."""
    logical: bool
    """True if the buffer has the logical shape."""
    padded: bool
    """True if the buffer can have padding, which must be zero."""

    @property
    def holds(self) -> Literal["codes", "factors", "other"]:
        """Return what the buffer holds, by the end of its name (``ENDINGS``)."""
        if self.name.endswith(ENDINGS["codes"]):
            return "codes"
        is_factor = self.name.endswith(ENDINGS["factors"])
        return "factors" if is_factor and "_global_" not in self.name else "other"


def resolve_slots(spec: FormatSpec, options: QuantizerLike) -> tuple[Slot, ...]:
    """Return the buffers of ``spec`` that exist under ``options`` (a quantizer), in slot order."""
    swizzled = bool(getattr(options, "swizzled", False))
    wanted = {"both": True, "rowwise": options.rowwise, "columnwise": options.columnwise}
    slots = []
    for b in spec.inner:
        dims = b.dims(options) if wanted[b.usage] else None
        if dims is not None:
            padded = any(d.pad > 1 or d.per > 1 for d in dims)
            slots.append(
                Slot(
                    b.name,
                    b.dtype,
                    b.usage,
                    dims,
                    b.tiled and swizzled,
                    b.name[1:],
                    dims == (LEAD, K),
                    padded,
                )
            )
    return tuple(slots)
