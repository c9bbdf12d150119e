"""What giving out work, taking it in, judging it and showing it reads of the tables that only ever grow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from actors import Actors, spec_of
from prepared_replies import RUN_KEY
from sqlalchemy import event

from coordinator.dashboard.figures import read_figures
from coordinator.dashboard.history import History
from coordinator.dashboard.workers import TableQuery, read_workers
from coordinator.http.metrics import Metrics
from coordinator.run.home import Home, create_home
from coordinator.run.service import Coordinator
from coordinator.run.status import run_status
from coordinator.storage.postgresql import PreparedSession
from node.protocol.admission import Outcome
from node.protocol.reasons import Refusal

GROWING = frozenset({"leases", "submissions", "slots", "groups", "log_entries", "log_nodes", "nonces", "uploads"})
PUBLIC_KEY = RUN_KEY.public_key().public_bytes_raw()


def of_a_run(home: Home) -> None:
    """Work is asked for, done, refused, given back and judged, a step takes it, and people look."""
    actors, coordinator = Actors(home), Coordinator(home, key=RUN_KEY)
    for name in ("old", "new"):
        (lease,) = actors.lease(name, held=(0,))
        name_of = actors.submit(name, lease.lease_id)
        with pytest.raises(Refusal):
            actors.submit(name, lease.lease_id)
    for outcome in (Outcome.ADMITTED, Outcome.REJECTED):
        claimed = actors.claim()
        assert claimed is not None
        assert actors.decide(claimed, outcome)
    coordinator.receipt(name_of)
    (lease,) = actors.lease("old", held=(0,))
    actors.give_back("old", lease)
    for _ in range(3):
        actors.work("old")
    assert actors.assign() == 0
    actors.lease("old", held=(0,))
    actors.now += 100  # so that it lapses, and its slot is open once more
    actors.lease("new", held=(0,))
    run_status(coordinator, now=actors.now)
    Metrics(coordinator).render()
    with home.database.read() as connection:
        spec, history, now = home.spec, History(), actors.now
        read_figures(connection, coordinator.relays, history, spec=spec, now=now)
        read_workers(connection, TableQuery(), spec=spec, at_work=(), now=now)


def begun(home: Home) -> None:
    actors = Actors(home)
    actors.register("old", admitted=5)
    actors.register("new", admitted=0)
    actors.publish(0)


def statements_of(home: Home) -> list[str]:
    """What was sent to SQLite, with its parameters, during `of_a_run`."""
    begun(home)
    sent = traced(home)
    of_a_run(home)
    return [one for one in dict.fromkeys(sent) if one.lstrip().startswith(("SELECT", "UPDATE", "DELETE", "INSERT"))]


def traced(home: Home) -> list[str]:
    """The statements that are sent to SQLite from now on."""
    sent = list[str]()
    for engine in (home.database._engine, home.database._lazy):
        engine.dispose()
        event.listen(engine, "connect", lambda raw, _record: raw.set_trace_callback(sent.append))
    return sent


def reads_all(plan: list[str]) -> list[str]:
    """The steps that go through a whole table, or a whole index of it; not those that take the first of an order."""
    sorts = any("TEMP B-TREE FOR ORDER BY" in step for step in plan)
    found = [step for step in plan if step.startswith("SCAN ") and step.split()[1] in GROWING]
    return found if sorts else [step for step in found if "USING" not in step or "COVERING" in step]


def test_nothing_that_a_run_does_all_the_time_reads_all_that_ever_was(tmp_path: Path) -> None:
    """After a week's run a lease would take as long as all of the week's submissions, and everybody waits for it."""
    home = create_home(tmp_path, public_key=PUBLIC_KEY, spec=spec_of())
    sent = statements_of(home)
    assert len(sent) > 100
    with home.database.read() as connection:
        for statement in sent:
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}").scalars(3).all()
            assert reads_all(plan) == [], statement
    home.database.close()


def test_who_takes_an_open_slot_on_sqlite_has_none_counted(tmp_path: Path) -> None:
    """A count reads a row for each slot in flight, of which there may be thousands, and the event loop waits for it."""
    home = create_home(tmp_path, public_key=PUBLIC_KEY, spec=spec_of())
    begun(home)
    actors, sent = Actors(home), traced(home)
    counts = {True: 0, False: 0}
    for is_open in (False, True):
        (lease,) = actors.lease("old", held=(0,))
        counts[is_open] = sum("max(slots.number)" in one for one in sent)
        actors.give_back("old", lease)
        actors.now += 10.0  # so that its place may have it again
        sent.clear()
    assert counts == {False: 1, True: 0}
    home.database.close()


def test_a_lease_counts_no_slots_in_flight(tmp_path: Path) -> None:
    """Thousands of workers have thousands of them, and whoever asks for the next one would wait for that."""
    home = create_home(tmp_path, public_key=PUBLIC_KEY, spec=spec_of())
    begun(home)
    actors, sent = Actors(home), traced(home)
    actors.lease("old", held=(0,))
    assert any("max(slots.number)" in one for one in sent)
    states = ("leased", "submitted", "admitted")
    assert [one for one in sent if any(f"slots.state = '{state}'" in one for state in states)] == []
    home.database.close()


@contextmanager
def recorded() -> Iterator[dict[str, Any]]:
    """Statements and parameters of psycopg, a dictionary, and of `Prepared`, a list; by text."""
    sent, execute = dict[str, Any](), psycopg.Cursor.execute
    send = PreparedSession.send

    def note(self: Any, query: Any, params: Any = None, **more: Any) -> Any:
        sent.setdefault(str(query), params)
        return execute(self, query, params, **more)

    def note_prepared(self: Any, text: str, parameters: Any) -> Any:
        sent.setdefault(text, parameters)
        return send(self, text, parameters)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psycopg.Cursor, "execute", note)
        patch.setattr(PreparedSession, "send", note_prepared)
        yield sent


def whole_reads(node: dict[str, Any], *, limited: bool = False) -> Iterator[str]:
    """The tables that a plan of PostgreSQL reads from end to end."""
    limited = limited or node["Node Type"] == "Limit"
    is_scan = node.get("Relation Name") in GROWING and "Scan" in node["Node Type"]
    is_bounded = "Index Cond" in node or "Recheck Cond" in node or (limited and "Index" in node["Node Type"])
    if is_scan and not is_bounded:
        yield f"{node['Node Type']} of {node['Relation Name']}"
    for child in node.get("Plans", ()):
        yield from whole_reads(child, limited=limited)


def test_nor_does_it_on_postgresql(tmp_path: Path, postgresql_url: str) -> None:
    """With sequential scans discouraged, those are left that no index could replace."""
    home = create_home(tmp_path, public_key=PUBLIC_KEY, spec=spec_of(), database_url=postgresql_url)
    begun(home)
    with recorded() as sent:
        of_a_run(home)
    plain = [one for one in sent.items() if one[0].lstrip().startswith(("SELECT", "UPDATE", "DELETE"))]
    assert len(plain) > 80
    with psycopg.connect(postgresql_url.replace("+psycopg", "")) as connection:
        connection.execute("SET enable_seqscan = off")
        for statement, parameters in plain:
            cursor = psycopg.RawCursor(connection) if isinstance(parameters, list) else connection.cursor()
            ((plans,),) = cursor.execute(f"EXPLAIN (FORMAT JSON) {statement}", parameters)
            plan = json.loads(plans) if isinstance(plans, str) else plans
            assert list(whole_reads(plan[0]["Plan"])) == [], statement
    home.database.close()


def test_leases_that_run_are_not_looked_at_to_find_those_that_are_over(tmp_path: Path) -> None:
    """A thousand workers have a thousand leases, and every request asks whether the time of any is over."""
    home = create_home(tmp_path, public_key=PUBLIC_KEY, spec=spec_of())
    overdue = next(one for one in statements_of(home) if "FROM leases" in one and "expires_at" in one)
    assert overdue.count("ORDER BY leases.expires_at") == 2
    with home.database.read() as connection:
        plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {overdue}").scalars(3).all()
    searches = [step for step in plan if " leases" in step and "(node=?)" not in step]
    assert searches
    assert all("(state=?)" in step for step in searches), plan
    assert not [step for step in plan if "TEMP B-TREE" in step], "the index has them in order"
    home.database.close()
