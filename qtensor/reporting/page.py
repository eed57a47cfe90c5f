"""Write a report as one HTML page: styles, script and pictures are inside, no network is used."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterator
from pathlib import Path

from qtensor.core.version import __version__
from qtensor.reporting import charts
from qtensor.reporting.findings import Findings, TensorReport, mean
from qtensor.reporting.markup import (
    Cell,
    Column,
    Row,
    nbytes,
    number,
    numeric,
    plain_table,
    table,
    text,
    words,
)
from qtensor.reporting.measuring import Codes

_FOLDER = Path(__file__).parent
_LIMIT_DB = 10.0
"""An SQNR below this number of decibels is marked."""


def page(report: Findings) -> str:
    """Return the page of a report."""
    style = (_FOLDER / "report.css").read_text(encoding="utf-8")
    script = (_FOLDER / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # The browser runs only this script and loads nothing, so a tensor's name cannot become code.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    body = "\n".join(part for part in _sections(report) if part)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>qtensor: {text(report.title)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n<script>{script}</script>\n</body>\n</html>\n"
    )


def _sections(report: Findings) -> Iterator[str]:
    yield _summary(report)
    yield _heat_maps(report)
    yield _tensors(report)
    yield _histograms(report)
    yield _worst(report)
    yield _recorded(report)
    yield _search(report)


def _summary(report: Findings) -> str:
    quantized = report.quantized
    values = sum(t.numel for t in quantized)
    bits = 8 * sum(t.nbytes for t in quantized) / values if values else math.nan
    facts = [
        ("tensors", f"{len(report.tensors):,}"),
        ("quantized", f"{len(quantized):,}"),
        ("bytes", nbytes(report.nbytes)),
        ("bits a quantized value", number(bits, ".3f")),
    ]
    if report.against is not None:
        facts += [
            ("mean SQNR", f"{number(mean(t.sqnr_db for t in quantized))} dB"),
            ("mean cosine", number(mean(t.cosine for t in quantized), ".5f")),
        ]
    shown = "".join(f"<div><dt>{text(k)}</dt><dd>{text(v)}</dd></div>" for k, v in facts)
    layout = f", layout {text(report.layout)}" if report.layout else ""
    against = f" Compared with <b>{text(report.against)}</b>." if report.against else ""
    if report.against is None and quantized:
        against = (
            " Without the originals (<code>--against</code>), errors are unknown: the numbers"
            " below describe codes and factors alone."
        )
    notes = "".join(f'<p class="note">{text(note)}</p>' for note in report.notes)
    return (
        f'<h1>{text(report.title)}</h1><p class="soft">qtensor {text(__version__)}{layout}.'
        f'{against}</p><dl class="facts">{shown}</dl>{notes}{_formats(report)}'
    )


def _formats(report: Findings) -> str:
    rows = []
    for kind, tensors in report.formats().items():
        values, size = sum(t.numel for t in tensors), sum(t.nbytes for t in tensors)
        worst = min((t.sqnr_db for t in tensors if not math.isnan(t.sqnr_db)), default=math.nan)
        row = [
            words(kind),
            numeric(len(tensors), ",.0f"),
            numeric(values, ",.0f"),
            Cell(nbytes(size), size),
            numeric(8 * size / values if values else math.nan, ".3f"),
        ]
        if report.against is not None:
            row += [
                numeric(mean(t.sqnr_db for t in tensors)),
                numeric(worst),
                numeric(mean(t.cosine for t in tensors), ".5f"),
            ]
        rows.append(row)
    head = ["format", "tensors", "values", "bytes", "bits a value"]
    if report.against is not None:
        head += ["mean SQNR, dB", "lowest SQNR, dB", "mean cosine"]
    return plain_table(head, rows)


def _heat_maps(report: Findings) -> str:
    compared = report.against is not None
    weights = []
    for i, tensor in enumerate(report.tensors):
        if tensor.codes is not None or (compared and tensor.kind == "dense"):
            value = tensor.sqnr_db if compared else _entropy(tensor)
            weights.append(charts.Spot(tensor.name, value, f"t{i}"))
    panels = []
    unit = "dB" if compared else "bits"
    logged: dict[str, list[charts.Spot]] = {}
    for i, step in enumerate(report.recorded):
        logged.setdefault(step.role, []).append(charts.Spot(step.layer, step.sqnr_db, f"r{i}"))
    logged = {
        r: spots for r, spots in logged.items() if not all(math.isnan(s.value) for s in spots)
    }
    everything = [spot.value for spots in logged.values() for spot in spots]
    if compared:
        everything += [spot.value for spot in weights]
    scale = charts.Scale.of(everything)
    if weights:
        own = scale if compared else charts.Scale.of([spot.value for spot in weights])
        title = "weights: SQNR against the originals" if compared else "weights: entropy of a code"
        panels.append(charts.heat_map(title, weights, own, unit))
        if not compared:
            panels.append(own.legend(unit))
    for role, spots in logged.items():
        title = f"{role}: lowest SQNR of the recorded steps"
        panels.append(charts.heat_map(title, spots, scale, "dB"))
    if not panels:
        return ""
    if compared or logged:
        panels.append(scale.legend("dB"))
    return (
        '<h2 id="map">Where the error is</h2><p class="soft">Columns are the numbers of blocks in'
        " the names of layers; “-” has the layers without a number. The most striking color is the"
        " lowest value, and gray means no value. A cell leads to its row in the tables.</p>"
        + "".join(panels)
    )


def _entropy(tensor: TensorReport) -> float:
    return tensor.codes.entropy if tensor.codes is not None else math.nan


def _tensors(report: Findings) -> str:
    compared = report.against is not None
    columns = [
        Column("tensor", False),
        Column("format", False),
        Column("shape", False),
        Column("bytes"),
        Column("bits", True, "stored bits of a value, factors included"),
    ]
    if compared:
        columns += [
            Column("SQNR, dB", True, "10 log10(sum x² / sum (x - q)²)"),
            Column("cosine"),
            Column("max error", True, "largest absolute error"),
            Column("saturated", True, "share of values beyond the largest code of their block"),
            Column("to zero", True, "share of non-zero values that became zero"),
        ]
    columns += [
        Column("amax", True, "largest finite magnitude"),
        Column("zeros", True, "share of values that are zero"),
        Column("largest code", True, "share of codes with the largest magnitude"),
        Column("entropy", True, "Shannon entropy of a code in bits"),
        Column("zero blocks", True, "share of blocks without a non-zero value"),
        Column("smallest factor"),
        Column("largest factor"),
        Column("outliers", True, "columns whose maximum is over 10 times the median column's"),
        Column("NaN, inf"),
        Column("codes", False, "how often each code occurs, from negative to positive"),
    ]
    rows = [
        Row(f"t{i}", tensor.kind, _tensor_cells(tensor, compared))
        for i, tensor in enumerate(report.tensors)
    ]
    kinds = {"": "all tensors"}
    if report.quantized:
        kinds["*"] = "quantized tensors"
    kinds |= {kind: kind for kind in report.formats()}
    chosen = "*" if report.quantized else ""
    return '<h2 id="tensors">Tensors</h2>' + table("tensors", columns, rows, kinds, chosen)


def _tensor_cells(tensor: TensorReport, compared: bool) -> list[Cell]:
    s, codes = tensor.statistics, tensor.codes
    nan = math.nan
    cells = [
        words(tensor.name, "t name"),
        words(f"{tensor.kind} ({tensor.dtype})" if tensor.kind == "plain" else tensor.kind),
        words("x".join(map(str, tensor.shape)) or "scalar"),
        Cell(nbytes(tensor.nbytes), tensor.nbytes),
        numeric(tensor.bits, ".2f"),
    ]
    if compared:
        cells += [
            numeric(tensor.sqnr_db, ".2f", "bad" if tensor.sqnr_db < _LIMIT_DB else ""),
            numeric(tensor.cosine, ".5f"),
            numeric(s.errors.max_abs if s and s.compared else nan, ".3g"),
            numeric(s.share(s.errors.saturated) if s and s.compared and codes else nan, ".3%"),
            numeric(s.share(s.errors.flushed) if s and s.compared else nan, ".3%"),
        ]
    bad = s.nan + s.inf if s else 0
    has_factors = codes is not None and codes.factor_max > 0
    blocks = codes.zero_blocks / codes.blocks if codes is not None and codes.blocks else nan
    cells += [
        numeric(s.amax if s else nan, ".4g"),
        numeric(s.share(s.zeros) if s else nan, ".2%"),
        numeric(codes.largest if codes is not None else nan, ".2%"),
        numeric(codes.entropy if codes is not None else nan, ".2f"),
        numeric(blocks, ".2%"),
        numeric(codes.factor_min if codes is not None and has_factors else nan, ".3g"),
        numeric(codes.factor_max if codes is not None and has_factors else nan, ".3g"),
        numeric(s.outlier_channels if s else nan, ",.0f"),
        numeric(bad if s else nan, ",.0f", "bad" if bad else ""),
        Cell("" if codes is None else charts.spark(_bars(codes)), None, "t"),
    ]
    return cells


def _bars(codes: Codes) -> list[tuple[str, int]]:
    return charts.code_bars(codes.element, codes.counts.tolist())


def _histograms(report: Findings) -> str:
    parts = []
    for kind, tensors in report.formats().items():
        found = [t.codes for t in tensors if t.codes is not None]
        if not found:
            continue
        total = Codes.empty(found[0].element)
        for codes in found:
            total.add(codes)
        element = total.element
        what = "values" if element.bits <= 6 else "exponents of two; the bars in the middle hold 0"
        caption = f"{element.name} {what}; entropy {total.entropy:.2f} of {element.bits} bits"
        charted = charts.histogram("codes", _bars(total), caption)
        if total.factors:
            text_range = f"{total.factor_min:.3g} to {total.factor_max:.3g}"
            factors = f"decode factors by power of two; {text_range}"
            charted += charts.histogram("factors", charts.factor_bars(total.factors), factors)
        parts.append(f'<h3>{text(kind)}</h3><div class="charts">{charted}</div>')
    return f'<h2 id="codes">Codes and factors</h2>{"".join(parts)}' if parts else ""


def _worst(report: Findings) -> str:
    if not report.worst:
        return ""
    compared = report.against is not None
    explained = (
        "The block with the lowest SQNR of each of the worst tensors. A cell has the code, its"
        " value and, in italics, the original; a block begins with its factor."
        if compared
        else "Of each tensor, the block with the highest crest factor (peak over root mean"
        " square): there, one value makes the codes of all others small."
    )
    parts = [f'<h2 id="worst">Worst blocks</h2><p class="soft">{explained}</p>']
    for block in report.worst:
        measure = f"SQNR {-block.badness:.2f} dB" if compared else f"crest {block.badness:.2f} dB"
        where = f"rows {block.view.rows.start} to {block.view.rows.stop - 1}, columns "
        where += f"{block.view.cols.start} to {block.view.cols.stop - 1}"
        parts.append(
            f"<h3>{text(block.name)}</h3><p>{measure}, {where}</p>"
            f'<div class="scroll block" tabindex="0">{block.view._repr_html_()}</div>'
        )
    return "".join(parts)


def _recorded(report: Findings) -> str:
    if not report.recorded:
        return ""
    columns = [
        Column("layer", False),
        Column("role", False),
        Column("quantizer", False),
        Column("steps", True, "number of recorded steps"),
        Column("worst step", True, "the step with the lowest SQNR"),
        Column("SQNR, dB"),
        Column("amax"),
        Column("saturated"),
        Column("to zero"),
        Column("outliers", True, "columns whose maximum is over 10 times the median column's"),
        Column("NaN, inf"),
        Column("first step with NaN, inf"),
    ]
    rows = []
    for i, step in enumerate(report.recorded):
        first = math.nan if step.first_not_finite is None else step.first_not_finite
        cells = [
            words(step.layer or "(model)", "t name"),
            words(step.role),
            words(step.quantizer or "-"),
            numeric(step.steps, ",.0f"),
            numeric(step.step, ",.0f"),
            numeric(step.sqnr_db, ".2f", "bad" if step.sqnr_db < _LIMIT_DB else ""),
            numeric(step.amax, ".4g"),
            numeric(step.saturated, ".3%"),
            numeric(step.flushed, ".3%"),
            numeric(step.outlier_channels, ",.0f"),
            numeric(step.not_finite, ",.0f", "bad" if step.not_finite else ""),
            numeric(first, ",.0f"),
        ]
        rows.append(Row(f"r{i}", step.role, cells))
    kinds = {"": "all roles"} | {step.role: step.role for step in report.recorded}
    made = table("recorded tensors", columns, rows, kinds, "")
    explained = "Each number is that of the worst step."
    return f'<h2 id="recorded">Recorded run</h2><p class="soft">{explained}</p>{made}'


def _search(report: Findings) -> str:
    result = report.search
    if result is None:
        return ""
    points = [(p.bits, p.predicted) for p in result.curve]
    chosen = (result.bits, result.predicted)
    drawn = charts.curve(points, chosen, "best choices for every budget", f"sum of {result.metric}")
    rows = [
        [
            words(", ".join(group.names), "t name"),
            words(group.format or "high precision"),
            numeric(group.bits, ".2f"),
            numeric(group.error, ".4g"),
        ]
        for group in result.groups
    ]
    head = ["layers", "format", "bits a value", f"{result.metric} of this group alone"]
    return (
        f'<h2 id="search">Format search</h2><p>The choice has {result.bits:.2f} bits a value and'
        f" {text(result.metric)} {result.measured:.4g} when measured; the sum over the groups alone"
        f" is {result.predicted:.4g}.</p>{drawn}{plain_table(head, rows)}"
    )
