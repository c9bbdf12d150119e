"""SHARDCAST: signed policy weights through a tree of relays that nobody trusts.

    origin = Origin("store", key, run_id)                    # publisher
    server = OriginServer(origin); port = server.start()
    server.publish("weights.bin", version=1)

    relay = Relay([upstream_url], store_dir="relay", run_id=run_id, publisher_key=public_key)
    port = await relay.start()

    async with Client(run_id, public_key, [relay_url], "state") as client:
        head = await client.wait_head(after=0)
        path = await client.fetch(head)                      # verified, whole

Goals: every byte is checked against a signature before anyone sees it; a version flows through the tree
while it is still arriving; slow, silent and lying relays cost time only. Non-goals: secrecy (weights are
public to whoever asks) and choosing whom to fetch from (the caller lists the sources).
"""

from shardcast.client import Client
from shardcast.content import ContentClient, publish_content
from shardcast.fetch.download import DownloadLimits
from shardcast.fetch.fetcher import Fetched, Report, VersionProgress, Watch, no_watch
from shardcast.fetch.source import SourceLimits
from shardcast.fetch.transport import TransportLimits
from shardcast.manifest import Delta, Head, Limits, Manifest, Payload, SignedManifest
from shardcast.origin import DeltaSettings, Origin, OriginServer
from shardcast.relay import Relay
from shardcast.serve.listener import Listener, ServerLimits, listen
from shardcast.serve.server import make_app
from shardcast.serve.state import ServedState
from shardcast.trust import FraudProof, TrustedState, check_fraud_proof
from shardcast.urls import normalise_url, valid_sources

__all__ = [
    "Client",
    "ContentClient",
    "Delta",
    "DeltaSettings",
    "DownloadLimits",
    "Fetched",
    "FraudProof",
    "Head",
    "Limits",
    "Listener",
    "Manifest",
    "Origin",
    "OriginServer",
    "Payload",
    "Relay",
    "Report",
    "ServedState",
    "ServerLimits",
    "SignedManifest",
    "SourceLimits",
    "TransportLimits",
    "TrustedState",
    "VersionProgress",
    "Watch",
    "check_fraud_proof",
    "listen",
    "make_app",
    "no_watch",
    "normalise_url",
    "publish_content",
    "valid_sources",
]
