"""What can go wrong on the operator's side. Refusals of a peer's request are `node.protocol.reasons.Refusal`.

CoordinatorError
├── BadConfiguration     a setting, a key or a folder is not what this run needs
│   ├── CannotListen     the coordinator's address is taken, or not this machine's
│   ├── Uncalibrated     the run would begin for ever without levels of honest work
│   └── UnfitModel       model.initial names no policy with which the run of this run.toml can begin
├── OtherRelease         the run is of another release, whose database or rules this one cannot read
│   └── OlderDatabase    its database is an earlier release's, which a coordinator of this one migrates
├── HistoryLost          the log in the database does not continue the one that was published
├── StateDiffers         the database or the blob store does not say what the log does
├── StorageFault         the database or the blob store does not hold what it must
│   └── DamagedBlob      a blob has other bytes than its name says
└── StoreAway            the blob store cannot be asked now; an OSError, so that whoever waits for a disk waits for it
    └── CorruptRead      it answered with other bytes than were asked for, and may send the right ones next time
"""

from __future__ import annotations

import errno


class CoordinatorError(Exception):
    """Base of the tree; `code` is stable across releases."""

    code = "coordinator_error"


class BadConfiguration(CoordinatorError):
    code = "bad_configuration"


class CannotListen(BadConfiguration):
    code = "cannot_bind"


class OtherRelease(CoordinatorError):
    code = "other_release"


class OlderDatabase(OtherRelease):
    code = "older_database"


class HistoryLost(CoordinatorError):
    code = "history_lost"


class StateDiffers(CoordinatorError):
    code = "state_differs"


class UnfitModel(BadConfiguration):
    code = "unfit_model"


class Uncalibrated(BadConfiguration):
    code = "uncalibrated"


class StorageFault(CoordinatorError):
    code = "storage_fault"


class DamagedBlob(StorageFault):
    code = "damaged_blob"


class StoreAway(CoordinatorError, OSError):
    code = "store_away"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.errno = errno.EIO


class CorruptRead(StoreAway):
    code = "corrupt_read"
