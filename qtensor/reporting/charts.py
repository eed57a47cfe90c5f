"""Draw heat maps, histograms and a curve as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from qtensor.core.formats import Element
from qtensor.reference.elements import code_values
from qtensor.reporting.markup import number, text

_COLORS = 8
_SMALL, _LARGE = 12, 18
"""Sizes of a cell of a heat map in pixels, for many and for few columns."""


class Spot(NamedTuple):
    """A layer in a heat map."""

    name: str
    value: float
    anchor: str = ""
    """Id of its row in a table."""


def placed(name: str) -> tuple[str, int | None]:
    """Return the part of a layer, and the number of its block: "*.mlp.up_proj" and 3.

    The first number in a name counts blocks; later ones, such as those of experts, become "*".
    """
    parts = name.removesuffix(".weight").split(".")
    first = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    if first is None:
        return ".".join(parts), None
    starred = ["*" if part.isdecimal() else part for part in parts]
    return ".".join(starred), int(parts[first])


class Scale(NamedTuple):
    """Map values to colors: the lowest value gets the most striking color."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Scale:
        """Return the scale from the smallest to the largest finite value."""
        finite = [v for v in values if math.isfinite(v)] or [0.0]
        return cls(min(finite), max(finite))

    def css(self, value: float) -> str:
        """Return the CSS classes of the color of a value; "c" alone for NaN."""
        if math.isnan(value):
            return "c"
        if value >= self.high:
            return f"c c{_COLORS - 1}"
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return f"c c{max(0, min(_COLORS - 1, int(share * _COLORS)))}"

    def legend(self, unit: str) -> str:
        """Return the colors with the values at both ends."""
        if not self.high > self.low:
            return f'<p class="soft">All values: {number(self.low, ".2f")} {text(unit)}</p>'
        boxes = "".join(
            f'<rect x="{70 + 22 * i}" width="22" height="12" class="c c{i}"/>'
            for i in range(_COLORS)
        )
        end = 70 + 22 * _COLORS
        return (
            f'<svg width="{end + 90}" height="14" role="img" aria-label="colors from '
            f'{self.low:.2f} to {self.high:.2f} {text(unit)}">{boxes}'
            f'<text x="64" y="10" text-anchor="end">{self.low:.1f} {text(unit)}</text>'
            f'<text x="{end + 6}" y="10">{self.high:.1f} {text(unit)}</text></svg>'
        )


