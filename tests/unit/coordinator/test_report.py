"""From a run's log and status to summary.json, the report and the terminal: what a person is told must be true."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterator
from contextlib import closing as closing_of
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from coordinator.lab.demo.orchestration import KEPT, write_results
from coordinator.lab.demo.report import render_report, render_summary
from coordinator.lab.processes.layout import Swarm, WorkerPlace, demo_run_toml, free_ports, lay_out
from coordinator.lab.processes.ledger import Ledger, NodeRecord
from coordinator.lab.processes.run import discard_state, read_audit
from coordinator.lab.processes.summary import AuditRow, Observed, Summary, reward_gain, summarise
from coordinator.lab.processes.view import MIN_SPAN, PlainView, SwarmPicture, closing, render
from coordinator.lab.processes.watch import RelayNow, SwarmSnapshot, WorkerNow
from coordinator.run.home import Home, create_home
from coordinator.run.service import Coordinator
from node.keys.identity import load_key, node_id
from node.protocol.admission import Figures, Outcome
from node.protocol.evidence import Totals
from node.protocol.messages import PolicyEntry, VerdictEntry
from node.protocol.reasons import Reason
from node.protocol.run import HonestSpec, LevelSpec, LimitsSpec, ProofSpec, RunSpec, parse_run_toml, run_id_of
from node.runtime.terminal import sparkline
from shardcast.wire import encode

DIGEST = "5e" * 32
STARTED = 1_800_000_000.0


def figures(value: float) -> Figures:
    return Figures(
        exponent_mismatches=value,
        mantissa_mean=value / 10,
        mantissa_median=0.0,
        token_margin=value * 1e-6,
        margin_mean=value * 1e-7,
        logprob_error=value * 1e-6,
    )


def verdict(
    node: str, *, reason: Reason | None = None, version: int = 3, tokens: int = 160, worst: float = 1.0
) -> bytes:
    return encode(
        VerdictEntry(
            submission=DIGEST,
            node=node,
            version=version,
            manifest_digest=DIGEST,
            slot=0,
            request=DIGEST,
            body=DIGEST,
            outcome=Outcome.REJECTED if reason else Outcome.ADMITTED,
            reason=reason,
            finding=None,
            detail="",
            figures=figures(worst),
            totals=Totals(),
            rewards=None if reason else (1.0, 0.0),
            tokens=tokens,
            decided_at=int(STARTED),
        )
    )


@pytest.fixture
def swarm(tmp_path: Path) -> Swarm:
    return lay_out(tmp_path / "run", demo_run_toml(steps=12, seed=5))


@pytest.fixture
def ledger(swarm: Swarm) -> Ledger:
    ledger = Ledger(swarm.coordinator_url)
    honest, other, colluder = (swarm.workers[index].node for index in (0, 3, 4))
    leaves = [encode(PolicyEntry(version=0, manifest_digest=DIGEST, result_digest=DIGEST))]
    leaves += [verdict(honest, worst=0.5), verdict(honest, version=4, worst=2.0)]
    leaves += [verdict(other, reason=Reason.PROOF_MISMATCH, worst=90.0)] * 3
    leaves += [verdict(colluder, reason=Reason.WRONG_TOKEN)] * 2
    ledger.add(leaves, now=100.0)
    return ledger


def status(*, steps: int = 12) -> dict[str, object]:
    """Twelve steps of 2 s waiting, 0.5 s training and 0.25 s publishing; rewards rise from .5 by .03."""
    rows, policies, at = [], [{"version": 0, "published_at": STARTED + 50}], STARTED + 50
    for step in range(steps):
        assigned, at = at + 2, at + 2.75
        rows.append(
            {
                "step": step,
                "reward_mean": 0.5 + 0.03 * step,
                "staleness_mean": 1.0,
                "assigned_at": assigned,
                "finished_at": at,
                "stats": {"train_seconds": 0.5},
            }
        )
        policies.append({"version": step + 1, "published_at": at})
    return {"finished": True, "finished_steps": steps, "head_version": steps, "steps": rows, "policies": policies}


def observed(**changes: object) -> Observed:
    values = {
        "started_at": STARTED,
        "ended_at": STARTED + 95.0,
        "warm_start_at": STARTED + 8.0,
        "peak_bytes": 3 * 2**30,
        "cpu_seconds": {"trainer": 60.0, "verifier": 12.5},
        "restarts": {"trainer": 1, "verifier": 0},
        "arrivals": {0: {"relay-root": STARTED + 50.5}, 1: {"relay-root": STARTED + 52.95}, 99: {"relay-root": 0.0}},
        "fetched": {"relay-root": (2_000_000, 8_000_000), "relay-1": (1_000_000, 2_000_000)},
    }
    return Observed(**(values | changes))


AUDIT = AuditRow(
    command="swarmproof audit http://127.0.0.1:1 --run-id 5e --sample 20",
    exit_code=0,
    result={"outcome": "agree", "results": {"agree": 20, "disagree": 0}, "log": {"entries": 700}, "problems": []},
)


@pytest.fixture
def summary(swarm: Swarm, ledger: Ledger) -> Summary:
    return summarise(swarm, status(), ledger, observed(), audit=AUDIT)


@pytest.fixture
def home(swarm: Swarm) -> Iterator[Home]:
    """The run's, before its first step."""
    key = load_key(swarm.folder / "run.key")
    home = create_home(swarm.folder / "data", public_key=key.public_key().public_bytes_raw(), spec=swarm.spec)
    with closing_of(home.database):
        yield home


