"""The OpenAPI document: paths and query parameters from FastAPI, everything else from `node.protocol.endpoints`.

Bodies are canonical values (docs/protocol.md, 1.1) and bypass FastAPI; their schemas come from the message types.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi

from node.protocol.endpoints import BYTES, ENDPOINTS, JSON, TEXT, Endpoint
from node.protocol.messages import ErrorReply
from node.protocol.reasons import Reason
from node.protocol.requests import MAX_HEADER_BYTES
from shardcast.wire import Wire

VERSION = "1"
_REF = "#/components/schemas/{name}"
_SCHEME = "signature"
_DIGEST = {"type": "string", "pattern": "^[0-9a-f]{64}$"}


def serve_document(app: FastAPI) -> None:
    """Serve the document of all routes registered so far at /openapi.json."""
    described = document(app)

    @app.get("/openapi.json", include_in_schema=False)
    def openapi() -> Response:
        return Response(described, media_type=JSON)


def document(app: FastAPI) -> bytes:
    """Return the document as JSON. Raises KeyError for a public route that is not declared."""
    described = get_openapi(title=app.title, version=VERSION, routes=app.routes)
    declared = {(endpoint.method.lower(), endpoint.path): endpoint for endpoint in ENDPOINTS}
    _, schemas = msgspec.json.schema_components(_messages(), ref_template=_REF)
    described["components"] = {
        "schemas": schemas,
        "securitySchemes": {
            _SCHEME: {
                "type": "apiKey",
                "in": "header",
                "name": "Authorization",
                "description": "`Swarmproof ` and the base64url of a signed envelope of RequestClaim, at most "
                f"{MAX_HEADER_BYTES} characters: docs/protocol.md, 3.2. It is for one method, path, body and minute.",
            }
        },
    }
    for path, methods in described["paths"].items():
        for method, generated in methods.items():
            methods[method] = _operation(declared[method, path], generated)
    return json.dumps(described).encode()


def _messages() -> list[type[Wire]]:
    """Return the types of all bodies and replies, by name."""
    kinds = {kind for each in ENDPOINTS for kind in (each.body, each.reply, each.pending or ErrorReply)}
    return sorted((kind for kind in kinds if issubclass(kind, Wire)), key=lambda kind: kind.__name__)


def _operation(endpoint: Endpoint[Any, Any], generated: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {"operationId": generated["operationId"], "summary": endpoint.summary}
    names = [{"name": name, "in": "path", "required": True, "schema": _DIGEST} for name in endpoint.names]
    query = [_parameter(each) for each in generated.get("parameters", ()) if each["in"] == "query"]
    if names or query:
        operation["parameters"] = names + query
    if endpoint.body is bytes:
        operation["requestBody"] = {"required": True, "content": _content(bytes, BYTES)}
    elif issubclass(endpoint.body, Wire):
        operation["requestBody"] = {"required": True, "content": _content(endpoint.body, JSON)}
    if endpoint.signed:
        operation["security"] = [{_SCHEME: []}]
    done = {"description": "Done", "content": _content(endpoint.reply, endpoint.media_type)}
    operation["responses"] = {str(endpoint.status): done}
    if endpoint.pending is not None:
        pending = {"description": "No verdict yet", "content": _content(endpoint.pending, JSON)}
        operation["responses"]["202"] = pending
    operation["responses"] |= _refusals((*endpoint.refusals, Reason.TOO_MANY_REQUESTS))
    return operation


def _parameter(generated: dict[str, Any]) -> dict[str, Any]:
    """Return FastAPI's parameter without its title."""
    return generated | {"schema": {key: value for key, value in generated["schema"].items() if key != "title"}}


def _content(kind: type, media_type: str) -> dict[str, Any]:
    if issubclass(kind, Wire):
        return {media_type: {"schema": {"$ref": _REF.format(name=kind.__name__)}}}
    if media_type == JSON:
        return {media_type: {"schema": {"type": "object"}}}
    return {
        media_type: {"schema": {"type": "string"} if media_type == TEXT else {"type": "string", "format": "binary"}}
    }


def _refusals(reasons: tuple[Reason, ...]) -> dict[str, Any]:
    """Return one response per status, with the advice of each of its codes, and the 500."""
    by_status: dict[int, list[Reason]] = {}
    for reason in reasons:
        by_status.setdefault(reason.status or 500, []).append(reason)
    replies: dict[str, Any] = {}
    for status, codes in sorted(by_status.items()):
        said = " ".join(f"`{code}`: {code.advice}" for code in codes)
        replies[str(status)] = {"description": said, "content": _content(ErrorReply, JSON)}
        if status == Reason.TOO_MANY_REQUESTS.status:
            wait = {"description": "Seconds", "required": True, "schema": {"type": "integer", "minimum": 1}}
            replies[str(status)]["headers"] = {"Retry-After": wait}
    replies["500"] = {"description": "`internal_error`: try again later.", "content": _content(ErrorReply, JSON)}
    return replies
