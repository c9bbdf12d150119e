"""Routes, signed request bodies and replies as `node.protocol.endpoints` declares them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Generic, TypeVar, cast

from fastapi import APIRouter, Depends, Request, Response
from fastapi.params import Depends as Dependency
from fastapi.types import DecoratedCallable

from coordinator.http.middleware import address_of
from coordinator.http.service import Service
from coordinator.http.signed_requests import check_body, open_request, read_body, read_envelope, read_message
from coordinator.storage.database import Connection
from node.protocol.endpoints import Endpoint
from shardcast.rate_limit import network_of
from shardcast.wire import Wire, digest, encode

T = TypeVar("T")
BodyT = TypeVar("BodyT")
WireT = TypeVar("WireT", bound=Wire)


def route(
    router: APIRouter, endpoint: Endpoint[Any, Any], *, dependencies: Sequence[Dependency] = ()
) -> Callable[[DecoratedCallable], DecoratedCallable]:
    """Register the decorated function as the handler of `endpoint`; `dependencies` run before the body is read."""
    return router.api_route(endpoint.path, methods=[endpoint.method], dependencies=list(dependencies))


async def service_of(request: Request) -> Service:
    """Dependency: return the application's service."""
    return cast("Service", request.app.state.service)


async def limit_registrations(request: Request) -> None:
    """Dependency: rate-limit registrations of nodes and relays per address, before the body is read."""
    service = await service_of(request)
    service.registrations.check(address_of(request.scope), now=time.monotonic())


ServiceDep = Annotated[Service, Depends(service_of)]


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

        `act` runs in a thread, in the transaction that uses up the nonce.
        """
        node, claim = open_request(self.envelope)

        def execute(connection: Connection) -> T:
            check_body(claim, digest(self.body), len(self.body))
            kind = self.endpoint.body
            return act(connection, node, cast("BodyT", None) if kind is NoneType else read_message(kind, self.body))

        return await self.service.signed.execute(self.request, node, claim, execute)


def signed(endpoint: Endpoint[BodyT, Any]) -> Callable[[Request], Awaitable[SignedCall[BodyT]]]:
    """Return the dependency that reads a signed request to `endpoint`, within its size limit and the deadline."""
    max_bytes = endpoint.max_body_bytes
    if max_bytes is None:
        raise ValueError(f"{endpoint.path} streams its body")

    async def read(request: Request) -> SignedCall[BodyT]:
        body = await read_body(request, max_bytes=max_bytes)
        service = await service_of(request)
        return SignedCall(endpoint, service, request, read_envelope(request), body)

    return read


def respond(endpoint: Endpoint[Any, WireT], value: WireT, *, headers: Mapping[str, str] | None = None) -> Response:
    """Return `value`, encoded, as the reply that `endpoint` declares."""
    return Response(encode(value), status_code=endpoint.status, media_type=endpoint.media_type, headers=headers)


def respond_bytes(endpoint: Endpoint[Any, bytes], body: bytes) -> Response:
    """Return `body` as the reply that `endpoint` declares."""
    return Response(body, status_code=endpoint.status, media_type=endpoint.media_type)