def report(summary: Summary, swarm: Swarm, home: Home) -> str:
    return render_report(summary, Coordinator(home, key=load_key(swarm.folder / "run.key")))


class Page(HTMLParser):
    """Collects what a browser would fetch or run, and the visible text."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in {"src", "href", "xlink:href", "srcset"}]

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "


def read(html: str) -> Page:
    page = Page()
    page.feed(html)
    return page


def test_the_figures_separate_hostile_from_honest_workers(summary: Summary) -> None:
    assert summary.figures["hostile_slots_submitted"] == 5
    assert summary.figures["hostile_slots_admitted"] == 0
    assert summary.figures["honest_slots_admitted"] == 2
    assert summary.figures["honest_slots_rejected"] == 0
    assert summary.figures["peak_memory_gib"] == 3.0
    assert summary.figures["reward_gain"] == pytest.approx(0.03 * 7)


def test_an_admitted_hostile_slot_and_a_rejected_honest_one_show(swarm: Swarm, ledger: Ledger) -> None:
    ledger.add(
        [verdict(swarm.workers[4].node), verdict(swarm.workers[1].node, reason=Reason.PROOF_MISMATCH)], now=101.0
    )
    found = summarise(swarm, status(), ledger, observed(), audit=None)
    assert found.figures["hostile_slots_admitted"] == 1
    assert found.figures["honest_slots_rejected"] == 1
    text = read(render_summary(found)).text
    assert "1 of 6" in text
    assert "1 of 3" in text


@pytest.mark.parametrize(
    ("rewards", "gain"), [([0.1] * 5 + [0.9] * 5, 0.8), ([0.1] * 9, None), ([0.5] * 5 + [0.0] * 20 + [0.25] * 5, -0.25)]
)
def test_the_gain_is_of_the_last_five_steps_over_the_first_five(rewards: list[float], gain: float | None) -> None:
    assert reward_gain(rewards) == pytest.approx(gain)


def test_phases_add_up_to_the_whole_time(summary: Summary) -> None:
    assert sum(summary.phases.values()) == pytest.approx(summary.seconds)
    assert summary.phases["starting the processes"] == pytest.approx(8.0)
    assert summary.phases["warm start"] == pytest.approx(42.0)
    assert summary.phases["waiting for admitted groups"] == pytest.approx(12 * 2.0)
    assert summary.phases["training"] == pytest.approx(12 * 0.5)
    assert summary.phases["publishing"] == pytest.approx(12 * 0.25)


def test_what_is_published_beside_the_next_step_is_counted_once(swarm: Swarm, ledger: Ledger) -> None:
    beside = status()
    for step, following in itertools.pairwise(beside["steps"]):
        step["finished_at"] = following["assigned_at"] + 0.4
    found = summarise(swarm, beside, ledger, observed(), audit=None)
    assert sum(found.phases.values()) == pytest.approx(found.seconds)
    assert found.phases["waiting for admitted groups"] == pytest.approx(2.0)
    assert found.phases["publishing"] == pytest.approx(11 * 2.25 + 0.25)


def test_a_step_that_is_not_finished_is_not_reported(swarm: Swarm, ledger: Ledger) -> None:
    unfinished = status()
    unfinished["steps"][-1] |= {"finished_at": None, "stats": None}
    assert len(summarise(swarm, unfinished, ledger, observed(), audit=None).steps) == 11


def test_the_headroom_is_of_honest_workers_alone(summary: Summary) -> None:
    mismatches = next(row for row in summary.headroom if row.figure == "exponent_mismatches")
    assert mismatches.honest_max == 2.0


def test_the_headroom_is_of_what_the_run_measures(swarm: Swarm, ledger: Ledger) -> None:
    """A figure that is always 0 beside a limit would look like room to spare."""

    def shown(spec: RunSpec) -> dict[str, float]:
        rows = summarise(replace(swarm, spec=spec), status(), ledger, observed(), audit=None).headroom
        return {row.figure: row.limit for row in rows}

    tokens = {"token_margin", "margin_mean", "logprob_error"}
    toploc = {"exponent_mismatches", "mantissa_mean", "mantissa_median"}
    plain = msgspec.structs.replace(swarm.spec, proofs=ProofSpec(scheme="toploc/1"), limits=LimitsSpec())
    assert set(shown(plain)) == toploc | tokens
    level = LevelSpec(mean=0.0, variance=1.0, largest=1.0)
    limits = LimitsSpec(honest=HonestSpec(sketch=level), false_rejections=1e-6)
    sketched = shown(msgspec.structs.replace(plain, proofs=ProofSpec(scheme="sketch/1"), limits=limits))
    assert set(sketched) == tokens | {"sketch_distance", "sketch_evidence", "far_evidence"}
    assert sketched["sketch_distance"] == limits.sketch_distance
    assert sketched["sketch_evidence"] == pytest.approx(13.8155, abs=1e-4)


def test_broadcast_times_count_from_publication(summary: Summary) -> None:
    assert [row.version for row in summary.broadcasts] == [0, 1]
    assert [row.seconds["relay-root"] for row in summary.broadcasts] == pytest.approx([0.5, 0.2])


def test_what_deltas_saved_is_of_all_relays_together(summary: Summary) -> None:
    assert summary.figures["broadcast_bytes_saved"] == pytest.approx(0.7)
    assert [(row.relay, row.fetched_bytes, row.result_bytes) for row in summary.fetched] == [
        ("relay-1", 1_000_000, 2_000_000),
        ("relay-root", 2_000_000, 8_000_000),
    ]
    assert "<dt>of the policies' bytes saved by deltas</dt><dd>70 %</dd>" in render_summary(summary)


def test_the_report_fetches_and_runs_nothing(summary: Summary, swarm: Swarm, home: Home) -> None:
    """It may be opened years later, from a mail, with no network."""
    html = report(summary, swarm, home)
    page = read(html)
    assert page.fetched == []
    assert not {"script", "link", "img", "iframe", "object", "form", "a"} & set(page.tags)
    assert "url(" not in html
    assert "@import" not in html


def test_the_report_says_what_happened(summary: Summary, swarm: Swarm, home: Home) -> None:
    text = " ".join(read(report(summary, swarm, home)).text.split())
    for words in ("0.56 → 0.77", "0 of 5", "1 min 35 s", "3.0 GiB", "Restarts: trainer 1.", swarm.run_id):
        assert words in text
    for words in ("hostile: other-model 3 0 3 0 proof_mismatch 3", "hostile: colluder 2 0 2 0 wrong_token 2"):
        assert words in text
    assert "20 verdicts derived again and confirmed, 0 not, from a log of 700 entries" in text
    assert AUDIT.command in text


def test_a_step_keeps_what_the_trainer_measured_if_it_is_finite(swarm: Swarm, ledger: Ledger) -> None:
    measured = status()
    for row in measured["steps"]:
        row["stats"] |= {"entropy": 0.2, "grad_norm": 0.5, "ratio_max": float("inf"), "unheard_of": 1.0}
    summary = summarise(swarm, measured, ledger, observed(), audit=None)
    assert summary.steps[0].stats == {"train_seconds": 0.5, "entropy": 0.2, "grad_norm": 0.5, "unheard_of": 1.0}


def test_hostile_text_in_a_report_stays_text(swarm: Swarm, ledger: Ledger, home: Home) -> None:
    """An audit's message can quote what a peer wrote."""
    audit = AuditRow(command="swarmproof audit", exit_code=2, result=None, message="<script>alert(1)</script>")
    html = report(summarise(swarm, status(), ledger, observed(), audit=audit), swarm, home)
    assert "<script" not in html
    assert "<script>alert(1)</script>" in read(html).text


