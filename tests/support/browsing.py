"""Pages in a browser as people see them: Debian's Chromium, headless, and axe-core, which finds what shuts them out.

axe-core comes with the package axe-playwright-python; it is of the tests alone, and under the MPL-2.0.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")

WIDTHS = (1280, 390)
SCHEMES = ("light", "dark")
UNDECIDABLE = {"elmPartiallyObscured", "shortTextContent", "nonBmp", "imgNode"}
"""Why axe may not tell a word's contrast: it is hidden in a table that scrolls, of one character, of signs alone, or in
a drawing.
"""

OPEN_ALL = "document.querySelectorAll('details').forEach(one => { one.open = true })"


class Served(Protocol):
    """Whatever has pages."""

    @property
    def url(self) -> str: ...


@dataclass
class Tab:
    """A page, and everything that it should not have done."""

    page: Page
    origin: str
    wrongs: list[str] = field(default_factory=list)

    def open(self, path: str) -> None:
        self.page.goto(self.origin + path, wait_until="load")

    def wait_for_plots(self) -> None:
        self.page.wait_for_selector(".drawn canvas", timeout=60_000)

    def assert_nothing_sticks_out(self) -> None:
        wide = self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, f"{wide} px wider than the window"

    def assert_axe_finds_nothing(self) -> None:
        """Hold the page, with everything unfolded, against all rules of axe-core."""
        self.page.evaluate(OPEN_ALL)
        told = Axe().run(self.page, options={}).response
        broken = [node for rule in told["violations"] for node in rule["nodes"]]
        faint = [node for rule in told["incomplete"] if rule["id"] == "color-contrast" for node in rule["nodes"]]
        broken += [node for node in faint if not UNDECIDABLE.issuperset(_undecided(node))]
        assert not broken, "\n".join(f"{node['html'][:120]}: {node['failureSummary']}" for node in broken)


def _undecided(node: Mapping[str, Any]) -> list[str]:
    """Return the codes of why axe could not tell the contrast of an element."""
    return [(check["data"] or {}).get("messageKey", "") for check in node["any"]]


@pytest.fixture(scope="module", name="browser")
def a_browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def tab(
    browser: Browser, run: Served, *, width: int = 1280, scheme: str = "light", scripts: bool = True, **more: Any
) -> Iterator[Tab]:
    """Open a window `width` pixels wide; `more` is of Playwright's `new_context`, such as `timezone_id`.

    Raise AssertionError at its end for an error in the console, a dialog, or a request to another host.
    """
    context = browser.new_context(
        viewport={"width": width, "height": 800}, color_scheme=scheme, java_script_enabled=scripts, **more
    )
    found = Tab(context.new_page(), run.url)
    page = found.page
    page.on("console", lambda message: found.wrongs.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: found.wrongs.append(str(error)))
    page.on("request", lambda request: found.wrongs.append(request.url) if is_elsewhere(request.url, run.url) else None)
    page.on("dialog", lambda dialog: found.wrongs.append(dialog.message))
    yield found
    assert not found.wrongs, found.wrongs
    context.close()


def is_elsewhere(url: str, origin: str) -> bool:
    return urlsplit(url).scheme not in ("data", "blob", "about") and not url.startswith(origin + "/")
