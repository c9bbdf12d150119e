"""What a person does on the pages of a small real run: a worker, a verifier, a trainer, and somebody who cheated."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from zoneinfo import ZoneInfo

import msgspec
import pytest
import torch
from browsing import SCHEMES, WIDTHS, Tab, a_browser, needs_chromium, tab  # noqa: F401  (a fixture)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from playwright.sync_api import Browser, Page
from swarm import RUN_KEY, Peer, Swarm, learning, running, serve, worker_thread
from talking import SPEC, talkative_file
from waiting import until

from coordinator.run.descriptors import Contacts
from coordinator.run.service import Coordinator
from coordinator.storage import training
from node.environments.calculator import Calculator
from node.keys.identity import node_id
from node.protocol.admission import Outcome
from node.protocol.messages import Lease
from node.protocol.run import EnvironmentSpec

pytestmark = [needs_chromium, pytest.mark.timeout(600)]

STEPS = 2
NICKNAME = "Zo\u00eb 7"
PUBLIC = "http://192.0.2.1:8700"
RUN = msgspec.structs.replace(
    SPEC,
    environments=(EnvironmentSpec(name="calculator"), EnvironmentSpec(name="reverse")),
    batch=msgspec.structs.replace(SPEC.batch, groups_per_step=4, lease_seconds=120.0),
    training=msgspec.structs.replace(SPEC.training, steps=STEPS, minibatches=2),
)


@dataclass(frozen=True)
class Seen:
    """The run and who was in it: the worker's node, and the submission that was rejected with the node that sent it."""

    url: str
    run_id: str
    worker: str
    cheat: str
    rejected: str


def share_of_turns(_: Calculator, _problem: object, turns: Sequence[str]) -> float:
    """A reward that random weights get now and then, so that there is something to learn."""
    return len(turns) / SPEC.sampling.max_turns


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder, key = tmp_path_factory.mktemp("run"), Ed25519PrivateKey.generate()
    with pytest.MonkeyPatch.context() as patch, running(folder, talkative_file(folder), spec=RUN) as swarm:
        patch.setattr(Calculator, "reward_turns", share_of_turns)
        cheat, rejected = cheated(swarm)
        with (
            worker_thread(swarm.url, swarm.home.run_id, folder / "worker", key=key, nickname=NICKNAME) as status,
            learning(swarm, folder / "trainer"),
        ):
            until(lambda: newest(swarm) == STEPS, seconds=400, what=status)
        # Another process of the API, which knows the addresses that workers join by.
        addresses = Contacts(endpoints=(PUBLIC,))
        with serve(Coordinator(swarm.home, key=RUN_KEY, contacts=addresses)) as url:
            yield Seen(url, swarm.home.run_id, node_id(key), cheat, rejected)


def newest(swarm: Swarm) -> int | None:
    with swarm.home.database.read() as connection:
        return training.newest_version(connection)


def cheated(swarm: Swarm) -> tuple[str, str]:
    """Have a node change a token of an honest group; return it, and its submission."""
    # A new node has one slot at a time, and not every slot is of one turn.
    passed_over: list[tuple[Peer, Lease]] = []
    peer = swarm.peer()
    while swarm.expected(lease := peer.lease()).ask is not None:
        passed_over.append((peer, lease))
        peer = swarm.peer()
    for other, unwanted in passed_over:  # or the last step would wait until their leases end
        assert other.signed("POST", f"/v1/leases/{unwanted.lease_id}/return", b"").status == 200
    rollouts = swarm.honest(lease)
    tokens = list(rollouts[0].completion_ids)
    tokens[0] = 5 + (tokens[0] + 1) % 90
    rollouts[0] = msgspec.structs.replace(rollouts[0], completion_ids=tokens)
    receipt = swarm.judge(peer, rollouts, lease)
    assert receipt.outcome is Outcome.REJECTED
    return peer.node, receipt.submission


@pytest.fixture(params=list(product(WIDTHS, SCHEMES)), ids=lambda view: f"{view[0]}-{view[1]}")
def seen(request: pytest.FixtureRequest, run: Seen, browser: Browser) -> Iterator[Tab]:
    """A window for each width and scheme, of somebody in Auckland; the run comes first, as the browser has a loop."""
    width, scheme = request.param
    with tab(browser, run, width=width, scheme=scheme, timezone_id="Pacific/Auckland", locale="en-NZ") as found:
        yield found


def looked_at(seen: Tab) -> Page:
    """Look at the page from top to bottom, and return it."""
    seen.assert_nothing_sticks_out()
    seen.assert_axe_finds_nothing()
    return seen.page


def find(page: Page, text: str) -> None:
    page.fill("#find-anything", text)
    page.press("#find-anything", "Enter")


def short(name: str) -> str:
    return f"{name[:8]}…{name[-4:]}"


