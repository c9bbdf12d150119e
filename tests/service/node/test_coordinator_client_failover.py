"""What a node does when one of a run's coordinators is away, slow, or not the run's: its work must go on elsewhere.

Every server here is real, and so is its absence: a port where nobody listens.
"""

from __future__ import annotations

import asyncio
import logging
import time

import pytest
from aiohttp import web
from ports import free_port
from prepared_replies import (
    DESCRIPTOR,
    LEASE,
    NODE_KEY,
    OTHER_KEY,
    QUICK,
    REGISTRATION,
    RUN_ID,
    RUN_KEY,
    answers,
    refusal,
    sealed_descriptor,
    sealed_receipt,
    served,
    serving,
)
from waiting import eventually

from coordinator.lab.processes.layout import free_ports
from node.client.api import CoordinatorClient
from node.client.http import Backoff, ExchangeLimits
from node.errors import BadReply, Refused, Unavailable
from node.protocol.messages import LeaseReply, LeaseRequest, RelayList, SubmissionReply
from node.protocol.reasons import Reason
from node.protocol.requests import open_claim, read_authorization
from shardcast.wire import digest, encode

AT_ONCE = 30.0
NEVER = Backoff(first_seconds=1e3, max_seconds=1e3)
"""Whoever pauses with this backoff does not finish its test."""
RELAYS = encode(RelayList(relays=("http://192.0.2.1:1",)))


def away():
    return web.Response(status=503)


def client_of(*urls, **changes):
    return CoordinatorClient(urls, **({"run_id": RUN_ID, "key": NODE_KEY, "backoff": QUICK} | changes))


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("node.")]


async def test_a_node_whose_coordinator_is_gone_goes_on_with_the_next_at_once(caplog):
    gone, handler = f"http://127.0.0.1:{free_port()}", answers(b"{}")
    async with served(handler) as url, client_of(gone, url, backoff=NEVER) as client:
        started = time.monotonic()
        await client.register(REGISTRATION, patience_seconds=0)
        assert time.monotonic() - started < AT_ONCE
        assert (client.url, client.urls, client.away) == (url, (url, gone), False)
    assert lines(caplog) == [f"the coordinator {gone} is away (connection refused); failing over to {url}"]


async def test_the_one_that_works_is_kept_and_the_first_is_asked_again_when_it_fails(caplog):
    first, second = answers(away, b"{}"), answers(b"{}", b"{}", b"{}", away)
    async with serving(first, second, backoff=NEVER) as client:
        a, b = client.urls
        for _ in range(3):
            await client.register(REGISTRATION)
        assert (len(first.seen), len(second.seen)) == (1, 3), "no flapping"
        await client.register(REGISTRATION)
        assert (len(first.seen), len(second.seen), client.url) == (2, 4, a)
    assert [line.rpartition(" ")[2] for line in lines(caplog)] == [b, a]


async def test_every_attempt_is_signed_anew_or_the_next_coordinator_would_refuse_it_as_a_replay():
    first, second = answers(away), answers(b"{}")
    async with serving(first, second) as client:
        await client.register(REGISTRATION)
    assert first.seen[0].headers["Authorization"] != second.seen[0].headers["Authorization"]


async def test_a_limit_is_not_evaded_at_another_coordinator():
    first = answers(lambda: refusal(429, "too_many_requests"), lambda: web.Response(status=429), b"{}")
    second = answers(b"{}")
    async with serving(first, second) as client:
        await client.register(REGISTRATION)
    assert (len(first.seen), len(second.seen)) == (3, 0)


async def test_an_outage_of_all_is_one_line_and_so_is_its_end(caplog):
    caplog.set_level(logging.INFO)
    first, second = answers(away), answers(*[away] * 5, b"{}")
    async with serving(first, second) as client:
        a, b = client.urls
        await client.register(REGISTRATION)
        assert client.url == b
    said = lines(caplog)
    assert len(said) == 3
    assert said[0].startswith(f"the coordinator {a} is away")
    assert "retrying until one answers" in said[1]
    assert a in said[1]
    assert b in said[1]
    assert said[2].startswith(f"the coordinator {b} is back after")


async def test_a_pause_comes_only_after_all_have_failed_in_a_row(monkeypatch):
    pauses = []

    def delay(_backoff, failures):
        pauses.append(failures)
        return 0.2

    monkeypatch.setattr(Backoff, "delay", delay)
    first, second, third = answers(away), answers(away), answers(away, b"{}")
    async with serving(first, second, third) as client:
        started = time.monotonic()
        await client.register(REGISTRATION)
        assert time.monotonic() - started >= 0.2
    assert pauses == [1], "one pause, not one for each of them"
    assert len(third.seen) == 2


