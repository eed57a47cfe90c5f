"""The documentation site in Chromium: the search finds a name, light and dark, without errors."""

from __future__ import annotations

import functools
import http.server
import threading

import pytest

from tests.debug.test_report_browser import _chromium
from tests.project.test_docs_site import build, copy

pytestmark = pytest.mark.project


__all__ = ["copy"]  # a fixture


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def address(copy):
    """The address of a server of the built site: the search of mkdocs needs one."""
    pytest.importorskip("playwright.sync_api", reason="needs the extra browser")
    done = build(copy)
    assert done.returncode == 0, done.stderr
    with Serving(copy / "site") as url:
        yield url


class Serving:
    """A context in which a folder has an address on this machine."""

    def __init__(self, folder):
        handler = functools.partial(_Quiet, directory=str(folder))
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self.server.server_port}"

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def look_up(address, program, api):
    """Search for a name in both color schemes, and open what is found."""
    backgrounds = []
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = browser.new_page(color_scheme=scheme)
            errors = []
            page.on("console", lambda m, e=errors: e.append(m.text) if m.type == "error" else None)
            page.on("pageerror", lambda error, e=errors: e.append(str(error)))
            page.on(
                "request",
                lambda r, e=errors: None if r.url.startswith(address) else e.append(r.url),
            )
            page.goto(f"{address}/docs/concepts.html")
            color = "getComputedStyle(document.body).backgroundColor"
            backgrounds.append(page.evaluate(color))
            page.locator("input[name=query]").fill("error_report")
            found = page.locator(".md-search-result__link[href*='reference/qtensor.html']").first
            found.wait_for()
            page.goto(found.get_attribute("href"))
            assert any("error_report" in text for text in page.locator("h2").all_inner_texts())
            assert errors == []
        browser.close()
    assert len(set(backgrounds)) == 2


@pytest.mark.nightly(reason="make docs builds the site in every run of .ci/run")
def test_the_search_finds_a_name(address):
    api = pytest.importorskip("playwright.sync_api", reason="needs the extra browser")
    if (program := _chromium()) is None:
        pytest.skip(reason="needs chromium")
    look_up(address, program, api)
