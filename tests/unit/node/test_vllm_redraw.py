"""What the vLLM engine makes of a chunk that it proved with tokens behind a stop string, without vLLM itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from node.engines.base import SampleRequest
from node.engines.vllm import VllmEngine
from node.engines.vllm_settings import VllmSettings
from node.protocol.run import EnvironmentSpec, ProofSpec, RunSpec, SamplingSpec
from node.protocol.submission import Rollout, chunk_sizes
from node.protocol.turns import StopStrings, TurnRules

CHUNK, CAP, EOS, STOP = 16, 42, 1, 9
SPEC = RunSpec(
    name="test",
    environments=(EnvironmentSpec(name="arithmetic"),),
    sampling=SamplingSpec(max_new_tokens=CAP),
    proofs=ProofSpec(chunk_tokens=CHUNK),
)
RULES = TurnRules(stop=StopStrings((chr(STOP),), lambda tokens: "".join(map(chr, tokens))))


class Loaded:
    """A policy, of which `_complete` asks only this."""

    eos_ids = frozenset({EOS})


class Scripted(VllmEngine):
    """Draws what `streams` say, one after the other, each as (version, what follows up to the request's cap).

    A full chunk that goes on behind a stop string is left out. A proof is the number of its tokens.
    """

    policy = Loaded()  # type: ignore[assignment]

    def __init__(self, state: Path, streams: Sequence[tuple[int, list[int]]]) -> None:
        super().__init__(SPEC, VllmSettings(), state=state)
        self.streams = list(streams)

    async def _draw(self, request: SampleRequest, *, before: Sequence[int]) -> tuple[Rollout, int]:
        version, follows = self.streams.pop(0)
        follows = follows[: request.cap(SPEC.sampling)]
        drawn = follows.index(STOP) + 1 if STOP in follows else len(follows)
        whole = drawn - drawn % CHUNK
        kept = whole if len(follows) >= whole + CHUNK else drawn
        part = Rollout(
            seed=request.seed,
            prompt_ids=list(request.prompt_ids),
            completion_ids=follows[:kept],
            logprobs=[-1.0] * kept,
            segment_versions=[version] if kept else [],
            segment_tokens=[kept] if kept else [],
            proofs=[bytes([min(CHUNK, kept - at)]) for at in range(0, kept, CHUNK)],
        )
        return part, drawn


def stops_at(place: int) -> list[int]:
    return [*[7] * (place - 1), STOP, *[7] * (CAP - place)]


LONG = [7] * CAP


@pytest.mark.parametrize(
    ("streams", "chunks"),
    [
        ([(0, stops_at(20)), (0, stops_at(4))], [16, 4]),
        ([(0, stops_at(20)), (0, LONG), (0, LONG)], [16, 16, 10]),  # by rounding, another token
        ([(0, stops_at(20)), (1, LONG), (1, LONG)], [16, 16, 10]),  # a policy was loaded in between
        ([(0, stops_at(20)), (0, LONG), (0, stops_at(22))], [16, 16, 6]),
        ([(0, stops_at(20)), (0, LONG), (0, stops_at(4)), (0, stops_at(2))], [16, 2]),  # and another one again
        ([(0, stops_at(20)), (0, [7, EOS])], [16, 2]),
        ([(0, stops_at(4)), (0, stops_at(4))], [4]),
    ],
)
async def test_proofs_are_cut_where_a_verifier_cuts_though_the_second_draw_has_no_stop_string(
    tmp_path: Path, streams: list[tuple[int, list[int]]], chunks: list[int]
) -> None:
    """Else the worker's own check refuses the completion, and the engine is started again for nothing."""
    engine = Scripted(tmp_path, streams)
    rollout = await engine._complete(SampleRequest((5,), bytes(16), rules=RULES), None)
    assert [proof[0] for proof in rollout.proofs] == chunks
    assert chunk_sizes(rollout.segment_tokens, chunk_tokens=CHUNK) == chunks
    assert sum(rollout.segment_tokens) == len(rollout.completion_ids) == sum(chunks)
    assert not engine.streams
