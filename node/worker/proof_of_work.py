"""Solving the puzzle of a run that asks new keys for a proof of work (docs/protocol.md, 3.7)."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Final

from msgspec import UNSET, UnsetType

from node.client.api import FOREVER, CoordinatorClient
from node.errors import BadReply
from node.protocol.membership import MembershipSpec, ProofOfWork, find_work, work_seed

log = logging.getLogger(__name__)

MOST_SECONDS: Final = 600.0
"""After which a puzzle is given up for the next one, whatever end the coordinator names."""

ATTEMPTS_AT_ONCE: Final = 2**16
"""About 0.06 s in a thread: so soon does a worker that is stopped end."""

ATTEMPTS_PER_SECOND: Final = 1_200_000
"""On one core of an AMD EPYC; only for what people are told beforehand."""


SOLVING: Final = "solving a proof of work"
"""How `PuzzleSolver.doing` begins."""


class PuzzleSolver:
    """Solves the puzzles of one run for one key, on one core, for no higher price than the run's rules allow.

    `doing` says what it does now, for the worker's status; "" while it does nothing.
    """

    def __init__(self, client: CoordinatorClient, *, node: str, rules: MembershipSpec | UnsetType) -> None:
        self.doing = ""
        self._client, self._node, self._rules = client, node, rules

    async def solve(self) -> ProofOfWork | UnsetType:
        """Return a proof of work of the current price; UNSET if its time ended before. Raises Refused and BadReply."""
        puzzle = await self._client.puzzle(patience_seconds=FOREVER)
        if isinstance(self._rules, UnsetType) or self._rules.policy != "work" or puzzle.bits > self._rules.most_bits:
            raise BadReply(
                f"{self._client.url} asks for a proof of work of {puzzle.bits} bits against the run's rules."
            )
        usual = 2**puzzle.bits / ATTEMPTS_PER_SECOND
        self.doing = f"{SOLVING} of {puzzle.bits} bits, to join the run"
        log.info("Proof of work of %d bits to join the run: about %.0f s on one core.", puzzle.bits, usual)
        started = time.monotonic()
        give_up_at = started + min(MOST_SECONDS, puzzle.expires_at - self._client.now())
        seed = work_seed(run_id=self._client.run_id, node=self._node, salt=puzzle.salt)
        counter = secrets.randbelow(2**52)  # not again those that were tried before the puzzle was given up
        try:
            while time.monotonic() < give_up_at:
                found = await asyncio.to_thread(
                    find_work, seed, bits=puzzle.bits, start=counter, attempts=ATTEMPTS_AT_ONCE
                )
                if found is not None:
                    log.info("Proof of work of %d bits found after %.1f s.", puzzle.bits, time.monotonic() - started)
                    return ProofOfWork(salt=puzzle.salt, counter=found)
                counter += ATTEMPTS_AT_ONCE
            log.info("No proof of work of %d bits in its time; asking for the next puzzle.", puzzle.bits)
            return UNSET
        finally:
            self.doing = ""
