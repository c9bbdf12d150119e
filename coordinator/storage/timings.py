"""Metrics of database and blob store latency, which every role exports."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Final, Literal, ParamSpec, Self, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram

from node.runtime.metrics import WAIT_BUCKETS

P = ParamSpec("P")
T = TypeVar("T")
Transaction = Literal["read", "write"]
Operation = Literal["put", "get", "fetch", "look", "keep"]

_WAIT: Final = Histogram(
    "swarmproof_database_wait_seconds",
    "From asking for a transaction to its begin: in the queue, for a connection; to write to SQLite, for the lock too.",
    ("kind",),
    buckets=WAIT_BUCKETS,
    registry=None,
)
_TRANSACTION: Final = Histogram(
    "swarmproof_database_transaction_seconds",
    "From the begin of a transaction to the end of its commit or rollback.",
    ("kind",),
    buckets=WAIT_BUCKETS,
    registry=None,
)
_BLOB_SECONDS: Final = Histogram(
    "swarmproof_blob_seconds",
    "Time that the store of blobs took for one, or for those that were stored together.",
    ("operation",),
    buckets=WAIT_BUCKETS,
    registry=None,
)
_BLOB_BYTES: Final = Counter(
    "swarmproof_blob_bytes", "Bytes of blobs that this process wrote and read.", ("operation",), registry=None
)
_BLOB_ERRORS: Final = Counter(
    "swarmproof_blob_errors",
    "Blobs that could not be written or read, were missing or damaged.",
    ("operation",),
    registry=None,
)
_METRICS = {kind: (_WAIT.labels(kind), _TRANSACTION.labels(kind)) for kind in ("read", "write")}


def register_timings(registry: CollectorRegistry) -> None:
    """Register these metrics with `registry`."""
    for metric in (_WAIT, _TRANSACTION, _BLOB_SECONDS, _BLOB_BYTES, _BLOB_ERRORS):
        registry.register(metric)


class TransactionTimer:
    """Context manager that times one transaction; call `begun` as soon as it has begun.

    `asked_at` (`time.perf_counter`) is when each of those that share it asked for it, by default one just now.
    """

    __slots__ = ("_asked_at", "_begun", "_transaction_metric", "_wait_metric")

    def __init__(self, kind: Transaction, asked_at: Sequence[float] = ()) -> None:
        self._wait_metric, self._transaction_metric = _METRICS[kind]
        self._begun = 0.0
        self._asked_at = asked_at or (time.perf_counter(),)

    def begun(self) -> None:
        """Record the end of the wait for the transaction."""
        self._begun = time.perf_counter()
        for asked in self._asked_at:
            self._wait_metric.observe(self._begun - asked)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._begun:
            self._transaction_metric.observe(time.perf_counter() - self._begun)


def metered(operation: Operation) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a blob store's method: measure its time, errors and the `bytes` in its arguments, lists and result."""
    seconds, errors = _BLOB_SECONDS.labels(operation), _BLOB_ERRORS.labels(operation)
    moved = _BLOB_BYTES.labels(operation)

    def around(method: Callable[P, T]) -> Callable[P, T]:
        @wraps(method)
        def measured(*args: P.args, **kwargs: P.kwargs) -> T:
            started = time.perf_counter()
            try:
                result = method(*args, **kwargs)
            except Exception:
                errors.inc()
                raise
            finally:
                seconds.observe(time.perf_counter() - started)
            values = [one for value in (*args, result) for one in (value if isinstance(value, list) else [value])]
            moved.inc(sum(len(value) for value in values if isinstance(value, bytes)))
            return result

        return measured

    return around
