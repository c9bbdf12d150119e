"""Every reason for which something is refused: a stable code, and a sentence that says what to do.

Codes never change meaning (docs/protocol.md, section 9). A code tells whose turn it is: `door` refusals
happen before anything is stored and cost the sender nothing but the request; `verdict` refusals are
decisions about a submission, kept in the log with their evidence.
"""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Stable reason codes. The first group is answered at the door, the second is logged as a verdict."""

    # At the door.
    BAD_REQUEST = "bad_request"
    BAD_SIGNATURE = "bad_signature"
    REPLAYED_REQUEST = "replayed_request"
    CLOCK_SKEW = "clock_skew"
    WRONG_RUN = "wrong_run"
    UNKNOWN_IDENTITY = "unknown_identity"
    UNKNOWN_LEASE = "unknown_lease"
    BANNED = "banned"
    KEY_IN_USE = "key_in_use"
    FOREIGN_LEASE = "foreign_lease"
    EXPIRED_LEASE = "expired_lease"
    STALE_POLICY = "stale_policy"
    OVERSIZED_BODY = "oversized_body"
    BODY_MISMATCH = "body_mismatch"
    UPLOAD_FIRST = "upload_first"
    DUPLICATE_SUBMISSION = "duplicate_submission"
    TOO_MANY_REQUESTS = "too_many_requests"
    NOT_FOUND = "not_found"
    # Verdicts, in the order in which they are decided.
    WRONG_BODY = "wrong_body"
    NOT_PARQUET = "not_parquet"
    WRONG_SCHEMA = "wrong_schema"
    WRONG_GROUP_SIZE = "wrong_group_size"
    WRONG_PROMPT = "wrong_prompt"
    WRONG_SEED = "wrong_seed"
    EMPTY_COMPLETION = "empty_completion"
    TOO_LONG = "too_long"
    TOKEN_OUT_OF_RANGE = "token_out_of_range"  # noqa: S105  (a vocabulary token)
    TOKENS_AFTER_EOS = "tokens_after_eos"
    UNFINISHED = "unfinished"
    WRONG_LOGPROB_COUNT = "wrong_logprob_count"
    LOGPROB_NOT_FINITE = "logprob_not_finite"
    WRONG_SEGMENTS = "wrong_segments"
    WRONG_PROOF_COUNT = "wrong_proof_count"
    MALFORMED_PROOF = "malformed_proof"
    PROOF_MISMATCH = "proof_mismatch"
    WRONG_TOKEN = "wrong_token"  # noqa: S105
    WRONG_LOGPROB = "wrong_logprob"
    # Nobody's fault yet.
    VERIFIER_FAILED = "verifier_failed"


ADVICE: dict[Reason, str] = {
    Reason.BAD_REQUEST: "The request is not what this endpoint takes; update veriswarm on the sending side.",
    Reason.BAD_SIGNATURE: "The signature does not match what was sent; sign the exact bytes with the node's key.",
    Reason.REPLAYED_REQUEST: "This signed request was seen before; sign every request anew.",
    Reason.CLOCK_SKEW: "The request's time is too far from the coordinator's; set the clock (NTP) and retry.",
    Reason.WRONG_RUN: "The request names another run; check --run-id.",
    Reason.UNKNOWN_IDENTITY: "This key is not registered with the run; register first.",
    Reason.UNKNOWN_LEASE: "No such lease; ask for a new one.",
    Reason.BANNED: "Too many of this node's slots were rejected; `veriswarm status` says which, and why.",
    Reason.KEY_IN_USE: "One key works on one machine: stop the other, or make a new key with `veriswarm keys new`; "
    "if that machine is gone, try again in 2 minutes.",
    Reason.FOREIGN_LEASE: "This lease belongs to another node; submit only work leased to this key.",
    Reason.EXPIRED_LEASE: "The lease has ended and the slot went to somebody else; ask for a new one.",
    Reason.STALE_POLICY: "The run has moved on and no longer takes work of that policy; fetch the newest policy.",
    Reason.OVERSIZED_BODY: "The body is larger than the run allows; see limits.max_submission_bytes.",
    Reason.BODY_MISMATCH: "The body is not the one that was signed for; send exactly those bytes.",
    Reason.UPLOAD_FIRST: "This run takes bodies by its object store; announce it at /v1/uploads, put it there, submit.",
    Reason.DUPLICATE_SUBMISSION: "This lease or this file was used already; ask for new work.",
    Reason.TOO_MANY_REQUESTS: "Too much at once from this node or address; wait as Retry-After says.",
    Reason.NOT_FOUND: "Nothing is here under that name; check the address, or ask again later.",
    Reason.WRONG_BODY: "What was uploaded has the SHA-256 but not the BLAKE3 that was signed; sign one file's digests.",
    Reason.NOT_PARQUET: "The file could not be read as Parquet within the limits; write it as section 6 says.",
    Reason.WRONG_SCHEMA: "The columns or their types are not those of section 6.",
    Reason.WRONG_GROUP_SIZE: "A slot is one whole group; send exactly sampling.group_size rows.",
    Reason.WRONG_PROMPT: "The prompt is not the slot's problem; derive it as section 5 says.",
    Reason.WRONG_SEED: "The seeds are not the slot's; derive them as section 5 says.",
    Reason.EMPTY_COMPLETION: "A completion has at least one token.",
    Reason.TOO_LONG: "A completion is longer than sampling.max_new_tokens.",
    Reason.TOKEN_OUT_OF_RANGE: "A token id is not in the model's vocabulary.",
    Reason.TOKENS_AFTER_EOS: "Nothing may follow a completion's end: of one turn, its first end-of-sequence token.",
    Reason.UNFINISHED: "A completion below the length cap must go on until it is over.",
    Reason.WRONG_LOGPROB_COUNT: "There is exactly one log-probability per completion token.",
    Reason.LOGPROB_NOT_FINITE: "A log-probability is NaN, infinite, above zero, or below -80.",
    Reason.WRONG_SEGMENTS: "Say which policy drew which tokens: published ones, rising, within max_version_lead.",
    Reason.WRONG_PROOF_COUNT: "There is exactly one proof per started chunk of a segment.",
    Reason.MALFORMED_PROOF: "A proof is not one of the run's scheme and size.",
    Reason.PROOF_MISMATCH: "The activations behind the proofs are not the policy's; serve the exact weights and dtype.",
    Reason.WRONG_TOKEN: "A token is not the one the slot's seed forces; sample as section 4 says.",
    Reason.WRONG_LOGPROB: "A log-probability is not the policy's.",
    Reason.VERIFIER_FAILED: "The verifier could not decide; the slot is verified again and nobody is blamed.",
}
"""What the refused party should do, one sentence for each code."""


class Refusal(Exception):
    """Something was refused for a stable reason; `detail` says what was seen, without secrets.

    `submission` is the sender's own earlier submission, where a duplicate of it was refused.
    """

    def __init__(self, reason: Reason, detail: str, *, submission: str | None = None) -> None:
        super().__init__(f"{reason.value}: {detail} {ADVICE[reason]}")
        self.reason = reason
        self.detail = detail
        self.submission = submission
