"""The submission file, and the process that reads it: what a worker writes is what the verifier judges."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from node.parquet import METADATA, SCHEMA, write_rollouts
from node.parquet_reader import ChildLimits, ParquetReader, VerifierFailed
from node.protocol.reasons import Reason, Refusal
from node.protocol.run import EnvironmentSpec, LimitsSpec, RunSpec, SamplingSpec
from node.protocol.submission import Rollout

SPEC = RunSpec(
    name="parquet",
    environments=(EnvironmentSpec(name="arithmetic"),),
    sampling=SamplingSpec(group_size=3, max_prompt_tokens=8, max_new_tokens=40, max_version_lead=2),
)


def a_rollout(row: int, *, tokens: int = 5, **changes: object) -> Rollout:
    good = Rollout(
        seed=bytes([row]) * 16,
        prompt_ids=[1, 2, 3],
        completion_ids=list(range(tokens)),
        logprobs=[-0.5 * token for token in range(tokens)],
        segment_versions=[7],
        segment_tokens=[tokens],
        proofs=[bytes([row]) * 258] * -(-tokens // 32),
    )
    return msgspec.structs.replace(good, **changes)


GROUP = [
    a_rollout(0, tokens=1),
    a_rollout(1, tokens=33),
    a_rollout(2, tokens=40, segment_versions=[7, 9], segment_tokens=[3, 37], proofs=[bytes(258)] * 3),
]


@pytest.fixture(scope="module")
def reader() -> Iterator[ParquetReader]:
    with ParquetReader() as reader:
        yield reader


def test_what_a_worker_writes_is_what_the_verifier_reads(reader):
    assert reader.read(write_rollouts(GROUP), spec=SPEC) == GROUP


def test_a_body_is_read_from_a_file_too(reader, tmp_path):
    path = tmp_path / "body"
    path.write_bytes(write_rollouts(GROUP))
    assert reader.read(path, spec=SPEC) == GROUP


def test_any_parquet_reader_can_read_a_submission():
    """Auditors and contributors look at evidence with their own tools."""
    table = pq.read_table(pa.BufferReader(write_rollouts(GROUP)))
    assert table.schema.equals(SCHEMA, check_metadata=False)
    assert table.column("sample").to_pylist() == [0, 1, 2]
    assert pq.read_metadata(pa.BufferReader(write_rollouts(GROUP))).metadata == {
        key.encode(): value.encode() for key, value in METADATA.items()
    }


def test_equal_rollouts_make_equal_bytes():
    """A worker that sends its file again after a lost reply is recognised by the file's digest."""
    assert write_rollouts(GROUP) == write_rollouts(list(GROUP))


@pytest.mark.parametrize("codec", ["none", "snappy", "zstd"])
def test_other_writers_may_choose_a_common_codec(reader, codec):
    table = pq.read_table(pa.BufferReader(write_rollouts(GROUP)))
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, SCHEMA, compression=codec, store_schema=False) as writer:
        writer.write_table(table.cast(SCHEMA))
        writer.add_key_value_metadata(METADATA)
    assert reader.read(sink.getvalue().to_pybytes(), spec=SPEC) == GROUP


@pytest.mark.parametrize("values", [[float("nan")], [float("inf")], [float("-inf")], [1.0]])
def test_a_bad_logprob_reaches_the_check_that_names_it(reader, values):
    """The reader passes values on, so that a worker is told `logprob_not_finite` and not something about Parquet."""
    group = [a_rollout(row, tokens=1, logprobs=values) for row in range(3)]
    (first, *_) = reader.read(write_rollouts(group), spec=SPEC)
    assert repr(first.logprobs) == repr(values)


def test_a_completion_one_token_too_long_reaches_the_check_that_names_it(reader):
    cap = SPEC.sampling.max_new_tokens
    group = [a_rollout(row, tokens=cap + 1) for row in range(3)]
    assert len(reader.read(write_rollouts(group), spec=SPEC)[0].completion_ids) == cap + 1


