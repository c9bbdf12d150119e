"""Completions of several turns, for engines that draw one turn at a time.

A turn is a request of its own: over all that was said before, from the position where the turn before it ended. So an
engine needs to know nothing of environments, its batch never waits for one, and chunks of proofs begin anew at a turn
by themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace

from node.engines.base import SampleRequest
from node.protocol.run import SamplingSpec
from node.protocol.submission import Rollout
from node.protocol.turns import Dialogue

DrawTurn = Callable[[SampleRequest], Awaitable[Rollout]]
"""Draws one turn of one completion."""


async def converse(
    requests: Sequence[SampleRequest],
    draw: DrawTurn,
    *,
    eos_ids: Collection[int],
    sampling: SamplingSpec,
    ended: Callable[[], None] | None = None,
) -> list[Rollout]:
    """One rollout for each request, in their order, each by turns; `ended` as for `Engine.generate`.

    Raises what `draw` and the requests' environments raise; whatever was under way beside it is cancelled.
    """
    tasks = [
        asyncio.create_task(_converse(request, draw, eos_ids=eos_ids, sampling=sampling, ended=ended))
        for request in requests
    ]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _converse(
    request: SampleRequest,
    draw: DrawTurn,
    *,
    eos_ids: Collection[int],
    sampling: SamplingSpec,
    ended: Callable[[], None] | None,
) -> Rollout:
    dialogue, turns, context = Dialogue(sampling, eos_ids, request.ask), list[Rollout](), request.prompt_ids
    most = request.cap(sampling)
    while True:
        at = dialogue.tokens
        turn = await draw(replace(request, prompt_ids=context, position=at, max_tokens=most - at, ask=None))
        turns.append(turn)
        # The environment may take its time, and the event loop is others' too.
        said = await asyncio.to_thread(dialogue.after, turn.completion_ids)
        if said is None or dialogue.tokens == most:
            break
        context = (*context, *turn.completion_ids, *said)
    if ended is not None:
        ended()
    return _joined(request, turns)


def _joined(request: SampleRequest, turns: Sequence[Rollout]) -> Rollout:
    segments: list[tuple[int, int]] = []
    for turn in turns:
        for version, tokens in zip(turn.segment_versions, turn.segment_tokens, strict=True):
            if segments and segments[-1][0] == version:
                segments[-1] = version, segments[-1][1] + tokens
            else:
                segments.append((version, tokens))
    return Rollout(
        seed=request.seed,
        prompt_ids=list(request.prompt_ids),
        completion_ids=[token for turn in turns for token in turn.completion_ids],
        logprobs=[value for turn in turns for value in turn.logprobs],
        segment_versions=[version for version, _ in segments],
        segment_tokens=[tokens for _, tokens in segments],
        proofs=[proof for turn in turns for proof in turn.proofs],
    )
