"""The rules of belief: what a worker may conclude from bytes that any relay can replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardcast import FraudProof, TrustedState, check_fraud_proof
from shardcast.errors import Equivocation, LocalFault, Malformed, Stale
from shardcast.manifest import seal_head, seal_manifest
from shardcast.trust import HEADS_REMEMBERED, load_seen, save_fraud_proof, save_seen

NOW = 1_010.0


def fresh(publisher: Any, **options: Any) -> TrustedState:
    return TrustedState(run_id=publisher.run_id, publisher_key=publisher.public, **options)


def head(publisher: Any, version: int = 1, **changes: Any) -> bytes:
    return seal_head(publisher.head(version=version, **changes), publisher.key)


def code_of(error: pytest.ExceptionInfo[Any]) -> str:
    code: str = error.value.code
    return code


def test_the_newest_head_is_remembered_and_may_be_shown_again(publisher: Any) -> None:
    state = fresh(publisher)
    assert state.version == -1
    state.accept_head(head(publisher, 3), NOW)
    state.accept_head(head(publisher, 3, issued_at=1_005, expires_at=1_065), NOW)
    assert state.version == 3


def test_a_lagging_source_does_not_make_the_newest_head_older(publisher: Any) -> None:
    """What a relay shows would otherwise expire although the publisher signs it again and again."""
    state = fresh(publisher)
    newer = head(publisher, 3, issued_at=1_005, expires_at=1_065)
    state.accept_head(newer, NOW)
    state.accept_head(head(publisher, 3), NOW)
    assert state.seen is not None
    assert state.seen.head == newer


def test_rollback_to_an_older_head_is_refused(publisher: Any) -> None:
    state = fresh(publisher)
    state.accept_head(head(publisher, 3), NOW)
    with pytest.raises(Stale) as caught:
        state.accept_head(head(publisher, 2), NOW)
    assert code_of(caught) == "rollback"
    assert state.version == 3


def test_freeze_by_an_expired_head_is_refused(publisher: Any) -> None:
    skew = 30
    fresh(publisher).accept_head(head(publisher), 1_060 + skew)
    with pytest.raises(Stale) as caught:
        fresh(publisher).accept_head(head(publisher), 1_061 + skew)
    assert code_of(caught) == "expired"


def test_a_head_from_the_future_is_refused(publisher: Any) -> None:
    fresh(publisher).accept_head(head(publisher), 970)
    with pytest.raises(Stale) as caught:
        fresh(publisher).accept_head(head(publisher), 969)
    assert code_of(caught) == "not_yet_valid"


def test_replay_of_another_runs_head_is_refused(publisher: Any) -> None:
    with pytest.raises(Malformed) as caught:
        fresh(publisher).accept_head(head(publisher, run_id="00" * 32), NOW)
    assert code_of(caught) == "wrong_run"


def test_equivocation_by_two_heads_leaves_a_proof_that_anyone_can_check(publisher: Any, tmp_path: Path) -> None:
    state = fresh(publisher)
    state.accept_head(head(publisher, 4), NOW)
    with pytest.raises(Equivocation):
        state.accept_head(head(publisher, 4, manifest_digest="cd" * 32), NOW)
    assert state.seen is not None
    assert state.seen.manifest_digest == "ab" * 32, "the first statement stays the one believed"
    assert state.fraud is not None
    assert check_fraud_proof(state.fraud, run_id=publisher.run_id, publisher_key=publisher.public) == 4
    saved = save_fraud_proof(tmp_path, 4, state.fraud)
    assert saved.read_bytes().startswith(b'{"first":')


def test_equivocation_shows_even_when_the_second_head_has_expired(publisher: Any) -> None:
    """Otherwise a publisher could undo its first statement by waiting a minute."""
    state = fresh(publisher)
    state.accept_head(head(publisher, 4, issued_at=5_000, expires_at=5_060), 5_000)
    with pytest.raises(Equivocation):
        state.accept_head(head(publisher, 4, manifest_digest="cd" * 32), 5_000)


def test_equivocation_is_noticed_after_a_restart(publisher: Any, tmp_path: Path) -> None:
    state = fresh(publisher)
    state.accept_head(head(publisher, 4), NOW)
    assert state.seen is not None
    save_seen(tmp_path / "state.json", state.seen)
    again = fresh(publisher, seen=load_seen(tmp_path / "state.json"))
    with pytest.raises(Equivocation):
        again.accept_head(head(publisher, 4, manifest_digest="cd" * 32), NOW)


def test_a_forked_history_is_equivocation(publisher: Any) -> None:
    """A manifest that follows a version nobody was shown convicts the publisher of a second history."""
    state = fresh(publisher)
    state.accept_head(head(publisher, 4), NOW)
    forked = seal_manifest(publisher.manifest(version=5, previous="cd" * 32), publisher.key)
    state.accept_head(head(publisher, 5, manifest_digest=forked.digest), NOW)
    with pytest.raises(Equivocation):
        state.accept_manifest(forked.envelope, NOW, forked.digest)
    assert state.fraud is not None
    assert check_fraud_proof(state.fraud, run_id=publisher.run_id, publisher_key=publisher.public) == 4


def test_honest_envelopes_are_no_fraud_proof(publisher: Any) -> None:
    """Nobody can be convicted with two heads of two versions, or with one head signed twice."""
    for first, second in (
        (head(publisher, 4), head(publisher, 5, manifest_digest="cd" * 32)),
        (head(publisher, 4), head(publisher, 4, issued_at=1_001)),
    ):
        with pytest.raises(Malformed) as caught:
            check_fraud_proof(
                FraudProof(first=first, second=second),
                run_id=publisher.run_id,
                publisher_key=publisher.public,
            )
        assert code_of(caught) == "no_fraud"


def test_a_manifest_is_believed_when_a_head_named_it(publisher: Any) -> None:
    signed = seal_manifest(publisher.manifest(version=2), publisher.key)
    state = fresh(publisher)
    state.accept_head(head(publisher, 2, manifest_digest=signed.digest), NOW)
    assert state.accept_manifest(signed.envelope, NOW, signed.digest) == signed


def test_a_manifest_other_than_the_named_one_is_refused(publisher: Any) -> None:
    signed = seal_manifest(publisher.manifest(version=2), publisher.key)
    with pytest.raises(Malformed) as caught:
        fresh(publisher).accept_manifest(signed.envelope, NOW, "ab" * 32)
    assert code_of(caught) == "wrong_manifest"


def test_a_head_that_names_a_manifest_of_another_version_is_refused(publisher: Any) -> None:
    signed = seal_manifest(publisher.manifest(version=9), publisher.key)
    state = fresh(publisher)
    state.accept_head(head(publisher, 2, manifest_digest=signed.digest), NOW)
    with pytest.raises(Malformed) as caught:
        state.accept_manifest(signed.envelope, NOW, signed.digest)
    assert code_of(caught) == "head_mismatch"


def test_rollback_by_an_old_manifest_is_refused_unless_it_is_asked_for(publisher: Any) -> None:
    """A relay cannot pass off an old version as new, but an auditor can ask for it by number."""
    old = seal_manifest(publisher.manifest(version=2), publisher.key)
    state = fresh(publisher)
    state.accept_head(head(publisher, 7), NOW)
    with pytest.raises(Stale) as caught:
        state.accept_manifest(old.envelope, NOW, old.digest)
    assert code_of(caught) == "rollback"
    assert state.accept_archived(old.envelope, 2) == old
    assert state.accept_archived(old.envelope, 2, expected_digest=old.digest) == old


@pytest.mark.parametrize(("version", "digest"), [(3, None), (2, "ab" * 32)])
def test_an_archived_manifest_must_be_the_one_asked_for(publisher: Any, version: int, digest: str | None) -> None:
    old = seal_manifest(publisher.manifest(version=2), publisher.key)
    with pytest.raises(Malformed) as caught:
        fresh(publisher).accept_archived(old.envelope, version, expected_digest=digest)
    assert code_of(caught) == "wrong_manifest"


def test_an_expired_manifest_is_refused_and_an_archived_one_is_not(publisher: Any) -> None:
    signed = seal_manifest(publisher.manifest(), publisher.key)
    with pytest.raises(Stale) as caught:
        fresh(publisher).accept_manifest(signed.envelope, 1e6, signed.digest)
    assert code_of(caught) == "expired"
    assert fresh(publisher).accept_archived(signed.envelope, 1) == signed


def test_a_manifest_of_a_publisher_whose_clock_was_ahead_is_believed_for_the_head_that_names_it(publisher: Any) -> None:
    """Else one version that was signed an hour ahead of time would stop the run for that hour."""
    signed = seal_manifest(publisher.manifest(version=1, issued_at=5_000, expires_at=9_000), publisher.key)
    assert fresh(publisher).accept_manifest(signed.envelope, NOW, signed.digest) == signed


def test_memory_of_heads_is_bounded_and_keeps_the_newest(publisher: Any) -> None:
    state = fresh(publisher)
    for version in range(3 * HEADS_REMEMBERED):
        state.accept_head(head(publisher, version), NOW)
    with pytest.raises(Equivocation):
        state.accept_head(head(publisher, 3 * HEADS_REMEMBERED - 2, manifest_digest="cd" * 32), NOW)
    assert len(state._heads) == HEADS_REMEMBERED


def test_a_damaged_state_file_stops_the_client(tmp_path: Path) -> None:
    """Starting over silently would let a relay show an old version as the newest."""
    path = tmp_path / "state.json"
    assert load_seen(path) is None
    for damage in (b"", b"{}", b"x" * 100_000):
        path.write_bytes(damage)
        with pytest.raises(LocalFault) as caught:
            load_seen(path)
        assert code_of(caught) == "bad_state"


def test_the_state_of_another_run_is_refused(publisher: Any) -> None:
    state = fresh(publisher)
    state.accept_head(head(publisher), NOW)
    with pytest.raises(LocalFault) as caught:
        TrustedState(run_id="00" * 32, publisher_key=publisher.public, seen=state.seen)
    assert code_of(caught) == "wrong_run"