def test_a_list_at_twice_the_cap_and_a_little_is_read_and_one_longer_is_not(reader):
    most = 2 * SPEC.sampling.max_new_tokens + 16
    for tokens, refused in ((most, False), (most + 1, True)):
        group = [a_rollout(row, completion_ids=[1] * tokens) for row in range(3)]
        if refused:
            with pytest.raises(Refusal) as caught:
                reader.read(write_rollouts(group), spec=SPEC)
            assert caught.value.reason == Reason.NOT_PARQUET
        else:
            assert len(reader.read(write_rollouts(group), spec=SPEC)[2].completion_ids) == tokens


@pytest.mark.parametrize("column", ["segment_versions", "segment_tokens"])
def test_as_many_segments_as_twice_the_lead_allows_and_a_little_are_read_and_one_more_is_not(reader, column):
    """Too many segments reach the check that names them; a list without end does not reach it."""
    most = 2 * (SPEC.sampling.max_version_lead + 1) + 16
    read = reader.read(write_rollouts([a_rollout(row, **{column: [1] * most}) for row in range(3)]), spec=SPEC)
    assert [len(getattr(one, column)) for one in read] == [most] * 3
    with pytest.raises(Refusal) as caught:
        reader.read(write_rollouts([a_rollout(row, **{column: [1] * (most + 1)}) for row in range(3)]), spec=SPEC)
    assert caught.value.reason == Reason.NOT_PARQUET


def test_versions_of_64_bits_arrive_whole(reader):
    """Cut to 32 bits, a version that does not exist would become one that does."""
    versions = [-(2**63), -1, 2**32 + 7, 2**63 - 1]
    group = [a_rollout(row, segment_versions=versions, segment_tokens=[-(2**31), 2**31 - 1]) for row in range(3)]
    assert reader.read(write_rollouts(group), spec=SPEC) == group


def test_the_proofs_of_the_most_segments_that_a_run_allows_are_read(reader):
    """Each switch may leave a chunk unfilled, so a completion can need one more proof for each."""
    group = [
        a_rollout(row, tokens=40, segment_versions=[7, 8, 9], segment_tokens=[1, 1, 38], proofs=[bytes(258)] * 4)
        for row in range(3)
    ]
    assert reader.read(write_rollouts(group), spec=SPEC) == group


def test_a_body_at_the_byte_limit_is_read_and_one_byte_more_is_not(reader, tmp_path):
    group = [a_rollout(row, tokens=1, proofs=[os.urandom(258)] * 18) for row in range(3)]
    body = write_rollouts(group)
    for body_limit, refused in ((len(body), False), (len(body) - 1, True)):
        spec = RunSpec(
            name="small",
            environments=SPEC.environments,
            sampling=SPEC.sampling,
            limits=LimitsSpec(max_submission_bytes=body_limit),
        )
        (tmp_path / "body").write_bytes(body)
        for source in (body, tmp_path / "body"):
            if refused:
                with pytest.raises(Refusal, match=f"more than {body_limit} bytes"):
                    reader.read(source, spec=spec)
            else:
                assert reader.read(source, spec=spec) == group


def test_one_child_serves_file_after_file(reader):
    reader.read(write_rollouts(GROUP), spec=SPEC)
    child = reader._child
    with pytest.raises(Refusal):
        reader.read(b"garbage", spec=SPEC)
    reader.read(write_rollouts(GROUP), spec=SPEC)
    assert reader._child is child


