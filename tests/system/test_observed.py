"""What an operator sees of a real swarm: metrics as documented, dashboards and alerts of metrics that exist, and logs
that can be searched by submission and hold no secret.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from locations import ROOT
from observed import Observed, observe
from prometheus_client.metrics_core import Metric
from promql import named

from node.keys.identity import load_key
from node.protocol.messages import AUTHORIZATION_SCHEME, RequestClaim
from node.protocol.requests import sign_request

DOCUMENT = ROOT / "docs" / "metrics.md"
DASHBOARD = ROOT / "deploy" / "grafana" / "swarmproof.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
SCRAPING = ROOT / "deploy" / "prometheus" / "prometheus.yml"
ROLES = ("api", "leader", "verifier", "trainer", "relay", "worker", "peer", "broadcast")
OF_PROMETHEUS = {"up": set()}
ON_EVERY_SERIES = {"job", "instance"}
LABELS_UNSEEN = {
    "swarmproof_second_verdicts_total": {"outcome"},
    "swarmproof_partly_measured_groups": {"second_verdict"},
    "swarmproof_step_environment_reward": {"environment"},
    "shardcast_source_quarantined": {"source", "reason"},
    "shardcast_content_bytes": {"content"},
    "shardcast_content_missing_chunks": {"content"},
    "shardcast_content_sent_bytes_total": {"content"},
    "shardcast_fetch_done_bytes": {"version"},
    "shardcast_fetch_total_bytes": {"version"},
    "shardcast_fetch_bytes_per_second": {"version"},
    "shardcast_fetch_sources": {"version"},
    "shardcast_fetch_seconds_left": {"version"},
}
"""Of metrics without a sample where nobody is caught, the run has one environment and no dataset, nothing is in
quarantine and no fetch is under way.
"""

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("forked_commands")]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    return observe(tmp_path_factory.mktemp("observed") / "run")


def exposed_name(metric: Metric) -> str:
    return f"{metric.name}_total" if metric.type == "counter" else metric.name


def rows(observed: Observed) -> dict[str, tuple[str, set[str], list[str], str]]:
    """Each metric's type, labels, roles and meaning."""
    found: dict[str, tuple[str, set[str], list[str], str]] = {}
    for role in ROLES:
        for metrics in observed.exposed[role].values():
            for metric in metrics:
                name = exposed_name(metric)
                labels = {key for sample in metric.samples for key in sample.labels} - {"le"}
                labels |= LABELS_UNSEEN.get(name, set())
                kind, before, roles, said = found.setdefault(name, (metric.type, set(), [], metric.documentation))
                assert (kind, said) == (metric.type, metric.documentation), f"{name} is two things"
                before |= labels
                if role not in roles:
                    roles.append(role)
    return found


def document(observed: Observed) -> list[str]:
    """The table's lines as docs/metrics.md has to have them."""
    lines = []
    for name, (kind, labels, roles, said) in sorted(rows(observed).items()):
        of = "every process" if set(roles) == set(ROLES) - {"broadcast"} else ", ".join(roles)
        sentence = said[:1].upper() + said[1:].removesuffix(".") + "."
        lines.append(f"| `{name}` | {kind} | {', '.join(sorted(labels))} | {of} | {sentence} |")
    return lines


def test_every_metric_is_documented_and_no_other(observed: Observed) -> None:
    table = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    expected = document(observed)
    assert table == expected, "the table must be:\n" + "\n".join(expected)


def test_names_follow_the_conventions(observed: Observed) -> None:
    """https://prometheus.io/docs/practices/naming: base units, as words at the end."""
    ours = [name for name in rows(observed) if not name.startswith("process_")]
    for name in ours:
        assert re.fullmatch(r"(swarmproof|shardcast)_[a-z0-9_]+", name)
        assert not re.search(r"_(ms|milliseconds|minutes|hours|kb|mb|percent|count|sum|bucket)(_|$)", name), name
    for name, (kind, *_) in rows(observed).items():
        assert name.endswith("_total") == (kind == "counter"), name


def test_no_label_has_values_that_strangers_make(observed: Observed) -> None:
    """A time series for each node or submission would let anybody fill the operator's Prometheus."""
    for role, families in observed.exposed.items():
        samples = [sample for metrics in families.values() for metric in metrics for sample in metric.samples]
        assert len(samples) < 2500, f"{role} shows {len(samples)} series"
        for sample in samples:
            for label, value in sample.labels.items():
                assert len(value) < 64, (sample.name, label, value)
                assert not re.search(r"[0-9a-f]{12}", value), (sample.name, label, value)