def test_a_passer_by_sees_how_the_run_went_and_is_not_invited_to_what_is_over(seen: Tab, run: Seen) -> None:
    seen.open("/")
    seen.wait_for_plots()
    page = looked_at(seen)
    assert page.inner_text("#s-health") == "The run is over."
    first, last = re.fullmatch(r"(0\.\d+) → (0\.\d+)", reward_card(page)).groups()
    read_off = page.locator("#plot-reward .u-value").last.inner_text().partition(" ")[0]
    assert f"{float(read_off):.2f}" == last
    assert float(first) != float(last)
    assert "Workers cannot join it any more." in page.inner_text(".top")
    assert page.get_by_text("Join this run").count() == 0
    assert page.locator("#s-latest tr").count() == 1 + 1 + STEPS * RUN.batch.groups_per_step
    page.get_by_role("link", name="today", exact=True).click()
    page.wait_for_url("**sort=today**")
    best = looked_at(seen).locator("section[aria-labelledby=workers] tbody tr").first
    assert best.locator("a").inner_text() == short(run.worker)
    assert best.locator("bdi").inner_text() == NICKNAME
    assert best.inner_text().rstrip().endswith("CPU, torch")
    page.get_by_role("link", name="Audit", exact=True).click()
    page.wait_for_url("**/audit")
    assert f"swarmproof audit {PUBLIC} --run-id {run.run_id}" in looked_at(seen).inner_text("main")


def reward_card(page: Page) -> str:
    words = page.locator(".card", has_text="mean reward").locator("dd").inner_text()
    return words.rpartition(" ")[0].strip()


def test_a_contributor_finds_their_node_and_what_their_policy_said(seen: Tab, run: Seen) -> None:
    seen.open("/audit")
    find(seen.page, short(run.worker))
    seen.page.wait_for_url(f"**/nodes/{run.worker}")
    find(seen.page, "audit")
    seen.page.wait_for_url("**/find**")
    find(seen.page, NICKNAME.upper())
    seen.page.wait_for_url(f"**/nodes/{run.worker}")
    page = looked_at(seen)
    assert f"{NICKNAME} {run.worker}" in page.inner_text("main")
    assert page.locator(".facts div", has_text="hardware, as it said").locator("dd").inner_text() == "CPU"
    assert f"torch {torch.__version__}, {RUN.model.dtype}" in page.inner_text(".facts")
    assert page.locator(".verdict .headline").inner_text().startswith(("Trusted", "On probation"))
    assert "tokens vested" in page.inner_text(".verdict")
    assert page.get_by_role("img", name=re.compile("Credit in tokens")).count() == 1
    moment = page.locator("main time").first
    moment.hover()
    there = datetime.fromisoformat(moment.get_attribute("datetime")).astimezone(ZoneInfo("Pacific/Auckland"))
    assert f"{there:%-I:%M:%S}" in moment.get_attribute("title")
    page.locator("table.submissions tr", has_text="calculator").first.locator("a").first.click()
    page.wait_for_url("**/submissions/*")
    words = looked_at(seen).inner_text("main")
    left, right = map(int, re.search(r"Q:(\d+)\*(\d+)=", words).groups())
    assert page.locator("figure", has_text="the right answer").locator("pre").inner_text() == str(left * right)
    assert page.locator(".facts", has_text="environment").get_by_role("link", name="calculator").count() == 1
    speakers = page.locator(".talk").first.locator(".who").all_inner_texts()
    assert speakers[:2] == ["model", "environment"]


def test_who_was_rejected_reads_why_and_what_helps(seen: Tab, run: Seen) -> None:
    seen.open(f"/nodes/{run.cheat}")
    page = looked_at(seen)
    why = page.locator("table.reasons tbody tr").inner_text()
    assert "proof mismatch" in why
    assert "unquantised" in why, "what helps is for phones too"
    assert page.locator("table.reasons code").first.inner_text() == "swarmproof doctor"
    page.locator(".links a", has_text="proof mismatch").click()
    page.wait_for_url(f"**/submissions/{run.rejected}")
    assert looked_at(seen).locator(".rollout.failed").count() == 1
    find(page, "nobody has this")
    page.wait_for_url("**/find**")
    assert "Nothing is called so." in looked_at(seen).inner_text("main")


@pytest.mark.parametrize(
    ("query", "rows"),
    [("step 2", 4), ("reverse", None), ("reward > 0.4", None), ("proof mismatch", 1), ("rejected", 1), ("0/2", 2)],
)
def test_submissions_are_found_by_step_environment_reward_reason_and_slot(
    run: Seen, browser: Browser, query: str, rows: int | None
) -> None:
    with tab(browser, run, width=390) as found:
        found.open("/")
        find(found.page, query)
        found.page.wait_for_load_state()
        if rows == 1:
            assert found.page.url.endswith(f"/submissions/{run.rejected}"), "only one can be meant"
            return
        table = found.page.locator("table.submissions tbody tr")
        assert table.count() == rows or (rows is None and table.count() > 1)
        for shown in ("verdict", "reward"):
            box = found.page.locator("table.submissions th", has_text=shown).first.bounding_box()
            assert box["x"] + box["width"] <= 390, f"{shown} is beyond the edge of a phone"
