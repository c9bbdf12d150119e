"""Statements that PostgreSQL prepares once a connection, executed by libpq without psycopg's cursors.

A statement of one row takes 27 µs of processor time through psycopg's `execute` and 10 µs here, of which 5 are the
system's, and a lease has a dozen of them. Parameters and results are converted by psycopg.
"""

from __future__ import annotations

import contextlib
import select
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from sqlalchemy import Connection, Engine, event

if TYPE_CHECKING:
    from psycopg.pq.abc import PGresult

BEGIN: Final = "swarmproof_begin"
"""Execution option of a connection: the statement that its transactions begin with."""
WRITES: Final = "BEGIN"
READS: Final = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"

_SESSION: Final = "swarmproof_session"
_FAILED: Final = "swarmproof_statement"
"""Attribute of an error: the text of the statement that failed, which may have been sent before the one asked for."""

T = TypeVar("T")


class SentStatement:
    """A statement that is to be sent, or was, and then its result."""

    __slots__ = ("name", "parameters", "result", "text")

    def __init__(self, text: str, name: bytes, parameters: Sequence[Any]) -> None:
        self.text, self.name, self.parameters = text, name, parameters
        self.result: PGresult | None = None


class PreparedSession:
    """The prepared statements of one connection; raises psycopg's errors.

    Once prepared, statements wait until the result of one is asked for, and are sent together then: a thread that waits
    for the server gives the interpreter's lock away, and has to wait for that as well (0.8 to 1 ms for each answer, at
    capacity).
    """

    def __init__(self, driver: Any) -> None:
        from psycopg import errors  # noqa: PLC0415  (of an extra: SQLite does without)
        from psycopg.adapt import PyFormat, Transformer  # noqa: PLC0415
        from psycopg.pq import ExecStatus  # noqa: PLC0415

        self._server = driver.pgconn
        self._transformer = Transformer(driver)
        self._names: dict[str, bytes] = {}
        self._errors, self._text = errors, PyFormat.TEXT
        self._succeeded = frozenset({ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK})
        self._waiting: list[SentStatement] = []
        self._fence = 0

    @classmethod
    def of(cls, connection: Connection) -> PreparedSession:
        """Return the session of a connection's driver, which lives as long as that."""
        held: dict[Any, Any] = connection.connection.info
        session: PreparedSession | None = held.get(_SESSION)
        if session is None:
            session = held[_SESSION] = cls(connection.connection.dbapi_connection)
        return session

    def begin(self, text: str) -> None:
        """Begin a transaction by `text`; what waited in one that was rolled back is not sent."""
        self._waiting.clear()
        self._fence = 0
        self.send(text, ())

    def commit(self) -> None:
        """Commit; raises OperationalError also where the server rolls back instead, after a statement that failed."""
        sent = self.send("COMMIT", ())
        self.flush()
        if self._result(sent).command_status != b"COMMIT":
            raise self._errors.OperationalError("the transaction was rolled back")

    def send(self, text: str, parameters: Sequence[Any]) -> SentStatement:
        """Send a statement, whose parameters are $1 and so on, with the next one whose result is asked for."""
        if text not in self._names:  # which the server may refuse, and then whatever follows in the transaction
            self.flush()
        sent = SentStatement(text, self._prepared(text), self._dumped(parameters))
        self._waiting.append(sent)
        return sent

    def fence(self) -> None:
        """Have what waits fail as OperationalError: the statements after it are somebody else's."""
        self._fence = len(self._waiting)

    def rows(self, sent: SentStatement) -> list[tuple[Any, ...]]:
        """Return the rows of a statement."""
        result = self._result(sent)
        self._transformer.set_pgresult(result)
        found: list[tuple[Any, ...]] = self._transformer.load_rows(0, result.ntuples, tuple)
        return found

    def changed(self, sent: SentStatement) -> int:
        """Return how many rows a statement changed; -1 if it is none that could."""
        changed = self._result(sent).command_tuples
        return -1 if changed is None else changed

    def flush(self) -> None:
        """Execute what waits, in order; raises the error of the first that fails, after which none is executed."""
        sent, self._waiting = self._waiting, []
        fence, self._fence = self._fence, 0
        if len(sent) == 1:
            sent[0].result = self._server.exec_prepared(sent[0].name, sent[0].parameters)
        elif sent:
            self._execute_all(sent)
        for number, one in enumerate(sent):
            try:
                self._checked(one.result)
            except self._errors.Error as error:
                setattr(error, _FAILED, one.text)
                if number >= fence:
                    raise
                away = self._errors.OperationalError(f"a statement sent before failed: {error}")
                setattr(away, _FAILED, one.text)
                raise away from error

    def _execute_all(self, sent: Sequence[SentStatement]) -> None:
        self._server.enter_pipeline_mode()
        try:
            for one in sent:
                self._server.send_query_prepared(one.name, one.parameters)
            self._server.pipeline_sync()
            while self._server.flush():
                self._wait(select.POLLIN | select.POLLOUT)
            for one in sent:
                one.result = self._next_result()
                self._server.get_result()  # None, which ends it
            self._next_result()  # of the sync
        except BaseException:
            with contextlib.suppress(self._errors.Error):  # or it would hide the first
                self._server.exit_pipeline_mode()
            raise
        self._server.exit_pipeline_mode()

    def _next_result(self) -> PGresult | None:
        # `get_result` would keep the interpreter's lock while it waits.
        while self._server.is_busy():
            self._wait(select.POLLIN)
        return cast("PGresult | None", self._server.get_result())

    def _wait(self, events: int) -> None:
        poll = select.poll()
        poll.register(self._server.socket, events)
        poll.poll()
        self._server.consume_input()

    def _result(self, sent: SentStatement) -> PGresult:
        if sent.result is None:
            self.flush()
        return self._checked(sent.result)

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


def converting(connection: Connection, text: str | None, execute: Callable[[], T]) -> T:
    """Return what `execute` returns; raises SQLAlchemy's errors for psycopg's, and gives up a broken connection."""
    try:
        return execute()
    except connection.dialect.loaded_dbapi.Error as error:
        failed = getattr(error, _FAILED, text)
        connection._handle_dbapi_exception(error, failed, None, None, None)  # noqa: SLF001


def prepare(engine: Engine) -> None:
    """Begin the transactions of `engine` by the execution option BEGIN, where it is set, and end them by `COMMIT`."""

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        statement = connection.get_execution_options().get(BEGIN)
        if statement is not None:
            converting(connection, statement, lambda: PreparedSession.of(connection).begin(statement))

    @event.listens_for(engine, "commit")
    def _commit(connection: Connection) -> None:
        if BEGIN in connection.get_execution_options():
            converting(connection, "COMMIT", PreparedSession.of(connection).commit)

    @event.listens_for(engine, "before_cursor_execute")
    def _flush(connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        if BEGIN in connection.get_execution_options():
            converting(connection, statement, PreparedSession.of(connection).flush)
