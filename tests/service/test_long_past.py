"""The past that `benchmarks.load --history` writes is one that a run could have had."""

from __future__ import annotations

from pathlib import Path

from actors import PUBLIC_KEY, spec_of

from benchmarks.loading.history import STEPS, fill
from coordinator.run.home import create_home
from coordinator.storage import counters, derived_rows, log
from coordinator.storage.submissions import logged_verdict


def test_every_count_of_a_written_past_agrees_with_its_rows_and_its_log(tmp_path: Path) -> None:
    """Else the figures would be of a database that no run leaves behind."""
    home = create_home(tmp_path, public_key=PUBLIC_KEY, spec=spec_of(steps=2 * STEPS))
    fill(home, 1500, now=10.0**9)
    with home.database.read() as connection:
        assert counters.wrong_counts(connection) == []
        assert all(one.stored == one.derived for one in derived_rows.sums(connection, size=log.size(connection)))
        name = (
            connection.exec_driver_sql("SELECT submission FROM submissions ORDER BY log_index DESC").scalars().first()
        )
        assert logged_verdict(connection, name)
    home.database.close()