async def test_attack_a_coordinator_that_asks_for_a_long_pause_cannot_have_it_for_the_others():
    first = answers(lambda: refusal(503, "busy", headers={"Retry-After": "300"}))
    second = answers(away, b"{}")
    async with serving(first, second) as client:
        await asyncio.wait_for(client.register(REGISTRATION), 60)


async def test_patience_ends_with_a_sentence_that_names_them_all():
    urls = [f"http://127.0.0.1:{port}" for port in free_ports(2)]
    async with client_of(*urls) as client:
        with pytest.raises(Unavailable) as caught:
            await client.relays(patience_seconds=0.2)
        assert client.away
    assert all(url in str(caught.value) for url in urls)


async def test_attack_slow_loris_costs_its_deadline_once_and_not_with_every_call():
    asked = []

    async def never(_request):
        asked.append(1)
        await asyncio.sleep(60)

    handler = answers(b"{}")
    async with serving(never, handler, limits=ExchangeLimits(reply_seconds=2.0)) as client:
        started = time.monotonic()
        await client.register(REGISTRATION)
        assert time.monotonic() - started >= 2.0
        for _ in range(5):
            await client.register(REGISTRATION)
    assert (len(asked), len(handler.seen)) == (1, 6)


async def test_many_calls_that_fail_together_are_one_turn_and_one_line(caplog):
    arrived, together = [], asyncio.Event()

    async def fail_together(_request):
        arrived.append(1)
        if len(arrived) == 8:
            together.set()
        await together.wait()
        return away()

    handler = answers(RELAYS)
    async with serving(fail_together, handler, backoff=NEVER) as client:
        await asyncio.wait_for(asyncio.gather(*(client.relays() for _ in range(8))), 60)
    assert len(handler.seen) == 8
    assert len(lines(caplog)) == 1


# -- what is not this run's


async def test_a_captive_portal_is_left_for_a_coordinator_that_proves_itself():
    portal, other_run = answers(b"<html>Log in</html>"), answers(sealed_descriptor(key=OTHER_KEY))
    missing, redirect = answers(lambda: web.Response(status=404)), answers(lambda: web.Response(status=302))
    async with serving(portal, other_run, missing, redirect, answers(sealed_descriptor()), backoff=NEVER) as client:
        good = client.urls[-1]
        assert await client.descriptor() == DESCRIPTOR
        assert client.run_key == RUN_KEY.public_key().public_bytes_raw()
        assert client.descriptor_envelope == sealed_descriptor()
        assert client.url == good
        assert not client.away


async def test_where_all_are_another_runs_it_is_said_and_not_tried_for_ever():
    wrong = answers(sealed_descriptor(key=OTHER_KEY))
    async with serving(wrong, wrong, backoff=NEVER) as client:
        with pytest.raises(BadReply, match="--run-id"):
            await client.descriptor(patience_seconds=float("inf"))
    assert len(wrong.seen) == 2


async def test_a_liar_beside_one_that_is_away_does_not_end_the_wait_for_it():
    honest = answers(away, away, sealed_descriptor())
    async with serving(answers(b"junk"), honest) as client:
        assert await client.descriptor() == DESCRIPTOR


async def test_a_signed_request_with_a_bad_answer_may_have_had_its_effect_and_is_not_repeated_elsewhere():
    reply = LeaseReply(leases=(), head_version=1, retry_after_seconds=0.5)
    liar, honest = answers(b"junk"), answers(encode(reply))
    ask = LeaseRequest(held_versions=(), slots=1, instance="0f" * 16)
    async with serving(liar, honest) as client:
        with pytest.raises(BadReply):
            await client.lease(ask)
        assert (len(liar.seen), len(honest.seen)) == (1, 0)
        assert await client.lease(ask) == reply, "but the next call goes to another"
    assert (len(liar.seen), len(honest.seen)) == (1, 1)


@pytest.mark.parametrize(
    "foreign",
    [
        lambda: refusal(401, Reason.WRONG_RUN),
        lambda: web.Response(status=403, text="<html>Forbidden</html>"),
        lambda: refusal(401, Reason.CLOCK_SKEW, server_time=1),
    ],
)
async def test_a_refusal_that_no_coordinator_of_this_run_gives_is_not_the_last_word(foreign):
    other, honest = answers(foreign), answers(b"{}")
    async with serving(other, honest, backoff=NEVER) as client:
        good = client.urls[-1]
        await client.register(REGISTRATION)
        assert client.url == good
    assert len(honest.seen) == 1


async def test_the_runs_own_refusal_of_a_signed_request_is_the_last_word():
    first, second = answers(lambda: refusal(409, Reason.EXPIRED_LEASE)), answers(b"{}")
    async with serving(first, second) as client:
        with pytest.raises(Refused):
            await client.return_lease("a" * 64)
    assert second.seen == []


