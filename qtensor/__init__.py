"""Quantize PyTorch tensors to FP8, MXFP8, MXFP6, MXFP4 and NVFP4.

Every device gives the same bytes.
"""

import importlib
from typing import TYPE_CHECKING, Any

from qtensor.api import dequantize, formats, quantize, quantizer
from qtensor.core.errors import ArgumentTypeError, DtypeError, QTensorError, UnsupportedError
from qtensor.core.version import __version__
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
from qtensor.storage.float8 import Float8Tensor, Float8TensorStorage
from qtensor.storage.float8_blockwise import Float8BlockwiseTensor, Float8BlockwiseTensorStorage
from qtensor.storage.mxfp4 import MXFP4Tensor, MXFP4TensorStorage
from qtensor.storage.mxfp6 import MXFP6Tensor, MXFP6TensorStorage
from qtensor.storage.mxfp8 import MXFP8Tensor, MXFP8TensorStorage
from qtensor.storage.nvfp4 import NVFP4Tensor, NVFP4TensorStorage
from qtensor.storage.ops.attention import attention
from qtensor.storage.ops.products import explain, gemm
from qtensor.storage.ops.varlen import varlen_attention
from qtensor.storage.tensor import QuantizedTensor

if TYPE_CHECKING:
    from qtensor import checkpoints, debug, ops, optim, recipes
    from qtensor.autocasting import autocast
    from qtensor.caches import KVCache
    from qtensor.debug.error_report import BlockError, ErrorReport, error_report
    from qtensor.functional.checkpoint import checkpoint
    from qtensor.modules.conversion import Conversion
    from qtensor.modules.convert import convert_, revert_
    from qtensor.modules.dot_product_attention import DotProductAttention
    from qtensor.modules.grouped_linear import GroupedLinear
    from qtensor.modules.layernorm_linear import LayerNormLinear
    from qtensor.modules.layernorm_mlp import LayerNormMLP
    from qtensor.modules.linear import Linear
    from qtensor.modules.multihead_attention import MultiheadAttention
    from qtensor.modules.rotary import RotaryPositionEmbedding
    from qtensor.modules.transformer_layer import TransformerLayer
    from qtensor.quantizers.delayed import (
        delayed_scaling_state,
        delayed_scaling_update,
        record_amax_,
    )
    from qtensor.reporting import ModelReport, model_report
    from qtensor.weights import (
        Calibration,
        LayerMerge,
        MergeReport,
        Rounding,
        SearchResult,
        calibrate,
        convert_qat_,
        merge_lora_,
        prepare_qat_,
        quantize_,
        rotate_,
        search,
        smooth_,
    )

__all__ = [
    "ArgumentTypeError",
    "BlockError",
    "Calibration",
    "Conversion",
    "DotProductAttention",
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
    "KVCache",
    "LayerMerge",
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
    "MergeReport",
    "ModelReport",
    "MultiheadAttention",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
    "QTensorError",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "RotaryPositionEmbedding",
    "Rounding",
    "SearchResult",
    "TensorProto",
    "TransformerLayer",
    "UnsupportedError",
    "__version__",
    "attention",
    "autocast",
    "calibrate",
    "checkpoint",
    "checkpoints",
    "convert_",
    "convert_qat_",
    "debug",
    "delayed_scaling_state",
    "delayed_scaling_update",
    "dequantize",
    "error_report",
    "explain",
    "formats",
    "gemm",
    "merge_lora_",
    "model_report",
    "ops",
    "optim",
    "prepare_qat_",
    "quantize",
    "quantize_",
    "quantizer",
    "recipes",
    "record_amax_",
    "revert_",
    "rotate_",
    "search",
    "smooth_",
    "to_tensor_proto",
    "varlen_attention",
]

# Import every module that registers ops, so that a saved program finds its ops.
for _name in (
    "activation",
    "attention",
    "cache",
    "delayed",
    "fused",
    "gradient",
    "grouped",
    "linear",
    "native_ops",
    "norm",
    "pointwise",
):
    importlib.import_module(f"qtensor.library.{_name}")
del _name

# Loaded at first use, so that quantizing tensors does not import the training stack.
_LAZY = {
    "BlockError": "qtensor.debug.error_report",
    "Calibration": "qtensor.weights",
    "Conversion": "qtensor.modules.conversion",
    "DotProductAttention": "qtensor.modules.dot_product_attention",
    "ErrorReport": "qtensor.debug.error_report",
    "GroupedLinear": "qtensor.modules.grouped_linear",
    "KVCache": "qtensor.caches",
    "LayerMerge": "qtensor.weights",
    "LayerNormLinear": "qtensor.modules.layernorm_linear",
    "LayerNormMLP": "qtensor.modules.layernorm_mlp",
    "Linear": "qtensor.modules.linear",
    "MergeReport": "qtensor.weights",
    "ModelReport": "qtensor.reporting",
    "MultiheadAttention": "qtensor.modules.multihead_attention",
    "RotaryPositionEmbedding": "qtensor.modules.rotary",
    "TransformerLayer": "qtensor.modules.transformer_layer",
    "autocast": "qtensor.autocasting",
    "calibrate": "qtensor.weights",
    "checkpoint": "qtensor.functional.checkpoint",
    "checkpoints": "qtensor.checkpoints",
    "convert_": "qtensor.modules.convert",
    "convert_qat_": "qtensor.weights",
    "debug": "qtensor.debug",
    "delayed_scaling_state": "qtensor.quantizers.delayed",
    "delayed_scaling_update": "qtensor.quantizers.delayed",
    "distributed": "qtensor.distributed",
    "error_report": "qtensor.debug.error_report",
    "merge_lora_": "qtensor.weights",
    "model_report": "qtensor.reporting",
    "ops": "qtensor.ops",
    "quantize_": "qtensor.weights",
    "rotate_": "qtensor.weights",
    "smooth_": "qtensor.weights",
    "optim": "qtensor.optim",
    "prepare_qat_": "qtensor.weights",
    "recipes": "qtensor.recipes",
    "record_amax_": "qtensor.quantizers.delayed",
    "revert_": "qtensor.modules.convert",
    "search": "qtensor.weights",
    "SearchResult": "qtensor.weights",
    "Rounding": "qtensor.weights",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'qtensor' has no attribute {name!r}")
    module = importlib.import_module(_LAZY[name])
    # The global makes the next access skip this function.
    value = globals()[name] = (
        module
        if name in ("checkpoints", "debug", "distributed", "ops", "optim", "recipes")
        else getattr(module, name)
    )
    return value


def __dir__() -> list[str]:
    # Modules that this file needs, and names of its own, are globals too.
    return sorted({*__all__, *_LAZY, "kernels"})
