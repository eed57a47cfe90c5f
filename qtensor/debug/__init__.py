"""See the numerics of a model: record its tensors, and compare two models."""

from qtensor.debug.comparing import Comparison, LayerDifference, compare
from qtensor.debug.log import Log, Record
from qtensor.debug.recording import Recorder, record

__all__ = ["Comparison", "LayerDifference", "Log", "Record", "Recorder", "compare", "record"]
