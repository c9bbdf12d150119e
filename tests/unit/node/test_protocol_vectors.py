"""The golden vectors are what another implementation is checked against: they may not drift."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import math
import struct
from itertools import accumulate, pairwise
from types import ModuleType

import msgspec
import pytest
from blake3 import blake3
from locations import VECTORS_FOLDER

from node.protocol import control, messages
from node.protocol.checkpoints import log_key, open_witnessed
from node.protocol.messages import LogEntry
from node.protocol.notes import KeyKind, parse_key
from node.protocol.peers import open_peer, parse_address, parse_join
from node.protocol.requests import open_claim, read_authorization
from node.protocol.run import RunSpec, open_descriptor, run_id_of
from shardcast.envelope import open_envelope
from shardcast.wire import decode, derive, digest, encode

VECTORS = VECTORS_FOLDER
NAMES = [
    "admission",
    "chat",
    "control",
    "datasets",
    "evidence",
    "frames",
    "grading",
    "log",
    "membership",
    "peers",
    "proofs",
    "run",
    "sampling",
    "segments",
    "slots",
    "submissions",
    "turns",
    "wire",
]


def load(name: str) -> dict:
    return json.loads((VECTORS / "protocol" / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_protocol_vectors", VECTORS / "make_protocol_vectors.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_code_still_makes_every_published_vector(maker: ModuleType) -> None:
    made = maker.all_vectors()
    assert sorted(made) == NAMES
    for name, vectors in made.items():
        published = (VECTORS / "protocol" / f"{name}.json").read_text(encoding="utf-8")
        assert maker.render(vectors) == published, f"{name}.json: the protocol has changed"


@pytest.mark.parametrize("vector", load("wire")["values"], ids=lambda v: v["type"])
def test_a_reader_of_the_document_decodes_each_value(vector: dict) -> None:
    cls = getattr(messages, vector["type"])
    raw = vector["canonical"].encode()
    assert encode(decode(cls, raw, max_bytes=len(raw))) == raw
    assert blake3(raw).hexdigest() == vector["digest"] == digest(raw)


@pytest.mark.parametrize("vector", load("wire")["floats"], ids=lambda v: v["canonical"])
def test_floats_have_the_spelling_of_section_1(vector: dict) -> None:
    value = float.fromhex(vector["float64_hex"])
    assert msgspec.json.encode(value).decode() == vector["canonical"]
    assert float(vector["canonical"]).hex() == vector["float64_hex"]
    assert _spell(value) == vector["canonical"]


def _spell(value: float) -> str:
    """Section 1's rule for floats, built from Python's shortest digits."""
    sign, digits, exponent = ("-" if repr(value)[0] == "-" else ""), *_shortest(value)
    point = len(digits) + exponent
    if -5 < point <= 16 and digits != "0":
        if exponent >= 0:
            return f"{sign}{digits}{'0' * exponent}.0"
        if point > 0:
            return f"{sign}{digits[:point]}.{digits[point:]}"
        return f"{sign}0.{'0' * -point}{digits}"
    if digits == "0":
        return f"{sign}0.0"
    fraction = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{sign}{digits[0]}{fraction}e{point - 1}"


def _shortest(value: float) -> tuple[str, int]:
    mantissa, _, exponent = f"{abs(value)!r}".partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits, power = whole + fraction, int(exponent or 0) - len(fraction)
    stripped = digits.rstrip("0")
    return (stripped.lstrip("0") or "0", power + len(digits) - len(stripped))


def test_the_float_rule_holds_over_all_magnitudes() -> None:
    for power in range(-320, 308):
        for lead in ("1", "1.5", "9.87654321", "1.2345678901234567"):
            value = float(f"{lead}e{power}")
            if value:
                assert _spell(value) == msgspec.json.encode(value).decode()


@pytest.mark.parametrize("vector", load("wire")["derive"], ids=lambda v: v["output"][:8])
def test_derivation_is_blake3_with_length_prefixes(vector: dict) -> None:
    parts = [bytes.fromhex(part) for part in vector["parts"]]
    framed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    assert blake3(framed, derive_key_context=vector["context"]).hexdigest() == vector["output"]
    assert derive(vector["context"], *parts).hex() == vector["output"]


def test_the_envelope_vector_opens() -> None:
    vector = load("wire")["envelope"]
    opened = open_envelope(
        bytes.fromhex(vector["envelope"]),
        domain=vector["domain"],
        versions=(vector["version"],),
        max_payload_bytes=1000,
        signer=bytes.fromhex(vector["public_key"]),
    )
    assert opened.payload.hex() == vector["payload"]


def test_the_run_vectors_open_and_bind_to_one_another() -> None:
    vector = load("run")
    descriptor, signer = open_descriptor(
        bytes.fromhex(vector["descriptor"]), run_id=vector["run_id"], now=1_760_000_001.0
    )
    assert signer.hex() == vector["run_public_key"]
    assert run_id_of(signer) == vector["run_id"]
    assert encode(descriptor.spec).decode() == vector["spec"]
    assert decode(RunSpec, vector["spec"].encode(), max_bytes=10_000).digest == vector["spec_digest"]
    envelope = read_authorization(vector["request"]["authorization"])
    assert digest(envelope) == vector["request"]["submission"]
    assert encode(open_claim(envelope)[1]).decode() == vector["request"]["claim"]


def test_a_reader_of_the_document_finds_the_name_of_a_key() -> None:
    """Worked out from the page alone: base58 of six fixed bytes and the key."""
    vector = load("peers")
    number = int.from_bytes(bytes.fromhex("002408011220") + bytes.fromhex(vector["public_key"]))
    digits = ""
    while number:
        number, digit = divmod(number, 58)
        digits = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"[digit] + digits
    assert "1" + digits == vector["peer_id"]
    assert len(vector["peer_id"]) == 52
    assert vector["peer_id"].startswith("12D3KooW")


@pytest.mark.parametrize("vector", load("peers")["addresses"], ids=lambda vector: vector["address"][:25])
def test_the_address_vectors_name_hosts_ports_and_keys(vector: dict) -> None:
    address = parse_address(vector["address"])
    relay = None if address.relay is None else address.relay.hex()
    assert (address.kind, address.host, address.port) == (vector["kind"], vector["host"], vector["port"])
    assert (address.node.hex(), relay) == (vector["public_key"], vector["relay_public_key"])


def test_the_peer_vectors_open_and_bind_to_one_another() -> None:
    vector = load("peers")
    invitation = parse_join(vector["join"])
    assert invitation.run_id == vector["run_id"] == load("run")["run_id"]
    assert [str(peer) for peer in invitation.peers] == [one["address"] for one in vector["addresses"][:2]]
    peer = open_peer(bytes.fromhex(vector["envelope"]), run_id=vector["run_id"], now=1_760_000_001.0)
    assert peer.node.hex() == vector["public_key"]
    assert [str(address) for address in peer.addresses] == json.loads(vector["record"])["addresses"]
    assert vector["record"].encode() in peer.envelope


def test_the_control_vectors_open_and_bind_to_one_another() -> None:
    vector = load("control")
    granter, granted = control.open_authority(bytes.fromhex(vector["authority"]["envelope"]))
    assert run_id_of(granter) == granted.run_id == vector["run_id"] == load("run")["run_id"]
    data = bytes.fromhex(vector["request"]["envelope"])
    asker, asked = control.open_control(data)
    assert (asker.hex(), asked.authority.hex()) == (granted.node, vector["authority"]["envelope"])
    assert (vector["request"]["canonical"].encode() in data, asked.to) == (True, load("peers")["public_key"])
    for reply in vector["replies"]:
        opened = open_envelope(
            bytes.fromhex(reply["envelope"]), domain=control.REPLY_DOMAIN, versions=(1,), max_payload_bytes=2**16
        )
        said = decode(control.ControlReply, opened.payload, max_bytes=2**16)
        assert (opened.signer.hex(), said.request) == (asked.to, digest(data))
        assert opened.payload == reply["canonical"].encode()


def test_a_reader_of_the_document_checks_invites_and_solves_the_puzzle() -> None:
    """Worked out from the page alone: the token's base64url, the seed's three parts, zero bits counted one by one."""
    vector = load("membership")
    assert digest(vector["spec"].encode()) == vector["spec_digest"]
    for invite in vector["invites"]:
        opened = open_envelope(
            base64.urlsafe_b64decode(invite["token"]), domain="swarmproof/invite", versions=(1,), max_payload_bytes=1024
        )
        assert (run_id_of(opened.signer), opened.payload) == (vector["run_id"], invite["canonical"].encode())
    puzzle = json.loads(vector["puzzle"])
    parts = [bytes.fromhex(part) for part in (vector["run_id"], vector["node"], puzzle["salt"])]
    seed = derive("swarmproof/1 proof of work", *parts)
    assert seed.hex() == vector["seed"]
    for attempt in vector["attempts"]:
        bits = "".join(f"{byte:08b}" for byte in blake3(seed + struct.pack(">Q", attempt["counter"])).digest())
        assert bits.index("1") == attempt["zero_bits"]
    assert vector["attempts"][-1]["counter"] == vector["solution"]
    assert vector["attempts"][-1]["zero_bits"] >= puzzle["bits"] == 12
    by_invite, by_work = (
        decode(messages.Registration, text.encode(), max_bytes=4096) for text in vector["registrations"]
    )
    assert by_invite.invite.hex() == vector["invites"][1]["envelope"]
    assert (by_work.work.salt, by_work.work.counter) == (puzzle["salt"], vector["solution"])


def test_a_reader_of_the_document_computes_the_price() -> None:
    for case in load("membership")["prices"]:
        price, queue = 12, case["waiting"]
        while queue >= case["capacity"]:
            price, queue = price + 1, queue // 2
        assert min(price, 16) == case["bits"], case


def test_a_reader_of_the_document_derives_the_work_of_a_challenge() -> None:
    """Worked out from the page alone: slot 0 of a manifest whose digest is derived from four parts."""
    vector, (_, asked) = load("control"), control.open_control(bytes.fromhex(load("control")["request"]["envelope"]))
    challenge = vector["challenge"]
    parts = [bytes.fromhex(x) for x in (vector["run_id"], challenge["manifest_digest"], asked.to, asked.nonce)]

    def derived(context: str, *parts: bytes) -> bytes:
        told = b"".join(struct.pack(">I", len(part)) + part for part in parts)
        return blake3(told, derive_key_context=context).digest()

    manifest = derived("swarmproof/1 challenge", *parts)
    assert manifest.hex() == challenge["stands_for_it"]
    seed = derived("swarmproof/1 sample seed", parts[0], manifest, bytes(8), bytes(4))
    assert seed[:16].hex() == challenge["first_seed"]


@pytest.mark.parametrize("case", load("segments")["cases"], ids=lambda case: str(case["segment_versions"]))
def test_the_chunks_of_a_segments_vector_cover_each_token_once_under_its_policy(case: dict) -> None:
    """Worked out from the page alone: who reads it otherwise cuts proofs that nobody accepts."""
    if case["reason"] is not None:
        assert (case["reason"], case["chunks"], case["proof_bytes"]) == ("wrong_segments", None, None)
        return
    policies = [
        version
        for version, tokens in zip(case["segment_versions"], case["segment_tokens"], strict=True)
        for _ in range(tokens)
    ]
    covered = [(start + i, version) for version, start, count in case["chunks"] for i in range(count)]
    assert covered == list(enumerate(policies))
    vectors = load("segments")
    due = sum(-(-tokens // vectors["chunk_tokens"]) for tokens in case["segment_tokens"])
    assert len(case["chunks"]) == due
    assert max(count for _, _, count in case["chunks"]) <= vectors["chunk_tokens"]
    sizes = case["proof_bytes"]
    assert sizes["sketch/1"] == [4 * count for _, _, count in case["chunks"]]
    assert sizes["toploc/1"] == [2 + 2 * 4] * due
    assert sizes["toploc/1+sketch/1"] == [sum(pair) for pair in zip(sizes["toploc/1"], sizes["sketch/1"], strict=True)]


def test_the_content_of_the_submissions_vector_is_that_of_the_page() -> None:
    """Worked out from section 6.1 alone: a worker that writes anything else is refused."""
    vectors = load("submissions")
    sizes = {"prompt_ids": "i", "completion_ids": "i", "logprobs": "f", "segment_versions": "q", "segment_tokens": "i"}

    def text(value: str) -> bytes:
        return (bytes([0xA0 + len(value)]) if len(value) < 32 else b"\xd9" + bytes([len(value)])) + value.encode()

    def binary(value: bytes) -> bytes:
        return b"\xc4" + bytes([len(value)]) + value

    content = b"\x82" + text("format") + text("swarmproof/rollouts/3") + text("rows") + bytes([0x90 + 2])
    for row in vectors["rows"]:
        content += b"\x87" + text("seed") + binary(bytes.fromhex(row["seed"]))
        for name, kind in sizes.items():
            content += text(name) + binary(struct.pack(f"<{len(row[name])}{kind}", *row[name]))
        content += text("proofs") + bytes([0x90 + len(row["proofs"])])
        content += b"".join(binary(bytes.fromhex(proof)) for proof in row["proofs"])
    assert content.hex() == vectors["content"]
    frame = b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", len(content))
    frame += struct.pack("<I", len(content) << 3 | 1)[:3] + content
    assert frame.hex() == vectors["file"]


def test_the_bounds_of_the_submissions_vector_are_those_of_the_page() -> None:
    vectors, proofs = load("submissions"), load("submissions")["proofs"]
    lead, chunk_tokens = vectors["max_version_lead"], proofs["chunk_tokens"]
    p = 2 * vectors["max_prompt_tokens"] + 16
    t = 2 * vectors["max_new_tokens"] + 16
    v = 2 * (lead + 1) + 16
    n = 2 * (-(-vectors["max_new_tokens"] // chunk_tokens) + lead + vectors["max_turns"] - 1) + 16
    b = 2 * (2 + 2 * proofs["top_k"]) + 16
    whole = vectors["group_size"] * (4 * p + 8 * t + 12 * v + (5 + b) * n + 256) + 256
    assert vectors["bounds"] == {
        "prompt_tokens": p,
        "completion_tokens": t,
        "segments": v,
        "proofs": n,
        "proof_bytes": b,
        "content_bytes": min(whole, 16 * vectors["max_submission_bytes"]),
    }


def test_the_file_of_the_submissions_vector_is_read_and_the_others_are_refused(maker: ModuleType) -> None:
    vectors = load("submissions")
    for case in vectors["refused"]:
        assert case["file"] != vectors["file"], case["why"]
    assert {case["reason"] for case in vectors["refused"]} == {
        "malformed_submission",
        "wrong_schema",
        "wrong_group_size",
    }
    made = maker.submission_vectors()
    assert [case["reason"] for case in made["refused"]] == [case["reason"] for case in vectors["refused"]]


@pytest.mark.parametrize("case", load("turns")["cases"], ids=lambda case: str(case["completion_ids"]))
def test_the_turns_of_a_vector_are_those_of_the_page(case: dict) -> None:
    """Worked out from section 4.7 alone: who reads it otherwise goes on where nobody else does."""
    rules, context, cuts, said, turns, end = load("turns"), [], [], [], 0, None
    context += rules["prompt_ids"]
    for position, token in enumerate(case["completion_ids"]):
        if end is not None:
            break
        context.append(token)
        if token not in rules["eos_ids"]:
            continue
        turns += 1
        over = turns == rules["max_turns"] or position + 1 == rules["max_new_tokens"]
        reply = None if over else case["says"][turns - 1]
        if reply is None or sum(len(ids) for _, ids in said) + len(reply) > rules["max_reply_tokens"]:
            end = position + 1
            continue
        said.append([position + 1, reply])
        cuts.append(position + 1)
        context += reply
    assert (case["replies"], case["end"]) == (said, end)
    is_whole = len(case["completion_ids"]) == (end or rules["max_new_tokens"])
    assert case["context_ids"] == (context[:-1] if is_whole else None)
    if is_whole:
        edges = sorted({0, *accumulate(case["segment_tokens"]), *cuts})
        expected = []
        for first, last in pairwise(edges):
            expected += [min(4, last - start) for start in range(first, last, 4)]
        assert case["chunks"] == expected


def test_the_proof_vectors_are_what_the_page_says() -> None:
    """Sections 6.2's steps over plain numbers: who reads them otherwise has every proof refused."""
    vector = load("proofs")
    rows = [bytes.fromhex(row) for row in vector["states_bfloat16_be_hex"]]
    patterns = [int.from_bytes(row[at : at + 2], "big") for row in rows for at in range(0, len(row), 2)]
    toploc, sketch = (bytes.fromhex(vector["proofs"][scheme]) for scheme in ("toploc/1", "sketch/1"))
    assert bytes.fromhex(vector["proofs"]["toploc/1+sketch/1"]) == toploc + sketch
    top = sorted(range(len(patterns)), key=lambda i: (-(patterns[i] & 0x7FFF), i))[: vector["top_k"]]
    modulus, *powers = (int.from_bytes(toploc[at : at + 2], "big") for at in range(0, len(toploc), 2))
    assert (modulus, len(powers)) == (65497, vector["top_k"])
    for x in top:
        assert sum(c * pow(x, power, 65497) for power, c in enumerate(powers)) % 65497 == patterns[x]
    hidden = vector["hidden"]
    values = [struct.unpack(">f", p.to_bytes(2, "big") + bytes(2))[0] for p in patterns]
    stream = hashlib.shake_128(b"swarmproof/1 sketch" + bytes.fromhex(vector["seed"])).digest(32 + hidden)
    levels = []
    for token in (values[at : at + hidden] for at in range(0, len(values), hidden)):
        for j in range(8):
            dither = (int.from_bytes(stream[4 * j : 4 * j + 4], "little") >> 8) / 2**24
            signed = [-h if stream[32 + i] >> j & 1 else h for i, h in enumerate(token)]
            place = sum(signed) / math.hypot(*token) / vector["sketch_step"] + dither
            levels.append(math.floor(place) % 16)
    assert sketch == bytes(low | high << 4 for low, high in zip(levels[::2], levels[1::2], strict=True))


