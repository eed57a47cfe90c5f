"""See the numerics of a model: record its tensors, compare two models, look into a tensor."""

from qtensor.debug.comparing import Comparison, LayerDifference, compare
from qtensor.debug.log import Log, Record
from qtensor.debug.recording import Recorder, record
from qtensor.debug.viewer import View, show

__all__ = [
    "Comparison",
    "LayerDifference",
    "Log",
    "Record",
    "Recorder",
    "View",
    "compare",
    "record",
    "show",
]
