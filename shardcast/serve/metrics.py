"""Prometheus metrics of a node, read from its state on each scrape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from shardcast.serve.state import ServedState
from shardcast.store.disk import disk_use

_SHOWN_DIGITS: Final = 16
"""Of a digest, as in logs."""


class DiskCollector(Collector):
    """Collects what the store in a folder takes of its disk."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def collect(self) -> Iterator[Metric]:
        bytes_by_kind = GaugeMetricFamily("shardcast_disk_bytes", "bytes of policies on disk", labels=["kind"])
        for kind, count in disk_use(self._root).items():
            bytes_by_kind.add_metric([kind], count)
        yield bytes_by_kind


def missing_chunks(served: ServedState) -> int | None:
    """Return how many chunks of the newest version are not here, None while no manifest says how many it has."""
    versions = served.store.versions()
    if not versions:
        return None
    newest = versions[-1].manifest
    return newest.full.chunk_count - served.store.chunks_held(newest.version)


class ContentsCollector(Collector):
    """Collects what a node keeps and serves of each content, by the begin of its digest."""

    def __init__(self, contents: Mapping[str, ServedState]) -> None:
        self._contents = contents

    def collect(self) -> Iterator[Metric]:
        on_disk = GaugeMetricFamily("shardcast_content_bytes", "bytes of a content on disk", labels=["content"])
        missing = GaugeMetricFamily(
            "shardcast_content_missing_chunks", "chunks of a content still to come", labels=["content"]
        )
        sent = CounterMetricFamily("shardcast_content_sent_bytes", "bytes served of a content", labels=["content"])
        for digest, content in self._contents.items():
            name = [digest[:_SHOWN_DIGITS]]
            on_disk.add_metric(name, sum(disk_use(content.store.root).values()))
            sent.add_metric(name, content.traffic.bytes_out)
            if (still_to_come := missing_chunks(content)) is not None:
                missing.add_metric(name, still_to_come)
        yield from (on_disk, missing, sent)


class ServedStateCollector(Collector):
    """Collects one node's state; register it in its own registry, so that nodes may share a process."""

    def __init__(self, served: ServedState) -> None:
        self._served = served

    def collect(self) -> Iterator[Metric]:
        served, traffic = self._served, self._served.traffic
        head = served.head()
        versions = served.store.versions()
        yield GaugeMetricFamily("shardcast_version", "newest version shown", -1 if head is None else head.version)
        yield GaugeMetricFamily("shardcast_versions_held", "versions whose manifest is held", len(versions))
        yield GaugeMetricFamily("shardcast_planned_bytes", "bytes of all held versions", served.store.planned_bytes)
        missing = missing_chunks(served) or 0
        yield GaugeMetricFamily("shardcast_missing_chunks", "chunks of the newest version still to come", missing)
        yield CounterMetricFamily("shardcast_received_bytes", "bytes received", served.bytes_in)
        fetched = served.fetched
        yield CounterMetricFamily("shardcast_fetched_bytes", "payload bytes fetched", fetched.bytes_in)
        yield CounterMetricFamily("shardcast_result_bytes", "what the fetched versions weigh", fetched.result_bytes)
        yield CounterMetricFamily("shardcast_wrong_chunks", "chunks that a delta did not give", fetched.wrong_chunks)
        yield CounterMetricFamily("shardcast_sent_bytes", "bytes served", traffic.bytes_out)
        yield CounterMetricFamily("shardcast_requests", "requests answered", traffic.requests)
        yield CounterMetricFamily("shardcast_refused_requests", "requests refused", traffic.refused)
        yield from DiskCollector(served.store.root).collect()
        yield from self._under_way()
        yield from self._sources()

    def _under_way(self) -> Iterator[Metric]:
        """Yield the progress of versions being fetched."""
        done, total, rate, sources, left = (
            GaugeMetricFamily(f"shardcast_fetch_{name}", meaning, labels=["version"])
            for name, meaning in (
                ("done_bytes", "bytes of a fetch under way that are here"),
                ("total_bytes", "bytes that a fetch under way takes in all"),
                ("bytes_per_second", "rate of a fetch under way since it began"),
                ("sources", "sources at which a fetch under way has requests"),
                ("seconds_left", "until a fetch under way is done, at its rate so far"),
            )
        )
        for version, progress in list(self._served.fetched.under_way.items()):
            done.add_metric([str(version)], progress.done_bytes)
            total.add_metric([str(version)], progress.total_bytes)
            rate.add_metric([str(version)], progress.bytes_per_s)
            sources.add_metric([str(version)], progress.sources)
            if progress.seconds_left is not None:
                left.add_metric([str(version)], progress.seconds_left)
        yield from (done, total, rate, sources, left)

    def _sources(self) -> Iterator[Metric]:
        rate = GaugeMetricFamily("shardcast_source_bytes_per_second", "measured bandwidth", labels=["source"])
        success = GaugeMetricFamily("shardcast_source_success", "measured share of successes", labels=["source"])
        quarantined = GaugeMetricFamily(
            "shardcast_source_quarantined", "1 while a source is not used, with the reason", labels=["source", "reason"]
        )
        for source in self._served.upstreams():
            rate.add_metric([source["url"]], source["bytes_per_s"] or 0.0)
            success.add_metric([source["url"]], source["success"])
            if source["state"] == "quarantined":
                quarantined.add_metric([source["url"], source["code"]], 1)
        yield from (rate, success, quarantined)
