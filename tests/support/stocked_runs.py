"""A run that has been going for a while, served over HTTP from this process."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from actors import spec_of
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from swarm import serve

from benchmarks.dashboards.stocked import Stock, stock
from coordinator.run.descriptors import Contacts
from coordinator.run.home import Home, create_home
from coordinator.run.service import Coordinator
from node.protocol.run import RunSpec, StandingSpec

SPEC = spec_of(steps=1000, groups_per_step=16, standing=StandingSpec())


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


@dataclass(frozen=True)
class Run:
    """A run with its pages at `url`; `submissions` are the ids of what was sent, the oldest first."""

    home: Home
    coordinator: Coordinator
    url: str
    submissions: list[str]

    def get(self, path: str, **headers: str) -> Reply:
        request = urllib.request.Request(self.url + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return Reply(answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return Reply(error.code, {k.lower(): v for k, v in error.headers.items()}, error.read())


@contextmanager
def run_with(
    folder: Path, what: Stock | None, *, database_url: str | None = None, spec: RunSpec = SPEC
) -> Iterator[Run]:
    key = Ed25519PrivateKey.generate()
    public_key = key.public_key().public_bytes_raw()
    home = create_home(folder, public_key=public_key, spec=spec, database_url=database_url)
    found = [] if what is None else stock(home, what, key=key, now=time.time())
    contacts = Contacts(endpoints=("http://192.0.2.1:8700",))
    coordinator = Coordinator(home, key=key, relay_urls=("http://192.0.2.1:8710",), contacts=contacts)
    with serve(coordinator) as url:
        yield Run(home, coordinator, url, found)
    home.database.close()
