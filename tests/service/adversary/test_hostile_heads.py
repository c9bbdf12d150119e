"""Lies about which version is the newest, and about what it is: rollback, freeze, forgery and two histories."""

from __future__ import annotations

import asyncio
import time

import pytest
from aiohttp import web
from broadcast_scene import (
    KEY,
    PUBLIC,
    RUN_ID,
    Between,
    Scene,
    Shows,
    changed,
    fetched,
    head_of,
    row,
    shown,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from waiting import eventually

from shardcast import FraudProof, Limits, check_fraud_proof, wire
from shardcast.envelope import seal
from shardcast.errors import BadSignature, Equivocation, Malformed, Stale
from shardcast.manifest import MANIFEST_DOMAIN, seal_manifest
from shardcast.trust import load_seen


class ForgesManifest(Between):
    async def manifest(self, request: web.Request) -> web.StreamResponse:
        forged = seal_manifest(self.scene.signed(2).manifest, Ed25519PrivateKey.generate())
        return web.Response(body=forged.envelope)


class SwapsManifest(Between):
    """Sends another manifest that the publisher did sign."""

    async def manifest(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self.scene.signed(1).envelope)


class BigManifest(Between):
    async def manifest(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=bytes(2**20))


@pytest.mark.parametrize(
    ("kind", "code"),
    [(ForgesManifest, "wrong_signer"), (SwapsManifest, "wrong_manifest"), (BigManifest, "oversized")],
)
async def test_a_lying_manifest_is_refused_and_another_source_asked(
    scene: Scene, kind: type[Between], code: str
) -> None:
    payload = await scene.publish(2)
    limits = Limits(max_manifest_bytes=100_000)
    bad, _ = await scene.hostile(kind)
    alone = scene.client(bad, name="alone", limits=limits)
    with pytest.raises((Malformed, BadSignature)) as caught:
        await fetched(alone)
    assert caught.value.code == code
    assert row(alone.sources_status(), bad)["code"] == code
    both = scene.client(bad, await scene.honest(), limits=limits)
    assert await fetched(both) == payload


async def test_a_manifest_of_the_old_schema_is_refused(scene: Scene) -> None:
    """The first schema listed a delta's chunks as the version's own: to take one for the other is to load a delta."""
    signed = scene.signed(1)
    payload = wire.encode(signed.manifest)
    old = seal(payload, domain=MANIFEST_DOMAIN, version=1, key=KEY)
    url, hostile = await scene.hostile(Shows)
    hostile.shown = {f"/v1/manifests/{signed.digest}": old}
    client = scene.client(url)
    with pytest.raises(Malformed, match="version"):
        await fetched(client)
    assert list((scene.folder / "client" / "manifests").iterdir()) == []


# -- heads


async def test_rollback_is_refused_even_after_a_restart(scene: Scene) -> None:
    old = head_of(scene.signed(1))
    await scene.publish(2)
    client = scene.client(await scene.honest())
    assert (await client.wait_head(timeout_s=60)) is not None
    await client.close()
    again = scene.client(await scene.showing(old))
    with pytest.raises(Stale) as caught:
        await again.wait_head(timeout_s=1.0)
    assert caught.value.code == "rollback"


async def test_rollback_of_a_relay_is_not_passed_on(scene: Scene) -> None:
    old = head_of(scene.signed(1))
    await scene.publish(2)
    url, relay = await scene.relay(await scene.honest())
    client = scene.client(url)
    assert (await client.wait_head(timeout_s=60)) is not None
    bad, hostile = await scene.hostile(Shows)
    hostile.shown = {"/v1/head": old}
    relay.set_upstreams([bad])
    await eventually(lambda: hostile.asked["head"] > 1)
    head = await scene.client(url, name="other").wait_head(timeout_s=60)
    assert head is not None
    assert head.version == 2


async def test_freeze_by_an_expired_head_shows(scene: Scene) -> None:
    now = int(time.time())
    client = scene.client(await scene.showing(head_of(scene.signed(1), issued_at=now - 200, expires_at=now - 100)))
    with pytest.raises(Stale) as caught:
        await client.wait_head(timeout_s=1.0)
    assert caught.value.code == "expired"
    assert load_seen(scene.folder / "client" / "state.json") is None


async def test_freeze_by_one_relay_is_overruled_by_another(scene: Scene) -> None:
    old = head_of(scene.signed(1))
    await scene.publish(2)
    client = scene.client(await scene.showing(old), await scene.honest())
    head = await client.wait_head(after=1, timeout_s=60)
    assert head is not None
    assert head.version == 2


async def test_the_head_of_another_run_is_refused(scene: Scene) -> None:
    client = scene.client(await scene.showing(head_of(scene.signed(1), run_id="00" * 32)))
    with pytest.raises(Malformed) as caught:
        await client.wait_head(timeout_s=1.0)
    assert caught.value.code == "wrong_run"


async def test_garbage_and_oversized_heads_are_refused(scene: Scene) -> None:
    async def assert_refused(envelope: bytes) -> None:
        client = scene.client(await scene.showing(envelope), name=f"client{len(envelope)}")
        with pytest.raises((Malformed, BadSignature)):
            await client.wait_head(timeout_s=1.0)

    envelopes = (b"", b"VSW1", b"\0" * 300, bytes(10_000_000), head_of(scene.signed(1))[:-1])
    await asyncio.gather(*map(assert_refused, envelopes))


# -- two histories


async def test_equivocation_stops_the_client_and_leaves_the_proof(scene: Scene) -> None:
    """A publisher that shows two histories is convicted by its own signatures."""
    client = scene.client(await scene.honest())
    assert (await client.wait_head(timeout_s=60)) is not None
    client.set_sources([await scene.showing(head_of(scene.signed(1), manifest_digest="cd" * 32))])
    with pytest.raises(Equivocation):
        await client.wait_head(timeout_s=10)
    proof_path = scene.folder / "client" / "equivocation-1.json"
    proof = wire.decode(FraudProof, proof_path.read_bytes(), max_bytes=100_000)
    assert check_fraud_proof(proof, run_id=RUN_ID, publisher_key=PUBLIC) == 1


async def test_equivocation_towards_a_relay_is_kept_and_not_passed_on(scene: Scene) -> None:
    url, relay = await scene.relay(await scene.honest())
    client = scene.client(url)
    first = await client.wait_head(timeout_s=60)
    relay.set_upstreams([await scene.showing(head_of(scene.signed(1), manifest_digest="cd" * 32))])
    await eventually((scene.folder / "relay" / "equivocation-1.json").exists)
    second = await scene.client(url, name="other").wait_head(timeout_s=60)
    assert first is not None
    assert second is not None
    assert second.manifest_digest == first.manifest_digest


async def test_equivocation_about_nothing_but_the_deltas_is_equivocation(scene: Scene) -> None:
    """The weights are the same, but what a log entry names by digest is not."""
    await scene.publish(2)
    client = scene.client(scene.url)
    await fetched(client)
    other = changed(scene.signed(2), deltas=())
    assert other.manifest.result_digest == scene.signed(2).manifest.result_digest
    url, hostile = await scene.hostile(Shows)
    hostile.shown = shown(other)
    client.set_sources([url])
    with pytest.raises(Equivocation):
        await client.wait_head(after=2, timeout_s=10)
    proof = wire.decode(FraudProof, (scene.folder / "client" / "equivocation-2.json").read_bytes(), max_bytes=1_000_000)
    assert check_fraud_proof(proof, run_id=RUN_ID, publisher_key=PUBLIC) == 2
