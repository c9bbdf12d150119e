"""The object store's side of blobs: what is read is checked, and an offer is good for exactly one file.

What would break for whom: an operator whose store loses or mixes up evidence would convict the wrong node; a node that
could put other bytes under another's lease would have it punished; a URL in a log lets its reader upload.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import aiohttp
import pytest
from object_store import BUCKET, SECRET_KEY, Store, object_store
from yarl import URL

from coordinator.errors import BadConfiguration, CorruptRead, DamagedBlob, StorageFault, StoreAway
from coordinator.storage import s3_blobs
from coordinator.storage.blobs import Upload
from coordinator.storage.open_blobs import open_blobs
from coordinator.storage.s3_blobs import S3Blobs
from shardcast.wire import digest

LEASE, OTHER_LEASE = "ab" * 32, "cd" * 32
BODY = b"the body of a submission"


@pytest.fixture(scope="module")
def module_store() -> Iterator[Store]:
    with object_store() as store:
        yield store


@pytest.fixture
def store(module_store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    for name, value in module_store.environment.items():
        monkeypatch.setenv(name, value)
    module_store.fault, module_store.strict = lambda _method, _key: None, True
    module_store.calls.clear()
    return module_store


@pytest.fixture
def blobs(store: Store) -> S3Blobs:
    return S3Blobs(store.url)


def upload_of(body: bytes, *, lease: str = LEASE) -> Upload:
    return Upload(lease, digest(body), hashlib.sha256(body).hexdigest(), len(body))


def headers_of(body: bytes) -> dict[str, str]:
    checksum = base64.b64encode(hashlib.sha256(body).digest()).decode()
    return {"x-amz-checksum-sha256": checksum, "x-amz-sdk-checksum-algorithm": "SHA256"}


async def put(url: str, body: bytes, headers: dict[str, str]) -> int:
    async with (
        aiohttp.ClientSession(skip_auto_headers=("Content-Type",)) as session,
        session.put(URL(url, encoded=True), data=body, headers=headers) as answer,
    ):
        return answer.status


def test_a_blob_is_kept_under_its_digest_and_checked_when_it_is_read(
    store: Store, blobs: S3Blobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = blobs.put(b"evidence")
    assert blobs.put_many([b"another", b"evidence"]) == [digest(b"another"), name]
    assert blobs.put(b"evidence") == name == digest(b"evidence")
    assert blobs.get(name, max_bytes=8) == b"evidence"
    with pytest.raises(StorageFault, match="more than 7 bytes"):
        blobs.get(name, max_bytes=7)
    store.replace(f"blobs/{name}", b"evidencf")
    with pytest.raises(CorruptRead, match="damaged"):
        blobs.get(name, max_bytes=8)
    monkeypatch.setattr(s3_blobs, "CORRUPT_SECONDS", 0.0)
    with pytest.raises(DamagedBlob, match=f"{name} is damaged"):
        blobs.get(name, max_bytes=8)
    blobs.put(b"evidence")
    assert blobs.get(name, max_bytes=8) == b"evidence"


def test_one_corrupted_read_is_read_again_and_nobody_hears_of_it(store: Store, blobs: S3Blobs) -> None:
    name = blobs.put(b"evidence")
    faults = ["corrupt"]
    store.fault = lambda method, _key: faults.pop() if method == "GET" and faults else None
    assert blobs.get(name, max_bytes=8) == b"evidence"
    assert [call.method for call in store.calls] == ["PUT", "GET", "GET"]


def test_what_is_not_there_is_not_taken_for_a_store_that_is_away(blobs: S3Blobs) -> None:
    """A verifier waits for a store that is away; for evidence that is gone it would wait for ever."""
    with pytest.raises(StorageFault, match="no such object"):
        blobs.get("0" * 64, max_bytes=8)
    assert blobs.open_stream("0" * 64) is None
    with pytest.raises(StorageFault):
        blobs.keep(upload_of(b"never uploaded"), digest(b"never uploaded"))
    blobs.discard(upload_of(b"never uploaded"))
    blobs.remove("0" * 64)


@pytest.mark.parametrize("name", ["../../etc/passwd", "", "A" * 64, "0" * 63, "0" * 64 + "\n"])
def test_a_blobs_name_cannot_leave_the_prefix(blobs: S3Blobs, name: str) -> None:
    with pytest.raises(StorageFault, match="not a blob's name"):
        blobs.get(name, max_bytes=8)


def test_a_blob_is_read_piece_by_piece(blobs: S3Blobs) -> None:
    reading = blobs.open_stream(blobs.put(b"x" * 1000))
    assert reading is not None
    pieces = []
    while piece := reading.read(300):
        pieces.append(len(piece))
    reading.close()
    assert (reading.size_bytes, pieces) == (1000, [300, 300, 300, 100])


@pytest.mark.parametrize("fault", ["away", "cut"])
def test_a_store_that_is_away_raises_what_every_process_waits_for(store: Store, blobs: S3Blobs, fault: str) -> None:
    name = blobs.put(b"evidence")
    store.fault = lambda _method, _key: fault
    started = time.monotonic()
    with pytest.raises(StoreAway) as away:
        blobs.get(name, max_bytes=8)
    assert isinstance(away.value, OSError)
    assert time.monotonic() - started < 60
    store.fault = lambda _method, _key: None
    assert blobs.get(name, max_bytes=8) == b"evidence"


def test_an_offer_signs_the_length_and_the_checksum(blobs: S3Blobs) -> None:
    """Where a store would take anything under a lease's key, a node could fill it, and swap what was judged."""
    parts = urlsplit(blobs.offer(upload_of(BODY), seconds=300))
    query = parse_qs(parts.query)
    assert set(query["X-Amz-SignedHeaders"][0].split(";")) == {
        "content-length",
        "host",
        "x-amz-checksum-sha256",
        "x-amz-sdk-checksum-algorithm",
    }
    assert query["X-Amz-Algorithm"] == ["AWS4-HMAC-SHA256"]
    assert query["X-Amz-Expires"] == ["300"]
    assert parts.path == f"/{BUCKET}/run/uploads/{LEASE}/{hashlib.sha256(BODY).hexdigest()}"


