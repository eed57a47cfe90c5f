"""Quantize the weights of a model, search for formats, and merge adapters into the weights."""

from qtensor.weights.activations import calibrate
from qtensor.weights.calibrated import CalibratedInput, CalibratedKeysValues, Calibration
from qtensor.weights.format_search import search
from qtensor.weights.merge_report import LayerMerge, MergeReport
from qtensor.weights.merging import merge_lora_
from qtensor.weights.qat import convert_qat_, prepare_qat_
from qtensor.weights.quantize import quantize_
from qtensor.weights.rotation import rotate_
from qtensor.weights.rounding import Rounding
from qtensor.weights.search_result import CurvePoint, GroupChoice, SearchResult
from qtensor.weights.smoothing import smooth_

__all__ = [
    "CalibratedInput",
    "CalibratedKeysValues",
    "Calibration",
    "CurvePoint",
    "GroupChoice",
    "LayerMerge",
    "MergeReport",
    "Rounding",
    "SearchResult",
    "calibrate",
    "convert_qat_",
    "merge_lora_",
    "prepare_qat_",
    "quantize_",
    "rotate_",
    "search",
    "smooth_",
]
