"""Every reason for a refusal in a contributor's words: what it means, and what they can do about it.

`node.protocol.reasons.ADVICE` is for whoever writes a node and has docs/protocol.md at hand. Here is what a person
reads who runs one: most of them cannot change how it samples, but can update it, look at the machine, or ask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from node.protocol.reasons import Reason


@dataclass(frozen=True, slots=True)
class Plain:
    """What a reason means to the one whose work was refused, and what to do."""

    meaning: str
    todo: str


_UPDATE: Final = "Update veriswarm; if it stays, report it with the log of `veriswarm -v worker`."
_NOTHING: Final = "Nothing: the worker goes on by itself."

PLAIN: Final[dict[Reason, Plain]] = {
    Reason.BAD_REQUEST: Plain("The coordinator does not understand what this worker asked.", _UPDATE),
    Reason.BAD_SIGNATURE: Plain(
        "A request arrived otherwise than it was signed: something on the way changes what is sent.",
        "Use the coordinator's own address, without a proxy between.",
    ),
    Reason.REPLAYED_REQUEST: Plain(
        "The coordinator has seen this very request before: something on the way sends it twice.",
        "Use the coordinator's own address, without a proxy between.",
    ),
    Reason.CLOCK_SKEW: Plain(
        "This machine's clock is too far from the coordinator's.",
        "Set the clock by NTP (`timedatectl set-ntp true`), then start again.",
    ),
    Reason.WRONG_RUN: Plain(
        "This coordinator serves another run than the one that was joined.",
        "Copy --join, or --coordinator and --run-id, again from the run's operator.",
    ),
    Reason.UNKNOWN_IDENTITY: Plain("The coordinator does not know this node's key yet.", _NOTHING),
    Reason.UNKNOWN_LEASE: Plain("The coordinator does not know this lease: it ended long ago.", _NOTHING),
    Reason.BANNED: Plain(
        "Too many of this node's slots were rejected: it gets no more work.",
        "Read why with `veriswarm status`, mend it, then start with a new key (`veriswarm keys new`).",
    ),
    Reason.KEY_IN_USE: Plain(
        "Another machine works with this node's key.",
        "Stop the other one, or give this one its own key (`veriswarm keys new`). If the other is gone, "
        "wait 2 minutes.",
    ),
    Reason.FOREIGN_LEASE: Plain("The slot was leased to another node's key.", "Give each worker its own --state."),
    Reason.EXPIRED_LEASE: Plain(
        "The slot was not done within its lease, and went to somebody else.",
        "Lower --slots, or leave the machine to the worker alone.",
    ),
    Reason.STALE_POLICY: Plain(
        "The slot arrived after the run had moved on to newer policies.",
        "Lower --slots; if fetching takes long, `veriswarm doctor` and a relay near you help.",
    ),
    Reason.OVERSIZED_BODY: Plain("The submission is larger than this run takes.", _UPDATE),
    Reason.BODY_MISMATCH: Plain(
        "The submission was changed on the way.", "Use the coordinator's own address, without a proxy between."
    ),
    Reason.UPLOAD_FIRST: Plain(
        "The run keeps submissions in an object store, and this one is not there yet.", _NOTHING
    ),
    Reason.DUPLICATE_SUBMISSION: Plain("This slot was submitted before.", _NOTHING),
    Reason.TOO_MANY_REQUESTS: Plain(
        "This node or its address asks more often than the coordinator allows.",
        "Nothing, if it passes; else run fewer workers behind one address.",
    ),
    Reason.NOT_FOUND: Plain(
        "The coordinator has nothing under that name.", "Compare the coordinator's address with what you were told."
    ),
    Reason.WRONG_BODY: Plain("The file in the run's store is not the one that this node signed for.", _UPDATE),
    Reason.NOT_PARQUET: Plain("The submitted file could not be read.", _UPDATE),
    Reason.WRONG_SCHEMA: Plain("The submitted file has other columns than the run wants.", _UPDATE),
    Reason.WRONG_GROUP_SIZE: Plain("The slot has more or fewer completions than the run wants.", _UPDATE),
    Reason.WRONG_PROMPT: Plain(
        "The prompt is not the one of this slot: an environment or the tokenizer differs here.", _UPDATE
    ),
    Reason.WRONG_SEED: Plain("The seeds are not the ones of this slot.", _UPDATE),
    Reason.EMPTY_COMPLETION: Plain("A completion has no token at all.", _UPDATE),
    Reason.TOO_LONG: Plain("A completion is longer than the run allows.", _UPDATE),
    Reason.TOKEN_OUT_OF_RANGE: Plain("A token is none that the model knows.", _UPDATE),
    Reason.TOKENS_AFTER_EOS: Plain("A completion goes on after its end.", _UPDATE),
    Reason.UNFINISHED: Plain("A completion breaks off before its end.", _UPDATE),
    Reason.WRONG_LOGPROB_COUNT: Plain("Tokens and their probabilities do not match in number.", _UPDATE),
    Reason.LOGPROB_NOT_FINITE: Plain(
        "A token's probability is no sound number: the engine computed nonsense.",
        "Look at the machine (`veriswarm doctor`, memory, heat); drop overclocking.",
    ),
    Reason.WRONG_SEGMENTS: Plain("The slot names policies that it may not be drawn with.", _UPDATE),
    Reason.WRONG_PROOF_COUNT: Plain("Proofs are missing, or there are too many.", _UPDATE),
    Reason.MALFORMED_PROOF: Plain("A proof is not of the run's kind.", _UPDATE),
    Reason.PROOF_MISMATCH: Plain(
        "The model computes something else here than at the verifier: other weights, another number format, or "
        "faulty hardware.",
        "Serve the policy as it was fetched, unquantised and in the run's dtype; then look at the machine "
        "(`veriswarm doctor`, memory, heat).",
    ),
    Reason.WRONG_TOKEN: Plain(
        "The tokens are not those that the slot's seed draws: they were sampled in another way.",
        "Change nothing about sampling, and use the tested engine versions (`veriswarm doctor`).",
    ),
    Reason.WRONG_LOGPROB: Plain(
        "The tokens' probabilities are not the policy's: it computes something else here than at the verifier.",
        "Serve the policy as it was fetched, unquantised and in the run's dtype (`veriswarm doctor`).",
    ),
    Reason.VERIFIER_FAILED: Plain(
        "The verifier could not decide. It is not your fault, and costs you nothing.",
        "Nothing: the slot is verified again.",
    ),
}
"""For each code two sentences; a test holds the table against the protocol's codes."""


def plain(code: str) -> Plain | None:
    """The words for a reason's code; None for what is no reason of the protocol."""
    return next((said for reason, said in PLAIN.items() if reason.value == code), None)
