"""What schemathesis must know of the coordinator: how to sign, how to write a canonical value, what must not get out.

Loaded by schemathesis (SCHEMATHESIS_HOOKS) in its own process; see tests/system/adversary/test_openapi.py.
"""

from __future__ import annotations

import json
import os
import random
import re
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
import requests
import schemathesis
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from independent.messages import is_nickname
from schemathesis.core.parameters import ParameterLocation

from coordinator.lab.redteam.http_client import claim_of
from node.protocol.messages import LeaseRequest, Registration, RelayAnnouncement
from node.protocol.requests import sign_request
from shardcast.urls import valid_sources
from shardcast.wire import encode

KEY = Ed25519PrivateKey.generate()
RUN_ID = os.environ["SWARMPROOF_FUZZED_RUN"]
RNG = random.Random(int(os.environ["SWARMPROOF_FUZZED_SEED"]))
SIGNED_SHARE = 0.8
INSTANCE = "0" * 32
"""The machine that the signer is on, in the same share of messages: one key works on one."""

A_SOURCE = "http://127.0.0.1:8701"

BODIES = {"/v1/nodes": Registration, "/v1/relays": RelayAnnouncement, "/v1/leases": LeaseRequest}
INSIDE = re.compile(rb"Traceback|File \"|\.py\b|sqlite|SELECT |site-packages|Internal Server Error|Error:")


class Signature(requests.auth.AuthBase):
    """Signs what is really sent: any body, to any path."""

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        body = request.body or b""
        body = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body
        if isinstance(body, bytes) and request.method in ("GET", "POST", "PUT"):
            claim = claim_of(RUN_ID, request.method, unquote(urlsplit(request.url or "").path)[:500], body)
            request.headers["Authorization"], _ = sign_request(claim, key=KEY)
        return request


@schemathesis.hook
def before_call(_context: schemathesis.HookContext, case: schemathesis.Case, kwargs: dict[str, Any]) -> None:
    """Most requests to endpoints that want a signature get a right one, so that what is behind it is reached."""
    header = case.meta.components.get(ParameterLocation.HEADER) if case.meta else None
    meant_to_fail = header is not None and header.mode is schemathesis.GenerationMode.NEGATIVE
    if case.operation.definition.raw.get("security") and not meant_to_fail and RNG.random() < SIGNED_SHARE:
        kwargs["auth"] = Signature()


@schemathesis.serializer("application/json")
def canonical(context: schemathesis.SerializationContext, value: Any) -> bytes:
    """The one encoding of a message, if `value` is one; JSON without spaces, if not; and bytes as they are."""
    if isinstance(value, bytes):
        return value
    if context.case.meta is not None and context.case.meta.generation.mode.is_positive:
        value = _sayable(value)
    try:
        message = msgspec.convert(value, BODIES[context.case.operation.path])
        if hasattr(message, "instance") and RNG.random() < SIGNED_SHARE:
            message = msgspec.structs.replace(message, instance=INSTANCE)
        return encode(message)
    except (KeyError, msgspec.ValidationError, UnicodeEncodeError, OverflowError):
        return json.dumps(value, separators=(",", ":")).encode()


def _sayable(value: Any) -> Any:
    """Replace in a valid message what JSON Schema cannot exclude: whole numbers with a fraction, URLs that are no
    source, and nicknames that are none (docs/protocol.md, 1.1, 3.6 and 3.8).
    """
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_sayable(each) for each in value]
    if isinstance(value, dict):
        told = {name: _sayable(each) for name, each in value.items()}
        if "url" in told and valid_sources([told["url"]]) != (told["url"],):
            told["url"] = A_SOURCE
        if "nickname" in told and not is_nickname(told["nickname"]):
            told["nickname"] = "Ada"
        return told
    return value


@schemathesis.check
def tells_nothing_of_the_inside(
    _context: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case
) -> None:
    """No stack trace, no query, no file name. Figures and the log are what they are."""
    found = INSIDE.search(response.content)
    assert case.operation.path in ("/metrics", "/v1/run") or found is None, f"the answer says {found}"
