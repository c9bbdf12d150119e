"""Loaded policies, within a limit of memory: those used last stay, and one that does not fit is streamed."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Hashable
from pathlib import Path
from typing import Final

from node.policy.config import ATTENTION
from node.policy.reading import inspect_once
from node.protocol.run import RunSpec
from node.verification.prefill import Prefill, Prefills

log = logging.getLogger(__name__)

MOST_POLICIES: Final = 8
"""Whatever their size: each keeps its file on disk, and its tokenizer in memory."""
GIB: Final = 2**30


class PolicyShelf:
    """The `Prefill`s used last, by a key; their weights take at most `memory` bytes.

    Not counted are what a caller still holds, and the layer of a streamed policy that is in use. A recurrent policy
    cannot be streamed: one that is larger than `memory` is held alone.
    """

    def __init__(self, prefills: Prefills, *, spec: RunSpec, memory: int) -> None:
        self._prefills, self._spec, self._memory = prefills, spec, memory
        self._held: OrderedDict[Hashable, tuple[Prefill, int]] = OrderedDict()

    def get(self, key: Hashable) -> Prefill | None:
        """Return what `load` put under `key`, if it is still there."""
        if key not in self._held:
            return None
        self._held.move_to_end(key)
        return self._held[key][0]

    async def load(self, key: Hashable, path: Path, *, version: int) -> Prefill:
        """Load policy `version` from `path` after making room for it.

        Raises PolicyError, and EngineFailed where the engine cannot hold it.
        """
        blueprint = await asyncio.to_thread(inspect_once, path)
        size = self._prefills.memory_of(blueprint)
        if streamed := size > self._memory and blueprint.config.model_type in ATTENTION:
            log.info(
                "policy %d takes %.1f GiB, more than --policy-memory: its layers are read from disk one by one",
                version,
                size / GIB,
            )
            size = 0
        while self._held and (self._bytes + size > self._memory or len(self._held) >= MOST_POLICIES):
            self._held.popitem(last=False)
        prefill = await self._prefills.prefill(path, version=version, streamed=streamed)
        # Of nothing: an engine that loads on use does so now, where its failure is of no submission.
        await asyncio.to_thread(prefill.measure, [], spec=self._spec)
        self._held[key] = prefill, size
        return prefill

    @property
    def _bytes(self) -> int:
        return sum(size for _, size in self._held.values())
