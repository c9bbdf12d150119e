"""What would break for a worker with vLLM: a proof that is not of the states its tokens came from."""

from __future__ import annotations

import random
import zlib

import pytest
import torch

from node.engines.base import BrokenPolicy, EngineError
from node.engines.recorder import DecodeRow, Recorded, Recorder, check_recorded
from node.protocol.run import ProofSpec
from node.protocol.sampling import gumbel_noise
from toploc import build_chunk_proofs, build_chunk_sketches

HIDDEN, SPAN, VOCABULARY = 48, 4, 33
PROOFS = ProofSpec(scheme="toploc/1+sketch/1", chunk_tokens=SPAN, top_k=8)
CPU = torch.device("cpu")


def make_recorder(*, version: int = 7, proves: bool = True) -> Recorder:
    return Recorder(hidden=HIDDEN, proofs=PROOFS, temperature=0.7, version=version, device=CPU, proves=proves)


class Model:
    """States and logits of each completion's positions under each version, drawn once."""

    def __init__(self) -> None:
        self._drawn: dict[tuple[str, int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def at(self, name: str, position: int, version: int) -> tuple[torch.Tensor, torch.Tensor]:
        key = name, position, version
        if key not in self._drawn:
            generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
            self._drawn[key] = torch.randn(HIDDEN, generator=generator), torch.randn(VOCABULARY, generator=generator)
        return self._drawn[key]


def seed_of(name: str) -> bytes:
    return name.encode().ljust(16, b"\0")


def step(recorder: Recorder, model: Model, rows: list[tuple[str, int] | None]) -> list[int]:
    """One step of an engine; None is a prompt that is not read to its end. The tokens that its argmax chooses."""
    places = [row and DecodeRow(row[0], seed_of(row[0]), row[1]) for row in rows]
    drawn = [model.at(*(row or ("nobody", 0)), recorder.version) for row in rows]
    recorder.begin(places, torch.stack([hidden for hidden, _ in drawn]))
    logits = recorder.sample(torch.stack([logits for _, logits in drawn]).clone())
    recorder.end()
    return logits.argmax(-1).tolist()


def expected(model: Model, name: str, versions: list[int]) -> Recorded:
    """The record of a completion whose position p was drawn under `versions[p]`, computed without a recorder."""
    tokens, logprobs, chunks, start = [], [], [], 0
    for position, version in enumerate(versions):
        scaled = model.at(name, position, version)[1] / 0.7
        noise = torch.from_numpy(gumbel_noise([seed_of(name)], [position], vocabulary=VOCABULARY))[0]
        tokens.append(int((scaled + noise).argmax()))
        logprobs.append(float(scaled.log_softmax(-1)[tokens[-1]]))
    for position in range(1, len(versions) + 1):
        cut = position == len(versions) or versions[position] != versions[start] or position - start == SPAN
        if cut:
            states = [model.at(name, at, versions[at])[0] for at in range(start, position)]
            chunks.append(torch.stack(states).bfloat16())
            start = position
    distinct = list(dict.fromkeys(versions))
    sketches = build_chunk_sketches(chunks, [seed_of(name)] * len(chunks), step=PROOFS.sketch_step)
    return Recorded(
        tokens=tokens,
        logprobs=logprobs,
        segment_versions=distinct,
        segment_tokens=[versions.count(version) for version in distinct],
        proofs=[a + b for a, b in zip(build_chunk_proofs(chunks, PROOFS.top_k), sketches, strict=True)],
    )


def assert_same(ours: Recorded, theirs: Recorded) -> None:
    assert ours.fault is None
    assert ours.tokens == theirs.tokens
    assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
    assert (ours.segment_versions, ours.segment_tokens) == (theirs.segment_versions, theirs.segment_tokens)
    assert ours.proofs == theirs.proofs


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
