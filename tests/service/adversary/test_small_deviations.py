"""Cheating that is within every limit, token by token: what a group shows together, and a node slot by slot.

The worker here takes the runner-up wherever it comes almost as high as the forced token: the tolerance that mixed
hardware needs is its room to choose. Its proofs and log-probabilities are true. Everything goes through the
coordinator's door.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from swarm import TIGHT, Peer, Swarm, running, small_spec
from verifying import forged

from coordinator.storage import log
from node.audit.leaves import read_entry
from node.audit.log import read_log
from node.engines.base import SampleRequest
from node.engines.torch_decoder import cache_keyword
from node.protocol.admission import Outcome, judge_drift
from node.protocol.evidence import Drift, Totals, follow
from node.protocol.messages import LogEntry, Receipt, VerdictEntry
from node.protocol.reasons import Reason
from node.protocol.run import BatchSpec, HonestSpec, LevelSpec, RunSpec, SamplingSpec
from node.protocol.sampling import gumbel_noise
from node.protocol.submission import Rollout

TOLERANCE = 0.2
"""What the cheating worker loses at most in a token, against a limit of a quarter."""

LIMITS = msgspec.structs.replace(
    TIGHT,
    token_margin=0.25,
    rollout_margin_mean=0.25,
    honest=HonestSpec(margin=LevelSpec(mean=1e-3, variance=2e-4, largest=0.25)),
)

Takes = Callable[[float, Sequence[float]], bool]
"""Whether the runner-up is taken that loses so much, from what the completion's tokens lost so far."""


def always(lost: float, _: Sequence[float]) -> bool:
    return lost < TOLERANCE


def twice(lost: float, before: Sequence[float]) -> bool:
    """A little: two tokens of each completion."""
    return 0.05 < lost < TOLERANCE and sum(each > 0 for each in before) < 2


def spec_of(*, group_size: int, false_rejections: float) -> RunSpec:
    return small_spec(
        sampling=SamplingSpec(group_size=group_size, max_new_tokens=40),
        batch=BatchSpec(groups_per_step=40, rejection_backoff_seconds=0.0),
        limits=msgspec.structs.replace(LIMITS, false_rejections=false_rejections),
    )


@torch.inference_mode()
def choose(swarm: Swarm, requests: Sequence[SampleRequest], takes: Takes) -> list[list[int]]:
    """Completions of one prompt, in which the runner-up is taken where the worker likes it."""
    policy, most = swarm.engine.policy, swarm.home.spec.sampling.max_new_tokens
    tokens: list[list[int]] = [[] for _ in requests]
    lost: list[list[float]] = [[] for _ in requests]
    open_rows, cache = list(range(len(requests))), None
    ids = torch.tensor([request.prompt_ids for request in requests])
    for place in range(most):
        step = policy.model(input_ids=ids, use_cache=True, **{cache_keyword(policy.model): cache})
        cache = step.past_key_values
        noise = gumbel_noise(
            [request.seed for request in requests], [place] * len(requests), vocabulary=policy.vocabulary
        )
        best = (step.logits[:, -1].float() + torch.from_numpy(noise)).topk(2)
        for row in open_rows:
            gap = float(best.values[row, 0] - best.values[row, 1])
            other = takes(gap, lost[row])
            tokens[row].append(int(best.indices[row, int(other)]))
            lost[row].append(gap * other)
        open_rows = [row for row in open_rows if tokens[row][-1] not in policy.eos_ids]
        if not open_rows:
            break
        ids = torch.tensor([[drawn[-1]] for drawn in tokens])  # rows that have ended go on unread
    return tokens


def poisoned(swarm: Swarm, requests: Sequence[SampleRequest], takes: Takes) -> list[Rollout]:
    """The worker's group: its own choice of tokens, with true log-probabilities and proofs."""
    policy = swarm.engine.policy
    group = [
        forged([(0, policy, len(tokens))], request.prompt_ids, tokens, seed=request.seed, spec=swarm.home.spec)
        for request, tokens in zip(requests, choose(swarm, requests, takes), strict=True)
    ]
    # A slot that was rejected goes to the next node, which does the same: no two files may be one.
    own = [value - 1e-6 * random.random() for value in group[0].logprobs]
    return [msgspec.structs.replace(group[0], logprobs=own), *group[1:]]


def send(swarm: Swarm, peer: Peer, takes: Takes | None) -> Receipt:
    """One slot of an honest worker (None) or of one that takes the runner-up."""
    lease = peer.lease()
    requests = swarm.requests(lease)
    rollouts = swarm.honest(lease) if takes is None else poisoned(swarm, requests, takes)
    return swarm.judge(peer, rollouts, lease)


def cheat_until_rejected(swarm: Swarm, peer: Peer, *, most: int = 14) -> int:
    """How many slots of a little cheating are admitted before the first that is not."""
    for admitted in range(most):
        receipt = send(swarm, peer, twice)
        if receipt.outcome is not Outcome.ADMITTED:
            assert (receipt.outcome, receipt.reason) == (Outcome.REJECTED, Reason.WRONG_TOKEN), receipt
            assert receipt.detail.startswith("The node's slots: margin_drift is "), receipt
            return admitted
    raise AssertionError(f"{most} slots of cheating were admitted")


