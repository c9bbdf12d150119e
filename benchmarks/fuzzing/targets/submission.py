"""A submission: the file from its bytes, the checks that need no model, and completions as text."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from random import Random

import msgspec
import torch
import zstandard

from benchmarks.fuzzing.mutation import MAX_INPUT_BYTES, bytes_mutator, mixed, of_one, scramble
from benchmarks.fuzzing.target import Harness, Target
from benchmarks.fuzzing.trees import edit_values, msgpack_mutator
from node.environments import Conversation, Environment, EnvironmentFault, load_environment
from node.environments.grading import grade
from node.protocol.reasons import Refusal
from node.protocol.run import EnvironmentSpec, ProofSpec, RunSpec, SamplingSpec
from node.protocol.submission import Expected, Rollout, check_rollouts, chunk_sizes
from node.protocol.turns import MAX_REPLY_CHARACTERS, Replies, interleaved, pieces
from node.submission.reader import read_rollouts
from node.submission.writer import compress, write_rollouts
from node.verification.proofs import build_proofs, check_proofs
from toploc.errors import BadProof

HIDDEN, VOCABULARY, EOS, ROWS = 64, 128, 1, 2
PROMPT = [5, 6, 7]
SEEDS = [bytes([row]) * 16 for row in range(ROWS)]
SPEC = RunSpec(
    name="fuzz",
    environments=(EnvironmentSpec(name="arithmetic"),),
    sampling=SamplingSpec(
        group_size=ROWS,
        max_prompt_tokens=16,
        max_new_tokens=12,
        max_version_lead=1,
        max_turns=3,
        max_reply_tokens=6,
    ),
    proofs=ProofSpec(scheme="toploc/1+sketch/1", chunk_tokens=4, top_k=8),
)
TALKATIVE = 77
"""A token after which the environment has something to say."""


def _ask(turns: Sequence[Sequence[int]]) -> list[int] | None:
    """Repeat what the model said, if its turn begins with the token for that."""
    assert len(turns) < SPEC.sampling.max_turns
    return list(turns[-1]) if turns[-1][0] == TALKATIVE else None


EXPECTED = Expected(
    version=3, published={3, 4}, prompt_ids=PROMPT, seeds=SEEDS, vocabulary=VOCABULARY, eos_ids={EOS}, ask=_ask
)
DATASETS = ("chain_sum", "gsm_symbolic", "number_format", "products", "sentence_reordering", "word_sorting")
MARKS = (
    b"</think>",
    b"\x1f",
    b"*99",
    b"+1",
    b"-",
    b"1e999",
    b"0x10",
    b"\xd9\xa3",
    b",",
    b".",
    b"NaN",
    b"inf",
    b"9" * 200,
    b"\x00",
    b" ",
)


def group(lengths: tuple[int, int] = (12, 9), first: int = 5, turn: int = 0) -> list[Rollout]:
    """Make an honest group: of a completion's tokens `first` were drawn from policy 3, the others from policy 4.

    After `turn` tokens the environment speaks; 0: it does not.
    """
    generator = torch.Generator().manual_seed(0)
    rollouts = []
    for seed, length in zip(SEEDS, lengths, strict=True):
        tokens = [min(first, length), max(0, length - first)]
        segments = [count for count in tokens if count]
        said: Replies = ((turn, ()),) if 0 < turn < length else ()
        sizes = chunk_sizes(pieces(segments, said), chunk_tokens=4)
        states = [torch.randn(n, HIDDEN, generator=generator).bfloat16() for n in sizes]
        ends = [EOS] if length < SPEC.sampling.max_new_tokens else [9]
        completion = [*range(10, 9 + length), *ends]
        if said:
            completion[0], completion[turn - 1] = TALKATIVE, EOS
        rollouts.append(
            Rollout(
                seed=seed,
                prompt_ids=PROMPT,
                completion_ids=completion,
                logprobs=[-0.5] * length,
                segment_versions=[3, 4][: len(segments)],
                segment_tokens=segments,
                proofs=build_proofs(states, [seed] * len(states), spec=SPEC.proofs),
            )
        )
    return rollouts


GROUPS = (group(), group((1, 12)), group((2, 3), first=12), group((12, 9), turn=3), group((12, 9), turn=5))


def _check(rollouts: list[Rollout]) -> None:
    """Check rollouts as `node.verification.plan` does before any prefill."""
    replies = check_rollouts(rollouts, expected=EXPECTED, spec=SPEC)
    for rollout, said in zip(rollouts, replies, strict=True):
        assert [segment.end - segment.start for segment in rollout.segments] == rollout.segment_tokens
        spoken = sum(len(ids) for _, ids in said)
        assert spoken <= SPEC.sampling.max_reply_tokens
        assert len(interleaved(rollout.completion_ids, said)) == len(rollout.completion_ids) + spoken
        assert all(0 < before < len(rollout.completion_ids) for before, _ in said)
        sizes = chunk_sizes(pieces(rollout.segment_tokens, said), chunk_tokens=SPEC.proofs.chunk_tokens)
        check_proofs(rollout.proofs, sizes, hidden=HIDDEN, spec=SPEC.proofs)


def _rollouts(_: ExitStack) -> Harness:
    """Feed rows of any values that the columns can hold, and some that they cannot."""
    decode = msgspec.msgpack.Decoder(list[Rollout]).decode

    def run(data: bytes) -> None:
        _check(decode(data))

    seeds = [msgspec.msgpack.encode(rollouts) for rollouts in GROUPS]
    return Harness(seeds, run, (Refusal, BadProof, msgspec.DecodeError, UnicodeDecodeError), msgpack_mutator())


def _file(_: ExitStack) -> Harness:
    """Feed files to the verifier's reader. VerifierFailed would leave a hostile submission without a verdict."""

    def run(data: bytes) -> int:
        rollouts = read_rollouts(data, spec=SPEC)
        assert len(rollouts) == ROWS
        if all(map(math.isfinite, (logprob for rollout in rollouts for logprob in rollout.logprobs))):
            again = write_rollouts(rollouts)
            assert zstandard.decompress(again) == zstandard.decompress(data), "it has two encodings"
        return sum(len(rollout.completion_ids) for rollout in rollouts)

    return Harness(
        [write_rollouts(rollouts) for rollouts in GROUPS],
        run,
        (Refusal,),
        mixed(
            (4, of_one(_other_values)), (3, of_one(_other_content)), (2, of_one(_other_header)), (2, of_one(scramble))
        ),
        hostile=_hostile_files(),
    )


