"""Reason codes of refused requests and verdicts, each with its texts for implementers and operators.

Codes never change meaning (docs/protocol.md, section 9). A code with an HTTP status refuses a request before anything
is stored; a code without one is a verdict on a submission, kept in the log with its evidence.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Self

_UPDATE: Final = "Update swarmproof; if it stays, report it with the log of `swarmproof -v worker`."
_NOTHING: Final = "Nothing: the worker goes on by itself."
_NEW_INVITE: Final = "Ask the run's operator for an invite, and give it to --invite (or SWARMPROOF_WORKER_INVITE)."
_NO_PROXY: Final = "Use the coordinator's own address, without a proxy between."


class Reason(StrEnum):
    """A stable reason code, one row each: code, `advice`, `meaning`, `todo` (default: update), `status`.

    `advice` is for an implementer with docs/protocol.md at hand; `meaning` and `todo` tell an operator what happened
    and what to do. `status` is the HTTP status of a refused request, None for a verdict.
    """

    status: int | None
    advice: str
    meaning: str
    todo: str

    def __new__(
        cls, code: str, advice: str = "", meaning: str = "", todo: str = _UPDATE, status: int | None = None
    ) -> Self:
        """Make the member of one row, with the code as its value; the defaults make `Reason(code)` type-check."""
        member = str.__new__(cls, code)
        member._value_ = code
        member.status, member.advice, member.meaning, member.todo = status, advice, meaning, todo
        return member

    # Refused in the reply to the request, with an HTTP status.
    BAD_REQUEST = (
        "bad_request",
        "The request is not what this endpoint takes; update swarmproof on the sending side.",
        "The coordinator does not understand what this worker asked.",
        _UPDATE,
        400,
    )
    BAD_SIGNATURE = (
        "bad_signature",
        "What is signed is not of this release, or not what was sent; sign the exact bytes, for this method and path.",
        "This worker and the coordinator are of different releases, or something on the way changes what is sent.",
        "Take the coordinator's release. If you have it, use the coordinator's own address, without a proxy between.",
        401,
    )
    REPLAYED_REQUEST = (
        "replayed_request",
        "This signed request was seen before; sign every request anew.",
        "The coordinator has seen this very request before: something on the way sends it twice.",
        _NO_PROXY,
        401,
    )
    CLOCK_SKEW = (
        "clock_skew",
        "The request's time is too far from the coordinator's; set the clock (NTP) and retry.",
        "This machine's clock is too far from the coordinator's.",
        "Set the clock by NTP (`timedatectl set-ntp true`), then start again.",
        401,
    )
    WRONG_RUN = (
        "wrong_run",
        "The request names another run; check --run-id.",
        "This coordinator serves another run than the one that was joined.",
        "Copy --join, or --coordinator and --run-id, again from the run's operator.",
        401,
    )
    UNKNOWN_IDENTITY = (
        "unknown_identity",
        "This key is not registered with the run; register first.",
        "The coordinator does not know this node's key yet.",
        _NOTHING,
        401,
    )
    UNKNOWN_LEASE = (
        "unknown_lease",
        "No such lease; ask for a new one.",
        "The coordinator does not know this lease: it ended long ago.",
        _NOTHING,
        404,
    )
    BANNED = (
        "banned",
        "Too many of this node's slots were rejected; `swarmproof status` says which, and why.",
        "Too many of this node's slots were rejected: it gets no more work.",
        "Read why with `swarmproof status`, mend it, then start with a new key (`swarmproof keys new`).",
        403,
    )
    KEY_IN_USE = (
        "key_in_use",
        (
            "One key works on one machine: stop the other, or make a new key with `swarmproof keys new`; if that "
            "machine is gone, try again in 2 minutes."
        ),
        "Another machine works with this node's key.",
        (
            "Stop the other one, or give this one its own key (`swarmproof keys new`). If the other is gone, "
            "wait 2 minutes."
        ),
        409,
    )
    INVITE_REQUIRED = (
        "invite_required",
        "This run takes new keys by invite alone; send one with the registration.",
        "This run takes in new nodes by invite alone.",
        _NEW_INVITE,
        403,
    )
    BAD_INVITE = (
        "bad_invite",
        "The invite is not one that this run's key signed; send it whole, to the run that it is of.",
        "The invite is not one of this run, or was changed.",
        _NEW_INVITE,
        403,
    )
    EXPIRED_INVITE = (
        "expired_invite",
        "The invite does not hold now; have a new one made.",
        "The invite's time is over, or has not begun.",
        _NEW_INVITE,
        403,
    )
    FOREIGN_INVITE = (
        "foreign_invite",
        "The invite is for another key; register with that one, or have one made for this.",
        "The invite is for another node's key.",
        _NEW_INVITE,
        403,
    )
    SPENT_INVITE = (
        "spent_invite",
        "The invite has let in as many keys as it is for; have a new one made.",
        "As many nodes as the invite is for have used it.",
        _NEW_INVITE,
        403,
    )
    STAKE_REQUIRED = (
        "stake_required",
        "This run takes new keys with a stake alone; have the operator note one for this key, then register.",
        "This run takes in new nodes with a stake alone.",
        "Pay the stake to the run's operator, naming this node's id; the worker joins once it is noted.",
        403,
    )
    WORK_REQUIRED = (
        "work_required",
        "This run takes new keys with a proof of work: solve GET /v1/puzzle for this key, then register with it.",
        "This run takes in new nodes with a proof of work.",
        _NOTHING,
        403,
    )
    BAD_NICKNAME = (
        "bad_nickname",
        "A nickname is 1 to 32 letters (4 marks each), digits, single spaces and . _ - in NFC; send another or none.",
        "The coordinator does not take this node's nickname.",
        "Give another --nickname, or none.",
        400,
    )
    FOREIGN_LEASE = (
        "foreign_lease",
        "This lease belongs to another node; submit only work leased to this key.",
        "The slot was leased to another node's key.",
        "Give each worker its own --state.",
        403,
    )
    WRONG_SLOT = (
        "wrong_slot",
        "The request names another slot than its lease is of; sign for the slot as the lease names it.",
        "The coordinator has another slot down for the lease than it told this worker.",
        "Tell the run's operator.",
        409,
    )
    EXPIRED_LEASE = (
        "expired_lease",
        "The lease has ended and the slot went to somebody else; ask for a new one.",
        "The slot was not done within its lease, and went to somebody else.",
        "Lower --slots, or leave the machine to the worker alone.",
        409,
    )
    STALE_POLICY = (
        "stale_policy",
        "The run has moved on and no longer takes work of that policy; fetch the newest policy.",
        "The slot arrived after the run had moved on to newer policies.",
        "Lower --slots; if fetching takes long, `swarmproof doctor` and a relay near you help.",
        409,
    )
    OVERSIZED_BODY = (
        "oversized_body",
        "The body is larger than the run allows; see limits.max_submission_bytes.",
        "The submission is larger than this run takes.",
        _UPDATE,
        413,
    )
    BODY_MISMATCH = (
        "body_mismatch",
        "The body is not the one that was signed for; send exactly those bytes.",
        "The submission was changed on the way.",
        _NO_PROXY,
        422,
    )
    UPLOAD_FIRST = (
        "upload_first",
        "This run takes bodies by its object store; announce it at /v1/uploads, put it there, submit.",
        "The run keeps submissions in an object store, and this one is not there yet.",
        _NOTHING,
        409,
    )
    DUPLICATE_SUBMISSION = (
        "duplicate_submission",
        "This lease or this file was used already; ask for new work.",
        "This slot was submitted before.",
        _NOTHING,
        409,
    )
    TOO_MANY_REQUESTS = (
        "too_many_requests",
        "Too much at once from this node or address; wait as Retry-After says.",
        "This node or its address asks more often than the coordinator allows.",
        "Nothing, if it passes; else run fewer workers behind one address.",
        429,
    )
    NOT_FOUND = (
        "not_found",
        "Nothing is here under that name; check the address, or ask again later.",
        "The coordinator has nothing under that name.",
        "Compare the coordinator's address with what you were told.",
        404,
    )
    EVIDENCE_EXPIRED = (
        "evidence_expired",
        "The operator removed the files of this submission some days after its verdict; the log still has the verdict.",
        "The coordinator has removed this old submission's files.",
        "Ask the run's operator for a backup of that time.",
        410,
    )
    METHOD_NOT_ALLOWED = (
        "method_not_allowed",
        "This path takes other methods; the Allow header names them.",
        "The coordinator does not take this kind of request at this address.",
        _UPDATE,
        405,
    )
    # Verdicts, in the order in which they are decided.
    WRONG_BODY = (
        "wrong_body",
        "What was uploaded has the SHA-256 but not the BLAKE3 that was signed; sign one file's digests.",
        "The file in the run's store is not the one that this node signed for.",
    )
    MALFORMED_SUBMISSION = (
        "malformed_submission",
        "The file is not one zstd frame of MessagePack within the limits; write it as section 6.1 says.",
        "The submitted file could not be read.",
    )
    WRONG_SCHEMA = (
        "wrong_schema",
        "The fields, their types or their sizes are not those of section 6.1.",
        "The submitted file has other fields than the run wants.",
    )
    WRONG_GROUP_SIZE = (
        "wrong_group_size",
        "A slot is one whole group; send exactly sampling.group_size rows.",
        "The slot has more or fewer completions than the run wants.",
    )
    WRONG_PROMPT = (
        "wrong_prompt",
        "The prompt is not the slot's problem; derive it as section 5 says.",
        "The prompt is not the one of this slot: an environment or the tokenizer differs here.",
    )
    WRONG_SEED = (
        "wrong_seed",
        "The seeds are not the slot's; derive them as section 5 says.",
        "The seeds are not the ones of this slot.",
    )
    EMPTY_COMPLETION = ("empty_completion", "A completion has at least one token.", "A completion has no token at all.")
    TOO_LONG = (
        "too_long",
        "A completion is longer than max_new_tokens, its environment's or the run's.",
        "A completion is longer than the run allows.",
    )
    TOKEN_OUT_OF_RANGE = (
        "token_out_of_range",
        "A token id is not in the model's vocabulary.",
        "A token id is outside the model's vocabulary.",
    )
    TOKENS_AFTER_EOS = (
        "tokens_after_eos",
        "Nothing may follow a completion's end: of one turn, its first end-of-sequence token or stop string.",
        "A completion goes on after its end.",
    )
    UNFINISHED = (
        "unfinished",
        "A completion below the length cap must go on until it is over.",
        "A completion breaks off before its end.",
    )
    WRONG_LOGPROB_COUNT = (
        "wrong_logprob_count",
        "There is exactly one log-probability per completion token.",
        "Tokens and their probabilities do not match in number.",
    )
    LOGPROB_NOT_FINITE = (
        "logprob_not_finite",
        "A log-probability is NaN, infinite, above zero, or below -80; send natural logarithms.",
        "A token's probability is not a valid number: the engine computed nonsense.",
        "Look at the machine (`swarmproof doctor`, memory, heat); drop overclocking.",
    )
    WRONG_SEGMENTS = (
        "wrong_segments",
        "Say which policy drew which tokens: published ones, rising, within max_version_lead (4.6).",
        "The slot names policies that it may not be sampled from.",
    )
    WRONG_PROOF_COUNT = (
        "wrong_proof_count",
        "There is exactly one proof per started chunk of a segment; the last, shorter one has its own.",
        "Proofs are missing, or there are too many.",
    )
    MALFORMED_PROOF = (
        "malformed_proof",
        "A proof is not one of the run's scheme and size; encode it as section 6.2 says.",
        "A proof does not have the run's format.",
    )
    PROOF_MISMATCH = (
        "proof_mismatch",
        "The activations behind the proofs are not the policy's; serve the exact weights, in the run's dtype.",
        (
            "The model computes something else here than at the verifier: other weights, another number format, "
            "or faulty hardware."
        ),
        (
            "Serve the policy as it was fetched, unquantised and in the run's dtype; then look at the machine "
            "(`swarmproof doctor`, memory, heat)."
        ),
    )
    WRONG_TOKEN = (
        "wrong_token",
        "A token is not the one the slot's seed forces; sample as section 4 says.",
        "The tokens are not those that the slot's seed draws: they were sampled in another way.",
        "Change nothing about sampling, and use the tested engine versions (`swarmproof doctor`).",
    )
    WRONG_LOGPROB = (
        "wrong_logprob",
        "A log-probability is not the policy's; compute it as section 4.5 says.",
        "The tokens' probabilities are not the policy's: it computes something else here than at the verifier.",
        "Serve the policy as it was fetched, unquantised and in the run's dtype (`swarmproof doctor`).",
    )
    # Nobody's fault yet.
    VERIFIER_FAILED = (
        "verifier_failed",
        "The verifier could not decide; the slot is verified again and nobody is blamed.",
        "The verifier could not decide. It is not your fault, and costs you nothing.",
        "Nothing: the slot is verified again.",
    )


def reason_of(code: str) -> Reason | None:
    """Return the reason with this code; None for a code that this version does not know."""
    return next((reason for reason in Reason if reason.value == code), None)


class Refusal(Exception):
    """A refusal for a stable reason; `detail` says what was seen, without secrets.

    `submission` is the id of the sender's earlier submission if this one is its duplicate.
    """

    def __init__(self, reason: Reason, detail: str, *, submission: str | None = None) -> None:
        super().__init__(f"{reason.value}: {detail} {reason.advice}")
        self.reason = reason
        self.detail = detail
        self.submission = submission
