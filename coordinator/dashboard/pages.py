"""The pages as HTML: one template each; the run's page is rendered at most once a second for all clients."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from coordinator.dashboard import formatting
from coordinator.dashboard.assets import Assets
from coordinator.dashboard.audits import AuditView
from coordinator.dashboard.figures import read_figures
from coordinator.dashboard.find import HOW, Found
from coordinator.dashboard.history import History
from coordinator.dashboard.nodes import NodeView
from coordinator.dashboard.series import plots_of
from coordinator.dashboard.submissions import SubmissionView
from coordinator.dashboard.visible import short, visible, with_code
from coordinator.dashboard.workers import ROWS, TODAY, TableQuery, WorkerTable, read_workers
from coordinator.run.health import State
from coordinator.run.service import Coordinator
from coordinator.storage.database import Connection
from coordinator.storage.steps import manifest_of
from shardcast.manifest import open_manifest

SNAPSHOT_SECONDS: Final = 1.0
PLOTS_SECONDS: Final = 10.0
"""Maximum age of the plots on live pages, whose data is larger than all other sections."""

SECTIONS: Final = ("state", "cards", "relays", "reasons", "queue", "latest", "packages", "withheld", "idle")
PLOTS: Final = "plots"


@dataclass(frozen=True, slots=True)
class RenderedRun:
    """The run's page as of `at` (monotonic): template values, rendered sections, and the default page."""

    at: float
    values: Mapping[str, Any]
    sections: Mapping[str, str]
    page: bytes


def export_run(coordinator: Coordinator, *, section: str) -> str:
    """Render the run's page into one static file without scripts, links and external files.

    `section` is trusted HTML, inserted below the run's figures.
    """
    return Pages(coordinator, Assets(), is_live=False).snapshot(section).page.decode()


