"""The independent client against the vectors: what docs/protocol.md says gives the bytes that the vectors hold."""

from __future__ import annotations

import ast
import base64
import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from independent import messages
from independent.admission import Drift, evidence, first_finding, worst
from independent.chat import CHAT_FORMAT, conversation_text, reply_text, seen_turn
from independent.control import challenge_slot
from independent.datasets import content_id, is_held_out, prompts_of, read_dataset
from independent.descriptor import Descriptors, run_id_of
from independent.envelope import Opened, open_envelope
from independent.log import leaf_hash, root_of, verify_consistency, verify_inclusion
from independent.messages import STATISTICS
from independent.notes import open_checkpoint, vkey
from independent.peers import peer_id, read_address, read_join
from independent.proofs import from_bfloat16, prove
from independent.sampling import TABLE, Turns, choose, chunks_of, context_of, index_of, noise, philox
from independent.slots import Slot, candidate_of, kept_of, problem_of
from independent.submission import LISTS, bounds_of, encode_content, read_file
from independent.terminal import Terminal
from independent.values import Refused, decode, derive, digest, encode, write_float
from locations import ROOT

CLIENT = ROOT / "tests" / "support" / "independent"
ALLOWED = {"blake3", "cryptography", "numpy", "tokenizers", "zstandard"}
"""Beside the standard library. `tokenizers` is what section 11 defines a policy's tokenizer by."""


def vectors(name: str) -> Any:
    return json.loads((ROOT / "tests" / "vectors" / "protocol" / f"{name}.json").read_text())


