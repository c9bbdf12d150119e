"""The benchmark of forged proofs: that it runs to the end, and that its forgers and its verdicts are what they say.

What would break for whom: whoever relies on "0 accepted" and was shown forgers that prove nothing, a verifier that
takes nobody's proofs, or a comparison that never took place.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from locations import ROOT

from benchmarks.forging import forgers, judging, policies, stages
from benchmarks.forging.forgers import Window
from node.protocol.admission import judge_rows
from node.protocol.run import LimitsSpec
from node.verification.proofs import build_proofs
from toploc import verify_chunk_proofs

ROWS, POSITIONS, HIDDEN = 32, 96, 128
SIZES = ["--hidden", "128", "--training-steps", "10", "--prompts", "4", "--forgeries", "128", "--short", "64"]
SPEC = judging.DEFAULT.proofs


def gaussian(seed):
    return torch.randn(ROWS, POSITIONS, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16()


VERIFIER = gaussian(0)
# As far away as another kernel's: many of the elements are off by one rounding.
WORKER = (VERIFIER.float() * (1 + 2**-8 * gaussian(1).float().sign())).bfloat16()


def targets(tokens, count=64):
    return forgers.windows(ROWS, POSITIONS, tokens=tokens, count=count, label="test")


def ladder(spec=SPEC):
    """Every kind of forger, with states that have nothing to do with the verifier's."""
    # Tokens are the row's number, so that no two rows begin alike.
    ids = torch.arange(ROWS)[:, None].expand(ROWS, policies.PROMPT_TOKENS + POSITIONS)
    return {
        "random_bytes": forgers.RandomBytes(spec),
        "constant": forgers.Zero(spec),
        "searched_constant": forgers.Searched(spec, gaussian(2)),
        "dimension_mean": forgers.Everywhere(forgers.mean_state(gaussian(2)), tokens=POSITIONS),
        "surrogate": forgers.StateForger(gaussian(3)),
        "other_prompt": forgers.OtherPrompt(WORKER),
        "other_sample": forgers.OtherSample(WORKER, ids),
    }


def taken(name, forger, tokens, limits=judging.DEFAULT.limits):
    batch = targets(tokens)
    proofs = forgers.prove_all({name: forger}, batch, SPEC)[name]
    found = judging.accepted(judging.measure(batch, VERIFIER, proofs, spec=SPEC), limits)
    return {scheme: sum(each) for scheme, each in found.items()}


