"""The kernels of forced sampling: a token that differs from the definition's gets an honest worker rejected."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time

import numpy as np
import pytest
import torch
from locations import VECTORS_FOLDER
from sampling_cases import edge_words, problem, words_of

from node.protocol.sampling import gumbel_noise, gumbel_table, table_index
from node.sampling import forced as sampling
from node.sampling.cpu import BLOCK, peaks, table_entry
from node.sampling.forced import appraise, choose, reference_peaks, warm_up

VECTORS = json.loads((VECTORS_FOLDER / "protocol" / "sampling.json").read_text())
VOCABULARIES = [1, 2, 5, 300, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3, 32_000]


def by_the_definition(logits, seeds, positions, temperature):
    """Scores and log-probabilities of all tokens, from the noise of `node.protocol.sampling`."""
    scaled = logits / temperature
    scores = scaled + torch.from_numpy(gumbel_noise(seeds, positions, vocabulary=logits.shape[1]))
    return scores, scaled.double().log_softmax(-1)


def test_every_edge_of_the_table_is_where_the_definition_has_it():
    words = edge_words()
    assert {0, 4095, 4096, 0xFFFFFFFF} <= set(words.tolist())
    assert [table_entry(word) for word in words] == table_index(words.astype(np.uint64)).tolist()


def test_no_noise_is_zero():
    """The CPU's kernel orders scores by their bits, -0.0 below 0.0: that is safe as long as no score is -0.0."""
    assert (gumbel_table() != 0).all()


@pytest.mark.parametrize("find", [peaks, reference_peaks])
@pytest.mark.parametrize("vocabulary", [1, 3, 37, BLOCK + 5])
def test_noise_is_the_definitions_for_every_token(find, vocabulary):
    """Row t leaves only token t, so its score is that token's noise."""
    for seed, position in [(bytes(16), 0), (b"\xff" * 16, 2**32 - 1), (bytes(range(16)), 2047)]:
        logits = torch.full((vocabulary, vocabulary), -torch.inf).fill_diagonal_(0.0)
        found = find(
            logits,
            np.repeat(words_of([seed]), vocabulary, 0),
            np.full(vocabulary, position, np.uint32),
            temperature=1.0,
        )
        noise = gumbel_noise([seed], [position], vocabulary=vocabulary)[0]
        assert found.scores.numpy().tobytes() == noise.tobytes()
        assert found.tokens.tolist() == list(range(vocabulary))


def test_noise_is_the_definitions_at_the_end_of_a_real_vocabulary():
    tokens = [0, 4095, 4096, 65_535, 65_536, 131_072, 262_140, 262_143]
    logits = torch.full((len(tokens), 262_144), -torch.inf)
    logits[range(len(tokens)), tokens] = 0.0
    found = peaks(logits, np.zeros((len(tokens), 4), np.uint32), np.full(len(tokens), 9, np.uint32), 1.0)
    assert found.scores.tolist() == gumbel_noise([bytes(16)], [9], vocabulary=262_144)[0, tokens].tolist()


@pytest.mark.parametrize("vector", VECTORS["noise"], ids=lambda v: f"{v['seed'][:8]}-{v['position']}")
def test_noise_is_the_published(vector):
    words, where = words_of([bytes.fromhex(vector["seed"])] * 10), np.full(10, vector["position"], np.uint32)
    found = peaks(torch.full((10, 10), -torch.inf).fill_diagonal_(0.0), words, where, 1.0)
    assert found.scores.numpy().astype("<f4").tobytes().hex() == vector["float32_le_hex"]


