"""What the benchmarks' figures mean: a cheat counts as a cheat, a failure is no figure, and sums are right."""

from __future__ import annotations

import random
import subprocess
import sys
import sysconfig
import textwrap
import time
import venv
from pathlib import Path

import psutil
import pytest
import torch
from locations import ROOT
from waiting import until

from benchmarks.broadcasting import bad_relay, full, ours
from benchmarks.broadcasting.delivery import BroadcastFile, BroadcastResult, Setting, WorkerNotServed, deliver
from benchmarks.broadcasting.processes import NodeEnded, NodeSwarm
from benchmarks.families import ATTACKS, COLUMNS
from benchmarks.families import figures_of as family_figures
from benchmarks.forging import forgers, judging, policies, stages
from benchmarks.forging.forgers import Window
from benchmarks.levels import SIZES, figures_of, sampled
from benchmarks.peers import PeerUnavailable
from benchmarks.redteam import figures as redteam_figures
from benchmarks.redteam import table as redteam_table
from benchmarks.sizing.usage import RoleMeter, disk_bytes
from benchmarks.timing import median_ratio, quantile
from benchmarks.toploc import beyond_published_limits
from benchmarks.toploc_peer import VERSION, ToplocPeer, installed
from node.protocol.run import LimitsSpec
from node.verification.deviations import Deviations
from node.verification.proofs import build_proofs
from toploc import build_chunk_proofs, verify_chunk_proofs

MIB = 2**20


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (lambda: quantile([3, 1, 2, 4], 0.5), 3),
        (lambda: quantile([3, 1, 2, 4], 1.0), 4),
        (lambda: median_ratio([1, 4, 9], [1, 2, 3]), 2),
        (lambda: beyond_published_limits((38, 10.0, 8.0)), False),
        (lambda: beyond_published_limits((39, 0.0, 0.0)), True),
        (lambda: beyond_published_limits((0, 10.1, 0.0)), True),
        (lambda: beyond_published_limits((0, 0, 9)), True),
    ],
)
def test_quantiles_ratios_and_published_limits(found, expected):
    assert found() == expected


# broadcast: only the right file in time is a delivery, and links are as slow as they say.


def setting(tmp_path, patience_s=4.0):
    payload = BroadcastFile.made(tmp_path / "payload", MIB)
    return Setting(payload, repeats=1, patience_s=patience_s, within=None, bytes_per_s=1e6)


FAKE_PEER = """
    from pathlib import Path
    from types import SimpleNamespace

    PUBLISHED = Path({published!r})
    server = SimpleNamespace(ShardcastServer=type("ShardcastServer", (), {{}}))
    http_server = SimpleNamespace(server_port=9)

    class OriginServer:
        http_server = http_server
        def __init__(self, folder, port): pass
        def broadcast(self, path): PUBLISHED.write_text(path)

    class MiddleNode:
        http_server = http_server
        def __init__(self, upstreams, folder, port, check_interval): pass

    class ClientNode:
        def __init__(self, servers, folder): self.path = Path(folder)
        def list_available_versions(self): return {{"v1": ""}} if PUBLISHED.exists() else {{}}
        def download_version(self, version):
            data = Path(PUBLISHED.read_text()).read_bytes()
            {serves}
            self.path.write_bytes(data)
            return str(self.path)
"""
"""A peer whose workers find by a file what is published."""


@pytest.mark.parametrize(
    ("serves", "served"),
    [("pass", 2), ("return None", 0), ("data = data[:-1] + bytes(1)", 0), ("raise ValueError", 0)],
    ids=["the file", "nothing", "another file", "and ends"],
)
def test_only_workers_of_the_peer_with_the_right_file_count_as_served(tmp_path, serves, served):
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "shardcast").mkdir()
    source = textwrap.dedent(FAKE_PEER).format(published=str(tmp_path / "published"), serves=serves)
    (packages / "shardcast" / "__init__.py").write_text(source)
    found = full.broadcast(full.sides(environment)["peer_1s"], setting(tmp_path, 3.0), workers=2, share=0)
    assert found.served == served
    assert (found.seconds == 3) == (not served)


