"""Quantize the weights of a model, search for formats, and merge adapters into the weights."""

from qtensor.weights.format_search import search
from qtensor.weights.merge_report import LayerMerge, Merge
from qtensor.weights.merging import merge_lora_
from qtensor.weights.quantize import quantize_
from qtensor.weights.rounding import Rounding
from qtensor.weights.search_result import CurvePoint, GroupChoice, SearchResult

__all__ = [
    "CurvePoint",
    "GroupChoice",
    "LayerMerge",
    "Merge",
    "Rounding",
    "SearchResult",
    "merge_lora_",
    "quantize_",
    "search",
]
