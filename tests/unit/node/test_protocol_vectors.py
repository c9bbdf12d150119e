"""The golden vectors are what another implementation is checked against: they may not drift."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import struct
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
from blake3 import blake3

from node.protocol import messages
from node.protocol.messages import CHECKPOINT_DOMAIN, MESSAGE_VERSION, Checkpoint, LogEntry
from node.protocol.requests import open_claim, read_authorization
from node.protocol.run import RunSpec, open_descriptor, run_id_of
from shardcast.envelope import open_envelope
from shardcast.wire import decode, derive, digest, encode

VECTORS = Path(__file__).parents[2] / "vectors"
NAMES = ["admission", "evidence", "log", "proofs", "run", "sampling", "segments", "slots", "wire"]


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
    stream = hashlib.shake_128(b"veriswarm/1 sketch" + bytes.fromhex(vector["seed"])).digest(32 + hidden)
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
    opened = open_envelope(
        bytes.fromhex(vector["checkpoint"]),
        domain=CHECKPOINT_DOMAIN,
        versions=(MESSAGE_VERSION,),
        max_payload_bytes=1000,
        signer=bytes.fromhex(load("run")["run_public_key"]),
    )
    assert decode(Checkpoint, opened.payload, max_bytes=1000).root == vector["roots"][8]
