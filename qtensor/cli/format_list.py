"""``qtensor formats``: a table of the formats, read from their quantizers and specs."""

import dataclasses
import math

from rich.console import Console

import qtensor
from qtensor.cli.console import make_table
from qtensor.quantizers.base import Quantizer

_SHAPE = (4096, 4096)
"""Shape for which bits per value are computed: padding is negligible here."""
_EVERYWHERE = ("rowwise", "columnwise", "columnwise_value")
"""Options that every format has; the table leaves them out."""


def show_formats(console: Console) -> None:
    """Print a table of the formats."""
    table = make_table(
        "format", ">bits", "elements", "block", "scale", "options and their defaults"
    )
    for fmt in qtensor.formats():
        quantizer = qtensor.quantizer(fmt)
        elements = ", ".join(element.name for element in quantizer.spec.elements)
        bits = f"{bits_per_value(quantizer):.3f}"
        table.add_row(
            fmt, bits, elements, _block(quantizer), _scale(quantizer), _options(quantizer)
        )
    console.print(table)
    console.print(
        "[dim]Bits per value with the default options, scales included, "
        f"for a {_SHAPE[0]} x {_SHAPE[1]} matrix.\n"
        "Every format has rowwise=True, columnwise=False; "
        'use: qtensor.quantize(x, "nvfp4", option=value)[/]'
    )


def bits_per_value(quantizer: Quantizer) -> float:
    """Return the bits that the buffers of ``quantizer`` take for each value of a large matrix."""
    buffers = quantizer._describe_buffers(_SHAPE).values()
    nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in buffers)
    return 8 * nbytes / math.prod(_SHAPE)


def _block(quantizer: Quantizer) -> str:
    block = quantizer.spec.block
    if block is None:
        return "tensor" if quantizer.per_tensor else "row"
    return f"{block[0]} x {block[1]}"


def _scale(quantizer: Quantizer) -> str:
    """Return the type of the block scale, and of the tensor scale if there is a second level."""
    second = any(slot.name.startswith("_amax") for slot in quantizer.slots)
    return f"{quantizer.spec.scale}, tensor float32" if second else quantizer.spec.scale


def _options(quantizer: Quantizer) -> str:
    default = type(quantizer)()
    names = (f.name for f in dataclasses.fields(quantizer) if f.name not in _EVERYWHERE)
    return ", ".join(f"{name}={getattr(default, name)!r}" for name in names)
