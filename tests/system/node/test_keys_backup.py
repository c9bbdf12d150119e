"""A lost key file is a lost node and its credit: 24 words give exactly this key back, or nothing."""

from __future__ import annotations

import contextlib
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

import pytest
from locations import ROOT
from mnemonic import Mnemonic

from node.errors import IdentityError
from node.keys.backup import decode_phrase, key_of, phrase_of
from node.keys.identity import check_absent, create_key, load_key, node_id, write_key

# BIP-39's own vectors for 256 bits.
VECTORS = {
    "legal winner thank year wave sausage worth useful legal winner thank year wave sausage worth useful legal winner "
    "thank year wave sausage worth title": b"\x7f" * 32,
    "letter advice cage absurd amount doctor acoustic avoid letter advice cage absurd amount doctor acoustic avoid "
    "letter advice cage absurd amount doctor acoustic bless": b"\x80" * 32,
}
VALID_PHRASE = next(iter(VECTORS))


@pytest.fixture
def key(tmp_path):
    return create_key(tmp_path / "key")


def code_of(function, *arguments):
    with pytest.raises(IdentityError) as caught:
        function(*arguments)
    return caught.value.code


# -- what the words give back


def test_the_words_make_the_node_again(tmp_path, key):
    write_key(tmp_path / "new" / "machine" / "key", key_of(phrase_of(key)))
    assert (tmp_path / "new" / "machine" / "key").read_bytes() == (tmp_path / "key").read_bytes()
    assert node_id(load_key(tmp_path / "new" / "machine" / "key")) == node_id(key)


@pytest.mark.parametrize(("phrase", "seed"), VECTORS.items(), ids=("7f", "80"))
def test_the_words_are_bip_39_so_that_other_tools_read_them(phrase, seed):
    key = key_of(phrase)
    assert key.private_bytes_raw() == seed
    assert phrase_of(key) == phrase


# -- phrases


def test_a_phrase_typed_from_paper_may_have_any_case_and_white_space(key):
    phrase = phrase_of(key)
    assert len(phrase.split()) == 24
    for typed in (phrase.upper(), phrase.title(), "\n  " + phrase.replace(" ", " \t\r\n") + "\n\n"):
        assert node_id(key_of(typed)) == node_id(key)
    assert decode_phrase(b"\xef\xbb\xbf" + phrase.encode()) == phrase  # Windows' editor puts a mark in front


def test_a_misspelt_word_is_named_by_its_place_and_never_quoted(key):
    words = phrase_of(key).split()
    words[2], words[10] = "zzzap", "qqqat"
    with pytest.raises(IdentityError) as caught:
        key_of(" ".join(words))
    assert caught.value.code == "bad_phrase"
    assert "number 3, 11 of" in str(caught.value)
    chain = repr((caught.value, caught.value.__cause__, caught.value.__context__))
    assert "zzzap" not in chain
    assert "qqqat" not in chain


@pytest.mark.parametrize("count", [0, 1, 12, 23, 25])
def test_a_phrase_with_words_too_few_or_too_many_is_counted_aloud(count):
    with pytest.raises(IdentityError, match=f"has 24 words, and this has {count}\\."):
        key_of(" ".join(["abandon"] * count))


def test_swapped_words_fail_the_checksum():
    words = VALID_PHRASE.split()
    words[0], words[1] = words[1], words[0]
    with pytest.raises(IdentityError, match="checksum does not fit") as caught:
        key_of(" ".join(words))
    assert caught.value.code == "bad_phrase"


def test_a_wrong_word_passes_the_checksum_once_in_256_and_is_then_another_node():
    """What docs/operating.md tells people to compare the node's id for."""
    words = VALID_PHRASE.split()
    passed = []
    for other in Mnemonic("english").wordlist:
        if other != words[5]:
            with contextlib.suppress(IdentityError):
                passed.append(node_id(key_of(" ".join([*words[:5], other, *words[6:]]))))
    assert 1 <= len(passed) <= 24, "of 2047"
    assert node_id(key_of(VALID_PHRASE)) not in passed


@pytest.mark.parametrize("data", [b"\xff\xfelegal", b"legal " * 1000, bytes(5000)])
def test_a_phrase_file_with_anything_else_in_it_is_refused_and_not_quoted(data):
    with pytest.raises(IdentityError) as caught:
        decode_phrase(data)
    assert caught.value.code == "bad_phrase"
    assert caught.value.__context__ is None, "a UnicodeDecodeError carries the phrase"


# -- files


def test_a_restored_key_is_for_its_owner_alone_whatever_the_umask(tmp_path, key):
    before = os.umask(0)
    try:
        write_key(tmp_path / "restored", key)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "restored").stat().st_mode) == 0o600


