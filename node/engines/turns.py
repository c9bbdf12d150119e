"""Completions of several turns, for engines that draw one turn at a time.

A turn is a request of its own: over the whole dialogue so far, from the position where the previous turn ended. So an
engine needs no knowledge of environments, its batch never waits for one, and proof chunks start anew at each turn.
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
    on_finished: Callable[[], None] | None = None,
) -> list[Rollout]:
    """Draw one rollout per request, in order, turn by turn; `on_finished` as for `Engine.generate`.

    Raises what `draw` and the environments raise, after cancelling the other requests.
    """
    tasks = [
        asyncio.create_task(_converse(request, draw, eos_ids=eos_ids, sampling=sampling, on_finished=on_finished))
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
    on_finished: Callable[[], None] | None,
) -> Rollout:
    dialogue, turns, context = Dialogue(sampling, eos_ids, request.ask), list[Rollout](), request.prompt_ids
    max_tokens = request.cap(sampling)
    while True:
        position = dialogue.tokens
        turn = await draw(
            replace(request, prompt_ids=context, position=position, max_tokens=max_tokens - position, ask=None)
        )
        turns.append(turn)
        # In a thread: the environment may block, and the event loop is shared.
        reply = await asyncio.to_thread(dialogue.after, turn.completion_ids)
        if reply is None or dialogue.tokens == max_tokens:
            break
        context = (*context, *turn.completion_ids, *reply)
    if on_finished is not None:
        on_finished()
    return _merge_turns(request, turns)


def _merge_turns(request: SampleRequest, turns: Sequence[Rollout]) -> Rollout:
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
