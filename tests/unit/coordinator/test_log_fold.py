"""The tables as a fold over the log: what it says of a row, and that it forgets what is settled."""

from __future__ import annotations

from collections.abc import Iterator

from logged import RUN, SPEC, admitted, batch, policy, rejected, replace, submission

from coordinator.integrity.derivation import DerivedRow, LogFold
from node.protocol.admission import Outcome
from node.protocol.messages import LogEntry
from node.protocol.run import StandingSpec

SPOTS = replace(
    SPEC,
    standing=StandingSpec(probation=1, full_rate_floor=0.1, vesting=2, ban_after=1000),
    training=replace(SPEC.training, steps=10_000),
)


def followed(*entries: LogEntry, fold: LogFold | None = None) -> list[DerivedRow]:
    fold = fold or LogFold(run_id=RUN, spec=SPOTS)

    def rows() -> Iterator[DerivedRow]:
        for index, entry in enumerate(entries):
            yield from fold.follow(index, entry)
        yield from fold.end()

    return list(rows())


def of(rows: list[DerivedRow], table: str, number: int) -> list[dict[str, object] | None]:
    return [row.columns for row in rows if row.table == table and row.key == (submission(number),)]


def test_a_group_is_used_in_the_step_of_its_batch() -> None:
    rows = followed(policy(0), admitted(1), admitted(2), batch(0, 1), policy(1))
    assert of(rows, "groups", 1) == [{"slot": (0, 1), "reward_mean": 0.5, "signal": True, "step": 0}]
    assert of(rows, "groups", 2) == [{"slot": (0, 2), "reward_mean": 0.5, "signal": True, "step": None}]
    states = {row.key: row.columns["state"] for row in rows if row.table == "slots" and row.columns is not None}
    assert states == {(0, 1): "used", (0, 2): "admitted"}


def test_credit_by_one_row_is_open_until_it_vests_or_a_rejection_voids_it() -> None:
    vested = followed(policy(0), admitted(1), admitted(2, spot=0), admitted(3), admitted(4))
    (columns,) = of(vested, "submissions", 2)
    assert columns is not None
    assert (columns["recheck"], columns["void"], columns["state"]) == (None, False, "done")
    voided = followed(policy(0), admitted(1), admitted(2, spot=0), rejected(3))
    (columns,) = of(voided, "submissions", 2)
    assert columns is not None
    assert (columns["recheck"], columns["void"], columns["state"]) == ("due", True, "queued")


def test_a_second_verdict_that_rejects_takes_the_group_away() -> None:
    second = rejected(2, recheck=True, spot=None)
    fold = LogFold(run_id=RUN, spec=SPOTS)
    rows = followed(policy(0), admitted(1), admitted(2, spot=0), rejected(3), second, fold=fold)
    assert of(rows, "groups", 2) == [None]
    (columns,) = of(rows, "submissions", 2)
    assert columns is not None
    assert (columns["recheck"], columns["recheck_index"], columns["outcome"]) == ("rejected", 4, Outcome.ADMITTED)
    node = fold.tables["nodes"][admitted(1).node,]
    assert (node["admitted"], node["rejected"], node["tokens"]) == (1, 2, 100)


def test_what_is_settled_is_not_held_however_long_the_log_is() -> None:
    """Else the check of a run of a year would not fit into memory."""
    fold = LogFold(run_id=RUN, spec=SPOTS)
    for _ in fold.follow(0, policy(0)):
        pass
    for number in range(1, 2000, 2):
        for entry in (admitted(number), admitted(number + 1, spot=0), batch(number // 2, number, number + 1)):
            for _ in fold.follow(number, entry):
                pass
    assert len(list(fold.end())) <= SPOTS.standing.vesting