def test_nothing_is_replaced_nor_written_through_a_link(tmp_path, key):
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    before = (tmp_path / "key").read_bytes()
    for path in (tmp_path / "key", tmp_path / "link"):
        assert code_of(write_key, path, key) == "key_exists"
        assert code_of(check_absent, path) == "key_exists"
    assert (tmp_path / "key").read_bytes() == before
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_write_leaves_nothing_behind(tmp_path, key, monkeypatch, fault):
    def interrupted(_descriptor):
        raise fault

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises((IdentityError, KeyboardInterrupt)):
        write_key(tmp_path / "new", key)
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


# -- the command, as a person and a script meet it


def swarmproof(*arguments, **options):
    command = [sys.executable, "-m", "node.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False, **options)


@pytest.fixture(scope="module")
def backed_up(tmp_path_factory):
    """A key and its words, printed by the command."""
    folder = tmp_path_factory.mktemp("backed_up")
    key = create_key(folder / "key")
    done = swarmproof("--debug", "--verbose", "keys", "backup", folder / "key")
    assert done.returncode == 0, done.stderr
    return folder, node_id(key), done


def test_backup_prints_the_phrase_and_nothing_else_to_stdout_once(backed_up):
    folder, node, done = backed_up
    assert re.fullmatch(r"([a-z]+ ){23}[a-z]+\n", done.stdout)
    assert done.stdout.strip() not in done.stderr
    assert node in done.stderr
    seed = (folder / "key").read_text().strip()
    assert seed not in done.stdout + done.stderr
    assert [path.name for path in folder.iterdir()] == ["key"], "words on paper, and no file"


@pytest.mark.parametrize("from_stdin", [True, False])
def test_a_script_restores_with_a_phrase_from_a_file_or_a_pipe(tmp_path, backed_up, from_stdin):
    folder, node, made = backed_up
    (tmp_path / "phrase").write_text(made.stdout)
    source, given = ("-", made.stdout) if from_stdin else (tmp_path / "phrase", "")
    done = swarmproof("keys", "restore", tmp_path / "key", "--phrase-file", source, input=given)
    assert (done.returncode, done.stdout, done.stderr) == (0, node + "\n", "")
    assert (tmp_path / "key").read_bytes() == (folder / "key").read_bytes()


def test_a_wrong_phrase_is_one_sentence_and_even_debug_does_not_repeat_it(tmp_path, backed_up):
    made = backed_up[2]
    almost = made.stdout.split()
    almost[4] = "zzzap"
    swapped = VALID_PHRASE.replace("legal winner", "winner legal", 1)
    for flags, phrase in (((), swapped), (("--debug", "-v"), swapped), (("--debug", "-v"), " ".join(almost))):
        done = swarmproof(*flags, "keys", "restore", tmp_path / "key", "--phrase-file", "-", input=phrase)
        assert done.returncode == 1
        assert done.stdout == ""
        assert ("Traceback" in done.stderr) == bool(flags)
        assert flags or [line.partition(":")[0] for line in done.stderr.splitlines()] == ["Error", "hint"]
        assert not re.search(r"\b(sausage|title|zzzap)\b", done.stderr)
        assert not (tmp_path / "key").exists()


def test_an_existing_key_is_kept_and_nobody_is_asked_for_the_phrase(backed_up):
    folder, _, _ = backed_up
    before = (folder / "key").read_bytes()
    done = swarmproof("keys", "restore", folder / "key", stdin=subprocess.DEVNULL)
    assert done.returncode == 1
    assert "never replaced" in done.stderr
    assert (folder / "key").read_bytes() == before


def test_without_a_terminal_a_script_is_told_of_the_flag(tmp_path, backed_up):
    done = swarmproof("keys", "restore", tmp_path / "key", input=backed_up[2].stdout)
    assert done.returncode == 2
    assert "--phrase-file" in done.stderr
    assert not (tmp_path / "key").exists()


def test_words_that_could_not_be_printed_are_a_failure(key, tmp_path):
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "node.cli", "keys", "backup", tmp_path / "key"]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, timeout=120, check=False)
    assert done.returncode != 0
    assert b"write it on paper" not in done.stderr


def test_what_is_typed_at_the_terminal_is_not_shown(tmp_path, backed_up):
    folder, node, made = backed_up
    master, terminal = pty.openpty()
    command = [sys.executable, "-m", "node.cli", "keys", "restore", tmp_path / "key"]
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
    assert b"24 words" in shown
    assert node.encode() in shown
    assert made.stdout.split()[0].encode() + b" " + made.stdout.split()[1].encode() not in shown
    assert (tmp_path / "key").read_bytes() == (folder / "key").read_bytes()
