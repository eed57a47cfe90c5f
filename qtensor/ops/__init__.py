"""Fusible operations: blocks as sequences, fused and quantized across their steps."""

from qtensor.ops.activation import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    Activation,
    ReGLU,
    ReLU,
    SiLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from qtensor.ops.extra import AddExtraInput, MakeExtraOutput
from qtensor.ops.fuser import OperationFuser
from qtensor.ops.fusions import (
    FUSIONS,
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
    unregister_fusion,
)
from qtensor.ops.handover import Request, produce
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