def test_a_report_of_a_run_without_a_step_can_be_made(swarm: Swarm, home: Home) -> None:
    summary = summarise(swarm, {}, Ledger(swarm.coordinator_url), observed(warm_start_at=None), audit=None)
    assert "not finished" in read(report(summary, swarm, home)).text


def test_summary_json_reads_back_as_written(summary: Summary, swarm: Swarm, home: Home) -> None:
    write_results(swarm.folder, summary, home)
    assert msgspec.json.decode((swarm.folder / "summary.json").read_bytes(), type=Summary) == summary
    assert (swarm.folder / "report.html").read_text().startswith("<!doctype html>")


def test_discarding_state_leaves_the_results_and_no_key(summary: Summary, swarm: Swarm, home: Home) -> None:
    write_results(swarm.folder, summary, home)
    (swarm.folder / "logs").mkdir()
    assert (swarm.folder / "run.key").exists()
    discard_state(swarm.folder, kept=KEPT)
    assert sorted(path.name for path in swarm.folder.iterdir()) == ["logs", "report.html", "run.toml", "summary.json"]


@pytest.mark.parametrize(
    ("written", "code", "result", "message"),
    [
        ('{"outcome": "agree"}', 0, {"outcome": "agree"}, ""),
        ("", 2, None, "Error: no coordinator."),
        ("half a li", None, None, "Error: no coordinator."),
    ],
)
def test_an_audit_that_could_not_run_says_why(
    tmp_path: Path, written: str, code: int | None, result: object, message: str
) -> None:
    output, errors = tmp_path / "audit.json", tmp_path / "audit.log"
    output.write_text(written)
    errors.write_text("Error: no coordinator.\n")
    row = read_audit("swarmproof audit", code, output, errors)
    assert (row.exit_code, row.result, row.message) == (code, result, message)


