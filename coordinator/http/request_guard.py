"""HTTP/1 requests, read strictly: llhttp parses what a guard in front of it has let through.

llhttp (httptools) takes a fifth of h11's time, but accepts requests that a proxy in front may read otherwise, bounds
neither heads nor the framing of chunks, and reads on past the end of a message. So a head is held against a grammar
before llhttp sees it, its framing is checked before its body is read, and the next request waits for the response.
What a request is for is not judged here.
"""

from __future__ import annotations

import contextlib
import math
import re
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from coordinator.http.errors import BODY_RECEIVED, error_body
from node.protocol.reasons import Reason, Refusal

MAX_FIELDS = 100

MAX_LENGTH_DIGITS = 20
"""Of Content-Length, as llhttp's numbers have: it takes any number of zeros before."""

FREE_FRAMING_BYTES, BODY_BYTES_PER_FRAMING_BYTE = 320, 64
"""How much of a chunked message need not be its body: 64 chunks of one byte, on average one for 448 bytes, and with
them extensions and trailers. A tiny chunk costs as much as a whole one."""

MAX_FRAMING_BYTES = 32 * 1024
"""However long the body: httptools joins the pieces of a trailer, in time that grows with the square of its length."""

PIECE_BYTES = 4096
"""Parsed of a chunked message before its framing is looked at."""

MAX_AHEAD_BYTES = 512 * 1024
"""Sent before the response to the last request: each request that asks for its body has some more of them read."""

_END_OF_HEAD = re.compile(rb"\n\r?\n")  # with bare line feeds it is refused, but not waited for
_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_HEAD = re.compile(
    # A target with a fragment would lose it. A field that is folded, or ends with white space, is refused.
    rb"(%b) /[!\"$-~]* HTTP/1\.([01])(?:\r\n%b:(?:[ \t]*|[\t -~\x80-\xff]*[!-~\x80-\xff])){0,%d}\r\n\r\n"
    % (_TOKEN, _TOKEN, MAX_FIELDS)
)
_BAD_REQUEST = (
    b"HTTP/1.1 400 Bad Request\r\nx-content-type-options: nosniff\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n"
)
_RECEIVED: dict[str, dict[object, object]] = {BODY_RECEIVED: {}}


class StrictHttpProtocol(HttpToolsProtocol):
    """uvicorn's httptools protocol behind a guard, one request at a time; subclasses set `head_bytes`."""

    head_bytes: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unread = b""
        self._head: re.Match[bytes] | None = None
        self._body_left = 0.0  # infinite in chunks
        self._framing_left = 0.0

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._unread += data
        self._read()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._read()

    def _read(self) -> None:
        """Parse what has arrived, up to the end of one request whose response is not complete."""
        try:
            while self._unread and not self.transport.is_closing():
                if self._body_left:
                    self._read_body()
                elif self._is_answering():
                    if len(self._unread) > MAX_AHEAD_BYTES:
                        self._end_after_response()
                    else:
                        self.flow.pause_reading()
                    return
                elif not self._read_head():
                    return
        except HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _end_after_response(self) -> None:
        self._unread, self.cycle.keep_alive = b"", False

    def _read_head(self) -> bool:
        """Parse one head and return True, or return False if its end has not arrived."""
        unread = self._unread
        end = _END_OF_HEAD.search(unread, 0, self.head_bytes)
        if end is None:
            # The first byte tells TLS and empty lines, which may come without an end.
            if len(unread) >= self.head_bytes or unread.count(b"\n") > MAX_FIELDS + 1 or unread[0] <= 0x20:
                raise HttpParserError("the head is too long, or empty")
            return False
        self._head = _HEAD.fullmatch(unread, 0, end.end())
        if self._head is None:
            raise HttpParserError("the head is malformed")
        self._unset_keepalive_if_required()  # it was set before this request, which came with the last one, was read
        self._unread = unread[end.end() :]
        self.parser = HttpRequestParser(self)  # a trailer may have told the last one to close, or to upgrade
        with contextlib.suppress(HttpParserUpgrade):  # not taken up
            # llhttp knows some methods only, and reads the bodies of some of those otherwise.
            self.parser.feed_data(b"POST" + unread[self._head.end(1) : end.end()])
        return True

    def _read_body(self) -> None:
        size = PIECE_BYTES if self._body_left == math.inf else int(self._body_left)
        piece, self._unread = self._unread[:size], self._unread[size:]
        self._body_left -= len(piece)
        self._framing_left -= len(piece)
        try:
            self.parser.feed_data(piece)
        except HttpParserError:
            if self._body_left:
                raise
            self._end_after_response()  # where the next request begins behind chunks is not known
            if self.cycle.response_complete:
                self.transport.close()
            return
        if self._framing_left < 0:
            raise HttpParserError("the framing of the chunks is too long")

    def on_message_begin(self) -> None:
        if self._head is None:
            raise HttpParserError("a request behind chunks")
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        assert self._head is not None
        method, minor_version = self._head.groups()
        self._head = None
        names, fields = [name for name, _ in self.headers], dict(self.headers)
        hosts, framings = names.count(b"host"), names.count(b"content-length") + names.count(b"transfer-encoding")
        # llhttp leaves out the body of a request that also offers to upgrade.
        if hosts > 1 or hosts < int(minor_version) or framings > 1 or (framings and self.parser.should_upgrade()):
            raise HttpParserError("the framing is ambiguous")
        coding = fields.get(b"transfer-encoding")
        if coding is not None and (coding.lower() != b"chunked" or minor_version == b"0"):
            raise HttpParserError("the coding of the body is not supported")
        length = fields.get(b"content-length", b"0")
        if len(length) > MAX_LENGTH_DIGITS:
            raise HttpParserError("the length is too long")
        self.expect_100_continue = self.expect_100_continue and minor_version == b"1"
        super().on_headers_complete()  # begins to execute it
        self.scope["method"] = method.decode()
        self.headers = []  # of trailers, which are no part of the request
        self._body_left = math.inf if coding else int(length)
        self._framing_left = FREE_FRAMING_BYTES if coding else math.inf

    def on_body(self, body: bytes) -> None:
        earned = self._framing_left + len(body) * (1 + 1 / BODY_BYTES_PER_FRAMING_BYTE)
        self._framing_left = max(self._framing_left, min(earned, MAX_FRAMING_BYTES))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._body_left = 0
        super().on_message_complete()
        self.cycle.scope["extensions"] = _RECEIVED

    def send_400_response(self, msg: str) -> None:
        """Reply to invalid HTTP with an ErrorReply; only end the connection if what it belongs to is answered."""
        if self._body_left and self.cycle.response_complete:
            self.transport.close()
            return
        if self._is_answering():
            if self.cycle.response_started:
                self.transport.abort()
                return
            self.cycle.disconnected = True
        body = error_body(Refusal(Reason.BAD_REQUEST, msg))
        self.transport.write(_BAD_REQUEST % len(body) + body)
        self.transport.close()
