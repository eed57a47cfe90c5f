"""Quantize the weights of a model, in one format or in those that a search chose."""

from qtensor.weights.format_search import search
from qtensor.weights.quantize import quantize_
from qtensor.weights.rounding import Rounding
from qtensor.weights.search_result import CurvePoint, GroupChoice, SearchResult

__all__ = ["CurvePoint", "GroupChoice", "Rounding", "SearchResult", "quantize_", "search"]