def test_the_figures_are_those_of_what_happened(observed: Observed) -> None:
    (finished,) = observed.values("api", "swarmproof_steps_finished_total")
    (admitted,) = observed.values("api", "swarmproof_verdicts_total", outcome="admitted")
    assert finished == 3
    assert admitted >= 6, "two groups for each step"
    assert observed.values("leader", "swarmproof_verdicts_total", outcome="admitted") == [admitted]
    assert observed.values("verifier", "swarmproof_verifier_verdicts_total", outcome="admitted") == [admitted]
    assert observed.values("worker", "swarmproof_worker_verdicts_total", outcome="admitted")[0] <= admitted
    assert observed.values("verifier", "swarmproof_verifier_policy_fetch_seconds_count")[0] >= 3
    (judged,) = observed.values("verifier", "swarmproof_verifier_tokens_total")
    assert judged == sum(observed.values("api", "swarmproof_verdict_tokens_total")) > 0
    assert observed.values("api", "swarmproof_queue_submissions") == [0, 0]
    assert observed.values("api", "swarmproof_queue_oldest_seconds") == [0]
    assert sum(observed.values("api", "swarmproof_submissions_total")) >= admitted
    assert sum(observed.values("api", "swarmproof_leases_issued_total")) >= admitted
    assert observed.values("api", "swarmproof_refusals_total", reason="bad_signature") == [1]
    assert observed.values("trainer", "swarmproof_trainer_step_seconds_count") == [3]
    assert observed.values("trainer", "swarmproof_trainer_publish_seconds_count") == [4], "the first policy, too"
    assert observed.values("trainer", "swarmproof_trainer_wait_seconds_total")[0] > 0
    assert observed.values("api", "swarmproof_step_train_seconds")[0] > 0
    assert observed.values("api", "swarmproof_database_up") == [1]
    assert sum(observed.values(role, "swarmproof_leader")[0] for role in ("api", "leader")) == 1
    assert observed.values("worker", "swarmproof_worker_policy_version")[0] >= 1
    for role in ("api", "verifier", "trainer"):
        assert observed.values(role, "swarmproof_database_transaction_seconds_count", kind="write")[0] > 0
        assert observed.values(role, "swarmproof_disk_free_bytes", folder="data")[0] > 0
        assert observed.values(role, "process_resident_memory_bytes")[0] > 1e7


# -- what is drawn and what wakes


def panels() -> Iterator[dict[str, object]]:
    yield from json.loads(DASHBOARD.read_text())["panels"]


def expressions() -> list[tuple[str, str]]:
    """Where each expression stands, and what it is."""
    drawn = [
        (str(panel["title"]), target["expr"].replace("$__rate_interval", "1m"))
        for panel in panels()
        for target in panel.get("targets", [])
    ]
    rules = yaml.safe_load(ALERTS.read_text())["groups"]
    return drawn + [(rule["alert"], rule["expr"]) for group in rules for rule in group["rules"]]


@pytest.mark.parametrize(("where", "expression"), expressions(), ids=lambda value: value[:60])
def test_what_is_drawn_and_what_wakes_exists(observed: Observed, where: str, expression: str) -> None:
    known = OF_PROMETHEUS | {
        f"{name}{suffix}": labels | ({"le"} if suffix == "_bucket" else set())
        for name, (kind, labels, *_) in rows(observed).items()
        for suffix in (("_bucket", "_sum", "_count") if kind == "histogram" else ("",))
    }
    metrics, grouped = named(expression)
    assert metrics, where
    for name, labels in metrics.items():
        assert name in known, f"{where}: there is no {name}"
        assert labels <= known[name] | ON_EVERY_SERIES, f"{where}: {name} has no {labels - known[name]}"
    assert grouped <= set().union(ON_EVERY_SERIES, *(known[name] for name in metrics)), where


def test_figures_of_the_database_are_never_added_up_over_apis(observed: Observed) -> None:
    """With three APIs a sum would be three times the truth."""
    own = {"swarmproof_leader", "swarmproof_database_up", "swarmproof_build_info"}
    of_database = {name for name in observed.exposed["leader"] if name.startswith("swarmproof_")}
    of_database -= own | {name for name in of_database if re.match(r"swarmproof_(blob|database|disk)_", name)}
    assert len(of_database) > 20
    for where, expression in expressions():
        for name in of_database & {metric.removesuffix("_total") for metric in named(expression)[0]}:
            before = expression[: expression.index(name)]
            innermost = re.findall(r"\b(sum|max|min|avg|count)\b(?: by \([^)]*\))? ?\((?=[^()]*(?:\([^()]*)*$)", before)
            assert innermost[-1:] == ["max"], f"{where}: {expression}"


