"""Quantized tensors for PyTorch: FP8, MXFP8, MXFP6, MXFP4, NVFP4, with the same bytes on every device."""

import importlib
from typing import TYPE_CHECKING, Any

from qtensor.api import dequantize, formats, quantize, quantizer
from qtensor.errors import DtypeError, QTensorError, UnsupportedError
from qtensor.kernels.cpu import small_calls as _small_calls

# Every op is registered here, so that a program saved elsewhere finds those that it names.
from qtensor.library import activation as _activation
from qtensor.library import delayed as _delayed
from qtensor.library import fused as _fused
from qtensor.library import gradient as _gradient
from qtensor.library import grouped as _grouped
from qtensor.library import norm as _norm
from qtensor.library import pointwise as _pointwise
from qtensor.library.codec import parse as _parse
from qtensor.library.define import OBSERVERS as _OBSERVERS
from qtensor.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8RowwiseQuantizer,
    MXFP4Quantizer,
    MXFP6Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from qtensor.quantizers.proto import TensorProto, to_tensor_proto
from qtensor.storage.base import QuantizedTensorStorage
from qtensor.storage.compute import explain, gemm
from qtensor.storage.float8 import Float8Tensor, Float8TensorStorage
from qtensor.storage.float8_blockwise import Float8BlockwiseTensor, Float8BlockwiseTensorStorage
from qtensor.storage.mxfp4 import MXFP4Tensor, MXFP4TensorStorage
from qtensor.storage.mxfp6 import MXFP6Tensor, MXFP6TensorStorage
from qtensor.storage.mxfp8 import MXFP8Tensor, MXFP8TensorStorage
from qtensor.storage.nvfp4 import NVFP4Tensor, NVFP4TensorStorage
from qtensor.storage.tensor import QuantizedTensor
from qtensor.version import __version__

_small_calls.install(_OBSERVERS, _parse)

if TYPE_CHECKING:
    from qtensor import ops, recipes
    from qtensor.autocasting import autocast
    from qtensor.functional.checkpoint import checkpoint
    from qtensor.modules.conversion import Conversion
    from qtensor.modules.convert import convert_, revert_
    from qtensor.modules.grouped_linear import GroupedLinear
    from qtensor.modules.layernorm_linear import LayerNormLinear
    from qtensor.modules.layernorm_mlp import LayerNormMLP
    from qtensor.modules.linear import Linear
    from qtensor.quantizers.delayed import (
        delayed_scaling_state,
        delayed_scaling_update,
        record_amax_,
    )
    from qtensor.report import BlockError, ErrorReport, error_report

__all__ = [
    "BlockError",
    "Conversion",
    "DtypeError",
    "ErrorReport",
    "Float8BlockQuantizer",
    "Float8BlockwiseTensor",
    "Float8BlockwiseTensorStorage",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8RowwiseQuantizer",
    "Float8Tensor",
    "Float8TensorStorage",
    "GroupedLinear",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MXFP4Quantizer",
    "MXFP4Tensor",
    "MXFP4TensorStorage",
    "MXFP6Quantizer",
    "MXFP6Tensor",
    "MXFP6TensorStorage",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
    "QTensorError",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "TensorProto",
    "UnsupportedError",
    "__version__",
    "_activation",
    "_delayed",
    "_fused",
    "_gradient",
    "_grouped",
    "_norm",
    "_pointwise",
    "autocast",
    "checkpoint",
    "convert_",
    "delayed_scaling_state",
    "delayed_scaling_update",
    "dequantize",
    "error_report",
    "explain",
    "formats",
    "gemm",
    "ops",
    "quantize",
    "quantizer",
    "recipes",
    "record_amax_",
    "revert_",
    "to_tensor_proto",
]

# Loaded at first use: whoever only quantizes tensors does not wait for the training stack.
_LAZY = {
    "BlockError": "qtensor.report",
    "Conversion": "qtensor.modules.conversion",
    "ErrorReport": "qtensor.report",
    "GroupedLinear": "qtensor.modules.grouped_linear",
    "LayerNormLinear": "qtensor.modules.layernorm_linear",
    "LayerNormMLP": "qtensor.modules.layernorm_mlp",
    "Linear": "qtensor.modules.linear",
    "autocast": "qtensor.autocasting",
    "checkpoint": "qtensor.functional.checkpoint",
    "convert_": "qtensor.modules.convert",
    "delayed_scaling_state": "qtensor.quantizers.delayed",
    "delayed_scaling_update": "qtensor.quantizers.delayed",
    "error_report": "qtensor.report",
    "ops": "qtensor.ops",
    "recipes": "qtensor.recipes",
    "record_amax_": "qtensor.quantizers.delayed",
    "revert_": "qtensor.modules.convert",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'qtensor' has no attribute {name!r}")
    module = importlib.import_module(_LAZY[name])
    # Kept, so that it is looked up once.
    value = globals()[name] = module if name in ("ops", "recipes") else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