# -- the ledger


def test_the_rate_forgets_what_is_long_past() -> None:
    record = NodeRecord()
    entry = msgspec.json.decode(verdict("ab" * 32, tokens=200), type=VerdictEntry)
    record.add(entry, now=10.0)
    record.add(entry, now=25.0)
    assert record.rate(now=26.0) == pytest.approx(400 / 20)
    assert record.rate(now=40.0) == pytest.approx(200 / 20)
    assert record.rate(now=60.0) == 0.0
    assert record.tokens == 400


def test_the_ledger_counts_every_entry_it_has_read(ledger: Ledger, swarm: Swarm) -> None:
    assert ledger.read == 8
    record = ledger.record(swarm.workers[3].node)
    assert (record.submitted, record.rejected, record.main_reason) == (3, 3, "proof_mismatch")
    assert ledger.record(swarm.workers[0].node).version == 4


# -- the layout


def test_a_demos_processes_have_distinct_ports_names_and_keys(swarm: Swarm) -> None:
    names = [command.name for command in swarm.commands]
    assert len(set(names)) == len(names) == 11
    ports = [url.rpartition(":")[2] for url in (swarm.coordinator_url, swarm.origin_url, *swarm.relays.values())]
    assert len(set(ports)) == len(ports)
    assert len({worker.node for worker in swarm.workers}) == 5
    assert swarm.run_id == run_id_of(load_key(swarm.folder / "run.key").public_key().public_bytes_raw())
    for worker in swarm.workers:
        assert worker.node == node_id(load_key(worker.state / "key"))


