"""A witness through its door: what it signs once, what it refuses, and what a log of two histories gets of it."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from witnessing import SmallLog, witnessing

from node.client.witness import SizeConflict, WitnessAddress, WitnessClient
from node.errors import BadReply, Refused, StateError
from node.protocol.checkpoints import (
    MAX_ADD_BYTES,
    MAX_SUBMITTED_HASHES,
    AddCheckpoint,
    Checkpoint,
    open_witnessed,
    seal_checkpoint,
)
from node.protocol.merkle import EMPTY_ROOT
from node.protocol.notes import KeyKind, VerifierKey, join_note, parse_note, sign_text
from node.witness.state import WitnessState
from shardcast.errors import LocalFault

KEY, OTHER = Ed25519PrivateKey.from_private_bytes(bytes(range(32))), Ed25519PrivateKey.from_private_bytes(b"\7" * 32)
LOG = SmallLog([b"leaf %d" % index for index in range(40)], key=KEY)
FORK = SmallLog([b"leaf %d" % index for index in range(9)] + [b"other"] * 31, key=KEY)
STRANGER = SmallLog([b"x"] * 8, key=OTHER)


@pytest.fixture
def witness(tmp_path: Path) -> Iterator[WitnessAddress]:
    with witnessing(tmp_path / "witness", [LOG.verifier]) as address:
        yield address


def post(address: WitnessAddress, body: bytes) -> tuple[int, str, bytes]:
    with closing(http.client.HTTPConnection(urlsplit(address.url).netloc, timeout=120)) as connection:
        connection.request("POST", "/add-checkpoint", body)
        reply = connection.getresponse()
        return reply.status, reply.headers["Content-Type"].partition(";")[0], reply.read()


def add(log: SmallLog, old: int, size: int, *, proof: tuple[bytes, ...] | None = None) -> bytes:
    return AddCheckpoint(old, log.proof(old, size) if proof is None else proof, log.checkpoint(size)).encode()


def signed(address: WitnessAddress, log: SmallLog, size: int, line: bytes) -> int:
    """Return when the witness signed `size` entries of the log."""
    opened = open_witnessed(log.checkpoint(size) + line, log=log.verifier, witnesses=[address.key])
    return opened.witnesses[address.key]


def test_a_log_that_grows_is_signed_and_its_newest_note_is_served(witness: WitnessAddress) -> None:
    times = []
    for old, size in ((0, 5), (5, 5), (5, 8), (8, 23), (23, 40)):
        status, kind, line = post(witness, add(LOG, old, size))
        assert (status, kind) == (200, "text/plain")
        times.append(signed(witness, LOG, size, line))
    assert times == sorted(times)
    newest = asyncio.run(_newest(witness, LOG.verifier.name))
    opened = open_witnessed(newest, log=LOG.verifier, witnesses=[witness.key])
    assert (opened.checkpoint.size, list(opened.witnesses)) == (40, [witness.key])
    assert asyncio.run(_newest(witness, STRANGER.verifier.name)) is None


async def _newest(address: WitnessAddress, origin: str) -> bytes | None:
    async with WitnessClient(address.url) as client:
        return await client.newest(origin)


def test_a_request_from_another_witnesss_own_tests_is_signed(tmp_path: Path) -> None:
    """Of filippo.io/torchwood, litewitness: a log of Sigsum's form, which names its key by a digest."""
    origin = "sigsum.org/v1/tree/985ea163f5af026723561354f51f2ebcdcf2af809ce254ccfb64aa9aadd80f90"
    key = bytes.fromhex("52c05edad1bf5feffa81354faae59a655d9a9a1a793ed2f62c39c26c0be2aecd")
    assert hashlib.sha256(key).hexdigest() == origin.rpartition("/")[2]
    body = f"""old 0

{origin}
1
KgAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=

— {origin} 7BKT0gOfNZ1J0So9unY3BZtm2YkPIoNYM/dce0Z2avJDs8dxN6ts9bOSwwrVrbjm6P9K3ZxpK6jJngOG6YvGGzV/lwo=
"""
    with witnessing(tmp_path / "witness", [VerifierKey(origin, KeyKind.LOG, key)]) as address:
        status, _, line = post(address, body.encode())
        assert status == 200
        note = body.partition("\n\n")[2].encode() + line
        assert address.key in parse_note(note).verify([address.key])
        assert post(address, body.encode()) == (409, "text/x.tlog.size", b"1\n")


