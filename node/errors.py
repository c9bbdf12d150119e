"""What can go wrong on a participant's machine, and whose turn it is.

NodeError
├── IdentityError          the key file is missing, damaged, or open to other users
├── ConfigError            a flag, an environment variable or a key of the TOML file is wrong
├── StateError             the state folder is damaged, in use, or another run's
├── EngineFailed           the engine could not load a policy or generate
├── DatasetFault           a dataset's file is missing, damaged, or not the run's
├── EnvironmentFault       an environment cannot be used on this machine, or for this run
├── VerifierFailed         a verification could not decide, for reasons of its own
├── NetworkDown            the peer-to-peer network is not up, or nobody there answered
└── CoordinatorFault       a call to the coordinator did not succeed
    ├── Unavailable        it cannot be reached, or does not answer in time
    │   └── StoreUnavailable  the run's object store, rather: it cannot be reached, or takes nothing
    ├── Refused            it said no, with a stable code
    └── BadReply           it sent what no honest coordinator sends

Refusals by reason of the protocol are `node.protocol.reasons.Refusal`; broadcast errors are
`shardcast.errors`. Every error carries `code`, a stable identifier, and a sentence that says what to do.
"""

from __future__ import annotations


class NodeError(Exception):
    """Base of the tree; `code` is stable across releases."""

    code = "node_error"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class IdentityError(NodeError):
    code = "identity_error"


class ConfigError(NodeError):
    code = "config_error"


class StateError(NodeError):
    code = "state_error"


class EngineFailed(NodeError):
    code = "engine_failed"


class DatasetFault(NodeError):
    code = "dataset_fault"


class NetworkDown(NodeError):
    code = "network_down"


class CoordinatorFault(NodeError):
    """`retry_after_seconds` is how long the coordinator asked to be left alone, if it did."""

    code = "coordinator_fault"

    def __init__(self, message: str, *, code: str | None = None, retry_after_seconds: float | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_seconds = retry_after_seconds


class Unavailable(CoordinatorFault):
    code = "unavailable"


class StoreUnavailable(Unavailable):
    code = "store_away"


class Refused(CoordinatorFault):
    """The coordinator's no: HTTP `status`, `code` and its sentence.

    `server_time` is its clock in Unix seconds, `submission` the earlier submission of which this is a
    duplicate; each None unless it told.
    """

    code = "refused"

    def __init__(
        self,
        message: str,
        *,
        code: str,
        status: int,
        server_time: int | None = None,
        submission: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message, code=code, retry_after_seconds=retry_after_seconds)
        self.status = status
        self.server_time = server_time
        self.submission = submission


class BadReply(CoordinatorFault):
    code = "bad_reply"
