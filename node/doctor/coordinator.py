"""Checks of the coordinator's health, and of this machine's clock against its Date header (RFC 9110, 6.6.1)."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import aiohttp

from node.client.http import checked_url, describe
from node.doctor.report import Check, fine, problem, warning
from node.errors import ConfigError
from node.protocol.requests import MAX_CLOCK_SKEW_SECONDS

HEALTH_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class HealthReply:
    """Reply to `GET /health`; `skew_seconds` is how far this clock is ahead, None without a Date header."""

    status: int
    skew_seconds: float | None


def check_coordinator(url: str, *, seconds: float = HEALTH_SECONDS) -> list[Check]:
    """Run the checks `coordinator` and, where it answers, `clock`."""
    advice = "Compare --coordinator with what you were told, and look at firewalls between here and there."
    try:
        answer = asyncio.run(_ask(checked_url(url), seconds))
    except ConfigError as error:
        return [problem("coordinator", str(error), advice="Give --coordinator as you were told it.")]
    except TimeoutError:
        return [problem("coordinator", f"{url} does not answer within {seconds:.0f} s.", advice=advice)]
    except (aiohttp.ClientError, OSError) as error:
        return [problem("coordinator", f"{url} cannot be reached: {describe(error)}.", advice=advice)]
    if answer.status != 200:
        said = f"{url} answers HTTP {answer.status} where a coordinator says that it is well."
        return [problem("coordinator", said, advice=advice), check_clock(answer.skew_seconds)]
    return [fine("coordinator", f"{url} answers."), check_clock(answer.skew_seconds)]


def check_clock(skew_seconds: float | None) -> Check:
    """Check that this clock is within the limit for signed requests; `skew_seconds` is how far it is ahead."""
    if skew_seconds is None:
        said = "The coordinator did not say what time it is."
        return warning("clock", said, advice="See that this machine sets its clock by NTP: timedatectl.")
    off = abs(skew_seconds)
    way = "ahead of" if skew_seconds > 0 else "behind"
    said = f"This clock is {off:.0f} s {way} the coordinator's; {MAX_CLOCK_SKEW_SECONDS} s are allowed."
    advice = "Set this machine's clock by NTP (timedatectl set-ntp true); if it is right, tell the operator."
    if off > MAX_CLOCK_SKEW_SECONDS:
        return problem("clock", said, advice=advice)
    if off > MAX_CLOCK_SKEW_SECONDS / 2:
        return warning("clock", said, advice=advice)
    return fine("clock", said)


async def _ask(url: str, seconds: float) -> HealthReply:
    timeout = aiohttp.ClientTimeout(total=seconds)
    async with (
        aiohttp.ClientSession(timeout=timeout, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()) as session,
        session.get(f"{url}/health", allow_redirects=False) as response,
    ):
        # The body is not read: an untrusted answer may be endless.
        return HealthReply(response.status, _skew(response.headers.get("Date"), now=time.time()))


def _skew(date: str | None, *, now: float) -> float | None:
    """Return how far `now` is ahead of an HTTP date, which has whole seconds; None if it is invalid."""
    try:
        said = parsedate_to_datetime(date or "").timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
    return now - said - 0.5