class TestForgers:
    @pytest.mark.parametrize("tokens", [1, 32, 40])
    def test_an_honest_workers_proofs_are_taken_so_that_a_refused_forgery_means_something(self, tokens):
        assert taken("honest", forgers.StateForger(WORKER), tokens) == dict.fromkeys(judging.SCHEMES, 64)

    @pytest.mark.parametrize("name", list(ladder()))
    def test_no_rung_of_states_that_have_nothing_in_common_passes_the_sketch(self, name):
        found = taken(name, ladder()[name], 32)
        assert found["sketch/1"] == found[judging.BOTH] == 0

    def test_the_searched_constant_is_the_one_that_passes_published_limits_on_gaussian_states(self):
        """The known attack on toploc 0.1.6; a weaker search would report a TOPLOC that is safe from it."""
        chunks = list(torch.randn(64, 32, 4096, generator=torch.Generator().manual_seed(5)).bfloat16())
        pattern = forgers.nearest_constant(torch.stack(chunks[:32]).flatten(1), top_k=128)
        proof = forgers.constant_proof(pattern, top_k=128)
        results = verify_chunk_proofs(chunks[32:], [proof] * 32, 128)
        passed = [one.exp_mismatches <= 38 and one.mant_err_mean <= 10 and one.mant_err_median <= 8 for one in results]
        assert sum(passed) >= 16

    @pytest.mark.parametrize("tokens", [1, 4, 40])
    def test_proofs_made_together_are_those_that_each_forger_would_make_alone(self, tokens):
        batch = targets(tokens)
        rungs = {name: each for name, each in ladder().items() if isinstance(each, forgers.StateForger)}
        for name, proofs in forgers.prove_all(rungs, batch, SPEC).items():
            for index, window in enumerate(batch):
                source = rungs[name].source(batch, index)
                chunks = source.chunks(rungs[name].states, SPEC.chunk_tokens)
                assert proofs[index] == build_proofs(chunks, [window.seed] * len(chunks), spec=SPEC)

    def test_a_replay_is_of_another_prompt_or_of_another_sample_that_began_otherwise(self):
        batch, rungs = targets(32), ladder()
        for index, own in enumerate(batch):
            prompt = rungs["other_prompt"].source(batch, index)
            assert prompt.row // policies.SAMPLES != own.row // policies.SAMPLES
            sample = rungs["other_sample"].source(batch, index)
            assert sample.row // policies.SAMPLES == own.row // policies.SAMPLES
            assert sample.row != own.row
            assert sample.start == own.start

    def test_samples_that_began_alike_are_not_counted_as_a_forgery_of_each_other(self):
        """Their states are the right ones, whoever computed them."""
        alike = forgers.OtherSample(WORKER, torch.zeros(ROWS, policies.PROMPT_TOKENS + POSITIONS, dtype=torch.int64))
        batch = targets(32)
        for index, own in enumerate(batch):
            assert alike.source(batch, index).row // policies.SAMPLES != own.row // policies.SAMPLES

    def test_each_forgery_has_its_own_place_and_seed_until_every_place_was_taken(self):
        places = ROWS * (POSITIONS - 32)
        every = targets(32, count=places)
        assert len({(window.row, window.start) for window in every}) == places
        assert len({window.seed for window in targets(32, count=places + 8)}) == places + 8
        assert all(1 <= window.start <= POSITIONS - 32 for window in every)

    def test_half_the_tokens_are_right_and_the_others_are_not(self):
        half = forgers.every_other(WORKER, gaussian(3))
        assert torch.equal(half[:, ::2], WORKER[:, ::2])
        assert torch.equal(half[:, 1::2], gaussian(3)[:, 1::2])

    def test_only_states_as_near_as_honest_ones_are_no_forgery(self):
        """Else whatever passes could be called the right states, and nothing would ever count as accepted."""
        batch = targets(32, count=1)
        error = stages.error(batch[0], WORKER, batch[0], VERIFIER)
        prepared = stages.Prepared("", Path(), 0.0, {}, None, 0, {}, {}, {32: error})
        assert stages.proves_the_right(forgers.StateForger(WORKER), batch, 0, VERIFIER, prepared)
        for name, forger in (
            ladder() | {"half": forgers.StateForger(forgers.every_other(WORKER, gaussian(3)))}
        ).items():
            assert not stages.proves_the_right(forger, batch, 0, VERIFIER, prepared), name
        far = forgers.StateForger((VERIFIER.float() * (1 + 4 * error)).bfloat16())
        assert not stages.proves_the_right(far, batch, 0, VERIFIER, prepared)


