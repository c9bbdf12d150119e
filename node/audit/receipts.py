"""`swarmproof receipt verify`: whether the run's log holds what its receipts promise (docs/protocol.md, section 8.3).

A receipt is signed by the run and names a place in its log. Checked are the signature; that a checkpoint of now has the
receipt's leaf at that place, by an inclusion proof; that the leaf says what the receipt says; and, where witnesses are
named, that enough of them have signed that checkpoint or a later one. That the log only ever grew is `swarmproof
audit`'s question.

`--json` prints one object with the keys

    run_id, url
    outcome     "agree", "disagree" or "incomplete"; exit_code 0, 1 or 2
    checkpoint  {size, root}
    witnesses   as in the report of an audit (`node.audit.auditor`)
    problems    [{code, detail, log_index}]: another history that witnesses have signed
    receipts    [{source, submission, log_index, result, code, detail}]: result "agree", "disagree" or "unavailable"
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import click

from node.audit.checkpoint_memory import CheckpointMemory
from node.audit.report import render_witnesses, witnesses_line
from node.audit.witnesses import WitnessGathering, WitnessRule
from node.client.api import CoordinatorClient
from node.client.http import ExchangeLimits, printable
from node.errors import BadReply, ConfigError, Refused
from node.protocol.checkpoints import Checkpoint
from node.protocol.endpoints import LOG_ENTRIES, LOG_INCLUSION, RECEIPT
from node.protocol.merkle import ProofInvalid, leaf_hash, verify_inclusion
from node.protocol.messages import (
    MAX_ENTRY_BYTES,
    MAX_RECEIPT_LINE_BYTES,
    KeptReceipt,
    Receipt,
    VerdictEntry,
)
from node.protocol.receipts import open_receipt
from shardcast.envelope import MAGIC
from shardcast.errors import PeerFault
from shardcast.wire import decode

PATIENCE_SECONDS: Final = 30.0
LIMITS: Final = ExchangeLimits(reply_seconds=120.0)
_URL: Final = re.compile(r"(https?://[^/?#]+(?:/[^?#]*)?)/v1/receipts/([0-9a-f]{64})")
_SAID: Final = ("submission", "node", "version", "slot", "outcome", "reason", "detail", "tokens")
"""What a receipt repeats of its leaf."""


class _BrokenPromise(Exception):
    """The log is not what a receipt promises; `code` is stable."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


class _Unavailable(Exception):
    """What is needed to check a receipt is not to be had."""


@dataclass(frozen=True, slots=True)
class CheckedReceipt:
    """What became of one receipt; `code` is stable, "" where it agrees."""

    source: str
    submission: str | None
    log_index: int | None
    result: str
    code: str = ""
    detail: str = ""


def coordinator_of(sources: Sequence[str], given: str | None) -> str:
    """Return the coordinator whose log is asked: `given`, else that of the first URL; raises ConfigError."""
    found = given or next((match[1] for match in map(_URL.fullmatch, sources) if match), None)
    if found is None:
        raise ConfigError("A receipt in a file is checked against a log: name the run's coordinator by --coordinator.")
    return found


async def verify_receipts(
    sources: Sequence[str], *, run_id: str, url: str, as_json: bool, witnesses: WitnessRule | None, state_dir: Path
) -> int:
    """Check receipts of files and URLs against the log at `url`, print what was found, and return the exit code.

    A file is one receipt's envelope, or a worker's receipts.ndjson. `witnesses` have to have signed the log; proof that
    they signed another one is kept in `state_dir`. Raises NodeError if the log cannot be asked, and OSError.
    """
    async with CoordinatorClient(url, run_id=run_id, limits=LIMITS) as coordinator:
        await coordinator.descriptor(patience_seconds=PATIENCE_SECONDS)
        found = []
        # Fetched first: a checkpoint from before its entry would not have it.
        envelopes = [(source, one) for source in sources for one in await _envelopes(source, coordinator)]
        checkpoint, note = await coordinator.checkpoint(patience_seconds=PATIENCE_SECONDS)
        for source, envelope in envelopes:
            found.append(await _check(source, envelope, coordinator, checkpoint))
        signed, problem = None, None
        if witnesses is not None:
            gathering = WitnessGathering(coordinator, witnesses, checkpoint)
            signed = gathering.found
            memory = CheckpointMemory(state_dir, run_id=run_id)
            problem = await gathering.run(lambda other: memory.keep_evidence(note, other))
    disagree = problem is not None or any(one.result == "disagree" for one in found)
    incomplete = any(one.result == "unavailable" for one in found) or (signed is not None and not signed.has_quorum)
    code = 1 if disagree else 2 if incomplete else 0
    if as_json:
        outcome = ("agree", "disagree", "incomplete")[code]
        seen = {"size": checkpoint.size, "root": checkpoint.root.hex()}
        report = {"run_id": run_id, "url": url, "outcome": outcome, "exit_code": code, "checkpoint": seen}
        report |= {"witnesses": render_witnesses(signed), "problems": [asdict(problem)] if problem else []}
        click.echo(json.dumps(report | {"receipts": [asdict(one) for one in found]}))
        return code
    for one in found:
        place = "" if one.log_index is None else f" entry {one.log_index}"
        click.echo(f"{one.source}:{place} {one.result}{': ' if one.detail else ''}{one.detail}")
    if signed is not None:
        click.echo(witnesses_line(signed))
    if problem is not None:
        click.echo(f"{problem.code}: {problem.detail}")
    return code