def imported(tree: ast.AST) -> Iterator[str]:
    """The top-level packages that a module imports, itself aside."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module).partition(".")[0]


def test_the_client_shares_no_code_with_the_project() -> None:
    """With a single import the page could lack what that import knows, and nothing would show it."""
    modules = sorted(CLIENT.glob("**/*.py"))
    assert len(modules) > 10
    for module in modules:
        foreign = set(imported(ast.parse(module.read_text()))) - ALLOWED - set(sys.stdlib_module_names)
        assert not foreign, f"{module.name} imports {foreign}"


@pytest.mark.parametrize("case", vectors("datasets")["files"], ids=lambda case: case["content_id"][:8])
def test_datasets(case: dict[str, Any]) -> None:
    environment = decode(messages.ENVIRONMENT, case["environment"].encode(), max_bytes=2**16)
    data = base64.b64decode(case["file"])
    file = read_dataset(data, environment["dataset"])
    if case["answers"] is not None:
        assert [file.problem(index).answer for index in range(len(file.rows))] == [None] * len(file.rows)
        file = read_dataset(base64.b64decode(case["answers"]), environment["dataset"]["answers"])
        assert prompts_of(file) == data
    found = [file.problem(index) for index in range(len(file.rows))]
    assert [(one.prompt, one.opening, one.answer) for one in found] == [
        (one["prompt"], one["opening"], one["answer"]) for one in case["problems"]
    ]
    for one in case["problems"]:
        assert file.reward(one["answer"], f"5</think>\n{one['answer']} ") == one["reward"] == 1.0
        assert file.reward(one["answer"], one["answer"] + "</think>") == 0.0
    leased = len(file.rows) - case["held_out"]
    share = vectors("datasets")["share"]
    assert [is_held_out(row, share) for row in file.rows] == [index >= leased for index in range(len(file.rows))]
    assert content_id(vectors("datasets")["run_id"], environment["dataset"]["digest"]) == case["content_id"]
    with pytest.raises(Refused):
        read_dataset(data.replace(b"prompt", b"Prompt", 1), environment["dataset"])


@pytest.mark.parametrize("value", vectors("wire")["values"], ids=lambda value: value["type"])
def test_messages(value: dict[str, str]) -> None:
    name = "".join(f"_{char}" if char.isupper() else char.upper() for char in value["type"]).lstrip("_")
    kind, data = getattr(messages, name), value["canonical"].encode()
    assert encode(kind, decode(kind, data, max_bytes=2**16)) == data
    assert digest(data) == value["digest"]
    for other in (data + b" ", data.replace(b":", b": ", 1), data.replace(b"}", b',"x":1}', 1), b"[]", b"{", b"\xff"):
        with pytest.raises(Refused):
            decode(kind, other, max_bytes=2**16)


def test_floats_nicknames_derivations_and_envelopes() -> None:
    wire = vectors("wire")
    for case in wire["floats"]:
        assert write_float(float.fromhex(case["float64_hex"])) == case["canonical"]
    for case in wire["nicknames"]:
        assert messages.is_nickname(case["text"]) == case["is_one"], case
    for case in wire["derive"]:
        assert derive(case["context"], *map(bytes.fromhex, case["parts"])).hex() == case["output"]
    case = wire["envelope"]
    data = bytes.fromhex(case["envelope"])
    opened = open_envelope(data, case["domain"], max_payload_bytes=2**10, version=case["version"])
    assert opened == Opened(bytes.fromhex(case["payload"]), case["public_key"])
    for at in range(len(data)):
        broken = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises(Refused):
            open_envelope(broken, case["domain"], max_payload_bytes=2**10, version=case["version"])


def test_runs_and_signed_requests() -> None:
    run = vectors("run")
    assert run_id_of(run["run_public_key"]) == run["run_id"]
    descriptors = Descriptors(run["run_id"])
    descriptors.accept(bytes.fromhex(run["descriptor"]), now=1_760_000_000)
    assert encode(messages.RUN_SPEC, descriptors.spec) == run["spec"].encode()
    assert descriptors.spec_digest == run["spec_digest"]
    decode(messages.REQUEST_CLAIM, run["request"]["claim"].encode(), max_bytes=2048)


def test_sampling() -> None:
    cases = vectors("sampling")
    for case in cases["philox4x32_10"]:
        counter = [np.array([int(word, 16)], dtype=np.uint64) for word in case["counter"]]
        k0, k1 = (int(word, 16) for word in case["key"])
        assert [f"{int(word[0]):08x}" for word in philox(counter, (k0, k1))] == case["output"]
    for case in cases["table"]["lookups"]:
        index = int(index_of(np.array([case["word"]], dtype=np.uint64))[0])
        assert (index, TABLE[index].tobytes().hex()) == (case["index"], case["float32_le_hex"])
    for case in cases["noise"]:
        drawn = noise(bytes.fromhex(case["seed"]), case["position"], len(case["float32_le_hex"]) // 8)
        assert drawn.tobytes().hex() == case["float32_le_hex"]
    for case in cases["choices"]:
        drawn = [
            choose(case["logits"], bytes.fromhex(case["seed"]), p, case["temperature"])
            for p in range(len(case["tokens"]))
        ]
        assert drawn == case["tokens"]


@pytest.mark.parametrize("name", sorted(vectors("chat")))
def test_chats(name: str) -> None:
    cases = vectors("chat")[name]
    chat = decode(CHAT_FORMAT, cases["format"].encode(), max_bytes=49152)
    for case in cases["conversations"]:
        assert conversation_text(chat, case["messages"], case["tools"]) == (case["text"], case["opening"])
    for case in cases["replies"]:
        assert reply_text(chat, case["messages"]) == case["text"]
    assert seen_turn(chat, cases["turn"]["written"]) == cases["turn"]["seen"]
    asked = cases["problem"]
    environment = decode(messages.ENVIRONMENT, asked["environment"].encode(), max_bytes=2**16)
    assert problem_of(environment, int(asked["problem"]), chat).prompt == asked["prompt"]


@pytest.mark.parametrize(
    "changes",
    [
        {"user": ["User: "]},
        {"openings": {"plain": {"head": [""], "first": None, "last": ["x"], "final": None}}},
        {"user": ["a", "content:", "b"]},
        {"calls": None},
    ],
)
def test_a_chat_format_that_nobody_could_render_is_refused(changes: dict[str, Any]) -> None:
    chat = json.loads(vectors("chat")["chatml"]["format"])
    changes = {name: chat[name] | value if name == "openings" else value for name, value in changes.items()}
    assert CHAT_FORMAT.conform(chat) == chat
    with pytest.raises(Refused):
        CHAT_FORMAT.conform(chat | changes)


def test_slots_lengths_and_pools() -> None:
    cases = vectors("slots")
    for case in cases["slots"]:
        slot = Slot(cases["run_id"], case["manifest_digest"], case["slot"])
        seeds = [seed.hex() for seed in slot.seeds(cases["group_size"])]
        found = slot.environment(cases["weights"]), str(slot.problem(None)), seeds
        assert found == (case["environment"], case["problem"], case["seeds"])
    environment = decode(messages.ENVIRONMENT, cases["lengths"]["environment"].encode(), max_bytes=2**16)
    for case in cases["lengths"]["cases"]:
        problem = problem_of(environment, int(case["problem"]))
        reward = problem.reward([case["completion"]], case["tokens"])
        assert (problem.prompt, problem.length_target, reward) == (case["prompt"], case["target"], case["reward"])
    cases = cases["pools"]
    spec = decode(messages.RUN_SPEC, cases["spec"].encode(), max_bytes=2**18)
    (environment,), pools = spec["environments"], spec["batch"]["pools"]
    means = {int(problem): mean for problem, mean in cases["means"].items()}
    for case in cases["slots"]:
        slot = Slot(cases["run_id"], cases["manifest_digest"], case["slot"])
        problems = [slot.problem(kept_of(environment), candidate) for candidate in range(32)]
        found = slot.pool(pools), problems, candidate_of(slot, environment, pools, means)
        assert found == (case["pool"], case["problems"], case["candidate"])


def test_turns_and_segments() -> None:
    cases = vectors("turns")
    rules = cases["max_new_tokens"], cases["max_turns"], cases["max_reply_tokens"]
    turns = Turns(frozenset(cases["eos_ids"]), *rules)
    for case in cases["cases"]:
        tokens, says = case["completion_ids"], case["says"]
        course = turns.course(tokens, lambda turns, says=says: says[len(turns) - 1])
        assert (list(map(list, course.replies.items())), course.end) == (case["replies"], case["end"])
        if case["chunks"] is not None:
            assert context_of(cases["prompt_ids"], tokens[:-1], course.replies) == case["context_ids"]
            chunks = chunks_of(case["segment_tokens"], list(course.replies), cases["chunk_tokens"])
            assert [count for _, _, count in chunks] == case["chunks"]
    cases = vectors("segments")
    for case in cases["cases"]:
        if case["chunks"] is not None:
            chunks = chunks_of(case["segment_tokens"], [], cases["chunk_tokens"])
            assert [[case["segment_versions"][of], *rest] for of, *rest in chunks] == case["chunks"]


@pytest.mark.parametrize("case", vectors("turns")["rules"]["cases"], ids=str)
def test_what_an_environment_adds_to_turns(case: dict[str, Any]) -> None:
    cases = vectors("turns")
    texts, budget = cases["rules"]["texts"], case["thinking"]
    turns = Turns(
        frozenset(cases["eos_ids"]),
        case["max_new_tokens"],
        cases["max_turns"],
        cases["max_reply_tokens"],
        stop=case["stop"],
        text=lambda tokens: "".join(texts[str(token)] for token in tokens),
        thought=None if budget is None else (budget["tokens"], budget["end_ids"]),
        is_open=lambda text: "</think>" not in text,
    )
    found = turns.course(case["completion_ids"], lambda turns: case["says"][len(turns) - 1])
    assert list(map(list, found.replies.items())) == case["replies"]
    assert (found.end, found.most, found.turns) == (case["end"], case["most"], case["turns"])


@pytest.mark.parametrize("case", vectors("frames")["cases"], ids=str)
def test_frames(case: dict[str, Any]) -> None:
    terminal = Terminal(case["rows"], case["columns"])
    frames = {frame["after"]: frame["cells"] for frame in case["frames"]}
    for count, (code, place) in enumerate(zip(case["codepoints"], case["places"], strict=True), 1):
        terminal.feed(code)
        assert [terminal.row, terminal.column, terminal.phase] == place
        cells = ((row, column, *cell) for row, line in enumerate(terminal.frame()) for column, cell in enumerate(line))
        if count in frames:
            assert [" ".join(map(str, cell)) for cell in cells if any(cell[2:])] == frames[count]


def test_submissions_and_proofs() -> None:
    cases = vectors("submissions")
    spec = {"sampling": cases, "proofs": cases["proofs"], "limits": cases}
    assert vars(bounds_of(spec)) == cases["bounds"]
    rows = read_file(bytes.fromhex(cases["file"]), spec)
    assert encode_content(rows).hex() == cases["content"]
    for row, wanted in zip(rows, cases["rows"], strict=True):
        found = {name: list(getattr(row, name)) for name in LISTS}
        assert found | {"seed": row.seed.hex(), "proofs": [one.hex() for one in row.proofs]} == wanted
    for case in cases["refused"]:
        with pytest.raises(Refused) as refused:
            read_file(bytes.fromhex(case["file"]), spec)
        assert refused.value.code == case["reason"], case["why"]
    cases = vectors("proofs")
    rows_of_hex = [bytes.fromhex(row) for row in cases["states_bfloat16_be_hex"]]
    states = from_bfloat16(np.stack([np.frombuffer(row, dtype=">u2") for row in rows_of_hex])).astype(np.float32)
    for scheme, wanted in cases["proofs"].items():
        rules = {"scheme": scheme, "top_k": cases["top_k"], "sketch_step": cases["sketch_step"]}
        (proof,) = prove([states], bytes.fromhex(cases["seed"]), rules)
        assert proof.hex() == wanted


def rounded(finding: dict[str, Any] | None) -> dict[str, Any] | None:
    """A finding with its numbers as the vectors have them."""
    return finding and {name: float(f"{v:.9g}") if isinstance(v, float) else v for name, v in finding.items()}


def test_admission_evidence_and_drift() -> None:
    cases = vectors("admission")
    for case in cases["groups"]:
        assert worst(case["figures"]) == case["worst"]
        assert rounded(first_finding(case["figures"], cases["limits"])) == rounded(case["finding"])
    cases = vectors("evidence")
    levels = cases["limits"]["honest"]
    for case in cases["groups"]:
        for name in STATISTICS:
            assert evidence(case["totals"][name], levels[name]) == pytest.approx(case["nats"][name], rel=1e-9)
    drift = Drift(cases["limits"])
    for case in cases["slots"]:
        drift.add(case["totals"])
        for (name, shift), value in drift.numbers.items():
            assert value == pytest.approx(case["drift"][name if shift < 1 else f"{name}_fast"], rel=1e-9)
        found = drift.findings()
        assert next(iter(found), None) == (case["finding"] and case["finding"]["figure"])


def test_the_log() -> None:
    cases, run = vectors("log"), vectors("run")
    leaves = [leaf_hash(bytes.fromhex(leaf)) for leaf in cases["leaves"]]
    roots = [root_of(leaves[:size]) for size in range(len(leaves) + 1)]
    assert [root.hex() for root in roots] == cases["roots"]
    for case in cases["inclusion"]:
        proof = [bytes.fromhex(one) for one in case["proof"]]
        verify_inclusion(leaves[case["index"]], case["index"], case["size"], proof, roots[case["size"]])
        with pytest.raises(Refused):
            verify_inclusion(leaf_hash(b"else"), case["index"], case["size"], proof, roots[case["size"]])
    for case in cases["consistency"]:
        proof, first, second = [bytes.fromhex(one) for one in case["proof"]], case["first"], case["second"]
        verify_consistency(first, second, roots[first], roots[second], proof)
        with pytest.raises(Refused):
            verify_consistency(first, second, leaf_hash(b"else"), roots[second], proof)
    for case in cases["entries"]:
        data = case["canonical"].encode()
        assert encode(messages.ENTRY, decode(messages.ENTRY, data, max_bytes=2**20)) == data
        assert leaf_hash(data).hex() == case["leaf_hash"]
    note, witness = cases["checkpoint"].encode(), cases["witness"]
    opened = open_checkpoint(note, run["run_id"], run["run_public_key"], witnesses=[witness["key"]])
    assert (opened["size"], opened["root"], opened["witnesses"]) == (
        8,
        roots[8].hex(),
        {witness["key"]: witness["time"]},
    )
    assert vkey("swarmproof/" + run["run_id"], 1, run["run_public_key"]) == cases["log_key"]
    for spoilt in (note.replace(b"\n8\n", b"\n9\n"), note.replace(b" w", b"  w"), note[:-1]):
        with pytest.raises(Refused):
            open_checkpoint(spoilt, run["run_id"], run["run_public_key"])


def test_peers_and_control() -> None:
    cases = vectors("peers")
    assert peer_id(cases["public_key"]) == cases["peer_id"]
    for case in cases["addresses"]:
        assert vars(read_address(case["address"])) | {"address": case["address"]} == case
    run_id, addresses = read_join(cases["join"])
    assert (run_id, len(addresses)) == (cases["run_id"], 2)
    opened = open_envelope(bytes.fromhex(cases["envelope"]), "swarmproof/peer", max_payload_bytes=4096)
    assert opened == Opened(cases["record"].encode(), cases["public_key"])
    decode(messages.PEER_RECORD, opened.payload, max_bytes=4096)
    cases = vectors("control")
    kinds = {"authority": messages.AUTHORITY, "control": messages.CONTROL_REQUEST}
    for domain, case in (("authority", cases["authority"]), ("control", cases["request"])):
        opened = open_envelope(bytes.fromhex(case["envelope"]), f"swarmproof/{domain}", max_payload_bytes=16384)
        assert opened.payload == case["canonical"].encode()
        decode(kinds[domain], opened.payload, max_bytes=16384)
    for case in cases["replies"]:
        opened = open_envelope(bytes.fromhex(case["envelope"]), "swarmproof/control-reply", max_payload_bytes=2**20)
        decode(messages.CONTROL_REPLY, opened.payload, max_bytes=2**20)
    request = decode(messages.CONTROL_REQUEST, cases["request"]["canonical"].encode(), max_bytes=16384)
    case = cases["challenge"]
    slot = challenge_slot(request, case["manifest_digest"])
    assert (slot.manifest_digest, slot.seeds(1)[0].hex()) == (case["stands_for_it"], case["first_seed"])