def test_the_dashboard_is_one_that_grafana_loads() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    assert dashboard["schemaVersion"] >= 39, "of Grafana 11 or newer"
    (variable,) = dashboard["templating"]["list"]
    assert (variable["type"], variable["query"]) == ("datasource", "prometheus")
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    places: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        covered = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not places & covered, f"{panel['title']} lies on another panel"
        places |= covered
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
            assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])
    rows_ = [panel["title"] for panel in dashboard["panels"] if panel["type"] == "row"]
    assert rows_ == [
        "Is it healthy?",
        "Loop",
        "Verification",
        "Training",
        "Broadcast",
        "API, database and blobs",
        "Processes",
    ]


def test_rules_and_dashboard_name_jobs_that_are_scraped() -> None:
    jobs = {job["job_name"] for job in yaml.safe_load(SCRAPING.read_text())["scrape_configs"]}
    asked = {job for _, expression in expressions() for job in re.findall(r'job="([^"]+)"', expression)}
    assert asked
    assert asked <= jobs


def test_prometheus_reads_the_rules_and_they_wake_when_they_ought_to() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: apt install prometheus")
    for asked in (["check", "config", str(SCRAPING)], ["test", "rules", str(ROOT / "tests/alerts/alerts_test.yml")]):
        found = subprocess.run([promtool, *asked], capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout + found.stderr


# -- logs


def test_every_line_of_every_process_is_an_object_with_the_same_keys(observed: Observed) -> None:
    keys = {"run", "node", "name", "policy", "slot", "lease", "submission", "step", "exception"}
    for process in observed.lines:
        records = observed.records(process)
        assert records, process
        for record in records:
            assert list(record)[:4] == ["time", "level", "logger", "message"], (process, record)
            assert set(record) - {"time", "level", "logger", "message"} <= keys, (process, record)
        named_run = [record for record in records if record.get("run") == observed.swarm.run_id]
        assert named_run, f"{process} never says for which run it works"


def test_a_submission_is_found_by_its_id_in_every_process_that_had_to_do_with_it(observed: Observed) -> None:
    verdicts = [record for record in observed.records("verifier") if "submission" in record]
    assert verdicts
    submission, node = verdicts[0]["submission"], verdicts[0]["node"]
    queued = [record for record in observed.records("coordinator") if record.get("submission") == submission]
    assert queued
    assert {record.get("node", node) for record in queued} == {node}
    received = [record for record in observed.records("honest-1") if record.get("submission") == submission]
    assert received
    assert {record["node"] for record in received} == {node}
    assert received[0]["lease"] == next(record["lease"] for record in queued if "lease" in record)
    assert (received[0]["policy"], received[0]["slot"]) == (verdicts[0]["policy"], verdicts[0]["slot"])
    steps = [record["step"] for record in observed.records("trainer") if "step" in record]
    assert set(steps) == {0, 1, 2}


def test_no_log_of_a_whole_swarm_has_a_secret_in_it(observed: Observed) -> None:
    """Every process logs every detail here: keys, in each form in which one is written, and signed requests."""
    logs = "\n".join("\n".join(lines) for lines in observed.lines.values())
    keys = [path for path in observed.swarm.folder.rglob("*key") if path.is_file()]
    assert len(keys) >= 6, "the run's, a peer's, two relays' and a worker's"
    for path in keys:
        seed = load_key(path).private_bytes_raw()
        for form in (seed.hex(), base64.b64encode(seed).decode(), base64.urlsafe_b64encode(seed).decode(), repr(seed)):
            assert form.strip("=") not in logs, path
    # All signed requests begin alike: with the envelope's domain.
    assert beginning_of_signed_requests() not in logs
    assert not re.search(rf"{AUTHORIZATION_SCHEME} [A-Za-z0-9_-]{{20,}}", logs)
    assert not re.search(r"X-Amz-Signature=(?!\*)", logs)


def beginning_of_signed_requests() -> str:
    def header(seed: int) -> str:
        claim = RequestClaim(
            run_id=f"{seed:064x}",
            method="GET",
            path="/",
            body_digest="0" * 64,
            body_bytes=0,
            issued_at=0,
            nonce="0" * 32,
        )
        return sign_request(claim, key=Ed25519PrivateKey.from_private_bytes(bytes([seed] * 32)))[0]

    one, other = (header(seed).partition(" ")[2] for seed in (1, 2))
    same = next(at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    assert same >= 16, "so much is enough to find one by"
    return one[:same]
