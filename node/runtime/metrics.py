"""Prometheus metrics: the server, and the metrics that every process has.

Names follow Prometheus' conventions. Labels have a fixed set of values (outcome, reason, state), never ids of nodes or
submissions, whose cardinality strangers control. docs/metrics.md lists every metric, by test. The server is off by
default, listens on loopback, and has no authentication.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Literal

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from node.errors import ConfigError

log = logging.getLogger(__name__)

# Else each counter and histogram doubles its series with creation times.
disable_created_metrics()  # type: ignore[no-untyped-call]

Kind = Literal["counter", "gauge"]

WAIT_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Seconds, for requests."""
WORK_BUCKETS: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Seconds, for model computations."""


def process_registry(role: str, *, folders: Mapping[str, Path] | None = None) -> CollectorRegistry:
    """Return a registry with the process metrics and the disk usage of `folders`, by label."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_ProcessInfo(role, folders or {}))
    return registry


@contextlib.contextmanager
def serving_metrics(registry: CollectorRegistry, host: str, port: int | None) -> Iterator[None]:
    """Serve `registry` from a thread while the block is active, if a port is given; raises ConfigError."""
    if port is None:
        yield
        return
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        where = f"{host}:{port}"
        raise ConfigError(
            f"metrics cannot be served at {where}: {error.strerror or error}; name another --metrics-port.",
            code="cannot_bind",
        ) from error
    log.info("metrics at http://%s:%d/metrics", host, server.server_port)
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _ProcessInfo(Collector):
    """Build info, role and disk usage."""

    def __init__(self, role: str, folders: Mapping[str, Path]) -> None:
        self._role, self._folders = role, dict(folders)

    def collect(self) -> Iterator[Metric]:
        build = GaugeMetricFamily("swarmproof_build_info", "Always 1.", labels=["version", "role"])
        build.add_metric([metadata.version("swarmproof"), self._role], 1)
        yield build
        free = GaugeMetricFamily("swarmproof_disk_free_bytes", "Room left where a folder is.", labels=["folder"])
        size = GaugeMetricFamily(
            "swarmproof_disk_size_bytes", "Size of the disk that a folder is on.", labels=["folder"]
        )
        for name, folder in self._folders.items():
            with contextlib.suppress(OSError):  # not made yet
                usage = shutil.disk_usage(folder)
                free.add_metric([name], usage.free)
                size.add_metric([name], usage.total)
        yield from (free, size)


@dataclass(frozen=True, slots=True)
class StatusMetric:
    """A metric read from a process's status. `value` returns None for no sample, with `label` a number per value."""

    name: str
    kind: Kind
    help: str
    value: Callable[[Mapping[str, Any]], float | Mapping[str, float] | None]
    label: str | None = None


def gauge(name: str, said: str, *keys: str) -> StatusMetric:
    """Return a gauge with the value at `keys` of the status."""
    return StatusMetric(name, "gauge", said, _value_at(*keys))


def counter(name: str, said: str, *keys: str, label: str | None = None) -> StatusMetric:
    """Return a counter with the value at `keys` of the status; with `label`, that is a mapping."""
    return StatusMetric(name, "counter", said, _value_at(*keys), label)


def _value_at(*keys: str) -> Callable[[Mapping[str, Any]], float | Mapping[str, float] | None]:
    """Return a function that reads the number, list length or mapping at `keys` of a status; None if absent."""

    def value(status: Mapping[str, Any]) -> float | Mapping[str, float] | None:
        found: Any = status
        for key in keys:
            found = None if found is None else found[key]
        if found is None or isinstance(found, Mapping):
            return found
        return float(len(found) if isinstance(found, list | tuple) else found)

    return value


class StatusCollector(Collector):
    """Collector of metrics from one status dictionary; `status` returns None while there is none."""

    def __init__(self, figures: tuple[StatusMetric, ...], status: Callable[[], Mapping[str, Any] | None]) -> None:
        self._figures, self._status = figures, status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        for figure in self._figures:
            value = None if status is None else figure.value(status)
            yield family(figure.kind, figure.name, figure.help, value, label=figure.label)


def family(
    kind: Kind, name: str, said: str, value: float | Mapping[str, float] | None, *, label: str | None = None
) -> Metric:
    """Build one metric: without a sample for None, with one sample per value of `label` for a mapping."""
    labels = [] if label is None else [label]
    of_kind = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
    made = of_kind(name, said, labels=labels)
    if isinstance(value, Mapping):
        for which, number in value.items():
            made.add_metric([which], number)
    elif value is not None:
        made.add_metric([], value)
    return made
