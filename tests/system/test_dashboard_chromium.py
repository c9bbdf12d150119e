"""The pages in a browser: Debian's Chromium, headless, against a coordinator with a prepared database."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from actors import spec_of
from browsing import SCHEMES, WIDTHS, a_browser, needs_chromium, tab  # noqa: F401  (a fixture)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from playwright.sync_api import Browser
from sqlalchemy import update
from swarm import serve

from benchmarks.dashboards.stocked import Stock, stock
from coordinator.run.descriptors import Contacts
from coordinator.run.home import Home, create_home
from coordinator.run.service import Coordinator
from coordinator.storage import tallies
from coordinator.storage.schema import steps, submissions
from coordinator.storage.submissions import submission_row
from coordinator.storage.tallies import VerdictKind
from coordinator.verifier.evidence import encode_evidence
from node.protocol.admission import Outcome, Verdict
from node.protocol.run import StandingSpec
from node.protocol.submission import Rollout
from node.verification.deviations import Deviations

pytestmark = needs_chromium

SPEC = spec_of(steps=1000, groups_per_step=16, standing=StandingSpec())
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


@contextmanager
def served(folder: Path, what: Stock | None) -> Iterator[Run]:
    key = Ed25519PrivateKey.generate()
    home = create_home(folder, public_key=key.public_key().public_bytes_raw(), spec=SPEC)
    found = [] if what is None else stock(home, what, key=key, now=time.time())
    contacts = Contacts(endpoints=("http://192.0.2.1:8700",))
    with serve(Coordinator(home, key=key, relay_urls=("http://192.0.2.1:8710",), contacts=contacts)) as url:
        yield Run(home, url, found)
    home.database.close()


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


PATHS = ("/", "/audit", "SUBMISSION", "NODE", "/find?q=rejected")


def resolved(run: Run, path: str) -> str:
    """Return `path` with the run's last submission, or the node that sent it, in place of their names."""
    if path == "NODE":
        with run.home.database.read() as connection:
            row = submission_row(connection, run.submissions[-1])
        assert row is not None
        return f"/nodes/{row.node}"
    return f"/submissions/{run.submissions[-1]}" if path == "SUBMISSION" else path


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("path", PATHS)
def test_a_page_fits_its_window_shuts_nobody_out_and_asks_nobody_else(
    browser: Browser, run: Run, path: str, width: int, scheme: str
) -> None:
    """No scrolling sideways, nothing that axe finds, no error in the console, no request to another host, with plots
    drawn under the policy.
    """
    with tab(browser, run, width=width, scheme=scheme) as found:
        found.open(resolved(run, path))
        if path == "/":
            found.wait_for_plots()
            assert found.page.locator(".drawn canvas").count() > 0
        found.assert_nothing_sticks_out()
        found.assert_axe_finds_nothing()
        paper = found.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 23, 27)")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_fresh_run_says_what_it_waits_for(browser: Browser, tmp_path: Path, width: int) -> None:
    with served(tmp_path, None) as fresh, tab(browser, fresh, width=width) as found:
        found.open("/")
        found.page.wait_for_timeout(500)
        assert "waits for the trainer" in found.page.inner_text("main")
        found.assert_nothing_sticks_out()


def test_the_main_figures_are_there_without_javascript(browser: Browser, run: Run) -> None:
    with tab(browser, run, scripts=False) as found:
        found.open("/")
        words = found.page.inner_text("main")
        for said in ("slots admitted", "550", "Latest verdicts", "wrong token", "trusted"):
            assert said in words
        box = found.page.locator("#plot-reward svg").bounding_box()
        assert box is not None
        assert box["height"] > 100


def test_a_curve_of_training_can_be_read_off(browser: Browser, run: Run) -> None:
    with tab(browser, run) as found:
        found.open("/")
        found.page.wait_for_selector("#plot-entropy canvas", timeout=60_000)
        assert found.page.locator(".panel:visible .drawn").count() == 5


