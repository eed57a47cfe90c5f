"""Define the MXFP8 quantizer."""

from __future__ import annotations

from dataclasses import dataclass

from qtensor.quantizers.mx import MXQuantizer
from qtensor.storage.mxfp8 import MXFP8, MXFP8Tensor, MXFP8TensorStorage


@dataclass(frozen=True, kw_only=True)
class MXFP8Quantizer(MXQuantizer):
    """Quantize to MXFP8: E4M3 or E5M2 elements, one E8M0 factor for 32.

    ``MXQuantizer`` describes the other options.

    Attributes:
        dtype: "e4m3" (default) or "e5m2", or the torch dtype.
        scale_mode: as in ``MXQuantizer``; the default is "rceil".
    """

    dtype: str = "e4m3"
    scale_mode: str = "rceil"

    format = "mxfp8"
    spec = MXFP8
    tensor_cls = MXFP8Tensor
    storage_cls = MXFP8TensorStorage
