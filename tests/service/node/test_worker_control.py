"""What a worker tells of itself, and no more of it than fits."""

from __future__ import annotations

import logging

import msgspec
import pytest

from node.client.endpoints import Endpoints
from node.protocol.control import MAX_LOG_BYTES, MAX_LOG_LINE, MAX_LOG_LINES, ControlReply, LogsBody, StatusBody
from node.worker.control import LogRing, report
from shardcast.wire import decode, encode


def logged(ring: LogRing, *messages: str) -> None:
    logger = logging.getLogger("node.test")
    logger.setLevel(logging.INFO)
    with ring.attached():
        for message in messages:
            logger.info("%s", message)


def readable(lines: tuple[str, ...]) -> tuple[str, ...]:
    """The lines as an asker gets them; raises Malformed for what the wire does not allow."""
    reply = ControlReply(
        run_id="0" * 64, request="0" * 64, reason=None, detail="", answered_at=0, body=LogsBody(lines=lines)
    )
    found = decode(ControlReply, encode(reply), max_bytes=2**20)
    assert isinstance(found.body, LogsBody)
    return found.body.lines


def test_the_newest_lines_in_their_order() -> None:
    ring = LogRing()
    logged(ring, *(f"line {index}" for index in range(MAX_LOG_LINES + 5)))
    assert [line.split(" ", 2)[2] for line in ring.last(2)] == ["line 203", "line 204"]
    assert len(readable(ring.last(MAX_LOG_LINES))) == MAX_LOG_LINES


def test_what_would_drive_a_terminal_or_forge_a_line_is_made_harmless() -> None:
    ring = LogRing()
    logged(ring, "a\x1b[2Jb\nERROR forged\r\u202e\ud800")
    (line,) = readable(ring.last(1))
    assert line.endswith("INFO a?[2Jb ERROR forged ??")


def test_lines_that_are_long_in_bytes() -> None:
    ring = LogRing()
    logged(ring, *(["\U00020000" * 1000] * MAX_LOG_LINES))
    lines = readable(ring.last(MAX_LOG_LINES))
    assert {len(line) for line in lines} == {MAX_LOG_LINE}
    assert MAX_LOG_BYTES - 4 * MAX_LOG_LINE < sum(len(line.encode()) for line in lines) <= MAX_LOG_BYTES


def test_an_error_is_named_without_its_stack() -> None:
    ring, logger = LogRing(), logging.getLogger("node.test")
    with ring.attached():
        try:
            1 / 0  # noqa: B018
        except ZeroDivisionError:
            logger.exception("it failed")
    (line,) = ring.last(5)
    assert line.endswith("it failed (ZeroDivisionError: division by zero)")


def test_nothing_is_kept_before_and_after() -> None:
    ring = LogRing()
    logged(ring)
    logging.getLogger("node.test").warning("unseen")
    assert ring.last(5) == ()


STATUS = {
    "run_id": "0" * 64,
    "coordinator": "http://10.1.2.3:8700",
    "coordinator_away": False,
    "doing": "generating\x1b[2J",
    "dismissed": "banned: at http://10.1.2.3:8700",
    "run_is_over": False,
    "draining": True,
    "version": None,
    "held_versions": list(range(100)),
    "slots": [{"version": 1, "slot": 2, "seconds": 3.0}],
    "tokens_per_s": 2,
    "reasons": {"wrong_token": 2, "None": 1},
    "endpoints": ["http://10.1.2.3:8700"],
    "descriptor_version": 7,
    "head_version": -1,
    "network": {"addresses": ["/ip4/10.1.2.3/tcp/1/p2p/x"], "neighbours": ["a", "b"]},
    "started_at": 1000.0,
    "updated_at": 1060.5,
    **dict.fromkeys(("undelivered", "tokens", "switches", "engine_restarts", "admitted", "rejected"), 1),
    **dict.fromkeys(("indeterminate", "lost", "expired", "admitted_tokens"), 1),
}


def test_a_status_leaves_out_where_things_are() -> None:
    said = encode(report(STATUS, engine="torch"))
    found = decode(StatusBody, said, max_bytes=2**16)
    assert b"10.1.2.3" not in said
    assert (found.version, found.slots, found.neighbours, found.seconds) == (-1, 1, 2, 60)
    assert (found.dismissed, found.draining, found.reasons) == (True, True, {"wrong_token": 2})
    assert len(found.held_versions) == 64


@pytest.mark.parametrize("field", StatusBody.__struct_fields__)
def test_no_field_of_a_status_is_free_text_of_any_length(field: str) -> None:
    long = msgspec.structs.replace(report(STATUS, engine="torch"), **{field: "x" * 1000})
    with pytest.raises(Exception, match="StatusBody"):
        decode(StatusBody, encode(long), max_bytes=2**16)


def test_a_coordinator_that_an_invite_names_is_asked_next_and_the_others_after_it() -> None:
    endpoints = Endpoints(["http://a", "http://b", "http://c"])
    endpoints.note_failure("http://a")
    endpoints.prefer("http://c")
    assert endpoints.urls == ("http://c", "http://b", "http://a")
    endpoints.prefer("http://elsewhere")
    assert endpoints.current == "http://c"
