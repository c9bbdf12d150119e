"""A lost key file is a lost node and its credit: a backup gives exactly this key back, or nothing, and tells nobody."""

from __future__ import annotations

import os
import pty
import re
import select
import stat
import subprocess
import sys
import termios
import time
from pathlib import Path

import msgspec
import pytest

from node.errors import IdentityError
from node.identity import create_key, load_key, node_id
from node.keys_backup import (
    LOG2_N,
    MAX_BACKUP_BYTES,
    _cipher,
    _entropy,
    check_absent,
    decode_phrase,
    parse_backup,
    read_backup,
    restore_key,
    seal,
    unseal,
    write_backup,
)
from shardcast.wire import encode

ROOT = Path(__file__).parents[3]
CHEAP = 10  # 1 MiB: what is tested does not depend on scrypt's cost
VALID_PHRASE = "legal winner thank year wave sausage worth useful legal winner thank yellow"  # BIP-39's own vector


@pytest.fixture
def key(tmp_path):
    return create_key(tmp_path / "key")


@pytest.fixture
def sealed(key):
    return seal(key, log2_n=CHEAP)


def code_of(function, *arguments):
    with pytest.raises(IdentityError) as caught:
        function(*arguments)
    return caught.value.code


# -- what a backup gives back


def test_the_phrase_and_the_file_make_the_node_again(tmp_path, key, sealed):
    data, phrase = sealed
    write_backup(tmp_path / "backup", data)
    restore_key(tmp_path / "new" / "machine" / "key", unseal(read_backup(tmp_path / "backup"), phrase))
    assert (tmp_path / "new" / "machine" / "key").read_bytes() == (tmp_path / "key").read_bytes()
    assert node_id(load_key(tmp_path / "new" / "machine" / "key")) == node_id(key)


def test_whoever_finds_a_backup_can_read_whose_it_is(key, sealed):
    assert parse_backup(sealed[0]).header.node_id == node_id(key)
    assert key.private_bytes_raw().hex().encode() not in sealed[0]


def test_two_backups_of_a_key_have_nothing_secret_in_common(key, sealed):
    data, phrase = seal(key, log2_n=CHEAP)
    first, second = parse_backup(sealed[0]), parse_backup(data)
    assert first.header.salt != second.header.salt
    assert first.sealed != second.sealed
    assert code_of(unseal, first, phrase) == "wrong_phrase"


def test_a_backup_costs_a_guesser_of_words_the_whole_of_scrypt(key):
    data, _ = seal(key)
    assert parse_backup(data).header.scrypt_log2_n == LOG2_N == 17


def test_the_phrase_is_bip_39_so_that_other_tools_read_it():
    assert _entropy(VALID_PHRASE) == b"\x7f" * 16


# -- phrases


def test_a_phrase_typed_from_paper_may_have_any_case_and_white_space(key, sealed):
    data, phrase = sealed
    assert len(phrase.split()) == 12
    for typed in (phrase.upper(), phrase.title(), "\n  " + phrase.replace(" ", " \t\r\n") + "\n\n"):
        assert node_id(unseal(parse_backup(data), typed)) == node_id(key)
    assert decode_phrase(b"\xef\xbb\xbf" + phrase.encode()) == phrase  # Windows' editor puts a mark in front


def test_a_misspelt_word_is_named_by_its_place_and_never_quoted(sealed):
    words = sealed[1].split()
    words[2], words[10] = "zzzap", "qqqat"
    with pytest.raises(IdentityError) as caught:
        unseal(parse_backup(sealed[0]), " ".join(words))
    assert caught.value.code == "bad_phrase"
    assert "number 3, 11 of" in str(caught.value)
    chain = repr((caught.value, caught.value.__cause__, caught.value.__context__))
    assert "zzzap" not in chain
    assert "qqqat" not in chain


@pytest.mark.parametrize("count", [0, 1, 11, 13, 24])
def test_a_phrase_with_words_too_few_or_too_many_is_counted_aloud(sealed, count):
    with pytest.raises(IdentityError, match=f"has 12 words, and this has {count}\\."):
        unseal(parse_backup(sealed[0]), " ".join(["abandon"] * count))


def test_swapped_words_fail_the_checksum_before_the_file_is_blamed(sealed):
    words = VALID_PHRASE.split()
    words[0], words[1] = words[1], words[0]
    with pytest.raises(IdentityError, match="checksum does not fit") as caught:
        unseal(parse_backup(sealed[0]), " ".join(words))
    assert caught.value.code == "bad_phrase"


def test_the_phrase_of_another_backup_opens_nothing(sealed):
    assert code_of(unseal, parse_backup(sealed[0]), VALID_PHRASE) == "wrong_phrase"


@pytest.mark.parametrize("data", [b"\xff\xfelegal", b"legal " * 1000, bytes(5000)])
def test_a_phrase_file_with_anything_else_in_it_is_refused_and_not_quoted(data):
    with pytest.raises(IdentityError) as caught:
        decode_phrase(data)
    assert caught.value.code == "bad_phrase"
    assert caught.value.__context__ is None, "a UnicodeDecodeError carries the phrase"


