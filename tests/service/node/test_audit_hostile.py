"""The auditor against a server that sends what no coordinator sends: it ends, in bounded time and memory."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.run.home import create_home
from coordinator.run.service import Coordinator
from node.audit.auditor import run_audit
from node.protocol.checkpoints import Checkpoint, origin_of
from node.protocol.notes import join_note, sign_text
from node.protocol.run import EnvironmentSpec, RunSpec, run_id_of

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
RUN = run_id_of(KEY.public_key().public_bytes_raw())
SPEC = RunSpec(name="audited", environments=(EnvironmentSpec(name="arithmetic"),))
ENTRIES = 8

Bodies = dict[str, bytes]


@pytest.fixture
def genuine(tmp_path: Path) -> Bodies:
    """The run's own descriptor, and a checkpoint of eight entries that it signed."""
    home = create_home(tmp_path / "home", public_key=KEY.public_key().public_bytes_raw(), spec=SPEC)
    descriptor = Coordinator(home, key=KEY).descriptor(now=time.time())
    home.database.close()
    return {"/v1/run": descriptor, "/v1/log/checkpoint": checkpoint(ENTRIES)}


def checkpoint(size: int, *, key: Ed25519PrivateKey = KEY, run_id: str = RUN) -> bytes:
    text = Checkpoint(origin_of(run_id), size, b"\xab" * 32).text
    return join_note(text, [sign_text(text, name=origin_of(RUN), key=key)])


@contextmanager
def serving(bodies: Bodies) -> Iterator[str]:
    """An HTTP server with these bodies at these paths."""

    async def answer(request: web.Request) -> web.StreamResponse:
        body = bodies.get(request.path)
        return web.Response(status=404) if body is None else web.Response(body=body)

    ready, stop, addresses = threading.Event(), threading.Event(), list[tuple[str, int]]()

    async def serve() -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        addresses.extend(runner.addresses)
        ready.set()
        await asyncio.to_thread(stop.wait)
        await runner.cleanup()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(120)
        yield f"http://127.0.0.1:{addresses[0][1]}"
    finally:
        stop.set()
        thread.join()


@pytest.fixture
def audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[Bodies], dict]:
    def audit(bodies: Bodies) -> dict:
        settings = {"run_id": RUN, "sample": None, "all_": True, "seed": None, "state_dir": tmp_path / "auditor"}
        with serving(bodies) as url:
            code = asyncio.run(run_audit(url, as_json=True, **settings))
        report = json.loads(capsys.readouterr().out)
        assert report["exit_code"] == code
        return report

    return audit


def error_of(report: dict) -> tuple[int, str | None]:
    return report["exit_code"], (report["error"] or {}).get("code")


@pytest.mark.parametrize(
    "page",
    [b"", b"{}", b"{}\n{}", b"\n" * 9, b"{}\n" * 1001, b"x" * (2 * 1024 * 1024) + b"\n"],
    ids=["nothing", "no end", "cut off", "too many", "far too many", "entry too long"],
)
def test_hostile_pages_of_the_log_end_the_audit(page: bytes, genuine: Bodies, audit: Callable[[Bodies], dict]) -> None:
    """Fewer, more or larger entries than asked for: the audit neither loops nor fills the memory."""
    assert error_of(audit(genuine | {"/v1/log/entries": page})) == (2, "bad_reply")


@pytest.mark.parametrize("page", [b"\n", b"{}\n{}\n{}\n"])
def test_entries_in_small_pages_are_progress_but_not_the_signed_log(
    page: bytes, genuine: Bodies, audit: Callable[[Bodies], dict]
) -> None:
    report = audit(genuine | {"/v1/log/entries": page})
    if page == b"\n":
        assert [problem["code"] for problem in report["problems"]] == ["root_mismatch"]
    else:  # three, three, and then three where two are asked for
        assert error_of(report) == (2, "bad_reply")


def test_an_endless_page_is_cut_off(
    genuine: Bodies, audit: Callable[[Bodies], dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.audit.auditor.MAX_PAGE_BYTES", 64 * 1024)
    assert error_of(audit(genuine | {"/v1/log/entries": b"x" * 10_000_000})) == (2, "oversized")


def test_a_log_too_long_to_audit_is_not_begun(genuine: Bodies, audit: Callable[[Bodies], dict]) -> None:
    assert error_of(audit(genuine | {"/v1/log/checkpoint": checkpoint(2**53 - 1)})) == (2, "log_too_large")


def test_attack_a_log_of_more_bytes_than_are_kept_ends_the_audit(
    genuine: Bodies, audit: Callable[[Bodies], dict], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Four million entries of a MiB each would be 4 TiB: in memory once, and now on the disk."""
    monkeypatch.setattr("node.audit.leaves.MAX_LOG_BYTES", 64 * 1024)
    page = (b"x" * 32 * 1024 + b"\n") * 2
    assert error_of(audit(genuine | {"/v1/log/entries": page})) == (2, "log_too_large")
    assert list((tmp_path / "auditor").iterdir()) == [], "nothing of it is left"


OTHER = Ed25519PrivateKey.from_private_bytes(bytes(32))


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (checkpoint(8, key=OTHER), "wrong_signer"),
        (checkpoint(8, run_id="cd" * 32), "wrong_run"),
        (checkpoint(8)[:-1], "malformed"),
        (b"", "malformed"),
        (b"x" * 100_000, "oversized"),
    ],
    ids=["another key", "another run", "cut off", "empty", "oversized"],
)
def test_a_checkpoint_that_the_run_did_not_sign_is_no_evidence(
    body: bytes, code: str, genuine: Bodies, audit: Callable[[Bodies], dict]
) -> None:
    """Whoever stands between could otherwise make an auditor convict an honest operator."""
    report = audit(genuine | {"/v1/log/checkpoint": body})
    assert error_of(report) == (2, code)
    assert report["problems"] == []


def test_a_proof_that_is_no_proof_ends_the_audit(
    genuine: Bodies, audit: Callable[[Bodies], dict], tmp_path: Path
) -> None:
    """With a checkpoint remembered, the consistency proof is asked for first."""
    (tmp_path / "auditor").mkdir()
    (tmp_path / "auditor" / f"{RUN}.checkpoint").write_bytes(checkpoint(5))
    for proof in (b"{}", b'{"hashes":["zz"]}', b'{"hashes":[' + b'"",' * 100 + b"]}", b"[" * 50_000):
        assert error_of(audit(genuine | {"/v1/log/consistency": proof})) == (2, "malformed")