class Pages:
    """Page renderer and cache of one process; thread-safe."""

    def __init__(self, coordinator: Coordinator, assets: Assets, *, is_live: bool = True) -> None:
        self._coordinator, self._assets, self._is_live = coordinator, assets, is_live
        self._history = History()
        self._lock = threading.Lock()
        self._snapshot: RenderedRun | None = None
        self._plots = (0.0, "")
        self._health_line = (-SNAPSHOT_SECONDS, Markup(), False)
        self._policy_bytes = 0

    def sections(self) -> dict[str, str]:
        """Return the live sections of the run's page as HTML, and the plots' data as JSON."""
        snapshot = self._newest()
        with self._lock:
            if not self._plots[1] or snapshot.at - self._plots[0] >= PLOTS_SECONDS:
                self._plots = (snapshot.at, snapshot.sections[PLOTS])
            return {**snapshot.sections, PLOTS: self._plots[1]}

    def run(self, query: TableQuery) -> bytes:
        """Render the run's page with the requested part of the table of workers."""
        snapshot = self._newest()
        if query == TableQuery():
            return snapshot.page
        with self._coordinator.home.database.read() as connection:
            table = self._workers(connection, query, snapshot.values["figures"].workers.at_work)
        return self._run_page(snapshot.values, snapshot.sections, table)

    def submission(self, view: SubmissionView) -> bytes:
        """Render a submission's page."""
        return self._render("submission.html.j2", view=view)

    def audit(self, view: AuditView) -> bytes:
        """Render the auditor's page."""
        return self._render("audit.html.j2", view=view)

    def node(self, view: NodeView) -> bytes:
        """Render a node's page."""
        return self._render("node.html.j2", view=view, now=time.time())

    def found(self, found: Found) -> bytes:
        """Render what a search has found."""
        return self._render("find.html.j2", found=found, how=HOW)

    def health_line(self) -> bytes:
        """Return the line on whether the run works, for pages that are open."""
        return self._health().encode()

    def missing(self, what: str) -> bytes:
        """Render an error page with the sentence `what`."""
        return self._render("missing.html.j2", what=what)

    def _newest(self) -> RenderedRun:
        """Return the page, at most SNAPSHOT_SECONDS old; one thread renders it for all waiting ones."""
        with self._lock:
            if self._snapshot is None or time.monotonic() - self._snapshot.at >= SNAPSHOT_SECONDS:
                self._snapshot = self.snapshot()
            return self._snapshot

    def snapshot(self, section: str = "") -> RenderedRun:
        """Render the run's page as it is now, with the trusted HTML `section` below its figures."""
        at, now = time.monotonic(), time.time()
        coordinator = self._coordinator
        with coordinator.home.database.read() as connection:
            figures = read_figures(connection, coordinator.relays, self._history, spec=coordinator.home.spec, now=now)
            table = self._workers(connection, TableQuery(), figures.workers.at_work)
        plots = plots_of(figures)
        values: dict[str, Any] = {"figures": figures, "plots": plots, "now": now, "section": Markup(section)}  # noqa: S704
        sections = {name: self._render(f"sections/{name}.html.j2", **values).decode() for name in SECTIONS}
        # Markup: JSON with HTML's special characters escaped.
        sections["health"] = self._health()
        sections[PLOTS] = htmlsafe_json_dumps(plots.data, separators=(",", ":"))
        return RenderedRun(at, values, sections, self._run_page(values, sections, table))

    def _run_page(self, values: Mapping[str, Any], sections: Mapping[str, str], table: WorkerTable) -> bytes:
        rendered = {name: Markup(text) for name, text in sections.items()}  # noqa: S704  (by the same templates)
        return self._render("run.html.j2", **values, sections=rendered, table=table)

    def _workers(self, connection: Connection, query: TableQuery, at_work: Collection[str]) -> WorkerTable:
        spec, now = self._coordinator.home.spec, time.time()
        best = self._coordinator.best_of_day(connection, now=now, most=ROWS) if query.sort == TODAY else ()
        return read_workers(connection, query, spec=spec, at_work=at_work, now=now, best=best)

    def _render(self, template: str, **values: Any) -> bytes:
        values |= {"health": self._health, "is_over": self._is_over, "needs": self._needs}
        return self._environment.get_template(template).render(**values).encode(errors="replace")

    def _health(self) -> Markup:
        """Return the line that each page has on whether the run works, at most SNAPSHOT_SECONDS old."""
        if time.monotonic() - self._health_line[0] >= SNAPSHOT_SECONDS:
            line = self._environment.get_template("health.html.j2")
            found = self._coordinator.health(now=time.time())
            shown = Markup(line.render(found=found))  # noqa: S704  (our own template)
            self._health_line = time.monotonic(), shown, found.state is State.OVER
        return self._health_line[1]

    def _is_over(self) -> bool:
        """Return what the line says of the same moment."""
        self._health()
        return self._health_line[2]

    def _needs(self) -> str:
        """Return what policies ask of a worker's machine, by the size of the first that this process has seen."""
        if not self._policy_bytes:
            with self._coordinator.home.database.read() as connection:
                envelope = manifest_of(connection)
            if envelope is None:
                return "memory and disk for the policy"
            manifest = open_manifest(envelope, run_id=None, publisher_key=None).manifest
            self._policy_bytes = manifest.full.payload_bytes
        return f"memory and disk for policies of {formatting.size(self._policy_bytes)}"

    @cached_property
    def _environment(self) -> Environment:
        environment = Environment(
            loader=PackageLoader("coordinator.dashboard", "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.filters |= {
            "number": formatting.number,
            "seconds": formatting.seconds,
            "ago": formatting.ago,
            "clock": formatting.clock,
            "iso": formatting.iso,
            "percent": formatting.percent,
            "reason": formatting.name_of,
            "visible": visible,
            "short": short,
            "with_code": with_code,
        }
        home = self._coordinator.home
        environment.globals |= {
            "asset": self._assets.url,
            "is_live": self._is_live,
            "stylesheet": Markup(self._assets.text("dashboard.css")),  # noqa: S704  (this package's own)
            "run_id": home.run_id,
            "run_name": visible(home.spec.name, most=100),
            "spec": home.spec,
            "joining": self._coordinator.joining,
            "endpoint": visible(next(iter(self._coordinator.descriptors.contacts.endpoints), "http://COORDINATOR")),
        }
        return environment
