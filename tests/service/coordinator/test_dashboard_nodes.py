"""Whoever takes part finds themselves: a page for each node, search for whatever was copied, and who is at work."""

from __future__ import annotations

import re
import time
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import update
from stocked_runs import Run, run_with

from benchmarks.dashboards.stocked import Stock
from coordinator.storage import listings
from coordinator.storage.schema import nodes, submissions
from coordinator.storage.submissions import submission_row
from shardcast.wire import digest


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with run_with(tmp_path_factory.mktemp("run"), Stock(workers=50, submissions=400, relays=3)) as found:
        yield found


def node_of(run: Run, submission: str) -> str:
    with run.home.database.read() as connection:
        return submission_row(connection, submission).node


def test_a_contributor_sees_standing_credit_and_own_work_on_one_page(run: Run) -> None:
    bad = next(name for number, name in enumerate(run.submissions) if number % 12 == 11)
    node = node_of(run, bad)
    page = run.get(f"/nodes/{node}").text
    own = [name for name in run.submissions if node_of(run, name) == node]
    assert {name for name in run.submissions if f"/submissions/{name}" in page} == set(own)
    assert "tokens vested" in page
    assert 'class="line mark"' in page
    assert "On probation again" in page
    rejected = run.get(f"/nodes/{node}?outcome=rejected").text
    assert set(re.findall(r'<tr><td><a href="/submissions/([0-9a-f]{64})"', rejected)) < set(own)
    for path in (f"/nodes/{'0' * 64}", f"/nodes/{node}?outcome=stolen", "/nodes/x"):
        assert run.get(path).status == 404


@pytest.mark.parametrize(
    "query",
    ["{id}", " {ID} ", "{id:.10}", "{id:.4}...{end}", "{id:.4}..{end}", "{id:.8}\u2026{end}"],
)
def test_an_id_is_found_as_it_is_shown(run: Run, query: str) -> None:
    name = run.submissions[77]
    for wanted, path in ((name, "/submissions/"), (node_of(run, name), "/nodes/")):
        asked = query.format(id=wanted, ID=wanted.upper(), end=wanted[-4:])
        answer = run.get(f"/find?q={urllib.parse.quote(asked)}")
        assert wanted in answer.text
        assert f"<h1>{'Node' if path == '/nodes/' else 'Slot'}" in answer.text, "one page alone can be meant"


def test_submissions_are_found_by_what_they_were(run: Run) -> None:
    def found(query: str) -> list[str]:
        page = run.get(f"/find?q={urllib.parse.quote(query)}").text
        return re.findall(r'<tr><td><a href="/submissions/([0-9a-f]{64})"', page)

    with run.home.database.read() as connection:
        wrong = {one.submission for one in listings.newest_judged(connection, most=999, reason="wrong_token")}
    assert set(found("wrong token")) == set(found("Wrong_Token")) <= wrong
    assert len(found("step 2")) == 16
    assert all(run.submissions[50] in run.get(f"/find?q={query}").text for query in ("2/50", "slot+2/50"))
    assert len(found("arithmetic")) == len(found("rejected")) == 25
    assert not set(found("reward > 0.8")) & set(found("reward <= 0.8"))
    assert run.get("/find?q=%27%3B--").text.count("Nothing is called so") == 1
    assert run.get("/find?q=" + "a" * 200).status == 400


def test_who_only_asks_for_work_is_not_at_work(tmp_path: Path) -> None:
    with run_with(tmp_path, Stock(workers=30, submissions=60, relays=0)) as run:
        now = time.time()
        with run.home.database.write() as connection:
            connection.execute(update(nodes).values(seen_at=now))
            connection.execute(
                update(submissions).where(submissions.c.node != digest(b"worker 0")).values(received_at=1)
            )
        page = run.get("/").text
        assert re.search(r"workers at work</dt><dd>1<small> of 30 registered", page)
        assert page.count("state at-work") == 1
        assert page.count("state idle") == 24


def test_the_best_of_the_day_are_another_list_than_those_of_the_whole_run(tmp_path: Path) -> None:
    with run_with(tmp_path, Stock(workers=4, submissions=40, relays=0)) as run:
        by_day: Counter[str] = Counter()
        with run.home.database.write() as connection:
            for name in run.submissions:
                row = submission_row(connection, name)
                if row.reason is None and int(row.decided_at) // 86400 == int(time.time()) // 86400:
                    by_day[row.node] += 384
            connection.execute(update(nodes).where(nodes.c.node == digest(b"worker 3")).values(tokens=10**9))
        today = run.get("/?sort=today").text.partition('id="workers"')[2]
        shown = re.findall(r'<tr><td><a href="/nodes/([0-9a-f]{64})".*?<td class="n">([0-9,]+)</td>', today, re.DOTALL)
        assert {node: int(tokens.replace(",", "")) for node, tokens in shown} == dict(by_day)
        assert [int(tokens.replace(",", "")) for _, tokens in shown] == sorted(by_day.values(), reverse=True)
        whole = re.findall(r'<tr><td><a href="/nodes/([0-9a-f]{64})"', run.get("/").text.partition('id="workers"')[2])
        assert whole[0] == digest(b"worker 3")