def test_what_is_not_shown_to_extend_the_log_is_not_signed(witness: WitnessAddress, tmp_path: Path) -> None:
    """The statuses are those of c2sp.org/tlog-witness, by which a log knows what to do."""
    note = parse_note(LOG.checkpoint(23))
    forged = join_note(note.text.replace(b"23", b"24"), note.signatures)
    unsigned = join_note(note.text, [sign_text(note.text, name="somebody", key=OTHER)])
    empty = AddCheckpoint(0, (), seal_checkpoint(Checkpoint(LOG.verifier.name, 0, b"\1" * 32), key=KEY)).encode()
    assert post(witness, empty)[0] == 422
    assert post(witness, add(LOG, 0, 8, proof=(EMPTY_ROOT,)))[0] == 422
    assert post(witness, add(LOG, 8, 12)) == (409, "text/x.tlog.size", b"0\n")
    assert post(witness, add(LOG, 0, 12))[0] == 200
    for body, status in (
        (b"", 400),
        (b"old 12\n\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n" * 9, 400),
        (add(LOG, 12, 23, proof=(EMPTY_ROOT,) * (MAX_SUBMITTED_HASHES + 1)), 400),
        (b"x" * (MAX_ADD_BYTES + 1), 413),
        (add(STRANGER, 0, 8), 404),
        (AddCheckpoint(12, (), forged).encode(), 403),
        (AddCheckpoint(12, (), unsigned).encode(), 403),
        (add(LOG, 12, 8, proof=()), 400),
        (add(LOG, 5, 23), 409),
        (add(LOG, 0, 23), 409),
        (add(LOG, 12, 23, proof=LOG.proof(11, 23)), 422),
        (add(LOG, 12, 23, proof=()), 422),
        (add(FORK, 12, 12), 422),
        (add(FORK, 12, 23), 422),
        (AddCheckpoint(12, LOG.proof(12, 23), FORK.checkpoint(23)).encode(), 422),
    ):
        assert post(witness, body)[0] == status, body[:200]
    assert post(witness, add(LOG, 12, 23))[0] == 200, "none of these moved it"
    (evidence,) = (tmp_path / "witness").glob("*.forked")
    assert evidence.read_bytes() == FORK.checkpoint(12), "two roots of one size, both signed by the log"


def test_a_witness_goes_on_from_what_it_signed(tmp_path: Path) -> None:
    """It was killed, or its disk was full: a signature that it forgot would be another history's, too."""
    folder = tmp_path / "witness"
    with witnessing(folder, [LOG.verifier]) as address:
        assert post(address, add(LOG, 0, 12))[0] == 200
        with pytest.raises(LocalFault, match="in use"):
            WitnessState(folder, name="w", key=OTHER, logs=[LOG.verifier])
    with witnessing(folder, [LOG.verifier, STRANGER.verifier]) as address:
        assert post(address, add(FORK, 0, 12)) == (409, "text/x.tlog.size", b"12\n")
        assert post(address, add(LOG, 12, 13))[0] == 200
        assert post(address, add(STRANGER, 0, 3))[0] == 200
    with pytest.raises(StateError, match="another key"), witnessing(folder, [LOG.verifier], name="other"):
        pass
    (kept,) = [path for path in folder.glob("*.checkpoint") if LOG.verifier.name.encode() in path.read_bytes()]
    kept.write_bytes(kept.read_bytes().replace(b"\n13\n", b"\n12\n"))
    with pytest.raises(StateError, match="not what this witness signed"), witnessing(folder, [LOG.verifier]):
        pass


def test_nothing_is_signed_that_could_not_be_kept(witness: WitnessAddress, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise LocalFault("no space left", code="disk_full")

    with monkeypatch.context() as during:
        during.setattr("node.witness.state.write_atomically", full)
        assert post(witness, add(LOG, 0, 12))[0] == 503
    assert post(witness, add(FORK, 0, 12))[0] == 200


def test_of_two_histories_at_once_one_is_signed(witness: WitnessAddress) -> None:
    """Both extend what was signed: only the first may be."""
    assert post(witness, add(LOG, 0, 9))[0] == 200
    start = threading.Barrier(8)

    def race(index: int) -> int:
        start.wait()
        return post(witness, add((LOG, FORK)[index % 2], 9, 20 + index))[0]

    with ThreadPoolExecutor(8) as pool:
        statuses = sorted(pool.map(race, range(8)))
    assert statuses == [200, *[409] * 7]


def test_a_clock_that_went_back_dates_no_signature_before_another(tmp_path: Path) -> None:
    clock = iter((1000.0, 400.0, 1001.0))
    state = WitnessState(tmp_path, name="w", key=OTHER, logs=[LOG.verifier], clock=lambda: next(clock))
    address = WitnessAddress(state.verifier, None)
    sizes = ((0, 3), (3, 4), (4, 9))
    assert [signed(address, LOG, size, state.add(add(LOG, old, size))) for old, size in sizes] == [1000, 1000, 1001]
    state.close()


def test_an_address_that_asks_too_much_waits(tmp_path: Path) -> None:
    with witnessing(tmp_path / "witness", [LOG.verifier], requests_per_minute=3) as address:
        assert [post(address, b"")[0] for _ in range(5)] == [400, 400, 400, 429, 429]


@pytest.mark.parametrize(
    ("answer", "raised"),
    [
        (lambda: (409, b"7\n"), SizeConflict),
        (lambda: (409, b"07\n"), BadReply),
        (lambda: (409, b"9" * 70_000), BadReply),
        (lambda: (200, b"yes\n"), BadReply),
        (lambda: (200, b"x" * 70_000), BadReply),
        (lambda: (302, b""), Refused),
        (lambda: (403, b"\x1b[31mno"), Refused),
    ],
)
def test_what_a_witness_answers_is_believed_as_little(
    answer: Callable[[], tuple[int, bytes]], raised: type[Exception]
) -> None:
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            status, body = answer()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()

    async def ask() -> None:
        async with WitnessClient(f"http://127.0.0.1:{server.server_port}") as client:
            await client.add(AddCheckpoint(0, (), LOG.checkpoint(3)))

    try:
        with pytest.raises(raised) as failed:
            asyncio.run(ask())
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert "\x1b" not in str(failed.value)
