"""Hostile relays that serve another file where a dataset is asked for: nobody gets a wrong byte of it.

What would break for whom: a worker that draws its problems from a stranger's file does slots that nobody asked for,
and an auditor that reads one finds fraud where there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from aiohttp import web
from broadcast_scene import CHUNK, KEY, PUBLIC, RUN_ID, Between, Scene
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shardcast import ContentClient, Origin, OriginServer, ServedState, listen, make_app, wire
from shardcast.content import content_line, publish_content
from shardcast.errors import LocalFault, Malformed, PeerFault, ShardcastError

RIGHT = bytes(range(256)) * 4 * (CHUNK // 256)
WRONG = bytes(reversed(RIGHT))
STRANGER = Ed25519PrivateKey.from_private_bytes(b"\7" * 32)


class SwapsFiles(Between):
    """Answers what is asked of one content from another one, which is served well-formed and whole."""

    asked_for: str
    other: str
    paths: tuple[str, ...] = ("versions", "manifests", "payloads")

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path_qs
        if request.path.split("/")[4] in self.paths:
            path = path.replace(self.asked_for, self.other)
        return await self.honest(path)


class SwapsChunks(Between):
    """Passes on the right manifest, and chunks of another file under its names."""

    wrong: bytes

    async def answer(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.split("/")
        if parts[4] != "payloads":
            return await self.honest(request.path_qs)
        start = int(parts[6]) * CHUNK
        return web.Response(body=self.wrong[start : start + CHUNK])


class Contents:
    """An origin that serves two files beside its versions."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.folder = scene, scene.folder
        self.right, self.wrong = wire.digest(RIGHT), wire.digest(WRONG)
        self.origins = {wire.digest(data): self._published(data) for data in (RIGHT, WRONG)}
        self.server = OriginServer(scene.origin, contents=self.origins)
        self.url = f"http://127.0.0.1:{self.server.start()}"

    def _published(self, data: bytes) -> Origin:
        path = self.folder / f"{wire.digest(data)[:8]}.file"
        path.write_bytes(data)
        return publish_content(path, digest=wire.digest(data), folder=self.folder / "published", key=KEY, run_id=RUN_ID)

    def client(self, *sources: str, name: str = "client") -> ContentClient:
        return ContentClient(
            self.right,
            size_bytes=len(RIGHT),
            run_id=RUN_ID,
            publisher_key=PUBLIC,
            sources=sources,
            folder=self.folder / name,
        )

    @contextmanager
    def in_place(self, data: bytes, *, key: Ed25519PrivateKey) -> Iterator[str]:
        """Serve `data`, signed by `key`, as the right file; yields the server's URL."""
        path = self.folder / "changed"
        path.write_bytes(data)
        changed = Origin(self.folder / "changed-origin", key, content_line(RUN_ID, self.right))
        changed.publish(path, version=0)
        server = OriginServer(self.scene.origin, contents={self.right: changed})
        try:
            yield f"http://127.0.0.1:{server.start()}"
        finally:
            server.stop()
            changed.close()

    def close(self) -> None:
        self.server.stop()
        for origin in self.origins.values():
            origin.close()


@pytest.fixture
def contents(scene: Scene) -> Any:
    made = Contents(scene)
    yield made
    made.close()


async def test_a_file_arrives_through_a_relay_of_it_and_is_held_without_the_network(contents: Contents) -> None:
    """A relay serves it while and after it arrives; a restarted worker asks nobody again."""
    async with contents.client(contents.url, name="relay") as relay:
        served = ServedState(store=contents.scene.origin.store, role="relay", run_id=RUN_ID, head=lambda: None)
        served.open()
        listener = await listen(make_app(served, contents={contents.right: relay.offer()}))
        await relay.fetch(timeout_s=60)
        async with contents.client(f"http://127.0.0.1:{listener.port}") as client:
            assert (await client.fetch(timeout_s=60)).read_bytes() == RIGHT
        await listener.stop()
    async with contents.client() as client:
        assert (await client.fetch(timeout_s=5)).read_bytes() == RIGHT