async def test_a_receipt_that_one_coordinator_does_not_know_of_is_asked_for_at_the_others():
    unknown = answers(sealed_descriptor(), lambda: refusal(404, Reason.NOT_FOUND))
    async with serving(unknown, answers(sealed_receipt())) as client:
        first = client.url
        await client.descriptor()
        receipt, _ = await client.receipt("c" * 64, wait_seconds=0)
        assert receipt.tokens == 5
        assert client.url == first, "who does not know a submission is not away"
    async with serving(unknown, unknown) as client:
        with pytest.raises(Refused) as caught:
            await client.receipt("c" * 64, wait_seconds=0)
    assert caught.value.code == Reason.NOT_FOUND


async def test_a_refusal_is_not_waited_over_because_another_coordinator_is_away_for_good():
    unknown = answers(sealed_descriptor(), lambda: refusal(404, Reason.NOT_FOUND))
    async with served(unknown) as url, client_of(url, f"http://127.0.0.1:{free_port()}", backoff=NEVER) as client:
        await client.descriptor()
        with pytest.raises(Refused):
            await asyncio.wait_for(client.receipt("c" * 64, wait_seconds=0, patience_seconds=float("inf")), 60)


async def test_a_lone_coordinator_is_not_called_away_for_one_lost_connection_or_a_bad_answer(caplog):
    def disconnect():
        handler.seen[-1].transport.abort()
        return web.Response()

    handler = answers(disconnect, b"junk", b"junk", b"{}")
    async with serving(handler) as client:
        await client.register(REGISTRATION)
        with pytest.raises(BadReply):
            await client.relays()
        assert not client.away
    assert lines(caplog) == []


# -- uploads, clocks, lists


async def test_an_upload_whose_answer_was_lost_is_found_again_at_another_coordinator(tmp_path):
    """Both keep the same book: what the first stored, the second refuses as a duplicate, with the first's id."""
    (tmp_path / "body").write_bytes(b"x" * 100_000)
    stored = []

    async def store_and_die(request):
        await request.read()
        stored.append(digest(read_authorization(request.headers["Authorization"])))
        request.transport.abort()

    async def store(request):
        await request.read()
        if stored:
            return refusal(409, Reason.DUPLICATE_SUBMISSION, submission=stored[0])
        stored.append(digest(read_authorization(request.headers["Authorization"])))
        return web.Response(status=202, body=encode(SubmissionReply(submission=stored[0])))

    async with serving(store_and_die, store, backoff=NEVER) as client:
        with pytest.raises(Refused) as caught:
            await client.submit(LEASE, tmp_path / "body")
    assert (caught.value.code, caught.value.submission) == (Reason.DUPLICATE_SUBMISSION, stored[0])
    assert len(stored) == 1


async def test_each_coordinator_has_its_own_clock():
    ahead, seen = 4000.0, []

    def at(offset, *, until):
        async def handler(request):
            claim = open_claim(read_authorization(request.headers["Authorization"]))[1]
            seen.append(round(claim.issued_at - time.time(), -3))
            if abs(claim.issued_at - time.time() - offset) > 60:
                return refusal(401, Reason.CLOCK_SKEW, server_time=int(time.time() + offset))
            return away() if len(seen) > until else web.Response(body=b"{}")

        return handler

    async with serving(at(ahead, until=2), at(0.0, until=100)) as client:
        await client.register(REGISTRATION)
        assert abs(client.now() - time.time() - ahead) < 60
        await client.register(REGISTRATION)
        assert abs(client.now() - time.time()) < 60
    assert seen == [0.0, ahead, ahead, 0.0], "corrected once, for the one that complained"


async def test_a_new_list_ends_the_connections_of_others_only_when_nothing_is_under_way_there():
    under_way, go_on = asyncio.Event(), asyncio.Event()

    async def slow(request):
        slow.transport = request.transport
        under_way.set()
        await go_on.wait()
        return web.Response(body=RELAYS)

    handler = answers(RELAYS)
    async with served(slow) as old, served(handler) as new, client_of(old) as client:
        call = asyncio.create_task(client.relays())
        await under_way.wait()
        client.set_urls([new, "ftp://nowhere", "javascript:alert(1)"])
        assert client.urls == (new,)
        await client.relays()
        assert not slow.transport.is_closing(), "a request is under way"
        go_on.set()
        assert (await call).relays == ("http://192.0.2.1:1",)
        await client.relays()
        await eventually(slow.transport.is_closing)
        client.set_urls([])
        assert client.urls == (new,)


async def test_many_calls_at_once_end_the_connections_of_a_list_that_is_gone():
    async with served(answers(RELAYS)) as new, serving(*(answers(away) for _ in range(4)), answers(RELAYS)) as client:
        await client.relays()  # opens connections to all five
        client.set_urls([new])
        await asyncio.gather(*(client.relays() for _ in range(20)))
        assert client.urls == (new,)