# -- damaged and hostile files


def test_a_bit_flipped_anywhere_is_refused_and_never_another_key(sealed):
    data, phrase = sealed
    codes = set()
    for place in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[place] ^= 1 << bit
            with pytest.raises(IdentityError) as caught:
                unseal(parse_backup(bytes(flipped)), phrase)
            codes.add(caught.value.code)
    assert codes == {"not_a_backup", "wrong_phrase"}


def test_a_truncated_file_is_refused_at_every_length(sealed):
    data, _ = sealed
    for length in range(len(data) - 1):
        assert code_of(parse_backup, data[:length]) == "not_a_backup"
    assert parse_backup(data[:-1]) == parse_backup(data), "only the line's end may be lost"


def test_an_oversized_file_is_refused_before_it_is_read(tmp_path, sealed):
    path = tmp_path / "backup"
    path.write_bytes(sealed[0] + b" " * MAX_BACKUP_BYTES)
    assert code_of(read_backup, path) == "not_a_backup"
    assert code_of(read_backup, Path("/dev/zero")) == "not_a_backup"


@pytest.mark.parametrize(
    "cost", [b"19", b"31", b"64", b"9007199254740993", b"0", b"9", b"-1", b"17.0", b"null", b'"17"']
)
def test_scrypt_never_runs_with_what_a_hostile_file_asks_for(sealed, cost):
    data = sealed[0].replace(b'"scrypt_log2_n":10', b'"scrypt_log2_n":' + cost)
    assert data != sealed[0]
    assert code_of(parse_backup, data) == "not_a_backup"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (b"backup/1", b"backup/2"),
        (b'{"header"', b'{ "header"'),
        (b'{"header"', b'{"extra":1,"header"'),
        (b'"salt":"', b'"salt":"\\u001b[2J'),
        (b'"format":"', b'"format":"\\u001b[2J'),
    ],
)
def test_unknown_versions_and_fields_and_escapes_are_refused_and_not_repeated(sealed, ours, theirs):
    data = sealed[0].replace(ours, theirs)
    assert data != sealed[0]
    with pytest.raises(IdentityError, match="newer version") as caught:
        parse_backup(data)
    assert "\x1b" not in str(caught.value)


def test_a_header_taken_from_another_backup_is_refused(tmp_path, sealed):
    """Bound as associated data: a file that names another node must not open, whatever its salt."""
    backup = parse_backup(sealed[0])
    header = msgspec.structs.replace(backup.header, node_id=node_id(create_key(tmp_path / "other")))
    assert code_of(unseal, msgspec.structs.replace(backup, header=header), sealed[1]) == "wrong_phrase"


def test_a_forger_who_knows_the_phrase_cannot_pass_his_key_off_as_the_nodes(tmp_path, sealed):
    backup, other = parse_backup(sealed[0]), create_key(tmp_path / "other")
    cipher = _cipher(backup.header, _entropy(sealed[1]))
    theirs = cipher.encrypt(bytes(12), other.private_bytes_raw(), encode(backup.header)).hex()
    assert code_of(unseal, msgspec.structs.replace(backup, sealed=theirs), sealed[1]) == "not_a_backup"


def test_a_key_file_or_a_folder_in_place_of_the_backup_is_one_sentence(tmp_path, key):
    assert code_of(read_backup, tmp_path / "key") == "not_a_backup"
    assert code_of(read_backup, tmp_path) == "backup_path"
    assert code_of(read_backup, tmp_path / "none") == "backup_path"


# -- files