async def test_relays_that_serve_another_dataset_are_refused_and_the_right_one_comes_from_the_last(
    contents: Contents,
) -> None:
    swaps = []
    for paths in (("versions", "manifests", "payloads"), ("versions",)):
        url, node = await contents.scene.hostile(SwapsFiles)
        node.upstream, node.asked_for, node.other, node.paths = contents.url, contents.right, contents.wrong, paths
        swaps.append(url)
    url, node = await contents.scene.hostile(SwapsChunks)
    node.upstream, node.wrong = contents.url, WRONG
    async with contents.client(*swaps, url, contents.url) as client:
        assert (await client.fetch(timeout_s=60)).read_bytes() == RIGHT


async def test_relays_that_serve_another_dataset_alone_give_nothing(contents: Contents) -> None:
    url, node = await contents.scene.hostile(SwapsFiles)
    node.upstream, node.asked_for, node.other = contents.url, contents.right, contents.wrong
    async with contents.client(url) as client:
        with pytest.raises(ShardcastError) as refused:
            await client.fetch(timeout_s=5)
    assert refused.value.code == "wrong_run"


async def test_a_dataset_that_a_stranger_signed_is_refused(contents: Contents) -> None:
    """The stranger knows the id, and signs the right file's manifest as well as a wrong one."""
    with contents.in_place(WRONG, key=STRANGER) as url:
        async with contents.client(url) as client:
            with pytest.raises(PeerFault):
                await client.fetch(timeout_s=5)


async def test_another_file_under_the_runs_own_signature_is_refused_by_its_digest(contents: Contents) -> None:
    """The operator signs a changed dataset for the digest of the run: workers and auditors keep to the signed rules."""
    with contents.in_place(WRONG, key=KEY) as url:
        async with contents.client(url) as client:
            with pytest.raises(Malformed) as refused:
                await client.fetch(timeout_s=30)
    assert refused.value.code == "wrong_content"


async def test_a_larger_file_than_the_run_names_is_refused_before_it_is_downloaded(contents: Contents) -> None:
    """Else a manifest of the run's key could fill every worker's disk."""
    with contents.in_place(RIGHT + WRONG, key=KEY) as url:
        async with contents.client(url) as client:
            with pytest.raises(Malformed) as refused:
                await client.fetch(timeout_s=5)
    assert refused.value.code == "payload_size"


async def test_a_file_comes_from_the_parents_that_the_coordinator_plans(contents: Contents) -> None:
    """A plan names a node's parents as stripes alone: without them it would ask nobody but the operator."""
    async with contents.client() as client:
        client.set_sources((), stripes=((contents.url,), (contents.url,)))
        assert (await client.fetch(timeout_s=60)).read_bytes() == RIGHT


async def test_a_damaged_file_on_disk_is_fetched_again(contents: Contents) -> None:
    async with contents.client(contents.url) as client:
        path = await client.fetch(timeout_s=60)
        path.chmod(0o600)
        path.write_bytes(WRONG)
        assert (await client.fetch(timeout_s=60)).read_bytes() == RIGHT


async def test_a_file_that_is_removed_from_the_disk_is_fetched_again(contents: Contents) -> None:
    async with contents.client(contents.url) as client:
        (await client.fetch(timeout_s=60)).unlink()
        assert (await client.fetch(timeout_s=60)).read_bytes() == RIGHT


def test_a_content_is_logged_by_its_name(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """All of a trainer's datasets were "published version 0", as its first policy is."""
    path = scene.folder / "file"
    path.write_bytes(RIGHT)
    published = {"digest": wire.digest(RIGHT), "folder": scene.folder / "published", "key": KEY, "run_id": RUN_ID}
    with caplog.at_level("INFO"):
        publish_content(path, name="dataset sums", **published).close()
    assert "published dataset sums as" in caplog.text


async def test_no_version_or_head_of_the_run_is_to_be_had_under_a_contents_path(contents: Contents, http: Any) -> None:
    for path in ("head", "status", f"versions/{1}"):
        async with http.get(f"{contents.url}/content/{contents.right}/v1/{path}") as reply:
            assert reply.status == 404
    async with http.get(f"{contents.url}/content/{'0' * 64}/v1/versions/0") as reply:
        assert reply.status == 404


def test_only_the_named_file_is_published(scene: Scene) -> None:
    path = scene.folder / "other"
    path.write_bytes(WRONG)
    with pytest.raises(LocalFault) as refused:
        publish_content(path, digest=wire.digest(RIGHT), folder=scene.folder / "published", key=KEY, run_id=RUN_ID)
    assert refused.value.code == "wrong_content"
