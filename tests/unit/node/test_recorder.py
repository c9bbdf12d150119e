"""What would break for a worker with vLLM: a proof that is not of the states its tokens came from."""

from __future__ import annotations

import random

import pytest
import torch
from recording import CPU, HIDDEN, PROOFS, SPAN, VOCABULARY, Model, assert_same, expected, seed_of, step

from node.engines.base import BrokenPolicy, EngineError
from node.engines.recorder import DecodeRow, Recorder, check_recorded


def make_recorder(*, version: int = 7, proves: bool = True) -> Recorder:
    return Recorder(hidden=HIDDEN, proofs=PROOFS, temperature=0.7, version=version, device=CPU, proves=proves)


@pytest.mark.parametrize("seed", range(5))
def test_random_schedules_leave_the_record_of_a_quiet_one(seed: int) -> None:
    """Batches of any order and size, unread prompts between them, steps thrown away, policies changed on the way."""
    rng = random.Random(seed)
    for _ in range(3):
        recorder, model = make_recorder(), Model()
        left = {f"c{index}": rng.randint(1, 3 * SPAN + 1) for index in range(rng.randint(1, 90))}
        drawn: dict[str, list[int]] = {name: [] for name in left}
        lengths = dict(left)
        while left:
            if rng.random() < 0.1:
                recorder.version += 1
            names = rng.sample(sorted(left), rng.randint(1, len(left)))
            rows: list[tuple[str, int] | None] = [(name, len(drawn[name])) for name in names]
            rows.insert(rng.randint(0, len(rows)), None)
            tokens = step(recorder, model, rows)
            kept = [name for name in names if rng.random() < 0.8]
            for name in kept:
                assert tokens[rows.index((name, len(drawn[name])))] < VOCABULARY
                drawn[name].append(recorder.version)
                if len(drawn[name]) == lengths[name]:
                    del left[name]
        records = recorder.collect([(name, lengths[name]) for name in drawn])
        for name, record in zip(drawn, records, strict=True):
            assert_same(record, expected(model, name, drawn[name]))
        assert len(recorder) == 0


def test_a_token_drawn_past_the_end_is_not_part_of_the_record() -> None:
    """An engine that runs a step ahead draws one more token than it delivers, here where a chunk ends, too."""
    recorder, model = make_recorder(), Model()
    for position in range(SPAN + 1):
        step(recorder, model, [("c", position)])
    (record,) = recorder.collect([("c", SPAN)])
    assert_same(record, expected(model, "c", [7] * SPAN))


def test_a_chunk_that_was_proved_with_tokens_past_the_end_is_left_out() -> None:
    """Its proof would be of more tokens than are delivered; the chunks before it are good."""
    recorder, model = make_recorder(), Model()
    for position in range(2 * SPAN + 1):
        step(recorder, model, [("c", position)])
    (record,) = recorder.collect([("c", 2 * SPAN - 1)])
    assert_same(record, expected(model, "c", [7] * SPAN))


def test_a_step_that_was_never_sampled_leaves_nothing() -> None:
    recorder, model = make_recorder(), Model()
    recorder.begin([DecodeRow("c", seed_of("c"), 0)], model.at("c", 0, 7)[0][None])
    recorder.end()
    untouched = torch.randn(3, VOCABULARY)
    assert torch.equal(recorder.sample(untouched.clone()), untouched)
    assert len(recorder) == 0


def test_a_gap_or_a_rewritten_chunk_is_a_fault_and_not_a_proof() -> None:
    recorder, model = make_recorder(), Model()
    step(recorder, model, [("gap", 0), ("late", 3)])
    step(recorder, model, [("gap", 2)])
    for position in [*range(SPAN + 1), 1]:
        step(recorder, model, [("back", position)])
    for record in recorder.collect([("gap", 2), ("late", 1), ("back", SPAN + 1), ("unknown", 1)]):
        assert record.fault is not None
        with pytest.raises(BrokenPolicy):
            check_recorded(record, delivered=record.tokens)


def test_a_nan_in_one_completion_spoils_only_that_one() -> None:
    recorder, model = make_recorder(), Model()
    model.at("bad", 1, 7)[0][5] = float("nan")
    model.at("bad", 1, 7)[1][3] = float("nan")
    model.at("worse", 1, 7)[1][:] = float("nan")
    for position in range(SPAN):
        step(recorder, model, [("bad", position), ("good", position), ("worse", position)])
    bad, good, worse = recorder.collect([("bad", SPAN), ("good", SPAN), ("worse", SPAN)])
    assert_same(good, expected(model, "good", [7] * SPAN))
    check_recorded(good, delivered=good.tokens)
    for record in (bad, worse):
        with pytest.raises(BrokenPolicy):
            check_recorded(record, delivered=record.tokens)


def test_tokens_other_than_the_forced_ones_are_not_submitted() -> None:
    recorder, model = make_recorder(), Model()
    step(recorder, model, [("c", 0)])
    (record,) = recorder.collect([("c", 1)])
    with pytest.raises(EngineError, match="other tokens"):
        check_recorded(record, delivered=[record.tokens[0] ^ 1])


def test_places_are_used_again_after_completions_were_taken_or_dropped() -> None:
    recorder, model = make_recorder(), Model()
    for round_ in range(5):
        names = [f"r{round_}c{index}" for index in range(60)]
        step(recorder, model, [(name, 0) for name in names])
        recorder.collect([(name, 1) for name in names[:30]])
        recorder.drop([*names[30:], "never seen"])
    assert len(recorder) == 0
    assert len(recorder._hidden) == 64


def test_a_rank_that_does_not_prove_forces_the_same_tokens_and_keeps_nothing() -> None:
    model = Model()
    first, other = make_recorder(), make_recorder(proves=False)
    rows = [("a", 0), None, ("b", 0)]
    assert step(first, model, rows)[::2] == step(other, model, rows)[::2]
    assert len(other) == 0
