"""Registration with the coordinator: at the start, when it forgot the node, and as a keep-alive.

The coordinator lets one instance work with a key. This one registers again after a silence, so that none replaces it
during long slots, and ends if another instance holds the key. A new key shows what the run asks for (docs/protocol.md,
3.7): its invite, a stake that it waits for, or a proof of work.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from importlib import metadata
from pathlib import Path
from typing import Final

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import UNSET, UnsetType

from node.client.api import FOREVER
from node.client.http import Backoff
from node.errors import BadReply, Refused
from node.joining.session import RunSession
from node.keys.identity import node_id
from node.protocol.membership import MAX_BITS, ProofOfWork
from node.protocol.messages import Registration
from node.protocol.profiles import Hardware
from node.protocol.reasons import Reason
from node.protocol.run import RunSpec
from node.worker.complaints import WarnOnce
from node.worker.instance import load_instance
from node.worker.proof_of_work import PuzzleSolver

log = logging.getLogger(__name__)

HEARD_SECONDS: Final = 50.0
"""An instance silent for 120 s may be replaced (docs/protocol.md, 3.4)."""

MOST_PUZZLES: Final = MAX_BITS
"""Solved for one registration: so often the price may rise meanwhile, by a bit each time."""

FINAL: Final = (
    Reason.KEY_IN_USE,
    Reason.INVITE_REQUIRED,
    Reason.BAD_INVITE,
    Reason.EXPIRED_INVITE,
    Reason.FOREIGN_INVITE,
    Reason.SPENT_INVITE,
    Reason.BAD_NICKNAME,
)
"""Refusals of a registration that no retry changes."""


class Registrar:
    """Registers one instance of a node: that of the state `folder`.

    `dismissal` is the final refusal: the node is banned, its key is in use elsewhere, its nickname is none, or its
    invite does not let it in. `changed` is set with it. `invite` is shown to a run that takes new keys by invite alone.
    Each registration tells the run's pages `nickname` and `hardware`, as they are then, if the coordinator knows them.
    """

    def __init__(
        self,
        session: RunSession,
        *,
        key: Ed25519PrivateKey,
        engine: str,
        folder: Path,
        nickname: str | None,
        invite: bytes | None,
        backoff: Backoff,
        changed: asyncio.Event,
    ) -> None:
        self.dismissal: Refused | None = None
        self.nickname = nickname
        self.hardware: Hardware | UnsetType = UNSET
        self.instance = load_instance(folder)
        self._client, spec = session.client, session.descriptor.spec
        self._engine = engine
        self._solver = PuzzleSolver(session.client, node=node_id(key), rules=spec.membership)
        self._invite = _invite_for(spec, invite)
        self._backoff = backoff
        self._warn_once = WarnOnce()
        self._changed = changed
        self._heard_at = time.monotonic()

    def heard(self) -> None:
        """Note that the coordinator has just answered a lease request."""
        self._heard_at = time.monotonic()

    def dismiss(self, refusal: Refused) -> None:
        """Treat a refusal as final."""
        self.dismissal = self.dismissal or refusal
        self._changed.set()

    @property
    def doing(self) -> str:
        """What registering takes now, "" if it is nothing but the request."""
        return self._solver.doing

    def status(self) -> dict[str, str | None]:
        """Return its part of the worker's status: why it was dismissed, and what it tells of itself."""
        return {
            "dismissed": None if self.dismissal is None else str(self.dismissal),
            "nickname": self.nickname,
            "hardware": None if isinstance(self.hardware, UnsetType) else str(self.hardware),
        }

    async def register(self) -> None:
        """Register once, with a proof of work if one is asked for, retrying while the coordinator is away.

        Raises Refused and BadReply, but for `dismissal`.
        """
        work: ProofOfWork | UnsetType = UNSET
        introduction = self._introduction()
        bare = msgspec.structs.replace(introduction, nickname=UNSET, hardware=UNSET)
        for puzzles in itertools.count():
            try:
                registration = msgspec.structs.replace(introduction, work=work)
                await self._client.register(registration, patience_seconds=FOREVER)
            except Refused as error:
                if error.code == Reason.BAD_REQUEST and introduction != bare:
                    # An older coordinator does not know these fields (docs/protocol.md, 3.8).
                    self._warn_once.note("registering without nickname and hardware", error)
                    introduction = bare
                    continue
                if error.code == Reason.WORK_REQUIRED and puzzles < MOST_PUZZLES:
                    work = await self._solver.solve()
                    continue
                if error.code not in FINAL:
                    raise
                self.dismiss(error)  # a node that is registered can still deliver finished slots
            self.heard()
            return

    def _introduction(self) -> Registration:
        return Registration(
            software=software(),
            engine=self._engine,
            instance=self.instance.id,
            name=self.instance.name,
            invite=self._invite,
            nickname=self.nickname or UNSET,
            hardware=self.hardware,
        )

    async def register_until_known(self) -> None:
        """Retry registering until the coordinator accepts or dismisses this worker."""
        failures = 0
        while True:
            try:
                await self.register()
                return
            except (Refused, BadReply) as error:
                failures += 1
                self._warn_once.note("not registered", error)
                await asyncio.sleep(self._backoff.delay(failures))

    async def keep_registered(self) -> None:
        """Register again after HEARD_SECONDS without a request."""
        while self.dismissal is None:
            left = self._heard_at + HEARD_SECONDS - time.monotonic()
            if left > 0:
                await asyncio.sleep(left)
            else:
                await self.register_until_known()


def _invite_for(spec: RunSpec, invite: bytes | None) -> bytes | UnsetType:
    """Return `invite` where the run takes new keys by invite; to another it would be given away."""
    asked = not isinstance(spec.membership, UnsetType) and spec.membership.policy == "invite"
    if invite is not None and not asked:
        log.info("The run %r takes new nodes without an invite; the one given is not sent.", spec.name)
    return UNSET if invite is None or not asked else invite


def software() -> str:
    """Return the name and version of this installation."""
    try:
        return f"swarmproof/{metadata.version('swarmproof')}"
    except metadata.PackageNotFoundError:
        return "swarmproof/uninstalled"
