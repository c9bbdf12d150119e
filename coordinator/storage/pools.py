"""Pools of problems by difficulty, as far as the database holds them (docs/protocol.md, section 5.1).

What the log says of a problem is kept in one row: the mean reward of its last group, and what it was before the newest
policy. More is never asked, since slots are opened at the newest policy only.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, bindparam, func, insert, select, update

from coordinator.storage.schema import facts, problem_means, slots
from node.protocol.pools import Pool, candidates, first_candidate, group_mean, has_pools
from node.protocol.run import PoolsSpec, ProblemsSpec, RunSpec, run_id_of
from node.protocol.slots import SlotProblem, kept_problems

_PUBLIC_KEY = select(facts.c.value).where(facts.c.name == "public_key")
_MEANS = select(problem_means).where(
    problem_means.c.environment == bindparam("of_environment"),
    problem_means.c.problem.in_(bindparam("problems", expanding=True)),
)


class HeadMoved(Exception):
    """A later policy was recorded meanwhile: what the pools were at the one before is not known any more."""


def slot_columns(
    connection: Connection, *, spec: RunSpec, version: int, manifest_digest: str, number: int
) -> dict[str, int]:
    """What a new slot of the newest policy `version` is for; nothing in a run without pools. Raises HeadMoved."""
    if not isinstance(spec.batch.pools, PoolsSpec):
        return {}
    run_id = run_id_of(bytes.fromhex(connection.execute(_PUBLIC_KEY).scalar_one()))
    where = {"run_id": run_id, "manifest_digest": manifest_digest}
    tried = list(candidates(spec, **where, slot=number))
    means = _means(connection, tried, version=version) if has_pools(spec, tried[0].environment) else {}
    candidate = first_candidate(spec, **where, slot=number, mean_of=means.get)
    columns = {"candidate": candidate, "environment": tried[candidate].environment}
    return columns | ({"problem": tried[candidate].problem} if has_pools(spec, tried[0].environment) else {})


def _means(connection: Connection, tried: Sequence[SlotProblem], *, version: int) -> dict[SlotProblem, float | None]:
    """What the last groups before policy `version` earned, the newest."""
    environment = tried[0].environment
    asked = {"of_environment": environment, "problems": sorted({one.problem for one in tried})}
    found = {}
    for row in connection.execute(_MEANS, asked):
        if row.head > version:
            raise HeadMoved
        found[SlotProblem(environment, row.problem)] = row.mean if row.head < version else row.before
    return found


def pool_sizes(connection: Connection, *, spec: RunSpec) -> dict[str, int]:
    """How many problems are in which pool, by what the log says now; none of a run without pools."""
    rules = spec.batch.pools
    if not isinstance(rules, PoolsSpec):
        return dict.fromkeys(Pool, 0)
    easy, hard = (
        connection.execute(select(func.count()).select_from(problem_means).where(lies)).scalar_one()
        for lies in (problem_means.c.mean >= rules.easy_from, problem_means.c.mean <= rules.hard_to)
    )
    finite = [one.problems for one in spec.environments if isinstance(one.problems, ProblemsSpec)]
    total = sum(len(kept_problems(problems)) for problems in finite)
    return {Pool.EASY: easy, Pool.NORMAL: total - easy - hard, Pool.HARD: hard}


def note_group(connection: Connection, slot_id: int, rewards: Sequence[float], *, head: int) -> None:
    """A group of this slot was admitted, in the log, while `head` was the newest policy.

    The caller holds the lock of decisions, so that no other group or policy comes between.
    """
    slot = connection.execute(select(slots.c.environment, slots.c.problem).where(slots.c.id == slot_id)).one()
    if slot.problem is None:
        return
    mean, table = group_mean(rewards), problem_means
    this = (table.c.environment == slot.environment, table.c.problem == slot.problem)
    known = connection.execute(select(table.c.mean, table.c.head).where(*this)).first()
    if known is None:
        key = {"environment": slot.environment, "problem": slot.problem}
        connection.execute(insert(table).values(**key, mean=mean, head=head))
    elif known.head < head:
        connection.execute(update(table).where(*this).values(mean=mean, head=head, before=known.mean))
    else:
        connection.execute(update(table).where(*this).values(mean=mean))
