"""Fusible operations: blocks as a ``Sequential`` that fuses and quantizes across its steps."""

from qtensor.ops.activation import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    Activation,
    ClampedSwiGLU,
    ReGLU,
    ReLU,
    SiLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from qtensor.ops.communication import AllGather, AllReduce, ReduceScatter
from qtensor.ops.extra import AddExtraInput, ExtraInput, MakeExtraOutput
from qtensor.ops.fused import (
    BackwardActivationBias,
    BackwardAddNorm,
    BackwardLinearAdd,
    BackwardLinearScale,
    ForwardGroupedMLP,
    ForwardLinearBiasActivation,
    ForwardLinearBiasAdd,
    ForwardLinearScaleAdd,
)
from qtensor.ops.fuser import OperationFuser
from qtensor.ops.fusions import (
    FUSIONS,
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
    unregister_fusion,
)
from qtensor.ops.grouped_linear import GroupedLinear
from qtensor.ops.handover import Quantized, Request, produce
from qtensor.ops.linear import BasicLinear, Bias, Linear
from qtensor.ops.norm import L2Normalization, LayerNorm, RMSNorm
from qtensor.ops.operation import (
    BackwardContext,
    BasicOperation,
    FusedOperation,
    FusibleOperation,
    OperationContext,
)
from qtensor.ops.sequential import Sequential
from qtensor.ops.simple import ConstantScale, Dropout, Identity, Quantize, Reshape

__all__ = [
    "FUSIONS",
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "Activation",
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "BackwardActivationBias",
    "BackwardAddNorm",
    "BackwardContext",
    "BackwardLinearAdd",
    "BackwardLinearScale",
    "BasicLinear",
    "BasicOperation",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "Dropout",
    "ExtraInput",
    "ForwardGroupedMLP",
    "ForwardLinearBiasActivation",
    "ForwardLinearBiasAdd",
    "ForwardLinearScaleAdd",
    "FusedOperation",
    "FusibleOperation",
    "GroupedLinear",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "Linear",
    "MakeExtraOutput",
    "OperationContext",
    "OperationFuser",
    "Quantize",
    "Quantized",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Request",
    "Reshape",
    "SReGLU",
    "SReLU",
    "Sequential",
    "SiLU",
    "SwiGLU",
    "produce",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
    "unregister_fusion",
]