def _content_of(data: bytes) -> bytes:
    """Return the content of a file that an earlier mutation may have broken."""
    try:
        return zstandard.decompress(data, max_output_size=MAX_INPUT_BYTES)
    except zstandard.ZstdError:
        return zstandard.decompress(write_rollouts(GROUPS[0]))


def _other_values(rng: Random, data: bytes) -> bytes:
    """Make a well-formed frame of well-formed MessagePack: other fields, types, lengths, numbers."""
    try:
        return compress(msgspec.msgpack.encode(edit_values(rng, msgspec.msgpack.decode(_content_of(data)))))
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError):
        return _other_content(rng, data)


def _other_content(rng: Random, data: bytes) -> bytes:
    """Make a well-formed frame of bytes."""
    return compress(
        scramble(rng, _content_of(data), tokens=(b"\x91" * 500, b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"))
    )


def _other_header(rng: Random, data: bytes) -> bytes:
    """Put the same blocks behind another frame header."""
    size = zstandard.frame_header_size(data) if data.startswith(zstandard.FRAME_HEADER) and len(data) > 18 else 4
    claimed = rng.choice((0, 1, len(data), 2**16, 2**31, 2**62, 2**64 - 1))
    header = bytes([rng.choice((0xE0, 0xC0, 0xE4, 0xE3, rng.randrange(256)))]) + struct.pack("<Q", claimed)
    return zstandard.FRAME_HEADER + header[: rng.choice((1, 2, 3, 5, 9, 9, 9))] + data[size:]


def _hostile_files() -> list[bytes]:
    """Make files that are refused: other compressors' frames, and few bytes that are many zeros."""
    content = zstandard.decompress(write_rollouts(GROUPS[0]))
    settings = ({"write_checksum": True}, {"write_content_size": False}, {"level": 19, "write_checksum": True})
    frames = [zstandard.ZstdCompressor(**one).compress(content) for one in settings]
    return [*frames, compress(bytes(2**26)), compress(content.replace(b"rollouts/3", b"rollouts/2"))]


def _completion(_: ExitStack) -> Harness:
    """Feed any text of a model to every environment's reward."""
    environments = [load_environment(EnvironmentSpec(name=name)) for name in ("arithmetic", "reverse", "calculator")]
    environments += _reasoning_gym()
    problems = [(environment, environment.problem(7)) for environment in environments]

    def run(data: bytes) -> int:
        turns = data.decode("utf-8", "replace").split("\x1f")
        rewards = [grade(environment, problem, turns, tokens=len(data)) for environment, problem in problems]
        for environment, problem in problems:
            if isinstance(environment, Conversation):
                said = environment.reply(problem, turns)
                assert said is None or len(said) <= MAX_REPLY_CHARACTERS
        assert all(isinstance(reward, float) and 0.0 <= reward <= 1.0 for reward in rewards), rewards
        return sum(reward > 0 for reward in rewards)

    answers = [str(problem.data.get("answer", problem.data.get("entry", {}).get("answer"))) for _, problem in problems]
    seeds = [f"Let me think.</think> {answer}".encode() for answer in answers]
    return Harness(seeds, run, (), bytes_mutator(*MARKS, *(answer.encode() for answer in answers)))


def _reasoning_gym() -> list[Environment]:
    """Load those of its datasets whose scorers are its own, where the package is installed."""
    try:
        return [load_environment(EnvironmentSpec(name=f"reasoning_gym:{dataset}")) for dataset in DATASETS]
    except EnvironmentFault as fault:
        if fault.code != "package_missing":
            raise
        return []


TARGETS = (
    Target("submission.file", "any key, to the verifier", 200, _file),
    Target("submission.rollouts", "any key, to the verifier", 60, _rollouts),
    Target("submission.completion", "any model's words, to the verifier", 30, _completion),
)
