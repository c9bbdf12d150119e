"""Which results a store gives up first."""

from __future__ import annotations

from collections.abc import Collection

from shardcast.store.held import Held


def excess_results(held: Collection[Held], *, keep: int, keep_base: bool) -> list[Held]:
    """List the versions whose result is wanted beyond the `keep` most recently used ones, least recent last.

    With `keep_base` the base of the newest version's folded delta goes before all but the most recent one: it is the
    newest version that is served for long, so that who needs longer for a version than the next one takes to come
    fetches that, and the delta.
    """
    newest = max((each.signed.manifest for each in held), key=lambda manifest: manifest.version, default=None)
    folded = newest.folded_delta if newest is not None and keep_base else None
    by_use = sorted((each for each in held if each.full in each.wanted), key=lambda each: -each.used)
    latest, others = by_use[:1], by_use[1:]
    if folded is not None:
        others.sort(key=lambda each: each.signed.manifest.version != folded.base_version)
    return [*latest, *others][keep:]
