"""What fuzzing found, each as the attack that it would have been."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, pre_tokenizers

from benchmarks.fuzzing import thrift
from benchmarks.fuzzing.targets.parquet import CHUNKS, COLUMNS, ROW_GROUPS, SPEC, column_metadata, join_file, split_file
from benchmarks.fuzzing.targets.parquet import written as parquet_file
from node.parquet_child import MAX_FOOTER_BYTES
from node.parquet_reader import ParquetReader
from node.policy import inspect_policy, load_policy, render_completion, render_prompt
from node.policy_errors import MalformedPolicy
from node.protocol.reasons import Reason, Refusal
from shardcast.board import Board
from shardcast.listener import listen
from shardcast.server import make_app
from shardcast.store import Store

# A footer that ends the parsing process: two starts of a process for the verifier, for a few hundred bytes.

CODEC, SIZE_STATISTICS, DEFINITION_HISTOGRAM, CRYPTO_METADATA = 4, 16, 3, 8


def unknown_codec(footer):
    thrift.field(column_metadata(footer)[0], CODEC)[2] = 255


def more_levels_than_the_schema_has(footer):
    sizes = thrift.field(column_metadata(footer)[2], SIZE_STATISTICS)[2]
    thrift.field(sizes, DEFINITION_HISTOGRAM)[2][1].append(1)


def encrypted_column(footer):
    with_a_key_of_its_own = [[1, thrift.LIST, [thrift.BINARY, [b"sample"]]]]
    chunks(footer)[0].append([CRYPTO_METADATA, thrift.STRUCT, [[2, thrift.STRUCT, with_a_key_of_its_own]]])


def column_too_few(footer):
    chunks(footer).pop()


def chunks(footer):
    group = thrift.field(footer, ROW_GROUPS)[2][1][0]
    return thrift.field(group, CHUNKS)[2][1]


@pytest.mark.parametrize(
    "change",
    [unknown_codec, more_levels_than_the_schema_has, encrypted_column, column_too_few],
    ids=lambda f: f.__name__,
)
def test_a_footer_made_to_end_the_parser_is_refused_by_the_same_process(change):
    front, footer = split_file(parquet_file(COLUMNS))
    with ParquetReader() as reader:
        assert len(reader.read(join_file(front, thrift.encode(footer)), spec=SPEC)) == len(COLUMNS["sample"])
        before = reader._child.pid
        change(footer)
        with pytest.raises(Refusal) as caught:
            reader.read(join_file(front, thrift.encode(footer)), spec=SPEC)
        assert caught.value.reason is Reason.NOT_PARQUET
        assert (reader._child.pid, reader._child.poll()) == (before, None)


@pytest.mark.parametrize(
    "footer",
    [
        b"\x19" * 5000,
        b"\x1c" * 5000,
        b"\x19\xf9\xff\xff\xff\xff\x0f",
        b"\x15" + b"\x80" * 5000,
        b"\x18\xff\xff\xff\xff\x0f",
        b"\x00" * (MAX_FOOTER_BYTES - 64),
        b"\x1b\x01\x88\x01a\x01b\x00",
    ],
    ids=["nested lists", "nested structs", "a long list", "an endless number", "a long text", "zeros", "a map"],
)
def test_a_footer_that_is_no_thrift_is_refused_by_the_same_process(footer):
    front, _ = split_file(parquet_file(COLUMNS))
    with ParquetReader() as reader:
        reader.read(parquet_file(COLUMNS), spec=SPEC)
        before = reader._child.pid
        with pytest.raises(Refusal) as caught:
            reader.read(join_file(front, footer), spec=SPEC)
        assert caught.value.reason is Reason.NOT_PARQUET
        assert reader._child.pid == before


def test_a_parser_that_was_taken_over_answers_with_text_that_is_none(tmp_path, monkeypatch):
    """msgspec raises UnicodeDecodeError there, which is none of its own errors: it left `read` as it was."""
    script = (
        "import sys\n"
        "from node.parquet_frames import READY, receive_frame, send_frame\n"
        "send_frame(sys.stdout.buffer, READY)\n"
        "for _ in range(2):\n"
        "    receive_frame(sys.stdin.buffer, max_bytes=2**31)\n"
        "send_frame(sys.stdout.buffer, b'\\x82\\xa4rows\\x90\\xa6detail\\xa2\\xff\\xfe')\n"
    )
    (tmp_path / "owned_child.py").write_text(script)
    monkeypatch.setattr(
        "node.parquet_reader._environment",
        lambda: {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
    )
    with ParquetReader() as reader:
        reader._module = "owned_child"
        with pytest.raises(Refusal, match="UnicodeDecodeError"):
            reader.read(parquet_file(COLUMNS), spec=SPEC)


# A tokenizer that makes the library panic: no Exception, so it went through every handler and ended the node.


@pytest.fixture
def rewritten(tiny_policy_path, tmp_path):
    """Writes the tiny policy with its tokenizer changed."""

    def write(change) -> Path:
        data = tiny_policy_path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        header["__metadata__"]["tokenizer"] = change(header["__metadata__"]["tokenizer"])
        text = json.dumps(header).encode()
        path = tmp_path / "policy"
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
        return path

    return write


def test_a_tokenizer_that_panics_while_it_is_read(rewritten):
    def broken(text):
        tokenizer = json.loads(text)
        # A merge of two tokens of which the continuing one is shorter than the prefix that it must begin with.
        vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, "a": 3, "b": 4, "ab": 5}
        tokenizer["model"] = {
            "type": "BPE",
            "vocab": vocabulary,
            "merges": [["a", "b"]],
            "continuing_subword_prefix": "#" * 64,
        }
        return json.dumps(tokenizer)

    path = rewritten(broken)
    for read in (inspect_policy, lambda path: load_policy(path, dtype=torch.float32)):
        with pytest.raises(MalformedPolicy) as caught:
            read(path)
        assert caught.value.code == "bad_tokenizer"


def test_a_pattern_that_backtracks_without_end_is_the_policys_fault(rewritten):
    def backtracking(text):
        tokenizer = Tokenizer.from_str(text)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(1+)+$"), "isolated")
        return tokenizer.to_str()

    policy = inspect_policy(rewritten(backtracking))
    with pytest.raises(MalformedPolicy, match="panic") as caught:
        render_prompt(policy, "1" * 60 + "!")
    assert caught.value.code == "bad_tokenizer"
    assert render_completion(policy, [5, 6]) != ""


def test_a_tokenizer_that_knows_no_unknown_token_is_the_policys_fault(rewritten):
    def without(text):
        tokenizer = json.loads(text)
        tokenizer["model"]["unk_token"] = "nowhere"
        return json.dumps(tokenizer)

    policy = inspect_policy(rewritten(without))
    with pytest.raises(MalformedPolicy, match="refused"):
        render_prompt(policy, "é")


# A header that no text can hold: aiohttp's answer to it failed, with a traceback in a relay's log each time, and with
# a 500 for what no route of its router can match.


@pytest.mark.parametrize(
    "target",
    [
        *("GET /v1/head", "HEAD /v1/head", "GET /nothing", "POST /health"),
        *("CONNECT run.example:8720", "OPTIONS *", "GET http://run.example", "GET /%0a"),
    ],
)
@pytest.mark.parametrize("expectation", [b"\xff\x80", b"100-continue", b"x" * 500])
async def test_a_strangers_expectation_neither_fails_nor_fills_the_log(tmp_path, caplog, target, expectation):
    store = Store(tmp_path, run_id="ab" * 32)
    listener = await listen(make_app(Board(store=store, role="relay", run_id="ab" * 32, head=lambda: None)))
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(
            target.encode() + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\nExpect: " + expectation + b"\r\n\r\n"
        )
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        await writer.wait_closed()
    finally:
        await listener.stop()
        store.close()
    assert answer.startswith(b"HTTP/1.1 417 ")
    assert target.startswith("HEAD") or b'"code":"bad_request"' in answer
    assert caplog.records == [], "strangers must not be able to fill the log"