def test_backup_and_restored_key_are_for_their_owner_alone_whatever_the_umask(tmp_path, key, sealed):
    before = os.umask(0)
    try:
        write_backup(tmp_path / "backup", sealed[0])
        restore_key(tmp_path / "restored", key)
    finally:
        os.umask(before)
    for name in ("backup", "restored"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_nothing_is_replaced_nor_written_through_a_link(tmp_path, key, sealed):
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    before = (tmp_path / "key").read_bytes()
    for path in (tmp_path / "key", tmp_path / "link"):
        assert code_of(write_backup, path, sealed[0]) == "backup_exists"
        assert code_of(restore_key, path, key) == "key_exists"
        assert code_of(check_absent, path) == "key_exists"
    assert (tmp_path / "key").read_bytes() == before
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_that_is_missing_is_not_made_for_a_backup(tmp_path, sealed):
    """It may be that of a stick that is not plugged in; the backup would be on the disk that it is to outlive."""
    assert code_of(write_backup, tmp_path / "stick" / "backup", sealed[0]) == "backup_path"
    assert not (tmp_path / "stick").exists()


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_write_leaves_nothing_behind(tmp_path, key, sealed, monkeypatch, fault):
    def interrupted(_descriptor):
        raise fault

    monkeypatch.setattr(os, "fsync", interrupted)
    for write, content in ((write_backup, sealed[0]), (restore_key, key)):
        with pytest.raises((IdentityError, KeyboardInterrupt)):
            write(tmp_path / "new", content)
        assert [path.name for path in tmp_path.iterdir()] == ["key"]


# -- the command, as a person and a script meet it


def veriswarm(*arguments, **options):
    command = [sys.executable, "-m", "node.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False, **options)


@pytest.fixture(scope="module")
def backed_up(tmp_path_factory):
    """A key, its backup and the phrase, made by the command."""
    folder = tmp_path_factory.mktemp("backed_up")
    key = create_key(folder / "key")
    done = veriswarm("--debug", "--verbose", "keys", "backup", folder / "key", folder / "backup")
    assert done.returncode == 0, done.stderr
    return folder, node_id(key), done


def test_backup_prints_the_phrase_and_nothing_else_to_stdout_once(backed_up):
    folder, node, done = backed_up
    assert re.fullmatch(r"([a-z]+ ){11}[a-z]+\n", done.stdout)
    assert done.stdout.strip() not in done.stderr
    assert node in done.stderr
    seed = (folder / "key").read_text().strip()
    content = (folder / "backup").read_text()
    assert seed not in done.stdout + done.stderr + content
    assert done.stdout.strip() not in content
    assert stat.S_IMODE((folder / "backup").stat().st_mode) == 0o600


@pytest.mark.parametrize("from_stdin", [True, False])
def test_a_script_restores_with_a_phrase_from_a_file_or_a_pipe(tmp_path, backed_up, from_stdin):
    folder, node, made = backed_up
    (tmp_path / "phrase").write_text(made.stdout)
    source, given = ("-", made.stdout) if from_stdin else (tmp_path / "phrase", "")
    done = veriswarm("keys", "restore", folder / "backup", tmp_path / "key", "--phrase-file", source, input=given)
    assert (done.returncode, done.stdout, done.stderr) == (0, node + "\n", "")
    assert (tmp_path / "key").read_bytes() == (folder / "key").read_bytes()


def test_a_wrong_phrase_is_one_sentence_and_even_debug_does_not_repeat_it(tmp_path, backed_up):
    folder, _, made = backed_up
    almost = made.stdout.split()
    almost[4] = "zzzap"
    for flags, phrase in (((), VALID_PHRASE), (("--debug", "-v"), VALID_PHRASE), (("--debug", "-v"), " ".join(almost))):
        done = veriswarm(
            *flags, "keys", "restore", folder / "backup", tmp_path / "key", "--phrase-file", "-", input=phrase
        )
        assert done.returncode == 1
        assert done.stdout == ""
        assert ("Traceback" in done.stderr) == bool(flags)
        assert flags or [line.partition(":")[0] for line in done.stderr.splitlines()] == ["Error", "hint"]
        assert not re.search(r"\b(sausage|yellow|zzzap)\b", done.stderr)
        assert not (tmp_path / "key").exists()


def test_an_existing_key_is_kept_and_nobody_is_asked_for_the_phrase(backed_up):
    folder, _, _ = backed_up
    before = (folder / "key").read_bytes()
    done = veriswarm("keys", "restore", folder / "backup", folder / "key", stdin=subprocess.DEVNULL)
    assert done.returncode == 1
    assert "never replaced" in done.stderr
    assert (folder / "key").read_bytes() == before


def test_without_a_terminal_a_script_is_told_of_the_flag(tmp_path, backed_up):
    done = veriswarm("keys", "restore", backed_up[0] / "backup", tmp_path / "key", input=backed_up[2].stdout)
    assert done.returncode == 2
    assert "--phrase-file" in done.stderr
    assert not (tmp_path / "key").exists()


def test_a_phrase_that_could_not_be_printed_leaves_no_backup_that_nobody_can_open(tmp_path, key):
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "node.cli", "keys", "backup", tmp_path / "key", tmp_path / "backup"]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, timeout=120, check=False)
    assert done.returncode != 0
    assert b"there is no backup" in done.stderr
    assert not (tmp_path / "backup").exists()


def test_a_full_disk_leaves_no_part_of_a_backup_and_shows_no_phrase(tmp_path, key):
    limited = ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", sys.executable, "-B", "-m", "node.cli"]
    done = subprocess.run(
        [*limited, "keys", "backup", tmp_path / "key", tmp_path / "backup"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "could not be written" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_what_is_typed_at_the_terminal_is_not_shown(tmp_path, backed_up):
    folder, node, made = backed_up
    master, terminal = pty.openpty()
    command = [sys.executable, "-m", "node.cli", "keys", "restore", folder / "backup", tmp_path / "key"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 60
        while termios.tcgetattr(terminal)[3] & termios.ECHO:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
        os.write(master, made.stdout.encode())
        assert process.wait(60) == 0
        shown = b""
        while select.select([master], [], [], 0)[0]:
            shown += os.read(master, 4096)
    finally:
        process.kill()
        process.wait()
        os.close(master)
        os.close(terminal)
    assert b"Recovery phrase" in shown
    assert node.encode() in shown
    assert made.stdout.split()[0].encode() + b" " + made.stdout.split()[1].encode() not in shown
    assert (tmp_path / "key").read_bytes() == (folder / "key").read_bytes()
