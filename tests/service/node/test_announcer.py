"""Announcements that the coordinator refuses: the relay needs its sources all the same, and must not ask for ever."""

from __future__ import annotations

from aiohttp import web
from prepared_replies import refusal, serving

from node.protocol.messages import RelayAnnouncement, RelayList
from node.relay.advice import Announcer
from shardcast.wire import encode

SAID = RelayAnnouncement(url="http://192.0.2.1:8701")
ADVICE = RelayList(relays=("http://192.0.2.2:8701",))


async def test_a_relay_for_which_the_list_has_no_room_is_advised_all_the_same() -> None:
    """It was not told of a source for as long as strangers kept the list full, and asked again all the while."""
    asked: list[str] = []
    full, wait = True, "40"

    async def coordinator(request: web.Request) -> web.Response:
        asked.append(request.method)
        if request.method == "POST" and full:
            return refusal(429, "too_many_requests", headers={"Retry-After": wait})
        return web.Response(body=encode(ADVICE), content_type="application/json")

    async with serving(coordinator) as client:
        announcer = Announcer(client)
        assert await announcer.announce(SAID) == ADVICE
        assert asked == ["POST", "GET"]
        assert 40 <= announcer.pause_seconds <= 60
        pauses = []
        for _ in range(8):
            await announcer.announce(SAID)
            pauses.append(announcer.pause_seconds)
        assert max(pauses) > 120, "each refusal makes it ask less often"
        assert len(set(pauses)) == len(pauses), "relays that were refused together do not come again together"
        wait = "999"
        for _ in range(8):
            await announcer.announce(SAID)
            assert announcer.pause_seconds <= 300, "the spread lets a hostile coordinator keep no relay out for longer"
        full = False
        assert await announcer.announce(SAID) == ADVICE
        assert announcer.pause_seconds == 0.0