async def _envelopes(source: str, coordinator: CoordinatorClient) -> list[bytes | _Unavailable]:
    url = _URL.fullmatch(source)
    if url is None:
        return list(_read(Path(source)))
    try:
        async with CoordinatorClient(url[1], run_id=coordinator.run_id, limits=LIMITS) as asked:
            body = await asked.fetch(RECEIPT, names={"submission": url[2]}, patience_seconds=PATIENCE_SECONDS)
    except (Refused, BadReply) as error:
        return [_Unavailable(printable(str(error)))]
    return [body if body.startswith(MAGIC) else _Unavailable("There is no verdict yet.")]


def _read(path: Path) -> Iterator[bytes]:
    """Yield the envelopes in a file; raises OSError, and ConfigError for other content."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) == MAGIC:
            file.seek(0)
            yield file.read(MAX_RECEIPT_LINE_BYTES)
            return
        file.seek(0)
        number = 0
        while line := file.readline(MAX_RECEIPT_LINE_BYTES):
            number += 1
            try:
                yield decode(KeptReceipt, line.removesuffix(b"\n"), max_bytes=MAX_RECEIPT_LINE_BYTES).envelope
            except PeerFault as error:
                raise ConfigError(f"{path}, line {number}, is no receipt: {error}.") from error
    if not number:
        raise ConfigError(f"{path} is empty.")


async def _check(
    source: str, envelope: bytes | _Unavailable, coordinator: CoordinatorClient, checkpoint: Checkpoint
) -> CheckedReceipt:
    receipt = None
    try:
        if isinstance(envelope, _Unavailable):
            raise envelope
        receipt = _open(envelope, coordinator)
        await _check_leaf(receipt, coordinator, checkpoint)
    except _BrokenPromise as error:
        what: dict[str, Any] = {"result": "disagree", "code": error.code, "detail": printable(str(error))}
    except (_Unavailable, Refused, BadReply) as error:
        what = {"result": "unavailable", "code": "unavailable", "detail": printable(str(error))}
    else:
        what = {"result": "agree"}
    named = (None, None) if receipt is None else (receipt.submission, receipt.log_index)
    return CheckedReceipt(source, *named, **what)


def _open(envelope: bytes, coordinator: CoordinatorClient) -> Receipt:
    try:
        receipt = open_receipt(envelope, signer=coordinator.run_key)
    except PeerFault as error:
        raise _BrokenPromise("not_the_runs", f"It is not a receipt of this run: {error}.") from error
    if receipt.run_id != coordinator.run_id:
        raise _BrokenPromise("not_the_runs", "It names another run.")
    return receipt


async def _check_leaf(receipt: Receipt, coordinator: CoordinatorClient, checkpoint: Checkpoint) -> None:
    """Raise _BrokenPromise unless the log has the receipt's leaf at its place, and the leaf says the same."""
    index, size = receipt.log_index, checkpoint.size
    if index >= size:
        raise _BrokenPromise("entry_missing", f"The log has {size} entries, and the receipt promises entry {index}.")
    proof = await coordinator.log_proof(
        LOG_INCLUSION, {"index": str(index), "size": str(size)}, patience_seconds=PATIENCE_SECONDS
    )
    promised = bytes.fromhex(receipt.leaf_hash)
    try:
        verify_inclusion(promised, index=index, size=size, proof=proof, root_hash=checkpoint.root)
    except ProofInvalid as error:
        raise _BrokenPromise("inclusion_proof", f"The log has another entry {index}: {error}.") from error
    query = {"start": str(index), "end": str(index + 1)}
    body = await coordinator.fetch(
        LOG_ENTRIES, query=query, max_bytes=MAX_ENTRY_BYTES + 1, patience_seconds=PATIENCE_SECONDS
    )
    leaf = body.removesuffix(b"\n")
    if leaf_hash(leaf) != promised:
        raise BadReply(f"What is served as entry {index} is not the entry that the checkpoint has.")
    try:
        entry = decode(VerdictEntry, leaf, max_bytes=MAX_ENTRY_BYTES)
    except PeerFault as error:
        raise _BrokenPromise("receipt_differs", f"Entry {index} is no verdict: {error}.") from error
    differs = [name for name in _SAID if getattr(entry, name) != getattr(receipt, name)]
    if differs or entry.recheck:
        raise _BrokenPromise("receipt_differs", f"Entry {index} says otherwise: {', '.join(differs) or 'recheck'}.")
