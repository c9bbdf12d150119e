"""An object store for tests: moto's server as a process of its own, behind a gate that is as strict as S3 is.

moto 5.2 stores what it is sent: it compares neither a presigned URL's signature nor its expiry, and keeps the checksum
that a request claims without looking at the bytes. The gate does what Amazon documents for these (Signature Version 4
of presigned requests, HeadersNotSigned, BadDigest), so that an attack fails here for the reason for which it fails
there. It is our reading of that documentation, with botocore's own canonical form. It also notes who sent what, and
fails in the ways that a test wants.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
import http.client
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

import boto3
import pytest
from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.loaders import JSONFileLoader
from ports import free_port

ACCESS_KEY, SECRET_KEY, REGION, BUCKET = "AKIATEST", "a secret of the store", "us-east-1", "swarmproof-test"
START_SECONDS = 120.0


@dataclass(frozen=True)
class Call:
    """One request that reached the store."""

    method: str
    key: str
    agent: str
    presigned: bool
    body_bytes: int
    status: int


Fault = Callable[[str, str], str | None]
"""For a method and a key "away" (503), "silent" (done, and the connection closed unanswered), "cut" (half the answer),
"corrupt" (one bit of the answer is wrong), or None."""


@dataclass
class Store:
    """A bucket that is being served."""

    endpoint: str
    gate: ThreadingHTTPServer
    moto_port: int
    calls: list[Call] = field(default_factory=list)
    fault: Fault = lambda _method, _key: None
    strict: bool = True

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/run"

    @property
    def environment(self) -> dict[str, str]:
        """What a process that uses the store needs."""
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @functools.cached_property
    def client(self):
        """An operator's client, straight to moto."""
        return boto3.session.Session().client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.moto_port}",
            region_name=REGION,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        )

    def keys(self, prefix: str = "") -> list[str]:
        """The names of all objects below `prefix`."""
        listed = self.client.list_objects_v2(Bucket=BUCKET, Prefix=f"run/{prefix}")
        return [one["Key"].removeprefix("run/") for one in listed.get("Contents", [])]

    def replace(self, key: str, data: bytes) -> None:
        """What only whoever owns the store can do."""
        self.client.put_object(Bucket=BUCKET, Key=f"run/{key}", Body=data)


_read_description = functools.cache(JSONFileLoader().load_file)
"""Of S3 and of its endpoints: to read them takes more than half of the time of making a client."""


@contextmanager
def object_store() -> Iterator[Store]:
    """An empty bucket."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JSONFileLoader, "load_file", lambda _, path: _read_description(path))
        with _serving() as store:
            yield store


@contextmanager
def _serving() -> Iterator[Store]:
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    moto = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    gate = ThreadingHTTPServer(("127.0.0.1", 0), _Gate)
    gate.daemon_threads = True
    store = gate.store = Store(f"http://127.0.0.1:{gate.server_address[1]}", gate, port)
    thread = threading.Thread(target=gate.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        _wait_for(port)
        with closing(store.client) as client:
            client.create_bucket(Bucket=BUCKET)
            yield store
    finally:
        gate.shutdown()
        thread.join()
        gate.server_close()
        moto.terminate()
        moto.wait()


class _Gate(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _handle(self) -> None:
        store: Store = self.server.store
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        key = parts.path.removeprefix(f"/{BUCKET}/run/")
        presigned = "X-Amz-Signature" in parts.query
        fault = store.fault(self.command, key)
        refusal = refused(self, body) if presigned and store.strict else None
        status, headers, answer = 503, [], b""
        if refusal is not None:
            status, answer = refusal[0], f"<Error><Code>{refusal[1]}</Code></Error>".encode()
        elif fault != "away":
            status, headers, answer = self._forward(store.moto_port, body)
        if fault == "corrupt" and status == 200 and answer:
            answer = bytes([answer[0] ^ 1]) + answer[1:]
        agent = self.headers.get("User-Agent", "")
        store.calls.append(Call(self.command, key, agent, presigned, len(body), status))
        if fault == "silent":
            self.close_connection = True
            return
        self._answer(status, headers, answer, cut=fault == "cut")

    do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = _handle  # noqa: N815  (http.server asks for these names)

    def _forward(self, port: int, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            sent = {name: value for name, value in self.headers.items() if name.lower() not in {"host", "expect"}}
            connection.request(self.command, self.path, body=body, headers=sent)
            with connection.getresponse() as response:
                return response.status, response.getheaders(), response.read()
        finally:
            connection.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], answer: bytes, *, cut: bool) -> None:
        self.send_response(status)
        kept = [(name, value) for name, value in headers if name.lower() not in _HOP_BY_HOP]
        if self.command != "HEAD":
            kept = [(name, value) for name, value in kept if name.lower() != "content-length"]
            kept.append(("Content-Length", str(len(answer))))
        for name, value in kept:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer[: len(answer) // 2] if cut else answer)
        self.close_connection = self.close_connection or cut

    def log_message(self, *_: object) -> None:
        pass


_HOP_BY_HOP = frozenset({"connection", "transfer-encoding", "server", "date", "keep-alive"})


def refused(request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, str] | None:
    """Status and code with which S3 refuses a presigned request, None if it takes it."""
    parts = urlsplit(request.path)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    signed = query["X-Amz-SignedHeaders"].split(";")
    begun = datetime.strptime(query["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    if time.time() > begun.timestamp() + int(query["X-Amz-Expires"]):
        return 403, "AccessDenied"
    names = {name.lower() for name in request.headers}
    if {name for name in names if name.startswith("x-amz-")} - set(signed):
        return 403, "AccessDenied"  # HeadersNotSigned
    if not hmac.compare_digest(_signature(request, query, signed), query["X-Amz-Signature"]):
        return 403, "SignatureDoesNotMatch"
    checksum = request.headers.get("x-amz-checksum-sha256")
    if checksum is not None and base64.b64encode(hashlib.sha256(body).digest()).decode() != checksum:
        return 400, "BadDigest"
    return None


def _signature(request: BaseHTTPRequestHandler, query: dict[str, str], signed: list[str]) -> str:
    unsigned = "&".join(part for part in urlsplit(request.path).query.split("&") if "X-Amz-Signature" not in part)
    url = f"http://{request.headers['Host']}{urlsplit(request.path).path}?{unsigned}"
    again = AWSRequest(method=request.command, url=url)
    for name in signed:
        again.headers[name] = request.headers.get(name, "")
    again.context["timestamp"] = query["X-Amz-Date"]
    auth = S3SigV4QueryAuth(Credentials(ACCESS_KEY, SECRET_KEY), "s3", REGION)
    return auth.signature(auth.string_to_sign(again, auth.canonical_request(again)), again)


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
