"""See the numerics of a model: record its tensors, compare two models, look into a tensor."""

from qtensor.debug.log import Log, Record
from qtensor.debug.recording import Recorder, record

__all__ = ["Log", "Record", "Recorder", "record"]
