"""Recurrent decoding: what a worker decodes step by step is what a verifier reads at once."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import torch
from torch import Tensor

from benchmarks.modelling.policies import random_policy
from node.engines.recurrent_decoder import RecurrentDecoder, Snapshots
from node.policy.families import TINY_RECURRENT
from node.policy.file import Policy, load_policy
from node.policy.models.wkv import WKV_CHUNK


@pytest.fixture(scope="module", params=TINY_RECURRENT)
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    path = random_policy(request.param, tmp_path_factory.mktemp(request.param) / "policy")
    return load_policy(path, dtype=torch.float32)


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


def read(policy: Policy, sequence: Sequence[int]) -> Tensor:
    """The hidden states [T, hidden] of a prefill of one sequence alone."""
    return policy.model.base_model(input_ids=torch.tensor([list(sequence)])).last_hidden_state[0]


def some(count: int, *, seed: int) -> tuple[int, ...]:
    return tuple(Random(seed).choices(range(3, 128), k=count))


def test_rows_that_join_and_leave_at_any_time_agree_with_a_prefill_of_each_alone(policy: Policy) -> None:
    """Were a place's state another's, an honest worker would be rejected."""
    decoder, rng = RecurrentDecoder(policy), Random(0)
    lengths = [1, 2, WKV_CHUNK - 1, WKV_CHUNK, WKV_CHUNK + 1, 40, 40]
    waiting = [list(some(length, seed=length)) for length in lengths]
    rows: list[list[int]] = []
    for turn in range(40):
        tokens = [rng.randrange(3, 128) for _ in rows]
        hidden = decoder.step(tokens)
        for row, token in zip(rows, tokens, strict=True):
            row.append(token)
        joining = [waiting.pop() for _ in range(min(2, len(waiting)))] if turn % 3 == 0 else []
        hidden = torch.cat([hidden, decoder.join([tuple(row) for row in joining])])
        rows += joining
        for row, state in zip(rows, hidden, strict=True):
            assert (read(policy, row)[-1] - state).abs().max() < 1e-4
        leaving = [rng.random() < 0.03 for _ in rows]
        rows = [rows[place] for place in decoder.leave(leaving)]
    assert not waiting


@pytest.mark.parametrize("length", [1, WKV_CHUNK, 3 * WKV_CHUNK + 5])
def test_a_later_turn_is_read_behind_the_state_that_was_kept(policy: Policy, length: int) -> None:
    """A conversation's turn must cost what is new of it, and give what reading it all would."""
    decoder = RecurrentDecoder(policy)
    said = some(length, seed=3)
    decoder.join([said, some(5, seed=4)])
    drawn = some(2 * WKV_CHUNK, seed=5)
    for token in drawn:
        decoder.step([token, 7])
    assert decoder.leave([True, False]) == [1]
    whole = (*said, *drawn, *some(9, seed=6))
    asked = []
    decoder._base.register_forward_pre_hook(
        lambda _module, _args, kwargs: asked.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    ends = decoder.join([whole, whole])
    assert sum(shape[1] for shape in asked) == len(whole) - (length + len(drawn)) // WKV_CHUNK * WKV_CHUNK
    assert {shape[0] for shape in asked} == {1}, "equal sequences are read once"
    assert (ends - read(policy, whole)[-1]).abs().max() < 1e-4
    hidden = decoder.step([9, 9, 9])
    assert (hidden[1:] - read(policy, (*whole, 9))[-1]).abs().max() < 1e-4
    decoder._base._forward_pre_hooks.clear()


def test_states_that_are_kept_never_hold_more_than_they_may() -> None:
    """A worker with many long conversations must not run out of memory."""
    kept = Snapshots(max_bytes=1000)
    for number in range(10):
        kept.put(bytes([number]), {"x": torch.zeros(1, 100)})
        assert kept.bytes_held <= 1000
    assert [kept.get(bytes([number])) is not None for number in range(10)] == [False] * 8 + [True] * 2
    kept.put(b"more", {"x": torch.zeros(1, 1000)})
    assert (kept.bytes_held, kept.get(b"more")) == (0, None)


def test_places_keep_no_second_copy_of_states_that_do_not_fit(policy: Policy) -> None:
    """A worker with many rows of a large policy would need its memory twice."""
    for most, kept in ((1000, False), (2**30, True)):
        decoder = RecurrentDecoder(policy, max_snapshot_bytes=most)
        decoder.join([some(WKV_CHUNK, seed=1), some(WKV_CHUNK, seed=2)])
        for token in some(WKV_CHUNK, seed=3):
            decoder.step([token, token])
        assert [history.kept is not None for history in decoder._histories] == [kept, kept]


def test_an_empty_batch_decodes_nothing(policy: Policy) -> None:
    decoder = RecurrentDecoder(policy)
    assert decoder.step([]).shape == decoder.join([]).shape == (0, policy.hidden)
    decoder.join([(5,)])
    assert decoder.leave([True]) == []
    assert decoder.join([(6, 7)]).shape == (1, policy.hidden)
