"""Whom the worker fetches policies from: the coordinator's advice, in exchange for where it serves them itself."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from node.client.api import FOREVER
from node.errors import BadReply, Refused
from node.joining.session import RunSession
from node.protocol.messages import RelayList
from node.relay.advice import Announcer, Serving, announcement
from node.worker.complaints import WarnOnce
from node.worker.leases import REFUSED_PAUSE_SECONDS
from node.worker.policies import PolicyFeed
from shardcast import ServedState, ServerLimits
from shardcast.urls import valid_sources

REFRESH_SECONDS = 15.0


class RelayFollower:
    """Keeps the sources of `feed` current; the descriptor's relays are used until others are known, and as last resort.

    With `serving`, fetched policies are served from there, and `contents` beside them.
    """

    def __init__(
        self,
        session: RunSession,
        feed: PolicyFeed,
        *,
        serving: Serving | None,
        limits: ServerLimits,
        contents: Mapping[str, ServedState],
    ) -> None:
        self._client, self._feed = session.client, feed
        self._operators = valid_sources(session.descriptor.relays)
        self._serving, self._limits, self._contents = serving, limits, contents
        self._announcer = Announcer(session.client)
        self._warn_once = WarnOnce()

    async def follow(self) -> None:
        """Serve where that is wanted, and ask for the list of relays forever; never returns."""
        own = None if self._serving is None else await self._feed.serve(self._serving, self._limits, self._contents)
        while True:
            try:
                advice = await self._ask(own)
                others = any(url != own for url in advice.relays)
                advice = advice if others else RelayList(relays=self._operators)
                self._feed.use_relays(advice, own=own, last_resort=self._operators)
            except (Refused, BadReply) as error:
                self._warn_once.note("no list of relays", error)
            pause_s = REFRESH_SECONDS if self._feed.versions() else REFUSED_PAUSE_SECONDS
            await asyncio.sleep(max(pause_s, self._announcer.pause_seconds))

    async def _ask(self, own: str | None) -> RelayList:
        if own is None:
            return await self._client.relays(patience_seconds=FOREVER)
        said = announcement(own, self._feed.sources(), version=max(self._feed.versions(), default=None))
        return await self._announcer.announce(said)
