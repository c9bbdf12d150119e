"""What fuzzing found, each as the attack that it would have been."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
import zstandard
from tokenizers import Regex, Tokenizer, pre_tokenizers

from benchmarks.fuzzing.targets.submission import GROUPS, SPEC
from node.policy.errors import MalformedPolicy
from node.policy.file import inspect_policy, load_policy, render_completion, render_prompt
from node.protocol.reasons import Reason, Refusal
from node.submission.reader import read_rollouts
from node.submission.writer import compress, write_rollouts
from shardcast.serve.listener import listen
from shardcast.serve.server import make_app
from shardcast.serve.state import ServedState
from shardcast.store.versions import Store

# A string that is no UTF-8, where msgspec raises UnicodeDecodeError, which is none of its own errors.


@pytest.mark.parametrize("old", [b"seed", b"swarmproof/rollouts/3"])
def test_a_submission_with_text_that_is_none_is_refused(old):
    content = zstandard.decompress(write_rollouts(GROUPS[0]))
    with pytest.raises(Refusal) as caught:
        read_rollouts(compress(content.replace(old, b"\xff" * len(old))), spec=SPEC)
    assert caught.value.reason in {Reason.MALFORMED_SUBMISSION, Reason.WRONG_SCHEMA}


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
    listener = await listen(make_app(ServedState(store=store, role="relay", run_id="ab" * 32, head=lambda: None)))
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(
            target.encode() + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\nExpect: " + expectation + b"\r\n\r\n"
        )
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        await writer.wait_closed()
    finally:
        await listener.stop()
        store.close()
    assert answer.startswith(b"HTTP/1.1 417 ")
    assert target.startswith("HEAD") or b'"code":"bad_request"' in answer
    assert caplog.records == [], "strangers must not be able to fill the log"
