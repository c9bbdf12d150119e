"""The asker's side of control: sign a request, bring it to the node, and check whose answer it is, and to what."""

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
from node.discovery.descriptor import Board
from node.errors import ConfigError, NetworkDown
from node.joining.entrance import INSTALL, offer
from node.joining.way import Way
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
"""What time may heal: the network comes up, and neighbours tell of others."""


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer, what was asked with which nonce, and how long it took from the request to the last byte."""

    body: Body
    nonce: str
    seconds: float


class ControlClient:
    """One asker in a run's peer-to-peer network. `authority` is what the run gave its key; the run's needs none."""

    def __init__(self, network: PeerNetwork, *, board: Board, key: Ed25519PrivateKey, authority: bytes | None) -> None:
        self._network, self._board, self._key, self._authority = network, board, key, authority

    async def ask(self, node: bytes, ask: Ask, *, address: Address | None, find_seconds: float) -> Answered:
        """The answer of the node with this public key.

        Raises NetworkDown, ControlRefusal for a no, and PeerFault for what is no answer of this node to this request.
        """
        until = time.monotonic() + find_seconds
        while True:
            # Signed anew for each attempt: a request that was lost on the way may have arrived.
            request = ControlRequest(
                run_id=self._board.run_id,
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
                reply, node=node, run_id=self._board.run_id, request=digest(data), purpose=purpose_of(ask)
            )
            return Answered(body, request.nonce, seconds)

    async def spec(self, *, seconds: float) -> RunSpec:
        """Return the run's rules, from its descriptor; raises NetworkDown."""
        until = time.monotonic() + seconds
        while self._board.newest is None:
            if time.monotonic() >= until:
                raise NetworkDown("No peer has the run's descriptor.", code="no_descriptor")
            await asyncio.sleep(LOOK_SECONDS / 5)
        return self._board.newest.descriptor.spec


@asynccontextmanager
async def calling(
    way: Way, *, key: Ed25519PrivateKey, authority: bytes | None, state: Path
) -> AsyncIterator[ControlClient]:
    """Take part in the network of a run for a moment, without being told of to others.

    Raises ConfigError, NetworkDown, and CoordinatorFault where only a coordinator was named and it has no descriptor.
    """
    try:
        from node.p2p import PeerNetwork, PeerSettings  # noqa: PLC0415  (optional)
    except ImportError as error:
        raise ConfigError(INSTALL, code="no_libp2p") from error
    board = Board(way.run_id)
    if not way.peers:
        async with CoordinatorClient(way.coordinators, run_id=way.run_id) as client:
            await client.descriptor(patience_seconds=0)
            offer(board, client)
    settings = PeerSettings(bootstrap=way.peers, state=state, host="127.0.0.1", announced=False)
    async with PeerNetwork(settings, key=key, board=board) as network:
        try:
            await network.ready()
        except TimeoutError as error:
            raise NetworkDown("The peer-to-peer network does not start here.") from error
        yield ControlClient(network, board=board, key=key, authority=authority)


def explain_fault(error: PeerFault, node: bytes) -> str:
    """Return one sentence about a reply that could not be read."""
    return (
        f"What came back is no answer of {peer_id_of(node)} to this request ({printable(str(error))}); do not use it."
    )
