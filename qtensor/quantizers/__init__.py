"""Define the quantizers: a format's options as a frozen value that makes tensors.

Importing a module of this package registers its format.
"""

from qtensor.quantizers.base import Quantizer
from qtensor.quantizers.float8 import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8RowwiseQuantizer,
)
from qtensor.quantizers.float8_blockwise import Float8BlockQuantizer
from qtensor.quantizers.mxfp4 import MXFP4Quantizer
from qtensor.quantizers.mxfp6 import MXFP6Quantizer
from qtensor.quantizers.mxfp8 import MXFP8Quantizer
from qtensor.quantizers.nvfp4 import NVFP4Quantizer

__all__ = [
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8RowwiseQuantizer",
    "MXFP4Quantizer",
    "MXFP6Quantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "Quantizer",
]