@pytest.mark.parametrize("upstream", ["liar", "nobody"])
def test_a_worker_without_an_honest_relay_is_never_served_and_not_waited_for(tmp_path, upstream):
    with bad_relay.nobody() as nobody, NodeSwarm() as swarm:
        origin = ours.start_origin(swarm).ready()
        command = [sys.executable, "-m", "benchmarks.broadcasting.hostile", origin.url]
        source = nobody if upstream == "nobody" else swarm.start("liar", command).url
        worker = ours.start_worker(swarm, [source]).ready()
        started = time.monotonic()
        found = deliver(setting(tmp_path), origin, [worker])
        assert time.monotonic() - started < 10
    assert (found.workers, found.served, found.seconds) == (1, 0, 4)
    with pytest.raises(WorkerNotServed, match="1 of 1 workers"):
        found.complete_seconds()


def test_two_workers_share_the_uplink_that_feeds_them(tmp_path):
    with NodeSwarm() as swarm:
        origin = ours.start_origin(swarm)
        throttle = ours.Throttle(swarm)
        link = throttle.link(origin.url, 1e6)
        workers = [ours.start_worker(swarm, [link]) for _ in range(2)]
        found = deliver(setting(tmp_path, 60.0), origin, workers, nodes=swarm.nodes)
        sent_bytes = throttle.sent_bytes(link)
    assert found.served == 2
    assert found.cpu_s > 0
    assert sent_bytes >= 2 * MIB
    assert 2 * MIB / 1e6 <= found.seconds < 2 * sent_bytes / 1e6


def test_a_peer_that_serves_nobody_is_not_compared_by_what_it_spends(tmp_path):
    nothing = BroadcastResult(seconds=120, workers=8, served=0, cpu_s=1, peak_bytes=1, written_bytes=0)
    everything = BroadcastResult(seconds=6, workers=8, served=8, cpu_s=1, peak_bytes=1, written_bytes=MIB)
    rounds = {"ours": [everything], "peer_defaults": [nothing], "peer_1s": [nothing]}
    figures = full.peer_figures(rounds, setting(tmp_path).payload)
    assert figures["cpu_s_per_gib_vs_peer"] is None
    assert figures["workers_never_served_peer"] == 8
    assert figures["full_speedup_vs_peer_defaults"] == 20


def test_a_node_that_ends_says_why_and_nothing_is_left_of_a_swarm(tmp_path):
    with pytest.raises(NodeEnded, match="no such thing"), NodeSwarm(tmp_path) as swarm:
        sleeper = swarm.start("sleeper", ["sleep", "60"])
        swarm.start("failing", [sys.executable, "-c", "raise SystemExit('no such thing')"]).ready()
    assert sleeper.exit_code == -9
    assert list(tmp_path.iterdir()) == []


# realsize: what a role took is known after it has ended, and a file that has two names is on the disk once.


def test_a_role_s_peak_outlives_its_process():
    meter = RoleMeter()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    meter.follow({"role": process.pid})
    meter.sample()
    process.stdin.close()
    until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
    meter.sample()
    process.wait()
    assert meter.peak_bytes("role") > MIB


def test_a_file_with_two_names_takes_the_disk_once(tmp_path):
    (tmp_path / "whole").write_bytes(bytes(4 * MIB))
    alone = disk_bytes(tmp_path)
    (tmp_path / "version").hardlink_to(tmp_path / "whole")
    assert disk_bytes(tmp_path) == alone >= 4 * MIB


# toploc: the peer is toploc 0.1.6 with real proofs, or there is none.


@pytest.fixture
def interpreter(tmp_path):
    """Make an environment with this torch and, as toploc of a given version, a package."""

    def make(package, version=VERSION):
        folder = tmp_path / "environment"
        venv.create(folder, with_pip=False, symlinks=True)
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "torch.pth").write_text(sysconfig.get_path("purelib"))
        (packages / "toploc").symlink_to(package)
        about = packages / f"toploc-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: toploc\nVersion: {version}\n")
        return folder / "bin" / "python"

    return make