def test_readers_in_several_threads_get_their_own_files(reader):
    """A verifier that mixed up answers would judge one worker by another's file."""
    wrong: list[int] = []

    def read_many(seed: int) -> None:
        group = [a_rollout(seed + row) for row in range(3)]
        body = write_rollouts(group)
        wrong.extend(seed for _ in range(20) if reader.read(body, spec=SPEC) != group)

    threads = [threading.Thread(target=read_many, args=(seed,)) for seed in (10, 20, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert wrong == []


def test_the_child_inherits_no_secret_and_keeps_its_limits(monkeypatch):
    monkeypatch.setenv("VERISWARM_SECRET", "hunter2")
    with ParquetReader() as reader:
        reader.read(write_rollouts(GROUP), spec=SPEC)
        assert reader._child is not None
        process = Path(f"/proc/{reader._child.pid}")
        assert b"hunter2" not in (process / "environ").read_bytes()
        limits = {line[:26].strip(): line[26:].split()[0] for line in (process / "limits").read_text().splitlines()[1:]}
    assert int(limits["Max address space"]) < 2 * 1024**3
    assert limits["Max file size"] == limits["Max core file size"] == limits["Max processes"] == "0"
    assert int(limits["Max open files"]) <= 16
    assert int(limits["Max cpu time"]) <= 10


def test_closing_the_reader_ends_the_child():
    reader = ParquetReader()
    reader.read(write_rollouts(GROUP), spec=SPEC)
    child = reader._child
    assert child is not None
    reader.close()
    assert child.returncode == 0
    reader.close()


def test_a_killed_child_costs_nobody_a_rollout():
    with ParquetReader() as reader:
        for _ in range(2):
            assert reader.read(write_rollouts(GROUP), spec=SPEC) == GROUP
            assert reader._child is not None
            os.kill(reader._child.pid, signal.SIGKILL)


def test_a_child_that_stops_responding_is_replaced():
    with ParquetReader(ChildLimits(wall_seconds=1.0)) as reader:
        reader.read(write_rollouts(GROUP), spec=SPEC)
        stopped = reader._child
        assert stopped is not None
        os.kill(stopped.pid, signal.SIGSTOP)
        assert reader.read(write_rollouts(GROUP), spec=SPEC) == GROUP
        assert stopped.returncode == -signal.SIGKILL


def broken_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, **limits: float) -> ParquetReader:
    """A reader whose child runs `script` after it said that it is ready: bugs of a parser that are not at hand."""
    (tmp_path / "broken_child.py").write_text(
        textwrap.dedent(
            """
            import os, signal, sys, time
            from node.parquet_child import grant_cpu
            from node.parquet_frames import READY, receive_frame, send_frame
            send_frame(sys.stdout.buffer, READY)
            receive_frame(sys.stdin.buffer, max_bytes=2**30)
            """
        )
        + script
    )
    monkeypatch.setattr(
        "node.parquet_reader._environment",
        lambda: {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
    )
    reader = ParquetReader(ChildLimits(**limits))  # type: ignore[arg-type]
    reader._module = "broken_child"
    return reader


@pytest.mark.parametrize(
    "script",
    ["os.kill(os.getpid(), signal.SIGSEGV)", "grant_cpu(0)\nwhile True: pass", "sys.exit(1)"],
    ids=["crash", "endless loop", "uncaught exception"],
)
def test_a_file_that_ends_the_parser_twice_is_refused(tmp_path, monkeypatch, script):
    with (
        broken_reader(tmp_path, monkeypatch, script) as reader,
        pytest.raises(Refusal, match="ended the parser") as caught,
    ):
        reader.read(b"any file", spec=SPEC)
    assert caught.value.reason == Reason.NOT_PARQUET


@pytest.mark.parametrize(
    "script",
    ["time.sleep(60)", "os.kill(os.getpid(), signal.SIGKILL)", "os.kill(os.getpid(), signal.SIGTERM)"],
    ids=["no answer in time", "out of memory killer", "operator"],
)
def test_a_parser_that_others_stop_blames_nobody(tmp_path, monkeypatch, script):
    """A machine that is short of memory or time must not call an honest file malformed."""
    with broken_reader(tmp_path, monkeypatch, script, wall_seconds=0.5) as reader, pytest.raises(VerifierFailed):
        reader.read(b"any file", spec=SPEC)


def test_a_child_that_answers_nonsense_is_not_believed(tmp_path, monkeypatch):
    script = (
        "receive_frame(sys.stdin.buffer, max_bytes=2**30)\nsend_frame(sys.stdout.buffer, b'\\x93\\x01\\x02\\x03')\n"
    )
    with broken_reader(tmp_path, monkeypatch, script) as reader, pytest.raises(Refusal, match="ValidationError"):
        reader.read(b"any file", spec=SPEC)


def test_limits_too_tight_for_any_file_blame_nobody():
    """An operator who sets the memory limit too low must not see every worker rejected."""
    with ParquetReader(ChildLimits(address_space_bytes=1024 * 1024)) as reader, pytest.raises(VerifierFailed):
        reader.read(write_rollouts(GROUP), spec=SPEC)


def test_a_submission_that_is_no_longer_on_disk_blames_nobody(reader, tmp_path):
    with pytest.raises(VerifierFailed):
        reader.read(tmp_path / "gone", spec=SPEC)
