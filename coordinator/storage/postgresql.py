"""Statements that PostgreSQL prepares once a connection, executed by libpq without psycopg's cursors.

A statement of one row takes 27 µs of processor time through psycopg's `execute` and 10 µs here, of which 5 are the
system's, and a lease has a dozen of them. Parameters and results are converted by psycopg.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Connection, Engine, event

if TYPE_CHECKING:
    from psycopg.pq.abc import PGresult

BEGIN: Final = "swarmproof_begin"
"""Execution option of a connection: the statement, in bytes, that its transactions begin with."""
WRITES: Final = b"BEGIN"
READS: Final = b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"

_SESSION: Final = "swarmproof_session"


class PreparedSession:
    """The prepared statements of one connection; raises psycopg's errors."""

    def __init__(self, driver: Any) -> None:
        from psycopg import errors  # noqa: PLC0415  (of an extra: SQLite does without)
        from psycopg.adapt import PyFormat, Transformer  # noqa: PLC0415
        from psycopg.pq import ExecStatus  # noqa: PLC0415

        self._server = driver.pgconn
        self._transformer = Transformer(driver)
        self._names: dict[str, bytes] = {}
        self._errors, self._text = errors, PyFormat.TEXT
        self._succeeded = frozenset({ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK})

    @classmethod
    def of(cls, connection: Connection) -> PreparedSession:
        """Return the session of a connection's driver, which lives as long as that."""
        held: dict[Any, Any] = connection.connection.info
        session: PreparedSession | None = held.get(_SESSION)
        if session is None:
            session = held[_SESSION] = cls(connection.connection.dbapi_connection)
        return session

    def rows(self, text: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Execute a statement, whose parameters are $1 and so on, and return its rows."""
        result = self._execute(text, parameters)
        self._transformer.set_pgresult(result)
        found: list[tuple[Any, ...]] = self._transformer.load_rows(0, result.ntuples, tuple)
        return found

    def run(self, text: str, parameters: Sequence[Any]) -> int:
        """Execute a statement and return how many rows it changed; -1 if it is none that could."""
        changed = self._execute(text, parameters).command_tuples
        return -1 if changed is None else changed

    def run_all(self, statements: Sequence[tuple[str, Sequence[Any]]]) -> None:
        """Execute statements without rows, all of which are sent before the first is waited for."""
        sent = [(self._prepared(text), self._dumped(parameters)) for text, parameters in statements]
        self._server.enter_pipeline_mode()
        try:
            for name, values in sent:
                self._server.send_query_prepared(name, values)
            self._server.pipeline_sync()
            results = []
            for _ in sent:
                results.append(self._server.get_result())
                self._server.get_result()  # None, which ends it
            self._server.get_result()  # of the sync
        finally:
            self._server.exit_pipeline_mode()
        for result in results:
            self._checked(result)

    def command(self, text: bytes) -> None:
        """Execute a statement without parameters and rows that the server need not prepare."""
        self._checked(self._server.exec_(text))

    def _execute(self, text: str, parameters: Sequence[Any]) -> PGresult:
        return self._checked(self._server.exec_prepared(self._prepared(text), self._dumped(parameters)))

    def _prepared(self, text: str) -> bytes:
        name = self._names.get(text)
        if name is None:
            name = f"swarmproof_{len(self._names)}".encode()
            self._checked(self._server.prepare(name, text.encode()))
            self._names[text] = name
        return name

    def _dumped(self, parameters: Sequence[Any]) -> Sequence[Any]:
        # As text, whose type the server knows: a number in binary would have to be of just the column's width.
        return self._transformer.dump_sequence(parameters, [self._text] * len(parameters))

    def _checked(self, result: PGresult | None) -> PGresult:
        if result is None:
            raise self._errors.OperationalError("the connection broke")
        if result.status in self._succeeded:
            return result
        error = self._errors.error_from_result(result)
        if error.diag.sqlstate:
            raise error
        raise self._errors.OperationalError(str(error))  # the connection broke, of which no server tells


def prepare(engine: Engine) -> None:
    """Begin the transactions of `engine` by the execution option BEGIN, where it is set."""

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        statement = connection.get_execution_options().get(BEGIN)
        if statement is None:
            return
        try:
            PreparedSession.of(connection).command(statement)
        except connection.dialect.loaded_dbapi.Error as error:
            connection._handle_dbapi_exception(error, statement.decode(), None, None, None)  # noqa: SLF001
