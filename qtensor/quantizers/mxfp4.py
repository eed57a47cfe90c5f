"""Define the MXFP4 quantizer."""

from __future__ import annotations

from dataclasses import dataclass

from qtensor.quantizers.mx import MXQuantizer
from qtensor.storage.mxfp4 import MXFP4, MXFP4Tensor, MXFP4TensorStorage


@dataclass(frozen=True, kw_only=True)
class MXFP4Quantizer(MXQuantizer):
    """Quantize to MXFP4: E2M1 elements, two in a byte, one E8M0 factor for 32.

    ``MXQuantizer`` describes the options.
    """

    dtype: str = "e2m1"

    format = "mxfp4"
    spec = MXFP4
    tensor_cls = MXFP4Tensor
    storage_cls = MXFP4TensorStorage

    def _codes_per_group(self) -> tuple[int, int]:
        return (2, 1)
