"""Completions of several pieces, for engines that draw one piece at a time.

A piece, which is a turn or a part of one (`node.protocol.turns.Dialogue`), is a request of its own: over the whole
dialogue so far, from the position where the previous one ended. So an engine needs no knowledge of environments but of
their stop strings, its batch never waits for one, and proof chunks start anew at each piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace

from node.engines.base import SampleRequest
from node.protocol.run import SamplingSpec
from node.protocol.submission import Rollout
from node.protocol.turns import Dialogue

DrawPiece = Callable[[SampleRequest], Awaitable[Rollout]]
"""Draws one piece of one completion."""


async def converse(
    requests: Sequence[SampleRequest],
    draw: DrawPiece,
    *,
    eos_ids: Collection[int],
    sampling: SamplingSpec,
    on_finished: Callable[[], None] | None = None,
) -> list[Rollout]:
    """Draw one rollout per request, in order, piece by piece; `on_finished` as for `Engine.generate`.

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
    draw: DrawPiece,
    *,
    eos_ids: Collection[int],
    sampling: SamplingSpec,
    on_finished: Callable[[], None] | None,
) -> Rollout:
    dialogue = Dialogue(sampling, eos_ids, request.ask, request.rules)
    pieces, context, max_tokens = list[Rollout](), request.prompt_ids, request.cap(sampling)
    rules = replace(request.rules, thinking=None)
    while True:
        room = min(dialogue.room, max_tokens - dialogue.tokens)
        piece = await draw(
            replace(request, prompt_ids=context, position=dialogue.tokens, max_tokens=room, ask=None, rules=rules)
        )
        pieces.append(piece)
        # In a thread: the environment may block, and the event loop is shared.
        reply = await asyncio.to_thread(dialogue.after, piece.completion_ids)
        if reply is None or dialogue.tokens == max_tokens:
            break
        context = (*context, *piece.completion_ids, *reply)
    if on_finished is not None:
        on_finished()
    return merge_pieces(request, pieces)


def merge_pieces(request: SampleRequest, pieces: Sequence[Rollout]) -> Rollout:
    """Return the rollout of `request` that `pieces` are, one after the other."""
    segments: list[tuple[int, int]] = []
    for piece in pieces:
        for version, tokens in zip(piece.segment_versions, piece.segment_tokens, strict=True):
            if segments and segments[-1][0] == version:
                segments[-1] = version, segments[-1][1] + tokens
            else:
                segments.append((version, tokens))
    return Rollout(
        seed=request.seed,
        prompt_ids=list(request.prompt_ids),
        completion_ids=[token for piece in pieces for token in piece.completion_ids],
        logprobs=[value for piece in pieces for value in piece.logprobs],
        segment_versions=[version for version, _ in segments],
        segment_tokens=[tokens for _, tokens in segments],
        proofs=[proof for piece in pieces for proof in piece.proofs],
    )
