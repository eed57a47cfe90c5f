"""Report on the weights of a model, as values and as one HTML page."""

from qtensor.reporting.findings import TensorReport, WorstBlock
from qtensor.reporting.model import ModelReport, model_report
from qtensor.reporting.recorded import Recorded

__all__ = ["ModelReport", "Recorded", "TensorReport", "WorstBlock", "model_report"]
