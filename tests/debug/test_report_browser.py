"""A report of 500 layers in Chromium: it sorts, filters and leads to rows, and stays below 3 MB."""

from __future__ import annotations

import shutil

import pytest
import torch

import qtensor
from qtensor.debug.log import ROLES
from tests.debug.test_report import EVIL, recorded_run

LAYERS = 500


def _chromium():
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The open page, and a list that collects errors of its console."""
    api = pytest.importorskip("playwright.sync_api", reason="needs the extra browser")
    if (program := _chromium()) is None:
        pytest.skip(reason="needs chromium")
    path = tmp_path_factory.mktemp("report") / "report.html"
    torch.manual_seed(0)
    parts = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj")
    names = [f"model.layers.{i}.{part}" for i in range(LAYERS // 5) for part in parts]
    originals = {f"{name}.weight": torch.randn(64, 128) for name in names}
    originals |= {EVIL: torch.randn(16, 32), "norm": torch.ones(32)}
    weights = {
        name: x if name == "norm" else qtensor.quantize(x, "mxfp8" if "up" in name else "nvfp4")
        for name, x in originals.items()
    }
    log = recorded_run(names, 3, ROLES)
    qtensor.model_report(weights, against=originals, log=log).save(path)
    assert path.stat().st_size < 3e6
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        opened = browser.new_page(color_scheme="dark")
        errors = []
        opened.on("console", lambda message: errors.append(message.text))
        opened.on("pageerror", lambda error: errors.append(str(error)))
        opened.on("dialog", lambda dialog: errors.append(f"dialog {dialog.message}"))
        opened.on("request", lambda r: None if r.url.startswith("file:") else errors.append(r.url))
        opened.goto(path.as_uri())
        yield opened, errors
        browser.close()


def column(page, index):
    """The numbers that the first table shows in a column, of visible rows."""
    cells = page.locator(f"#tensors + div tbody tr:not([hidden]) td:nth-child({index})")
    return cells.all_inner_texts()


def test_sorts_by_mouse_and_keyboard(page):
    opened, errors = page
    header = opened.locator("#tensors + div th", has_text="SQNR")
    header.locator("button").click()
    assert header.get_attribute("aria-sort") == "ascending"
    numbers = [float(text) for text in column(opened, 6)]
    assert len(numbers) == LAYERS + 1
    assert numbers == sorted(numbers)
    header.locator("button").focus()
    opened.keyboard.press("Enter")
    assert header.get_attribute("aria-sort") == "descending"
    numbers = [float(text) for text in column(opened, 6)]
    assert numbers == sorted(numbers, reverse=True)
    assert errors == []


def test_filters(page):
    opened, errors = page
    section = opened.locator("#tensors + div")
    section.locator("input").fill("layers.7. q_proj")
    assert section.locator("[role=status]").inner_text() == "1 of 502 rows"
    assert column(opened, 1) == ["model.layers.7.q_proj.weight"]
    section.locator("input").fill("")
    section.locator("select").select_option("plain")
    assert column(opened, 1) == ["norm"]
    # A link of the heat map shows its row even if a filter hides it.
    opened.evaluate("location.hash = 't3'")
    opened.wait_for_function("!document.getElementById('t3').hidden")
    section.locator("select").select_option("*")
    assert EVIL in column(opened, 1)
    assert errors == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(page, scheme):
    """At least 4.5 to 1, as WCAG 2 asks of text (level AA)."""
    opened, _ = page
    opened.emulate_media(color_scheme=scheme)
    colors = opened.evaluate(
        """() => {
            const style = getComputedStyle(document.documentElement);
            const found = {};
            const probe = document.body.appendChild(document.createElement("i"));
            for (const name of ["page", "band", "text", "soft", "accent", "warn"]) {
                probe.style.color = style.getPropertyValue("--" + name);
                found[name] = getComputedStyle(probe).color.match(/\\d+/g).map(Number);
            }
            probe.remove();
            return found;
        }"""
    )

    def luminance(color):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light = {name: luminance([c / 255 for c in color]) for name, color in colors.items()}
    for back in ("page", "band"):
        for front in ("text", "soft", "accent", "warn"):
            low, high = sorted((light[back], light[front]))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (back, front)
