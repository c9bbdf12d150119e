"""Client of control: sign a request, send it to the node, and verify the signed reply."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.client.api import CoordinatorClient
from node.client.http import printable
from node.discovery.descriptor import DescriptorStore
from node.errors import ConfigError, NetworkDown
from node.joining.options import JoinOptions
from node.joining.session import INSTALL, offer
from node.protocol.control import Ask, Body, ControlRequest, open_reply, purpose_of, sign_control
from node.protocol.peers import Address, peer_id_of
from node.protocol.run import RunSpec
from shardcast.errors import PeerFault
from shardcast.wire import digest

if TYPE_CHECKING:
    from node.p2p import PeerNetwork

log = logging.getLogger(__name__)

ANSWER_SECONDS: Final = 110.0
LOOK_SECONDS: Final = 0.5
_LOOKING_ON: Final = frozenset({"network_down", "not_found", "unreachable"})
"""Transient codes: the network comes up, and gossip brings addresses."""


@dataclass(frozen=True, slots=True)
class ControlAnswer:
    """A reply, its request's nonce, and the seconds from the request to the last byte."""

    body: Body
    nonce: str
    seconds: float


class ControlClient:
    """Control client in a run's peer-to-peer network; `authority` is None for the run's own key."""

    def __init__(
        self, network: PeerNetwork, *, store: DescriptorStore, key: Ed25519PrivateKey, authority: bytes | None
    ) -> None:
        self._network, self._store, self._key, self._authority = network, store, key, authority

    async def ask(self, node: bytes, ask: Ask, *, address: Address | None, find_seconds: float) -> ControlAnswer:
        """Send a request to the node with this public key, retrying for `find_seconds`, and return its reply.

        Raises NetworkDown, ControlRefusal, and PeerFault for an invalid reply.
        """
        until = time.monotonic() + find_seconds
        while True:
            # Signed anew for each attempt: a request whose reply was lost may have arrived, and its nonce be used.
            request = ControlRequest(
                run_id=self._store.run_id,
                to=node.hex(),
                ask=ask,
                nonce=secrets.token_hex(16),
                issued_at=int(time.time()),
                authority=self._authority,
            )
            data = sign_control(request, key=self._key)
            try:
                reply, seconds = await self._network.request(
                    node, data, address=address, timeout_seconds=ANSWER_SECONDS
                )
            except NetworkDown as error:
                if error.code not in _LOOKING_ON or time.monotonic() >= until:
                    raise
                await asyncio.sleep(LOOK_SECONDS)
                continue
            body = open_reply(
                reply, node=node, run_id=self._store.run_id, request=digest(data), purpose=purpose_of(ask)
            )
            return ControlAnswer(body, request.nonce, seconds)

    async def spec(self, *, seconds: float) -> RunSpec:
        """Return the run's rules, from its descriptor; raises NetworkDown."""
        until = time.monotonic() + seconds
        while self._store.newest is None:
            if time.monotonic() >= until:
                raise NetworkDown("No peer has the run's descriptor.", code="no_descriptor")
            await asyncio.sleep(LOOK_SECONDS / 5)
        return self._store.newest.descriptor.spec


@asynccontextmanager
async def control_client(
    join: JoinOptions, *, key: Ed25519PrivateKey, authority: bytes | None, state: Path
) -> AsyncIterator[ControlClient]:
    """Join a run's network unannounced while the block is active; yield a client.

    Raises ConfigError, NetworkDown, and CoordinatorFault if the only named coordinator has no descriptor.
    """
    try:
        from node.p2p import PeerNetwork, PeerSettings  # noqa: PLC0415  (optional)
    except ImportError as error:
        raise ConfigError(INSTALL, code="no_libp2p") from error
    store = DescriptorStore(join.run_id)
    if not join.peers:
        async with CoordinatorClient(join.coordinators, run_id=join.run_id) as client:
            await client.descriptor(patience_seconds=0)
            offer(store, client)
    settings = PeerSettings(bootstrap=join.peers, state=state, host="127.0.0.1", announced=False)
    async with PeerNetwork(settings, key=key, store=store) as network:
        try:
            await network.ready()
        except TimeoutError as error:
            raise NetworkDown("The peer-to-peer network does not start here.") from error
        yield ControlClient(network, store=store, key=key, authority=authority)


def explain_fault(error: PeerFault, node: bytes) -> str:
    """Describe an invalid reply in one sentence."""
    return (
        f"What came back is no answer of {peer_id_of(node)} to this request ({printable(str(error))}); do not use it."
    )