def heat_map(title: str, spots: Sequence[Spot], scale: Scale, unit: str) -> str:
    """Return a figure whose rows are parts of a block, and whose columns are the blocks.

    A cell with several layers, such as experts, shows the lowest of their values.
    """
    cells: dict[tuple[str, int | None], list[Spot]] = {}
    for spot in spots:
        cells.setdefault(placed(spot.name), []).append(spot)
    rows = list(dict.fromkeys(row for row, _ in cells))
    blocks = sorted({block for _, block in cells if block is not None})
    columns: list[int | None] = [*blocks]
    if any(block is None for _, block in cells):
        columns.insert(0, None)
    size = _LARGE if len(columns) <= 48 else _SMALL
    left = 14 + max(6.2 * len(row) for row in rows)
    at = {column: left + size * i for i, column in enumerate(columns)}
    every = max(1, math.ceil(24 / size), len(columns) // 24)
    marks = [
        f'<text x="{at[column] + size / 2:.0f}" y="11" text-anchor="middle" class="soft">'
        f"{'-' if column is None else column}</text>"
        for i, column in enumerate(columns)
        if column is None or i % every == 0
    ]
    for i, row in enumerate(rows):
        y = 16 + size * i
        marks.append(
            f'<text x="{left - 6:.0f}" y="{y + size - 4}" text-anchor="end">{text(row)}</text>'
        )
        for column in columns:
            found = cells.get((row, column))
            if found:
                marks.append(_cell(found, at[column], y, size, scale, unit))
    width, height = left + size * len(columns) + 8, 20 + size * len(rows)
    return (
        f'<figure><figcaption>{text(title)}</figcaption><div class="scroll" tabindex="0" '
        f'role="region" aria-label="{text(title)}">'
        f'<svg width="{width:.0f}" height="{height}" role="group" aria-label="{text(title)}">'
        f"{''.join(marks)}</svg></div></figure>"
    )


def _cell(found: Sequence[Spot], x: float, y: float, size: int, scale: Scale, unit: str) -> str:
    # NaN is not the lowest value: it means that nothing was measured.
    worst = min(found, key=lambda spot: math.inf if math.isnan(spot.value) else spot.value)
    more = f" (lowest of {len(found)})" if len(found) > 1 else ""
    tip = f"{worst.name}: {number(worst.value)} {unit}{more}"
    box = (
        f'<rect x="{x:.0f}" y="{y}" width="{size - 1}" height="{size - 1}" '
        f'class="{scale.css(worst.value)}"><title>{text(tip)}</title></rect>'
    )
    return f'<a href="#{text(worst.anchor)}">{box}</a>' if worst.anchor else box


def code_bars(element: Element, counts: Sequence[int]) -> list[tuple[str, int]]:
    """Return (label, count) of the bars of a histogram of codes, from negative to positive.

    Up to 64 codes have a bar each; of 256 codes, those with one sign and exponent share a bar.
    """
    values = code_values(element)
    if element.bits <= 6:
        order = sorted(range(len(values)), key=lambda code: (values[code], -code))
        return [(_signed(values[code]), counts[code]) for code in order]
    found: dict[tuple[int, int], int] = {}
    for code, count in enumerate(counts):
        sign, exponent = code >> (element.bits - 1), code >> element.mantissa_bits
        exponent &= (1 << element.exponent_bits) - 1
        found[sign, exponent] = found.get((sign, exponent), 0) + count
    keys = sorted(found, key=lambda key: -key[1] - 1 if key[0] else key[1])
    bias = 1 - element.min_exponent
    names = {key: _power(max(key[1], 1) - bias) for key in keys}
    return [(("-" if key[0] else "") + names[key], found[key]) for key in keys]


_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def _power(exponent: int) -> str:
    return "2" + str(exponent).translate(_SUPERSCRIPTS)


def _signed(value: float) -> str:
    sign = "-" if math.copysign(1, value) < 0 else ""
    return f"{sign}{abs(value):g}"


def histogram(title: str, bars: Sequence[tuple[str, int]], caption: str) -> str:
    """Return a figure with one bar for each (label, count)."""
    most, total = max([count for _, count in bars] or [1]) or 1, sum(c for _, c in bars) or 1
    wide = max(9, min(28, 480 // max(1, len(bars))))
    every = max(1, math.ceil(34 / wide))
    height, left = 110, 44
    marks = [
        f'<path class="axis" d="M{left} {height + 6}H{left + wide * len(bars)}"/>',
        f'<text x="{left - 4}" y="14" text-anchor="end" class="soft">{most / total:.1%}</text>',
    ]
    for i, (label, count) in enumerate(bars):
        tall = height * count / most
        x = left + wide * i
        marks.append(
            f'<rect class="bar" x="{x}" y="{height + 6 - tall:.1f}" width="{wide - 1}" '
            f'height="{tall:.1f}"><title>{text(label)}: {count:,} ({count / total:.2%})</title>'
            "</rect>"
        )
        if i % every == 0:
            x_text = x + wide / 2
            marks.append(
                f'<text x="{x_text:.0f}" y="{height + 20}" text-anchor="middle" class="soft">'
                f"{text(label)}</text>"
            )
    return (
        f"<figure><figcaption>{text(title)}</figcaption>"
        f'<svg width="{left + wide * len(bars) + 20}" height="{height + 26}" role="img" '
        f'aria-label="{text(f"{title}. {caption}")}">{"".join(marks)}</svg>'
        f'<p class="soft">{text(caption)}</p></figure>'
    )


def spark(bars: Sequence[tuple[str, int]]) -> str:
    """Return a small histogram for a cell of a table: one path."""
    step = max(1, -(-len(bars) // 32))
    merged = [sum(c for _, c in bars[i : i + step]) for i in range(0, len(bars), step)]
    most = max(merged, default=0) or 1
    path = "".join(f"M{3 * i} 16v-{16 * c / most:.0f}h2V16z" for i, c in enumerate(merged) if c)
    return (
        f'<svg width="{3 * len(merged)}" height="16" aria-hidden="true">'
        f'<path class="bar" d="{path}"/></svg>'
    )


def factor_bars(factors: Mapping[int, int]) -> list[tuple[str, int]]:
    """Return (label, count) of a histogram of factors by their power of two, without gaps."""
    if not factors:
        return []
    low, high = min(factors), max(factors)
    step = max(1, math.ceil((high - low + 1) / 48))
    return [
        (_power(start), sum(factors.get(e, 0) for e in range(start, start + step)))
        for start in range(low, high + 1, step)
    ]


def curve(
    points: Sequence[tuple[float, float]], chosen: tuple[float, float], title: str, unit: str
) -> str:
    """Return a figure of error over bits a value, with the chosen point.

    The axis of errors is logarithmic where all errors are positive.
    """
    every = [*points, chosen]
    positive = all(error > 0 for _, error in every)
    high = [math.log10(e) if positive else e for _, e in every]
    (x0, x1), (y0, y1) = _span([b for b, _ in every]), _span(high)
    left, top, width, height = 70, 12, 560, 240

    def place(bits: float, error: float) -> tuple[float, float]:
        level = math.log10(error) if positive else error
        return (
            left + width * (bits - x0) / (x1 - x0),
            top + height * (y1 - level) / (y1 - y0),
        )

    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
    marks = [
        f'<path class="axis" d="M{left} {top}V{top + height}H{left + width}"/>',
        f'<polyline class="curve" points="{line}"/>',
    ]
    for i in range(5):
        bits, level = x0 + (x1 - x0) * i / 4, y0 + (y1 - y0) * i / 4
        error = 10**level if positive else level
        x, y = left + width * i / 4, top + height - height * i / 4
        marks.append(
            f'<text x="{x:.0f}" y="{top + height + 16}" text-anchor="middle" class="soft">'
            f"{bits:.2f}</text>"
            f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end" class="soft">'
            f"{error:.2g}</text>"
        )
    x, y = place(*chosen)
    side, shift = ("end", -9) if x > left + width / 2 else ("start", 9)
    marks.append(
        f'<circle class="point" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
        f'<text x="{x + shift:.0f}" y="{y - 8:.0f}" text-anchor="{side}">chosen: {chosen[0]:.2f} '
        f"bits, {chosen[1]:.3g}</text>"
        f'<text x="{left + width / 2:.0f}" y="{top + height + 34}" text-anchor="middle">'
        "bits a value</text>"
    )
    return (
        f"<figure><figcaption>{text(title)}: {text(unit)}</figcaption>"
        f'<svg width="{left + width + 30}" height="{top + height + 42}" role="img" '
        f'aria-label="{text(title)}, from {x0:.2f} to {x1:.2f} bits a value">'
        f"{''.join(marks)}</svg></figure>"
    )


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
    return low - room, high + room