class TestVerdicts:
    @pytest.mark.parametrize("scheme", ["toploc/1", "sketch/1"])
    def test_a_scheme_judged_beside_the_other_takes_what_a_run_of_it_alone_takes(self, scheme):
        """Both are verified in one go; a run of one scheme must come to the same verdicts."""
        batch = targets(32)
        # Between right and wrong, so that some are taken by each scheme and some are not.
        noise = torch.linspace(0.0, 0.3, ROWS)[:, None, None] * gaussian(4).float()
        states = (VERIFIER.float() + noise).bfloat16()
        alone = msgspec.structs.replace(SPEC, scheme=scheme)
        proofs = [
            build_proofs(chunks, [window.seed] * len(chunks), spec=alone)
            for window in batch
            for chunks in [window.chunks(states, SPEC.chunk_tokens)]
        ]
        limits = LimitsSpec()
        measured = judging.measure(batch, VERIFIER, proofs, spec=alone)
        expected = [judge_rows({0: one.figures(limits)}, limits=limits) is None for one in measured]
        together = forgers.prove_all({"noisy": forgers.StateForger(states)}, batch, SPEC)["noisy"]
        found = judging.accepted(judging.measure(batch, VERIFIER, together, spec=SPEC), limits)
        assert found[scheme] == expected
        assert 0 < sum(expected) < len(expected)

    def test_limits_fitted_to_honest_work_take_it_and_refuse_what_the_published_ones_take(self):
        """Else calibrating would gain nothing against the cheapest surrogate."""
        groups = [
            [Window(row, start, 32, f"{row:8}{start:8}".encode()) for row in rows for start in (0, 32, 64)]
            for rows in torch.arange(ROWS).split(policies.SAMPLES)
        ]
        measured = judging.prove_and_measure(groups, WORKER, VERIFIER, spec=SPEC)
        limits = judging.fitted(measured[::2])
        assert judging.refused(measured[1::2], limits) == dict.fromkeys(judging.SCHEMES, 0)
        near = forgers.StateForger((VERIFIER.float() + 0.1 * gaussian(4).float()).bfloat16())
        assert taken("near", near, 32)["toploc/1"] == 64
        assert taken("near", near, 32, limits)["toploc/1"] == 0

    def test_the_stated_chance_of_one_token_is_that_of_a_sample(self):
        errors = torch.rand(2**18, 8, generator=torch.Generator().manual_seed(0)) * 16 - 8
        distances = errors.square().mean(1).sqrt()
        for limit in (3.0, 4.0):
            share = float((distances + 0.3 <= limit).float().mean())
            stated = judging.chance_log10(1, LimitsSpec(sketch_distance=limit))
            assert math.isclose(10**stated, share, rel_tol=0.1)

    def test_the_stated_chance_of_several_tokens_is_never_below_that_of_a_sample(self):
        """Else a table would call a forgery luckier than it is."""
        errors = torch.rand(2**17, 4, 8, generator=torch.Generator().manual_seed(0)) * 16 - 8
        typical = (errors.square().mean(2).sqrt() + 0.3).log().mean(1).exp()
        share = float((typical <= 4.0).float().mean())
        stated = 10 ** judging.chance_log10(4, LimitsSpec(sketch_distance=4.0))
        assert share <= stated <= 10 * share


@pytest.mark.timeout(600)
def test_the_whole_benchmark_runs_and_counts_every_rung_length_and_architecture():
    command = [sys.executable, "-m", "benchmarks.forgery", "--json", "--no-peer", *SIZES]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=550, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    line = json.loads(ended.stdout.splitlines()[-1])
    figures = line["figures"]
    assert line["benchmark"] == "forgery"
    assert (figures["forgeries_per_rung"], figures["rungs"], figures["architectures"]) == (128, len(stages.RUNGS), 3)
    # Few honest rollouts make for loose limits, so that only what knows nothing has to fail.
    assert figures["accepted_random_bytes"] == figures["accepted_constant"] == figures["accepted_other_prompt"] == 0
    assert figures["accepted_share_peer"] is None
    assert "no-peer" in line["notes"]["accepted_share_peer"]
    assert all(math.isfinite(figure) for name, figure in figures.items() if name != "accepted_share_peer")
    rows = {(row["tokens"], row["rung"], row["architecture"]): row for row in line["rows"]}
    assert len(rows) == len(line["rows"]) == len(stages.LENGTHS) * len(stages.RUNGS) * 3
    for (tokens, _, _), row in rows.items():
        assert row["forgeries_calibrated"] == (128 if tokens == 32 else 64)
        assert row["both_calibrated"] <= min(row["toploc_calibrated"], row["sketch_calibrated"])