@pytest.mark.parametrize("vector", VECTORS["choices"], ids=lambda v: str(v["temperature"]))
def test_choices_are_the_published(vector):
    steps = len(vector["tokens"])
    logits = torch.tensor([vector["logits"]] * steps)
    seeds = [bytes.fromhex(vector["seed"])] * steps
    choice = choose(logits, seeds, range(steps), temperature=vector["temperature"])
    assert choice.tokens.tolist() == vector["tokens"]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.05, 10.0])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_choices_and_margins_are_the_definitions(vocabulary, temperature):
    logits, seeds, positions = problem(12, vocabulary, seed=vocabulary)
    before = logits.clone()
    scores, logprobs = by_the_definition(logits, seeds, positions, temperature)
    choice = choose(logits, seeds, positions, temperature=temperature)
    assert choice.tokens.dtype == torch.int64
    assert choice.tokens.equal(scores.argmax(-1))
    assert choice.logprobs.dtype == torch.float32
    torch.testing.assert_close(
        choice.logprobs.double(), logprobs.gather(1, choice.tokens[:, None])[:, 0], rtol=1e-6, atol=1e-6
    )
    given = torch.arange(12) * 7919 % vocabulary
    given_logprobs, margins = appraise([logits], given, seeds, positions, temperature=temperature)
    assert margins.equal(scores.amax(-1) - scores.gather(1, given[:, None])[:, 0])
    torch.testing.assert_close(given_logprobs.double(), logprobs.gather(1, given[:, None])[:, 0], rtol=1e-6, atol=1e-6)
    again, none = appraise([logits], choice.tokens, seeds, positions, temperature=temperature)
    assert again.equal(choice.logprobs)
    assert none.tolist() == [0.0] * 12
    assert logits.equal(before), "the caller's logits were changed"


def in_parts(logits, width):
    """The logits by columns, in memory that is written again for each part, as an output head on a CPU gives them."""
    memory = torch.empty(len(logits), width)
    for part in torch.split(logits, width, dim=1):
        memory[:, : part.shape[1]] = part
        yield memory[:, : part.shape[1]]


