"""Every reason for which something is refused: a stable code with what each of its readers needs to know.

Codes never change meaning (docs/protocol.md, section 9). A code with an HTTP status refuses a request before anything
is stored, and costs the sender nothing but the request. A code without one is a verdict on a submission, kept in the
log with its evidence.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Self

_UPDATE: Final = "Update swarmproof; if it stays, report it with the log of `swarmproof -v worker`."
_NOTHING: Final = "Nothing: the worker goes on by itself."
_NO_PROXY: Final = "Use the coordinator's own address, without a proxy between."


class Reason(StrEnum):
    """A stable reason code, one row each: code, `status`, `advice`, `meaning`, `todo`.

    `status` is the HTTP status of a refused request, and None for a verdict. `advice` is for whoever implements a
    node and has docs/protocol.md at hand. `meaning` and `todo` are for whoever runs one: what happened, and what they
    can do about it, which is seldom to change how it samples.
    """

    status: int | None
    advice: str
    meaning: str
    todo: str

    def __new__(cls, code: str, status: int | None = None, advice: str = "", meaning: str = "", todo: str = "") -> Self:
        """Make the member of one row; its value is the code. Defaults are there for `Reason(code)`, which finds it."""
        member = str.__new__(cls, code)
        member._value_ = code
        member.status, member.advice, member.meaning, member.todo = status, advice, meaning, todo
        return member

    # Refused in the reply to the request, with an HTTP status.
    BAD_REQUEST = (
        "bad_request",
        400,
        "The request is not what this endpoint takes; update swarmproof on the sending side.",
        "The coordinator does not understand what this worker asked.",
        _UPDATE,
    )
    BAD_SIGNATURE = (
        "bad_signature",
        401,
        "The signature does not match what was sent; sign the exact bytes with the node's key.",
        "A request was changed after it was signed: something on the way alters what is sent.",
        _NO_PROXY,
    )
    REPLAYED_REQUEST = (
        "replayed_request",
        401,
        "This signed request was seen before; sign every request anew.",
        "The coordinator has seen this very request before: something on the way sends it twice.",
        _NO_PROXY,
    )
    CLOCK_SKEW = (
        "clock_skew",
        401,
        "The request's time is too far from the coordinator's; set the clock (NTP) and retry.",
        "This machine's clock is too far from the coordinator's.",
        "Set the clock by NTP (`timedatectl set-ntp true`), then start again.",
    )
    WRONG_RUN = (
        "wrong_run",
        401,
        "The request names another run; check --run-id.",
        "This coordinator serves another run than the one that was joined.",
        "Copy --join, or --coordinator and --run-id, again from the run's operator.",
    )
    UNKNOWN_IDENTITY = (
        "unknown_identity",
        401,
        "This key is not registered with the run; register first.",
        "The coordinator does not know this node's key yet.",
        _NOTHING,
    )
    UNKNOWN_LEASE = (
        "unknown_lease",
        404,
        "No such lease; ask for a new one.",
        "The coordinator does not know this lease: it ended long ago.",
        _NOTHING,
    )
    BANNED = (
        "banned",
        403,
        "Too many of this node's slots were rejected; `swarmproof status` says which, and why.",
        "Too many of this node's slots were rejected: it gets no more work.",
        "Read why with `swarmproof status`, mend it, then start with a new key (`swarmproof keys new`).",
    )
    KEY_IN_USE = (
        "key_in_use",
        409,
        (
            "One key works on one machine: stop the other, or make a new key with `swarmproof keys new`; if that "
            "machine is gone, try again in 2 minutes."
        ),
        "Another machine works with this node's key.",
        (
            "Stop the other one, or give this one its own key (`swarmproof keys new`). If the other is gone, "
            "wait 2 minutes."
        ),
    )
    FOREIGN_LEASE = (
        "foreign_lease",
        403,
        "This lease belongs to another node; submit only work leased to this key.",
        "The slot was leased to another node's key.",
        "Give each worker its own --state.",
    )
    EXPIRED_LEASE = (
        "expired_lease",
        409,
        "The lease has ended and the slot went to somebody else; ask for a new one.",
        "The slot was not done within its lease, and went to somebody else.",
        "Lower --slots, or leave the machine to the worker alone.",
    )
    STALE_POLICY = (
        "stale_policy",
        409,
        "The run has moved on and no longer takes work of that policy; fetch the newest policy.",
        "The slot arrived after the run had moved on to newer policies.",
        "Lower --slots; if fetching takes long, `swarmproof doctor` and a relay near you help.",
    )
    OVERSIZED_BODY = (
        "oversized_body",
        413,
        "The body is larger than the run allows; see limits.max_submission_bytes.",
        "The submission is larger than this run takes.",
        _UPDATE,
    )
    BODY_MISMATCH = (
        "body_mismatch",
        422,
        "The body is not the one that was signed for; send exactly those bytes.",
        "The submission was changed on the way.",
        _NO_PROXY,
    )
    UPLOAD_FIRST = (
        "upload_first",
        409,
        "This run takes bodies by its object store; announce it at /v1/uploads, put it there, submit.",
        "The run keeps submissions in an object store, and this one is not there yet.",
        _NOTHING,
    )
    DUPLICATE_SUBMISSION = (
        "duplicate_submission",
        409,
        "This lease or this file was used already; ask for new work.",
        "This slot was submitted before.",
        _NOTHING,
    )
    TOO_MANY_REQUESTS = (
        "too_many_requests",
        429,
        "Too much at once from this node or address; wait as Retry-After says.",
        "This node or its address asks more often than the coordinator allows.",
        "Nothing, if it passes; else run fewer workers behind one address.",
    )
    NOT_FOUND = (
        "not_found",
        404,
        "Nothing is here under that name; check the address, or ask again later.",
        "The coordinator has nothing under that name.",
        "Compare the coordinator's address with what you were told.",
    )
    # Verdicts, in the order in which they are decided.
    WRONG_BODY = (
        "wrong_body",
        None,
        "What was uploaded has the SHA-256 but not the BLAKE3 that was signed; sign one file's digests.",
        "The file in the run's store is not the one that this node signed for.",
        _UPDATE,
    )
    MALFORMED_SUBMISSION = (
        "malformed_submission",
        None,
        "The file is not one zstd frame of MessagePack within the limits; write it as section 6.1 says.",
        "The submitted file could not be read.",
        _UPDATE,
    )
    WRONG_SCHEMA = (
        "wrong_schema",
        None,
        "The fields, their types or their sizes are not those of section 6.1.",
        "The submitted file has other fields than the run wants.",
        _UPDATE,
    )
    WRONG_GROUP_SIZE = (
        "wrong_group_size",
        None,
        "A slot is one whole group; send exactly sampling.group_size rows.",
        "The slot has more or fewer completions than the run wants.",
        _UPDATE,
    )
    WRONG_PROMPT = (
        "wrong_prompt",
        None,
        "The prompt is not the slot's problem; derive it as section 5 says.",
        "The prompt is not the one of this slot: an environment or the tokenizer differs here.",
        _UPDATE,
    )
    WRONG_SEED = (
        "wrong_seed",
        None,
        "The seeds are not the slot's; derive them as section 5 says.",
        "The seeds are not the ones of this slot.",
        _UPDATE,
    )
    EMPTY_COMPLETION = (
        "empty_completion",
        None,
        "A completion has at least one token.",
        "A completion has no token at all.",
        _UPDATE,
    )
    TOO_LONG = (
        "too_long",
        None,
        "A completion is longer than sampling.max_new_tokens.",
        "A completion is longer than the run allows.",
        _UPDATE,
    )
    TOKEN_OUT_OF_RANGE = (
        "token_out_of_range",
        None,
        "A token id is not in the model's vocabulary.",
        "A token id is outside the model's vocabulary.",
        _UPDATE,
    )
    TOKENS_AFTER_EOS = (
        "tokens_after_eos",
        None,
        "Nothing may follow a completion's end: of one turn, its first end-of-sequence token.",
        "A completion goes on after its end.",
        _UPDATE,
    )
    UNFINISHED = (
        "unfinished",
        None,
        "A completion below the length cap must go on until it is over.",
        "A completion breaks off before its end.",
        _UPDATE,
    )
    WRONG_LOGPROB_COUNT = (
        "wrong_logprob_count",
        None,
        "There is exactly one log-probability per completion token.",
        "Tokens and their probabilities do not match in number.",
        _UPDATE,
    )
    LOGPROB_NOT_FINITE = (
        "logprob_not_finite",
        None,
        "A log-probability is NaN, infinite, above zero, or below -80; send natural logarithms.",
        "A token's probability is not a valid number: the engine computed nonsense.",
        "Look at the machine (`swarmproof doctor`, memory, heat); drop overclocking.",
    )
    WRONG_SEGMENTS = (
        "wrong_segments",
        None,
        "Say which policy drew which tokens: published ones, rising, within max_version_lead (4.6).",
        "The slot names policies that it may not be sampled from.",
        _UPDATE,
    )
    WRONG_PROOF_COUNT = (
        "wrong_proof_count",
        None,
        "There is exactly one proof per started chunk of a segment; the last, shorter one has its own.",
        "Proofs are missing, or there are too many.",
        _UPDATE,
    )
    MALFORMED_PROOF = (
        "malformed_proof",
        None,
        "A proof is not one of the run's scheme and size; encode it as section 6.2 says.",
        "A proof does not have the run's format.",
        _UPDATE,
    )
    PROOF_MISMATCH = (
        "proof_mismatch",
        None,
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
        None,
        "A token is not the one the slot's seed forces; sample as section 4 says.",
        "The tokens are not those that the slot's seed draws: they were sampled in another way.",
        "Change nothing about sampling, and use the tested engine versions (`swarmproof doctor`).",
    )
    WRONG_LOGPROB = (
        "wrong_logprob",
        None,
        "A log-probability is not the policy's; compute it as section 4.5 says.",
        "The tokens' probabilities are not the policy's: it computes something else here than at the verifier.",
        "Serve the policy as it was fetched, unquantised and in the run's dtype (`swarmproof doctor`).",
    )
    # Nobody's fault yet.
    VERIFIER_FAILED = (
        "verifier_failed",
        None,
        "The verifier could not decide; the slot is verified again and nobody is blamed.",
        "The verifier could not decide. It is not your fault, and costs you nothing.",
        "Nothing: the slot is verified again.",
    )


def reason_of(code: str) -> Reason | None:
    """Return the reason with this code; None for a code that this version does not know."""
    return next((reason for reason in Reason if reason.value == code), None)


class Refusal(Exception):
    """Something was refused for a stable reason; `detail` says what was seen, without secrets.

    `submission` is the sender's own earlier submission, where a duplicate of it was refused.
    """

    def __init__(self, reason: Reason, detail: str, *, submission: str | None = None) -> None:
        super().__init__(f"{reason.value}: {detail} {reason.advice}")
        self.reason = reason
        self.detail = detail
        self.submission = submission
