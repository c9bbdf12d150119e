"""Whoever may read a log must not be able to act for anybody by what it says.

A whole swarm's logs are searched in tests/system/test_observed.py; here is what an object store's client would
write, at the level of detail at which an operator looks for a fault.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from object_store import ACCESS_KEY, SECRET_KEY, Store, object_store

TO_A_STORE = """
import logging, sys, urllib.request
from hashlib import sha256
from coordinator.storage.blobs import Upload
from coordinator.storage.s3_blobs import S3Blobs
from node.runtime.logs import set_up_logging
from shardcast.wire import digest

if sys.argv[1] == "ours":
    set_up_logging(level="debug", log_format=sys.argv[2])
else:
    logging.basicConfig(level=logging.DEBUG)
blobs = S3Blobs(sys.argv[3])
assert blobs.get(blobs.put(b"evidence"), max_bytes=100) == b"evidence"
url = blobs.offer(Upload("ab" * 32, digest(b"x"), sha256(b"x").hexdigest(), 1), seconds=60)
logging.getLogger("node.careless").warning("the store at %s does not answer", url)
logging.getLogger("coordinator.careless").debug("headers: %s", {"Authorization": "Swarmproof " + "A" * 100})
"""


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with object_store() as store:
        yield store


def log_of(store: Store, whose: str, log_format: str = "text") -> str:
    found = subprocess.run(
        [sys.executable, "-c", TO_A_STORE, whose, log_format, store.url],
        env={**os.environ, **store.environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return found.stderr


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_log_in_every_detail_lets_nobody_write_to_the_object_store(store: Store, log_format: str) -> None:
    log = log_of(store, "ours", log_format)
    assert "the store at http" in log, "what it says otherwise is there"
    assert "X-Amz-Signature=***" in log
    for secret in (SECRET_KEY, ACCESS_KEY, "A" * 100):
        assert secret not in log


def test_the_store_s_client_would_have_written_it(store: Store) -> None:
    """So that the test above can fail."""
    log = log_of(store, "plain")
    assert ACCESS_KEY in log
    assert "A" * 100 in log
