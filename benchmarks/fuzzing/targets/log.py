"""Parsers of the log: leaves, pages, Merkle proofs and checkpoints of an auditor, and a worker's receipts."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import ExitStack
from random import Random
from typing import Any

from msgspec import structs

from benchmarks.fuzzing.mutation import bytes_mutator, json_mutator, mixed
from benchmarks.fuzzing.target import Harness, Target
from benchmarks.fuzzing.targets.messages import DIGEST, NODE_KEY, NOW, OTHER_DIGEST, RUN_ID, message, same
from benchmarks.fuzzing.targets.messages import SPEC as PLAIN_SPEC
from node.audit.leaves import LeafTree, read_entries, read_entry
from node.audit.log import choose_verdicts, read_log
from node.protocol.admission import Figures, Outcome, judge_rows
from node.protocol.checkpoints import (
    MAX_SUBMITTED_HASHES,
    AddCheckpoint,
    Checkpoint,
    log_key,
    open_witnessed,
    origin_of,
    parse_add_checkpoint,
    seal_checkpoint,
)
from node.protocol.endpoints import LogProof
from node.protocol.evidence import Total, Totals
from node.protocol.merkle import (
    EMPTY_ROOT,
    MAX_PROOF_HASHES,
    ProofInvalid,
    consistency_proof,
    inclusion_proof,
    leaf_hash,
    verify_consistency,
    verify_inclusion,
)
from node.protocol.messages import BatchEntry, PolicyEntry, Receipt, RunEntry, VerdictEntry
from node.protocol.notes import KeyKind, VerifierKey, cosign_text, join_note, parse_note, parse_signatures
from node.protocol.reasons import Reason
from node.protocol.run import MAX_DESCRIPTOR_BYTES, HonestSpec, LevelSpec, LimitsSpec, RunSpec
from shardcast.errors import Malformed, PeerFault
from shardcast.wire import Wire, encode

NODE = NODE_KEY.public_key().public_bytes_raw().hex()
LEVEL = LevelSpec(mean=1.5, variance=0.25, largest=20.0)
LIMITS = LimitsSpec(honest=HonestSpec(exponents=LEVEL, margin=LEVEL))
SPEC = structs.replace(PLAIN_SPEC, limits=LIMITS)
TOTALS = Totals(exponents=Total(count=80, sum=100.5), margin=Total(count=2400, sum=1e-6))
LEAVES = [b"leaf %d" % index for index in range(23)]
FIGURES: dict[str, Any] = dict.fromkeys(Figures.__struct_fields__, 0.0)
WRONG_FIGURES = Figures(**FIGURES | {"token_margin": 5.5})
FINDING = judge_rows({0: Figures(**FIGURES), 1: WRONG_FIGURES}, limits=LIMITS)
HASH_BYTES = len(EMPTY_ROOT)
PLACE = struct.Struct(">QQ")
SIGNED = Checkpoint(origin_of(RUN_ID), 23, bytes.fromhex(DIGEST))
_DASH = "\n— ".encode()


def _verdict(submission: str, slot: int, **changes: Any) -> VerdictEntry:
    fields: dict[str, Any] = {
        "submission": submission,
        "node": NODE,
        "version": 0,
        "manifest_digest": DIGEST,
        "slot": slot,
        "request": submission,
        "body": OTHER_DIGEST,
        "outcome": Outcome.ADMITTED,
        "reason": None,
        "finding": None,
        "detail": "",
        "figures": Figures(**FIGURES),
        "totals": TOTALS,
        "rewards": (0.0, 1.0) * (SPEC.sampling.group_size // 2),
        "tokens": 300,
        "decided_at": NOW,
    }
    return VerdictEntry(**fields | changes)


def _rejected(reason: Reason, outcome: Outcome = Outcome.REJECTED, **changes: Any) -> dict[str, Any]:
    nothing = dict.fromkeys(("rewards", "figures", "totals"))
    return nothing | {"outcome": outcome, "reason": reason, "detail": "Row 1."} | changes


ENTRIES: tuple[Wire, ...] = (
    RunEntry(run_id=RUN_ID, spec_digest=SPEC.digest),
    PolicyEntry(version=0, manifest_digest=DIGEST, result_digest=OTHER_DIGEST),
    _verdict("01" * 32, 0),
    _verdict("02" * 32, 1, **_rejected(Reason.MALFORMED_SUBMISSION, tokens=0)),
    _verdict(
        "03" * 32,
        2,
        **_rejected(Reason.WRONG_TOKEN, finding=FINDING, figures=WRONG_FIGURES, totals=Totals()),
    ),
    _verdict("04" * 32, 3, **_rejected(Reason.VERIFIER_FAILED, Outcome.INDETERMINATE)),
    BatchEntry(step=0, submissions=("01" * 32,)),
    PolicyEntry(version=1, manifest_digest=OTHER_DIGEST, result_digest=DIGEST),
)


def _entry(_: ExitStack) -> Harness:
    """Feed one leaf, in a log that is otherwise honest."""
    before = [encode(entry) for entry in ENTRIES[:2]]

    def run(data: bytes) -> str:
        assert encode(read_entry(data)) == data, "it encodes to other bytes"
        reading = read_log(read_entries([*before, data]), run_id=RUN_ID, spec=SPEC)
        verdicts = reading.index.verdicts
        choose_verdicts(verdicts[Outcome.ADMITTED], verdicts[Outcome.REJECTED], count=3, rng=Random(0))
        return " ".join(sorted({problem.code for problem in reading.problems}))

    return Harness([encode(entry) for entry in ENTRIES], run, (Malformed,), json_mutator())


def _page(_: ExitStack) -> Harness:
    """Feed many leaves, each ended by a line feed, as the coordinator sends them."""

    def run(data: bytes) -> str:
        leaves = data.split(b"\n")
        tree = LeafTree()
        for leaf in leaves:
            tree.append(leaf)
        assert len(tree.root()) == HASH_BYTES
        problems = read_log(read_entries(leaves), run_id=RUN_ID, spec=SPEC).problems
        return " ".join(sorted({problem.code for problem in problems}))

    lines = [encode(entry) for entry in ENTRIES]

    def shuffled(rng: Random, data: bytes) -> bytes:
        leaves = [*data.split(b"\n"), rng.choice(lines)]
        rng.shuffle(leaves)
        at = rng.randrange(len(leaves))
        leaves[at] = json_mutator()(rng, [leaves[at] or b"{}"])
        return b"\n".join(leaves[: rng.choice((2, 5, 20, 100))])

    mutate = mixed((3, lambda rng, corpus: shuffled(rng, rng.choice(corpus))), (1, bytes_mutator(b"\n", *lines)))
    return Harness([b"\n".join(lines)], run, (Malformed,), mutate)


def _limits(_: ExitStack) -> Harness:
    """Feed a run's limits, against an honest log."""

    def run(data: bytes) -> str:
        limits = same(LimitsSpec, data, max_bytes=MAX_DESCRIPTOR_BYTES)
        spec: RunSpec = structs.replace(SPEC, limits=limits)
        rules = structs.replace(ENTRIES[0], spec_digest=spec.digest)
        problems = read_log([rules, *ENTRIES[1:]], run_id=RUN_ID, spec=spec).problems  # type: ignore[list-item]
        return " ".join(sorted({problem.code for problem in problems}))

    return Harness([encode(LIMITS), encode(LimitsSpec())], run, (Malformed,), json_mutator())


