"""Quantized tensors and layers on several ranks, with torch's own engine.

Importing this package imports ``torch.distributed.tensor``, which takes about as long as importing
torch; ``import qtensor`` alone does not.
"""

from qtensor.distributed.quantized_gather import quantized_all_gather, reduce_amaxes
from qtensor.distributed.styles import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from qtensor.distributed.traffic import Traffic

__all__ = [
    "ColwiseParallel",
    "PrepareModuleInput",
    "RowwiseParallel",
    "Traffic",
    "quantized_all_gather",
    "reduce_amaxes",
]
