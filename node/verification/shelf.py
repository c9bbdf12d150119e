"""Loaded policies, within a limit of memory: those used last stay, and one that does not fit is streamed."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Hashable
from pathlib import Path
from typing import Final

from node.errors import EngineFailed
from node.policy.config import ATTENTION
from node.policy.memory import free_memory
from node.policy.reading import blueprint_of
from node.protocol.run import RunSpec
from node.verification.prefill import OUT_OF_MEMORY, Prefill, Prefills, no_memory_for

log = logging.getLogger(__name__)

MOST_POLICIES: Final = 8
"""Whatever their size: each keeps its tokenizer in memory."""
MOST_OPEN: Final = 2
"""Of these, whose weights are not in `memory`: each keeps its file on disk, though it may long be deleted."""
GIB: Final = 2**30


class PolicyShelf:
    """The `Prefill`s used last, by a key; their weights take at most `memory` bytes.

    Not counted are what a caller still holds, the layer of a streamed policy that is in use, and what an engine has in
    a place of its own. A recurrent policy cannot be streamed: one that is larger than `memory` is held alone.
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

        Where memory is used up all the same, it is loaded without the others, then streamed. Raises PolicyError, and
        EngineFailed where the engine cannot hold it.
        """
        blueprint = await asyncio.to_thread(blueprint_of, path)
        size = self._prefills.memory_of(blueprint)
        can_stream = blueprint.config.model_type in ATTENTION
        if streamed := size > self._memory and can_stream:
            log.info(
                "policy %d takes %.1f GiB, more than --policy-memory: its layers are read from disk one by one",
                version,
                size / GIB,
            )
        self._make_room(0 if streamed else size)
        prefill = await self._load(path, version=version, streamed=streamed)
        if prefill is None and self._held:
            log.warning("no memory for policy %d beside others: loading it alone; lower --policy-memory", version)
            self._drop([*self._held])
            prefill = await self._load(path, version=version, streamed=streamed)
        if prefill is None and can_stream and not streamed:
            log.warning("no memory for policy %d: its layers are read from disk one by one", version)
            streamed = True
            prefill = await self._load(path, version=version, streamed=True)
        if prefill is None:
            raise no_memory_for(version, self._prefills.device)
        self._held[key] = prefill, 0 if streamed else size
        return prefill

    def close_files(self) -> None:
        """Drop the policies that keep their files on disk."""
        self._drop(self._open)

    def _make_room(self, size: int) -> None:
        """Drop those used least recently until a policy of `size` bytes, 0 for one outside of `memory`, has a place."""
        while self._held and (self._bytes + size > self._memory or len(self._held) >= MOST_POLICIES):
            self._drop([*self._held][:1])
        if size == 0:
            self._drop(self._open[: 1 - MOST_OPEN])

    def _drop(self, keys: list[Hashable]) -> None:
        for key in keys:
            del self._held[key]
        if keys:
            free_memory()  # at once: a model that measured refers to itself, and to its file

    async def _load(self, path: Path, *, version: int, streamed: bool) -> Prefill | None:
        """Load a policy; return None, having given back what was loaded of it, where memory is used up."""
        prefill: Prefill | None
        try:
            prefill = await self._prefills.prefill(path, version=version, streamed=streamed)
            # Of nothing: an engine that loads on use does so now, where its failure is of no submission.
            await asyncio.to_thread(prefill.measure, [], spec=self._spec)
        except EngineFailed as error:
            if error.code != OUT_OF_MEMORY:
                raise
            prefill = None
        free_memory()  # what a load leaves in heaps, too: of a large vocabulary's tokenizer some tens of MB
        return prefill

    @property
    def _open(self) -> list[Hashable]:
        """The keys of policies outside of `memory`, those used least recently first."""
        return [key for key, (_, size) in self._held.items() if size == 0]

    @property
    def _bytes(self) -> int:
        return sum(size for _, size in self._held.values())
