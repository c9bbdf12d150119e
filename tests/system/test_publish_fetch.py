"""`swarmproof publish` and `swarmproof fetch` as people run them: two processes, a file, and the line that is
copied."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from publishing import ROOT, SWARMPROOF, WAIT_SECONDS, Shop, replace, slow, trained, weights
from waiting import until

from shardcast.store.staging import chunk_bytes_for


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = Shop(tmp_path)
    yield made
    made.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    path = tmp_path / "mine" / "weights.bin"
    path.write_bytes(weights(3_000_000))
    return path


def is_explained(text: str) -> bool:
    return re.fullmatch(r"Error: .+\nhint: .+\n", text) is not None


# -- versions


def test_the_printed_command_fetches_the_file_and_its_next_version_as_a_delta(shop, file, tmp_path):
    publisher, address = shop.publish(file, "--watch")
    got = tmp_path / "got.bin"
    first = shop.fetch(*address.arguments, "-o", str(got))
    assert (first.returncode, first.stderr) == (0, "")
    assert f"version 1 is in {got}: 3.0 MB; 3.0 MB transferred in full" in first.stdout
    assert got.read_bytes() == file.read_bytes()

    replace(file, trained(weights(3_000_000)))
    publisher.until_said("weights.bin is version 2")
    announced = re.search(r"version 2: 3\.0 MB, or ([\d.]+ \w+) from version 1", publisher.out)
    assert announced, publisher.out
    second = shop.fetch(*address.arguments, "-o", str(got), "--json")
    result = json.loads(second.stdout)
    assert got.read_bytes() == file.read_bytes()
    assert (result["version"], result["way"], result["path"], result["size_bytes"]) == (2, "delta", str(got), 3_000_000)
    assert 0 < result["transferred_bytes"] < 30_000

    again = json.loads(shop.fetch(*address.arguments, "-o", str(got), "--json").stdout)
    assert (again["version"], again["way"], again["transferred_bytes"]) == (2, "held", 0)
    assert publisher.end() == 0
    assert "Traceback" not in publisher.err


def test_a_publisher_that_starts_again_goes_on_with_its_versions(shop, file):
    publisher, address = shop.publish(file)
    assert publisher.end(signal.SIGTERM) == 0
    publisher, unchanged = shop.publish(file)
    assert "weights.bin is version 1:" in publisher.out
    assert (unchanged.run_id, unchanged.key) == (address.run_id, address.key)
    publisher.kill()
    file.write_bytes(weights(10_000, seed=2))
    publisher, _ = shop.publish(file)
    assert "weights.bin is version 2: 10.0 kB" in publisher.out
    publisher.end()
    assert "weights.bin is version 7:" in shop.publish(file, "--version", "7")[0].out


def test_older_versions_stay_as_deltas_where_that_is_asked_for(shop, file):
    """A checkpoint a step, of gigabytes each, would fill the disk or be gone."""
    publisher, _ = shop.publish(file, "--version", "8", "--watch", "--keep-versions", "1")
    for version in (9, 10):
        replace(file, trained(weights(3_000_000), every=version * 1000))
        publisher.until_said(f"weights.bin is version {version}")
    folder = shop.folder / "publisher" / "origin"
    until(lambda: {path.name.split("-")[0] for path in (folder / "versions").iterdir()} == {"8", "10"})
    assert {path.name.split("-")[0] for path in (folder / "deltas").iterdir()} == {"9", "10"}


def test_without_a_folder_each_file_has_its_own_versions(shop, file, tmp_path):
    other = tmp_path / "weights.bin"
    other.write_bytes(b"another file of this name")
    addresses = []
    for path in (file, other):
        process = shop.start("publish", str(path), "--port", "0")
        process.until_said("    -o ")
        addresses.append(re.findall("[0-9a-f]{64}", process.out))
        assert "is version 1:" in process.out
    assert not set(addresses[0]) & set(addresses[1])


def test_a_watched_file_that_is_emptied_or_away_costs_nobody_the_version_before(shop, file, tmp_path):
    publisher, address = shop.publish(file, "--watch")
    before = file.read_bytes()
    file.unlink()
    time.sleep(2.5)
    file.touch()
    publisher.until_said("not published (")
    assert shop.fetch(*address.arguments, "-o", str(tmp_path / "got")).returncode == 0
    assert (tmp_path / "got").read_bytes() == before
    replace(file, b"here again")
    publisher.until_said("is version 2: 10 bytes")


def test_a_publisher_sends_no_more_than_it_was_told_to(shop, file):
    _, address = shop.publish(file, "--max-rate", "2")
    result = json.loads(shop.fetch(*address.arguments, "--json").stdout)
    assert file.stat().st_size / result["seconds"] < 2_200_000


def test_one_folder_has_one_publisher_at_a_time(shop, file):
    shop.publish(file)
    second = shop.start("publish", str(file), "--port", "0", "--state", str(shop.folder / "publisher"))
    second.until_said("Error: ")
    assert second.wait() == 1
    assert is_explained(second.err)
    assert "start it with --watch" in second.err


# -- following


def test_a_follower_gets_every_version_and_outlives_its_publisher(shop, file, tmp_path):
    publisher, address = shop.publish(file, "--watch")
    got = tmp_path / "got.bin"
    follower = shop.start(
        "fetch", *address.arguments, "--state", str(tmp_path / "s"), "--follow", "--json", "-o", str(got)
    )
    follower.until_said('"version": 1')
    replace(file, trained(weights(3_000_000)))
    follower.until_said('"version": 2')
    assert got.read_bytes() == file.read_bytes()
    publisher.kill()
    file.write_bytes(trained(weights(3_000_000), every=3000))
    shop.publish(file, "--port", address.url.rpartition(":")[2])
    follower.until_said('"version": 3')
    assert got.read_bytes() == file.read_bytes()
    ways = [json.loads(line)["way"] for line in follower.out.splitlines()]
    assert ways == ["full", "delta", "delta"], follower.err
    assert follower.end() == 0
    assert "Traceback" not in follower.err


def test_a_follower_may_come_before_the_publisher(shop, file, tmp_path):
    publisher, address = shop.publish(file)
    publisher.end()
    follower = shop.start("fetch", *address.arguments, "--state", str(tmp_path / "s"), "--follow")
    follower.until_said("waiting for a source")
    shop.publish(file, "--port", address.url.rpartition(":")[2])
    follower.until_said("version 1 is in ")
    assert follower.end() == 0


# -- interruptions


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_fetch_goes_on_where_it_stopped_and_leaves_the_old_file(shop, file, tmp_path, number):
    replace(file, weights(24_000_000))
    _, address = shop.publish(file)
    mine = tmp_path / "where it goes"
    mine.mkdir()
    got, state = mine / "got.bin", tmp_path / "fetcher"
    got.write_bytes(b"the old one")

    def journal() -> Path | None:
        return next(state.glob("downloads/*.journal"), None)

    with slow(address.url, bytes_per_s=4_000_000) as url:
        fetcher = shop.start("fetch", url, *address.arguments[1:], "--state", str(state), "-o", str(got))
        until(lambda: (path := journal()) is not None and path.stat().st_size >= 4 * 8, what=lambda: fetcher.err)
        code = fetcher.end(number)
    assert (code, fetcher.out) == ((130, "") if number is signal.SIGINT else (-9, ""))
    if number is signal.SIGINT:
        assert fetcher.err.endswith("stopped; the same command goes on from here\n")
        assert "Traceback" not in fetcher.err
    assert [path.read_bytes() for path in mine.iterdir()] == [b"the old one"]

    held = journal().stat().st_size // 4
    result = json.loads(shop.fetch(*address.arguments, "-o", str(got), "--json").stdout)
    assert got.read_bytes() == file.read_bytes()
    assert result["transferred_bytes"] <= 24_000_000 - (held - 1) * chunk_bytes_for(file)


def test_what_cannot_be_written_whole_is_not_there(shop, file, tmp_path):
    _, address = shop.publish(file)
    assert shop.fetch(*address.arguments).returncode == 0
    mine = tmp_path / "small disk"
    mine.mkdir()
    (mine / "got.bin").write_bytes(b"the old one")
    failed = shop.fetch(*address.arguments, "-o", str(mine / "got.bin"), largest_file=1_000_000)
    assert failed.returncode == 2
    assert is_explained(failed.stderr)
    assert [path.read_bytes() for path in mine.iterdir()] == [b"the old one"]


def test_editing_the_file_that_was_fetched_costs_neither_the_edit_nor_the_next_version(shop, file, tmp_path):
    _, address = shop.publish(file)
    got = tmp_path / "got.bin"
    shop.fetch(*address.arguments, "-o", str(got))
    with got.open("r+b") as mine:
        mine.write(b"my edit")
    assert "here already" in shop.fetch(*address.arguments).stdout
    assert got.read_bytes().startswith(b"my edit")


# -- what does not belong together, or is not there


def test_mistakes_cost_one_line_that_says_what_to_do(shop, file, tmp_path):
    publisher, address = shop.publish(file)
    _, other = shop.publish(file, state="other")
    url = address.url

    strangers = shop.fetch(url, *other.arguments[1:])
    assert strangers.returncode == 1
    assert is_explained(strangers.stderr)
    assert "signed by" in strangers.stderr
    assert "Copy --run-id, --key" in strangers.stderr

    for run_id, key in ((other.run_id, address.key), (address.run_id, other.key)):
        mixed = shop.fetch(url, "--run-id", run_id, "--key", key)
        assert mixed.returncode == 2
        assert "do not belong together" in mixed.stderr.splitlines()[-2]
    assert "64 hexadecimal digits" in shop.fetch(url, "--run-id", address.run_id, "--key", "x").stderr

    nowhere = shop.fetch(*address.arguments, "-o", str(tmp_path / "no folder" / "got"))
    assert nowhere.returncode == 2
    assert is_explained(nowhere.stderr)
    publisher.end()
    away = shop.fetch(*address.arguments)
    assert away.returncode == 2
    assert is_explained(away.stderr)
    assert "No source can be reached.\nhint: See whether `swarmproof publish` runs there" in away.stderr


def test_rollback_by_a_publisher_that_lost_its_versions_is_refused(shop, file):
    publisher, _ = shop.publish(file)
    publisher.end()
    file.write_bytes(b"the second")
    publisher, address = shop.publish(file)
    assert shop.fetch(*address.arguments).returncode == 0
    publisher.end()
    key = shop.folder / "publisher" / "key"
    _, again = shop.publish(file, "--key", str(key), state="lost")
    refused = shop.fetch(*again.arguments)
    assert refused.returncode == 1
    assert is_explained(refused.stderr)
    assert "head of version 1 is older than version 2, already seen" in refused.stderr


def test_two_fetches_share_no_folder(shop, file, tmp_path):
    _, address = shop.publish(file)
    first = shop.start("fetch", *address.arguments, "--state", str(tmp_path / "fetcher"), "--follow")
    first.until_said("version 1")
    second = shop.fetch(*address.arguments)
    assert second.returncode == 2
    assert is_explained(second.stderr)
    assert "--state" in second.stderr


# -- on a terminal


def test_a_terminal_shows_how_far_it_is_and_keeps_the_result_only(shop, file, tmp_path):
    _, address = shop.publish(file)
    near, far = pty.openpty()
    with slow(address.url, bytes_per_s=2_000_000) as url:
        command = [*SWARMPROOF, "fetch", url, *address.arguments[1:], "--state", str(tmp_path / "s")]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=far,
            cwd=ROOT,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
            text=True,
        )
        os.close(far)
        seen = b""
        with contextlib.suppress(OSError):  # the terminal is gone when the process is
            while data := os.read(near, 4096):
                seen += data
        out, _ = process.communicate(timeout=WAIT_SECONDS)
    os.close(near)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode())
    assert process.returncode == 0
    assert re.search(r"version 1 [━╸╺]+ \d+% of 3\.0 MB  [\d.]+ \w+/s  1 source  0:0\d left", plain), plain
    assert max(map(len, plain.replace("\r", "\n").splitlines())) <= 80
    assert out.startswith("version 1 is in ")


def test_a_crash_in_an_extension_module_says_where(shop, file):
    """Whoever finds a process gone by SIGSEGV, of a driver or a kernel, would have not a line to report."""
    publisher, _ = shop.publish(file)
    assert publisher.end(signal.SIGSEGV) == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in publisher.err
    assert "broadcast.py" in publisher.err
