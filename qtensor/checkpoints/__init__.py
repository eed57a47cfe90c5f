"""Read and write checkpoints with quantized weights, in the layouts that people have.

``open`` gives a lazy mapping from names to tensors, ``load_state_dict`` all of them, and ``save``
writes a model or a state dict. ``convert`` and ``dequantize`` stream a checkpoint to another
layout, or to plain tensors; ``inspect``, ``verify`` and ``compare`` look into files.
docs/checkpoints.md lists the layouts.
"""

# Imported before the function ``layouts``: the first import of the folder sets the same name.
import qtensor.checkpoints.layouts  # noqa: F401
from qtensor.checkpoints.activation_factors import apply_transforms, calibration
from qtensor.checkpoints.checkpoint import Checkpoint, Row, Table, load_state_dict
from qtensor.checkpoints.checkpoint import open_checkpoint as open
from qtensor.checkpoints.conversion.api import convert, dequantize
from qtensor.checkpoints.conversion.conversion_report import ConversionReport, TensorResult
from qtensor.checkpoints.conversion.request import Options, Progress
from qtensor.checkpoints.errors import CheckpointError
from qtensor.checkpoints.inspection.compare import Comparison, Difference, compare
from qtensor.checkpoints.inspection.summary import Summary, TensorSummary, inspect, inspect_tensor
from qtensor.checkpoints.inspection.verify import Problem, Verification, verify
from qtensor.checkpoints.layout_base import (
    DenseOnly,
    Group,
    Layout,
    Source,
    Unreadable,
    Writer,
    layouts,
)
from qtensor.checkpoints.saving import save

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Comparison",
    "ConversionReport",
    "DenseOnly",
    "Difference",
    "Group",
    "Layout",
    "Options",
    "Problem",
    "Progress",
    "Row",
    "Source",
    "Summary",
    "Table",
    "TensorResult",
    "TensorSummary",
    "Unreadable",
    "Verification",
    "Writer",
    "apply_transforms",
    "calibration",
    "compare",
    "convert",
    "dequantize",
    "inspect",
    "inspect_tensor",
    "layouts",
    "load_state_dict",
    "open",
    "save",
    "verify",
]
