"""Routes, signed request bodies and replies as `node.protocol.endpoints` declares them.

Handlers of signed requests and of receipts are plain ones, which are given the request itself: FastAPI's dependencies
and parameters took 0.08 to 0.11 ms of a lease's, an upload's and a receipt's processor time. The others are FastAPI's.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, NoneType
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar, cast

from fastapi import APIRouter, Depends, Request, Response
from fastapi.routing import APIRoute
from fastapi.types import DecoratedCallable

from coordinator.http.middleware import address_of
from coordinator.http.service import Service
from coordinator.http.signed_requests import check_body, open_request, read_body, read_envelope, read_message
from coordinator.storage.database import Connection
from node.protocol.endpoints import Endpoint
from shardcast.rate_limit import network_of
from shardcast.wire import Wire, digest, encode

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

PlainHandler = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")
BodyT = TypeVar("BodyT")
WireT = TypeVar("WireT", bound=Wire)


class _PlainRoute(APIRoute):
    """A route whose handler takes the request alone; the application handles errors, as it does around any route."""

    def __init__(self, path: str, endpoint: Callable[[Request], Awaitable[Response]], **options: Any) -> None:
        super().__init__(path, endpoint, **options)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            response = await endpoint(Request(scope, receive, send))
            await response(scope, receive, send)

        self.app = answer


def route(router: APIRouter, endpoint: Endpoint[Any, Any]) -> Callable[[DecoratedCallable], DecoratedCallable]:
    """Register the decorated function, whose parameters FastAPI resolves, as the handler of `endpoint`."""
    return router.api_route(endpoint.path, methods=[endpoint.method])


def plain_route(
    router: APIRouter, endpoint: Endpoint[Any, Any], *, query: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
) -> Callable[[PlainHandler], PlainHandler]:
    """Register the decorated function, of a request alone, as the handler of `endpoint`.

    `query` has the schemas of its optional query parameters, for the OpenAPI document; the handler checks them.
    """
    parameters = [{"name": name, "in": "query", "required": False, "schema": dict(of)} for name, of in query.items()]

    def register(handler: PlainHandler) -> PlainHandler:
        router.add_api_route(
            endpoint.path,
            handler,
            methods=[endpoint.method],
            openapi_extra={"parameters": parameters},
            route_class_override=_PlainRoute,
        )
        return handler

    return register


def service_of(request: Request) -> Service:
    """Return the application's service."""
    return cast("Service", request.app.state.service)


async def _service(request: Request) -> Service:
    """Dependency: FastAPI calls those that are no coroutines in a thread."""
    return service_of(request)


def limit_registrations(request: Request) -> None:
    """Rate-limit registrations of nodes and relays per address; before the body is read."""
    service_of(request).registrations.check(address_of(request.scope), now=time.monotonic())


ServiceDep = Annotated[Service, Depends(_service)]


@dataclass(frozen=True, slots=True)
class SignedCall(Generic[BodyT]):
    """Signed request with its complete body; nothing is verified or parsed before `execute`."""

    endpoint: Endpoint[BodyT, Any]
    service: Service
    request: Request
    envelope: bytes
    body: bytes

    @property
    def address(self) -> str:
        """The client's IP address, "" if unknown."""
        return address_of(self.request.scope)

    @property
    def network(self) -> str:
        """The client's network, see `network_of`."""
        return network_of(self.address)

    async def execute(self, act: Callable[[Connection, str, BodyT], T]) -> T:
        """Verify the request and return `act(transaction, node, message)`; raises Refusal.

        `act` runs in the transaction that uses up the nonce; see `WriteQueue.run` for what it may do.
        """
        node, claim = open_request(self.envelope)

        def execute(connection: Connection) -> T:
            check_body(claim, digest(self.body), len(self.body))
            kind = self.endpoint.body
            return act(connection, node, cast("BodyT", None) if kind is NoneType else read_message(kind, self.body))

        return await self.service.signed.execute(self.request, node, claim, execute)


async def read_signed(endpoint: Endpoint[BodyT, Any], request: Request) -> SignedCall[BodyT]:
    """Read a signed request to `endpoint`, within its size limit and the deadline; raises Refusal."""
    if endpoint.max_body_bytes is None:
        raise ValueError(f"{endpoint.path} streams its body")
    body = await read_body(request, max_bytes=endpoint.max_body_bytes)
    return SignedCall(endpoint, service_of(request), request, read_envelope(request), body)


def respond(endpoint: Endpoint[Any, WireT], value: WireT, *, headers: Mapping[str, str] | None = None) -> Response:
    """Return `value`, encoded, as the reply that `endpoint` declares."""
    return Response(encode(value), status_code=endpoint.status, media_type=endpoint.media_type, headers=headers)


def respond_bytes(endpoint: Endpoint[Any, bytes], body: bytes) -> Response:
    """Return `body` as the reply that `endpoint` declares."""
    return Response(body, status_code=endpoint.status, media_type=endpoint.media_type)
