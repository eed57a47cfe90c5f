"""A line in a terminal shows how far a search or a calibration is."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
from weights_search_cases import make_inputs, make_model

import qtensor


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def replaced(monkeypatch: pytest.MonkeyPatch, kind: type[io.StringIO]) -> io.StringIO:
    """Replace stderr; in the test, because pytest sets it again after fixtures."""
    stream = kind()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


streams = pytest.mark.parametrize("kind", [Terminal, io.StringIO])


def search(**options: Any) -> None:
    qtensor.search(
        make_model(), make_inputs(), formats=["nvfp4", "mxfp8"], budget_bits=7, **options
    )


def gptq(**options: Any) -> None:
    options = {"rounding": "gptq", "calibration": make_inputs()} | options
    qtensor.quantize_(make_model(), "nvfp4", **options)


@streams
@pytest.mark.parametrize("run", [search, gptq])
def test_a_line_in_a_terminal_alone(monkeypatch: Any, kind: Any, run: Any) -> None:
    stream = replaced(monkeypatch, kind)
    run()
    text = stream.getvalue()
    if not stream.isatty():
        assert text == ""
        return
    title = "search" if run is search else "quantize_"
    parts = text.split("\r")[1:]
    assert parts[0].startswith(f"qtensor {title}: 1 of {len(parts)}, about ")
    assert parts[-1].startswith(f"qtensor {title}: {len(parts)} of {len(parts)}, about 0 s left")
    assert text.count("\n") == 1
    assert text.endswith("\n")


def test_false_and_quick_calls_show_nothing(monkeypatch: Any) -> None:
    stream = replaced(monkeypatch, Terminal)
    search(progress=False)
    gptq(progress=False)
    gptq(rounding="nearest", calibration=None)
    assert stream.getvalue() == ""


def test_a_function_gets_every_step(monkeypatch: Any) -> None:
    stream = replaced(monkeypatch, Terminal)
    steps: list[tuple[int, int, str]] = []
    gptq(progress=lambda *step: steps.append(step))
    assert [done for done, _, _ in steps] == [*range(1, steps[0][1] + 1)]
    assert stream.getvalue() == ""