def test_the_peer_is_timed_and_verifies_proofs_one_for_each_chunk(interpreter):
    """This project's own package in the peer's place."""
    states = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    right, wrong = build_chunk_proofs(states.split(32), 16), build_chunk_proofs((-4 * states).split(32), 16)
    peer = ToplocPeer(interpreter(ROOT / "toploc"), threads=1)
    try:
        peer.load(states, tokens=32, topk=16)
        calls = [f"{action}_{form}" for action in ("build", "verify") for form in ("tensor", "list")]
        assert min(peer.ms(call) for call in calls) > 0
        assert peer.results("verify_list") == [[0, 0, 0]] * 2
        assert peer.verify(right) == [[0, 0, 0]] * 2
        assert peer.verify([right[0], wrong[1]])[1] != [0, 0, 0]
    finally:
        peer.close()


def test_another_version_is_not_taken_for_the_peer(interpreter):
    with pytest.raises(PeerUnavailable, match=r"has toploc 0\.1\.5 and torch"):
        ToplocPeer(interpreter(ROOT / "toploc", version="0.1.5"), threads=1)


def test_null_proofs_of_the_peer_are_not_timed(interpreter, tmp_path):
    """They are its reply to any error, and faster than a proof."""
    package = tmp_path / "null"
    package.mkdir()
    (package / "__init__.py").write_text("def build_proofs_bytes(*_, **__): return [bytes(258)]")
    peer = ToplocPeer(interpreter(package), threads=1)
    try:
        peer.load(torch.zeros(32, 64, dtype=torch.bfloat16), tokens=32, topk=128)
        with pytest.raises(PeerUnavailable, match="ended with exit status 1"):
            peer.ms("build_tensor")
    finally:
        peer.close()


def test_no_compiler_is_a_reason_and_nothing_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    with pytest.raises(PeerUnavailable, match="needs the C\\+\\+ compiler no-such-compiler"):
        installed(tmp_path)
    assert not list(tmp_path.iterdir())


# forgery: forgers prove what they say, and verdicts are those of a run.

ROWS, POSITIONS, HIDDEN = 32, 96, 128
SPEC = judging.DEFAULT.proofs


