"""Replies to control requests as text; everything from the node is made printable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from node.client.http import printable
from node.protocol.control import Body, DrainBody, InviteBody, LogsBody, RestartBody, StatusBody

if TYPE_CHECKING:
    from node.control.challenge import ChallengeResult


def lines_of(body: Body) -> list[str]:
    """Render a reply; for a challenge's see `challenge_lines`."""
    match body:
        case StatusBody():
            return _status_lines(body)
        case InviteBody(room=room):
            return [f"It asks for work now; it has room for {room} slots."]
        case DrainBody(slots=slots, undelivered=undelivered):
            return [f"It takes no more work. {slots} slots are under way, {undelivered} have no receipt yet."]
        case RestartBody(slots=slots):
            return [f"It hands {slots} slots back and starts its engine anew."]
        case LogsBody(lines=lines):
            return [printable(line) for line in lines] or ["It has logged nothing yet."]
    raise TypeError(f"no rendering for {type(body).__name__}")


def _status_lines(body: StatusBody) -> list[str]:
    held = ", ".join(map(str, body.held_versions[:8])) or "none"
    states = [
        ("draining", body.draining),
        ("dismissed by its coordinator", body.dismissed),
        ("its coordinator is away", body.coordinator_away),
        ("the run is over", body.run_is_over),
    ]
    rows = [
        ("doing", f"{printable(body.doing)}{''.join(f'; {name}' for name, is_so in states if is_so)}"),
        ("slots", f"{body.slots} under way, {body.undelivered} without a receipt, {body.expired} expired"),
        ("speed", f"{body.tokens_per_s:.1f} tokens/s, {body.tokens:,} tokens since its start"),
        ("policy", f"{body.version}; on disk {held}; the run's newest is {body.head_version}"),
        ("verdicts", f"{body.admitted} admitted, {body.rejected} rejected, {body.indeterminate} undecided"),
        ("engine", f"{printable(body.engine)}, {body.engine_restarts} restarts; {printable(body.software)}"),
        ("network", f"{body.neighbours} neighbours, descriptor {body.descriptor_version}"),
        ("running", f"for {body.seconds} s"),
    ]
    if body.reasons:
        rows.insert(5, ("rejected", ", ".join(f"{reason} {count}" for reason, count in body.reasons.items())))
    return [f"{name:<9} {said}" for name, said in rows]


def challenge_lines(shown: ChallengeResult) -> list[str]:
    """Render the result of a challenge."""
    speed = f"{shown.tokens} tokens in {shown.seconds:.2f} s: {shown.tokens_per_second:.1f} tokens/s"
    said = [f"{shown.rows} completions of policy {shown.version}, {speed}."]
    if shown.fault is not None:
        return [*said, f"They are not what was asked for: {printable(shown.fault)}"]
    if shown.measured:
        return [*said, "Tokens, log-probabilities and proofs are that policy's."]
    return [*said, "Only their form was checked: give --policy, the file of that policy, to check the rest."]
