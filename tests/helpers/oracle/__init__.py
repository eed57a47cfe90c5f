"""An independent oracle of the arithmetic in docs/numerics.md, in numpy alone.

It shares no code and no method with the library: narrowing casts search a table of every code
value in float64, exponents come from `frexp`, and bfloat16 rounding is a division by the quantum.
It favours plain reading over speed.
`tests/quantizers/test_oracle_golden.py` checks it against the golden bytes.
"""

from .api import dequantize, quantize
from .delayed import delayed_update
from .elements import ELEMENTS, Element, decode, encode
from .layout import pack4, pack6, swizzle, unpack4, unpack6, unswizzle
from .matmul import gemm
from .options import Options
from .rounding import round_to_dtype

__all__ = [
    "ELEMENTS",
    "Element",
    "Options",
    "decode",
    "delayed_update",
    "dequantize",
    "encode",
    "gemm",
    "pack4",
    "pack6",
    "quantize",
    "round_to_dtype",
    "swizzle",
    "unpack4",
    "unpack6",
    "unswizzle",
]
