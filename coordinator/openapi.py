"""The OpenAPI document: what FastAPI knows of paths and parameters, and of bodies, signatures and refusals the rest.

Bodies are read and written as canonical values (docs/protocol.md, 1.1), past FastAPI; their schemas come from the same
types as the values.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from coordinator.refusals import STATUS
from node.protocol.messages import (
    ErrorReply,
    LeaseReply,
    LeaseRequest,
    NodeStanding,
    Registration,
    RelayAnnouncement,
    RelayList,
    SubmissionReply,
    UploadReply,
    UploadRequest,
)
from node.protocol.reasons import ADVICE, Reason
from node.protocol.requests import MAX_HEADER_BYTES

VERSION = "1"
_MESSAGES = (
    ErrorReply,
    LeaseReply,
    LeaseRequest,
    NodeStanding,
    Registration,
    RelayAnnouncement,
    RelayList,
    SubmissionReply,
    UploadReply,
    UploadRequest,
)
_REF = "#/components/schemas/{name}"
_SCHEME = "signature"
_DIGEST = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_BYTES, _JSON, _TEXT = "application/octet-stream", "application/json", "text/plain"
_SIGNED = (
    Reason.BAD_SIGNATURE,
    Reason.REPLAYED_REQUEST,
    Reason.CLOCK_SKEW,
    Reason.WRONG_RUN,
    Reason.UNKNOWN_IDENTITY,
    Reason.BODY_MISMATCH,
    Reason.BAD_REQUEST,
    Reason.OVERSIZED_BODY,
)
_LEASED = (Reason.UNKNOWN_LEASE, Reason.FOREIGN_LEASE, Reason.EXPIRED_LEASE, Reason.STALE_POLICY)
_DUPLICATE = (Reason.DUPLICATE_SUBMISSION,)
_STORE = (Reason.UPLOAD_FIRST, Reason.NOT_FOUND)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    """One endpoint: its name, what it takes and answers, and for what it refuses besides too many requests."""

    summary: str
    reply: type[msgspec.Struct] | dict[str, Any] | str
    status: int = 200
    body: type[msgspec.Struct] | str | None = None
    refusals: tuple[Reason, ...] = ()
    waiting: bool = False

    @property
    def signed(self) -> bool:
        return Reason.BAD_SIGNATURE in self.refusals


_EMPTY: dict[str, Any] = {"type": "object", "additionalProperties": False}
_HASHES = {
    "type": "object",
    "required": ["hashes"],
    "additionalProperties": False,
    "properties": {"hashes": {"type": "array", "maxItems": 64, "items": _DIGEST}},
}
_STATE = {
    "type": "object",
    "required": ["state"],
    "additionalProperties": False,
    "properties": {"state": {"enum": ["queued", "verifying"]}},
}
_NONE = (Reason.NOT_FOUND,)
_PROOF = (Reason.NOT_FOUND, Reason.BAD_REQUEST)
OPERATIONS: dict[tuple[str, str], _Operation] = {
    ("get", "/health"): _Operation(summary="Liveness", reply=_TEXT),
    ("get", "/metrics"): _Operation(summary="Prometheus figures, at most a second old", reply=_TEXT),
    ("get", "/v1/run"): _Operation(
        summary="The signed Descriptor of the run; with `after` and `wait`, once there is a newer one",
        reply=_BYTES,
        refusals=(Reason.BAD_REQUEST,),
    ),
    ("get", "/v1/policy"): _Operation(summary="The signed Manifest of the newest policy", reply=_BYTES, refusals=_NONE),
    ("get", "/v1/relays"): _Operation(
        summary="Where relays serve, and whom a node should ask", reply=RelayList, refusals=(Reason.BAD_REQUEST,)
    ),
    ("get", "/v1/status"): _Operation(
        summary="The run for people, at most a second old; not part of the protocol", reply={"type": "object"}
    ),
    ("get", "/v1/blobs/{name}"): _Operation(summary="The bytes with this digest", reply=_BYTES, refusals=_NONE),
    ("get", "/v1/log/checkpoint"): _Operation(summary="The signed Checkpoint of the log", reply=_BYTES),
    ("get", "/v1/log/entries"): _Operation(
        summary="Leaves of the log, each with a line feed; at most 1000",
        reply="application/x-ndjson",
        refusals=(Reason.BAD_REQUEST,),
    ),
    ("get", "/v1/log/inclusion"): _Operation(summary="An inclusion proof", reply=_HASHES, refusals=_PROOF),
    ("get", "/v1/log/consistency"): _Operation(summary="A consistency proof", reply=_HASHES, refusals=_PROOF),
    ("get", "/v1/nodes/{node}"): _Operation(
        summary="What a node's standing is, and why", reply=NodeStanding, refusals=_NONE
    ),
    ("post", "/v1/nodes"): _Operation(
        summary="Register a node", reply=_EMPTY, body=Registration, refusals=(*_SIGNED, Reason.KEY_IN_USE)
    ),
    ("post", "/v1/relays"): _Operation(
        summary="Announce a relay", reply=RelayList, body=RelayAnnouncement, refusals=_SIGNED
    ),
    ("post", "/v1/leases"): _Operation(
        summary="Ask for work",
        reply=LeaseReply,
        body=LeaseRequest,
        refusals=(*_SIGNED, Reason.BANNED, Reason.KEY_IN_USE),
    ),
    ("post", "/v1/leases/{lease_id}/return"): _Operation(
        summary="Hand a lease back", reply=_EMPTY, refusals=(*_SIGNED, *_LEASED, *_DUPLICATE)
    ),
    ("put", "/v1/submissions/{lease_id}"): _Operation(
        summary="Submit a group as a Parquet file",
        reply=SubmissionReply,
        status=202,
        body=_BYTES,
        refusals=(*_SIGNED, *_LEASED, *_DUPLICATE, Reason.UPLOAD_FIRST),
    ),
    ("post", "/v1/uploads/{lease_id}"): _Operation(
        summary="Where to put the body of a submission; only of a run with an object store",
        reply=UploadReply,
        body=UploadRequest,
        refusals=(*_SIGNED, *_LEASED, *_DUPLICATE, Reason.NOT_FOUND),
    ),
    ("put", "/v1/submissions/{lease_id}/{sha256}"): _Operation(
        summary="Submit what was uploaded; only of a run with an object store",
        reply=SubmissionReply,
        status=202,
        refusals=(*_SIGNED, *_LEASED, *_DUPLICATE, *_STORE),
    ),
    ("get", "/v1/receipts/{submission}"): _Operation(
        summary="The signed Receipt of a submission, once there is a verdict",
        reply=_BYTES,
        waiting=True,
        refusals=(Reason.NOT_FOUND, Reason.BAD_REQUEST),
    ),
}


def document(app: FastAPI) -> bytes:
    """The document as JSON. Raises KeyError for a route that OPERATIONS does not describe."""
    described = get_openapi(title=app.title, version=VERSION, routes=app.routes)
    _, schemas = msgspec.json.schema_components(_MESSAGES, ref_template=_REF)
    described["components"] = {
        "schemas": schemas,
        "securitySchemes": {
            _SCHEME: {
                "type": "apiKey",
                "in": "header",
                "name": "Authorization",
                "description": "`Veriswarm ` and the base64url of a signed envelope of RequestClaim, at most "
                f"{MAX_HEADER_BYTES} characters: docs/protocol.md, 3.2. It is for one method, path, body and minute.",
            }
        },
    }
    for path, methods in described["paths"].items():
        for method, generated in methods.items():
            methods[method] = _operation(OPERATIONS[method, path], generated)
    return json.dumps(described).encode()


def _operation(known: _Operation, generated: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {"operationId": generated["operationId"], "summary": known.summary}
    if "parameters" in generated:
        operation["parameters"] = [_parameter(one) for one in generated["parameters"]]
    if known.body is not None:
        operation["requestBody"] = {"required": True, "content": _content(known.body)}
    if known.signed:
        operation["security"] = [{_SCHEME: []}]
    operation["responses"] = {str(known.status): {"description": "Done", "content": _content(known.reply)}}
    if known.waiting:
        operation["responses"]["202"] = {"description": "No verdict yet", "content": _content(_STATE)}
    operation["responses"] |= _refusals((*known.refusals, Reason.TOO_MANY_REQUESTS))
    return operation


def _parameter(generated: dict[str, Any]) -> dict[str, Any]:
    """FastAPI's, without its titles; names in a path that are digests say so."""
    schema = {key: value for key, value in generated["schema"].items() if key != "title"}
    return generated | {"schema": _DIGEST if generated["in"] == "path" else schema}


def _content(what: type[msgspec.Struct] | dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(what, str):
        return {what: {"schema": {"type": "string"} if what == _TEXT else {"type": "string", "format": "binary"}}}
    if isinstance(what, dict):
        return {_JSON: {"schema": what}}
    return {_JSON: {"schema": {"$ref": _REF.format(name=what.__name__)}}}


def _refusals(reasons: tuple[Reason, ...]) -> dict[str, Any]:
    """One response for each status, with what each of its codes means; and the one that nobody expects."""
    by_status: dict[int, list[Reason]] = {}
    for reason in reasons:
        by_status.setdefault(STATUS[reason], []).append(reason)
    replies: dict[str, Any] = {}
    for status, codes in sorted(by_status.items()):
        said = " ".join(f"`{code}`: {ADVICE[code]}" for code in codes)
        replies[str(status)] = {"description": said, "content": _content(ErrorReply)}
        if status == STATUS[Reason.TOO_MANY_REQUESTS]:
            wait = {"description": "Seconds", "required": True, "schema": {"type": "integer", "minimum": 1}}
            replies[str(status)]["headers"] = {"Retry-After": wait}
    replies["500"] = {"description": "`internal_error`: try again later.", "content": _content(ErrorReply)}
    return replies
