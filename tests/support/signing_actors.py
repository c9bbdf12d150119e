"""Actors whose policies have signed manifests, and whose submissions have blobs: what `swarmproof check` looks for."""

from __future__ import annotations

from actors import Actors
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from swarm import RUN_KEY

from coordinator.storage import training
from shardcast.manifest import DEFAULT_LIMITS, Manifest, Payload, seal_manifest
from shardcast.wire import digest


def signed_policy(run_id: str, version: int, *, key: Ed25519PrivateKey) -> training.PolicyRecord:
    """A policy of one byte with a manifest that the run's key signed."""
    manifest = Manifest(
        run_id=run_id,
        version=version,
        previous=None,
        issued_at=1,
        expires_at=2,
        result_digest=digest(str(version).encode()),
        full=Payload(chunk_bytes=DEFAULT_LIMITS.min_chunk_bytes, payload_bytes=1, chunk_digests=bytes(32)),
        deltas=(),
    )
    signed = seal_manifest(manifest, key)
    return training.PolicyRecord(
        version=version,
        manifest_digest=signed.digest,
        result_digest=manifest.result_digest,
        manifest=signed.envelope,
    )


class SigningActors(Actors):
    """Of a run whose key is `swarm.RUN_KEY`."""

    def publish(self, version: int) -> None:
        policy = signed_policy(self.home.run_id, version, key=RUN_KEY)
        with self.home.database.write() as connection:
            training.record_policy(connection, policy, now=self.now)
            training.finish_step(connection, version - 1, stats={}, now=self.now)

    def submit(self, node: str, lease_id: str, *, draw: float | None = None) -> str:
        name = super().submit(node, lease_id, draw=draw)
        assert self.home.blobs.put(str(self.files).encode()) == name
        return name