def test_no_secret_stands_on_a_command_line(swarm: Swarm) -> None:
    """Every user of a machine can read every process's arguments."""
    seed = (swarm.folder / "run.key").read_text().strip()
    assert all(seed not in argument for command in swarm.commands for argument in command.arguments)


def test_ports_lie_below_those_of_outgoing_connections() -> None:
    """A port that a client may take while its server restarts would keep the server from coming back."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(port < lowest for port in free_ports(8))


def test_the_demos_rules_take_the_steps_and_the_seed_of_the_command_line() -> None:
    spec = parse_run_toml(demo_run_toml(steps=7, seed=41))
    assert (spec.training.steps, spec.seed) == (7, 41)
    assert parse_run_toml(demo_run_toml(steps=30, seed=0)).model.initial == "tiny"


# -- the terminal


def frame(*, finished_steps: int = 3, note: str = "") -> SwarmPicture:
    places = [WorkerPlace(f"honest-{index}", "honest", "ab" * 32, Path("x")) for index in (1, 2, 3)]
    hostile = WorkerPlace("hostile-other-model", "other-model", "cd" * 32, Path("x"))
    state = status() | {"finished_steps": finished_steps, "head_version": finished_steps}
    snapshot = SwarmSnapshot(
        answering=True,
        status=state,
        relays=(RelayNow("relay-root", True, 3, 5, 7), RelayNow("relay-leaf-1")),
        workers=(
            *(WorkerNow(place, 3, 12_345, 812.4, 61) for place in places),
            WorkerNow(hostile, 3, 0, 0.0, 0, 17, "proof_mismatch"),
        ),
    )
    return SwarmPicture(snapshot, DIGEST, 12, 93.0, {"verifier": 1, "trainer": 0}, note)


@pytest.mark.parametrize("width", [80, 120])
def test_the_page_fits_its_terminal(width: int) -> None:
    console = Console(width=width, height=40, file=io.StringIO(), force_terminal=False)
    console.print(render(frame(note="auditing")))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= 24
    text = "\n".join(lines)
    for words in ("step 3/12", "12,345", "17 proof_mismatch", "5/7 chunks", "away", "verifier x1", "1:33", "auditing"):
        assert words in text
    assert "…" not in text.split("run ")[1][20:], "a column was cut off"


def test_a_pipe_gets_one_line_for_each_step() -> None:
    out = io.StringIO()
    with PlainView(out) as view:
        for finished in (0, 2, 2, 3):
            view.show(frame(finished_steps=finished))
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[2].startswith("1:33  step 3/12  reward 0.560  admitted 183  rejected 17 (17 of hostile workers)")


def test_the_sparkline_fills_its_height_only_for_real_differences() -> None:
    assert sparkline([0.4, 0.5, 0.8], min_span=MIN_SPAN) == "▁▃█"
    assert sparkline([0.50, 0.51, 0.50], min_span=MIN_SPAN) == "▁▁▁"
    assert sparkline([], min_span=MIN_SPAN) == ""


def test_the_end_names_the_report_and_what_the_audit_said(summary: Summary, swarm: Swarm) -> None:
    console = Console(width=100, file=io.StringIO())
    console.print(closing(summary, swarm.folder))
    text = console.file.getvalue()
    for words in (
        "0.56 -> 0.77, +0.21: means of the first and the last 5 steps",
        "0 of 5 slots admitted",
        "0 of 2 slots rejected",
        "agrees",
    ):
        assert words in text
    failed = msgspec.structs.replace(summary, audit=AuditRow("swarmproof audit", None, None))
    console.print(closing(failed, swarm.folder))
    assert "failed" in console.file.getvalue()
    json.dumps(msgspec.to_builtins(summary))
