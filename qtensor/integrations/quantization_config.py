"""``QTensorConfig``: how a model of transformers or diffusers is quantized, loaded and saved."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from transformers.quantizers import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

import qtensor
from qtensor.api import parsed
from qtensor.checkpoints.layout_base import find_layout
from qtensor.core.errors import fail
from qtensor.quantizers import Quantizer
from qtensor.weights.search_result import SearchResult

METHOD = "qtensor"
_VERSION = 1

Formats = (
    str | Quantizer | Mapping[str, str | Quantizer | None] | SearchResult | os.PathLike[str] | None
)
"""What says the formats of the weights of a model."""


class Method(StrEnum):
    """Name the method as transformers and diffusers name theirs: diffusers asks for ``.value``."""

    QTENSOR = METHOD


@register_quantization_config(METHOD)
class QTensorConfig(QuantizationConfigMixin):
    """Say how a model of transformers or diffusers is quantized, loaded and saved.

    Both libraries take this one class, so that
    ``PipelineQuantizationConfig(quant_backend="qtensor", ...)`` serves all models of a pipeline.

    Attributes:
        format: canonical text of the quantizer for weights, a dict from names of layers to such
            texts or None, or None to load what a checkpoint stores.
        modules_to_not_convert: names of modules that stay as they are, besides the output
            embeddings and tied weights.
        layout: the layout that ``save_pretrained`` writes.
        activations: whether the layers quantize their inputs as the checkpoint says.
    """

    def __init__(
        self,
        format: Formats = None,
        *,
        modules_to_not_convert: str | list[str] | None = None,
        layout: str = METHOD,
        activations: bool = False,
        **entry: Any,
    ) -> None:
        """Make a configuration.

        Args:
            format: format of the weights, such as ``"nvfp4"``, ``"mxfp8"`` or a quantizer; a dict
                from names of layers (``*`` and ``?`` allowed) to formats, as ``quantize_`` takes
                it; the result of ``qtensor.search``, or the name of a ``.json`` file that it
                saved; None for checkpoints that are quantized already.
            modules_to_not_convert: a name of modules or several. transformers matches them from
                the start of a name, as a regular expression, or as a suffix; diffusers matches
                parts of names, such as ``"proj_out"`` or ``"blocks.0."``.
            layout: name of the layout that ``save_pretrained`` writes, such as ``"qtensor"`` or
                ``"compressed-tensors"``; it must be one that ``qtensor.checkpoints`` writes. For
                models of diffusers it is ``"qtensor"``.
            activations: True lets the layers of a quantized checkpoint quantize their inputs as
                its config says, with the factors of the file (``qtensor.checkpoints.calibration``).
            **entry: other keys of ``quantization_config`` in a config.json of ours.

        Raises:
            QTensorError: the format, the layout or a key is unknown.
        """
        if entry.pop("quant_method", METHOD) != METHOD or entry.pop("version", _VERSION) != 1:
            fail("QTensorConfig", f"quant_method is {METHOD!r}, version 1", entry, "Update qtensor")
        if entry:
            fix = "Pass format, modules_to_not_convert or layout"
            fail("QTensorConfig", "its arguments must be known", ", ".join(entry), fix)
        self.quant_method = Method.QTENSOR
        self.format = _weight_formats(format)
        if isinstance(modules_to_not_convert, str):
            # transformers would take every letter for a name.
            modules_to_not_convert = [modules_to_not_convert]
        self.modules_to_not_convert = modules_to_not_convert
        if find_layout(layout).writer is None:
            fix = 'Use layout="qtensor"'
            fail("QTensorConfig", "save_pretrained writes the layout", layout, fix)
        self.layout, self.activations = layout, activations
        self._entry: dict[str, Any] | None = None

    def get(self, key: str, default: object = None) -> Any:
        """Return a value of ``to_dict``; transformers asks a config for ``quant_method`` so."""
        return self.to_dict().get(key, default)

    def __repr__(self) -> str:
        more = ("activations",) if self.activations else ()
        names = ("format", "modules_to_not_convert", "layout", *more)
        return f"{type(self).__name__}({', '.join(f'{n}={getattr(self, n)!r}' for n in names)})"

    def to_dict(self) -> dict[str, Any]:
        """Return ``quantization_config`` of config.json, as the layout last written has it."""
        if self._entry is not None:
            return dict(self._entry)
        more = {"activations": True} if self.activations else {}
        return {"quant_method": METHOD, "version": _VERSION, **more}


def _weight_formats(format: Formats) -> str | dict[str, str | None] | None:
    """Return the canonical text of one format, or those of the layers by pattern."""
    if isinstance(format, os.PathLike) or (isinstance(format, str) and format.endswith(".json")):
        format = SearchResult.load(os.fspath(format))
    if isinstance(format, SearchResult):
        if format.activations:
            rule = "weights alone are quantized while a model loads"
            fix = "Load the model and call result.apply(model), or search with activations=False"
            fail("QTensorConfig", rule, "a search with quantized activations", fix)
        format = format.formats
    if isinstance(format, Mapping):
        return {key: None if f is None else _weight_format(f) for key, f in format.items()}
    return None if format is None else _weight_format(format)


def _weight_format(format: str | Quantizer) -> str:
    """Return the canonical text of a quantizer for weights."""
    quantizer = parsed(format) if isinstance(format, str) else qtensor.quantizer(format)
    if quantizer.needs_scale or not quantizer.rowwise or quantizer.columnwise:
        fix = 'Pass a format such as "nvfp4", "mxfp8" or "fp8"'
        rule = "weights are quantized rowwise, with factors of their own values"
        fail("QTensorConfig", rule, quantizer.canonical, fix)
    return quantizer.canonical
