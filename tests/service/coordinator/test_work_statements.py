"""What giving out work and taking it in reads of the tables, which only ever grow while a run lasts."""

from __future__ import annotations

from pathlib import Path

import pytest
from actors import PUBLIC_KEY, Actors, spec_of
from sqlalchemy import event

from coordinator.run.home import Home, create_home
from node.protocol.reasons import Refusal

GROWING = ("leases", "submissions", "groups", "log_entries", "nonces")


def statements_of(home: Home) -> list[str]:
    """What was sent to the database, with its parameters, while work was asked for, done, refused and given back."""
    actors, sent = Actors(home), list[str]()
    actors.register("old", admitted=5)
    actors.register("new", admitted=0)
    actors.publish(0)

    for engine in (home.database._engine, home.database._lazy):
        engine.dispose()
        event.listen(engine, "connect", lambda raw, _record: raw.set_trace_callback(sent.append))
    for name in ("old", "new"):
        (lease,) = actors.lease(name, held=(0,))
        actors.submit(name, lease.lease_id)
        with pytest.raises(Refusal):
            actors.submit(name, lease.lease_id)
    actors.lease("old", held=(0,))
    actors.now += 100  # so that it lapses, and its slot is open once more
    actors.lease("new", held=(0,))
    return sent


def test_no_request_for_work_reads_all_that_ever_was(tmp_path: Path) -> None:
    """After a week's run a lease would take as long as all of the week's submissions, and everybody waits for it."""
    home = create_home(tmp_path, public_key=PUBLIC_KEY, spec=spec_of())
    sent = [one for one in statements_of(home) if one.lstrip().startswith(("SELECT", "UPDATE", "DELETE"))]
    assert len(sent) > 20
    with home.database.read() as connection:
        for statement in sent:
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}")
            for step in plan.scalars(3).all():
                assert not step.startswith(tuple(f"SCAN {table}" for table in GROWING)), f"{step}: {statement}"
    home.database.close()


def test_leases_that_run_are_not_looked_at_to_find_those_that_are_over(tmp_path: Path) -> None:
    """A thousand workers have a thousand leases, and every request ends those whose time is over."""
    home = create_home(tmp_path, public_key=PUBLIC_KEY, spec=spec_of())
    overdue = next(one for one in statements_of(home) if "FROM leases" in one and "expires_at" in one)
    with home.database.read() as connection:
        plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {overdue}").scalars(3).all()
    searches = [step for step in plan if step.startswith("SEARCH")]
    assert searches
    assert all(step.endswith(("(state=? AND expires_at<?)", "(state=? AND expires_at>?)")) for step in searches), plan
    home.database.close()
