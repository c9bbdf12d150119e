"""The independent client: join, fetch policies, draw forced completions, submit, keep receipts, audit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .audit import Disagreement, LogAudit
from .broadcast import Publications, Sources
from .descriptor import MAX_BYTES, Descriptors
from .evidence import Judge, expected_of
from .http_api import KIB, MIB, Reply, Signer, send
from .log import leaf_hash, open_receipt, root_of, verify_consistency, verify_inclusion
from .measure import Model
from .messages import (
    EMPTY,
    HASHES,
    LEASE_REPLY,
    LEASE_REQUEST,
    NODE_STANDING,
    RECEIPT_STATE,
    REGISTRATION,
    RELAY_LIST,
    SUBMISSION_REPLY,
)
from .notes import open_checkpoint
from .policy import Policy, read_policy
from .proofs import prove
from .sampling import choose, chunks_of, context_of, log_probability
from .slots import CANDIDATES, Slot, kept_of, problem_of, slot_name
from .submission import Expected, Row, write_file
from .values import Refused, decode, derive, digest, encode

MAX_MESSAGE = 64 * KIB
ENTRIES_AT_ONCE = 1000


@dataclass
class Client:
    """One node of one run, which it knows by its id and the URL of something that tells the descriptor.

    `model_of` makes of a policy file what computes its hidden states and logits; everything else is done here.
    """

    run_id: str
    url: str
    model_of: Callable[[bytes], Model]
    clock: Callable[[], float] = time.time
    signer: Signer = field(init=False)
    descriptors: Descriptors = field(init=False)
    publications: Publications | None = None
    receipts: list[dict[str, Any]] = field(default_factory=list)
    checkpoint: dict[str, Any] | None = None
    files: dict[int, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.signer = Signer(self.run_id, clock=self.clock)
        self.descriptors = Descriptors(self.run_id)
        self.instance = derive("swarmproof/1 instance", bytes.fromhex(self.signer.node))[:16].hex()

    # Requests

    def get(self, path: str, *, max_bytes: int = MAX_MESSAGE) -> Reply:
        """Send a GET to the coordinator."""
        return send(self.url, "GET", path, max_bytes=max_bytes)

    def signed(
        self, method: str, path: str, body: bytes, *, max_bytes: int = MAX_MESSAGE, **more: Any
    ) -> tuple[Reply, str]:
        """Send a signed request; return the reply and the digest of the request's envelope."""
        header, name = self.signer.sign(method, path, body, **more)
        headers = {"Authorization": header}
        if body and method == "POST":
            headers["Content-Type"] = "application/json"
        return send(self.url, method, path, body, headers, max_bytes=max_bytes), name

    # Joining

    def join(self) -> None:
        """Fetch and verify the descriptor, and register."""
        self.refresh()
        registration = {"software": "independent", "engine": "given", "instance": self.instance, "name": "page"}
        reply, _ = self.signed("POST", "/v1/nodes", encode(REGISTRATION, registration))
        decode(EMPTY, reply.expect(200), max_bytes=16)

    def refresh(self) -> dict[str, Any]:
        """Fetch the newest descriptor and take it if it holds."""
        reply = self.get("/v1/run", max_bytes=MAX_BYTES + KIB)
        descriptor = self.descriptors.accept(reply.expect(200), now=self.clock())
        if self.publications is None:
            self.publications = Publications(self.run_id, self.descriptors.run_key)
        return descriptor

    @property
    def spec(self) -> dict[str, Any]:
        """The run's rules."""
        return self.descriptors.spec

    # Policies

    def sources(self) -> Sources:
        """Return whom to ask for policies: what the coordinator lists, then what the descriptor names."""
        listed = decode(RELAY_LIST, self.get("/v1/relays").expect(200), max_bytes=MAX_MESSAGE)
        relays = [*listed["relays"], *self.descriptors.newest["relays"]]
        return Sources(list(dict.fromkeys(relays)))

    def fetch_head(self, sources: Sources) -> int:
        """Fetch the newest policy that the sources tell of, unless it is held; return its version."""
        assert self.publications is not None, "join first"
        head = sources.head(self.publications, now=self.clock())
        if head["version"] not in self.files:
            self.fetch(sources, head["version"], head["manifest_digest"], now=self.clock())
        return int(head["version"])

    def fetch(self, sources: Sources, version: int, manifest_digest: str, *, now: float | None = None) -> None:
        """Fetch a policy by its manifest's digest, by a delta from one that is held if there is one."""
        assert self.publications is not None, "join first"
        manifest = sources.manifest(self.publications, manifest_digest, now=now)
        if manifest["version"] != version:
            raise Refused("wrong_manifest", "of another version")
        held = {digest(file): file for file in self.files.values()}
        self.files[version] = sources.file(manifest, held)

    def policy(self, version: int) -> Policy:
        """Return what the policy says of tokens."""
        return read_policy(self.files[version])

    def model(self, version: int) -> Model:
        """Return the policy's forward pass."""
        return self.model_of(self.files[version])

    # Work

    def lease(self, slots: int = 1) -> list[dict[str, Any]]:
        """Ask for leases of slots; refuse what a lease may not name (5.1)."""
        request = {"held_versions": sorted(self.files), "slots": slots, "instance": self.instance}
        reply, _ = self.signed("POST", "/v1/leases", encode(LEASE_REQUEST, request), max_bytes=512 * KIB)
        leases = decode(LEASE_REPLY, reply.expect(200), max_bytes=512 * KIB)["leases"]
        if len(leases) > slots:
            raise Refused("bad_lease", "more leases than were asked for")
        for lease in leases:
            if ("candidate" in lease) != ("pools" in self.spec["batch"]):
                raise Refused("bad_lease", "a candidate is named exactly in a run with pools")
        return list(leases)

    def expected(self, lease: dict[str, Any]) -> Expected:
        """Return what a submission for the lease has to hold, derived from the run, the manifest and the slot."""
        environments = self.spec["environments"]
        slot = Slot(self.run_id, lease["manifest_digest"], lease["slot"])
        environment = environments[slot.environment([one["weight"] for one in environments])]
        kept, candidate = kept_of(environment), lease.get("candidate", 0)
        if not 0 <= candidate < (CANDIDATES if kept is not None else 1):
            raise Refused("bad_lease", "no such candidate")
        problem = problem_of(environment, slot.problem(kept, candidate), self.spec["sampling"].get("chat"))
        published = frozenset({lease["version"]})
        return expected_of(
            environment,
            problem,
            slot,
            self.policy(lease["version"]),
            self.spec,
            version=lease["version"],
            published=published,
        )

    def draw(self, lease: dict[str, Any]) -> list[Row]:
        """Draw the completions of a leased slot, with their proofs."""
        expected = self.expected(lease)
        model = self.model(lease["version"])
        return [self._draw_row(expected, seed, model) for seed in expected.seeds]

    def _draw_row(self, expected: Expected, seed: bytes, model: Model) -> Row:
        sampling, proofs = self.spec["sampling"], self.spec["proofs"]
        temperature, tokens = sampling["temperature"], list[int]()
        logprobs, states = list[float](), list[np.ndarray]()
        course = expected.course(tokens)
        while len(tokens) < course.over:
            hidden, logits = model(context_of(expected.prompt_ids, tokens, course.replies))
            token = choose(logits[-1], seed, len(tokens), temperature)
            logprobs.append(float(log_probability(logits[-1], token, temperature)))
            states.append(hidden[-1])
            tokens.append(token)
            course = expected.course(tokens)
        chunks = chunks_of([len(tokens)], list(course.replies), proofs["chunk_tokens"])
        pieces = [np.stack(states[first : first + count]) for _, first, count in chunks]
        return Row(
            seed=seed,
            prompt_ids=expected.prompt_ids,
            completion_ids=tuple(tokens),
            logprobs=tuple(logprobs),
            segment_versions=(expected.version,),
            segment_tokens=(len(tokens),),
            proofs=tuple(prove(pieces, seed, proofs)),
        )

    def submit(self, lease: dict[str, Any], rows: Sequence[Row]) -> str:
        """Submit the rows of a lease; return the submission's id, which is known before it is sent."""
        reply, name = self.signed(
            "PUT", f"/v1/submissions/{lease['lease_id']}", write_file(rows), slot=slot_name(lease)
        )
        answer = decode(SUBMISSION_REPLY, reply.expect(202), max_bytes=MAX_MESSAGE)
        if answer["submission"] != name:
            raise Refused("bad_reply", "another submission")
        return name

    def receipt(self, submission: str, *, wait_s: int = 10, seconds: float = 60.0) -> dict[str, Any]:
        """Wait for the receipt of a submission, check and keep it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            reply = self.get(f"/v1/receipts/{submission}?wait={wait_s}")
            if reply.status != 202:
                receipt = self.check_receipt(reply.expect(200), submission)
                self.receipts.append(receipt)
                return receipt
            decode(RECEIPT_STATE, reply.body, max_bytes=MAX_MESSAGE)
        raise Refused("no_receipt", submission)

    def check_receipt(self, envelope: bytes, submission: str) -> dict[str, Any]:
        """Return a receipt of this node's submission, signed by the run."""
        receipt = open_receipt(envelope, self.run_id, self.descriptors.run_key)
        if (receipt["submission"], receipt["node"]) != (submission, self.signer.node):
            raise Refused("bad_receipt", "of another submission")
        return receipt

    def standing(self) -> dict[str, Any]:
        """Return what the coordinator says of this node."""
        reply = self.get(f"/v1/nodes/{self.signer.node}")
        return decode(NODE_STANDING, reply.expect(200), max_bytes=MAX_MESSAGE)  # type: ignore[no-any-return]

    # Audit

    def hashes(self, path: str) -> list[bytes]:
        """Return the hashes of a proof."""
        reply = decode(HASHES, self.get(path).expect(200), max_bytes=MAX_MESSAGE)
        return [bytes.fromhex(one) for one in reply["hashes"]]

    def see_checkpoint(self, note: bytes | None = None) -> dict[str, Any]:
        """Take the newest checkpoint, once it is shown to extend the last one that was seen."""
        note = note or self.get("/v1/log/checkpoint").expect(200)
        new = open_checkpoint(note, self.run_id, self.descriptors.run_key)
        old = self.checkpoint
        if old is not None:
            sizes = old["size"], new["size"]
            trivial = sizes[0] >= sizes[1] or sizes[0] == 0
            proof = [] if trivial else self.hashes(f"/v1/log/consistency?first={sizes[0]}&second={sizes[1]}")
            verify_consistency(*sizes, bytes.fromhex(old["root"]), bytes.fromhex(new["root"]), proof)
        self.checkpoint = new
        return new

    def leaves(self, size: int) -> list[bytes]:
        """Return the leaves of the log up to `size`."""
        leaves: list[bytes] = []
        while len(leaves) < size:
            end = min(size, len(leaves) + ENTRIES_AT_ONCE)
            reply = self.get(f"/v1/log/entries?start={len(leaves)}&end={end}", max_bytes=6 * MIB)
            lines = reply.expect(200).split(b"\n")
            if lines.pop() or not 1 <= len(lines) <= end - len(leaves):
                raise Refused("truncated_log", f"{len(leaves)} entries of {size}")
            leaves += lines
        return leaves

    def check_inclusion(self, receipt: dict[str, Any], checkpoint: dict[str, Any]) -> None:
        """Check that the log keeps what a receipt promised."""
        index, size = receipt["log_index"], checkpoint["size"]
        proof = self.hashes(f"/v1/log/inclusion?index={index}&size={size}")
        root = bytes.fromhex(checkpoint["root"])
        verify_inclusion(bytes.fromhex(receipt["leaf_hash"]), index, size, proof, root)

    def audit(
        self, *, leaves: Sequence[bytes] | None = None, blob: Callable[[str], bytes] | None = None
    ) -> tuple[LogAudit, list[Disagreement]]:
        """Audit the whole log and the evidence of every decided verdict; return all disagreements.

        `leaves` and `blob` stand for what the coordinator serves.
        """
        checkpoint = self.see_checkpoint()
        leaves = self.leaves(checkpoint["size"]) if leaves is None else leaves
        log = LogAudit(run_id=self.run_id, spec=self.spec, spec_digest=self.descriptors.spec_digest)
        log.read(leaves)
        found = log.disagreements
        if root_of([leaf_hash(leaf) for leaf in leaves]).hex() != checkpoint["root"]:
            found = [Disagreement("root", None, "the leaves are not those of the checkpoint"), *found]
        found = [*found, *self._compare_receipts(leaves, log)]
        if blob is None:
            blob = lambda name: self.get(f"/v1/blobs/{name}", max_bytes=16 * MIB).expect(200)  # noqa: E731
        judge = Judge(log, blob, self.policy, self.model)
        for index, entry in enumerate(log.entries):
            if entry is not None and entry["type"] == "verdict" and entry["outcome"] != "indeterminate":
                found += judge.check(index)
        return log, [one for one in found if one.rule != "close"]

    def _compare_receipts(self, leaves: Sequence[bytes], log: LogAudit) -> list[Disagreement]:
        found = []
        for receipt in self.receipts:
            index = receipt["log_index"]
            entry = log.entries[index] if index < len(log.entries) else None
            said = ("submission", "node", "version", "slot", "outcome", "reason", "detail", "tokens")
            same = entry is not None and all(entry.get(name) == receipt[name] for name in said)
            if not same or leaf_hash(leaves[index]).hex() != receipt["leaf_hash"]:
                found.append(Disagreement("receipt", index, "the log is not what the receipt promised"))
        return found
