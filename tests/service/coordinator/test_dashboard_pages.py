"""The pages over HTTP: what they show and to whom, what they never show, and what they cost."""

from __future__ import annotations

import gzip
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zstandard
from actors import spec_of
from sqlalchemy import Connection, text, update
from stocked_runs import SPEC, Run, run_with

from benchmarks.dashboards.stocked import Stock
from coordinator.dashboard.assets import Assets
from coordinator.dashboard.figures import read_figures
from coordinator.dashboard.find import find
from coordinator.dashboard.history import History
from coordinator.dashboard.pages import export_run
from coordinator.dashboard.submissions import read_record, view_of
from coordinator.dashboard.workers import TableQuery, parse_query, read_workers
from coordinator.run.relays import RELAY_SECONDS
from coordinator.storage.nodes import ORDERS
from coordinator.storage.schema import SubmissionState, nodes, relays, steps, submissions
from coordinator.storage.submissions import QUEUED
from coordinator.storage.totals import partly_measured, reason_totals, slot_counts
from coordinator.verifier.evidence import Evidence, RowEvidence, encode_evidence
from node.protocol import merkle
from node.protocol.reasons import Refusal
from node.protocol.run import EnvironmentSpec
from node.protocol.submission import Rollout
from shardcast.wire import digest

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=alert(1)>\u202e\x1b[31m" + "Z" + "\u0335" * 400


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    what = Stock(workers=60, submissions=400, relays=30, software=HOSTILE[:150], engines=(HOSTILE[:190],))
    with run_with(tmp_path_factory.mktemp("run"), what) as found:
        yield found


def keep_evidence(run: Run, submission: str, piece: str) -> None:
    row = Rollout(
        seed=bytes(32),
        prompt_ids=[1],
        completion_ids=[1, 2],
        logprobs=[-1.0, -1.0],
        segment_versions=[0],
        segment_tokens=[2],
        proofs=[],
    )
    blob = encode_evidence([row], None, prompt=piece, pieces=[[piece, piece]], replies=[[(1, piece)]], chunk_tokens=32)
    assert blob is not None
    with run.home.database.write() as connection:
        values = {"evidence": run.home.blobs.put(blob)}
        connection.execute(update(submissions).where(submissions.c.submission == submission).values(values))


def test_a_fresh_run_says_what_it_waits_for(tmp_path: Path) -> None:
    with run_with(tmp_path, None) as run:
        page = run.get("/").text
        assert "waits for the trainer to publish the first policy" in page
        assert "swarmproof trainer" in page
        assert "No submission has been judged yet" in page
        assert run.get("/audit").status == 200
        # Its plots have no data, and are JSON all the same.
        plots = json.loads(re.search(r'id="plots">(.*?)</script>', page)[1])
        assert plots["over"]["verdicts"] == []


def test_a_run_that_is_over_invites_nobody(tmp_path: Path, run: Run) -> None:
    """A contributor would set up a machine for a run that has no work for it."""
    with run_with(tmp_path, Stock(workers=4, submissions=60, relays=1), spec=spec_of(steps=2)) as ended:
        with ended.home.database.write() as connection:
            connection.execute(
                update(submissions).where(submissions.c.state.in_(QUEUED)).values(state=SubmissionState.DONE)
            )
        for path in ("/", "/audit", f"/submissions/{ended.submissions[0]}"):
            page = ended.get(path).text
            assert "The run is over." in page
            assert "Workers cannot join it any more." in page
            assert "swarmproof worker" not in page
    assert "swarmproof worker --coordinator" in run.get("/").text


def test_every_page_is_complete_without_a_script(run: Run) -> None:
    page = run.get("/").text
    figures = re.sub(r"<[^>]+>", " ", page)
    for said in ("367", "slots admitted", "slots rejected", "Mean reward of", "workers at work", "wrong token"):
        assert said in figures
    assert page.count('<tr><td><a href="/nodes/') == 25
    assert page.count('href="/submissions/') == 12


def test_an_exported_page_has_the_same_figures_and_needs_nobody(run: Run) -> None:
    """It may be opened years later, from a mail, with no network; and what strangers wrote is text in it, too."""
    page = export_run(run.coordinator, section="<p>What was found besides.</p>")
    for said in (
        "367",
        "slots admitted",
        "Mean reward of",
        "workers at work",
        "wrong token",
        "<p>What was found besides.",
    ):
        assert said in page
    assert page.count('<path class="line mark"') == run.get("/").text.count('<path class="line mark"') > 2
    assert not re.search(r"\s(href|src|srcset|action|on\w+)=|<(script|link|img|iframe|object|form)|url\(|@import", page)
    assert "\u202e" not in page


def test_the_page_draws_what_the_trainer_measured(run: Run) -> None:
    page = run.get("/").text
    shown = re.findall(r'<div class="panel">\s*<h3>(.*?)</h3>', page)
    assert shown == ["Entropy", "Log-probability gap", "Clipped", "Gradient norm", "Staleness"]
    plots = json.loads(re.search(r'id="plots">(.*?)</script>', page)[1])
    finished = len(plots["reward"]["step"])
    assert {len(values) for values in plots["training"].values()} == {finished}
    assert page.count('<path class="line mark" d="M0.00 ') >= len(shown)


def test_a_statistic_that_no_step_has_takes_no_room(tmp_path: Path) -> None:
    """As of a trainer of another release, or of one that has not finished a step."""
    with run_with(tmp_path, Stock(workers=4, submissions=60, relays=1)) as run:
        with run.home.database.write() as connection:
            connection.execute(update(steps).values(stats='{"entropy": 0.25, "grad_norm": NaN}'))
            connection.execute(update(steps).where(steps.c.step == 1).values(stats='{"entropy": 0, "tokens": 0}'))
        page = run.get("/").text
        assert re.findall(r'<div class="panel">\s*<h3>(.*?)</h3>', page) == ["Entropy", "Staleness"]
        entropy = json.loads(re.search(r'id="plots">(.*?)</script>', page)[1])["training"]["entropy"]
        assert entropy[:3] == [0.25, None, 0.25]
        assert "1 of 3 steps trained nothing, and are gaps" in page


def test_each_environment_of_several_has_its_reward_on_the_page_whatever_its_name(tmp_path: Path) -> None:
    names = ("arithmetic", HOSTILE[:200], "reverse")
    spec = msgspec.structs.replace(SPEC, environments=tuple(EnvironmentSpec(name=name) for name in names))
    with run_with(tmp_path, Stock(workers=4, submissions=60, relays=1), spec=spec) as run:
        with run.home.database.write() as connection:
            stats = {"entropy": 0.25, **{f"reward/{name}": 0.5 for name in names[:2]}}
            connection.execute(update(steps).values(stats=json.dumps(stats)))
        page = run.get("/").text
        shown = re.findall(r'<div class="panel">\s*<h3>(.*?)</h3>', page)
        assert (shown[0], len(shown), shown[2:]) == ("arithmetic", 4, ["Entropy", "Staleness"])
        assert re.search(r'<div class="panel" hidden>\s*<h3>reverse</h3>', page), "an open page can show it later"
        assert "<script>document" not in page
        plots = json.loads(re.search(r'id="plots">(.*?)</script>', page)[1])
        assert set(plots["training"]["reward/" + names[1]]) == {0.5}


def test_nothing_is_loaded_from_elsewhere_and_nothing_runs_inline(run: Run) -> None:
    for path in ("/", "/audit", "/health-line", f"/submissions/{run.submissions[-1]}", "/submissions/" + "0" * 64):
        reply = run.get(path)
        policy = reply.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in policy
        assert (reply.headers["x-content-type-options"], reply.headers["referrer-policy"]) == ("nosniff", "no-referrer")
        assert not re.search(r'(?:src|href|action)="(?!/|#)', reply.text)
        assert not re.search(r"\s(?:style|on\w+)=", reply.text)
        inline = re.findall(r"<script(?![^>]*\bsrc=)([^>]*)>", reply.text)
        assert inline in ([], [' type="application/json" id="plots"'])


def test_what_the_public_log_does_not_tell_is_not_on_the_pages_either(run: Run) -> None:
    """Addresses, the private names of machines, software strings and relays' networks."""
    for path in ("/", "/audit", "/?sort=seen", "/v1/events/now", f"/submissions/{run.submissions[-1]}"):
        text_ = run.get(path).text
        for private in ("a private name", "192.0.2.77", "198.51.100.", "swarmproof 0.1.0"):
            assert private not in text_, (path, private)


def test_hostile_text_is_text_wherever_it_is_shown(run: Run) -> None:
    keep_evidence(run, run.submissions[5], HOSTILE)
    for path in ("/", "/?sort=rejected", f"/submissions/{run.submissions[5]}"):
        page = run.get(path).text
        assert "<script>document" not in page
        assert "<img src=x" not in page
        assert "\u202e" not in page
        assert "\x1b" not in page
        assert "&lt;script&gt;" in page


def test_a_name_cannot_end_the_block_of_data_that_the_script_reads(run: Run) -> None:
    page = run.get("/").text
    data = re.search(r'id="plots">(.*?)</script>', page)[1]
    assert "<" not in data
    assert json.loads(data)["over"]["width"] in (60, 3600)


@pytest.mark.parametrize("sort", ORDERS)
def test_the_pages_of_the_table_show_each_worker_once_in_its_order(run: Run, sort: str) -> None:
    seen, after = [], ""
    for _ in range(10):
        page = run.get(f"/?sort={sort}&after={after}").text
        seen += re.findall(r'<tr><td><a href="/nodes/([0-9a-f]{64})"', page)
        following = re.search(rf'href="/\?sort={sort}&amp;after=([^"#]+)#workers"', page)
        if following is None:
            break
        after = following[1]
    assert len(seen) == len(set(seen)) == 60


def test_workers_are_found_by_how_their_id_begins(run: Run) -> None:
    with run.home.database.read() as connection:
        name = read_workers(connection, TableQuery(), spec=SPEC, at_work=(), now=time.time()).rows[7].node
        rows = read_workers(
            connection, parse_query("credit", "", f" {name[:9].upper()} "), spec=SPEC, at_work=(), now=0
        ).rows
    assert [row.node for row in rows] == [name]


@pytest.mark.parametrize("query", ["sort=tokens", "find=%27", "find=_", "find=zz", "sort=credit&find=" + "a" * 90])
def test_a_query_that_nobody_is_offered_is_refused_in_words(run: Run, query: str) -> None:
    assert run.get(f"/?{query}").status == 400


@pytest.mark.parametrize("after", ["x", "1e9:" + "0" * 64, "..:" + "0" * 64, "1:" + "g" * 64, ":", "1.2.3:" + "0" * 64])
def test_a_place_in_the_table_that_does_not_exist_is_no_error_of_ours(run: Run, after: str) -> None:
    assert run.get(f"/?sort=credit&after={after}").status in (200, 400)
    try:
        parse_query("seen", after, "")
    except Refusal:
        return


def test_a_submission_that_nobody_sent_is_not_found(run: Run) -> None:
    for name in ("0" * 64, "..%2f..%2fetc%2fpasswd", "x" * 64, "A" * 64):
        assert run.get(f"/submissions/{name}").status == 404


def test_the_inclusion_proof_on_a_submissions_page_is_one(run: Run) -> None:
    with run.home.database.read() as connection:
        record = read_record(connection, run.submissions[123], spec=SPEC, run_id=run.home.run_id)
    assert record is not None
    proof = record.judgements[0].proof
    path = [bytes.fromhex(one) for one in proof.path]
    leaf = merkle.leaf_hash(proof.leaf.encode())
    assert leaf.hex() == proof.leaf_hash
    root = bytes.fromhex(proof.root)
    merkle.verify_inclusion(leaf, index=proof.index, size=proof.size, proof=path, root_hash=root)
    page = run.get(f"/submissions/{run.submissions[123]}").text
    assert all(one in page for one in (proof.leaf_hash, proof.root, *proof.path))


def test_evidence_that_is_gone_or_broken_is_said_and_nothing_else_is_missing(run: Run) -> None:
    for name in ("0" * 64, run.home.blobs.put(b"no evidence")):
        with run.home.database.write() as connection:
            row = update(submissions).where(submissions.c.submission == run.submissions[9])
            connection.execute(row.values(evidence=name))
        page = run.get(f"/submissions/{run.submissions[9]}").text
        assert "no longer in the run&#39;s store" in page
        assert "leaf hash" in page


def test_a_completion_of_any_length_makes_a_page_of_bounded_size(run: Run) -> None:
    said = [(at, "\u202e" * 500) for at in range(64)]
    rows = [RowEvidence(9000, b"\0\0\0\0" * 9000, ["\u202e" * 64] * 9000, b"", b"", [], [(0, 9000)], said)] * 8
    with run.home.database.read() as connection:
        record = read_record(connection, run.submissions[0], spec=SPEC, run_id=run.home.run_id)
    assert record is not None

    class Store:
        def get(self, name: str, *, max_bytes: int) -> bytes:
            return zstandard.compress(msgspec.msgpack.encode(Evidence("\u202e" * 10**6, 1, rows)))

    record = replace(record, row=replace(record.row, evidence="x"))
    view = view_of(record, Store(), spec=SPEC, row=3)  # type: ignore[arg-type]
    assert sum(len(one.shown) for one in view.rows) == 4000
    assert len(view.rows[3].shown) == 4000
    assert len(view.prompt) < 100_000


def test_assets_are_kept_for_ever_under_their_digest_and_under_no_other_name(run: Run) -> None:
    url = Assets().url("uPlot.iife.min.js")
    reply = run.get(url, **{"Accept-Encoding": "gzip, br"})
    assert reply.headers["content-encoding"] == "gzip"
    assert "immutable" in reply.headers["cache-control"]
    assert gzip.decompress(reply.body) == run.get(url).body
    assert reply.headers["content-type"].startswith("text/javascript")
    for other in ("/assets/0000000000000000/run.js", url.replace("uPlot.iife.min.js", "run.js"), "/assets/x/../run.js"):
        assert run.get(other).status == 404


def test_a_relay_that_claims_the_moon_does_not_change_what_is_newest(run: Run) -> None:
    with run.home.database.write() as connection:
        claim = {"version": 2**53 - 1, "seen_at": time.time() + RELAY_SECONDS}
        connection.execute(update(relays).values(claim))
    now = time.time()
    with run.home.database.read() as connection:
        figures = read_figures(connection, run.coordinator.relays, History(), spec=SPEC, now=now)
    assert figures.relays.spread[0].version == figures.head
    assert figures.relays.spread[0].relays == 30


def test_what_a_page_costs_does_not_grow_with_the_run(tmp_path: Path) -> None:
    """Counted in instructions of SQLite, which a busy machine does not change: ten times the run, the same work."""
    few = instructions(tmp_path / "few", submissions=600)
    many = instructions(tmp_path / "many", submissions=6000)
    # What is left to grow: the minutes that are shown, and the logarithm of the log.
    assert {name: count for name, count in many.items() if count > 2 * few[name] + 2000} == {}, (few, many)


def instructions(folder: Path, *, submissions: int) -> dict[str, int]:
    """Of each part of the pages, after the first time; in steps of 100."""
    with run_with(folder, Stock(workers=50, submissions=submissions, relays=8, groups_per_step=16)) as run:
        history, now = History(), time.time()

        def figures(connection: Connection) -> None:
            read_figures(connection, run.coordinator.relays, history, spec=SPEC, now=now)

        parts: dict[str, Callable[[Connection], object]] = {
            "figures": figures,
            "workers": lambda connection: read_workers(
                connection, TableQuery("seen", (now, "a" * 64)), spec=SPEC, at_work=(), now=now
            ),
            "found": lambda connection: read_workers(connection, TableQuery(find="ab"), spec=SPEC, at_work=(), now=now),
            "searched": lambda connection: find(connection, run.submissions[50][:6], home=run.home),
            "submission": lambda connection: read_record(
                connection, run.submissions[50], spec=SPEC, run_id=run.home.run_id
            ),
            "slots": slot_counts,
            "reasons": reason_totals,
            "partly": partly_measured,
        }
        found = {}
        with run.home.database.read() as connection:
            raw = connection.connection.dbapi_connection
            for name, part in parts.items():
                part(connection)
                steps: list[None] = []
                raw.set_progress_handler(lambda steps=steps: steps.append(None), 100)
                part(connection)
                raw.set_progress_handler(None, 100)
                found[name] = 100 * len(steps)
        return found


@pytest.mark.parametrize("workers", [0, 1])
def test_pages_on_postgresql_too(tmp_path: Path, postgresql_url: str, workers: int) -> None:
    what = Stock(workers=workers, submissions=40 * workers, relays=3)
    with run_with(tmp_path, what, database_url=postgresql_url) as run:
        for path in (
            "/",
            "/?sort=seen",
            "/?find=ab",
            "/find?q=abcd",
            "/audit",
            "/v1/events/now",
            "/v1/status",
            "/metrics",
        ):
            assert run.get(path).status == 200, path
        for name in run.submissions[:1]:
            assert run.get(f"/submissions/{name}").status == 200
            assert run.get(f"/nodes/{digest(b'worker 0')}").text.count("/submissions/") >= 25
            for query in ("wrong+token", "step+1", "reward+>+0", "arithmetic"):
                assert run.get(f"/find?q={query}").text.count("/submissions/") > 0, query
        with run.home.database.read() as connection:
            connection.execute(text("SELECT 1"))


def test_a_worker_without_work_is_in_the_table(tmp_path: Path) -> None:
    with run_with(tmp_path, Stock(workers=1, submissions=0, relays=0)) as run:
        page = run.get("/").text
        assert "on probation 0/8" in page
        assert "1 registered" in page
        with run.home.database.write() as connection:
            connection.execute(update(nodes).values(strikes=3))
        assert "banned" in run.get("/?sort=seen").text
