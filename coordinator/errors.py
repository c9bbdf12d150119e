"""What can go wrong on the operator's side. Refusals of a peer's request are `node.protocol.reasons.Refusal`.

CoordinatorError
├── BadConfiguration     a setting, a key or a folder is not what this run needs
└── StorageFault         the database or the blob store does not hold what it must
"""

from __future__ import annotations


class CoordinatorError(Exception):
    """Base of the tree; `code` is stable across releases."""

    code = "coordinator_error"


class BadConfiguration(CoordinatorError):
    code = "bad_configuration"


class StorageFault(CoordinatorError):
    code = "storage_fault"