def gaussian(seed):
    return torch.randn(ROWS, POSITIONS, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16()


VERIFIER = gaussian(0)
WORKER = (VERIFIER.float() * (1 + 2**-8 * gaussian(1).float().sign())).bfloat16()
"""As far away as another kernel's: many of the elements are off by one rounding."""
# Tokens are the row's number, so that no two rows begin alike.
IDS = torch.arange(ROWS)[:, None].expand(ROWS, policies.PROMPT_TOKENS + POSITIONS)
LADDER = {
    "random_bytes": forgers.RandomBytes(SPEC),
    "constant": forgers.Zero(SPEC),
    "searched_constant": forgers.Searched(SPEC, gaussian(2)),
    "dimension_mean": forgers.Everywhere(forgers.mean_state(gaussian(2)), tokens=POSITIONS),
    "surrogate": forgers.StateForger(gaussian(3)),
    "other_prompt": forgers.OtherPrompt(WORKER),
    "other_sample": forgers.OtherSample(WORKER, IDS),
}


def targets(tokens, count=64):
    return forgers.windows(ROWS, POSITIONS, tokens=tokens, count=count, label="test")


def accepted(forger, tokens, limits=judging.DEFAULT.limits):
    batch = targets(tokens)
    proofs = forgers.prove_all({"one": forger}, batch, SPEC)["one"]
    found = judging.accepted(judging.measure(batch, VERIFIER, proofs, spec=SPEC), limits)
    return {scheme: sum(each) for scheme, each in found.items()}


@pytest.mark.parametrize("tokens", [1, 32, 40])
def test_honest_proofs_are_accepted_so_that_a_refused_forgery_means_something(tokens):
    assert accepted(forgers.StateForger(WORKER), tokens) == dict.fromkeys(judging.SCHEMES, 64)


@pytest.mark.parametrize("name", LADDER)
def test_no_forger_of_unrelated_states_passes_the_sketch_or_proves_the_right_states(name):
    found = accepted(LADDER[name], 32)
    assert found["sketch/1"] == found[judging.BOTH] == 0
    batch = targets(32, count=1)
    error = stages.error(batch[0], WORKER, batch[0], VERIFIER)
    prepared = stages.Prepared("", Path(), 0.0, {}, None, 0, {}, {}, {32: error})
    assert stages.proves_the_right(forgers.StateForger(WORKER), batch, 0, VERIFIER, prepared)
    assert not stages.proves_the_right(LADDER[name], batch, 0, VERIFIER, prepared)


def test_the_searched_constant_passes_published_limits_on_gaussian_states():
    """The known attack on toploc 0.1.6; a weaker search would report a TOPLOC that is safe from it."""
    chunks = list(torch.randn(64, 32, 4096, generator=torch.Generator().manual_seed(5)).bfloat16())
    pattern = forgers.nearest_constant(torch.stack(chunks[:32]).flatten(1), top_k=128)
    proof = forgers.constant_proof(pattern, top_k=128)
    results = verify_chunk_proofs(chunks[32:], [proof] * 32, 128)
    numbers = [(one.exp_mismatches, one.mant_err_mean, one.mant_err_median) for one in results]
    assert sum(not beyond_published_limits(one) for one in numbers) >= 16


@pytest.mark.parametrize("tokens", [1, 4, 40])
def test_proofs_made_together_are_those_that_each_forger_would_make_alone(tokens):
    batch = targets(tokens)
    rungs = {name: each for name, each in LADDER.items() if isinstance(each, forgers.StateForger)}
    for name, proofs in forgers.prove_all(rungs, batch, SPEC).items():
        for index, window in enumerate(batch):
            chunks = rungs[name].source(batch, index).chunks(rungs[name].states, SPEC.chunk_tokens)
            assert proofs[index] == build_proofs(chunks, [window.seed] * len(chunks), spec=SPEC)


def test_a_replay_is_of_another_prompt_or_of_a_sample_that_began_otherwise():
    """Of samples that began alike the states are the right ones, whoever computed them."""
    batch, alike = targets(32), forgers.OtherSample(WORKER, torch.zeros_like(IDS))
    for index, own in enumerate(batch):
        prompt, sample = (LADDER[name].source(batch, index) for name in ("other_prompt", "other_sample"))
        assert prompt.row // policies.SAMPLES != own.row // policies.SAMPLES
        assert sample.row // policies.SAMPLES == own.row // policies.SAMPLES
        assert (sample.row != own.row, sample.start) == (True, own.start)
        assert alike.source(batch, index).row // policies.SAMPLES != own.row // policies.SAMPLES


def test_each_forgery_has_its_own_seed_and_until_all_are_taken_its_own_place():
    places = ROWS * (POSITIONS - 32)
    every = targets(32, count=places + 8)
    assert len({(window.row, window.start) for window in every[:places]}) == places
    assert len({window.seed for window in every}) == places + 8
    assert all(1 <= window.start <= POSITIONS - 32 for window in every)


def test_fitted_limits_accept_honest_work_and_refuse_what_the_published_ones_accept():
    """Else calibrating would gain nothing against the cheapest surrogate."""
    groups = [
        [Window(row, start, 32, f"{row:8}{start:8}".encode()) for row in rows for start in (0, 32, 64)]
        for rows in torch.arange(ROWS).split(policies.SAMPLES)
    ]
    measured = judging.prove_and_measure(groups, WORKER, VERIFIER, spec=SPEC)
    limits = judging.fitted(measured[::2])
    assert judging.refused(measured[1::2], limits) == dict.fromkeys(judging.SCHEMES, 0)
    near = forgers.StateForger((VERIFIER.float() + 0.1 * gaussian(4).float()).bfloat16())
    assert (accepted(near, 32)["toploc/1"], accepted(near, 32, limits)["toploc/1"]) == (64, 0)


@pytest.mark.parametrize(("tokens", "most_over"), [(1, 1.1), (4, 10)])
def test_the_stated_chance_of_knowing_nothing_is_never_below_that_of_a_sample(tokens, most_over):
    errors = torch.rand(2**17, tokens, 8, generator=torch.Generator().manual_seed(0)) * 16 - 8
    typical = (errors.square().mean(2).sqrt() + 0.3).log().mean(1).exp()
    share = float((typical <= 4.0).float().mean())
    stated = 10 ** judging.chance_log10(tokens, LimitsSpec(sketch_distance=4.0))
    assert 0.9 * share <= stated <= most_over * share


# levels: groups that no limits were fitted on are judged, and strange ones among them counted once.


def group(rng, *, size):
    def some(count):
        return [size * rng.random() for _ in range(count)]

    settings = {"exponent_mismatches": [0.0], "mantissa_means": some(1), "mantissa_medians": some(1)}
    errors = [1e-6 * value for value in some(8)]
    return [Deviations(**settings, sketch_distances=some(8), margins=[0.0] * 8, errors=errors) for _ in range(4)]


def test_a_strange_group_is_rejected_by_limits_that_were_fitted_on_others():
    rng = random.Random(1)
    alike = [[group(rng, size=0.5) for _ in range(256)] for _ in range(2)]
    found = figures_of(alike, deals=3, chance=1e-6)
    assert all(found[f"judged_{size}"] == 3 * 2 * (256 - size) for size in SIZES)
    assert all(found[f"rejected_{size}"] == found[f"drifted_{size}"] == 0 for size in SIZES)
    assert all(found[f"clean_{size}"] == 1 for size in SIZES)
    found = figures_of([[*alike[0][1:], group(rng, size=50.0)], alike[1]], deals=6, chance=1e-6)
    # A deal either fits its limits on the strange group, or rejects it.
    assert 0 < found["rejected_24"] <= 6
    assert found["clean_24"] == pytest.approx(1 - found["rejected_24"] / 6)


@pytest.mark.parametrize("size", SIZES)
def test_a_deal_has_equal_parts_of_each_number_of_slots_in_flight(size):
    chosen = sorted(sampled(512, size, rng=random.Random(0)))
    assert len(set(chosen)) == size
    for part in range(3):
        own = chosen[size * part // 3 : size * (part + 1) // 3]
        assert all(512 * part // 3 <= index < 512 * (part + 1) // 3 for index in own)


# redteam: figures compare the ends of the runs and count only what was tried.


def campaign(*, hostile_admitted=0, rewards=(0.1,) * 5 + (0.5,) * 10):
    def attack(name, tries, slots, admitted, stopped):
        own = {"attack": name, "tries": tries, "slots": slots, "admitted": admitted, "succeeded": admitted}
        return own | {"stopped": stopped, "honest": 0}

    counts = {"slots": 30, "hostile_slots": 10, "hostile_share": 1 / 3, "honest_slots": 19, "honest_rejected": 1}
    attacks = [
        attack("greedy", 10, 10, hostile_admitted, {}),
        attack("clock-skew", 6, 0, 0, {"clock_skew": 6}),
        attack("abandon", 0, 0, 0, {}),
    ]
    more = {"identities": 4, "rewards": list(rewards), "audit": {"exit_code": 0}, "seconds": 12.34}
    return counts | more | {"hostile_admitted": hostile_admitted, "succeeded": hostile_admitted, "attacks": attacks}


def test_red_team_figures_compare_the_ends_of_the_runs():
    clean = campaign(rewards=(0.9,) * 5 + (0.4,) * 10)
    found = redteam_figures(campaign(), clean, campaign(hostile_admitted=9), campaign(hostile_admitted=2))
    expected = {
        "attacks": 2,
        "slots": 30,
        "honest_slots_rejected": 1,
        "hostile_admitted_share": 0.0,
        "hostile_requests_refused": 6,
        "hostile_admitted_without_verification": 9,
        "partly_hostile_admitted": 2,
        "reward_vs_clean_run": pytest.approx(1.25),
    }
    assert {name: found[name] for name in expected} == expected
    rows = {row["attack"]: row for row in redteam_table(campaign(), campaign(hostile_admitted=9), None)}
    assert rows["greedy"]["admitted_without_verification"] == 9
    alone = redteam_figures(campaign(), None, None, None)
    assert alone["reward"] == pytest.approx(0.5)
    assert alone["reward_vs_clean_run"] is alone["reward_without_verification"] is None


# reasoning: rewards are the environment's, and what is measured was not learned.


@pytest.fixture(params=["chain_sum", "spell_backward", "count_bits"])
def reasoning(request):
    """A task, its environment, and entries of it."""
    pytest.importorskip("reasoning_gym")
    from benchmarks.reasoning import TASKS, ProblemPool
    from node.environments.reasoning_gym import load_dataset

    (task,) = (task for task in TASKS if task.dataset == request.param)
    environment = load_dataset(task.dataset, task.settings)
    return task, environment, lambda seed, count: ProblemPool(environment, seed, count), random.Random(0)


def test_a_demonstration_without_mistakes_is_right_and_one_with_many_is_not(reasoning):
    task, environment, pool_of, rng = reasoning
    problems = [pool_of("test", 500).problem(at) for at in range(500)]

    def mean_reward(write):
        return sum(environment.reward(problem, write(problem.data["entry"])) for problem in problems) / len(problems)

    assert mean_reward(lambda entry: task.demonstrate(entry, 0.0, rng)) == 1
    assert mean_reward(lambda entry: task.demonstrate(entry, 0.9, rng)) < 0.5
    assert mean_reward(lambda entry: f"<think></think>{task.guess(entry, rng)}") < 0.4


def test_prompts_are_the_environments_own_and_the_tokenizer_knows_them(reasoning):
    from benchmarks.reasoning import prompt_of, shared_beginning, tokenizer_with
    from node.environments.reasoning_gym import INSTRUCTION
    from node.policy.models.tiny_llama import UNK

    task, environment, pool_of, rng = reasoning
    assert prompt_of(environment.problem(7).data["entry"]) == environment.problem(7).prompt
    pool = pool_of("test", 300)
    tokenizer = tokenizer_with([shared_beginning([pool.entry(at)["question"] for at in range(200)]), INSTRUCTION])
    for at in range(300):
        text = prompt_of(pool.entry(at)) + task.demonstrate(pool.entry(at), 0.1, rng)
        ids = tokenizer(text)["input_ids"]
        assert UNK not in ids
        assert tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False) == text


def test_held_out_problems_were_drawn_with_seeds_of_their_own(reasoning):
    from benchmarks.reasoning import HELD_OUT, LEARNED, WARM

    _, _, pool_of, _ = reasoning
    drawn = {name: [pool_of(f"{name} 0", 50).entry(at)["question"] for at in range(50)] for name in (WARM, LEARNED)}
    held_out = [pool_of(f"{HELD_OUT} 0", 50).entry(at)["question"] for at in range(50)]
    assert held_out not in drawn.values()


# families: what was not measured is not well, and says so.


def family_row(family, **changes):
    whole = dict.fromkeys(["torch", "perturbed", "noise_1pct", "other_prompt", "export"], 1.0) | {"honest_rejected": 0}
    gradients = {"trainer": 1e-6, "fsdp2": 1e-6}
    return {"family": family, **dict.fromkeys([*COLUMNS, *ATTACKS]), **whole, **gradients, "why": {}} | changes


@pytest.mark.parametrize(
    ("changes", "spoilt"),
    [
        ({"expert_dropped": 0.5}, {"expert_dropped_caught": 0.5}),
        ({"honest_rejected": 2}, {"honest_rejected": 2}),
        ({"honest_rejected": None}, {"honest_rejected": None, "families": 1}),
        ({"perturbed": None}, {"perturbed_caught": 0.0, "families": 1}),
        ({"trainer": 0.3}, {"trainer_difference": 0.3, "families": 1}),
        ({"fsdp2": None}, {"families": 1}),
        ({"export": None}, {"export_bit_exact": 0.5, "families": 1}),
    ],
)
def test_a_family_that_fails_anywhere_spoils_the_figures(changes, spoilt):
    well = family_row("llama")
    assert family_figures([well, family_row("qwen3")])["families"] == 2
    found = family_figures([well, family_row("mixtral", **changes)])
    assert {name: found[name] for name in spoilt} == spoilt