def test_a_step_that_trained_nothing_is_a_gap_with_its_reason(browser: Browser, tmp_path: Path) -> None:
    """A zero in its place would be read as a policy that is suddenly certain of everything."""
    with served(tmp_path, Stock(workers=4, submissions=200, relays=0)) as idle, tab(browser, idle) as found:
        with idle.home.database.write() as connection:
            connection.execute(update(steps).where(steps.c.step == 5).values(stats='{"tokens": 0, "entropy": 0.0}'))
        found.open("/")
        found.wait_for_plots()
        words = found.page.inner_text("#s-idle")
        assert "every group was of one reward throughout" in words
        assert words.endswith("(step 6).")
        plot = found.page.locator("#plot-entropy")
        box = plot.locator(".u-over").bounding_box()
        assert box is not None
        last = int(re.match(r"1 of (\d+) steps", words)[1])
        for step, shown in ((6, "step6value-"), (7, "step7value0.")):
            plot.locator(".u-over").hover(position={"x": box["width"] * (step - 1) / (last - 1), "y": 20})
            assert "".join(plot.locator(".u-legend").inner_text().split()).startswith(shown)


SPANS = """() => ['verdicts', 'rate', 'wait'].map((name) => {
  const { min, max } = charts.get(name).chart.scales.x;
  return max - min;
})"""


def test_the_first_minute_of_a_run_is_drawn_as_a_minute(browser: Browser, tmp_path: Path) -> None:
    """As a thousand days it had nothing but midnights below it."""
    only = Stock(workers=1, submissions=1, relays=0)
    with served(tmp_path, only) as young, tab(browser, young) as found:
        found.open("/")
        found.wait_for_plots()
        found.page.evaluate(
            """() => {
              plots.over = { ...plots.over, start: plots.over.start.slice(0, 1) };
              draw({ anew: true });
            }"""
        )
        found.page.wait_for_timeout(100)
        assert found.page.evaluate(SPANS) == [found.page.evaluate("plots.over.width")] * 3


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
        found.assert_nothing_sticks_out()


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


def test_a_contributor_copies_how_to_join_from_any_page(browser: Browser, run: Run) -> None:
    for path in PATHS:
        with tab(browser, run) as found:
            found.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
            found.open(resolved(run, path))
            found.page.get_by_text("Join this run").click()
            assert "Linux with Python" in found.page.inner_text("details.join")
            found.page.get_by_role("button", name="Copy").click()
            found.page.wait_for_selector("button:text('Copied')")
            copied = found.page.evaluate("navigator.clipboard.readText()")
            assert copied == f"swarmproof worker --coordinator http://192.0.2.1:8700 --run-id {run.home.run_id}"


@pytest.mark.parametrize("width", WIDTHS)
def test_a_contributor_finds_their_node_and_why_work_was_rejected(browser: Browser, run: Run, width: int) -> None:
    with tab(browser, run, width=width) as found:
        found.open("/")
        bad = run.submissions[11]
        found.page.fill("#find-anything", f"{bad[:8]}…{bad[-4:]}")
        found.page.press("#find-anything", "Enter")
        found.page.wait_for_url("**/submissions/*")
        found.page.locator(".facts a", has_text="…").first.click()
        found.page.wait_for_url("**/nodes/*")
        page = found.page
        assert page.locator("#h-credit").count() == page.locator("#h-why").count() == 1
        for shown in ("verdict", "reward"):
            box = page.locator("table.submissions th", has_text=shown).first.bounding_box()
            assert box is not None
            assert box["x"] + box["width"] <= width, f"{shown} is beyond the edge of a phone"
        page.locator("main time").first.hover()
        assert "20" in (page.locator("main time").first.get_attribute("title") or "")
        page.get_by_role("link", name="rejected", exact=True).click()
        page.wait_for_url("**outcome=rejected**")
        assert page.locator(".outcome.admitted").count() == 0
        found.assert_nothing_sticks_out()