# Merkle proofs: a place in the tree (two u64, big-endian), a leaf or nothing, and the hashes.

TREE = LeafTree()
for _leaf in LEAVES:
    TREE.append(_leaf)


def _node(level: int, index: int) -> bytes:
    """Return a complete subtree's hash."""
    hashes = [leaf_hash(leaf) for leaf in LEAVES[index << level : (index + 1) << level]]
    part = LeafTree()
    for leaf in LEAVES[index << level : (index + 1) << level]:
        part.append(leaf)
    assert len(hashes) == 1 << level
    return part.root()


def _root(size: int) -> bytes:
    tree = LeafTree()
    for leaf in LEAVES[:size]:
        tree.append(leaf)
    return tree.root()


ROOTS = [_root(size) for size in range(len(LEAVES) + 1)]


def _hashes(data: bytes) -> list[bytes]:
    """Split off whole hashes, no more than a node takes (`Hashes`)."""
    whole = min(len(data) // HASH_BYTES, MAX_PROOF_HASHES) * HASH_BYTES
    return [data[at : at + HASH_BYTES] for at in range(0, whole, HASH_BYTES)]


def _inclusion(_: ExitStack) -> Harness:
    """Feed proofs that a leaf is in a log whose root an auditor knows. What convinces must be true."""

    def run(data: bytes) -> None:
        if len(data) < PLACE.size + 1:
            raise ProofInvalid("no proof")
        index, size = PLACE.unpack_from(data)
        end = PLACE.size + 1 + data[PLACE.size]
        leaf, proof = data[PLACE.size + 1 : end], _hashes(data[end:])
        root = ROOTS[size] if size < len(ROOTS) else ROOTS[-1]
        verify_inclusion(leaf_hash(leaf), index=index, size=size, proof=proof, root_hash=root)
        if size < len(ROOTS):
            assert LEAVES[index] == leaf, "a leaf that is not in the log was proved"

    seeds = []
    for index, size in ((0, 1), (0, 23), (22, 23), (7, 8), (5, 12), (16, 17)):
        proof = b"".join(inclusion_proof(index, size, _node))
        seeds.append(PLACE.pack(index, size) + bytes([len(LEAVES[index])]) + LEAVES[index] + proof)
    return Harness(seeds, run, (ProofInvalid,), mixed((1, _places), (1, bytes_mutator(*ROOTS[:4]))))


def _consistency(_: ExitStack) -> Harness:
    """Feed proofs that one log extends another, both roots known. What convinces must be true."""

    def run(data: bytes) -> None:
        if len(data) < PLACE.size:
            raise ProofInvalid("no proof")
        first, second = PLACE.unpack_from(data)
        old, new = (ROOTS[size] if size < len(ROOTS) else ROOTS[-1] for size in (first, second))
        verify_consistency(
            first=first, first_root=old, second=second, second_root=new, proof=_hashes(data[PLACE.size :])
        )

    pairs = ((0, 5), (1, 1), (1, 2), (6, 23), (8, 16), (16, 23), (22, 23), (3, 7))
    seeds = [PLACE.pack(*pair) + b"".join(consistency_proof(*pair, _node)) for pair in pairs]
    return Harness(seeds, run, (ProofInvalid,), mixed((1, _places), (1, bytes_mutator(*ROOTS[:4]))))


def _places(rng: Random, corpus: Sequence[bytes]) -> bytes:
    """Choose another place in the tree, or lose, move and repeat hashes."""
    data = rng.choice(corpus)
    if rng.random() < 0.5 and len(data) >= PLACE.size:
        place = [rng.choice((*PLACE.unpack_from(data), rng.randrange(25), 2**53, 2**64 - 1)) for _ in range(2)]
        return PLACE.pack(*place) + data[PLACE.size :]
    hashes = _hashes(data[PLACE.size :]) or [bytes(HASH_BYTES)]
    rng.shuffle(hashes)
    return data[: PLACE.size] + b"".join((*hashes, *rng.choices(hashes, k=rng.choice((0, 1, 62)))))


def _proof_reply(_: ExitStack) -> Harness:
    return message(LogProof, LogProof(hashes=()), LogProof(hashes=(DIGEST,) * MAX_PROOF_HASHES))


def _checkpoint(_: ExitStack) -> Harness:
    """Feed notes, of which log and witness are known. What opens must be what was signed, and come back as it was."""
    note, log, witness = _witnessed()

    def run(data: bytes) -> None:
        opened = open_witnessed(data, log=log, witnesses=[witness])
        assert opened.checkpoint == SIGNED, "a checkpoint that nobody signed"
        assert opened.note.encode() == data, "a note with a second spelling"

    return Harness([note, note.replace(b"w1", b"w2")], run, (PeerFault,), bytes_mutator(b"\n", b"\n\n", _DASH, b" "))


def _witnessed() -> tuple[bytes, VerifierKey, VerifierKey]:
    log = log_key(RUN_ID, NODE_KEY.public_key().public_bytes_raw())
    witness = VerifierKey("witness.example/w1", KeyKind.WITNESS, log.public_key)
    signed = parse_note(seal_checkpoint(SIGNED, key=NODE_KEY))
    cosignature = cosign_text(signed.text, name=witness.name, key=NODE_KEY, at=NOW)
    return join_note(signed.text, [*signed.signatures, cosignature]), log, witness


def _add_checkpoint(_: ExitStack) -> Harness:
    """Feed requests to a witness. What is read must come back as it was."""

    def run(data: bytes) -> None:
        request = parse_add_checkpoint(data)
        assert request.encode() == data, "a request with a second spelling"

    note, _, _ = _witnessed()
    seeds = [AddCheckpoint(0, (), note).encode(), AddCheckpoint(6, (EMPTY_ROOT,) * MAX_SUBMITTED_HASHES, note).encode()]
    return Harness(seeds, run, (Malformed,), bytes_mutator(b"\n", b"old ", b"A" * 43 + b"="))


def _cosignatures(_: ExitStack) -> Harness:
    """Feed what a witness answers. What is read must come back as it was."""

    def run(data: bytes) -> None:
        assert b"".join(one.line for one in parse_signatures(data)) == data, "signatures with a second spelling"

    lines = b"".join(one.line for one in parse_note(_witnessed()[0]).signatures)
    return Harness([lines], run, (Malformed,), bytes_mutator(b"\n", _DASH[1:], b" ", b"A" * 43 + b"=", b"="))


def _receipt(_: ExitStack) -> Harness:
    receipts = [
        Receipt(
            run_id=RUN_ID,
            submission=DIGEST,
            node=NODE,
            version=0,
            slot=1,
            outcome=outcome,
            reason=reason,
            detail="Row 1.",
            tokens=300,
            log_index=5,
            leaf_hash=OTHER_DIGEST,
        )
        for outcome, reason in ((Outcome.ADMITTED, None), (Outcome.REJECTED, Reason.WRONG_TOKEN))
    ]
    return message(Receipt, *receipts)


TARGETS = (
    Target("log.entry", "a run's coordinator, to an auditor", 60, _entry),
    Target("log.page", "a run's coordinator, to an auditor", 20, _page),
    Target("log.limits", "whoever answers for a run", 40, _limits),
    Target("log.inclusion", "a run's coordinator, to an auditor", 60, _inclusion),
    Target("log.consistency", "a run's coordinator, to an auditor", 60, _consistency),
    Target("log.proof_reply", "a run's coordinator, to an auditor", 30, _proof_reply),
    Target("log.checkpoint", "a run's coordinator, to an auditor", 30, _checkpoint),
    Target("log.add_checkpoint", "whoever reaches a witness", 30, _add_checkpoint),
    Target("log.cosignatures", "a witness, to the coordinator", 30, _cosignatures),
    Target("log.receipt", "a run's coordinator, to a worker", 30, _receipt),
)
