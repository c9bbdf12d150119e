"""Serve declared endpoints: routes, signed bodies and replies as `node.protocol.endpoints` states them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Generic, TypeVar, cast

from fastapi import APIRouter, Depends, Request, Response
from fastapi.params import Depends as Dependency
from fastapi.types import DecoratedCallable
from starlette.concurrency import run_in_threadpool

from coordinator.http.middleware import address_of
from coordinator.http.rate_limits import network_of
from coordinator.http.service import Service
from coordinator.http.signed_requests import check_body, open_request, read_body, read_envelope, read_message
from coordinator.storage.database import Connection
from node.protocol.endpoints import Endpoint
from shardcast.wire import Wire, digest, encode

T = TypeVar("T")
BodyT = TypeVar("BodyT")
WireT = TypeVar("WireT", bound=Wire)


def route(
    router: APIRouter, endpoint: Endpoint[Any, Any], *, dependencies: Sequence[Dependency] = ()
) -> Callable[[DecoratedCallable], DecoratedCallable]:
    """Register the decorated function as the handler of `endpoint`; `dependencies` run before anything is read."""
    return router.api_route(endpoint.path, methods=[endpoint.method], dependencies=list(dependencies))


async def service_of(request: Request) -> Service:
    """Return the service that the application was made with."""
    return cast("Service", request.app.state.service)


async def newcomer(request: Request) -> None:
    """Dependency: limit how often one address announces nodes and relays, before its body is read."""
    service = await service_of(request)
    service.newcomers.check(address_of(request.scope), now=time.monotonic())


Shared = Annotated[Service, Depends(service_of)]


@dataclass(frozen=True, slots=True)
class SignedCall(Generic[BodyT]):
    """A signed request whose body has arrived within its limit; nothing of it is verified or parsed before `do`."""

    endpoint: Endpoint[BodyT, Any]
    service: Service
    request: Request
    envelope: bytes
    body: bytes

    @property
    def address(self) -> str:
        """The address that the request comes from, or ""."""
        return address_of(self.request.scope)

    @property
    def network(self) -> str:
        """What counts as one address, see `network_of`."""
        return network_of(self.address)

    async def do(self, act: Callable[[Connection, str, BodyT], T]) -> T:
        """Return `act(transaction, node, message)`, run in a thread and in the transaction that uses up the request.

        Raises Refusal. One hop to a thread and one write transaction are most of what a request costs.
        """
        return await run_in_threadpool(self._do, act)

    def _do(self, act: Callable[[Connection, str, BodyT], T]) -> T:
        node, claim = open_request(self.envelope)
        body_digest = digest(self.body)
        with self.service.signed.accept(self.request, node, claim) as connection:
            check_body(claim, body_digest, len(self.body))
            return act(connection, node, self._message())

    def _message(self) -> BodyT:
        wanted = self.endpoint.body
        return cast("BodyT", None) if wanted is NoneType else read_message(wanted, self.body)


def signed(endpoint: Endpoint[BodyT, Any]) -> Callable[[Request], Awaitable[SignedCall[BodyT]]]:
    """Make the dependency that reads a signed request to `endpoint`: at most `max_body_bytes`, and in time."""
    max_bytes = endpoint.max_body_bytes
    if max_bytes is None:
        raise ValueError(f"{endpoint.path} takes its body as it arrives")

    async def read(request: Request) -> SignedCall[BodyT]:
        body = await read_body(request, max_bytes=max_bytes)
        service = await service_of(request)
        return SignedCall(endpoint, service, request, read_envelope(request), body)

    return read


def answer(endpoint: Endpoint[Any, WireT], value: WireT, *, headers: Mapping[str, str] | None = None) -> Response:
    """Return `value` as the reply that `endpoint` declares."""
    return Response(encode(value), status_code=endpoint.status, media_type=endpoint.media_type, headers=headers)


def answer_bytes(endpoint: Endpoint[Any, bytes], body: bytes) -> Response:
    """Return `body` as the reply that `endpoint` declares."""
    return Response(body, status_code=endpoint.status, media_type=endpoint.media_type)