@pytest.mark.parametrize("scale", [1.0, 20.0])
@pytest.mark.parametrize("width", [52, 1000, BLOCK, 2 * BLOCK + 4])
def test_logits_that_come_in_parts_are_judged_as_if_they_came_at_once(width, scale):
    """A noise value that is taken for another token's, or a winner lost between parts, rejects honest work."""
    logits, seeds, positions = problem(8, 3 * BLOCK + 50, scale=scale)
    logits[0, : 2 * BLOCK] = -torch.inf
    logits[1, 2 * BLOCK :] = -torch.inf
    logits[2, 17], logits[3, 2 * BLOCK] = torch.nan, torch.inf
    given = choose(logits, seeds, positions, temperature=0.7).tokens
    given[4:] = torch.tensor([0, width, BLOCK - 1, 3 * BLOCK + 49])
    logprobs, margins = appraise([logits], given, seeds, positions, temperature=0.7)
    found, lost = appraise(in_parts(logits, width), given, seeds, positions, temperature=0.7)
    assert lost[[0, 1, 4, 5, 6, 7]].equal(margins[[0, 1, 4, 5, 6, 7]])
    assert not found[2:4].isfinite().any()
    torch.testing.assert_close(found, logprobs, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_choices_are_the_definitions_at_a_real_vocabulary():
    logits, seeds, positions = problem(6, 262_144)
    scores, _ = by_the_definition(logits, seeds, positions, 0.7)
    found = peaks(logits, words_of(seeds), np.array(positions, np.uint32), 0.7)
    assert found.tokens.equal(scores.argmax(-1))
    assert found.scores.equal(scores.amax(-1))
    assert found.largest.equal((logits / 0.7).amax(-1))


@pytest.mark.parametrize("scale", [8.0, 20.0])
def test_blocks_passed_over_never_hold_the_winner(scale):
    """A sharp policy's blocks are mostly skipped without noise; one too many, and a rare token is never drawn."""
    logits, seeds, positions = problem(64, 8 * BLOCK, scale=scale)
    logits -= torch.linspace(0, 3 * scale, 8 * BLOCK)
    scores, _ = by_the_definition(logits, seeds, positions, 1.0)
    assert choose(logits, seeds, positions, temperature=1.0).tokens.equal(scores.argmax(-1))


@pytest.mark.parametrize("find", [peaks, reference_peaks])
def test_the_largest_noise_there_is_wins_where_it_can(find):
    """The word 0, one in 2**32: found by searching. A bound on the noise just below it would pass this block over."""
    position, rare = 18_696, 98_353
    noise = gumbel_noise([bytes(16)], [position], vocabulary=98_400)[0]
    assert noise[rare] == gumbel_table()[0]
    logits = torch.full((1, 98_400), -torch.inf)
    logits[0, 0] = 30.0
    best = np.float32(30.0) + noise[0]
    for least, winner in [(best - noise[rare] - np.float32(1e-4), 0), (best - noise[rare] + np.float32(1e-4), rare)]:
        logits[0, rare] = float(least)
        found = find(logits, np.zeros((1, 4), np.uint32), np.array([position], np.uint32), 1.0)
        assert found.tokens.tolist() == [winner]


def tied(vocabulary):
    """Logits whose sum with their noise is the same for many tokens, and those tokens."""
    seeds, positions = [bytes(range(16))], [1]
    noise = gumbel_noise(seeds, positions, vocabulary=vocabulary)
    logits = np.float32(64.0) - noise
    scores = (logits + noise)[0]
    return torch.from_numpy(logits), seeds, positions, np.flatnonzero(scores == scores.max()).tolist()


@pytest.mark.parametrize("find", [peaks, reference_peaks])
def test_ties_go_to_the_lowest_token(find):
    """In one lane, in one block and across blocks: the winners are removed one after another."""
    logits, seeds, positions, winners = tied(3 * BLOCK)
    assert len(winners) > 1000
    for winner in winners[:200] + winners[-200:]:
        only = logits.clone()
        only[0, [token for token in winners if token < winner]] = -torch.inf
        assert find(only, words_of(seeds), np.array(positions, np.uint32), 1.0).tokens.tolist() == [winner]


@pytest.mark.parametrize("find", [peaks, reference_peaks])
@pytest.mark.parametrize("at", [0, 17, BLOCK, 2 * BLOCK + 2])
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf")])
def test_a_row_that_is_not_finite_cannot_hide(monkeypatch, find, bad, at):
    """A broken policy's token would look forced: its log-probability has to say so, and its neighbours' must not."""
    monkeypatch.setattr(sampling, "_backend", lambda _: find)
    logits, seeds, positions = problem(3, 2 * BLOCK + 3)
    logits[1, at] = bad
    choice = choose(logits, seeds, positions, temperature=0.9)
    assert choice.logprobs.isfinite().tolist() == [True, False, True]
    assert 0 <= int(choice.tokens[1]) < logits.shape[1]
    logprobs, _ = appraise([logits], choice.tokens, seeds, positions, temperature=0.9)
    assert logprobs.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("find", [peaks, reference_peaks])
@pytest.mark.parametrize("filling", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_a_row_of_nothing_finite_cannot_hide(monkeypatch, find, filling):
    monkeypatch.setattr(sampling, "_backend", lambda _: find)
    choice = choose(torch.full((1, 2 * BLOCK), filling), [bytes(16)], [0], temperature=1.0)
    assert not choice.logprobs.isfinite().any()
    assert 0 <= int(choice.tokens[0]) < 2 * BLOCK


def test_a_logit_that_overflows_when_it_is_scaled_cannot_hide():
    choice = choose(torch.tensor([[1e38, 0.0]]), [bytes(16)], [0], temperature=0.02)
    assert not choice.logprobs.isfinite().any()


def test_tokens_ruled_out_are_no_fault():
    """Engines rule tokens out by -inf; whole blocks of them come before the first that is allowed."""
    logits, seeds, positions = problem(4, 4 * BLOCK)
    logits[:, : 2 * BLOCK] = -torch.inf
    _, expected = by_the_definition(logits, seeds, positions, 1.0)
    choice = choose(logits, seeds, positions, temperature=1.0)
    torch.testing.assert_close(
        choice.logprobs.double(), expected.gather(1, choice.tokens[:, None])[:, 0], rtol=1e-6, atol=1e-6
    )
    logprobs, margins = appraise([logits], torch.zeros(4, dtype=torch.int64), seeds, positions, temperature=1.0)
    assert logprobs.tolist() == [-float("inf")] * 4
    assert margins.tolist() == [float("inf")] * 4


def test_several_threads_find_what_one_finds():
    logits, seeds, positions = problem(7, 32_000)
    alone = choose(logits, seeds, positions, temperature=0.8)
    for threads in (2, 3, 16):
        torch.set_num_threads(threads)
        together = choose(logits, seeds, positions, temperature=0.8)
        assert together.tokens.equal(alone.tokens)
        assert together.logprobs.equal(alone.logprobs)


@pytest.mark.system
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_does_not_wait_for_its_parents_threads():
    """Engines fork workers: threads are not forked, and a pool that counts on them never answers."""
    logits, seeds, positions = problem(4, 64_000)
    torch.set_num_threads(2)
    expected = peaks(logits, words_of(seeds), np.array(positions, np.uint32), 1.0).tokens.tolist()
    child = os.fork()
    if not child:
        found = peaks(logits, words_of(seeds), np.array(positions, np.uint32), 1.0).tokens.tolist()
        os._exit(0 if found == expected else 1)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)


def test_a_row_does_not_depend_on_its_batch():
    """A worker batches, a verifier prefills: also the log-probability is the same to the bit."""
    logits, seeds, positions = problem(9, 5_000)
    together = choose(logits, seeds, positions, temperature=1.0)
    for row in range(9):
        alone = choose(logits[row : row + 1], [seeds[row]], [positions[row]], temperature=1.0)
        assert alone.tokens.equal(together.tokens[row : row + 1])
        assert alone.logprobs.equal(together.logprobs[row : row + 1])


def test_logits_may_lie_anywhere_in_memory():
    logits, seeds, positions = problem(5, 2_000)
    expected = choose(logits, seeds, positions, temperature=1.0)
    for other in (logits.t().contiguous().t(), torch.cat((logits, logits), 1)[:, :2_000], logits.requires_grad_()):
        found = choose(other, seeds, positions, temperature=1.0)
        assert found.tokens.equal(expected.tokens)
        assert found.logprobs.equal(expected.logprobs)
        assert not found.logprobs.requires_grad
    with torch.inference_mode():
        assert choose(logits * 1, seeds, positions, temperature=1.0).tokens.equal(expected.tokens)


def test_an_empty_batch_has_no_choices():
    assert choose(torch.zeros(0, 8), [], [], temperature=1.0).tokens.tolist() == []


@pytest.mark.parametrize(
    "changes",
    [
        {"seeds": [bytes(16)]},
        {"positions": [0]},
        {"seeds": [bytes(16), bytes(15)]},
        {"positions": [0, -1]},
        {"positions": [0, 2**32]},
        {"temperature": 0.0},
        {"temperature": float("nan")},
        {"parts": [torch.zeros(2, 8, dtype=torch.bfloat16)]},
        {"parts": [torch.zeros(2, 0)]},
        {"parts": [torch.zeros(8)]},
        {"parts": [torch.zeros(2, 4), torch.zeros(1, 4)]},
        {"parts": [torch.zeros(2, 6), torch.zeros(2, 2)]},
        {"parts": []},
        {"tokens": torch.tensor([0, 8])},
        {"tokens": torch.tensor([-1, 0])},
        {"tokens": torch.tensor([0])},
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes):
    """A token out of bounds ends a CUDA process with everything in it; one seed too few would go unnoticed."""
    fitting = {
        "parts": [torch.zeros(2, 4), torch.zeros(2, 4)],
        "tokens": torch.tensor([0, 7]),
        "seeds": [bytes(16)] * 2,
        "positions": [0, 1],
        "temperature": 1.0,
    }
    appraise(**fitting)
    with pytest.raises(ValueError, match=r"row|bytes|bits|temperature|logits|vocabulary"):
        appraise(**fitting | changes)


def test_a_device_without_a_kernel_samples_by_the_definition(monkeypatch):
    monkeypatch.setattr(sampling, "MAX_NOISE_VALUES", 1_000)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    for device in ("mps", "cuda"):
        assert sampling._backend.__wrapped__(device) is reference_peaks
    logits, seeds, positions = problem(7, 300)
    found = reference_peaks(logits, words_of(seeds), np.array(positions, np.uint32), 0.7)
    kernel = peaks(logits, words_of(seeds), np.array(positions, np.uint32), 0.7)
    assert found.tokens.equal(kernel.tokens)
    assert found.scores.equal(kernel.scores)
    torch.testing.assert_close(found.exponentials.double(), kernel.exponentials, rtol=1e-6, atol=0)


def test_warming_up_compiles_what_a_cpu_needs():
    warm_up("cpu")
    assert sampling._backend("cpu") is peaks
