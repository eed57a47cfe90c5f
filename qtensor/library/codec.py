"""Names of ``qtensor.registry`` for code that imports them from here."""

from qtensor.registry import QuantizerLike as Codec
from qtensor.registry import alloc_outputs, alloc_slots, by_name, parse
from qtensor.registry import format_names as codec_names
from qtensor.registry import quantizer_class as codec_class
from qtensor.registry import register_quantizer as register_codec

__all__ = [
    "Codec",
    "alloc_outputs",
    "alloc_slots",
    "by_name",
    "codec_class",
    "codec_names",
    "parse",
    "register_codec",
]