def stopped(swarm: Swarm) -> Peer:
    """A node that goes on cheating after it was stopped."""
    peer = swarm.peer()
    cheat_until_rejected(swarm, peer)
    for _ in range(4):
        assert send(swarm, peer, twice).outcome is Outcome.REJECTED
    return peer


def entries_of(swarm: Swarm) -> list[LogEntry]:
    with swarm.home.database.read() as connection:
        return [read_entry(leaf) for leaf in log.leaves(connection, 0, 1000)]


def verdicts_on(swarm: Swarm, peer: Peer) -> list[VerdictEntry]:
    return [entry for entry in entries_of(swarm) if isinstance(entry, VerdictEntry) and entry.node == peer.node]


def assert_the_log_bears_it_out(swarm: Swarm) -> None:
    """An auditor without any policy finds that each node was stopped exactly where its slots say so."""
    assert read_log(entries_of(swarm), run_id=swarm.home.run_id, spec=swarm.home.spec).problems == []


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory, tiny_policy_path: Path) -> Iterator[Swarm]:
    """A run of large groups."""
    spec = spec_of(group_size=16, false_rejections=1e-10)
    with running(tmp_path_factory.mktemp("groups"), tiny_policy_path, spec=spec) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory, tiny_policy_path: Path) -> Iterator[Swarm]:
    """A run of small groups, none of which shows much by itself."""
    spec = spec_of(group_size=4, false_rejections=1e-6)
    with running(tmp_path_factory.mktemp("streams"), tiny_policy_path, spec=spec) as swarm:
        yield swarm


def test_always_taking_the_runner_up_inside_the_tolerance_is_rejected_by_the_group(grouped: Swarm) -> None:
    """No token and no completion is over a limit: the policy would be steered by near-ties that always fall one way."""
    honest = send(grouped, grouped.peer(), None)
    assert honest.outcome is Outcome.ADMITTED, honest
    peer = grouped.peer()
    receipt = send(grouped, peer, always)
    assert (receipt.outcome, receipt.reason) == (Outcome.REJECTED, Reason.WRONG_TOKEN)
    (entry,) = verdicts_on(grouped, peer)
    assert entry.finding is not None
    assert (entry.finding.row, entry.finding.figure) == (None, "margin_evidence")
    assert entry.figures is not None
    assert entry.figures.token_margin < LIMITS.token_margin
    assert entry.figures.margin_evidence < entry.finding.limit < entry.finding.value
    assert_the_log_bears_it_out(grouped)


def test_a_node_that_cheats_a_little_in_every_slot_is_stopped_by_its_stream(streamed: Swarm) -> None:
    peer, bystander = streamed.peer(), streamed.peer()
    assert cheat_until_rejected(streamed, peer) >= 2, "one slot alone shows it: there was nothing to add up"
    assert send(streamed, peer, twice).outcome is Outcome.REJECTED
    assert send(streamed, bystander, None).outcome is Outcome.ADMITTED
    assert_the_log_bears_it_out(streamed)


def test_honest_slots_first_buy_no_credit(streamed: Swarm) -> None:
    """It is stopped at the very slot at which a node with no past would be stopped by the same slots."""
    peer, good = streamed.peer(), 6
    for _ in range(good):
        assert send(streamed, peer, None).outcome is Outcome.ADMITTED
    admitted = cheat_until_rejected(streamed, peer)
    drift, over = Drift(), []
    for entry in verdicts_on(streamed, peer)[good:]:
        assert entry.totals is not None
        drift = follow(drift, entry.totals, limits=streamed.home.spec.limits)
        over.append(judge_drift(drift, limits=streamed.home.spec.limits) is not None)
    assert over == [*[False] * admitted, True]
    assert_the_log_bears_it_out(streamed)


def test_a_node_that_mends_its_ways_is_admitted_again(streamed: Swarm) -> None:
    peer, outcomes = stopped(streamed), []
    while Outcome.ADMITTED not in outcomes:
        outcomes.append(send(streamed, peer, None).outcome)
        assert len(outcomes) <= 30
    assert len(outcomes) > 1, "its first good slot does not make up for what it did"
    assert_the_log_bears_it_out(streamed)


def test_good_work_of_a_stopped_node_does_not_bar_the_node_that_gets_its_slot(streamed: Swarm) -> None:
    """Honest nodes make the same file of a slot: it was refused for whose it was, and not for what it is."""
    peer, successor = stopped(streamed), streamed.peer()
    lease = peer.lease()
    assert streamed.judge(peer, streamed.honest(lease), lease).outcome is Outcome.REJECTED
    for _ in range(20):
        again = successor.lease()
        receipt = streamed.judge(successor, streamed.honest(again), again)
        assert receipt.outcome is Outcome.ADMITTED, receipt
        if again.slot == lease.slot:
            return
    raise AssertionError("the slot was not given out again")


def test_a_rejected_slot_of_ones_own_fault_is_not_held_against_the_next(streamed: Swarm) -> None:
    """A machine that failed once, not a worker that cheats: it waits, and its next slot is as good as any."""
    peer = streamed.peer()
    assert send(streamed, peer, lambda lost, _: lost < 5.0).reason is Reason.WRONG_TOKEN
    assert send(streamed, peer, None).outcome is Outcome.ADMITTED
    first = verdicts_on(streamed, peer)[0]
    assert first.totals not in (None, Totals())
    assert_the_log_bears_it_out(streamed)
