"""Quantized tensors and layers on several ranks, with torch's own engine.

Importing this package imports ``torch.distributed.tensor``, which takes about as long as importing
torch; ``import qtensor`` alone does not.
"""

from qtensor.distributed.styles import ColwiseParallel, RowwiseParallel

__all__ = ["ColwiseParallel", "RowwiseParallel"]