@pytest.mark.parametrize("group", load("evidence")["groups"], ids=lambda group: str(max(group["nats"].values())))
def test_the_evidence_vectors_are_bennetts_inequality(group: dict) -> None:
    limits = load("evidence")["limits"]
    over = []
    for name, level in limits["honest"].items():
        if level is None:
            assert (group["totals"][name], group["nats"][name]) == ({"count": 0, "sum": 0.0}, 0.0)
            continue
        n, total = group["totals"][name]["count"], group["totals"][name]["sum"]
        b, v = level["largest"] - level["mean"], level["variance"] + n * level["shared_variance"]
        u = max(0.0, total - n * level["mean"]) * b / (n * v) if n else 0.0
        nats = n * v / b**2 * ((1 + u) * math.log(1 + u) - u)
        assert group["nats"][name] == pytest.approx(nats, rel=1e-9)
        if nats > -math.log(limits["false_rejections"]):
            over.append(f"{name}_evidence")
    assert (group["finding"] or {"figure": None})["figure"] == (over[0] if over else None)


def test_the_drift_vectors_are_the_rule_of_the_page() -> None:
    vector = load("evidence")
    honest, limit = vector["limits"]["honest"], math.log(12 / vector["limits"]["false_rejections"])
    drift = {name + suffix: 0.0 for suffix in ("", "_fast") for name in honest}
    for slot in vector["slots"]:
        for name, level in honest.items():
            n, total = slot["totals"][name]["count"], slot["totals"][name]["sum"]
            for suffix, spreads in (("", 0.1), ("_fast", 1.0)) if level is not None else ():
                b, v = level["largest"] - level["mean"], level["variance"] + n * level["shared_variance"]
                u = spreads * b / math.sqrt(v)
                gain = math.log(1 + u) / b * (total - n * level["mean"]) - n * v / b**2 * (u - math.log(1 + u))
                drift[name + suffix] = min(1.25 * limit, max(drift[name + suffix], 0.0) + gain)
        assert slot["drift"] == pytest.approx(drift, rel=1e-9)
        over = [f"{name}_drift" for name in honest if max(drift[name], drift[f"{name}_fast"]) > limit]
        assert (slot["finding"] or {"figure": None})["figure"] == (over[0] if over else None)
    stopped = [slot["finding"] is not None for slot in vector["slots"]]
    assert stopped == sorted(stopped[:10]) + sorted(stopped[10:], reverse=True)
    assert any(stopped)


