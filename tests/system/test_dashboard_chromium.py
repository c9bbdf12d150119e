"""The pages in a browser: Debian's Chromium, headless, against a coordinator with a prepared database."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from actors import spec_of
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from playwright.sync_api import Browser, Page, sync_playwright
from sqlalchemy import update
from swarm import serve

from benchmarks.dashboards.stocked import Stock, stock
from coordinator.run.home import Home, create_home
from coordinator.run.service import Coordinator
from coordinator.storage import tallies
from coordinator.storage.schema import submissions
from coordinator.storage.tallies import VerdictKind
from coordinator.verifier.evidence import encode_evidence
from node.protocol.admission import Outcome, Verdict
from node.protocol.run import StandingSpec
from node.protocol.submission import Rollout
from node.verification.deviations import Deviations

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")

SPEC = spec_of(steps=1000, groups_per_step=16, standing=StandingSpec())
WIDTHS = (1280, 375)
BOMB = "Z" + "\u0335\u0489" * 2000
HOSTILE = (
    "</script><script>window.owned=1</script>",
    "<img src=x onerror='window.owned=1'>",
    "\u202edrow terces\u2066",
    BOMB,
    "x" * 5000,
    "\x1b[2J\x00\r\n",
    "{{7*7}}${7*7}",
)


@dataclass(frozen=True)
class Run:
    home: Home
    url: str
    submissions: list[str]


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


@contextmanager
def served(folder: Path, what: Stock | None) -> Iterator[Run]:
    key = Ed25519PrivateKey.generate()
    home = create_home(folder, public_key=key.public_key().public_bytes_raw(), spec=SPEC)
    found = [] if what is None else stock(home, what, key=key, now=time.time())
    with serve(Coordinator(home, key=key, relay_urls=("http://192.0.2.1:8710",))) as url:
        yield Run(home, url, found)
    home.database.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    what = Stock(workers=80, submissions=600, relays=30, engines=tuple(text[:200] for text in HOSTILE))
    with served(tmp_path_factory.mktemp("run"), what) as run:
        keep_hostile_evidence(run)
        yield run


def keep_hostile_evidence(run: Run) -> None:
    """The last submission as if its completion had been made of what a browser could take amiss."""
    tokens = len(HOSTILE)
    rollout = Rollout(
        seed=bytes(32),
        prompt_ids=[1],
        completion_ids=list(range(tokens)),
        logprobs=[-1.0] * tokens,
        segment_versions=[0],
        segment_tokens=[tokens],
        proofs=[b""],
    )
    measured = Deviations(
        exponent_mismatches=[50.0],
        mantissa_means=[0.5],
        mantissa_medians=[0.5],
        sketch_distances=[0.6] * tokens,
        margins=[0.0, 0.0005, 0.005, 0.3, 0.8, 2.0, float("nan")],
        errors=[1e-5] * tokens,
    )
    blob = encode_evidence(
        [rollout] * 2, {0: measured}, prompt="".join(HOSTILE), pieces=[HOSTILE, HOSTILE], chunk_tokens=32
    )
    assert blob is not None
    with run.home.database.write() as connection:
        row = update(submissions).where(submissions.c.submission == run.submissions[-1])
        connection.execute(row.values(evidence=run.home.blobs.put(blob)))


@contextmanager
def tab(browser: Browser, run: Run, *, width: int = 1280, scheme: str = "light", scripts: bool = True) -> Iterator[Tab]:
    context = browser.new_context(
        viewport={"width": width, "height": 800},
        color_scheme=scheme,
        java_script_enabled=scripts,
    )
    found = Tab(context.new_page(), run.url)
    page = found.page
    page.on("console", lambda message: found.wrongs.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: found.wrongs.append(str(error)))
    page.on("request", lambda request: found.wrongs.append(request.url) if is_elsewhere(request.url, run.url) else None)
    page.on("dialog", lambda dialog: found.wrongs.append(dialog.message))
    yield found
    assert found.wrongs == []
    context.close()


def is_elsewhere(url: str, origin: str) -> bool:
    return urlsplit(url).scheme not in ("data", "blob", "about") and not url.startswith(origin + "/")


def assert_nothing_sticks_out(page: Page) -> None:
    wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0, f"{wide} px wider than the window"


PATHS = ("/", "/audit", "SUBMISSION")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("path", PATHS)
def test_a_page_fits_its_window_and_asks_nobody_else(
    browser: Browser, run: Run, path: str, width: int, scheme: str
) -> None:
    """No scrolling sideways, no error in the console, no request to another host, with plots drawn under the policy."""
    with tab(browser, run, width=width, scheme=scheme) as found:
        found.open(path.replace("SUBMISSION", f"/submissions/{run.submissions[-1]}"))
        if path == "/":
            found.wait_for_plots()
            assert found.page.locator(".drawn canvas").count() > 0
        assert_nothing_sticks_out(found.page)
        paper = found.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 23, 27)")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_fresh_run_says_what_it_waits_for(browser: Browser, tmp_path: Path, width: int) -> None:
    with served(tmp_path, None) as fresh, tab(browser, fresh, width=width) as found:
        found.open("/")
        found.page.wait_for_timeout(500)
        assert "waits for the trainer" in found.page.inner_text("main")
        assert_nothing_sticks_out(found.page)


def test_the_main_figures_are_there_without_javascript(browser: Browser, run: Run) -> None:
    with tab(browser, run, scripts=False) as found:
        found.open("/")
        words = found.page.inner_text("main")
        for said in ("slots admitted", "550", "Latest verdicts", "wrong token", "proven"):
            assert said in words
        box = found.page.locator("#plot-reward svg").bounding_box()
        assert box is not None
        assert box["height"] > 100


def test_a_curve_of_training_can_be_read_off(browser: Browser, run: Run) -> None:
    with tab(browser, run) as found:
        found.open("/")
        found.page.wait_for_selector("#plot-entropy canvas", timeout=60_000)
        assert found.page.locator(".panel:visible .drawn").count() == 5


CARD_HAS_CHANGED = r"""before => [...document.querySelectorAll('.card')]
  .find(card => card.textContent.includes('slots admitted')).querySelector('dd').textContent.trim()
  .split(/\s/)[0] !== before"""


def test_a_verdict_appears_on_an_open_page_by_itself(browser: Browser, run: Run) -> None:
    with tab(browser, run) as found:
        found.open("/")
        found.page.wait_for_selector("#live.on")
        card = found.page.locator(".card", has_text="slots admitted").locator("dd")
        before = card.inner_text().split()[0]
        with run.home.database.write() as connection:
            admitted = Verdict(outcome=Outcome.ADMITTED, tokens=1)
            tallies.count_verdict(connection, VerdictKind.FULL, admitted, waited_seconds=1.0, now=time.time())
        found.page.wait_for_function(CARD_HAS_CHANGED, arg=before, timeout=20_000)
        assert int(card.inner_text().split()[0].replace(",", "")) == int(before.replace(",", "")) + 1


def test_a_page_that_may_not_stream_asks_now_and_then(browser: Browser, run: Run) -> None:
    with tab(browser, run) as found:
        found.page.add_init_script("delete window.EventSource")
        found.open("/")
        found.page.wait_for_selector("#live.slow")


def test_a_stream_that_ends_leaves_its_place_to_others(browser: Browser, run: Run) -> None:
    """Eight at a time from one address; the ninth page would be refused if those before it were still counted."""
    for _ in range(10):
        with tab(browser, run) as found:
            found.open("/")
            found.page.wait_for_selector("#live.on")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_hostile_completion_neither_runs_nor_breaks_the_page(browser: Browser, run: Run, width: int) -> None:
    with tab(browser, run, width=width) as found:
        found.open(f"/submissions/{run.submissions[-1]}")
        page = found.page
        assert page.evaluate("window.owned") is None
        assert page.locator("main img, main script").count() == 0
        words = page.locator(".tokens").first.inner_text()
        assert "<script>window.owned=1</script>"[:20] in words
        assert "⟨U+202E⟩drow terces⟨U+2066⟩" in words
        assert "{{7*7}}" in words
        # The pile of marks stays within its line.
        heights = page.evaluate("[...document.querySelectorAll('.tokens .t')].map(one => one.scrollHeight)")
        assert max(heights) < 400
        assert_nothing_sticks_out(page)


def test_tokens_can_be_read_off_with_the_keyboard(browser: Browser, run: Run) -> None:
    with tab(browser, run) as found:
        found.open(f"/submissions/{run.submissions[-1]}")
        tokens = found.page.locator(".tokens").first
        tokens.focus()
        readout = found.page.locator(".readout").first
        assert readout.inner_text().startswith("token 0 (id 0): margin 0,")
        found.page.keyboard.press("ArrowRight")
        assert "token 1 (id 1): margin 0.0005" in readout.inner_text()
        found.page.keyboard.press("End")
        assert "margin not finite" in readout.inner_text()
        found.page.keyboard.press("ArrowRight")
        assert readout.inner_text().startswith("token 6 ")


def test_the_keyboard_reaches_everything_from_the_skip_link_on(browser: Browser, run: Run) -> None:
    with tab(browser, run) as found:
        found.open("/")
        found.page.keyboard.press("Tab")
        assert found.page.evaluate("document.activeElement.className") == "skip"
        assert found.page.evaluate("document.activeElement.getBoundingClientRect().height") > 10
        found.page.keyboard.press("Tab")
        assert found.page.evaluate("document.activeElement.className") == "brand"


NAMELESS = """[...document.querySelectorAll(
    'a, button, input, summary, table, [role=img], [role=region], [role=group]')]
  .filter(one => !one.closest('[aria-hidden=true]'))
  .filter(one => !(one.tagName === 'TABLE' ? one.caption : one)?.textContent.trim())
  .filter(one => !one.getAttribute('aria-label') && !one.labels?.length)
  .map(one => one.outerHTML.slice(0, 120))"""


@pytest.mark.parametrize("path", PATHS)
def test_everything_that_can_be_used_or_seen_has_a_name(browser: Browser, run: Run, path: str) -> None:
    with tab(browser, run) as found:
        found.open(path.replace("SUBMISSION", f"/submissions/{run.submissions[-1]}"))
        nameless = found.page.evaluate(NAMELESS)
        assert nameless == []
        assert found.page.locator("h1").count() == 1
        assert found.page.evaluate("document.documentElement.lang") == "en"


def test_words_stand_out_from_their_ground_in_both_schemes(browser: Browser, run: Run) -> None:
    """WCAG 2.2, 1.4.3: 4.5 to 1 for text of this size."""
    for scheme in ("light", "dark"):
        with tab(browser, run, scheme=scheme) as found:
            found.open("/")
            ratios = found.page.evaluate(CONTRAST)
            assert min(ratios.values()) >= 4.5, ratios


CONTRAST = """() => {
  const style = getComputedStyle(document.documentElement);
  const rgb = name => {
    const hex = style.getPropertyValue(name).trim();
    return [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16) / 255);
  };
  const light = name => rgb(name).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  return Object.fromEntries(['--ink', '--quiet', '--mark', '--c1'].flatMap(
    one => ['--paper', '--card'].map(ground => [one + ' on ' + ground, ratio(one, ground)])));
}"""
