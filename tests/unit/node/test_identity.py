"""A lost or leaked key is a lost node and its credit: the key file is made once, whole, and for one user."""

from __future__ import annotations

import multiprocessing
import os
import stat

import pytest

from node.errors import IdentityError
from node.keys.identity import create_key, load_key, load_or_create_key, node_id


def test_a_restarted_node_keeps_its_identity(tmp_path):
    path = tmp_path / "deep" / "key"
    first = load_or_create_key(path)
    assert node_id(load_or_create_key(path)) == node_id(first)
    assert node_id(first) == first.public_key().public_bytes_raw().hex()


def test_a_new_key_is_for_its_owner_alone_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        create_key(tmp_path / "key")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


def test_creating_never_replaces_a_key(tmp_path):
    path = tmp_path / "key"
    kept = create_key(path)
    with pytest.raises(IdentityError, match="never replaced"):
        create_key(path)
    assert node_id(load_key(path)) == node_id(kept)


def test_no_temporary_copy_of_the_secret_stays_behind(tmp_path):
    path = tmp_path / "key"
    create_key(path)
    with pytest.raises(IdentityError):
        create_key(path)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o666])
def test_a_key_that_other_users_can_reach_is_refused(tmp_path, mode):
    path = tmp_path / "key"
    create_key(path)
    path.chmod(mode)
    with pytest.raises(IdentityError, match="chmod 600") as caught:
        load_or_create_key(path)
    assert caught.value.code == "key_exposed"


def test_what_systemd_hands_to_a_service_may_be_read_by_its_access_list_and_by_no_one_else(tmp_path, monkeypatch):
    """LoadCredential= gives the service's user the right by an ACL, whose mask shows as the group's rights."""
    key = create_key(tmp_path / "run.key")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    for mode, is_taken in ((0o400, True), (0o440, True), (0o460, False), (0o444, False), (0o640, True)):
        (tmp_path / "run.key").chmod(mode)
        try:
            assert node_id(load_key(tmp_path / "run.key")) == node_id(key)
        except IdentityError as error:
            assert (error.code, is_taken) == ("key_exposed", False)
        else:
            assert is_taken
    (tmp_path / "run.key").chmod(0o440)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path / "another"))
    with pytest.raises(IdentityError, match="chmod 600"):
        load_key(tmp_path / "run.key")


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"ab" * 31, b"ab" * 33, b"AB" * 32, b"zz" * 32, b"ab" * 32 + b"\n\n", b" " + b"ab" * 32, b"\0" * 5000],
)
def test_a_damaged_key_is_refused_and_left_alone_and_never_quoted(tmp_path, content):
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(IdentityError) as caught:
        load_or_create_key(path)
    assert caught.value.code == "not_a_key"
    assert "abab" not in str(caught.value)
    assert path.read_bytes() == content


def test_a_folder_or_pipe_in_place_of_the_key_is_an_error_not_a_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(IdentityError):
            load_or_create_key(path)


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(IdentityError, match="could not be made"):
        create_key(tmp_path / "file" / "key")


def _report_id(path, queue):
    queue.put(node_id(load_or_create_key(path)))


@pytest.mark.system
def test_processes_that_start_at_once_agree_on_one_key(tmp_path):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    starters = [context.Process(target=_report_id, args=(tmp_path / "key", queue)) for _ in range(4)]
    for process in starters:
        process.start()
    found = {queue.get(timeout=60) for _ in starters}
    for process in starters:
        process.join(60)
    assert len(found) == 1
