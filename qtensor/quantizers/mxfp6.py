"""Define the MXFP6 quantizer."""

from __future__ import annotations

from dataclasses import dataclass

from qtensor.quantizers.mx import MXQuantizer
from qtensor.storage.mxfp6 import MXFP6, MXFP6Tensor, MXFP6TensorStorage


@dataclass(frozen=True, kw_only=True)
class MXFP6Quantizer(MXQuantizer):
    """Quantize to MXFP6: E2M3 or E3M2 elements, one E8M0 factor for 32.

    ``MXQuantizer`` describes the other options.

    Attributes:
        dtype: "e2m3" (default) or "e3m2".
        packed: store 4 codes in 3 bytes instead of one code in a byte.
    """

    dtype: str = "e2m3"
    packed: bool = False

    format = "mxfp6"
    spec = MXFP6
    tensor_cls = MXFP6Tensor
    storage_cls = MXFP6TensorStorage

    def _codes_per_group(self) -> tuple[int, int]:
        return (4, 3) if self.packed else (1, 1)