async def test_what_was_offered_is_taken_and_can_be_repeated(store: Store, blobs: S3Blobs) -> None:
    upload = upload_of(BODY)
    assert not blobs.holds(upload)
    url = blobs.offer(upload, seconds=300)
    assert [await put(url, BODY, headers_of(BODY)) for _ in range(2)] == [200, 200]
    assert blobs.holds(upload)
    assert blobs.fetch(upload) == BODY
    blobs.keep(upload, digest(BODY))
    blobs.discard(upload)
    assert blobs.get(digest(BODY), max_bytes=100) == BODY
    assert store.keys("uploads/") == []


LIES = {
    "other bytes": (BODY[::-1], headers_of(BODY), 400),
    "other bytes and their checksum": (BODY[::-1], headers_of(BODY[::-1]), 403),
    "more bytes": (BODY + b"!", headers_of(BODY), 403),
    "fewer bytes": (BODY[:-1], headers_of(BODY), 403),
    "no checksum": (BODY, {}, 403),
    "readable by everybody": (BODY, headers_of(BODY) | {"x-amz-acl": "public-read"}, 403),
    "another object's content": (BODY, headers_of(BODY) | {"x-amz-copy-source": f"/{BUCKET}/run/blobs/x"}, 403),
}


@pytest.mark.parametrize("lie", LIES)
async def test_attack_an_offer_is_used_for_something_else(store: Store, blobs: S3Blobs, lie: str) -> None:
    body, headers, status = LIES[lie]
    assert await put(blobs.offer(upload_of(BODY), seconds=300), body, headers) == status
    assert store.keys("uploads/") == []


async def test_attack_an_offer_is_used_for_another_lease(store: Store, blobs: S3Blobs) -> None:
    url = blobs.offer(upload_of(BODY), seconds=300)
    assert await put(url.replace(LEASE, OTHER_LEASE), BODY, headers_of(BODY)) == 403
    assert await put(url.replace(f"uploads/{LEASE}", "blobs"), BODY, headers_of(BODY)) == 403


async def test_attack_an_offer_is_used_when_it_is_over(store: Store, blobs: S3Blobs) -> None:
    url = blobs.offer(upload_of(BODY), seconds=1)
    await asyncio.sleep(2.1)
    assert await put(url, BODY, headers_of(BODY)) == 403


async def test_a_store_that_compares_nothing_is_noticed_and_nobody_is_blamed(store: Store, blobs: S3Blobs) -> None:
    """moto alone is such a store: it takes any bytes with any checksum, or without one."""
    store.strict = False
    upload = upload_of(BODY)
    url = blobs.offer(upload, seconds=300)
    assert await put(url, BODY[::-1], headers_of(BODY)) == 200
    assert blobs.holds(upload), "it believes the checksum"
    with pytest.raises(CorruptRead, match="other bytes"):
        blobs.fetch(upload)
    assert await put(url, BODY, {}) == 200
    with pytest.raises(StoreAway, match="keeps no SHA-256"):
        blobs.holds(upload)
    blobs.discard(upload)


@pytest.mark.parametrize(
    "url", ["s3://", "s3://UPPER/x", "s3://b", "s3://bucket/../x", "s3://bucket/a b", "http://h/b"]
)
def test_a_url_that_names_no_bucket_is_refused_in_one_sentence(url: str) -> None:
    with pytest.raises(BadConfiguration, match="--blobs must be s3://BUCKET"):
        open_blobs(url, None)


def test_settings_that_cannot_work_are_found_before_a_run_begins(store: Store) -> None:
    with pytest.raises(BadConfiguration, match="does not let this process write to s3://no-such-bucket/run"):
        S3Blobs("s3://no-such-bucket/run").begin(b"spec")


def test_missing_credentials_are_found_before_a_run_begins(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(BadConfiguration, match="NoCredentialsError"):
        S3Blobs(store.url).begin(b"spec")


def test_a_missing_extra_ends_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.storage.open_blobs.find_spec", lambda _name: None)
    with pytest.raises(BadConfiguration, match=r"pip install -e '.*\[s3\]'"):
        open_blobs("s3://bucket/run", None)


@pytest.mark.system
def test_a_run_with_a_folder_imports_no_boto3() -> None:
    """It costs every start half a second, and is not installed on most machines."""
    code = (
        "import sys, coordinator.cli, coordinator.app, coordinator.verifier.daemon\n"
        "sys.exit(any(name in sys.modules for name in ('boto3', 'botocore')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


def test_neither_the_credentials_nor_an_offer_come_into_a_log_or_an_error(
    store: Store, blobs: S3Blobs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    url = blobs.offer(upload_of(BODY), seconds=300)
    store.fault = lambda _method, _key: "away"
    with pytest.raises(StoreAway) as away:
        blobs.holds(upload_of(BODY))
    signature = parse_qs(urlsplit(url).query)["X-Amz-Signature"][0]
    said = caplog.text + str(away.value) + repr(away.value.__cause__)
    assert signature not in said
    assert SECRET_KEY not in said
