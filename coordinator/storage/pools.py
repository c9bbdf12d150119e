"""Difficulty pools of problems in the database (docs/protocol.md, section 5.1).

One row per problem: the mean reward of its last group, and the one before the newest policy. That suffices, since
slots are opened at the newest policy only.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, bindparam, func, insert, select, update

from coordinator.storage.facts import read_run_id
from coordinator.storage.schema import problem_means, slots
from node.protocol.pools import Pool, candidates, first_candidate, group_mean, has_pools
from node.protocol.run import PoolsSpec, ProblemsSpec, RunSpec
from node.protocol.slots import SlotProblem, kept_problems, slot_problem

_MEANS = select(problem_means).where(
    problem_means.c.environment == bindparam("of_environment"),
    problem_means.c.problem.in_(bindparam("problems", expanding=True)),
)


class HeadMoved(Exception):
    """A newer policy was recorded, so the pools at the given one are no longer known."""


def slot_columns(
    connection: Connection, *, spec: RunSpec, version: int, manifest_digest: str, number: int
) -> dict[str, int]:
    """Return the columns of a new slot at the newest policy that say what it is about, as far as leases depend on it;
    raises HeadMoved.
    """
    if not isinstance(spec.batch.pools, PoolsSpec):
        if not spec.has_packages:
            return {}
        drawn = slot_problem(spec, run_id=read_run_id(connection), manifest_digest=manifest_digest, slot=number)
        return {"environment": drawn.environment}
    where = {"run_id": read_run_id(connection), "manifest_digest": manifest_digest}
    tried = list(candidates(spec, **where, slot=number))
    means = _means(connection, tried, version=version) if has_pools(spec, tried[0].environment) else {}
    candidate = first_candidate(spec, **where, slot=number, mean_of=means.get)
    columns = {"candidate": candidate, "environment": tried[candidate].environment}
    return columns | ({"problem": tried[candidate].problem} if has_pools(spec, tried[0].environment) else {})


def _means(connection: Connection, tried: Sequence[SlotProblem], *, version: int) -> dict[SlotProblem, float | None]:
    """Return the mean reward of each problem's last group before policy `version`; None if it had none."""
    environment = tried[0].environment
    asked = {"of_environment": environment, "problems": sorted({one.problem for one in tried})}
    found = {}
    for row in connection.execute(_MEANS, asked):
        if row.head > version:
            raise HeadMoved
        found[SlotProblem(environment, row.problem)] = row.mean if row.head < version else row.before
    return found


def pool_sizes(connection: Connection, *, spec: RunSpec) -> dict[str, int]:
    """Return the current number of problems in each pool; zeros in a run without pools."""
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
    """Record the rewards of an admitted group, logged while `head` was the newest policy.

    The caller holds `locks.deciding`, so that no other group or policy is logged in between.
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