def test_the_log_vectors_decode() -> None:
    vector = load("log")
    kinds = [type(decode(LogEntry, e["canonical"].encode(), max_bytes=10_000)).__name__ for e in vector["entries"]]
    assert kinds == ["RunEntry", "PolicyEntry", *["VerdictEntry"] * 3, "BatchEntry"]
    run = load("run")
    log, witness = log_key(run["run_id"], bytes.fromhex(run["run_public_key"])), vector["witness"]
    assert (str(log), log.name) == (vector["log_key"], f"swarmproof/{run['run_id']}")
    signed = open_witnessed(
        vector["checkpoint"].encode(), log=log, witnesses=[parse_key(witness["key"], KeyKind.WITNESS)]
    )
    assert (signed.checkpoint.size, signed.checkpoint.root.hex()) == (8, vector["roots"][8])
    assert list(signed.witnesses.values()) == [witness["time"]]


class TerminalOfThePage:
    """Section 4.9, rule by rule, on cells of (code point, foreground, background)."""

    def __init__(self, rows, columns):
        self.screen = [[(0, 0, 0)] * columns for _ in range(rows)]
        self.row = self.column = 0
        self.phase = "text"

    def feed(self, u):
        if (u < 32 and u != 10) or self.phase == "ended":
            return
        if self.phase == "keys":
            self.press(u)
        elif u == 10 and self.phase == "line":
            self.begin()
        elif u == 10:
            self.row, self.column, self.phase = self.row + 1, 0, "line"
        else:
            self.print(u)

    def print(self, u):
        self.phase = "text"
        columns = len(self.screen[0])
        if self.row == len(self.screen):
            self.screen = [*self.screen[1:], [(0, 0, 0)] * columns]
            self.row -= 1
        if self.column < columns:
            self.screen[self.row][self.column] = (u, 1, 0)
            self.column += 1

    def begin(self):
        marks = [(r, c) for r, line in enumerate(self.screen) for c, cell in enumerate(line) if cell[0] == 64]
        if marks:
            self.screen[marks[0][0]][marks[0][1]] = (32, 1, 0)
        self.row, self.column = marks[0] if marks else (0, 0)
        self.phase = "keys"

    def press(self, u):
        moves = {104: (0, -1), 106: (1, 0), 107: (-1, 0), 108: (0, 1)}
        if u == 10:
            self.phase = "ended"
        elif u in moves:
            row, column = self.row + moves[u][0], self.column + moves[u][1]
            inside = 0 <= row < len(self.screen) and 0 <= column < len(self.screen[0])
            if inside and self.screen[row][column] != (0, 0, 0):
                self.row, self.column = row, column
        else:
            self.screen[self.row][self.column] = (u, 2, 0)

    def seen(self):
        if self.phase in {"text", "line"}:
            return []
        found = []
        for r, line in enumerate(self.screen):
            for c, cell in enumerate(line):
                shown = (0, 0, 0) if cell[0] == 32 else cell
                if self.phase == "keys" and (r, c) == (self.row, self.column):
                    shown = (*shown[:2], 1)
                if shown != (0, 0, 0):
                    found.append(" ".join(map(str, (r, c, *shown))))
        return found


@pytest.mark.parametrize("vector", load("frames")["cases"], ids=lambda v: f"{v['rows']}x{v['columns']}")
def test_a_reader_of_section_4_9_sees_the_same_frames(vector):
    terminal, before, frames = TerminalOfThePage(vector["rows"], vector["columns"]), [], []
    for after, (u, place) in enumerate(zip(vector["codepoints"], vector["places"], strict=True), start=1):
        terminal.feed(u)
        assert [terminal.row, terminal.column, terminal.phase] == place
        if terminal.seen() != before:
            before = terminal.seen()
            frames.append({"after": after, "cells": before})
    assert frames == vector["frames"]
